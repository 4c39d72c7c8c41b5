#include "runtime/dlrm/shards.h"

#include <fmt/format.h>

namespace cairn::dlrm {
namespace {

Status check_cut(const DlrmTable& table, const TableCut& cut, int64_t world) {
  const auto wrong = [&](std::string text) {
    return Error{ErrorCode::kInvalidInput, fmt::format("cut of table {}: {}", table.name, text)};
  };
  const int64_t ranks = std::ssize(cut.ranks);
  if (cut.kind == CutKind::kCopies && ranks != 0)
    return wrong(fmt::format("copies are on every rank, so it names none; got {} ranks", ranks));
  if (cut.kind == CutKind::kTable && ranks != 1) return wrong(fmt::format("a whole table has 1 rank, got {}", ranks));
  if (cut.kind != CutKind::kCopies && ranks == 0) return wrong("it names no ranks");
  for (const int64_t rank : cut.ranks)
    if (rank < 0 || rank >= world) return wrong(fmt::format("ranks are 0 to {}, got {}", world - 1, rank));
  return {};
}

}  // namespace

Result<std::vector<TableShard>> cut_tables(const DlrmConfig& config, const std::vector<TableCut>& cuts, int64_t world) {
  if (cuts.size() != config.tables.size())
    return Error{ErrorCode::kInvalidInput, fmt::format("{} cuts for {} tables", cuts.size(), config.tables.size())};
  std::vector<TableShard> shards;
  for (size_t t = 0; t < cuts.size(); ++t) {
    const TableCut& cut = cuts[t];
    RT_TRY(check_cut(config.tables[t], cut, world));
    const int64_t rows = config.tables[t].rows, dim = config.dim, parts = std::ssize(cut.ranks);
    const auto add = [&](Box box, int64_t owner, int64_t part, int64_t of) {
      if (!box.empty()) shards.push_back({static_cast<int64_t>(t), std::move(box), owner, part, of});
    };
    if (cut.kind == CutKind::kCopies) add({{0, 0}, {rows, dim}}, kEveryRank, 0, 1);
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t owner = cut.ranks[static_cast<size_t>(p)];
      const auto bound = [&](int64_t extent, int64_t part) { return extent * part / parts; };
      if (cut.kind == CutKind::kColumns) {
        add({{0, bound(dim, p)}, {rows, bound(dim, p + 1)}}, owner, p, parts);
      } else {
        add({{bound(rows, p), 0}, {bound(rows, p + 1), dim}}, owner, 0, 1);
      }
    }
  }
  return shards;
}

SampleRange samples_of(int64_t global_samples, int64_t rank, int64_t world) {
  const int64_t first = global_samples * rank / world;
  return {first, global_samples * (rank + 1) / world - first};
}

}  // namespace cairn::dlrm
