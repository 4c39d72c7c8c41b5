// Experts over ranks: every way of dividing them trains as one rank does, in the memory and with the traffic planned.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "runtime/plan/activations.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/runtime/trainer/plan_check.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

constexpr PipelineKind kG = PipelineKind::kGpipe, kF = PipelineKind::k1F1B, kI = PipelineKind::kInterleaved,
                       kH = PipelineKind::kZbH1;

struct Layout {
  int64_t dp = 1, ep = 1, tp = 1, pp = 1;
  int zero = 0;
  bool sequence_parallel = false;
  int64_t shard = 0;
  PipelineKind schedule = kF;
  RecomputeMode recompute = RecomputeMode::kNone;
  int64_t bucket = 0;
  bool overlap = true;
  std::vector<MeshAxis> order = {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp};
  int64_t world() const { return dp * tp * pp; }
  std::string text() const {
    return fmt::format("dp {} ep {} tp {} pp {} zero {} sp {} shard {} {} recompute {} bucket {} overlap {}", dp, ep,
                       tp, pp, zero, sequence_parallel, shard, schedule_name(schedule), static_cast<int>(recompute),
                       bucket, overlap);
  }
};

Recipe with(Recipe recipe, const Layout& l) {
  recipe.mesh.tp = l.tp;
  recipe.mesh.pp = l.pp;
  recipe.mesh.ep = l.ep;
  recipe.mesh.shard = l.shard;
  recipe.mesh.order = l.order;
  recipe.mesh.sequence_parallel = l.sequence_parallel;
  recipe.mesh.virtual_stages = l.schedule == kI ? 2 : 1;
  recipe.schedule = l.schedule;
  recipe.recompute.mode = l.recompute;
  recipe.optimizer.zero = l.zero;
  recipe.optimizer.bucket = l.bucket;
  recipe.optimizer.overlap = l.overlap;
  return recipe;
}

Recipe expert_recipe(int64_t steps) {
  Recipe recipe = tiny_recipe(true, false);
  recipe.model.moe = {.experts = 4, .top_k = 2, .aux_loss = 0.02};
  recipe.batch.samples = 8;
  stop_after(recipe, steps);
  return recipe;
}

/// Layers of two kinds, with a gated MLP beside the experts. A stage of two in four has none.
Recipe mixed_recipe(int64_t steps) {
  Recipe recipe = expert_recipe(steps);
  MoeConfig& moe = recipe.model.moe;
  moe.ffn = 24;
  moe.dense_layers = {0, 1};
  moe.shared_ffn = 40;
  moe.shared_gate = true;
  moe.choice_bias = true;
  return recipe;
}

double worst(const GlobalState& got, const GlobalState& wanted) {
  double out = 0;
  for (const auto& [key, values] : wanted) {
    if (key.first != trainer::StateKind::kWeight) continue;
    const std::vector<float>& others = got.at(key);
    for (size_t i = 0; i < values.size(); ++i) {
      out = std::max(out, static_cast<double>(std::abs(values[i] - others[i])));
    }
  }
  return out;
}

void same(const Trained& got, const Trained& wanted) {
  CHECK(got.losses == wanted.losses);
  const auto alike = [](double a, double b) {
    return a == b || (std::isnan(a) && std::isnan(b));
  };  // skipped: not a number
  CHECK(std::ranges::equal(got.norms, wanted.norms, alike));
  REQUIRE(got.state.size() == wanted.state.size());
  int64_t differing = 0;
  for (const auto& [key, values] : wanted.state) {
    differing += std::memcmp(values.data(), got.state.at(key).data(), values.size() * 4) != 0 ? 1 : 0;
  }
  CHECK(differing == 0);
}

const std::vector<Layout> kLayouts = {
    {.dp = 2, .ep = 2},
    {.dp = 2, .ep = 2, .zero = 1},
    {.dp = 4, .ep = 2, .zero = 2},
    {.dp = 4, .ep = 2, .zero = 3},
    {.dp = 4, .ep = 4, .zero = 3},
    {.dp = 4, .ep = 2, .zero = 1, .bucket = 1000},
    {.dp = 4, .ep = 2, .zero = 0, .overlap = false},
    {.dp = 8, .ep = 2, .zero = 2, .shard = 2},
    {.dp = 8, .ep = 4, .zero = 1, .shard = 4},
    {.dp = 2, .ep = 2, .tp = 2, .zero = 1, .sequence_parallel = true},
    {.dp = 2, .ep = 2, .tp = 2, .pp = 2, .zero = 2},
    {.dp = 2, .ep = 2, .pp = 2, .zero = 3, .schedule = kI},
    {.dp = 2, .ep = 2, .pp = 2, .zero = 1, .schedule = kH},
    {.dp = 2, .ep = 2, .pp = 2, .schedule = kG, .recompute = RecomputeMode::kFull},
    {.dp = 2, .ep = 2, .tp = 2, .order = {MeshAxis::kDp, MeshAxis::kTp, MeshAxis::kPp}},
};

}  // namespace

TEST_SUITE("runtime/trainer/expert") {
  TEST_CASE("losses and weights of every way to divide the experts are one rank's, in the planned memory") {
    const Recipe recipe = expert_recipe(6);
    const auto serial = train_on_threads(recipe, 1);
    REQUIRE_OK(serial);
    CHECK(serial.value().losses.back() < serial.value().losses.front() - 0.05);
    for (const Layout& layout : kLayouts) {
      CAPTURE(layout.text());
      const Recipe cut = with(recipe, layout);
      const auto got = train_on_threads(cut, layout.world());
      REQUIRE_OK(got);
      REQUIRE(got.value().losses.size() == 6);
      for (size_t k = 0; k < 6; ++k) {
        CHECK(got.value().losses[k] == doctest::Approx(serial.value().losses[k]).epsilon(1e-5));
      }
      // Adam divides a gradient by its own size: where that is about nothing but roundings, a weight may go either way
      // for a step. A sum that is wrong moves many by more.
      CHECK(worst(got.value().state, serial.value().state) < 1e-3);
      check_allocated(make_plan(cut, layout.world()).value(), got.value());
    }
  }

  TEST_CASE("deterministic = \"layout\": the same bits for every ep, ZeRO stage, dp and pp, in float and bf16") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      Recipe recipe = expert_recipe(3);
      recipe.precision = precision;
      recipe.deterministic = Deterministic::kLayout;
      recipe.batch.samples = 12;
      recipe.model.residual_dropout = 0.1;
      const auto serial = train_on_threads(recipe, 1);
      REQUIRE_OK(serial);
      for (const Layout& layout : std::vector<Layout>{{.dp = 2, .ep = 1, .zero = 1},
                                                      {.dp = 2, .ep = 2, .zero = 1},
                                                      {.dp = 2, .ep = 2, .zero = 3},
                                                      {.dp = 4, .ep = 2, .zero = 2},
                                                      {.dp = 4, .ep = 4, .zero = 3},
                                                      {.dp = 6, .ep = 2, .zero = 1, .bucket = 500},
                                                      {.dp = 4, .ep = 2, .pp = 2, .zero = 2},
                                                      {.dp = 2, .ep = 2, .pp = 2, .zero = 1, .schedule = kG},
                                                      {.dp = 4, .ep = 2, .zero = 3, .overlap = false}}) {
        CAPTURE(layout.text());
        const Recipe cut = with(recipe, layout);
        const auto got = train_on_threads(cut, layout.world());
        REQUIRE_OK(got);
        same(got.value(), serial.value());
        check_allocated(make_plan(cut, layout.world()).value(), got.value());
      }
    }
  }

  TEST_CASE("layers without experts among those with, a gate: every layout is one rank, in the planned memory") {
    const Recipe recipe = mixed_recipe(4);
    const auto serial = train_on_threads(recipe, 1);
    REQUIRE_OK(serial);
    for (Layout layout : kLayouts) {
      if (layout.dp > 4) continue;
      CAPTURE(layout.text());
      Recipe cut = with(recipe, layout);
      const int64_t stages = layout.pp * cut.mesh.virtual_stages;
      if (stages == 2) cut.mesh.stages = {2, 2};  // experts in the second alone
      const auto got = train_on_threads(cut, layout.world());
      REQUIRE_OK(got);
      for (size_t k = 0; k < serial.value().losses.size(); ++k) {
        CHECK(got.value().losses[k] == doctest::Approx(serial.value().losses[k]).epsilon(1e-5));
      }
      CHECK(worst(got.value().state, serial.value().state) < 1e-3);
      check_allocated(make_plan(cut, layout.world()).value(), got.value());
    }
    Recipe fixed = recipe;
    fixed.deterministic = Deterministic::kLayout;
    const auto bits = train_on_threads(fixed, 1).value();
    for (const Layout& layout : std::vector<Layout>{
             {.dp = 2, .ep = 2, .zero = 1}, {.dp = 4, .ep = 4, .zero = 3}, {.dp = 4, .ep = 2, .pp = 2, .zero = 2}}) {
      CAPTURE(layout.text());
      same(train_on_threads(with(fixed, layout), layout.world()).value(), bits);
    }
    const Plan plan = make_plan(recipe, 1).value();
    for (size_t t = 0; t < plan.tensors.size(); ++t) {  // nothing moves them
      if (!plan.tensors[t].balances) continue;
      for (const float bias : bits.state.at({trainer::StateKind::kWeight, static_cast<int64_t>(t)})) CHECK(bias == 0);
    }
  }

  TEST_CASE("a run goes on with another ep as if nothing had happened") {
    Recipe recipe = mixed_recipe(8);
    recipe.deterministic = Deterministic::kLayout;
    const auto whole = train_on_threads(recipe, 1).value();
    const std::vector<Layout> turns = {
        {.dp = 4, .ep = 4, .zero = 1}, {.dp = 4, .ep = 2, .zero = 3}, {}, {.dp = 2, .ep = 2, .zero = 2}};
    Trained now;
    for (int64_t done = 0; done < 8; done += 2) {
      const Layout& layout = turns[done / 2];
      CAPTURE(layout.text());
      auto next = train_on_threads(with(recipe, layout), layout.world(), done == 0 ? nullptr : &now, done + 2);
      REQUIRE_OK(next);
      now = std::move(next).value();
    }
    CHECK(now.losses == std::vector<double>(whole.losses.end() - 2, whole.losses.end()));
    now.losses = whole.losses;
    now.norms = whole.norms;
    same(now, whole);
  }

  TEST_CASE("a step moves what the plan says, on every rank and in every group") {
    for (const Layout& layout : std::vector<Layout>{{.dp = 2, .ep = 2},
                                                    {.dp = 4, .ep = 2, .zero = 1, .bucket = 4000},
                                                    {.dp = 4, .ep = 2, .zero = 2, .shard = 2},
                                                    {.dp = 4, .ep = 2, .zero = 3},
                                                    {.dp = 2, .ep = 2, .tp = 2, .zero = 3, .sequence_parallel = true},
                                                    {.dp = 2, .ep = 2, .pp = 2, .zero = 1, .schedule = kI},
                                                    {.dp = 2, .ep = 2, .recompute = RecomputeMode::kFull}}) {
      CAPTURE(layout.text());
      check_step_traffic(with(mixed_recipe(1), layout), layout.world());
      Recipe recipe = with(expert_recipe(1), layout);
      check_step_traffic(recipe, layout.world());
      if (layout.zero == 0 || layout.shard > 0 || layout.tp > 1) continue;
      recipe.deterministic = Deterministic::kLayout;
      check_step_traffic(recipe, layout.world());
    }
  }

  TEST_CASE("biases of routers: steps of their rate, the same in every layout, kept when the run goes on") {
    Recipe recipe = expert_recipe(5);
    recipe.model.moe = {.experts = 8,
                        .top_k = 2,
                        .aux_loss = 0.001,
                        .router = RouterKind::kSigmoid,
                        .shared_experts = 1,
                        .groups = 4,
                        .groups_per_token = 2,
                        .scale = 2.5,
                        .bias_rate = 0.0625};
    recipe.deterministic = Deterministic::kLayout;
    const auto serial = train_on_threads(recipe, 1).value();
    const Plan plan = make_plan(recipe, 1).value();
    int64_t moved = 0;
    for (size_t t = 0; t < plan.tensors.size(); ++t) {
      if (!plan.tensors[t].balances) continue;
      for (const float bias : serial.state.at({trainer::StateKind::kWeight, static_cast<int64_t>(t)})) {
        const float steps = bias / 0.0625f;
        CHECK(steps == std::round(steps));
        CHECK(std::abs(steps) <= 5);
        moved += bias != 0 ? 1 : 0;
      }
      for (const float moment : serial.state.at({trainer::StateKind::kExpAvg, static_cast<int64_t>(t)})) {
        CHECK(moment == 0);
      }
    }
    CHECK(moved > 16);  // of 32
    for (const Layout& layout : std::vector<Layout>{{.dp = 4, .ep = 4, .zero = 2},
                                                    {.dp = 2, .ep = 2, .pp = 2, .zero = 3},
                                                    {.dp = 4, .ep = 2, .zero = 1, .bucket = 300}}) {
      CAPTURE(layout.text());
      same(train_on_threads(with(recipe, layout), layout.world()).value(), serial);
      const auto half = train_on_threads(with(recipe, layout), layout.world(), nullptr, 2).value();
      auto rest = train_on_threads(recipe, 1, &half).value();
      rest.losses = serial.losses;
      rest.norms = serial.norms;
      same(rest, serial);
    }
    // With tensor parallelism sums differ, choices do not.
    recipe.deterministic = Deterministic::kRun;
    const auto cut =
        train_on_threads(with(recipe, {.dp = 2, .ep = 2, .tp = 2, .zero = 1, .sequence_parallel = true}), 4).value();
    for (size_t t = 0; t < plan.tensors.size(); ++t) {
      if (!plan.tensors[t].balances) continue;
      const std::pair key{trainer::StateKind::kWeight, static_cast<int64_t>(t)};
      CHECK(cut.state.at(key) == serial.state.at(key));
    }
  }

  TEST_CASE("an update that is skipped, LAMB, banks: experts are as the rest") {
    Recipe recipe = expert_recipe(4);
    recipe.deterministic = Deterministic::kLayout;
    recipe.optimizer.kind = OptimizerKind::kLamb;
    const auto serial = train_on_threads(recipe, 1).value();
    const Layout layout{.dp = 4, .ep = 2, .zero = 2};
    same(train_on_threads(with(recipe, layout), 4, nullptr, 0, {}, 3).value(), serial);
    recipe.optimizer.kind = OptimizerKind::kAdamW;
    recipe.precision = Precision::kF16;
    recipe.loss_scale = {.initial = 0x1p40, .window = 1, .hysteresis = 1};  // too large at first
    const auto half = train_on_threads(recipe, 1).value();
    CHECK(half.position.loss_scale.skipped > 0);
    same(train_on_threads(with(recipe, layout), 4, nullptr, 0, {}, 3).value(), half);
  }
}
