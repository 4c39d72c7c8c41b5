// Activations computed again, norms kept, and backwards in two halves: the same bits as neither, in memory that the
// plan counts. The memory of each rank is filled with NaN first and walled (stage_testing.h), so a value that was never
// computed shows.

#include "tests/runtime/nn/stage_testing.h"

using namespace cairn;
using namespace cairn::nn;
using namespace cairn::nn::testing;

namespace {

/// Each mode, with whole and split backwards, gives the bits of `recipe` that keeps everything. Its mesh.pp is 2.
void check_modes(Recipe recipe, std::span<const RecomputeConfig> modes) {
  recipe.schedule = PipelineKind::k1F1B;
  recipe.recompute = {};
  const Plan plain = plan_of(recipe);
  const Logical weights = draw_weights(plain);
  const Batch batch = draw_batch(plain);
  const Outcome wanted = run_threads(plain, weights, batch);
  CHECK(largest(wanted.grads) > 0);
  // With ZB-H1 and one micro-batch, rank 1 splits its backward.
  for (const PipelineKind schedule : {PipelineKind::k1F1B, PipelineKind::kZbH1}) {
    for (const RecomputeConfig& mode : modes) {
      if (mode.distribute && recipe.mesh.sequence_parallel) continue;  // refused: split already
      recipe.schedule = schedule;
      recipe.recompute = mode;
      CAPTURE(recipe.name);
      CAPTURE(recipe.precision == Precision::kBf16);
      CAPTURE(recipe.mesh.tp);
      CAPTURE(recipe.mesh.sequence_parallel);
      CAPTURE(schedule_name(schedule));
      CAPTURE(static_cast<int>(mode.mode));
      CAPTURE(mode.layers);
      CAPTURE(mode.distribute);
      Plan plan = plan_of(recipe);
      REQUIRE(plan.rank(plan.mesh.rank({0, 0, 1})).chunks[0].late == (schedule == PipelineKind::kZbH1 ? 1 : 0));
      for (const bool keeps_norms : {false, true}) {
        CAPTURE(keeps_norms);
        plan.keeps_norms = keeps_norms;
        const Outcome got = run_threads(plan, weights, batch);
        CHECK(got.losses == wanted.losses);
        CHECK(got.dinputs == wanted.dinputs);
        CHECK(got.grads == wanted.grads);
      }
    }
  }
}

}  // namespace

TEST_SUITE("runtime/nn/recompute") {
  TEST_CASE("every way to recompute, norms kept or not, with whole and split backwards, gives the same bits") {
    const RecomputeConfig modes[] = {{},
                                     {RecomputeMode::kSelective},
                                     {RecomputeMode::kFull},
                                     {RecomputeMode::kFull, 1},
                                     {RecomputeMode::kSelective, 1},
                                     {RecomputeMode::kFull, 0, true},
                                     {RecomputeMode::kFull, 1, true}};
    for (Recipe recipe : {gpt2_recipe(), llama_recipe()}) {
      recipe.model.layers = 4;
      recipe.mesh.pp = 2;
      for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
        for (const int64_t tp : {1, 2}) {
          for (const bool sequence_parallel : {false, true}) {
            if (tp == 1 && sequence_parallel) continue;
            recipe.precision = precision;
            recipe.mesh.tp = tp;
            recipe.mesh.sequence_parallel = sequence_parallel;
            recipe.model.bias = sequence_parallel || recipe.name == "gpt2";
            check_modes(recipe, modes);
          }
        }
      }
    }
  }

  TEST_CASE("recomputation and norms that are kept change no bit, with every option of the model") {
    const RecomputeConfig split[] = {{}, {RecomputeMode::kFull}};
    const RecomputeConfig whole[] = {{RecomputeMode::kSelective, 1}, {RecomputeMode::kFull, 0, true}};
    for (Variant& variant : option_variants()) {
      variant.recipe.model.layers = 4;
      variant.recipe.mesh.tp = variant.recipe.mesh.pp = 2;
      variant.recipe.mesh.sequence_parallel = true;
      check_modes(variant.recipe, split);
      variant.recipe.mesh.sequence_parallel = false;
      check_modes(variant.recipe, whole);
    }
  }

  TEST_CASE("a split backward has its own copies between the halves, fewer than micro-batches are in flight") {
    for (Recipe recipe : {gpt2_recipe(), llama_recipe()}) {
      recipe.model.layers = 3;
      recipe.mesh.pp = 3;
      recipe.batch.samples = 6;  // three micro-batches
      recipe.schedule = PipelineKind::kZbH1;
      recipe.recompute = {RecomputeMode::kFull};
      for (const bool keeps_norms : {false, true}) {
        CAPTURE(recipe.name);
        CAPTURE(keeps_norms);
        Plan plan = plan_of(recipe);
        plan.keeps_norms = keeps_norms;
        const Logical weights = draw_weights(plan);
        LoneComm comm;
        const auto grads = [&](int64_t slot) {
          Rank rank(plan, 1, comm, weights);
          StageModel& model = rank.model();
          std::vector<std::byte> input(model.boundary_bytes(), std::byte{0x3e}), out = input, dinput = input;
          REQUIRE(model.forward(slot, nullptr, nullptr, DevicePtr(input.data()), DevicePtr(out.data())).ok());
          REQUIRE(model.backward_input(slot, 0, nullptr, nullptr, DevicePtr(input.data()), DevicePtr(dinput.data()), 1)
                      .ok());
          REQUIRE(model.backward_weight(slot, 0).ok());
          return rank.grads();
        };
        const Chunk chunk = plan.rank(1).chunks[0];
        REQUIRE(chunk.late > 0);
        REQUIRE(chunk.late < chunk.in_flight);
        CHECK(grads(chunk.in_flight - 1) == grads(0));
      }
    }
  }
}
