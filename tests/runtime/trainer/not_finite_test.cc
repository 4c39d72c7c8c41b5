// What a run does when loss or gradient norm of a step is not finite: whose doing it is, in any layout.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/core/finite.h"
#include "runtime/trainer/ruin.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

Recipe cut(Recipe recipe, int64_t tp, int64_t pp, int64_t dp) {
  recipe.mesh.tp = tp;
  recipe.mesh.pp = pp;
  recipe.mesh.dp = dp;
  return recipe;
}

/// One source, whose last token id stands at one place alone.
std::string file_with_one_rare_token() {
  static const testing::TempDir dir("rare");
  const auto path = dir / "tokens";
  std::vector<uint16_t> tokens(4000);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(mix64(i) % 64);
  tokens[1234] = 64;
  std::FILE* file = std::fopen(path.c_str(), "wb");
  std::fwrite(tokens.data(), 2, tokens.size(), file);
  std::fclose(file);
  return path.string();
}

/// Guards state that no one copies: an update continues at once.
class NoCopies final : public CopyGate {
 public:
  int64_t block_bytes() const override { return int64_t{1} << 40; }
  void order_after_copy(Stream&, std::span<const DeviceBytes>) override {}
  int64_t waited_ns() const override { return 0; }
};

bool says(const Error& error, const char* text) { return error.message.find(text) != std::string::npos; }

}  // namespace

TEST_SUITE("runtime/trainer/not_finite") {
  TEST_CASE("values that are no numbers are counted, wherever they stand") {
    std::vector<float> values(10000, 1.5f);
    CHECK(count_not_finite(values) == 0);
    values[0] = std::numeric_limits<float>::quiet_NaN();
    values[4095] = -std::numeric_limits<float>::infinity();
    values[4096] = -std::numeric_limits<float>::quiet_NaN();
    values[9999] = std::numeric_limits<float>::infinity();
    values[5000] = std::numeric_limits<float>::max();
    values[5001] = std::numeric_limits<float>::denorm_min();
    CHECK(count_not_finite(values) == 4);
    CHECK(count_not_finite(std::span<const float>()) == 0);
  }

  TEST_CASE("an update that ruins the weights is found out at the next step, and its step condemned by every rank") {
    Recipe recipe = tiny_recipe(false, false);
    recipe.optimizer.lr = {};
    recipe.stop = {Span::Unit::kSteps, 30};
    const auto good = train_on_threads(recipe, 1, nullptr, 6).value();
    recipe.optimizer.peak_lr = 1e30;
    for (const auto& [tp, pp, dp] : {std::tuple(1, 1, 1), {2, 1, 1}, {1, 2, 2}}) {
      CAPTURE(tp);
      CAPTURE(pp);
      std::vector<int64_t> condemned;
      const int64_t world = tp * pp * dp;
      const auto stopped =
          train_on_threads(cut(recipe, tp, pp, dp), world, &good, 0, {}, 0, nullptr, {.condemned = &condemned});
      REQUIRE_FALSE(stopped.ok());
      CHECK(stopped.error().code == ErrorCode::kGuard);
      CHECK(says(stopped.error(), "step 8: loss "));
      CHECK(says(stopped.error(), "the update of step 7 has ruined them"));
      CHECK(condemned == std::vector<int64_t>(static_cast<size_t>(world), 7));
    }
  }

  TEST_CASE("a sample whose loss is not finite is named, and the state before it is not condemned") {
    Recipe recipe = tiny_recipe(false, false);
    recipe.stop = {Span::Unit::kSteps, 60};
    recipe.data.sources = {
        {.kind = DataSource::Kind::kTokenFile, .name = "rare", .path = file_with_one_rare_token(), .dtype = "uint16"}};
    auto planted = train_on_threads(recipe, 1, nullptr, 2).value();
    // Weights that are finite, and that give no number where that token is read.
    const Plan plan = make_plan(recipe, 1).value();
    const auto table = std::ranges::find_if(
        plan.tensors, [](const auto& tensor) { return tensor.name.find("embed") != std::string::npos; });
    REQUIRE(table != plan.tensors.end());
    std::vector<float>& rows = planted.state.at({trainer::StateKind::kWeight, table - plan.tensors.begin()});
    for (int64_t i = 0; i < recipe.model.width; ++i) rows[static_cast<size_t>(64 * recipe.model.width + i)] = 3e38f;
    std::string first;
    for (const auto& [tp, pp, dp] : {std::tuple(1, 1, 1), {1, 2, 2}, {2, 1, 2}}) {
      CAPTURE(tp);
      CAPTURE(pp);
      std::vector<int64_t> condemned;
      const auto stopped = train_on_threads(cut(recipe, tp, pp, dp), tp * pp * dp, &planted, 0, {}, 0, nullptr,
                                            {.condemned = &condemned});
      REQUIRE_FALSE(stopped.ok());
      INFO(stopped.error().message);
      CHECK(stopped.error().code == ErrorCode::kGuard);
      CHECK(condemned.empty());
      CHECK(says(stopped.error(), "so the batch of step "));
      CHECK(says(stopped.error(), "source \"rare\""));
      CHECK(says(stopped.error(), "tokens: token 12"));  // 1234 is in its window
      const size_t at = stopped.error().message.find("position ");
      REQUIRE(at != std::string::npos);
      if (first.empty()) first = stopped.error().message.substr(at);
      CHECK(stopped.error().message.substr(at) == first);  // the same one in any layout
    }
  }

  TEST_CASE("a result that is finite when computed again, twice alike, is used, and the run is as if nothing was") {
    Recipe recipe = tiny_recipe(false, false);
    recipe.stop = {Span::Unit::kSteps, 8};
    const auto quiet = train_on_threads(recipe, 1, nullptr, 0, {}, 2).value();
    for (const int64_t flips : {1, 2, 3}) {  // passes of step 5 that see a flipped bit
      CAPTURE(flips);
      int64_t passes = 0;
      float kept = 0;
      std::vector<int64_t> condemned;
      const auto flip = [&](int64_t, int64_t step, const char* phase, std::byte* weights) {
        if (step != 5 || std::strcmp(phase, "forward and backward") != 0) return;
        auto* const at = reinterpret_cast<float*>(weights) + 5;
        if (passes == 0) kept = *at;
        *at = passes++ < flips ? std::numeric_limits<float>::quiet_NaN() : kept;
      };
      const auto run =
          train_on_threads(recipe, 1, nullptr, 0, {}, 2, nullptr, {.on_phase = flip, .condemned = &condemned});
      if (flips == 1) {
        REQUIRE(run.ok());
        CHECK(passes == 3);
        CHECK(run.value().losses == quiet.losses);
        CHECK(run.value().state == quiet.state);
      } else {
        REQUIRE_FALSE(run.ok());
        CHECK(passes == 2);
        CHECK(condemned.size() == 1);  // they give no number on the batch before either
      }
    }
  }

  TEST_CASE(
      "an update ordered before its loss is known writes nothing where that is not finite, and is ordered again") {
    NoCopies gate;
    const auto trained = [&](const Recipe& recipe, bool flips, CopyGate* by, int64_t world = 1) {
      int64_t passes = 0;
      float kept = 0;
      const auto flip = [&](int64_t rank, int64_t step, const char* phase, std::byte* weights) {
        if (!flips || rank != 0 || step != 5 || std::strcmp(phase, "forward and backward") != 0) return;
        auto* const at = reinterpret_cast<float*>(weights) + 5;
        if (passes == 0) kept = *at;
        *at = passes++ == 0 ? std::numeric_limits<float>::quiet_NaN() : kept;
      };
      auto run = train_on_threads(recipe, world, nullptr, 0, {}, by ? 0 : 2, nullptr, {.on_phase = flip, .gate = by});
      CHECK(passes == (flips ? 3 : 0));
      REQUIRE_OK(run);
      return std::move(run).value();
    };
    for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kLamb, OptimizerKind::kAdafactor}) {
      for (const bool more : {false, true}) {  // an average, scaled heads, and biases that balance experts
        CAPTURE(static_cast<int>(kind));
        CAPTURE(more);
        Recipe recipe = tiny_recipe(more, false);
        recipe.stop = {Span::Unit::kSteps, 8};
        recipe.optimizer.kind = kind;
        if (more) {
          recipe.optimizer.ema = 0.9;
          recipe.optimizer.qk_clip = 1e-3;  // heads are scaled in each step
          recipe.model.moe = {.experts = 4, .top_k = 2, .bias_rate = 0.001};
        }
        const auto quiet = trained(recipe, false, nullptr);  // from slot to slot: its loss is known before
        for (const bool flips : {false, true}) {
          CAPTURE(flips);
          const auto unseen = trained(recipe, flips, &gate);
          CHECK(unseen.losses == quiet.losses);
          CHECK(unseen.norms == quiet.norms);
          CHECK(unseen.state == quiet.state);
        }
      }
    }
    Recipe recipe = tiny_recipe(false, false);
    recipe.stop = {Span::Unit::kSteps, 8};
    for (const auto& [tp, pp, dp] : {std::tuple(1, 1, 2), {1, 2, 1}, {2, 1, 1}}) {  // all ranks find what one has
      CAPTURE(tp);
      CAPTURE(pp);
      const Recipe divided = cut(recipe, tp, pp, dp);
      const auto quiet = trained(divided, false, nullptr, 2);
      const auto unseen = trained(divided, true, &gate, 2);
      CHECK(unseen.losses == quiet.losses);
      CHECK(unseen.norms == quiet.norms);
      CHECK(unseen.state == quiet.state);
    }
  }

  TEST_CASE("the last step is tried once more after its update, which changes nothing; ruined there, it is condemned") {
    Recipe recipe = tiny_recipe(false, false);
    recipe.stop = {Span::Unit::kSteps, 7};
    const auto plain = train_on_threads(recipe, 1).value();
    std::vector<int64_t> condemned;
    const auto tried =
        train_on_threads(recipe, 1, nullptr, 0, {}, 0, nullptr, {.try_end = true, .condemned = &condemned}).value();
    CHECK(tried.losses == plain.losses);
    CHECK(tried.state == plain.state);
    CHECK(condemned.empty());
    CHECK(tried.position.metrics.find("\"end_loss\"") != std::string::npos);
    const auto good = train_on_threads(recipe, 1, nullptr, 6).value();
    recipe.optimizer.lr = {};
    recipe.optimizer.peak_lr = 1e30;
    CHECK(train_on_threads(recipe, 1, &good).ok());  // nobody looks
    const auto ruined =
        train_on_threads(recipe, 1, &good, 0, {}, 0, nullptr, {.try_end = true, .condemned = &condemned});
    REQUIRE_FALSE(ruined.ok());
    CHECK(says(ruined.error(), "step 7, the run's last"));
    CHECK(condemned == std::vector<int64_t>{7});
  }

  TEST_CASE("whose doing it is, in words") {
    trainer::RuinReport report{
        .step = 14, .loss = NAN, .norm = NAN, .own_batch = true, .other_loss = NAN, .vocab = 256};
    CHECK(report.ruined());
    CHECK(to_text(report).find("the weights of step 13 give loss nan on step 13's own batch too") != std::string::npos);
    report.other_loss = 3;
    CHECK_FALSE(report.ruined());
    CHECK(to_text(report).find("the batch of step 14 did it") != std::string::npos);
    report.ruined_weights = 1;
    CHECK(report.ruined());
    report.ruined_weights = 0;
    report.other_loss = 50;  // worse than knowing nothing, and no sample is to blame
    CHECK(report.ruined());
    report.samples = {"position 7"};
    CHECK_FALSE(report.ruined());
  }
}
