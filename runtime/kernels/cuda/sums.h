#pragma once
// Sums over rows for CUDA, without atomics: blocks leave sums of runs of rows, which are added in their order. What is
// cut where follows from shapes alone, so results do not depend on the device.

#include <algorithm>
#include <cstdint>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/sums_over_rows.h"

namespace cairn::kernels::cuda {

/// How many parts sums over rows are cut into.
inline int64_t parts_of(const TreeParts& parts) { return parts.sums ? parts.count : 1; }

/// Rows cut into equal parts, a power of two, and each of these into runs, one a block. The sum over a part is that of
/// its runs in order; the sums of parts are added by a balanced tree. So a part has the same bits wherever it stands,
/// and cuts into 2, 4, ... parts nest. "In order": sixteen sums of every sixteenth run, then these in their order.
struct RowRuns {
  int64_t rows = 0, rows_each = 0, part_runs = 0, parts = 1;

  static constexpr RowRuns of(int64_t rows, int64_t at_least, int64_t most_runs, int64_t parts = 1) {
    const int64_t part_rows = (rows + parts - 1) / parts;
    const int64_t each = std::max(at_least, (part_rows + most_runs - 1) / most_runs);
    return {rows, each, (part_rows + each - 1) / each, parts};
  }
  constexpr int64_t count() const { return parts * part_runs; }
  constexpr int64_t begin(int64_t run) const { return run / part_runs * rows / parts + run % part_runs * rows_each; }
  constexpr int64_t end(int64_t run) const {
    const int64_t of_part = (run / part_runs + 1) * rows / parts, of_run = begin(run) + rows_each;
    return of_run < of_part ? of_run : of_part;
  }
};

/// into[a][c] += the sum over partials [runs, arrays, width] of [., a, c], as RowRuns says. Of two arrays, or one.
/// Partials are of no use afterwards.
void add_partials(Queue& on, float* partials, const RowRuns& runs, int64_t arrays, int64_t width, float* into0,
                  float* into1);

/// Runs of bias_backward(), and floats that it needs as scratch.
constexpr int64_t kBiasRunRows = 64, kBiasRuns = 128;
constexpr RowRuns bias_runs(int64_t rows, int64_t parts = 1) {
  return RowRuns::of(rows, kBiasRunRows, kBiasRuns, parts);
}
constexpr int64_t bias_partials(int64_t rows, int64_t width, int64_t parts = 1) {
  return bias_runs(rows, parts).count() * width;
}
/// The function of runtime/kernels/elementwise.h.
template <typename T>
void bias_backward(Queue& on, const T* dy, float* dbias, int64_t rows, int64_t width, const TreeParts& parts = {});

}  // namespace cairn::kernels::cuda
