#include "runtime/kernels/embedding.h"

#include <algorithm>
#include <cstring>

#include "runtime/core/check.h"
#include "runtime/core/dtype.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/scratch.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

constexpr int64_t kMostLevels = 16;  // of a tree of parts

template <typename T>
RT_INLINE void accumulate_leaf_body(const T* from, float* to, int64_t n, float factor = 1) {
  for (int64_t i = 0; i < n; ++i) to[i] += factor * load_f32(from[i]);
}
RT_CLONES(accumulate_leaf)

template <typename T>
RT_INLINE void add_row_leaf_body(T* x, const T* row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&x[i], load_f32(x[i]) + load_f32(row[i]));
}
RT_CLONES(add_row_leaf)

/// Rows of dout that one row of a table gets, ascending.
struct RowsOfId {
  const int32_t* begin;
  const int32_t* end;
};

/// sum [n], zeros, += the rows among [first_row, first_row + rows), by the tree of the `parts` that these are cut into.
/// Behind it is memory for a sum of each level.
template <typename T>
void add_tree(RowsOfId of, int64_t first_row, int64_t rows, int64_t parts, const T* dout, int64_t stride, float* sum,
              int64_t n, float factor) {
  if (parts == 1 || of.end - of.begin == 1) {
    for (const int32_t* r = of.begin; r < of.end; ++r) accumulate_leaf(dout + *r * stride, sum, n, factor);
    return;
  }
  const int64_t half = rows / 2;
  const int32_t* const middle = std::lower_bound(of.begin, of.end, first_row + half);
  if (middle > of.begin) add_tree({of.begin, middle}, first_row, half, parts / 2, dout, stride, sum, n, factor);
  if (middle == of.end) return;
  if (middle == of.begin) return add_tree(of, first_row + half, half, parts / 2, dout, stride, sum, n, factor);
  float* const right = sum + n;
  std::fill_n(right, n, 0.0f);
  add_tree({middle, of.end}, first_row + half, half, parts / 2, dout, stride, right, n, factor);
  accumulate_leaf(right, sum, n);
}

int64_t position_of(const RowPositions& positions, int64_t row) {
  const int32_t* const at = positions.at.address();
  return at != nullptr ? at[row] : positions.tokens.place(positions.first_row + row, positions.samples).position;
}

}  // namespace

template <typename T>
void embedding_forward(const int32_t* ids, int64_t rows, const TableRange& of, const T* table, T* out) {
  const int64_t first = of.first, rows_in_table = of.count, width = of.width;
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
void embedding_backward(const int32_t* ids, int64_t rows, const TableRange& of, const T* dout, float* dtable,
                        float factor) {
  const int64_t first = of.first, rows_in_table = of.count, width = of.width;
  // Threads own columns, so each element of dtable sees the rows in their order.
  parallel_ranges(width, 64, rows, [=](int64_t c, int64_t end) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = ids[r] - first;
      if (row < 0 || row >= rows_in_table) continue;
      accumulate_leaf(dout + r * width + c, dtable + row * width + c, end - c, factor);
    }
  });
}

ScratchElems embedding_backward_parts_scratch(int64_t rows, int64_t width) {
  return {.own = rows, .task = (kMostLevels + 1) * width};
}

template <typename T>
void embedding_backward_parts(const int32_t* ids, int64_t rows, int64_t parts, const TableRange& of, const T* dout,
                              float* dtable, float factor) {
  const int64_t first = of.first, rows_in_table = of.count, width = of.width;
  RT_CHECK(rows % parts == 0, "{} rows in {} parts", rows, parts);
  RT_CHECK(parts < int64_t{1} << kMostLevels, "a tree of {} parts", parts);
  const Scratch of_rows(rows, (kMostLevels + 1) * width);
  auto* const by_id = reinterpret_cast<int32_t*>(of_rows.floats());  // rows, those of one id together
  int32_t* end_of_rows = by_id;
  for (int64_t r = 0; r < rows; ++r) {
    if (ids[r] >= first && ids[r] < first + rows_in_table) *end_of_rows++ = static_cast<int32_t>(r);
  }
  std::sort(by_id, end_of_rows, [&](int32_t a, int32_t b) { return ids[a] != ids[b] ? ids[a] < ids[b] : a < b; });
  const int32_t *const begin = by_id, *const end = end_of_rows;
  parallel_ranges(width, 64, rows, [=](int64_t c, int64_t c_end) {
    const int64_t n = c_end - c;
    const Scratch scratch((kMostLevels + 1) * n);
    float* const sum = scratch.floats();
    for (const int32_t* r = begin; r < end;) {
      const int32_t id = ids[*r];
      const int32_t* const next = std::find_if(r, end, [&](int32_t row) { return ids[row] != id; });
      std::fill_n(sum, n, 0.0f);
      add_tree(RowsOfId{r, next}, 0, rows, parts, dout + c, width, sum, n, factor);
      accumulate_leaf(sum, dtable + (id - first) * width + c, n);
      r = next;
    }
  });
}

template <typename T>
void positions_forward(T* x, const T* table, const RowPositions& positions, int64_t rows, int64_t width) {
  parallel_ranges(rows, 1, width, [&](int64_t r, int64_t end) {
    for (; r < end; ++r) add_row_leaf(x + r * width, table + position_of(positions, r) * width, width);
  });
}

template <typename T>
void positions_backward(const T* dout, float* dtable, const RowPositions& positions, int64_t rows, int64_t width) {
  parallel_ranges(width, 64, rows, [&](int64_t c, int64_t end) {
    for (int64_t r = 0; r < rows; ++r) {
      accumulate_leaf(dout + r * width + c, dtable + position_of(positions, r) * width + c, end - c);
    }
  });
}

template <typename T>
void positions_look_up(const T* table, const RowPositions& positions, int64_t rows, int64_t width, T* out) {
  parallel_ranges(rows, 1, width, [&](int64_t r, int64_t end) {
    for (; r < end; ++r) std::copy_n(table + position_of(positions, r) * width, width, out + r * width);
  });
}

#define RT_INSTANTIATE(T)                                                                                          \
  template void embedding_forward<T>(const int32_t*, int64_t, const TableRange&, const T*, T*);                    \
  template void embedding_backward<T>(const int32_t*, int64_t, const TableRange&, const T*, float*, float);        \
  template void embedding_backward_parts<T>(const int32_t*, int64_t, int64_t, const TableRange&, const T*, float*, \
                                            float);                                                                \
  template void positions_forward<T>(T*, const T*, const RowPositions&, int64_t, int64_t);                         \
  template void positions_backward<T>(const T*, float*, const RowPositions&, int64_t, int64_t);                    \
  template void positions_look_up<T>(const T*, const RowPositions&, int64_t, int64_t, T*)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels
