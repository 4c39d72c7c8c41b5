// The planner: bytes, placement, the model of a step, and the search for layouts.

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "runtime/plan/communication.h"
#include "tests/support/ok.h"
#include "tools/planner/cost.h"
#include "tools/planner/memory.h"
#include "tools/planner/search.h"

using namespace cairn;
using namespace cairn::tools;

namespace {

/// 8 layers of a Llama-like model in bf16 whose shapes tp, pp and dp of a few cut.
Recipe recipe_of(const MeshConfig& mesh, int64_t samples = 64) {
  Recipe out;
  out.name = "planned";
  out.model = {.layers = 8,
               .width = 1024,
               .heads = 16,
               .kv_heads = 16,
               .head_dim = 64,
               .ffn = 4096,
               .context = 2048,
               .vocab = 32000};
  out.precision = Precision::kBf16;
  out.mesh = mesh;
  out.batch = {.samples = samples, .micro = 1};
  out.stop = {.unit = Span::Unit::kSteps, .value = 100};
  return out;
}

Plan plan_of(const Recipe& recipe, int64_t world) {
  const Result<Plan> plan = make_plan(recipe, world);
  REQUIRE_OK(plan);
  return plan.value();
}

Machine a100() { return find_machine("a100-80").value(); }

const Traffic& traffic_of(const std::vector<GroupTraffic>& all, std::string_view group) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const GroupTraffic& one) { return one.group == group; });
  REQUIRE(found != all.end());
  return found->traffic;
}

}  // namespace

TEST_SUITE("tools/planner/planner") {
  TEST_CASE("the order of the mesh decides which groups cross nodes, and that has its price") {
    MeshConfig mesh{.tp = 8, .pp = 1, .dp = 8};
    const Plan tp_first = plan_of(recipe_of(mesh), 64);
    const Placement near = place_groups(tp_first, 8);
    CHECK_FALSE(near.tp.crosses);
    CHECK(near.replica.crosses);
    CHECK(near.replica.in_node == 1);
    mesh.order = {MeshAxis::kDp, MeshAxis::kTp, MeshAxis::kPp};
    const Plan dp_first = plan_of(recipe_of(mesh), 64);
    const Placement far = place_groups(dp_first, 8);
    CHECK(far.tp.crosses);
    CHECK_FALSE(far.replica.crosses);
    const StepCost good = machine_cost(tp_first, a100()), bad = machine_cost(dp_first, a100());
    CHECK(bad.tensor_ms > 3 * good.tensor_ms);
    CHECK(bad.reduce_ms < good.reduce_ms);
    CHECK(bad.compute_ms == doctest::Approx(good.compute_ms));
    // All on one node: no order matters.
    Machine wide = a100();
    wide.node_devices = 64;
    CHECK(machine_cost(tp_first, wide).total() == doctest::Approx(machine_cost(dp_first, wide).total()));
  }

  TEST_CASE("a group that has several members on each node leaves it by as many ports") {
    const std::vector<int64_t> halves = {0, 1, 2, 3, 8, 9, 10, 11}, apart = {0, 8, 16, 24, 32, 40, 48, 56};
    CHECK(span_of(halves, 8).in_node == 4);
    CHECK(span_of(halves, 8).crosses);
    CHECK(span_of(apart, 8).in_node == 1);
    CHECK_FALSE(span_of(std::vector<int64_t>{4, 5, 6, 7}, 8).crosses);
    CHECK(span_of(std::vector<int64_t>{6, 7, 8}, 8).in_node == 1);
  }

  TEST_CASE("mesh.shard decides what gathers cross nodes") {
    Recipe whole = recipe_of({.tp = 1, .pp = 1, .dp = 64});
    whole.optimizer.zero = 3;
    Recipe by_node = whole;
    by_node.mesh.shard = 8;
    const Plan wide = plan_of(whole, 64), narrow = plan_of(by_node, 64);
    CHECK(place_groups(wide, 8).shard.crosses);
    CHECK_FALSE(place_groups(narrow, 8).shard.crosses);
    CHECK(place_groups(narrow, 8).replica.crosses);
    CHECK(machine_cost(narrow, a100()).gather_ms < machine_cost(wide, a100()).gather_ms);
  }

  TEST_CASE("collectives of weights and gradients are counted as the plan of a rank counts them") {
    for (const int zero : {0, 1, 2, 3}) {
      for (const bool keep : {false, true}) {
        for (const MeshConfig& mesh : {MeshConfig{.tp = 1, .pp = 1, .dp = 8}, MeshConfig{.tp = 2, .pp = 1, .dp = 4},
                                       MeshConfig{.tp = 1, .pp = 2, .dp = 4}}) {
          if (keep && zero < 3) continue;
          Recipe recipe = recipe_of(mesh, 16);
          recipe.optimizer.zero = zero;
          recipe.optimizer.keep_after_forward = keep;
          const int64_t world = mesh.tp * mesh.dp * mesh.pp;
          const Plan plan = plan_of(recipe, world);
          CAPTURE(zero);
          CAPTURE(keep);
          CAPTURE(mesh.tp);
          CAPTURE(mesh.pp);
          double reduces = 0, gathers = 0;  // of the rank that has most
          for (int64_t pp = 0; pp < mesh.pp; ++pp) {
            const RankPlan rank = plan.rank(plan.mesh.rank({.tp = 0, .dp = 0, .pp = pp}));
            const Traffic traffic = traffic_of(step_traffic(plan, rank), "dp");
            reduces = std::max(reduces,
                               static_cast<double>(zero > 0 ? traffic.reduce_scatter.calls : traffic.all_reduce.calls));
            gathers = std::max(gathers, static_cast<double>(traffic.all_gather.calls));
          }
          const StateCalls calls = state_calls(plan);
          CHECK(calls.reduces == doctest::Approx(reduces).epsilon(0.25));
          CHECK(calls.gathers == doctest::Approx(gathers).epsilon(0.25));
        }
      }
    }
  }

  TEST_CASE("ZeRO-3 pays a latency for each gather: a step of many ranks is not free") {
    Recipe recipe = recipe_of({.tp = 1, .pp = 1, .dp = 2048}, 2048);
    recipe.optimizer.zero = 3;
    recipe.optimizer.overlap = false;
    const Plan plan = plan_of(recipe, 2048);
    const StateCalls calls = state_calls(plan);
    CHECK(calls.gathers >= 2 * (8 - 2));  // both passes of each layer, except what the two slots still hold
    Machine quick = a100();
    quick.network_latency_us = 0;
    const double latency_ms = machine_cost(plan, a100()).gather_ms - machine_cost(plan, quick).gather_ms;
    CHECK(latency_ms == doctest::Approx(calls.gathers * 2047 * 8e-3));
  }

  TEST_CASE("FLOPs a token know the sequences of the batch and windows") {
    Recipe recipe = recipe_of({.tp = 1, .pp = 1, .dp = 1});
    const double whole = plan_of(recipe, 1).flops_per_token();
    const double a_key = 12.0 * 8 * 16 * 64;
    recipe.batch.tokens = 512;
    CHECK(whole - plan_of(recipe, 1).flops_per_token() == doctest::Approx(a_key * (2048 - 512) / 2));
    recipe.batch.tokens = 0;
    recipe.model.sliding_window = 256;
    const double near = 256 - 256.0 * 256 / (2 * 2048);
    CHECK(whole - plan_of(recipe, 1).flops_per_token() == doctest::Approx(a_key * (1024 - near)));
    recipe.model.window_layers = {1, 3};
    CHECK(whole - plan_of(recipe, 1).flops_per_token() == doctest::Approx(a_key * (1024 - near) / 4));
    recipe.model.sliding_window = 4096;  // wider than any sequence
    CHECK(plan_of(recipe, 1).flops_per_token() == doctest::Approx(whole));
  }

  TEST_CASE("fp32 has its own peak, and the utilisation is of that") {
    Recipe recipe = recipe_of({.tp = 1, .pp = 1, .dp = 1});
    const Plan half = plan_of(recipe, 1);
    recipe.precision = Precision::kF32;
    const Plan full = plan_of(recipe, 1);
    CHECK(machine_cost(full, a100()).compute_ms > 10 * machine_cost(half, a100()).compute_ms);
    const StepEstimate time = estimate(full, a100(), place_groups(full, 8));
    CHECK(time.utilisation > 0.3);
    CHECK(time.utilisation < a100().gemm_fraction);
    CHECK(time.utilisation == doctest::Approx(full.flops_per_token() * 64 * 2048 / (time.cost.total() * 1e9 * 19.5)));
    CHECK(time.low_ms() == doctest::Approx(0.7 * time.cost.total()));
  }

  TEST_CASE("state on a disk costs its bytes, and takes no memory of a rank") {
    Recipe recipe = recipe_of({.tp = 1, .pp = 1, .dp = 8});
    recipe.optimizer.zero = 1;
    const Plan kept = plan_of(recipe, 8);
    recipe.optimizer.offload = "/nvme";
    const Plan away = plan_of(recipe, 8);
    CHECK(machine_cost(kept, a100()).offload_ms == 0);
    Machine machine = a100();  // 2 GB/s a host of 8 ranks
    CHECK(machine_cost(away, machine).offload_ms ==
          doctest::Approx(2.0 * static_cast<double>(away.checkpoint_bytes) / 2e9 * 1e3));
    machine.storage_gb_per_s = 8;
    CHECK(machine_cost(away, machine).offload_ms ==
          doctest::Approx(2.0 * static_cast<double>(away.checkpoint_bytes) / 8e9 * 1e3));
    CHECK(largest_rank_bytes(kept) - largest_rank_bytes(away) == stage_memory(kept, 0, false).snapshot_bytes);
  }

  TEST_CASE("the bytes of the search are those of the plan, gathered weights and boundaries among them") {
    for (const int zero : {0, 1, 2, 3}) {
      for (const int64_t pp : {1, 2, 4}) {
        Recipe recipe = recipe_of({.tp = 2, .pp = pp, .dp = 4});
        recipe.optimizer.zero = zero;
        const Plan plan = plan_of(recipe, 8 * pp);
        int64_t most = 0;
        for (int64_t p = 0; p < pp; ++p) {
          const StageMemory stage = stage_memory(plan, p, false);
          CHECK((stage.gathered_bytes > 0) == (zero == 3));
          CHECK((stage.boundary_bytes > 0) == (pp > 1));
          most = std::max(most, stage.total());
        }
        CHECK(largest_rank_bytes(plan) == most);
      }
    }
  }

  TEST_CASE("figures are of a step that happens: the last batch phase that the run reaches") {
    Recipe recipe = recipe_of({.tp = 1, .pp = 4, .dp = 1}, 8);
    recipe.batch.phases = {{.at = {.unit = Span::Unit::kSteps, .value = 50}, .samples = 64, .micro = 2, .tokens = 1024},
                           {.at = {.unit = Span::Unit::kSteps, .value = 500}, .samples = 128}};  // after the stop
    const Plan plan = in_last_phase(plan_of(recipe, 4));
    CHECK(plan.micro_batches == 32);
    CHECK(plan.recipe.batch.micro == 2);
    CHECK(plan.sequence_tokens == 1024);
    CHECK(plan.tokens_per_step == 64 * 2048);
    CHECK(bubble_fraction(plan.schedule()) == doctest::Approx(3.0 / 35));
  }

  TEST_CASE("save and load take the bytes of each host at its rate") {
    Recipe recipe = recipe_of({.tp = 2, .pp = 1, .dp = 8});
    const Plan plan = plan_of(recipe, 16);
    const std::vector<StageMemory> stages = {stage_memory(plan, 0, false)};
    const StorageTime time = storage_time(plan, stages, 8, 4);
    CHECK(time.hosts == 2);
    CHECK(time.save_s == doctest::Approx(static_cast<double>(plan.checkpoint_bytes) / 8e9));
    CHECK(time.load_s > 7.5 * time.save_s);  // without ZeRO each of 8 replicas reads all of it
    recipe.optimizer.zero = 1;
    const Plan cut = plan_of(recipe, 16);
    const StorageTime shared = storage_time(cut, std::vector<StageMemory>{stage_memory(cut, 0, false)}, 8, 4);
    CHECK(shared.load_s < 1.2 * shared.save_s);
  }

  TEST_CASE("times within the model's error are even") {
    StepEstimate a{.cost = {.compute_ms = 100}, .error = 0.15}, b{.cost = {.compute_ms = 114}, .error = 0.15};
    CHECK(even(a, b));
    CHECK(even(b, a));
    b.cost.compute_ms = 116;
    CHECK_FALSE(even(a, b));
    CHECK_FALSE(even(b, a));
  }

  TEST_CASE("a search takes pins, its rows are the plans of their layouts, and its memory leaves the reserve") {
    const Recipe recipe = recipe_of({.tp = 1, .pp = 1, .dp = 0}, 128);
    const Result<Pins> pins = parse_pins("tp=4,zero=1,micro=2,schedule=1f1b,recompute=none");
    REQUIRE_OK(pins);
    const Result<SearchResult> found = search_layouts(recipe, 32, a100(), pins.value(), 5);
    REQUIRE_OK(found);
    REQUIRE(found.value().fitting.size() > 1);
    for (const Candidate& candidate : found.value().fitting) {
      const Layout& l = candidate.layout;
      CHECK(l.tp == 4);
      CHECK(l.zero == 1);
      CHECK(l.micro == 2);
      CHECK(l.schedule == PipelineKind::k1F1B);
      CHECK(l.recompute == RecomputeMode::kNone);
      const Plan plan = plan_of(with_layout(recipe, l), 32);
      CHECK(candidate.ms() == doctest::Approx(machine_cost(plan, a100()).total()));
      CHECK(candidate.rank_bytes == largest_rank_bytes(plan));
      CHECK(candidate.micro_batches == plan.micro_batches);
    }
    Machine tight = a100();
    tight.memory_bytes = tight.reserve_bytes + found.value().fitting.front().rank_bytes - 1;
    const Result<SearchResult> less = search_layouts(recipe, 32, tight, pins.value(), 5);
    REQUIRE_OK(less);
    for (const Candidate& candidate : less.value().fitting) CHECK(candidate.rank_bytes <= tight.usable_bytes());
    const Result<SearchResult> none = search_layouts(recipe, 32, a100(), parse_pins("tp=3").value(), 5);
    REQUIRE_FALSE(none.ok());
    CHECK(none.error().message.find("--pin tp=3") != std::string::npos);
  }

  TEST_CASE("a search finds as many fitting layouts as there are, and what it shows of memory is a size of its plan") {
    Recipe recipe = recipe_of({.tp = 1, .pp = 1, .dp = 0}, 64);
    recipe.model.width = 8192;
    recipe.model.heads = recipe.model.kv_heads = 64;
    recipe.model.head_dim = 128;
    recipe.model.ffn = 4 * 8192;
    recipe.model.layers = 16;
    Machine machine = a100();
    machine.memory_bytes = machine.reserve_bytes + (int64_t{16} << 30);
    const auto exact = [&](const Candidate& one) {
      return largest_rank_bytes(plan_of(with_layout(recipe, one.layout), 32));
    };
    const Result<SearchResult> all = search_layouts(recipe, 32, machine, {}, 1'000'000);
    REQUIRE_OK(all);
    REQUIRE(all.value().fitting.size() > 5);
    REQUIRE(all.value().too_large.size() > 100);
    const Result<SearchResult> found = search_layouts(recipe, 32, machine, {}, 5);
    REQUIRE_OK(found);
    REQUIRE(found.value().fitting.size() == 5);
    for (size_t i = 0; i < 5; ++i) {
      CHECK(found.value().fitting[i].layout == all.value().fitting[i].layout);
      CHECK(found.value().fitting[i].rank_bytes == exact(found.value().fitting[i]));
    }
    int64_t bounds = 0;
    for (size_t i = 0; i < found.value().too_large.size(); ++i) {
      const Candidate& one = found.value().too_large[i];
      bounds += one.exact ? 0 : 1;
      if (i < 3) CHECK(one.exact);
      if (one.exact) CHECK(one.rank_bytes == exact(one));
      CHECK(one.rank_bytes <= exact(one));
      CHECK(one.rank_bytes > machine.usable_bytes());
      CHECK((one.loses.find("at least") == std::string::npos) == one.exact);
    }
    CHECK(bounds > 0);
    const std::string text = search_text(recipe, found.value(), 32, machine);
    CHECK(text.find("at least") == std::string::npos);  // what a person sees are sizes
    // Where nothing fits, the smallest rank is a size too.
    machine.memory_bytes = machine.reserve_bytes + (int64_t{1} << 30);
    const Pins pins = parse_pins("zero=1").value();
    const Result<SearchResult> none = search_layouts(recipe, 32, machine, pins, 5);
    REQUIRE_OK(none);
    CHECK(none.value().fitting.empty());
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Candidate& one : none.value().too_large) least = std::min(least, exact(one));
    CHECK(none.value().least_bytes == least);
  }

  TEST_CASE("a search takes the memory of the stage that needs most, and the time of the last") {
    Recipe recipe = recipe_of({.tp = 1, .pp = 1, .dp = 0}, 32);
    const Pins pins = parse_pins("tp=4,zero=1,micro=2,schedule=1f1b,recompute=none").value();
    const Result<SearchResult> short_one = search_layouts(recipe, 8, a100(), pins, 5);
    recipe.data.sources = {{.name = "a", .path = "a"}};
    recipe.optimizer.peak_lr = 1e-3;
    recipe.eval.steps = 1;
    recipe.stages = {{.at = {Span::Unit::kFraction, 0.5}, .changes = R"({"batch.samples":64})"}};
    const Result<SearchResult> found = search_layouts(recipe, 8, a100(), pins, 5);
    REQUIRE_OK(short_one);
    REQUIRE_OK(found);
    REQUIRE(found.value().fitting.size() == short_one.value().fitting.size());
    for (size_t i = 0; i < found.value().fitting.size(); ++i) {
      const Candidate& one = found.value().fitting[i];
      Recipe last = with_layout(recipe, one.layout);
      last.stages.clear();
      last.batch.samples = 64;
      CHECK(one.micro_batches == plan_of(last, 8).micro_batches);
      CHECK(one.ms() == doctest::Approx(machine_cost(plan_of(last, 8), a100()).total()));
      CHECK(one.rank_bytes == largest_rank_bytes(plan_of(last, 8)));
    }
  }

  TEST_CASE("a search with batch.uneven looks at layouts that do not divide the batch") {
    Recipe recipe = recipe_of({.tp = 1, .pp = 1, .dp = 0}, 66);
    const Pins pins = parse_pins("dp=8,micro=2").value();
    CHECK_FALSE(search_layouts(recipe, 8, a100(), pins, 1).ok());
    recipe.batch.uneven = true;
    const Result<SearchResult> found = search_layouts(recipe, 8, a100(), pins, 1);
    REQUIRE_OK(found);
    CHECK(found.value().fitting.at(0).micro_batches == 5);
  }

  TEST_CASE("a search recommends nothing that a plan refuses: shard groups divide the replicas of its layouts") {
    Recipe recipe = recipe_of({.tp = 1, .pp = 1, .dp = 0}, 128);
    recipe.mesh.shard = 8;
    recipe.optimizer.zero = 1;
    const Result<SearchResult> found = search_layouts(recipe, 8, a100(), {}, 400);
    REQUIRE_OK(found);
    bool sharded = false;
    for (const Candidate& candidate : found.value().fitting) {
      CAPTURE(layout_text(candidate.layout));
      REQUIRE_OK(make_plan(with_layout(recipe, candidate.layout), 8));
      sharded = sharded || candidate.layout.zero > 0;
    }
    CHECK(sharded);
  }

  TEST_CASE("a pin that means nothing is refused by name") {
    for (const auto& [text, says] : {std::pair("tp", "NAME=VALUE"),
                                     {"tp=", "a number from 1"},
                                     {"tp=0", "a number from 1"},
                                     {"zero=4", "0, 1, 2 or 3"},
                                     {"schedule=best", "gpipe, 1f1b"},
                                     {"recompute=some", "none, selective or full"},
                                     {"cp=2", "--set"},
                                     {"tp=8,sequence_parallel=1", "true or false"},
                                     {"tp=8x", "a number from 1"}}) {
      CAPTURE(text);
      const Result<Pins> pins = parse_pins(text);
      REQUIRE_FALSE(pins.ok());
      CHECK(pins.error().message.find(says) != std::string::npos);
    }
  }

  TEST_CASE("this host is divided among its ranks") {
    Calibration measured{.cpu = "a cpu", .cores = 8, .peak_f32_tflops = 1, .peak_bf16_tflops = 2, .copy_gb_per_s = 40};
    const Machine rank = host_machine(measured, 4, int64_t{64} << 30);
    CHECK(rank.peak_tflops(Precision::kF32) == doctest::Approx(0.25));
    CHECK(rank.peak_tflops(Precision::kBf16) == doctest::Approx(0.5));
    CHECK(rank.memory_gb_per_s == doctest::Approx(10));
    CHECK(rank.usable_bytes() == int64_t{16} << 30);
    CHECK(rank.source.find("a cpu") != std::string::npos);
    CHECK(place_groups(plan_of(recipe_of({.tp = 2, .pp = 1, .dp = 2}), 4), rank.node_devices).tp.crosses == false);
  }
}
