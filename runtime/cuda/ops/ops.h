#pragma once
// The kernels for CUDA (runtime/kernels/cuda) as the tables have them by which layers and the optimizer call
// (runtime/kernels/ops.h, state_ops.h). Kernels that are missing are in the tables too: they make the stream a failed
// one, with their name.

#include "runtime/cuda/ops/missing.h"
#include "runtime/device/machine.h"
#include "runtime/kernels/ops.h"
#include "runtime/kernels/state_ops.h"

namespace cairn::cuda {

/// T: float, bf16, f16.
template <typename T>
const kernels::Ops<T>& ops();
const kernels::StateOps& state_ops();

/// Streams of CUDA devices have these kernels from now on.
void serve_ops();

/// Bytes that a stream needs for kernels (CudaStream::use_scratch()) of so many rows, the widest of `width`, whose sums
/// over rows are cut into `parts` (kernels::TreeParts).
int64_t scratch_bytes(int64_t rows, int64_t width, int64_t parts = 1);
/// The same for kernels over training state: runs of matrices with `elems` elements and `cols` columns in all, whose
/// squares are added up.
int64_t state_scratch_bytes(int64_t elems, int64_t cols);
/// Both for all kernels of that work.
int64_t scratch_bytes(const WorkShapes& work);

}  // namespace cairn::cuda
