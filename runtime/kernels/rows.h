#pragma once
// Copies, rows found by a list of places, numbers for the host. T is float, bf16 or f16, or of what else an array is.

#include <cstdint>
#include <span>

#include "runtime/core/dtype.h"
#include "runtime/kernels/views.h"

namespace cairn::kernels {

/// The arrays do not overlap.
template <typename T>
void copy(const T* from, T* to, int64_t count);
void copy_ints(const int32_t* from, int32_t* to, int64_t count);
void copy_floats(const float* from, float* to, int64_t count);
/// Zeros; clear_floats() by all threads, since one alone does not fill the memory's bandwidth.
template <typename T>
void clear(T* x, int64_t count);
void clear_floats(float* x, int64_t count);
/// The same of some runs of x.
void clear_floats_of_runs(float* x, const ElemRun* runs, int64_t run_count);
/// Rows of `width` elements between arrays of other strides.
template <typename T>
void copy_rows(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t width);
/// The same from floats, rounded.
template <typename T>
void round_rows(const float* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t width);
/// Row r goes to row places[r] of `to`, whose rows are `width` long; nowhere if that is below 0.
template <typename T>
void scatter_rows(const T* from, int64_t from_stride, const int64_t* places, int64_t rows, int64_t width, T* to);
template <typename T>
void to_floats(const T* from, float* to, int64_t count);
template <typename T>
void from_floats(const float* from, T* to, int64_t count);  // rounded

/// to[i] = from[places[i]], and the other way.
void gather_floats(const float* from, const int32_t* places, int64_t count, float* to);
void scatter_floats(const float* from, const int32_t* places, int64_t count, float* to);

// --- for the host, which reads them when the stream is settled
// ---------------------------------------------------------

/// host [rows, width] as floats, from rows `stride` elements apart.
template <typename T>
void rows_to_host(const T* x, int64_t stride, int64_t rows, int64_t width, std::span<float> host);
void floats_to_host(const float* x, std::span<float> host);
void ints_to_host(const int32_t* x, std::span<int32_t> host);
/// found[0] becomes 1 where an element of x is NaN or infinite; else 0 if `first`, and stays as it is if not.
void note_not_finite(const float* x, int64_t count, bool first, double* found);

}  // namespace cairn::kernels
