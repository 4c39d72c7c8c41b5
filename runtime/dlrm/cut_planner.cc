#include "runtime/dlrm/cut_planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <queue>
#include <utility>

#include "runtime/core/units.h"
#include "runtime/dlrm/shapes.h"
#include "runtime/dlrm/shards.h"

namespace cairn::dlrm {
namespace {

constexpr int64_t kElem = 4;           // bytes of a float, and of a row's number
constexpr int64_t kFewestColumns = 4;  // of a part: narrower ones read a cache line for little of it
constexpr double kTouches = 4;         // a row is read at the look-up, its gradient and it at the update, then written

int64_t bytes_of(const TableShard& shard, DlrmRule rule) {
  return kElem * (shard.elems() + (rule == DlrmRule::kRowAdagrad ? shard.rows() : 0));
}

/// Adds what the owner of the shard has to do, and what every rank has to do for it.
void add_shard(const DlrmConfig& config, const CutRequest& request, const TableShard& shard, CutCost* cost,
               RankCost* every) {
  const DlrmTable& table = config.tables[static_cast<size_t>(shard.table)];
  const auto samples = static_cast<double>(request.global_samples), world = static_cast<double>(request.world);
  const double part_of_rows = static_cast<double>(shard.rows()) / static_cast<double>(table.rows);
  const double reads = samples * table.hot * part_of_rows, width_bytes = static_cast<double>(shard.width() * kElem);
  if (shard.owner == kEveryRank) {
    const auto table_bytes = static_cast<double>(shard.elems() * kElem);
    every->table_bytes += bytes_of(shard, request.rule);
    every->row_bytes += reads / world * width_bytes * 2 + 3 * table_bytes;  // the update touches all rows
    every->sent_bytes += request.world > 1 ? table_bytes : 0;
    every->received_bytes += request.world > 1 ? table_bytes : 0;
    return;
  }
  RankCost& owner = cost->ranks[static_cast<size_t>(shard.owner)];
  owner.table_bytes += bytes_of(shard, request.rule);
  owner.row_bytes += reads * width_bytes * kTouches;
  if (request.world == 1) return;
  const double bags = (samples + reads) * kElem, pooled = samples * width_bytes;
  owner.sent_bytes += pooled;
  owner.received_bytes += bags + pooled;
  every->sent_bytes += (bags + pooled) / world;
  every->received_bytes += pooled / world;
}

void finish(const CutRequest& request, const RankCost& every, CutCost* cost) {
  for (RankCost& rank : cost->ranks) {
    rank.table_bytes += every.table_bytes;
    rank.row_bytes += every.row_bytes;
    rank.sent_bytes += every.sent_bytes;
    rank.received_bytes += every.received_bytes;
    rank.seconds = rank.row_bytes / request.memory_bytes_per_s +
                   std::max(rank.sent_bytes, rank.received_bytes) / request.link_bytes_per_s;
    cost->seconds = std::max(cost->seconds, rank.seconds);
    cost->mean_seconds += rank.seconds / static_cast<double>(cost->ranks.size());
  }
}

Status check(const CutRequest& request) {
  const auto wrong = [](std::string text) { return Error{ErrorCode::kInvalidInput, std::move(text)}; };
  if (request.world < 1) return wrong(fmt::format("a cut needs at least 1 rank, got {}", request.world));
  if (request.global_samples < 1)
    return wrong(fmt::format("a step needs at least 1 sample, got {}", request.global_samples));
  if (request.memory_bytes < 0)
    return wrong(fmt::format("memory_bytes must be at least 0, got {}", request.memory_bytes));
  if (!(request.memory_bytes_per_s > 0) || !(request.link_bytes_per_s > 0))
    return wrong(fmt::format("bytes a second must be above 0, got {} of memory and {} of the link",
                             request.memory_bytes_per_s, request.link_bytes_per_s));
  return {};
}

/// Placement weighs a whole table by it: the time of one owner.
double owner_seconds(const DlrmConfig& config, const CutRequest& request, size_t table) {
  const double samples = static_cast<double>(request.global_samples), reads = samples * config.tables[table].hot;
  const double width_bytes = static_cast<double>(config.dim * kElem);
  double seconds = reads * width_bytes * kTouches / request.memory_bytes_per_s;
  if (request.world > 1) seconds += ((samples + reads) * kElem + samples * width_bytes) / request.link_bytes_per_s;
  return seconds;
}

/// One try: `copied` smallest tables on every rank; tables above `share` of a rank's mean cost, or above its memory, in
/// parts, by columns if asked and possible. Nothing where it does not fit.
std::optional<std::vector<TableCut>> try_cut(const DlrmConfig& config, const CutRequest& request,
                                             const std::vector<size_t>& by_size, size_t copied, double share,
                                             bool by_columns) {
  const size_t tables = config.tables.size();
  const int64_t limit = request.memory_bytes > 0 ? request.memory_bytes : std::numeric_limits<int64_t>::max();
  const int64_t sums = request.rule == DlrmRule::kRowAdagrad ? 1 : 0;  // of squares, a row
  const auto table_bytes = [&](size_t t) { return kElem * config.tables[t].rows * (config.dim + sums); };
  std::vector<TableCut> cuts(tables);
  std::vector<int64_t> bytes(static_cast<size_t>(request.world));
  double all = 0;
  for (size_t i = 0; i < tables; ++i) {
    if (i < copied) {
      cuts[by_size[i]] = {CutKind::kCopies, {}};
      for (int64_t& b : bytes) b += table_bytes(by_size[i]);
    } else {
      all += owner_seconds(config, request, by_size[i]);
    }
  }
  if (bytes[0] > limit) return std::nullopt;
  const double mean = all / static_cast<double>(request.world);

  struct Piece {
    size_t table;
    double seconds;
    int64_t bytes;
  };
  std::vector<Piece> pieces;
  for (size_t i = copied; i < tables; ++i) {
    const size_t t = by_size[i];
    const double cost = owner_seconds(config, request, t);
    const double too_large = static_cast<double>(table_bytes(t)) / static_cast<double>(limit - bytes[0] + 1);
    const double wanted = std::ceil(std::max(too_large, cost / std::max(share * mean, 1e-300)));
    auto parts = static_cast<int64_t>(std::min(wanted, static_cast<double>(request.world)));
    const int64_t rows = config.tables[t].rows, most_columns = std::max<int64_t>(1, config.dim / kFewestColumns);
    int64_t piece_bytes = table_bytes(t);
    if (by_columns && std::min(parts, most_columns) > 1 && static_cast<double>(most_columns) >= too_large) {
      parts = std::min(parts, most_columns);
      cuts[t].kind = CutKind::kColumns;
      piece_bytes = kElem * rows * ((config.dim + parts - 1) / parts + sums);
    } else if (std::min(parts, rows) > 1) {  // its owners send a pooled row each, so parts cost more than their share
      parts = std::min(parts, rows);
      cuts[t].kind = CutKind::kRows;
      piece_bytes = kElem * ((rows + parts - 1) / parts) * (config.dim + sums);
    } else {
      parts = 1;
      cuts[t].kind = CutKind::kTable;
    }
    for (int64_t p = 0; p < parts; ++p) pieces.push_back({t, cost / static_cast<double>(parts), piece_bytes});
  }
  std::ranges::stable_sort(pieces, [](const Piece& a, const Piece& b) {
    return a.seconds != b.seconds ? a.seconds > b.seconds : a.bytes > b.bytes;
  });
  using Load = std::pair<double, size_t>;  // seconds and rank: of equal ones the first rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (size_t r = 0; r < bytes.size(); ++r) least.push({0, r});
  std::vector<Load> full;
  for (const Piece& piece : pieces) {
    full.clear();
    while (!least.empty() && bytes[least.top().second] + piece.bytes > limit) {
      full.push_back(least.top());
      least.pop();
    }
    if (least.empty()) return std::nullopt;
    const auto [load, rank] = least.top();
    least.pop();
    bytes[rank] += piece.bytes;
    least.push({load + piece.seconds, rank});
    for (const Load& f : full) least.push(f);
    cuts[piece.table].ranks.push_back(static_cast<int64_t>(rank));
  }
  return cuts;
}

}  // namespace

Result<CutCost> cost_of(const DlrmConfig& config, const std::vector<TableCut>& cuts, const CutRequest& request) {
  RT_TRY(check(request));
  RT_TRY_SET(const std::vector<TableShard> shards, cut_tables(config, cuts, request.world));
  CutCost cost;
  cost.ranks.resize(static_cast<size_t>(request.world));
  RankCost every;
  for (const TableShard& shard : shards) add_shard(config, request, shard, &cost, &every);
  finish(request, every, &cost);
  return cost;
}

Result<Traffic> step_traffic(const DlrmConfig& config, const std::vector<TableCut>& cuts, int64_t world, int64_t rank,
                             int64_t global_samples, int64_t elem_bytes) {
  RT_TRY_SET(const std::vector<TableShard> shards, cut_tables(config, cuts, world));
  Traffic traffic;
  if (world == 1) return traffic;
  const int64_t samples = samples_of(global_samples, rank, world).count;
  int64_t lengths = 0, rows = 0, pooled = 0, gradients = 0, dense = count_elems(dense_tensors(config));
  for (const TableShard& shard : shards) {
    if (shard.owner == kEveryRank) {
      dense += shard.elems();
      continue;
    }
    lengths += samples * kElem;
    gradients += samples * shard.width() * elem_bytes;
    if (shard.owner == rank) pooled += global_samples * shard.width() * elem_bytes;
    // The rows of a table go to the shards that have them: together as many as the samples read, for each column part.
    if (shard.box.lo[0] == 0) {
      rows += static_cast<int64_t>(static_cast<double>(samples) * config.tables[static_cast<size_t>(shard.table)].hot) *
              kElem;
    }
  }
  for (const int64_t bytes : {lengths, rows, pooled, gradients}) traffic.all_to_all.add(bytes);
  traffic.all_reduce.add(8);  // the loss
  traffic.all_reduce.add(dense * elem_bytes);
  return traffic;
}

Result<std::vector<TableCut>> plan_cuts(const DlrmConfig& config, const CutRequest& request) {
  RT_TRY(check(request));
  std::vector<size_t> by_size(config.tables.size());
  std::iota(by_size.begin(), by_size.end(), size_t{0});
  std::ranges::stable_sort(by_size, {}, [&](size_t t) { return config.tables[t].rows; });
  std::optional<std::vector<TableCut>> best;
  double least = std::numeric_limits<double>::infinity();
  double copies_seconds = 0;  // at least: the update of the copies
  for (size_t copied = 0; copied <= by_size.size() && copies_seconds < least; ++copied) {
    if (copied > 0)
      copies_seconds += static_cast<double>(3 * kElem * config.tables[by_size[copied - 1]].rows * config.dim) /
                        request.memory_bytes_per_s;
    for (const double share : {std::numeric_limits<double>::infinity(), 1.0, 0.5, 0.25, 0.0}) {
      for (const bool by_columns : {true, false}) {
        auto cuts = try_cut(config, request, by_size, copied, share, by_columns);
        if (!cuts) continue;
        RT_TRY_SET(const CutCost cost, cost_of(config, *cuts, request));
        if (cost.seconds < least) {
          least = cost.seconds;
          best = std::move(cuts);
        }
      }
    }
  }
  if (best) return *std::move(best);
  int64_t elems = count_elems(table_tensors(config));
  if (request.rule == DlrmRule::kRowAdagrad)
    for (const DlrmTable& table : config.tables) elems += table.rows;
  const auto& largest = config.tables[by_size.back()];
  return Error{ErrorCode::kNoSpace,
               fmt::format("the tables take {} (the largest, {}, has {} rows of {}), and {} ranks have {} each, {} in "
                           "all; give more ranks, or more memory to each",
                           format_bytes(kElem * elems), largest.name, largest.rows, format_bytes(kElem * config.dim),
                           request.world, format_bytes(request.memory_bytes),
                           format_bytes(request.memory_bytes * request.world))};
}

}  // namespace cairn::dlrm
