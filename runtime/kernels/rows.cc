#include "runtime/kernels/rows.h"

#include <algorithm>
#include <type_traits>

#include "runtime/core/finite.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/parallel.h"

namespace cairn::kernels {

template <typename T>
void to_floats(const T* from, float* to, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    parallel_elements(count, [=](int64_t i, int64_t end) { std::copy(from + i, from + end, to + i); });
  } else {
    cast(from, to, count);
  }
}
template <typename T>
void from_floats(const float* from, T* to, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    to_floats(from, to, count);
  } else {
    cast(from, to, count);
  }
}

template <typename T>
void copy(const T* from, T* to, int64_t count) {
  std::copy_n(from, count, to);
}
void copy_ints(const int32_t* from, int32_t* to, int64_t count) { std::copy_n(from, count, to); }
void copy_floats(const float* from, float* to, int64_t count) { std::copy_n(from, count, to); }

template <typename T>
void clear(T* x, int64_t count) {
  std::fill_n(x, count, T{});
}
void clear_floats(float* x, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { std::fill(x + i, x + end, 0.0f); });
}

void clear_floats_of_runs(float* x, const ElemRun* runs, int64_t run_count) {
  for (int64_t run = 0; run < run_count; ++run) clear_floats(x + runs[run].begin, runs[run].count);
}

template <typename T>
void copy_rows(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * from_stride, width, to + r * to_stride);
}

template <typename T>
void round_rows(const float* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) from_floats(from + r * from_stride, to + r * to_stride, width);
}

template <typename T>
void scatter_rows(const T* from, int64_t from_stride, const int64_t* places, int64_t rows, int64_t width, T* to) {
  for (int64_t r = 0; r < rows; ++r) {
    if (places[r] >= 0) std::copy_n(from + r * from_stride, width, to + places[r] * width);
  }
}

void gather_floats(const float* from, const int32_t* places, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[places[i]];
}
void scatter_floats(const float* from, const int32_t* places, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[places[i]] = from[i];
}

template <typename T>
void rows_to_host(const T* x, int64_t stride, int64_t rows, int64_t width, std::span<float> host) {
  for (int64_t r = 0; r < rows; ++r) to_floats(x + r * stride, host.data() + r * width, width);
}
void floats_to_host(const float* x, std::span<float> host) { std::copy_n(x, host.size(), host.data()); }
void ints_to_host(const int32_t* x, std::span<int32_t> host) { std::copy_n(x, host.size(), host.data()); }
void note_not_finite(const float* x, int64_t count, bool first, double* found) {
  if (first) *found = 0;
  if (count_not_finite({x, static_cast<size_t>(count)}) > 0) *found = 1;
}

#define RT_INSTANTIATE(T)                                                                 \
  template void copy<T>(const T*, T*, int64_t);                                           \
  template void clear<T>(T*, int64_t);                                                    \
  template void copy_rows<T>(const T*, int64_t, T*, int64_t, int64_t, int64_t);           \
  template void round_rows<T>(const float*, int64_t, T*, int64_t, int64_t, int64_t);      \
  template void scatter_rows<T>(const T*, int64_t, const int64_t*, int64_t, int64_t, T*); \
  template void to_floats<T>(const T*, float*, int64_t);                                  \
  template void from_floats<T>(const float*, T*, int64_t);                                \
  template void rows_to_host<T>(const T*, int64_t, int64_t, int64_t, std::span<float>)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels
