#include "runtime/plan/batch_schedule.h"

#include <doctest/doctest.h>

#include <array>
#include <vector>

#include "runtime/plan/plan.h"

using namespace cairn;

namespace {

Recipe recipe_of(int64_t samples) {
  Recipe r;
  r.name = "stages";
  r.stop = {Span::Unit::kSteps, 100};
  r.model = {.layers = 2, .width = 8, .heads = 2, .kv_heads = 2, .head_dim = 4, .ffn = 16, .context = 16, .vocab = 9};
  r.model.positions = Positions::kRotary;
  r.batch = {.samples = samples, .micro = 1};
  return r;
}

}  // namespace

TEST_SUITE("runtime/plan/batch_schedule") {
  TEST_CASE("a batch schedule without a ramp is one stage, and spans are quotients") {
    const Recipe r = recipe_of(4);
    const auto stages = step_stages(r);
    REQUIRE(stages.size() == 1);
    CHECK(samples_after(stages, 0) == 0);
    CHECK(samples_after(stages, 25) == 100);
    CHECK(steps_for_samples(stages, 100) == 25);
    CHECK(steps_for_samples(stages, 101) == 26);
    CHECK(steps_for_samples(stages, 0) == 0);
    CHECK(RunClock(r, {}).step_of({Span::Unit::kTokens, 16 * 8}, 0) == 2);
    CHECK(RunClock(r, {}).step_of({Span::Unit::kFraction, 0.25}, 100) == 25);
  }

  TEST_CASE("the ramp of BLOOM gives the counts of its log") {
    // Public log of the 176B run: 192 + 16 over 9,765,625 samples to 2048. After iteration 12,695: 9,841,584 samples,
    // after 31,214: 47,768,496, after 31,250: 47,842,224. Megatron stops before 220,000,000 would be passed, at
    // iteration 115,311; here a span is over when it is reached.
    Recipe r = recipe_of(2048);
    r.batch.micro = 2;
    r.batch.ramp = {.from = 192, .by = 16, .over = {Span::Unit::kSamples, 9765625}};
    const auto stages = step_stages(r);
    CHECK(stages.size() == 117);
    CHECK(stages[0].samples == 192);
    CHECK(stages.back().samples == 2048);
    CHECK(samples_after(stages, 12695) == 9841584);
    CHECK(samples_after(stages, 31214) == 47768496);
    CHECK(samples_after(stages, 31250) == 47842224);
    CHECK(samples_after(stages, 115311) == 219999152);
    CHECK(steps_for_samples(stages, 220e6) == 115312);
    for (int64_t step = 1; step < 13000; ++step) {
      const StepStage& stage = stages[stage_of_step(stages, step)];
      const int64_t before = samples_after(stages, step - 1);
      const int64_t k = std::min<int64_t>(116, static_cast<int64_t>(static_cast<double>(before) / (9765625.0 / 116)));
      REQUIRE(stage.samples == 192 + 16 * k);  // the rule as Megatron states it
      REQUIRE(steps_for_samples(stages, static_cast<double>(before) + 1) == step);
    }
  }

  TEST_CASE("phases change the micro-batch, the sequence and the rotary base from where they begin") {
    Recipe r = recipe_of(8);
    r.batch.tokens = 4;
    r.batch.phases = {{.at = {Span::Unit::kSamples, 20}, .micro = 2, .tokens = 8},
                      {.at = {Span::Unit::kTokens, 16 * 40}, .samples = 16, .tokens = 16, .rope_theta = 5e5},
                      {.at = {Span::Unit::kSteps, 10}, .samples = 4}};
    const Plan plan = make_plan(r, 1).value();
    const auto& stages = plan.step_stages;
    REQUIRE(stages.size() == 4);
    CHECK(stages[1].first_step == 4);  // 24 samples are the first 20 or more
    CHECK(stages[1].micro == 2);
    CHECK(stages[1].tokens == 8);
    CHECK(stages[2].first_step == 6);
    CHECK(stages[2].rope_theta == 5e5);
    CHECK(stages[3].first_step == 11);
    CHECK(stages[3].samples == 4);
    CHECK(stages[3].micro == 2);
    CHECK(samples_after(stages, 11) == 5 * 8 + 5 * 16 + 4);
    CHECK(plan.at(2).micro_batches == 8);
    CHECK(plan.at(0).sequence_tokens == 4);
    CHECK(plan.at(2).recipe.model.rope_theta == 5e5);
  }

  TEST_CASE("every stage must fit the mesh, and says when it does not") {
    const auto refusal = [](const Recipe& r, int64_t world) {
      const auto plan = make_plan(r, world);
      return plan.ok() ? std::string() : plan.error().message;
    };
    Recipe r = recipe_of(32);
    r.batch.ramp = {.from = 8, .by = 8, .over = {Span::Unit::kSteps, 30}};
    CHECK(refusal(r, 8) == "");
    CHECK(refusal(r, 16).find("from step 1 on: batch.samples = 8 cannot be cut") != std::string::npos);
    r.batch.ramp.by = 5;
    CHECK(refusal(r, 1).find("a whole number of increments") != std::string::npos);
    r.batch.ramp = {};
    r.batch.phases = {{.at = {Span::Unit::kSteps, 3}, .tokens = 5}};
    CHECK(refusal(r, 1).find("from step 4 on: batch.tokens = 5 does not divide") != std::string::npos);
    r.batch.phases = {{.at = {Span::Unit::kFraction, 0.5}, .micro = 2}};
    CHECK(refusal(r, 1).find("not at a fraction") != std::string::npos);
    r.model.positions = Positions::kLearned;
    r.batch.phases = {{.at = {Span::Unit::kSteps, 3}, .rope_theta = 10}};
    CHECK(refusal(r, 1).find("no rotary positions") != std::string::npos);
    r = recipe_of(8);
    r.mesh.pp = 2;
    r.mesh.virtual_stages = 2;
    r.model.layers = 4;
    r.schedule = PipelineKind::kInterleaved;
    r.batch.phases = {{.at = {Span::Unit::kSteps, 5}, .samples = 3}};
    CHECK(refusal(r, 2).find("from step 6 on") != std::string::npos);
  }

  TEST_CASE("a batch schedule counts what is left of a run from its position") {
    Recipe r = recipe_of(16);
    r.stop = {Span::Unit::kSamples, 160};
    const RunPast past{.points = {{10, 80, 80 * 16}}};  // ten steps of 8
    const auto stages = step_stages(r, past);
    REQUIRE(stages.size() == 1);
    CHECK(stages[0].first_step == 11);
    CHECK(stages[0].samples_before == 80);
    const RunClock clock(r, past);
    CHECK(clock.samples(5) == 40);
    CHECK(clock.samples(10) == 80);
    CHECK(clock.samples(11) == 96);
    CHECK(clock.tokens(11) == 96 * 16);
    CHECK(clock.step_of(r.stop, 0) == 15);
    CHECK(clock.step_of({Span::Unit::kSamples, 32}, 0) == 4);
    CHECK(clock.step_of({Span::Unit::kSamples, 33}, 0) == 5);
    CHECK(clock.step_of({Span::Unit::kTokens, 80 * 16}, 0) == 10);
    CHECK(clock.step_of({Span::Unit::kTokens, 81 * 16}, 0) == 11);
    const auto plan = make_plan(r, 1, past);
    REQUIRE(plan.ok());
    CHECK(plan.value().steps == 15);
    CHECK(plan.value().end_step == 15);
  }

  TEST_CASE("each increment of a long ramp is a stage, where its share of the samples is reached") {
    Recipe r = recipe_of(1);
    r.batch = {.samples = 10'001, .micro = 1, .ramp = {.from = 1, .by = 1, .over = {Span::Unit::kSamples, 1e10}}};
    const auto stages = step_stages(r);
    REQUIRE(stages.size() == 10'001);
    for (size_t k = 1; k < stages.size(); ++k) {
      const StepStage &before = stages[k - 1], &stage = stages[k];
      REQUIRE(stage.samples == static_cast<int64_t>(k) + 1);
      const double due = 1e6 * static_cast<double>(k);
      REQUIRE(static_cast<double>(stage.samples_before) >= due);
      REQUIRE(static_cast<double>(stage.samples_before - before.samples) < due);
    }
  }

  TEST_CASE("a batch schedule that cannot be counted is refused before it is") {
    const auto refused = [](const Recipe& r, const char* part) {
      const Result<Plan> plan = make_plan(r, 1);
      REQUIRE_FALSE(plan.ok());
      CHECK_MESSAGE(plan.error().message.find(part) != std::string::npos, plan.error().message);
    };
    Recipe r = recipe_of(1'000'000'000);
    r.batch.ramp = {.from = 1, .by = 1, .over = {Span::Unit::kSamples, 1e12}};
    refused(r, "batch.ramp goes from 1 to 1000000000 in 999999999 increments, at most 10000 are counted");
    r = recipe_of(8);
    r.stop = {Span::Unit::kSteps, 1e15};
    refused(r, "stop = 1000000000000000 steps of 128 tokens: 1.28e+17 tokens are more than can be counted");
    r.stop = {Span::Unit::kSamples, 1e15};
    refused(r, "stop = 1000000000000000 samples of 16 tokens");
    r.stop = {Span::Unit::kTokens, 1e15};
    CHECK(make_plan(r, 1).ok());
  }

  TEST_CASE("a run that has changed more than once is read point by point") {
    Recipe r = recipe_of(16);
    const RunPast past{.points = {{10, 80, 640}, {30, 160, 1920}}};  // of 8 with 8 tokens, then 4 a step with 16
    const auto stages = step_stages(r, past);
    REQUIRE(stages.size() == 1);
    CHECK(stages[0].first_step == 31);
    CHECK(stages[0].samples_before == 160);
    const RunClock clock(r, past);
    for (const auto& [step, samples, tokens] : std::vector<std::array<int64_t, 3>>{
             {5, 40, 320}, {10, 80, 640}, {20, 120, 1280}, {30, 160, 1920}, {31, 176, 2176}, {32, 192, 2432}}) {
      CAPTURE(step);
      CHECK(clock.at(step) == PastPoint{step, samples, tokens});
      CHECK(clock.step_of({Span::Unit::kSamples, static_cast<double>(samples)}, 0) == step);
      CHECK(clock.step_of({Span::Unit::kTokens, static_cast<double>(tokens)}, 0) == step);
      CHECK(clock.step_of({Span::Unit::kSamples, static_cast<double>(samples) + 1}, 0) == step + 1);
      CHECK(clock.step_of({Span::Unit::kTokens, static_cast<double>(tokens) + 1}, 0) == step + 1);
    }
  }

  TEST_CASE("phases and ramps are read at the position, and samples of another length count as tokens") {
    Recipe r = recipe_of(8);
    r.batch.phases = {{.at = {Span::Unit::kSamples, 40}, .samples = 16},
                      {.at = {Span::Unit::kTokens, 2000}, .samples = 32}};
    // 20 steps of 4 samples of 8 tokens, then contexts of 16: 80 samples, 640 tokens.
    const RunPast past{.points = {{20, 80, 640}}};
    const auto stages = step_stages(r, past);
    REQUIRE(stages.size() == 2);
    CHECK(stages[0].first_step == 21);
    CHECK(stages[0].samples == 16);
    CHECK(stages[1].samples == 32);
    // (2000 - 640) / 16 = 85 samples more: six steps of 16
    CHECK(stages[1].first_step == 27);
    CHECK(RunClock(r, past).tokens(26) == 640 + 6 * 16 * 16);
    r.batch = {.samples = 32, .micro = 1, .ramp = {.from = 8, .by = 8, .over = {Span::Unit::kSamples, 120}}};
    const auto ramp = step_stages(r, past);
    CHECK(ramp[0].samples == 24);  // two of three increments lie before sample 80
    CHECK(ramp[1].samples == 32);
  }

  TEST_CASE("a stage of the batch that only the position leads to must fit the mesh too") {
    Recipe r = recipe_of(8);
    r.batch.micro = 4;
    r.batch.phases = {{.at = {Span::Unit::kSteps, 5}, .samples = 12}, {.at = {Span::Unit::kSamples, 1000}, .micro = 6}};
    CHECK(make_plan(r, 1).ok());
    // From scratch 12 comes before 6, from here 8 meets 6.
    const Result<Plan> refused = make_plan(r, 1, RunPast{.points = {{3, 2000, 32000}}});
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message.find("from step 4 on: batch.samples = 8 cannot be cut: micro 6") == 0);
    r.batch.phases = {{.at = {Span::Unit::kSteps, 5}, .samples = 10}, {.at = {Span::Unit::kSteps, 6}, .samples = 12}};
    CHECK_FALSE(make_plan(r, 1).ok());
    CHECK(make_plan(r, 1, RunPast{.points = {{6, 48, 768}}}).ok());  // behind what does not fit
  }
}
