#pragma once
// Table look-ups for a vocabulary cut into ranges.

#include <cstdint>

#include "runtime/core/token_runs.h"
#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"
#include "runtime/kernels/scratch.h"

namespace cairn::kernels {

/// Rows of a table, [count, width], that have the numbers [first, first + count).
struct TableRange {
  int64_t first = 0, count = 0, width = 0;
};
inline void add_dims(OpDims& to, const TableRange& of) {
  to.add(of.count);
  to.add(of.width);
}

/// out[r, :] = table[ids[r] - first, :] for ids in the range, else 0.
template <typename T>
void embedding_forward(const int32_t* ids, int64_t rows, const TableRange& of, const T* table, T* out);
/// dtable[ids[r] - first, :] += factor * dout[r, :] for ids in the range, in row order (deterministic).
template <typename T>
void embedding_backward(const int32_t* ids, int64_t rows, const TableRange& of, const T* dout, float* dtable,
                        float factor = 1);
/// The same with the rows of each id summed in `parts` equal runs of rows, a power of two, by a balanced tree; so calls
/// with a subtree's rows alone give sums whose tree has the same bits. dtable was zeros.
template <typename T>
void embedding_backward_parts(const int32_t* ids, int64_t rows, int64_t parts, const TableRange& of, const T* dout,
                              float* dtable, float factor);
ScratchElems embedding_backward_parts_scratch(int64_t rows, int64_t width);

/// Where rows stand in a table of positions.
struct RowPositions {
  DevicePtr<const int32_t> at;  // [rows]; null: row first_row + r of a micro-batch of `samples` stands as `tokens` says
  int64_t first_row = 0;
  TokenRuns tokens;
  int64_t samples = 1;
};
inline void add_dims(OpDims& /*to*/, const RowPositions& /*of*/) {}

/// x[r, :] += table[p, :] for p the position of row r; backward adds dout rows into dtable, in row order; look_up:
/// out[r, :] = table[p, :].
template <typename T>
void positions_forward(T* x, const T* table, const RowPositions& positions, int64_t rows, int64_t width);
template <typename T>
void positions_backward(const T* dout, float* dtable, const RowPositions& positions, int64_t rows, int64_t width);
template <typename T>
void positions_look_up(const T* table, const RowPositions& positions, int64_t rows, int64_t width, T* out);

}  // namespace cairn::kernels
