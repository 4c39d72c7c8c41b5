#pragma once
// Table look-ups for CUDA: those of runtime/kernels/embedding.h. A backward pass adds to each row of the table in the
// order of the rows that it was looked up for, with no atomics. Where the host has the ids it sorts them once a step
// (RowsByPlace); else a block for each row asks whether it is the first of its place, and adds up all of them if so:
// reads of rows^2 ids, which a cache holds.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/embedding.h"

namespace cairn::kernels::cuda {

/// Rows by what they look up, for the host to make and upload.
struct RowsByPlace {
  std::vector<int32_t> rows;    // those of one place together, ascending
  std::vector<int32_t> places;  // of the table, ascending
  std::vector<int32_t> begins;  // [places + 1]: where the rows of each begin

  /// `ids` outside [first, first + rows_in_table) are left out.
  static RowsByPlace of(std::span<const int32_t> ids, int64_t first, int64_t rows_in_table) {
    RowsByPlace out;
    for (size_t r = 0; r < ids.size(); ++r) {
      if (ids[r] >= first && ids[r] < first + rows_in_table) out.rows.push_back(static_cast<int32_t>(r));
    }
    std::stable_sort(out.rows.begin(), out.rows.end(), [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
    for (size_t i = 0; i < out.rows.size(); ++i) {
      const auto place = static_cast<int32_t>(ids[out.rows[i]] - first);
      if (!out.places.empty() && out.places.back() == place) continue;
      out.places.push_back(place);
      out.begins.push_back(static_cast<int32_t>(i));
    }
    out.begins.push_back(static_cast<int32_t>(out.rows.size()));
    return out;
  }
};

/// The same on the device.
struct DeviceRowsByPlace {
  const int32_t *rows = nullptr, *places = nullptr, *begins = nullptr;
  int64_t count = 0;  // of places
};

template <typename T>
void embedding_forward(Queue& on, const int32_t* ids, int64_t rows, const T* table, int64_t first,
                       int64_t rows_in_table, int64_t width, T* out);
/// dtable[place, :] += factor * dout[r, :] for the rows r of each place, in their order. The backward pass of positions
/// too: places are the positions then.
template <typename T>
void embedding_backward(Queue& on, const DeviceRowsByPlace& by, const T* dout, int64_t width, float* dtable,
                        float factor);

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
