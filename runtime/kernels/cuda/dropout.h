#pragma once
// Dropout for CUDA: dropout() of runtime/kernels/dropout.h, with the CPU's masks bit for bit.

#include <cstdint>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/dropout.h"

namespace cairn::kernels::cuda {

template <typename T>
void dropout(Queue& on, const T* x, T* out, int64_t rows, int64_t width, int64_t first_row, const TokenRuns& tokens,
             int64_t samples, const uint64_t* sample_keys, uint64_t site, DropoutRate rate);

}  // namespace cairn::kernels::cuda
