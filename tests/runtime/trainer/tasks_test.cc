// Texts that a run scores while it trains, and the end of a run whose metric no longer becomes better.

#include <doctest/doctest.h>

#include <algorithm>

#include "runtime/trainer/patience.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

constexpr int64_t kEvery = 3;

/// More than one pass has room for, of all lengths; two are longer than a sequence.
std::vector<data::ScoredText> texts() {
  std::vector<data::ScoredText> out;
  const uint64_t key = stream_key(5, "texts");
  for (int64_t k = 0; k < 41; ++k) {
    data::ScoredText text;
    const int64_t ids = 2 + (k * 7) % 21;
    for (int64_t i = 0; i < ids; ++i) text.ids.push_back(static_cast<int32_t>(mix64(key + 100 * k + i) % 65));
    text.scored = std::min<int64_t>(1 + k % 4, ids - 1);
    out.push_back(std::move(text));
  }
  return out;
}

/// Every score by itself.
std::vector<telemetry::TaskNumbers> all_scores(std::span<const data::TextScore> scores) {
  telemetry::TaskNumbers out{.task = "texts"};
  for (size_t k = 0; k < scores.size(); ++k) {
    out.numbers.emplace_back(fmt::format("sum {}", k), scores[k].logprob);
    out.numbers.emplace_back(fmt::format("first {}", k), scores[k].first_logprob);
  }
  return {out};
}

std::vector<telemetry::TaskNumbers> constant(std::span<const data::TextScore>) { return {{"facts", {{"acc", 0.5}}}}; }

Recipe recipe_of(int64_t steps = 6) {
  Recipe recipe = tiny_recipe(true, true);
  recipe.model.layers = 2;
  recipe.model.heads = recipe.model.kv_heads = 2;  // which layout's sums can be cut by
  recipe.model.head_dim = 16;
  recipe.model.ffn = 64;
  recipe.deterministic = Deterministic::kLayout;
  recipe.optimizer.zero = 1;
  recipe.tokenizer.kind = TokenizerConfig::Kind::kBytes;  // of texts that are ids already
  recipe.eval = {.every_steps = 0, .steps = 1, .tasks = {{.file = "texts.jsonl"}}, .tasks_steps = kEvery};
  stop_after(recipe, steps);
  return recipe;
}

using Told = std::vector<std::pair<int64_t, std::vector<std::pair<std::string, double>>>>;

Told told(const Trained& run) {
  Told out;
  for (const telemetry::StepMetrics& step : run.steps) {
    if (!step.tasks.empty()) out.emplace_back(step.step, step.tasks[0].numbers);
  }
  return out;
}

std::vector<int64_t> steps_told(const Trained& run) {
  std::vector<int64_t> out;
  for (const auto& [step, numbers] : told(run)) out.push_back(step);
  return out;
}

Trained trained(const Recipe& recipe, int64_t world, const Extra& extra, const Trained* from = nullptr,
                int64_t stop_after = 0) {
  Result<Trained> run = train_on_threads(recipe, world, from, stop_after, {}, 0, nullptr, extra);
  REQUIRE_OK(run);
  return std::move(run).value();
}

}  // namespace

TEST_SUITE("runtime/trainer/tasks") {
  TEST_CASE("texts have the same scores in all layouts, and change nothing in what is trained") {
    const Extra asks{.texts = texts(), .tasks_of = all_scores};
    for (const bool packs : {false, true}) {
      CAPTURE(packs);
      Recipe recipe = recipe_of();
      if (packs) recipe.objective.document_end = 64;
      const Trained serial = trained(recipe, 1, asks);
      CHECK(steps_told(serial) == std::vector<int64_t>{kEvery, 2 * kEvery});
      const Told of_serial = told(serial);
      REQUIRE(of_serial.size() == 2);
      CHECK(of_serial[0].second != of_serial[1].second);
      for (const auto& [name, score] : of_serial[0].second) {
        CAPTURE(name);
        CHECK(score < 0);
        CHECK(score > -200);
      }
      const Trained without = trained(recipe, 1, {});
      CHECK(told(without).empty());
      CHECK(without.losses == serial.losses);
      CHECK(without.state == serial.state);
      struct Layout {
        int64_t dp, tp, pp, cp;
      };
      for (const auto& [dp, tp, pp, cp] :
           std::vector<Layout>{{2, 1, 1, 1}, {1, 2, 1, 1}, {1, 1, 2, 1}, {1, 1, 1, 2}, {2, 1, 2, 1}, {2, 2, 1, 1}}) {
        CAPTURE(dp);
        CAPTURE(tp);
        CAPTURE(pp);
        CAPTURE(cp);
        Recipe other = recipe;
        other.mesh.tp = tp;
        other.mesh.pp = pp;
        other.mesh.cp = cp;
        if (cp > 1) other.deterministic = Deterministic::kRun;  // adds up attention in another order
        const Trained run = trained(other, dp * tp * pp * cp, asks);
        if (cp == 1) {
          CHECK(told(run) == of_serial);
          CHECK(run.losses == serial.losses);
          continue;
        }
        const Told of_run = told(run);
        REQUIRE(steps_told(run) == steps_told(serial));
        for (size_t k = 0; k < of_run[0].second.size(); ++k) {
          CHECK(of_run[0].second[k].second == doctest::Approx(of_serial[0].second[k].second).epsilon(2e-4));
        }
      }
    }
  }

  TEST_CASE("several texts in a sequence have the scores that each has by itself") {
    Recipe alone = recipe_of(kEvery), packed = alone;
    alone.optimizer.peak_lr = packed.optimizer.peak_lr = 0;  // equal weights, though losses differ
    packed.objective.document_end = 64;
    const Extra asks{.texts = texts(), .tasks_of = all_scores};
    const Trained a = trained(alone, 1, asks), b = trained(packed, 1, asks);
    REQUIRE(a.losses != b.losses);
    const auto one = told(a).at(0).second, other = told(b).at(0).second;
    REQUIRE(one.size() == 82);
    for (size_t k = 0; k < one.size(); ++k) {
      CAPTURE(one[k].first);
      CHECK(one[k].second == doctest::Approx(other[k].second).epsilon(1e-5));
    }
  }

  TEST_CASE("an evaluation that eval.budget has no time for is left out and said; the last one is not") {
    Recipe recipe = recipe_of(11);
    recipe.eval.budget = 1e-9;
    const Trained run = trained(recipe, 2, {.texts = texts(), .tasks_of = all_scores});
    CHECK(steps_told(run) == std::vector<int64_t>{3, 11});
    for (const telemetry::StepMetrics& step : run.steps) {
      CAPTURE(step.step);
      CHECK(step.tasks_left_out == (step.step == 6 || step.step == 9));
      CHECK(step.tasks_ms.has_value() == !step.tasks.empty());
    }
  }

  TEST_CASE("ranks that ask different texts stop instead of adding up unlike scores") {
    const Extra asks{.texts = texts(), .texts_left_out_on_last = 1, .tasks_of = all_scores};
    const Result<Trained> run = train_on_threads(recipe_of(), 2, nullptr, 0, {}, 0, nullptr, asks);
    REQUIRE_FALSE(run.ok());
    CHECK(run.error().message.find("the hosts ask different texts") != std::string::npos);
  }

  TEST_CASE("watch.early_stop ends the run, alike after a restart, and its end is the end") {
    Recipe recipe = recipe_of(20);
    recipe.watch.early_stop = {.metric = "eval/facts/acc", .evaluations = 2};
    const Extra asks{.texts = texts(), .tasks_of = constant};
    const Trained run = trained(recipe, 2, asks);
    CHECK(run.position.step == 9);  // the best at 3, none better at 6 and 9
    CHECK(run.steps.back().step == 9);
    REQUIRE(run.steps.back().ended_early.has_value());
    CHECK(run.steps.back().ended_early->best_step == 3);
    CHECK(run.steps.back().ended_early->evaluations == 2);
    CHECK(run.position.patience == trainer::PatienceState{"eval/facts/acc", 0.5, 3, 3, 2});
    const Trained half = trained(recipe, 2, asks, nullptr, 7);
    CHECK(half.position.step == 7);
    CHECK_FALSE(half.steps.back().ended_early.has_value());
    const Trained rest = trained(recipe, 2, asks, &half);
    CHECK(rest.position.step == 9);
    CHECK(rest.position.patience == run.position.patience);
    CHECK(rest.state == run.state);
    // A start at the end trains nothing, and reports it once more: the agent may not have heard.
    const Trained again = trained(recipe, 2, asks, &rest);
    REQUIRE(again.steps.size() == 1);
    CHECK(again.steps[0].step == 9);
    CHECK(again.steps[0].ended_early.has_value());
    Recipe longer = recipe;
    longer.watch.early_stop.evaluations = 3;
    CHECK(trained(longer, 2, asks, &rest).position.step == 12);
  }
}

TEST_SUITE("runtime/trainer/patience") {
  using trainer::ended_early, trainer::note_evaluation, trainer::PatienceState;

  TEST_CASE("accuracies become better upwards, losses downwards, and by `least` where it is given") {
    const auto steps_until = [](const PatienceConfig& patience, const std::vector<double>& values) {
      PatienceState state;
      for (size_t k = 0; k < values.size(); ++k) {
        note_evaluation(patience, static_cast<int64_t>(k + 1), values[k], &state);
        if (ended_early(patience, state)) return static_cast<int64_t>(k + 1);
      }
      return int64_t{0};
    };
    CHECK(steps_until({"valid_loss", 2, 0}, {3, 2, 2.5, 2}) == 4);
    CHECK(steps_until({"valid_loss", 2, 0}, {3, 2, 2.5, 1.9, 2, 1.8}) == 0);
    CHECK(steps_until({"eval/arc/acc", 2, 0}, {0.1, 0.2, 0.3, 0.25, 0.3}) == 5);
    CHECK(steps_until({"eval/wiki/loss", 1, 0}, {3, 2, 2.5}) == 3);
    CHECK(steps_until({"valid_loss", 1, 0.5}, {3, 2.5, 2.1}) == 3);       // 0.4 better than the best is not enough
    CHECK(steps_until({"valid_loss", 3, 0.5}, {3, 2.8, 2.6, 2.5}) == 0);  // together it is
    CHECK(steps_until({"valid_loss", 2, 0}, {NAN, 3, NAN, NAN}) == 4);
    CHECK(steps_until({"valid_loss", 2, 0}, {NAN, NAN, NAN}) == 2);
  }

  TEST_CASE("another metric begins anew, and no metric ends nothing") {
    PatienceState state;
    note_evaluation({"valid_loss", 1, 0}, 1, 2, &state);
    note_evaluation({"valid_loss", 1, 0}, 2, 3, &state);
    CHECK(ended_early({"valid_loss", 1, 0}, state));
    CHECK_FALSE(ended_early({"valid_loss", 2, 0}, state));
    CHECK_FALSE(ended_early({"eval/arc/acc", 1, 0}, state));
    CHECK_FALSE(ended_early({}, state));
    note_evaluation({"eval/arc/acc", 1, 0}, 3, 0.1, &state);
    CHECK(state == PatienceState{"eval/arc/acc", 0.1, 3, 1, 0});
  }
}
