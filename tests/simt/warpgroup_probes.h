#pragma once
// A kernel of a block by which a test sees what warpgroup_units.h does, and what the executor says of its faults.

#include "runtime/core/dtype.h"
#include "runtime/kernels/cuda/queue.h"

namespace cairn::simt::probes {

enum class Fault {
  kNone,
  kCopyNotAwaited,     // one warp multiplies before it has waited for the copies
  kProductNotAwaited,  // sums are used before the product was waited for
  kProductLeft,        // threads end with a product under way
  kNoFence,
  kSumsTouched,      // sums are changed while the product is under way
  kOverwritten,      // the right panel is copied to again while the product is under way
  kNotPublished,     // barriers of which the copies do not know
  kTooFewBytes,      // the barrier expects less than comes
  kNoSwizzle,        // in the descriptor
  kBesideAtom,       // a panel at no multiple of 1024 bytes
  kOtherOperands,    // one warp names other panels than the others
  kCopyLeft,         // the block ends with a copy under way
  kFloatNotAwaited,  // a kept float is read before its barrier was waited for
};

/// out [64, columns] = left [64, 64] times the transpose of right [columns, 64]; or, `by_rows`, times right
/// [64, columns], the left matrix in registers. T is bf16 or f16, columns 64 or 128. Adds shift[0].
template <typename T>
void multiply_panels(kernels::cuda::Queue& on, const T* left, const T* right, const float* shift, float* out,
                     int columns, bool by_rows, Fault fault);

}  // namespace cairn::simt::probes
