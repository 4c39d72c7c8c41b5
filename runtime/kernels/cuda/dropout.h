#pragma once
// Dropout for CUDA: dropout() of runtime/kernels/dropout.h, with the CPU's masks bit for bit.

#include <cstdint>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/dropout.h"

namespace cairn::kernels::cuda {

template <typename T>
void dropout(Queue& on, const DropoutRows& of, const T* x, T* out);

}  // namespace cairn::kernels::cuda
