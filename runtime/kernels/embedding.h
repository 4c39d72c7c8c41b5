#pragma once
// Table look-ups for a vocabulary cut into ranges.

#include <cstdint>

#include "runtime/core/token_runs.h"

namespace cairn::kernels {

/// out[r, :] = table[ids[r] - first, :] if first <= ids[r] < first + rows_in_table, else 0.
template <typename T>
void embedding_forward(const int32_t* ids, int64_t rows, const T* table, int64_t first, int64_t rows_in_table,
                       int64_t width, T* out);
/// dtable[ids[r] - first, :] += factor * dout[r, :] for ids in the range, in row order (deterministic).
template <typename T>
void embedding_backward(const int32_t* ids, int64_t rows, const T* dout, int64_t first, int64_t rows_in_table,
                        int64_t width, float* dtable, float factor = 1);
/// The same with the rows of each id summed in `parts` equal runs of rows, a power of two, by a balanced tree; so calls
/// with a subtree's rows alone give sums whose tree has the same bits. dtable was zeros.
template <typename T>
void embedding_backward_parts(const int32_t* ids, int64_t rows, int64_t parts, const T* dout, int64_t first,
                              int64_t rows_in_table, int64_t width, float* dtable, float factor);

/// x[r, :] += table[p, :] for p the position of row first_row + r of a micro-batch of `samples`, as `tokens` says;
/// backward adds dout rows into dtable, in row order.
template <typename T>
void positions_forward(T* x, const T* table, int64_t rows, int64_t first_row, const TokenRuns& tokens, int64_t samples,
                       int64_t width);
template <typename T>
void positions_backward(const T* dout, float* dtable, int64_t rows, int64_t first_row, const TokenRuns& tokens,
                        int64_t samples, int64_t width);

}  // namespace cairn::kernels
