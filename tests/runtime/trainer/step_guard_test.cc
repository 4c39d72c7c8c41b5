#include "runtime/trainer/step_guard.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "runtime/data/dataset.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

constexpr int64_t kContext = 16, kBatch = 8, kSteps = 110;

void write(const std::string& path, const std::vector<uint16_t>& tokens) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  std::fwrite(tokens.data(), 2, tokens.size(), file);
  std::fclose(file);
}

/// A run of few ids, which a model learns at once, except in the samples of `steps`, whose ids no other sample has.
/// `same`: theirs is one id.
Recipe dirty_recipe(const std::string& name, const std::vector<int64_t>& steps, bool same = false) {
  static const testing::TempDir dir("dirty");
  std::vector<uint16_t> tokens(kSteps * kBatch * kContext + 1);
  for (int64_t i = 0; i < std::ssize(tokens); ++i) {
    const double u = uniform_at(stream_key(3, "clean"), i);
    tokens[static_cast<size_t>(i)] = static_cast<uint16_t>(u < 0.6 ? 1 : u < 0.8 ? 2 : u < 0.95 ? 3 : 4);
  }
  Recipe recipe = tiny_recipe(true, true);
  recipe.model.layers = 2;
  recipe.model.heads = recipe.model.kv_heads = 2;
  recipe.model.head_dim = 16;
  recipe.model.ffn = 64;
  recipe.deterministic = Deterministic::kLayout;
  recipe.data.sources = {{.kind = DataSource::Kind::kTokenFile, .name = "a", .path = dir / name, .dtype = "uint16"}};
  recipe.batch.samples = kBatch;
  recipe.optimizer.zero = 1;
  recipe.watch.window = 32;
  stop_after(recipe, kSteps);
  write(dir / name, tokens);
  const data::Dataset dataset = data::open_dataset(recipe.data, recipe.model.vocab, kContext).value();
  const data::Sampler sampler = data::Sampler::make(data::sampler_spec(dataset, recipe).value()).value();
  for (const data::SampleRef& sample : sampler.peek(kSteps * kBatch)) {
    if (std::ranges::find(steps, sample.position / kBatch + 1) == steps.end()) continue;
    for (int64_t t = 1; t <= kContext; ++t)
      tokens[static_cast<size_t>(sample.start + t)] = static_cast<uint16_t>(40 + (same ? 0 : (sample.start + t) % 25));
  }
  write(dir / name, tokens);
  return recipe;
}

Recipe with_guard(Recipe recipe, int64_t at_most = 3) {
  recipe.watch.on_outlier = {GuardAction::kSkip};
  recipe.watch.skip.at_most = at_most;
  return recipe;
}

using Steps = std::vector<int64_t>;

/// Other weights on rank 1 in the first `passes` passes of step `at`: an error of its machine.
struct Flip {
  int64_t at = 0, passes = 1;
  int64_t seen = 0;
  std::vector<float> whole;

  std::function<void(int64_t, int64_t, const char*, std::byte*)> planted() {
    return [this](int64_t rank, int64_t step, const char* phase, std::byte* weights) {
      constexpr size_t kCount = 16'000;  // most of them
      if (rank != 1 || step != at || std::string_view(phase) != "forward and backward") return;
      float* const there = reinterpret_cast<float*>(weights);
      if (seen == 0) whole.assign(there, there + kCount);
      if (seen++ < passes) {
        for (size_t k = 0; k < kCount; ++k) there[k] = whole[k] * (4 + static_cast<float>(seen));
      } else {
        std::copy(whole.begin(), whole.end(), there);
      }
    };
  }
};

Result<Trained> with_flip(Recipe recipe, Flip flip) {
  return train_on_threads(recipe, 2, nullptr, 0, {}, 2, nullptr, {.on_phase = flip.planted()});
}

Steps skipped(const Trained& run) { return run.position.guards.skipped_steps; }

}  // namespace

TEST_SUITE("runtime/trainer/step_guard") {
  TEST_CASE(
      "the update of an outlier is left out, alike in eight layouts, and a recipe that names it has the same bits") {
    const Recipe plain = dirty_recipe("eight", {104});
    const Recipe guarded = with_guard(plain);
    const auto serial = train_on_threads(guarded, 1);
    REQUIRE_OK(serial);
    CHECK(skipped(serial.value()) == Steps{104});
    CHECK(serial.value().position.guards.skipped == 1);
    for (const telemetry::StepMetrics& step : serial.value().steps) {
      CHECK(step.skipped == (step.step >= 104 ? 1 : 0));
      CHECK(step.was_skipped() == (step.step == 104));
      CHECK(step.skip_why.empty() == (step.step != 104));
    }
    const auto without = train_on_threads(plain, 1);
    REQUIRE_OK(without);
    CHECK(skipped(without.value()).empty());
    CHECK(without.value().state != serial.value().state);
    Recipe named = plain;
    named.watch.skip_steps = {104};
    const auto replay = train_on_threads(named, 1);
    REQUIRE_OK(replay);
    CHECK(replay.value().losses == serial.value().losses);
    CHECK(replay.value().norms == serial.value().norms);
    CHECK(replay.value().state == serial.value().state);
    struct Layout {
      int64_t dp, tp, pp;
    };
    for (const auto& [dp, tp, pp] :
         std::vector<Layout>{{2, 1, 1}, {3, 1, 1}, {4, 1, 1}, {1, 2, 1}, {1, 1, 2}, {2, 2, 1}, {2, 1, 2}}) {
      CAPTURE(dp);
      CAPTURE(tp);
      CAPTURE(pp);
      Recipe other = guarded;
      other.batch.uneven = dp == 3;
      other.mesh.tp = tp;
      other.mesh.pp = pp;
      const auto run = train_on_threads(other, dp * tp * pp);
      REQUIRE_OK(run);
      CHECK(skipped(run.value()) == Steps{104});
      CHECK(run.value().losses == serial.value().losses);
      CHECK(run.value().state == serial.value().state);
    }
  }

  TEST_CASE("a restart in another layout decides as the run that was not stopped, right before the outlier too") {
    const Recipe guarded = with_guard(dirty_recipe("restart", {104, 107}));
    const auto whole = train_on_threads(guarded, 1);
    REQUIRE_OK(whole);
    CHECK(skipped(whole.value()) == Steps{104, 107});
    Recipe other = guarded;
    other.mesh.tp = 2;
    for (const int64_t at : {103, 104, 106}) {
      CAPTURE(at);
      const auto first = train_on_threads(other, 2, nullptr, at);
      REQUIRE_OK(first);
      const auto second = train_on_threads(guarded, 1, &first.value());
      REQUIRE_OK(second);
      CHECK(second.value().position.guards == whole.value().position.guards);
      CHECK(second.value().state == whole.value().state);
    }
  }

  TEST_CASE("no more updates are left out than watch.skip allows") {
    const Recipe recipe = dirty_recipe("bounded", {102, 104, 107});
    const auto run = train_on_threads(with_guard(recipe, 2), 1);
    REQUIRE_OK(run);
    CHECK(skipped(run.value()) == Steps{102, 104});
    Recipe brief = with_guard(recipe, 1);
    brief.watch.skip.within = 3;
    const auto again = train_on_threads(brief, 1);
    REQUIRE_OK(again);
    CHECK(skipped(again.value()) == Steps{102, 107});  // 104 is within 3 steps of 102
  }

  TEST_CASE(
      "an outlier of the machine is computed again and put right; one of the data is the same again and left out") {
    Recipe recipe = with_guard(dirty_recipe("again", {107}));
    recipe.watch.on_outlier = {GuardAction::kRecompute, GuardAction::kSkip};
    recipe.deterministic = Deterministic::kRun;
    recipe.optimizer.zero = 0;  // else weights still arrive from others when the error is planted
    const auto undisturbed = with_flip(recipe, {});
    REQUIRE_OK(undisturbed);
    const auto run = with_flip(recipe, {.at = 104});
    REQUIRE_OK(run);
    using Found = telemetry::ComputedAgain::Found;
    for (const telemetry::StepMetrics& step : run.value().steps) {
      CAPTURE(step.step);
      REQUIRE(step.again.has_value() == (step.step == 104 || step.step == 107));
      if (!step.again) continue;
      CHECK(!step.again->audit);
      CHECK(step.again->found == (step.step == 104 ? Found::kTransient : Found::kSame));
      CHECK((std::ranges::find(step.again->ranks, 1) != step.again->ranks.end()) == (step.step == 104));
    }
    CHECK(skipped(run.value()) == Steps{107});
    CHECK(run.value().losses == undisturbed.value().losses);
    CHECK(run.value().state == undisturbed.value().state);
    Recipe once = recipe;
    once.watch.recompute.at_most = 1;
    const auto bounded = with_flip(once, {});
    REQUIRE_OK(bounded);
    CHECK(bounded.value().position.guards.recomputed == Steps{107});
  }

  TEST_CASE("an audit finds a rank that has erred, and changes no bit of a run that is sound") {
    Recipe recipe = tiny_recipe(true, true);
    stop_after(recipe, 12);
    const auto plain = with_flip(recipe, {});
    recipe.watch.audit_steps = 4;
    using Found = telemetry::ComputedAgain::Found;
    for (const auto& [passes, found] : {std::pair(0, Found::kSame), {1, Found::kTransient}, {2, Found::kPersistent}}) {
      CAPTURE(passes);
      const auto run = with_flip(recipe, {.at = 8, .passes = passes});
      REQUIRE_OK(run);
      for (const telemetry::StepMetrics& step : run.value().steps) {
        CAPTURE(step.step);
        REQUIRE(step.again.has_value() == (step.step % 4 == 0));
        if (!step.again) continue;
        CHECK(step.again->audit);
        CHECK(step.again->found == (step.step == 8 ? found : Found::kSame));
        CHECK(step.again->since == (step.step < 12 || passes > 0 ? step.step / 8 * 4 : 8));
        CHECK((std::ranges::find(step.again->ranks, 1) != step.again->ranks.end()) == (step.step == 8 && passes > 0));
      }
      CHECK(run.value().position.guards.audited == 12);
      CHECK(run.value().state == plain.value().state);
    }
  }

  TEST_CASE("an update that is left out does not count: the run is that without the step's samples") {
    Recipe skips = tiny_recipe(true, true);
    skips.optimizer.lr.clear();
    stop_after(skips, 5);
    Recipe without = skips;
    skips.watch.skip_steps = {2};
    without.batch.skip = {"16..31"};
    stop_after(without, 4);
    const auto a = train_on_threads(skips, 1), b = train_on_threads(without, 1);
    REQUIRE_OK(a);
    REQUIRE_OK(b);
    CHECK(a.value().position.guards.skipped == 1);
    CHECK(a.value().state == b.value().state);
  }

  TEST_CASE("another batch is another level, and half a window of outliers is one too") {
    WatchConfig watch{.window = 32, .on_outlier = {GuardAction::kSkip}};
    trainer::GuardState state;
    const telemetry::WatchRules rules{.window = 32, .begin = 1};
    const auto step = [&](int64_t number, double loss, uint64_t level) {
      trainer::StepGuard guard(watch, rules, level, &state);
      const telemetry::StepVerdict verdict = guard.look(number, loss, 1);
      const bool skips = guard.skips(number, verdict);
      guard.note(number, verdict, skips);
      return verdict.outlier();
    };
    int64_t number = 0;
    for (; number < 40; ++number) CHECK(!step(number + 1, 3 + 0.01 * static_cast<double>(number % 3), 1));
    CHECK(step(++number, 5, 1));
    CHECK(!step(++number, 5, 2));
    while (number < 80) CHECK(!step(++number, 5, 2));
    for (int64_t k = 0; k < 16; ++k) CHECK(step(++number, 9, 2));
    CHECK(!step(++number, 9, 2));
    CHECK(state.skipped == 3);  // as watch.skip allows
  }

  TEST_CASE("a loss that is another mean has another level") {
    const Recipe plain = tiny_recipe(true, true);
    Recipe weighed = plain, masked = plain;
    weighed.data.sources[0].weigh = DataSource::Weigh::kSample;
    masked.data.mask_repeats = {.period = 13, .count = 32};
    Plan plan = make_plan(plain, 1).value();
    const uint64_t before = trainer::level_key(plan);
    for (const Recipe& other : {weighed, masked}) {
      plan.recipe = other;
      CHECK(trainer::level_key(plan) != before);
    }
  }

  TEST_CASE("steps that the recipe names use up no try of the guard") {
    WatchConfig watch{.window = 32, .on_outlier = {GuardAction::kSkip}};
    watch.skip_steps = {41, 42, 43};
    trainer::GuardState state;
    const telemetry::WatchRules rules{.window = 32, .begin = 1};
    std::vector<int64_t> left_out;
    for (int64_t number = 1; number <= 48; ++number) {
      trainer::StepGuard guard(watch, rules, 1, &state);
      const double loss = number < 44 ? 3 + 0.01 * static_cast<double>(number % 3) : 5;
      const telemetry::StepVerdict verdict = guard.look(number, loss, 1);
      const bool skips = guard.skips(number, verdict);
      guard.note(number, verdict, skips);
      if (skips) left_out.push_back(number);
    }
    CHECK(left_out == Steps{41, 42, 43, 44, 45, 46});
    CHECK(state.skipped == 6);
  }

  TEST_CASE("steps without a token to guess use up no try of the guard") {
    const WatchConfig watch{.window = 32, .on_outlier = {GuardAction::kSkip}};
    trainer::GuardState state;
    const telemetry::WatchRules rules{.window = 32, .begin = 1};
    Steps left_out;
    for (int64_t number = 1; number <= 48; ++number) {
      trainer::StepGuard guard(watch, rules, 1, &state);
      if (number > 40 && number < 44) {
        guard.note_without_targets(number);
        continue;
      }
      const double loss = number < 44 ? 3 + 0.01 * static_cast<double>(number % 3) : 5;
      const telemetry::StepVerdict verdict = guard.look(number, loss, 1);
      const bool skips = guard.skips(number, verdict);
      guard.note(number, verdict, skips);
      if (skips) left_out.push_back(number);
    }
    CHECK(left_out == Steps{44, 45, 46});
    CHECK(state.without_targets == Steps{41, 42, 43});
    CHECK(state.skipped == 6);
  }

  TEST_CASE("a run whose steps have no token to guess has trained nothing, and does not end as if it had") {
    Recipe recipe = dirty_recipe("empty", {1, 2, 3}, true);
    recipe.data.mask_repeats = {.period = 1, .count = 10};
    recipe.optimizer.lr.clear();
    stop_after(recipe, 3);
    const auto run = train_on_threads(recipe, 2);
    REQUIRE_FALSE(run.ok());
    CHECK(run.error().message.find("nothing was trained") != std::string::npos);
    stop_after(recipe, 4);
    REQUIRE_OK(train_on_threads(recipe, 2));
  }

  TEST_CASE("a step that data.mask_repeats masks wholly has no update, says so, and moves no level") {
    Recipe recipe = with_guard(dirty_recipe("masked", {3}, true));
    recipe.data.mask_repeats = {.period = 1, .count = 10};
    recipe.optimizer.lr.clear();
    stop_after(recipe, 6);
    for (const int64_t world : {1, 2}) {
      CAPTURE(world);
      const auto run = train_on_threads(recipe, world);
      REQUIRE_OK(run);
      const telemetry::StepMetrics& step = run.value().steps[2];
      CHECK(skipped(run.value()) == Steps{3});
      CHECK(run.value().position.guards.losses.size() == 5);
      CHECK(std::isnan(step.loss));
      CHECK(step.masked_tokens == kBatch * kContext);
      CHECK(step.skip_why.find(
                "data.mask_repeats leave no token of its batch to be guessed, which is positions 16..23 ") !=
            std::string::npos);
      Recipe without = recipe;
      without.batch.skip = {"16..23"};
      stop_after(without, 5);
      const auto shorter = train_on_threads(without, world);
      REQUIRE_OK(shorter);
      CHECK(shorter.value().state == run.value().state);
      const auto read = telemetry::step_metrics_from_json(telemetry::to_json(step));
      REQUIRE_OK(read);
      CHECK((std::isnan(read.value().loss) && read.value().was_skipped()));
    }
  }
}
