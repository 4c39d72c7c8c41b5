#pragma once
// Copies and rows found by a list of places, for CUDA: those of runtime/kernels/rows.h. Copies of whole arrays and
// zeros are the runtime's own (cudaMemcpyAsync, cudaMemsetAsync).

#include <cstdint>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/views.h"

namespace cairn::kernels::cuda {

template <typename T>
void copy_rows(Queue& on, const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t width);
template <typename T>
void round_rows(Queue& on, const float* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows,
                int64_t width);
template <typename T>
void scatter_rows(Queue& on, const T* from, int64_t from_stride, const int64_t* places, int64_t rows, int64_t width,
                  T* to);
template <typename T>
void to_floats(Queue& on, const T* from, float* to, int64_t count);
template <typename T>
void from_floats(Queue& on, const float* from, T* to, int64_t count);
/// to [rows, width] = from, rows `stride` elements apart, as floats.
template <typename T>
void rows_to_floats(Queue& on, const T* from, int64_t stride, int64_t rows, int64_t width, float* to);
void gather_floats(Queue& on, const float* from, const int32_t* places, int64_t count, float* to);
/// No two places are the same.
void scatter_floats(Queue& on, const float* from, const int32_t* places, int64_t count, float* to);

/// Zeros in runs of x; runtime/kernels/rows.h. The runs lie on the device.
void clear_floats_of_runs(Queue& on, float* x, const ElemRun* runs, int64_t run_count);

}  // namespace cairn::kernels::cuda
