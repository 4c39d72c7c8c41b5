#pragma once
// Sums over rows for CUDA, without atomics: blocks leave sums of runs of rows, which are added in their order. What is
// cut where follows from shapes alone, so results do not depend on the device.

#include <algorithm>
#include <cstdint>

#include "runtime/kernels/cuda/queue.h"

namespace cairn::kernels::cuda {

/// Rows cut into runs, one a block.
struct RowRuns {
  int64_t rows_each = 0, count = 0;

  static constexpr RowRuns of(int64_t rows, int64_t at_least, int64_t most_runs) {
    const int64_t each = std::max(at_least, (rows + most_runs - 1) / most_runs);
    return {each, (rows + each - 1) / each};
  }
};

/// into[a][c] += the sum over partials [count, arrays, width] of [., a, c], in order. Of two arrays, or one.
void add_partials(Queue& on, const float* partials, int64_t count, int64_t arrays, int64_t width, float* into0,
                  float* into1);

/// Runs of bias_backward(), and floats that it needs for partials.
constexpr RowRuns bias_runs(int64_t rows) { return RowRuns::of(rows, 64, 128); }
constexpr int64_t bias_partials(int64_t rows, int64_t width) { return bias_runs(rows).count * width; }
/// dbias[c] += sum over r of dy[r, c].
template <typename T>
void bias_backward(Queue& on, const T* dy, float* dbias, int64_t rows, int64_t width, float* partials);

}  // namespace cairn::kernels::cuda
