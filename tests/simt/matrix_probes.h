#pragma once
// Kernels of one warp, by which a test sees what matrix_units.h does. Matrices are row-major.

#include "runtime/core/dtype.h"
#include "runtime/kernels/cuda/queue.h"

namespace cairn::simt::probes {

/// out [16, 8] = sums + left [16, 16] times right [16, 8]; T is bf16 or f16.
template <typename T>
void multiply(kernels::cuda::Queue& on, const T* left, const T* right, const float* sums, float* out);
/// out [4, 8, 8] = `from`, through shared memory and the words of lanes; `skew` elements off in shared memory.
void load(kernels::cuda::Queue& on, const bf16* from, bf16* out, bool transposed, int skew);
/// out [160] = `from` where `count` says, the first 128 with 16 bytes at once, the others with 4; else 0. `early`: the
/// first ones are read before they were waited for. Not `waits`: nor are the others.
void copy(kernels::cuda::Queue& on, const float* from, float* out, int count, bool early, bool waits);

}  // namespace cairn::simt::probes
