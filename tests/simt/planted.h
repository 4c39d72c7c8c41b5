#pragma once
// Kernels with faults that are switched on at run time: what the builds must see, each in its way.

#include <cstdint>

#include "runtime/kernels/cuda/queue.h"

namespace cairn::simt::planted {

enum class Bug {
  kNone,
  kSumReadEarly,       // no barrier before the sum of the block is read
  kRoomWrittenEarly,   // no barrier before the room of the sum is written again
  kBehindTheRow,       // a store one pack behind the row
  kMaximaReadEarly,    // no barrier behind the maxima of the warps
  kTargetOverwritten,  // the target's logit is read when another thread may have overwritten it
  kTailTooLong,        // a loop over the tail that does not stop at the end of the arrays
  kBlocksMeet,         // blocks write into each other's place
  kSharedUnwritten,    // shared memory that nobody wrote is read
  kCopyReadEarly,      // a copy is read before it was waited for
  kCopySeenEarly,      // no barrier between the wait for a copy and its reading by others
  kCopyBegunEarly,     // no barrier before a copy begins to where others still read
};

/// y [rows, width] = x less the row's mean, times its largest element; width a multiple of 4. One block a row at a
/// time.
void centre_rows(kernels::cuda::Queue& on, const float* x, float* y, int64_t rows, int64_t width, Bug bug);
/// loss[r] = log of the row's sum of exponentials less logit[target[r]]; the row becomes its softmax.
void softmax_rows(kernels::cuda::Queue& on, float* logits, const int32_t* targets, float* loss, int64_t rows,
                  int64_t width, Bug bug);
/// w += rate * g, four at a time.
void add_to(kernels::cuda::Queue& on, float* w, const float* g, float rate, int64_t count, Bug bug);
/// sums[i] = the sum over tiles of 384 floats of the i-th one from the end; tiles are copied while others are added.
void add_tiles(kernels::cuda::Queue& on, const float* from, float* sums, int64_t tiles, Bug bug);
/// to[i] = from[i], lanes `stride` elements apart: 1 is as it should be.
void copy_strided(kernels::cuda::Queue& on, const float* from, float* to, int64_t count, int64_t stride);
/// to [32, 32] = its transpose through shared memory whose rows are `pitch` floats apart: 33 is as it should be.
void transpose(kernels::cuda::Queue& on, const float* from, float* to, int64_t pitch);

}  // namespace cairn::simt::planted
