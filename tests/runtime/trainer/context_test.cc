// Context parallelism: sequences over ranks train as on one rank, in the memory and with the traffic planned.
//
// Tolerance: 1e-5 relative on losses, as for tensor parallelism (parity_test.cc): sums over the tokens of a sequence
// are taken in another order, and 16 of them, in chunks of 2 or 4, are no tile of the kernels. Where no layout may
// show, trajectory_test.cc holds them equal to the bit.

#include <doctest/doctest.h>

#include "runtime/plan/activations.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/runtime/trainer/plan_check.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

struct Layout {
  int64_t cp = 2, tp = 1, pp = 1, dp = 1, ep = 1;
  int zero = 0;
  bool sequence_parallel = false;
  RecomputeMode recompute = RecomputeMode::kNone;
  PipelineKind schedule = PipelineKind::k1F1B;
  std::vector<MeshAxis> order = {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp};
  int64_t world() const { return cp * tp * pp * dp; }
  std::string text() const {
    return fmt::format("cp {} tp {} pp {} dp {} ep {} zero {} sp {} recompute {} {}", cp, tp, pp, dp, ep, zero,
                       sequence_parallel, static_cast<int>(recompute), schedule_name(schedule));
  }
};

Recipe with(Recipe recipe, const Layout& l) {
  recipe.mesh.cp = l.cp;
  recipe.mesh.tp = l.tp;
  recipe.mesh.pp = l.pp;
  recipe.mesh.ep = l.ep;
  recipe.mesh.order = l.order;
  recipe.mesh.sequence_parallel = l.sequence_parallel;
  recipe.recompute.mode = l.recompute;
  recipe.schedule = l.schedule;
  recipe.optimizer.zero = l.zero;
  return recipe;
}

Recipe short_recipe(bool llama, int64_t steps) {
  Recipe recipe = tiny_recipe(llama, !llama);
  stop_after(recipe, steps);
  recipe.batch = {.samples = 8, .micro = 2};
  return recipe;
}

void trains_as(const Recipe& cut, int64_t world, const Trained& serial) {
  const auto got = train_on_threads(cut, world);
  REQUIRE_OK(got);
  REQUIRE(got.value().losses.size() == serial.losses.size());
  for (size_t k = 0; k < serial.losses.size(); ++k) {
    CHECK(got.value().losses[k] == doctest::Approx(serial.losses[k]).epsilon(1e-5));
    CHECK(got.value().norms[k] == doctest::Approx(serial.norms[k]).epsilon(1e-4));
  }
  for (size_t s = 0; s < serial.source_losses.back().size(); ++s) {
    CHECK(got.value().source_losses.back()[s].second ==
          doctest::Approx(serial.source_losses.back()[s].second).epsilon(1e-5));
  }
  REQUIRE(got.value().valid.size() == serial.valid.size());
  for (size_t v = 0; v < serial.valid.size(); ++v) {
    CHECK(got.value().valid[v] == doctest::Approx(serial.valid[v]).epsilon(1e-5));
  }
  check_allocated(make_plan(cut, world).value(), got.value());
}

}  // namespace

TEST_SUITE("runtime/trainer/context") {
  TEST_CASE("losses, norms and validation of every way to divide sequences are one rank's") {
    const std::vector<Layout> layouts = {
        {},
        {.cp = 4},
        {.dp = 2, .zero = 1},
        {.dp = 2, .zero = 3},
        {.cp = 2, .tp = 2, .sequence_parallel = true},
        {.cp = 2, .tp = 2, .pp = 2, .dp = 2, .zero = 2},
        {.pp = 2, .zero = 1, .schedule = PipelineKind::kZbH1},
        {.cp = 4, .zero = 2, .recompute = RecomputeMode::kFull},
        {.recompute = RecomputeMode::kSelective},
        {.tp = 2, .dp = 2, .order = {MeshAxis::kDp, MeshAxis::kCp, MeshAxis::kPp, MeshAxis::kTp}},
    };
    for (const bool llama : {false, true}) {
      Recipe recipe = short_recipe(llama, 4);
      recipe.eval = {.every_steps = 4, .steps = 1};
      for (DataSource& source : recipe.data.sources) source.valid_path = source.path;
      if (llama) recipe.model.kv_heads = 4;
      const auto serial = train_on_threads(recipe, 1);
      REQUIRE_OK(serial);
      for (const Layout& layout : layouts) {
        CAPTURE(llama);
        CAPTURE(layout.text());
        trains_as(with(recipe, layout), layout.world(), serial.value());
      }
    }
  }

  TEST_CASE("context parallelism gives one rank's losses with windows, ALiBi, dropout, short sequences and experts") {
    struct Variant {
      const char* name;
      bool llama;
      std::function<void(Recipe&)> change;
    };
    const std::vector<Variant> variants = {
        {"window", true, [](Recipe& r) { r.model.sliding_window = 5; }},
        {"alibi, parallel", false,
         [](Recipe& r) {
           r.model.positions = Positions::kAlibi;
           r.model.block = BlockKind::kParallel;
         }},
        {"rounded alibi", false,
         [](Recipe& r) {
           r.model.positions = Positions::kAlibi;
           r.model.alibi = AlibiForm::kRounded;
         }},
        {"top query layer", false, [](Recipe& r) { r.model.top_query = true; }},
        {"both ways", true, [](Recipe& r) { r.model.mask = Mask::kBidirectional; }},
        {"dropout", false,
         [](Recipe& r) { r.model.embedding_dropout = r.model.attention_dropout = r.model.residual_dropout = 0.2; }},
        {"sequences of 8 and 16 tokens, dynamic rope", true,
         [](Recipe& r) {
           r.batch.tokens = 8;
           r.batch.phases = {{.at = {Span::Unit::kSteps, 2}, .tokens = 16}};
           r.model.rope = {.scaling = RopeScaling::kDynamic, .factor = 2, .original_context = 4};
         }},
        {"experts", true,
         [](Recipe& r) { r.model.moe = {.experts = 4, .top_k = 2, .aux_loss = 0.1, .shared_experts = 1}; }},
        {"experts, balanced over all layers", true,
         [](Recipe& r) { r.model.moe = {.experts = 4, .top_k = 2, .aux_loss = 0.3, .aux_scope = AuxScope::kModel}; }},
    };
    for (const Variant& variant : variants) {
      CAPTURE(variant.name);
      Recipe recipe = short_recipe(variant.llama, 4);
      variant.change(recipe);
      const auto serial = train_on_threads(recipe, 1);
      REQUIRE_OK(serial);
      std::vector<Layout> layouts = {{}, {.tp = 2, .zero = 1, .sequence_parallel = true}};
      if (recipe.model.moe.experts > 0) {
        layouts.push_back({.dp = 2, .ep = 2, .zero = 2});
        layouts.push_back({.pp = 2, .recompute = RecomputeMode::kFull});
      }
      for (const Layout& layout : layouts) {
        CAPTURE(layout.text());
        trains_as(with(recipe, layout), layout.world(), serial.value());
      }
    }
  }

  TEST_CASE("a run goes on with another cp") {
    Recipe recipe = short_recipe(true, 6);
    const auto whole = train_on_threads(recipe, 1).value();
    const auto first = train_on_threads(with(recipe, {.dp = 2, .zero = 1}), 4, nullptr, 3).value();
    const auto rest = train_on_threads(with(recipe, {.cp = 4}), 4, &first).value();
    for (size_t k = 0; k < 3; ++k) CHECK(rest.losses[k] == doctest::Approx(whole.losses[k + 3]).epsilon(1e-5));
  }

  TEST_CASE("a step moves what the plan says, on every rank and in every group") {
    for (const Layout& layout : std::vector<Layout>{{},
                                                    {.cp = 4, .zero = 1},
                                                    {.tp = 2, .dp = 2, .zero = 3, .sequence_parallel = true},
                                                    {.pp = 2, .recompute = RecomputeMode::kFull},
                                                    {.recompute = RecomputeMode::kSelective}}) {
      CAPTURE(layout.text());
      check_step_traffic(with(short_recipe(true, 1), layout), layout.world());
    }
    Recipe experts = short_recipe(true, 1);
    experts.model.moe = {.experts = 4, .top_k = 2, .aux_loss = 0.1};
    const Layout layout{.dp = 2, .ep = 2, .zero = 1};
    check_step_traffic(with(experts, layout), layout.world());
    experts.model.moe.aux_scope = AuxScope::kModel;
    const Layout staged{.pp = 2};
    check_step_traffic(with(experts, staged), staged.world());
  }

  TEST_CASE("sequences that cannot be cut are refused with those that can") {
    Recipe recipe = short_recipe(true, 1);
    recipe.mesh.cp = 3;
    const auto refused = make_plan(recipe, 3);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message ==
          "mesh.cp = 3 cuts sequences into 6 chunks, and 16 tokens are not divisible by that; accepted: context 12 or "
          "18");
  }
}
