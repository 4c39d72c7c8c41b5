// The matrix of layouts: every axis crossed with every other, and of all that the plan accepts a sample, drawn alike
// each time, trains as one rank does, in the memory and with the traffic planned. CAIRN_ALL_LAYOUTS=1 takes all of
// them.
//
// Tolerance: 1e-5 relative on losses, 1e-4 on norms, as in parity_test.cc and context_test.cc.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "runtime/plan/activations.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/runtime/trainer/plan_check.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

constexpr int64_t kSteps = 3, kMostRanks = 8, kSample = 240;

struct Layout {
  int64_t tp = 1, pp = 1, dp = 1, cp = 1, ep = 1;
  int zero = 0;
  bool sequence_parallel = false;
  PipelineKind schedule = PipelineKind::k1F1B;
  RecomputeMode recompute = RecomputeMode::kNone;
  Deterministic deterministic = Deterministic::kRun;
  OptimizerKind optimizer = OptimizerKind::kAdamW;

  int64_t world() const { return tp * pp * dp * cp; }
  std::string text() const {
    return fmt::format("tp {} pp {} dp {} cp {} ep {} zero {} sp {} {} recompute {} deterministic {} optimizer {}", tp,
                       pp, dp, cp, ep, zero, sequence_parallel, schedule_name(schedule), static_cast<int>(recompute),
                       static_cast<int>(deterministic), static_cast<int>(optimizer));
  }
};

Recipe with(Recipe recipe, const Layout& l) {
  recipe.mesh.tp = l.tp;
  recipe.mesh.pp = l.pp;
  recipe.mesh.dp = l.dp;
  recipe.mesh.cp = l.cp;
  recipe.mesh.ep = l.ep;
  recipe.mesh.sequence_parallel = l.sequence_parallel;
  const bool two = l.schedule == PipelineKind::kInterleaved || l.schedule == PipelineKind::kZbV;
  recipe.mesh.virtual_stages = two ? 2 : 1;
  recipe.schedule = l.schedule;
  recipe.recompute.mode = l.recompute;
  recipe.optimizer.zero = l.zero;
  recipe.deterministic = l.deterministic;
  recipe.optimizer.kind = l.optimizer;
  if (l.optimizer == OptimizerKind::kAdafactor) recipe.optimizer.beta1 = 0;
  return recipe;
}

/// Axis by axis; what says nothing new, as a schedule of one stage, is left out.
std::vector<Layout> all_layouts(bool experts) {
  std::vector<Layout> out;
  for (const int64_t tp : {1, 2, 4}) {
    for (const int64_t pp : {1, 2, 4}) {
      for (const int64_t dp : {1, 2, 4}) {
        for (const int64_t cp : {1, 2}) {
          for (const int64_t ep : {1, 2, 4}) {
            for (const PipelineKind schedule : {PipelineKind::kGpipe, PipelineKind::k1F1B, PipelineKind::kInterleaved,
                                                PipelineKind::kZbH1, PipelineKind::kZbV}) {
              for (const int zero : {0, 1, 2, 3}) {
                for (const bool sp : {false, true}) {
                  for (const RecomputeMode recompute :
                       {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull}) {
                    for (const Deterministic deterministic : {Deterministic::kRun, Deterministic::kLayout}) {
                      for (const OptimizerKind optimizer : {OptimizerKind::kAdamW, OptimizerKind::kAdafactor}) {
                        const Layout layout{tp,       pp, dp, cp, ep, zero, sp, schedule, recompute, deterministic,
                                            optimizer};
                        const bool says_nothing = (pp == 1 && schedule != PipelineKind::k1F1B) ||
                                                  (dp * cp == 1 && zero > 0) || (tp == 1 && sp) || (ep > 1 && !experts);
                        if (layout.world() > 1 && layout.world() <= kMostRanks && !says_nothing) out.push_back(layout);
                      }
                    }
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/trainer/matrix") {
  TEST_CASE("a sample of all layouts, each axis with each other, trains as one rank does") {
    const bool all = std::getenv("CAIRN_ALL_LAYOUTS") != nullptr;
    int64_t trained = 0, accepted = 0, same_bits = 0;
    std::map<std::string, std::set<std::string>> pairs;  // value of one axis -> values of others it was seen with
    for (const bool experts : {false, true}) {
      Recipe base = tiny_recipe(experts, !experts);
      if (experts) base.model.moe = {.experts = 4, .top_k = 2, .aux_loss = 0.2, .aux_scope = AuxScope::kModel};
      if (!experts) {  // with deterministic = "layout" sums over channels in four parts, over tokens in two
        base.model.head_dim = 16;
        base.model.context = 512;
      }
      base.batch.samples = 8;
      stop_after(base, kSteps);
      std::map<OptimizerKind, Trained> serial;
      for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kAdafactor}) {
        auto trained = train_on_threads(with(base, {.optimizer = kind}), 1);
        REQUIRE_OK(trained);
        serial[kind] = std::move(trained).value();
      }
      const auto in_order = train_on_threads(with(base, {.deterministic = Deterministic::kLayout}), 1);
      REQUIRE_OK(in_order);

      std::vector<Layout> layouts;
      for (const Layout& layout : all_layouts(experts)) {
        if (make_plan(with(base, layout), layout.world()).ok()) layouts.push_back(layout);
      }
      accepted += std::ssize(layouts);
      std::vector<std::pair<uint64_t, size_t>> order;  // shuffled, alike each time
      for (size_t k = 0; k < layouts.size(); ++k) order.emplace_back(mix64(k), k);
      std::sort(order.begin(), order.end());
      if (!all) order.resize(std::min<size_t>(order.size(), kSample / 2));
      for (const auto& [key, index] : order) {
        const Layout& layout = layouts[index];
        CAPTURE(experts);
        CAPTURE(layout.text());
        const Recipe cut = with(base, layout);
        const auto got = train_on_threads(cut, layout.world());
        REQUIRE_OK(got);
        REQUIRE(got.value().losses.size() == kSteps);
        for (size_t step = 0; step < kSteps; ++step) {
          CHECK(got.value().losses[step] == doctest::Approx(serial[layout.optimizer].losses[step]).epsilon(1e-5));
          CHECK(got.value().norms[step] == doctest::Approx(serial[layout.optimizer].norms[step]).epsilon(1e-4));
        }
        if (layout.deterministic == Deterministic::kLayout) {
          CHECK(got.value().losses == in_order.value().losses);
          CHECK(got.value().norms == in_order.value().norms);
          CHECK(got.value().state == in_order.value().state);
          ++same_bits;
        }
        check_allocated(make_plan(cut, layout.world()).value(), got.value());
        if (trained++ % 8 == 0) {
          Recipe one = cut;
          one.stop.value = 1;
          check_step_traffic(one, layout.world());
        }
        const std::vector<std::string> values = {
            fmt::format("tp {}", layout.tp),
            fmt::format("pp {}", layout.pp),
            fmt::format("dp {}", layout.dp),
            fmt::format("cp {}", layout.cp),
            fmt::format("zero {}", layout.zero),
            std::string(schedule_name(layout.schedule)),
            fmt::format("recompute {}", static_cast<int>(layout.recompute)),
            fmt::format("deterministic {}", static_cast<int>(layout.deterministic)),
            fmt::format("optimizer {}", static_cast<int>(layout.optimizer))};
        for (const std::string& a : values) {
          for (const std::string& b : values) {
            if (a != b) pairs[a].insert(b);
          }
        }
      }
    }
    MESSAGE(trained << " of " << accepted << " layouts that the plan accepts");
    MESSAGE(same_bits << " of them in the mode that gives every layout the same bits");
    CHECK(trained >= 200);
    CHECK(same_bits >= 15);
    for (const auto& [value, others] : pairs) {
      CAPTURE(value);
      CHECK(others.size() >= 8);  // of some 20
    }
  }
}
