#pragma once
// Table look-ups for a vocabulary cut into ranges.

#include <cstdint>

namespace cairn::kernels {

/// out[r, :] = table[ids[r] - first, :] if first <= ids[r] < first + rows_in_table, else 0.
template <typename T>
void embedding_forward(const int32_t* ids, int64_t rows, const T* table, int64_t first, int64_t rows_in_table,
                       int64_t width, T* out);
/// dtable[ids[r] - first, :] += factor * dout[r, :] for ids in the range, in row order (deterministic).
template <typename T>
void embedding_backward(const int32_t* ids, int64_t rows, const T* dout, int64_t first, int64_t rows_in_table,
                        int64_t width, float* dtable, float factor = 1);

/// x[r, :] += table[(first_row + r) % tokens, :]; backward adds dout rows into dtable.
template <typename T>
void positions_forward(T* x, const T* table, int64_t rows, int64_t first_row, int64_t tokens, int64_t width);
template <typename T>
void positions_backward(const T* dout, float* dtable, int64_t rows, int64_t first_row, int64_t tokens, int64_t width);

}  // namespace cairn::kernels
