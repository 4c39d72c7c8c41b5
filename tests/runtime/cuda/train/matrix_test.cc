// Several ranks on devices that are doubles, their communication staged through the host's memory: any two values of
// two of these axes meet in some run, and it trains as the same ranks do on the CPU. The ranks are threads.
// CAIRN_ALL_LAYOUTS=1 takes every combination that a world of four and eight ranks allows.
//
// Tolerances as in train_test.cc: 1e-5 relative on losses in float, 1e-2 in bf16; ten times that on norms.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <set>

#include "runtime/core/random.h"
#include "runtime/plan/activations.h"
#include "runtime/trainer/state.h"
#include "runtime/trainer/work_shapes.h"
#include "tests/runtime/cuda/train/trained_double.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt::testing;
using cairn::testing::Lived;
using cairn::testing::train_on_double;

namespace {

constexpr int64_t kSteps = 3;

enum Axis { kFamily, kPrecision, kZero, kTp, kPp, kDp, kSp, kRecompute, kAxes };
constexpr std::array<const char*, kAxes> kNames = {"family", "bf16", "zero", "tp", "pp", "dp", "sp", "recompute"};
constexpr std::array<int, kAxes> kValues = {4, 2, 4, 2, 2, 2, 2, 3};
constexpr std::array<const char*, 4> kFamilies = {"gpt", "llama", "experts", "latent"};

/// A value of each axis, from 0 on; of tp, pp and dp that is one rank.
using Row = std::array<int, kAxes>;

int64_t ranks_of(const Row& row) { return (row[kTp] + 1) * (row[kPp] + 1) * (row[kDp] + 1); }

std::string text_of(const Row& row) {
  std::string out = fmt::format("{} ranks of {}:", ranks_of(row), kFamilies[static_cast<size_t>(row[kFamily])]);
  for (size_t axis = 1; axis < kAxes; ++axis) out += fmt::format(" {} {}", kNames[axis], row[axis]);
  return out;
}

Recipe recipe_of(const Row& row) {
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
  }
  if (row[kFamily] == 2) {
    m.moe = {.experts = 4, .top_k = 2, .aux_loss = 0.1, .aux_scope = AuxScope::kModel};
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
bool is_run(const Row& row) {
  if (ranks_of(row) == 1 || (row[kSp] == 1 && row[kTp] == 0) || (row[kZero] > 0 && row[kDp] == 0)) return false;
  return make_plan(recipe_of(row), ranks_of(row)).ok();
}

std::vector<Row> all_rows() {
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

std::set<Pair> pairs_of(const Row& row) {
  std::set<Pair> out;
  for (int a = 0; a < kAxes; ++a) {
    for (int b = a + 1; b < kAxes; ++b) out.insert({a, row[static_cast<size_t>(a)], b, row[static_cast<size_t>(b)]});
  }
  return out;
}

/// As few of `rows` as a greedy choice takes in which all pairs are that any has; fewer ranks first. Alike each time.
std::vector<Row> pairwise(const std::vector<Row>& rows) {
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

void compare(const Told& cuda, const Told& cpu, double unit) {
  REQUIRE(cuda.steps.size() == kSteps);
  for (const auto& [step, numbers] : cpu.steps) {
    CAPTURE(step);
    CHECK(std::abs(cuda.steps.at(step).first / numbers.first - 1) < unit);
    CHECK(std::abs(cuda.steps.at(step).second / numbers.second - 1) < 10 * unit);
  }
}

}  // namespace

TEST_SUITE("runtime/cuda/train/matrix") {
  TEST_CASE("ranks of every kind of layout train on devices as on the CPU, in the memory that was planned") {
    const bool all = std::getenv("CAIRN_ALL_LAYOUTS") != nullptr;
    const std::vector<Row> accepted = all_rows();
    const std::vector<Row> rows = all ? accepted : pairwise(accepted);
    MESSAGE(rows.size(), " of ", accepted.size());
    CHECK((all || rows.size() <= 40));
    uint64_t seed = 0;
    for (const Row& row : rows) {
      CAPTURE(text_of(row));
      const auto planned = make_plan(recipe_of(row), ranks_of(row));
      REQUIRE_OK(planned);
      const Plan& plan = planned.value();
      std::unique_ptr<Lived> life;
      const Told cuda = train_on_double(plan, ++seed, {}, nullptr, &life);
      compare(cuda, train(plan, {}), plan.recipe.precision == Precision::kF32 ? 1e-5 : 1e-2);
      for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
        CAPTURE(rank);
        auto opened = life->device.open(rank);
        REQUIRE_OK(opened);
        const std::vector<int64_t> blocks = trainer::TrainState::blocks(plan, plan.rank(rank), {});
        CHECK(cuda.on_device.at(rank) == opened.value()->bytes_for(blocks, trainer::work_shapes(plan, rank)));
        CHECK(life->pinned.at(rank) == trainer::staging_rooms(plan, rank).total_bytes());
      }
      CHECK(life->steps[0].allocations == plan.mesh.world());
      for (size_t k = 1; k < life->steps.size(); ++k) {
        CHECK(life->steps[k].allocations == 0);
        CHECK(life->steps[k].pins == 0);
      }
    }
  }

  TEST_CASE("each rank waits for its device once a step, and pins no memory after the start") {
    Recipe recipe = recipe_of({0, 0, 1, 0, 1, 1, 0, 0});
    recipe.checkpoint.snapshot_steps = 0;  // else the threads that copy wait too
    recipe.stop = {Span::Unit::kSteps, 6};
    const auto planned = make_plan(recipe, 4);
    REQUIRE_OK(planned);
    std::unique_ptr<Lived> life;
    train_on_double(planned.value(), 6, {}, nullptr, &life);
    REQUIRE(life->steps.size() == 6);
    for (size_t k = 1; k + 1 < 6; ++k) {  // the last one is saved
      CAPTURE(k);
      CHECK(life->own_waits[k] == 1);
      CHECK(life->steps[k].allocations == 0);
      CHECK(life->steps[k].pins == 0);
    }
    int64_t waits = 0;
    for (size_t k = 1; k + 1 < 6; ++k) waits += life->steps[k].waits;
    CHECK(waits <= 4 * 4 + 4);  // of all threads of all ranks; each may be one ahead
  }

  TEST_CASE("killed at each moment of a step: the same bits, a step back at most") {
    Recipe recipe = recipe_of({1, 1, 3, 1, 0, 1, 1, 0});
    recipe.optimizer.bucket = 500;  // state is copied and overwritten in several blocks
    const auto planned = make_plan(recipe, 4);
    REQUIRE_OK(planned);
    const Told untouched = train_on_double(planned.value(), 4);
    const std::vector<Death> deaths = {{Moment::kForward, 2, 1}, {Moment::kUpdated, 3, 3}};
    std::vector<std::pair<int64_t, bool>> from;
    const Told killed = train_on_double(planned.value(), 5, deaths, &from);
    CHECK(killed.steps == untouched.steps);
    CHECK(killed.banks == untouched.banks);
    for (size_t life = 0; life < from.size(); ++life) {
      CAPTURE(life);
      CHECK(from[life].first <= deaths[life].step - 1);
      CHECK(from[life].first >= deaths[life].step - 2);
    }
  }
}
