// The data-parallel axis: ZeRO stages, shard groups, buckets, overlap. What moves is what the plan says; what comes out
// depends on none of it.

#include <doctest/doctest.h>

#include "tests/runtime/trainer/harness.h"
#include "tests/runtime/trainer/plan_check.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

struct Layout {
  int64_t tp = 1, pp = 1, dp = 1;
  int zero = 0;
  int64_t shard = 0;
  bool sequence_parallel = false;
  int64_t virtual_stages = 1;
  bool keep = false;
  int64_t micro = 1;
  PipelineKind schedule = PipelineKind::k1F1B;
  RecomputeConfig recompute = {};
  int64_t world() const { return tp * pp * dp; }
  std::string text() const {
    return fmt::format("tp {} pp {} dp {} zero {} shard {} sp {} v {} keep {} micro {} {} recompute {} {}", tp, pp, dp,
                       zero, shard, sequence_parallel, virtual_stages, keep, micro, schedule_name(schedule),
                       static_cast<int>(recompute.mode), recompute.layers);
  }
};

/// Small buckets: many collectives, most of them of parts of tensors.
Recipe with(Recipe recipe, const Layout& l, int64_t bucket = 4000) {
  recipe.mesh.tp = l.tp;
  recipe.mesh.pp = l.pp;
  recipe.mesh.shard = l.shard;
  recipe.mesh.sequence_parallel = l.sequence_parallel;
  recipe.mesh.virtual_stages = l.virtual_stages;
  const bool interleaved = l.virtual_stages > 1 && l.schedule != PipelineKind::kZbV;
  recipe.schedule = interleaved ? PipelineKind::kInterleaved : l.schedule;
  recipe.recompute = l.recompute;
  recipe.optimizer.zero = l.zero;
  recipe.optimizer.bucket = bucket;
  recipe.optimizer.keep_after_forward = l.keep;
  recipe.batch.micro = l.micro;
  return recipe;
}

bool same_bits(const GlobalState& a, const GlobalState& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [key, values] : a) {
    const std::vector<float>& others = b.at(key);
    if (values.size() != others.size() || std::memcmp(values.data(), others.data(), values.size() * 4) != 0) {
      return false;
    }
  }
  return true;
}

Recipe short_recipe(bool llama, bool tied, int64_t steps) {
  Recipe recipe = tiny_recipe(llama, tied);
  recipe.stop = {Span::Unit::kSteps, static_cast<double>(steps)};
  recipe.optimizer.lr.clear();  // the same at every step, however many there are
  return recipe;
}

void check_step(const Recipe& recipe, const Layout& layout) {
  CAPTURE(layout.text());
  check_step_traffic(recipe, layout.world());
}

}  // namespace

TEST_SUITE("runtime/trainer/zero") {
  TEST_CASE("a step moves the bytes that the plan says, on every rank and in every group, to the byte and the call") {
    std::vector<Layout> layouts;
    for (const int zero : {0, 1, 2, 3}) {
      layouts.push_back({.dp = 2, .zero = zero});
      layouts.push_back({.tp = 2, .dp = 2, .zero = zero, .sequence_parallel = true});
      layouts.push_back({.pp = 2, .dp = 2, .zero = zero, .micro = 2});
      layouts.push_back({.tp = 2, .pp = 2, .dp = 2, .zero = zero});
      layouts.push_back({.pp = 2, .dp = 2, .zero = zero, .virtual_stages = 2});
      if (zero > 0) layouts.push_back({.dp = 4, .zero = zero, .shard = 2});
      if (zero > 0) layouts.push_back({.tp = 2, .dp = 4, .zero = zero, .shard = 2, .sequence_parallel = true});
    }
    layouts.push_back({});
    layouts.push_back({.tp = 4, .micro = 2});
    layouts.push_back({.pp = 4, .schedule = PipelineKind::kGpipe});
    layouts.push_back({.dp = 2, .zero = 3, .keep = true});
    layouts.push_back({.pp = 2, .dp = 2, .zero = 3, .virtual_stages = 2, .keep = true});
    layouts.push_back({.dp = 4, .zero = 3, .shard = 2, .keep = true});
    constexpr RecomputeMode kFull = RecomputeMode::kFull;
    for (const int zero : {0, 1}) {
      layouts.push_back({.pp = 2, .dp = 2, .zero = zero, .schedule = PipelineKind::kZbH1});
      layouts.push_back({.tp = 2, .pp = 2, .zero = zero, .sequence_parallel = true, .schedule = PipelineKind::kZbH1});
      layouts.push_back({.pp = 2, .dp = 2, .zero = zero, .virtual_stages = 2, .schedule = PipelineKind::kZbV});
    }
    layouts.push_back({.tp = 2,
                       .pp = 2,
                       .sequence_parallel = true,
                       .virtual_stages = 2,
                       .schedule = PipelineKind::kZbV,
                       .recompute = {kFull, 1}});
    layouts.push_back({.tp = 2, .pp = 2, .schedule = PipelineKind::kZbH1, .recompute = {kFull, 0, true}});
    layouts.push_back({.tp = 2, .recompute = {kFull, 0, true}});
    layouts.push_back({.tp = 2, .dp = 2, .zero = 3, .sequence_parallel = true, .recompute = {kFull}});
    layouts.push_back({.tp = 2, .pp = 2, .zero = 1, .recompute = {RecomputeMode::kSelective, 1}});
    bool tied = false;
    for (const Layout& layout : layouts) {
      tied = !tied;
      CAPTURE(tied);
      check_step(with(short_recipe(!tied, tied, 1), layout), layout);
    }
  }

  TEST_CASE(
      "ZeRO steps equal one rank's with experts, projections around the embedding, parallel branches and more norms") {
    const Layout split{.tp = 2, .dp = 2, .zero = 2, .sequence_parallel = true}, whole{.tp = 2, .pp = 2, .zero = 1};
    for (const Layout& layout : {split, whole}) {
      Recipe experts = with(short_recipe(true, false, 1), layout);
      experts.model.moe = {.experts = 4, .top_k = 2};
      check_step(experts, layout);
      Recipe projected = with(short_recipe(false, true, 1), layout);
      projected.model.embed_dim = 16;
      check_step(projected, layout);
      for (const BlockKind block : {BlockKind::kParallel, BlockKind::kParallelShared, BlockKind::kSandwich}) {
        Recipe other = with(short_recipe(false, false, 1), layout);
        other.model.block = block;
        check_step(other, layout);
      }
    }
  }

  TEST_CASE("overlapped or not, the bits are the same") {
    for (const Layout& layout :
         {Layout{.dp = 4}, Layout{.dp = 4, .zero = 1}, Layout{.dp = 2, .zero = 2},
          Layout{.dp = 4, .zero = 3, .shard = 2},
          Layout{.tp = 2, .pp = 2, .dp = 2, .zero = 3, .sequence_parallel = true},
          Layout{.pp = 2, .dp = 2, .zero = 1, .virtual_stages = 2},
          Layout{.pp = 2, .dp = 2, .zero = 1, .virtual_stages = 2, .schedule = PipelineKind::kZbV}}) {
      for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
        CAPTURE(layout.text());
        Recipe recipe = with(short_recipe(layout.dp == 4, layout.pp == 2, 8), layout);
        recipe.precision = precision;
        const auto beside = train_on_threads(recipe, layout.world());
        REQUIRE_OK(beside);
        recipe.optimizer.overlap = false;
        const auto after = train_on_threads(recipe, layout.world());
        REQUIRE_OK(after);
        CHECK(beside.value().losses == after.value().losses);
        CHECK(beside.value().norms == after.value().norms);
        CHECK(same_bits(beside.value().state, after.value().state));
      }
    }
  }

  TEST_CASE("gathered or held, in slots or all: ZeRO-2 and -3 give the same bits, with validation between") {
    for (const bool tied : {true, false}) {
      Recipe recipe = short_recipe(!tied, tied, 6);
      recipe.eval = {.every_steps = 2, .steps = 2};
      for (DataSource& source : recipe.data.sources) source.valid_path = source.path;
      const auto held = train_on_threads(with(recipe, {.dp = 2, .zero = 2}), 2);
      REQUIRE_OK(held);
      for (const Layout& layout : {Layout{.dp = 2, .zero = 3}, Layout{.dp = 2, .zero = 3, .keep = true}}) {
        const auto gathered = train_on_threads(with(recipe, layout), 2);
        REQUIRE_OK(gathered);
        CHECK(gathered.value().losses == held.value().losses);
        CHECK(gathered.value().valid == held.value().valid);
        CHECK(same_bits(gathered.value().state, held.value().state));
      }
    }
  }

  TEST_CASE(
      "with ZeRO-2 and -3 sums over micro-batches do not depend on how replicas, stages and buckets divide them") {
    Recipe recipe = short_recipe(false, false, 6);
    recipe.optimizer.clip = 0;  // the norm is a sum over shards
    const auto two = train_on_threads(with(recipe, {.dp = 2, .zero = 2}), 2);
    REQUIRE_OK(two);
    for (const Layout& layout :
         {Layout{.dp = 4, .zero = 2}, Layout{.dp = 8, .zero = 3}, Layout{.pp = 2, .dp = 2, .zero = 3},
          Layout{.pp = 2, .dp = 4, .zero = 2, .virtual_stages = 2}}) {
      CAPTURE(layout.text());
      const auto other = train_on_threads(with(recipe, layout, 5000), layout.world());
      REQUIRE_OK(other);
      CHECK(same_bits(other.value().state, two.value().state));
    }
  }

  TEST_CASE("ZeRO-3 gathers a layer once on the way there and once on the way back, less at the turns") {
    Recipe recipe = with(short_recipe(false, false, 1), {.dp = 2, .zero = 3});
    recipe.model.layers = 6;
    recipe.batch.samples = 4;  // two micro-batches
    const auto gathers = [](const Recipe& r) {
      const Plan plan = make_plan(r, 2).value();
      const RankPlan rank = plan.rank(0);
      int64_t count = 0;
      for (const UnitUse& use : unit_uses(rank, schedule_actions(plan.schedule(), 0))) count += use.gather ? 1 : 0;
      return count;
    };
    // Embedding and head once. Six layers through two slots: 6 there, 4 back (two are still there), then 4 and 4.
    CHECK(gathers(recipe) == 2 + 6 + 4 + 4 + 4);
    recipe.optimizer.keep_after_forward = true;
    CHECK(gathers(recipe) == 2 + 6);
  }

  TEST_CASE("a rank that fails between collectives ends the others at once, also with reductions under way") {
    Recipe recipe = with(short_recipe(false, true, 4), {.dp = 2, .zero = 2});
    std::filesystem::path bad = token_file(4000, 65, "bad");
    std::filesystem::copy_file(bad, bad.string() + "-cut", std::filesystem::copy_options::overwrite_existing);
    {  // a token outside of the vocabulary, late enough that both ranks have begun
      std::FILE* file = std::fopen((bad.string() + "-cut").c_str(), "r+b");
      const uint16_t wrong = 999;
      for (int64_t at = 0; at < 4000; at += 400) {
        std::fseek(file, at * 2, SEEK_SET);
        std::fwrite(&wrong, 2, 1, file);
      }
      std::fclose(file);
    }
    recipe.data.sources.resize(1);
    recipe.data.sources[0].path = bad.string() + "-cut";
    const auto begin = std::chrono::steady_clock::now();
    const auto failed = train_on_threads(recipe, 2);
    REQUIRE_FALSE(failed.ok());
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(30));  // the deadline is a minute
    std::filesystem::remove(bad.string() + "-cut");
  }
}
