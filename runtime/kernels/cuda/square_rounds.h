#pragma once
// How the squares of all runs of a rank's gradients are added up by rows and columns in few launches (adafactor.h): as
// many runs at once as the sums of their parts of columns fit into bounded memory. Rounds follow from shapes only.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/kernels/cuda/adafactor.h"

namespace cairn::kernels::cuda {

/// Rows of a part of a run's columns, at least; parts, at most.
constexpr int64_t kPartRows = 256, kMostParts = 128;
/// Doubles that the sums of parts of one round may take: enough for 2^31 elements of tall matrices.
constexpr int64_t kPartSums = int64_t{1} << 23;

/// Doubles that the rounds of runs need at most: by the elements and the columns of all.
constexpr int64_t part_sums(int64_t elems, int64_t cols) { return std::min(elems / kPartRows + 2 * cols, kPartSums); }

/// Runs that one launch takes.
struct SquareRound {
  std::vector<SquaredRun> runs;
  std::vector<ColumnParts> columns;  // of each tensor
  int64_t blocks = 0, column_blocks = 0, part_sums = 0;
};

inline SquaredRun squared_run(const MatrixRun& of, double* rows, int64_t most_sums = kPartSums) {
  const int64_t first = of.begin / of.cols, count = (of.begin + of.count - 1) / of.cols - first + 1;
  const int64_t parts = std::clamp<int64_t>(most_sums / of.cols, 1, kMostParts);
  return {.grad = of.grad.address(),
          .row_sums = rows,
          .begin = of.begin,
          .count = of.count,
          .cols = of.cols,
          .first_row = first,
          .rows = count,
          .rows_each = std::max(kPartRows, (count + parts - 1) / parts),
          .row_blocks = rows == nullptr ? 0 : static_cast<uint32_t>((count + kSquareRows - 1) / kSquareRows),
          .col_blocks = static_cast<uint32_t>((of.cols + kSquareColumns - 1) / kSquareColumns)};
}

/// Runs that stand one behind the other in their matrix and in memory are one. Two runs that have parts of one row are
/// of two rounds: no two blocks add to one sum.
inline std::vector<SquareRound> square_rounds(std::span<const SquaresRun> runs, int64_t most_sums = kPartSums) {
  std::vector<SquareRound> out;
  for (size_t at = 0; at < runs.size();) {
    const SquaresRun& of = runs[at];
    MatrixRun matrix = of.matrix;
    for (++at; at < runs.size() && runs[at].cols == of.cols && runs[at].matrix.begin == matrix.begin + matrix.count &&
               runs[at].matrix.grad == matrix.grad + matrix.count;
         ++at) {
      matrix.count += runs[at].matrix.count;
    }
    if (matrix.count == 0) continue;
    SquaredRun run = squared_run(matrix, of.rows.address(), most_sums);
    const int64_t parts = (run.rows + run.rows_each - 1) / run.rows_each, sums = parts * run.cols;
    const auto of_same = [&](const SquareRound& round) { return round.columns.back().sums == of.cols.address(); };
    const auto follows = [&](const SquareRound& round) {
      const SquaredRun& last = round.runs.back();
      return !of_same(round) || run.row_sums == nullptr || last.first_row + last.rows <= run.first_row;
    };
    if (out.empty() || out.back().part_sums + sums > most_sums || !follows(out.back())) out.emplace_back();
    SquareRound& round = out.back();
    run.first_chunk = static_cast<uint32_t>(round.blocks);
    run.first_part = round.part_sums;
    if (round.runs.empty() || !of_same(round)) {
      round.columns.push_back(
          {of.cols.address(), round.part_sums, 0, run.cols, static_cast<uint32_t>(round.column_blocks)});
      round.column_blocks += run.col_blocks;
    }
    round.columns.back().parts += parts;
    round.blocks += run.row_blocks + int64_t{run.col_blocks} * parts;
    round.part_sums += sums;
    round.runs.push_back(run);
  }
  return out;
}

}  // namespace cairn::kernels::cuda
