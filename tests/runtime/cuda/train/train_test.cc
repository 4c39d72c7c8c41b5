// The trainer that `cairn _rank` runs, with the hook that it has, on a CUDA device that is a double: memory of the
// device cannot be touched by the host, work is done late and in an order that a seed chooses.

#include <atomic>
#include <cmath>
#include <cstring>
#include <set>
#include <tuple>

#include "runtime/kernels/cuda/attention.h"
#include "runtime/plan/activations.h"
#include "runtime/trainer/state.h"
#include "runtime/trainer/work_shapes.h"
#include "tests/runtime/cuda/train/trained_double.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt::testing;
namespace simt = cairn::simt;
using cairn::testing::Lived;
using cairn::testing::train_on_double;

namespace {

Recipe small(bool llama, Precision precision) {
  Recipe out = short_recipe(llama, true);
  out.model.layers = 1;
  out.batch = {.samples = 2, .micro = 1};
  out.precision = precision;
  out.device = DeviceChoice::kCuda;
  out.checkpoint.snapshot_by = SnapshotBy::kCopy;
  out.stop = {Span::Unit::kSteps, 5};
  return out;
}

/// Heads that a library takes.
Recipe with_wide_heads() {
  Recipe out = small(true, Precision::kBf16);
  out.model.heads = 4;
  out.model.kv_heads = 2;
  out.model.head_dim = 8;
  return out;
}

/// Kernels that a step of small(false) saves. In two micro-batches residual and bias of two row cuts, and gelu; bias
/// gradients of two column cuts (3 kernels) and two row cuts (2), whose sums a kernel adds in the second micro-batch.
constexpr int64_t kFusedLaunches = 2 * (2 * 2 + 1) + 2 * (3 + 2) + 2 * (2 + 1);

Plan plan_of(const Recipe& recipe) {
  const auto planned = make_plan(recipe, 1);
  REQUIRE_OK(planned);
  return planned.value();
}

/// |a - b| over |b - begin|, of all that the last snapshot holds: how far the two have come apart on their way.
double apart(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  REQUIRE(a.size() == b.size());
  std::vector<float> x(a.size() / 4), y(a.size() / 4);
  std::memcpy(x.data(), a.data(), x.size() * 4);
  std::memcpy(y.data(), b.data(), y.size() * 4);
  double difference = 0, length = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference += (static_cast<double>(x[i]) - y[i]) * (static_cast<double>(x[i]) - y[i]);
    length += static_cast<double>(y[i]) * y[i];
  }
  return std::sqrt(difference / length);
}

}  // namespace

TEST_SUITE("runtime/cuda/train") {
  TEST_CASE(
      "training on a device gives the CPU's losses and state: GPT-2's in float, Llama's in bf16, Falcon's with rounded "
      "ALiBi") {
    for (const auto& [precision, llama, sloped] : {std::tuple(Precision::kF32, false, false),
                                                   {Precision::kBf16, true, false},
                                                   {Precision::kF32, false, true},
                                                   {Precision::kBf16, false, true}}) {
      CAPTURE(llama);
      CAPTURE(sloped);
      Recipe recipe = small(llama, precision);
      if (sloped) {
        recipe.model.positions = Positions::kAlibi;
        recipe.model.alibi = AlibiForm::kRounded;
      }
      const Plan plan = plan_of(recipe);
      const Told cpu = train(plan, {});
      const Told cuda = train_on_double(plan, 3);
      // Relative: float sums in another order; in bf16 each rounding may fall to the other side.
      const double unit = precision == Precision::kF32 ? 1e-5 : 1e-2;
      REQUIRE(cuda.steps.size() == 5);
      for (const auto& [step, numbers] : cpu.steps) {
        CAPTURE(step);
        CHECK(std::abs(cuda.steps.at(step).first / numbers.first - 1) < unit);
        CHECK(std::abs(cuda.steps.at(step).second / numbers.second - 1) < 10 * unit);
      }
      CHECK(apart(cuda.banks.at(0), cpu.banks.at(0)) < 10 * unit);
      CHECK(apart(cuda.banks.at(0), cpu.banks.at(0)) > 0);  // they were not computed by the same kernels
    }
  }

  TEST_CASE(
      "killed at each moment of a step, on a device whose memory is lost then: the same bits, a step back at most") {
    Recipe recipe = small(true, Precision::kBf16);
    recipe.optimizer.bucket = 1000;  // state is copied and overwritten in several blocks
    const Plan plan = plan_of(recipe);
    const Told untouched = train_on_double(plan, 4);
    const std::vector<Death> deaths = {{Moment::kForward, 2, 0}, {Moment::kBegun, 3, 0}, {Moment::kUpdated, 4, 0}};
    std::vector<std::pair<int64_t, bool>> from;
    const Told killed = train_on_double(plan, 5, deaths, &from);
    CHECK(killed.steps == untouched.steps);
    CHECK(killed.banks == untouched.banks);
    for (size_t life = 0; life < from.size(); ++life) {
      CAPTURE(life);
      CHECK_FALSE(from[life].second);  // weights are made of the masters again
      CHECK(from[life].first <= deaths[life].step - 1);
      CHECK(from[life].first >= deaths[life].step - 2);
    }
  }

  TEST_CASE(
      "products that do their neighbours' work train as separate kernels do; where the library refuses one, by these") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      CAPTURE(static_cast<int>(precision));
      Recipe recipe = small(false, precision);
      recipe.checkpoint.snapshot_steps = 0;
      recipe.stop = {Span::Unit::kSteps, 3};
      const Plan plan = plan_of(recipe);
      std::unique_ptr<Lived> life;
      const auto launches = [&] { return life->steps.at(1).launches; };
      const Told fused = train_on_double(plan, 7, {}, nullptr, &life);
      const int64_t fewer = launches();
      const Told apart_of = train_on_double(plan, 7, {}, nullptr, &life, {.fuses = false});
      CHECK(launches() - fewer == kFusedLaunches);
      const Told refused =
          train_on_double(plan, 7, {}, nullptr, &life, {.plant = [](simt::BlasDouble& products) {
                            products.refuse_other_c();
                            products.refuse([](uint32_t of) { return of > cairn::cuda::kEpilogueBias; });
                          }});
      CHECK(launches() > fewer);
      const double unit = precision == Precision::kF32 ? 1e-5 : 1e-2;
      REQUIRE(fused.steps.size() == 3);
      for (const auto& [step, numbers] : apart_of.steps) {
        CAPTURE(step);
        for (const Told* const of : {&fused, &refused}) {
          CHECK(std::abs(of->steps.at(step).first / numbers.first - 1) < unit);
          CHECK(std::abs(of->steps.at(step).second / numbers.second - 1) < 10 * unit);
        }
      }
      // One rounding less; in float the separate kernels do what they do anyway.
      if (precision == Precision::kF32) CHECK(refused.steps == apart_of.steps);
      if (precision == Precision::kF32) continue;
      CHECK(fused.steps != apart_of.steps);
      life.reset();  // one at a time
      recipe.checkpoint.snapshot_steps = 1;
      CHECK(train_on_double(plan_of(recipe), 9, std::vector<Death>{{Moment::kBegun, 2, 0}}).steps == fused.steps);
    }
  }

  TEST_CASE("fused products leave apart what stands between a branch and its sum, and other activations") {
    const std::vector<std::pair<const char*, std::function<void(Recipe&)>>> changes = {
        {"dropout", [](Recipe& r) { r.model.residual_dropout = 0.5; }},
        {"a scale", [](Recipe& r) { r.model.branch_scale = 0.5; }},
        {"norms behind the sum", [](Recipe& r) { r.model.block = BlockKind::kPostNorm; }},
        {"norms behind the branch", [](Recipe& r) { r.model.block = BlockKind::kOutNorm; }},
        {"a scaled stream", [](Recipe& r) { r.model.block = BlockKind::kDeepNorm, r.model.residual_scale = 2; }},
        {"parallel blocks", [](Recipe& r) { r.model.block = BlockKind::kParallel; }},
        {"exact gelu", [](Recipe& r) { r.model.activation = Activation::kGeluErf; }},
    };
    for (const auto& [what, change] : changes) {
      CAPTURE(what);
      Recipe recipe = small(false, Precision::kF32);
      recipe.checkpoint.snapshot_steps = 0;
      recipe.stop = {Span::Unit::kSteps, 1};
      change(recipe);
      const Plan plan = plan_of(recipe);
      const auto [loss, norm] = train_on_double(plan, 3).steps.at(1);
      const auto [wanted_loss, wanted_norm] =
          train_on_double(plan, 3, {}, nullptr, nullptr, {.fuses = false}).steps.at(1);
      CHECK(std::abs(loss / wanted_loss - 1) < 1e-5);
      CHECK(std::abs(norm / wanted_norm - 1) < 1e-4);
    }
  }

  TEST_CASE("the largest attention scores of a step have room in the plan, however many heads there are") {
    Recipe recipe = small(true, Precision::kF32);
    recipe.model.heads = recipe.model.kv_heads = 64;
    recipe.model.head_dim = 2;
    recipe.model.width = 128;
    recipe.model.context = 2;
    recipe.batch = {.samples = 65536, .micro = 65536};
    const auto bytes = [&] {
      const Plan plan = plan_of(recipe);
      return cuda::scratch_bytes(trainer::work_shapes(plan, 0));
    };
    const int64_t without = bytes();
    recipe.optimizer.qk_clip = 1;
    const kernels::AttentionDims dims{.batch = 65536,
                                      .tokens = recipe.model.context,
                                      .heads = 64,
                                      .kv_heads = 64,
                                      .head_dim = 2,
                                      .max_scores = DevicePtr<float>(reinterpret_cast<float*>(64))};
    const int64_t scores = kernels::cuda::attention_maxima(dims) * static_cast<int64_t>(sizeof(float));
    REQUIRE(scores > without);  // else nothing is shown
    CHECK(bytes() >= scores);
  }

  TEST_CASE("a step has one wait of the host, nothing is allocated after the start, and the plan knew every byte") {
    Recipe recipe = small(false, Precision::kBf16);
    recipe.checkpoint.snapshot_steps = 0;  // else the thread that copies waits too
    const Plan plan = plan_of(recipe);
    std::unique_ptr<Lived> life;
    const Told told = train_on_double(plan, 6, {}, nullptr, &life);
    const std::vector<simt::StreamDouble::Counts>& steps = life->steps;
    REQUIRE(steps.size() == 5);
    CHECK(steps[0].allocations == 1);
    for (size_t k = 1; k + 1 < steps.size(); ++k) {  // the last one is saved
      CAPTURE(k);
      CHECK(steps[k].allocations == 0);
      CHECK(steps[k].waits == 1);
      CHECK(steps[k].launches == steps[1].launches);
    }
    CHECK(steps.back().allocations == 0);

    auto opened = life->device.open();
    REQUIRE_OK(opened);
    const std::vector<int64_t> blocks = trainer::TrainState::blocks(plan, plan.rank(0), {});  // all of it is its own
    CHECK(told.on_device.at(0) == opened.value()->bytes_for(blocks, trainer::work_shapes(plan, 0)));
    const RankPlan rank = plan.rank(0);
    CHECK(told.allocated.at(0) ==
          rank.weight_bytes + rank.grad_bytes + rank.optimizer_bytes + largest_stage_buffers_bytes(plan, 0));
  }

  TEST_CASE(
      "a step beside a slow snapshot orders the work of one without, waits no more, and leaves the next one out") {
    struct Seen {
      Told told;
      int64_t launches = 0;  // of two steps
      std::vector<int64_t> waits, own_waits;
    };
    const auto train_with = [](int64_t snapshot_steps) {
      Recipe recipe = small(false, Precision::kBf16);
      recipe.checkpoint.snapshot_steps = snapshot_steps;
      const Plan plan = plan_of(recipe);
      const TempDir dir;
      Agent agent(plan, fresh_run_id(), dir.path);
      REQUIRE(agent.begin().ok());
      std::atomic<int64_t> reached = 0;
      auto life = std::make_unique<Lived>(6, 1, cairn::testing::DoubleWays{});
      // No part of the first snapshot arrives before the second step, with its update, is ordered.
      life->device.cuda.gate_copies([&](const void* host) {
        if (reached >= 2) return true;
        for (int64_t slot = 0; slot < agent.arena->slots(); ++slot) {
          const auto payload = agent.arena->payload(0, slot);
          if (host >= payload.data() && host < payload.data() + payload.size()) return false;
        }
        return true;
      });
      Seen seen;
      seen.told.on_step = [&](int64_t step) {
        const simt::StreamDouble::Counts counts = life->device.cuda.take_counts();
        if (step <= 2) seen.launches += counts.launches;
        seen.waits.push_back(counts.waits);
        seen.own_waits.push_back(simt::StreamDouble::take_own_waits());
        reached = step;
      };
      REQUIRE(live_once(plan, agent, {}, &seen.told, {}, cairn::testing::on_doubles(plan, life)));
      seen.told.on_step = {};
      return seen;
    };
    const Seen never = train_with(0), each = train_with(1);
    REQUIRE(each.waits.size() == 5);
    CHECK(each.launches == never.launches + 2);  // the first snapshot's checksums
    CHECK(each.own_waits[1] == 1);
    CHECK(each.waits[1] == 1);
    CHECK(never.waits[1] == 1);
    CHECK(never.told.left_out.empty());
    CHECK(each.told.left_out.contains(2));
    CHECK_FALSE(each.told.left_out.contains(5));  // the last one must be
    CHECK(each.told.steps == never.told.steps);
    CHECK(each.told.banks == never.told.banks);
  }

  TEST_CASE("attention by a library: all of a step has plans, made before it, in memory that the plan knew") {
    Recipe recipe = with_wide_heads();
    recipe.model.layers = 2;
    recipe.checkpoint.snapshot_steps = 0;
    const Plan plan = plan_of(recipe);
    const Told own = train_on_double(plan, 8);
    std::unique_ptr<Lived> life;
    const Told told = train_on_double(plan, 8, {}, nullptr, &life, {.cudnn = true});
    const simt::AttentionCounts& counts = life->device.attention.counts();
    const int64_t passes = 5 * plan.micro_batches * recipe.model.layers;
    CHECK(counts.built == 2);  // layers are alike
    CHECK(counts.forward == passes);
    CHECK(counts.backward == passes);
    CHECK(told.steps == own.steps);  // the double's kernels are Cairn's own
    for (size_t k = 1; k < life->steps.size(); ++k) CHECK(life->steps[k].allocations == 0);
    const WorkShapes work = trainer::work_shapes(plan, 0);
    REQUIRE(work.attention.size() == 1);
    CHECK(cuda::attention_workspace_bytes(work.attention) > 0);
    auto opened = life->device.open();
    REQUIRE_OK(opened);
    CHECK(told.on_device.at(0) == opened.value()->bytes_for(trainer::TrainState::blocks(plan, plan.rank(0), {}), work));
    CHECK(told.on_device.at(0) > own.on_device.at(0));
  }

  TEST_CASE(
      "attention that is more than a library's goes to Cairn's own kernels, layer by layer; none at all is refused") {
    Recipe recipe = with_wide_heads();
    recipe.model.layers = 2;
    recipe.model.attention_chunk = 4;
    recipe.model.chunk_layers = {0};
    const Plan mixed = plan_of(recipe);
    CHECK(trainer::work_shapes(mixed, 0).attention.size() == 1);
    std::unique_ptr<Lived> life;
    train_on_double(mixed, 8, {}, nullptr, &life, {.cudnn = true});
    CHECK(life->device.attention.counts().forward == 5 * mixed.micro_batches);  // of one layer
    CHECK(life->device.attention.counts().backward == 5 * mixed.micro_batches);
    const auto none = [&](auto change) {
      Recipe changed = with_wide_heads();
      change(changed);
      return trainer::work_shapes(plan_of(changed), 0).attention.empty();
    };
    CHECK_FALSE(none([](Recipe&) {}));
    CHECK(none([](Recipe& r) { r.model.attention_dropout = 0.1; }));
    CHECK(none([](Recipe& r) { r.model.score_cap = 5; }));
    CHECK(none([](Recipe& r) { r.objective.document_end = 1; }));
    CHECK(none([](Recipe& r) { r.optimizer.qk_clip = 1; }));
    life.reset();  // one at a time
    life = std::make_unique<Lived>(8, 1, cairn::testing::DoubleWays{.cudnn = true});
    auto opened = life->device.open();
    REQUIRE_OK(opened);
    const Status reserved = opened.value()->reserve({}, WorkShapes{});
    REQUIRE_FALSE(reserved.ok());
    CHECK(reserved.error().message == "cuDNN takes no attention of this run");
  }
}
