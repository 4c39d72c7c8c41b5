#include "runtime/kernels/embedding.h"

#include <cstring>

#include "runtime/core/dtype.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

template <typename T>
RT_CLONES void accumulate_leaf(const T* from, float* to, int64_t n, float factor = 1) {
  for (int64_t i = 0; i < n; ++i) to[i] += factor * load_f32(from[i]);
}

template <typename T>
RT_CLONES void add_row_leaf(T* x, const T* row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&x[i], load_f32(x[i]) + load_f32(row[i]));
}

}  // namespace

template <typename T>
void embedding_forward(const int32_t* ids, int64_t rows, const T* table, int64_t first, int64_t rows_in_table,
                       int64_t width, T* out) {
  const size_t row_bytes = static_cast<size_t>(width) * sizeof(T);
  parallel_ranges(rows, 1, width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      const int64_t row = ids[r] - first;
      if (row >= 0 && row < rows_in_table) {
        std::memcpy(out + r * width, table + row * width, row_bytes);
      } else {
        std::memset(static_cast<void*>(out + r * width), 0, row_bytes);
      }
    }
  });
}

template <typename T>
void embedding_backward(const int32_t* ids, int64_t rows, const T* dout, int64_t first, int64_t rows_in_table,
                        int64_t width, float* dtable, float factor) {
  // Threads own columns, so each element of dtable sees the rows in their order.
  parallel_ranges(width, 64, rows, [=](int64_t c, int64_t end) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = ids[r] - first;
      if (row < 0 || row >= rows_in_table) continue;
      accumulate_leaf(dout + r * width + c, dtable + row * width + c, end - c, factor);
    }
  });
}

template <typename T>
void positions_forward(T* x, const T* table, int64_t rows, int64_t first_row, const TokenRuns& tokens, int64_t width) {
  parallel_ranges(rows, 1, width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r)
      add_row_leaf(x + r * width, table + tokens.position((first_row + r) % tokens.count) * width, width);
  });
}

template <typename T>
void positions_backward(const T* dout, float* dtable, int64_t rows, int64_t first_row, const TokenRuns& tokens,
                        int64_t width) {
  parallel_ranges(width, 64, rows, [=](int64_t c, int64_t end) {
    for (int64_t r = 0; r < rows; ++r) {
      accumulate_leaf(dout + r * width + c, dtable + tokens.position((first_row + r) % tokens.count) * width + c,
                      end - c);
    }
  });
}

#define RT_INSTANTIATE(T)                                                                                           \
  template void embedding_forward<T>(const int32_t*, int64_t, const T*, int64_t, int64_t, int64_t, T*);             \
  template void embedding_backward<T>(const int32_t*, int64_t, const T*, int64_t, int64_t, int64_t, float*, float); \
  template void positions_forward<T>(T*, const T*, int64_t, int64_t, const TokenRuns&, int64_t);                    \
  template void positions_backward<T>(const T*, float*, int64_t, int64_t, const TokenRuns&, int64_t)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels
