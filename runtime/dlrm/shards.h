#pragma once
// Which rank owns which part of which table. Pure arithmetic.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/dlrm.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::dlrm {

constexpr int64_t kEveryRank = -1;

/// A box of a table. The shards of a table tile it, columns first, then rows, both ascending.
struct TableShard {
  int64_t table = 0;
  Box box;                     // of [rows, dim]
  int64_t owner = kEveryRank;  // kEveryRank: each rank has a copy
  int64_t column_part = 0, column_parts = 1;
  int64_t rows() const { return box.extent(0); }
  int64_t width() const { return box.extent(1); }
  int64_t elems() const { return box.count_elems(); }
  bool operator==(const TableShard&) const = default;
};

/// The shards of all tables, in the order of the tables. A table with fewer rows or columns than its cut has parts gets
/// empty parts left out. `config` is checked.
/// Errors: kInvalidInput for a cut without ranks, of ranks outside the world, or one too many or too few.
Result<std::vector<TableShard>> cut_tables(const DlrmConfig& config, const std::vector<TableCut>& cuts, int64_t world);

/// The samples of a global batch that a rank has: [first, first + count), as even as it gets.
struct SampleRange {
  int64_t first = 0, count = 0;
};
SampleRange samples_of(int64_t global_samples, int64_t rank, int64_t world);

}  // namespace cairn::dlrm
