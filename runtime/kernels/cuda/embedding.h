#pragma once
// Table look-ups for CUDA: those of runtime/kernels/embedding.h. Backward passes sort the rows by place, chunk by
// chunk, and merge the chunks by counting; then a block has the rows of a place. kPieceRows rows of a place or fewer
// are added in their order. More are cut into pieces of so many, by their number among the rows of the place alone; the
// sums of pieces are added in their order. The sum of all goes to the table at once. There are no atomics.

#include <cstdint>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/embedding.h"

namespace cairn::kernels::cuda {

constexpr int64_t kSortedRows = 1024;  // of a chunk
constexpr int64_t kPieceRows = 64;
/// Chunks of sorted keys, rows by place, and sums of pieces: at most two pieces begin among so many sorted rows.
constexpr int64_t row_chunks(int64_t rows) { return (rows + kSortedRows - 1) / kSortedRows; }
constexpr int64_t row_pieces(int64_t rows) { return (rows + kPieceRows - 1) / kPieceRows * 2; }
/// Bytes that backward passes take as scratch.
constexpr int64_t look_up_scratch_bytes(int64_t rows, int64_t width) {
  return row_chunks(rows) * kSortedRows * 8 + rows * 16 + row_pieces(rows) * width * 4;
}

template <typename T>
void embedding_forward(Queue& on, const int32_t* ids, int64_t rows, const TableRange& of, const T* table, T* out);
template <typename T>
void embedding_backward(Queue& on, const int32_t* ids, int64_t rows, const TableRange& of, const T* dout, float* dtable,
                        float factor);

/// The sums over rows by a tree of `parts`, below 2^kMostLevels. dtable was zeros.
constexpr int kMostLevels = 16;
template <typename T>
void embedding_backward_parts(Queue& on, const int32_t* ids, int64_t rows, int64_t parts, const TableRange& of,
                              const T* dout, float* dtable, float factor);

template <typename T>
void positions_forward(Queue& on, T* x, const T* table, const RowPositions& positions, int64_t rows, int64_t width);
template <typename T>
void positions_backward(Queue& on, const T* dout, float* dtable, const RowPositions& positions, int64_t rows,
                        int64_t width);
template <typename T>
void positions_look_up(Queue& on, const T* table, const RowPositions& positions, int64_t rows, int64_t width, T* out);

}  // namespace cairn::kernels::cuda
