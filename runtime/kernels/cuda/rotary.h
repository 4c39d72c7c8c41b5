#pragma once
// Rotary positions for CUDA: rotary() of runtime/kernels/elementwise.h. The table is computed on the host, in double
// (rotary_table()), and uploaded.

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/elementwise.h"

namespace cairn::kernels::cuda {

template <typename T>
void rotary(Queue& on, const RotaryDims& dims, T* x, const float* table, bool inverse);

}  // namespace cairn::kernels::cuda
