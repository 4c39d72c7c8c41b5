#pragma once
// Layouts of small runs on devices, by what any two of them have in common: a greedy choice in which all pairs of
// values of two axes meet.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <vector>

#include "tests/ckpt/hook/mortal_run.h"

namespace cairn::testing {

using ckpt::testing::short_recipe;

constexpr int64_t kSteps = 3;

enum Axis { kFamily, kPrecision, kZero, kTp, kPp, kDp, kSp, kRecompute, kAxes };
constexpr std::array<const char*, kAxes> kNames = {"family", "bf16", "zero", "tp", "pp", "dp", "sp", "recompute"};
constexpr std::array<int, kAxes> kValues = {4, 2, 4, 2, 2, 2, 2, 3};
constexpr std::array<const char*, 4> kFamilies = {"gpt", "llama", "experts", "latent"};

/// A value of each axis, from 0 on; of tp, pp and dp that is one rank.
using Row = std::array<int, kAxes>;

inline int64_t ranks_of(const Row& row) { return (row[kTp] + 1) * (row[kPp] + 1) * (row[kDp] + 1); }

inline std::string text_of(const Row& row) {
  std::string out = fmt::format("{} ranks of {}:", ranks_of(row), kFamilies[static_cast<size_t>(row[kFamily])]);
  for (size_t axis = 1; axis < kAxes; ++axis) out += fmt::format(" {} {}", kNames[axis], row[axis]);
  return out;
}

inline Recipe recipe_of(const Row& row) {
  Recipe out = short_recipe(row[kFamily] != 0, row[kFamily] == 0);
  ModelConfig& m = out.model;
  m.layers = 2;
  m.width = 16;
  m.heads = m.kv_heads = 2;
  m.head_dim = 8;
  m.ffn = 24;
  m.context = 8;
  if (row[kFamily] == 1) {
    m.temperature_scale = 0.5;
    m.temperature_floor = 3;
    m.temperature_form = TemperatureForm::kMinistral3;
    m.attention_chunk = 3;
    m.qk_norm = QkNorm::kHeadLayerNorm;
  }
  if (row[kFamily] == 2) {
    m.qk_norm = QkNorm::kSharedLayerNorm;
    m.moe = {.experts = 4, .top_k = 2, .aux_loss = 0.1, .aux_scope = AuxScope::kModel};
    m.mlp_bias = true;
    m.attention_sinks = true;
  }
  if (row[kFamily] == 3) {
    m.mla = {.kv_rank = 12, .q_rank = 10, .nope_dim = 4, .rope_dim = 4, .value_dim = 6};
    m.moe = {
        .experts = 4, .top_k = 2, .router = RouterKind::kSigmoid, .ffn = 8, .choice_bias = true, .bias_rate = 0.01};
  }
  out.batch = {.samples = 2 * (row[kDp] + 1), .micro = 1};
  out.precision = row[kPrecision] == 0 ? Precision::kF32 : Precision::kBf16;
  out.optimizer.zero = row[kZero];
  out.mesh = {.tp = row[kTp] + 1, .pp = row[kPp] + 1, .dp = row[kDp] + 1, .sequence_parallel = row[kSp] == 1};
  out.schedule = PipelineKind::k1F1B;
  out.recompute.mode = std::array{RecomputeMode::kNone, RecomputeMode::kSelective,
                                  RecomputeMode::kFull}[static_cast<size_t>(row[kRecompute])];
  out.device = DeviceChoice::kCuda;
  out.checkpoint.snapshot_by = SnapshotBy::kCopy;
  out.stop = {Span::Unit::kSteps, kSteps};
  return out;
}

/// Of more than one rank, that the plan accepts and that says something: sequences are parallel over tp alone, and
/// state is divided among replicas.
inline bool is_run(const Row& row) {
  if (ranks_of(row) == 1 || (row[kSp] == 1 && row[kTp] == 0) || (row[kZero] > 0 && row[kDp] == 0)) return false;
  return make_plan(recipe_of(row), ranks_of(row)).ok();
}

inline std::vector<Row> all_rows() {
  std::vector<Row> out;
  int count = 1;
  for (const int values : kValues) count *= values;
  for (int number = 0; number < count; ++number) {
    Row row{};
    for (int axis = 0, left = number; axis < kAxes; ++axis) {
      row[static_cast<size_t>(axis)] = left % kValues[static_cast<size_t>(axis)];
      left /= kValues[static_cast<size_t>(axis)];
    }
    if (is_run(row)) out.push_back(row);
  }
  return out;
}

using Pair = std::array<int, 4>;  // axis, value, axis, value

inline std::set<Pair> pairs_of(const Row& row) {
  std::set<Pair> out;
  for (int a = 0; a < kAxes; ++a) {
    for (int b = a + 1; b < kAxes; ++b) out.insert({a, row[static_cast<size_t>(a)], b, row[static_cast<size_t>(b)]});
  }
  return out;
}

/// As few of `rows` as a greedy choice takes in which all pairs are that any has; fewer ranks first. Alike each time.
inline std::vector<Row> pairwise(const std::vector<Row>& rows) {
  std::set<Pair> open;
  for (const Row& row : rows) open.merge(pairs_of(row));
  std::vector<Row> out;
  while (!open.empty()) {
    const Row* best = nullptr;
    double most = 0;
    for (const Row& row : rows) {
      const std::set<Pair> has = pairs_of(row);
      const auto fresh = std::ranges::count_if(has, [&](const Pair& pair) { return open.contains(pair); });
      const double worth = static_cast<double>(fresh) / static_cast<double>(ranks_of(row) + 2);
      if (worth > most) {
        most = worth;
        best = &row;
      }
    }
    for (const Pair& pair : pairs_of(*best)) open.erase(pair);
    out.push_back(*best);
  }
  return out;
}

}  // namespace cairn::testing
