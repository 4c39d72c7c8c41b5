#pragma once
// RMSNorm over channels of which each rank has a part, for CUDA: row_dots(), whole_norm_forward() and
// whole_norm_backward() of runtime/kernels/norm.h.

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/sums.h"
#include "runtime/kernels/norm.h"

namespace cairn::kernels::cuda {

template <typename T>
void row_dots(Queue& on, const RowDots& d, const Rows<const T>& a, const Rows<const T>& b, const T* weight,
              float offset, float* sums);
template <typename T>
void whole_norm_forward(Queue& on, const WholeNorm& d, const Rows<const T>& x, const T* weight, const float* squares,
                        const Rows<T>& y);
/// Scratch: bias_partials() of the rows, floats.
template <typename T>
void whole_norm_backward(Queue& on, const WholeNorm& d, const Rows<const T>& dy, const Rows<const T>& x,
                         const T* weight, const float* squares, const float* dots, const Rows<T>& dx,
                         const NormGradients& to);

}  // namespace cairn::kernels::cuda
