// Positions, masks and weights that a micro-batch brings along: packed documents, prefixes, targets that do not count.

#include <algorithm>
#include <numeric>
#include <tuple>

#include "tests/runtime/nn/stage_testing.h"

using namespace cairn;
using namespace cairn::nn;
using namespace cairn::nn::testing;

namespace {

/// Two samples of six tokens: documents of 2, 3 and 1 tokens; a prefix of 3, then a piece that all stands at
/// position 1.
Batch draw_rows(const Plan& plan) {
  Batch out = draw_batch(plan);
  out.positions = {0, 1, 0, 1, 2, 0, 0, 1, 2, 1, 1, 1};
  out.starts = {0, 0, 2, 2, 2, 5, 0, 0, 0, 0, 0, 0};
  out.ends = {1, 2, 3, 4, 5, 6, 3, 3, 3, 4, 5, 6};
  for (const int64_t row : {1, 4, 6, 7, 8}) out.targets[row] = kNoTarget;
  out.weights = {2.5f, 1.0f, 0.3f, 0.3f, 9.0f, 1.0f, 1.0f, 1.0f, 1.0f, 0.7f, 0.0f, 1.6f};
  return out;
}

/// The loss that is trained on: the sum of the rows' losses, each times its weight.
double weighed_loss(const Reference& judge, const Plan& plan, const Batch& batch) {
  const Matrix x = judge.layers(judge.embed(batch.tokens), 0, plan.recipe.model.layers);
  const std::vector<double> losses = judge.losses(x, batch.targets);
  return std::inner_product(losses.begin(), losses.end(), batch.weights.begin(), 0.0);
}

std::vector<Recipe> recipes() {
  std::vector<Recipe> out = {gpt2_recipe(), llama_recipe()};
  out[0].model.position_offset = 2;
  out[1].model.qk_norm = QkNorm::kHead;
  for (Recipe& recipe : out) {
    recipe.model.mask = Mask::kPrefix;
    recipe.objective.kind = ObjectiveConfig::Kind::kPrefix;
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/nn/sequence_rows") {
  TEST_CASE("losses and gradients are the reference's, by finite differences") {
    for (const Recipe& recipe : recipes()) {
      CAPTURE(recipe.name);
      const Plan plan = plan_of(recipe);
      const Logical weights = draw_weights(plan);
      Weights at = reference_weights(plan, weights);
      const Batch batch = draw_rows(plan);
      Reference judge(plan.recipe.model, at);
      judge.set_rows(batch.positions, batch.starts, batch.ends);
      const Outcome outcome = run_alone(plan, weights, batch);
      const Matrix x = judge.layers(judge.embed(batch.tokens), 0, plan.recipe.model.layers);
      CHECK(distance({outcome.losses.begin(), outcome.losses.end()}, judge.losses(x, batch.targets), 0) < 2e-5);
      for (const int64_t row : {1, 4, 6, 7, 8}) CHECK(outcome.losses[row] == 0);
      const double floor = largest(outcome.grads);
      for (size_t t = 0; t < plan.tensors.size(); ++t) {
        const std::string& name = plan.tensors[t].name;
        CAPTURE(name);
        std::vector<double> got, wanted;
        for (int k = 0; k < 5; ++k) {
          const auto i =
              static_cast<size_t>(uniform_at(stream_key(21, name), k) * static_cast<double>(outcome.grads[t].size()));
          double& value = at[name][i];
          const double kept = value, step = 1e-4;
          value = kept + step;
          const double above = weighed_loss(judge, plan, batch);
          value = kept - step;
          const double below = weighed_loss(judge, plan, batch);
          value = kept;
          got.push_back(outcome.grads[t][i]);
          wanted.push_back((above - below) / (2 * step));
        }
        CHECK(distance(got, wanted, std::max(floor, largest(outcome.grads[t]) * 100)) < 2e-5);
      }
    }
  }

  TEST_CASE("a document's losses are those that it has alone") {
    for (Recipe recipe : recipes()) {
      CAPTURE(recipe.name);
      recipe.model.mask = Mask::kCausal;
      recipe.objective = {};
      const Plan plan = plan_of(recipe);
      const Logical weights = draw_weights(plan);
      Batch packed = draw_batch(plan), alone = packed;
      packed.positions = {0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5};
      packed.starts = {0, 0, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0};
      std::copy_n(packed.tokens.begin() + 2, 4, alone.tokens.begin());  // the second document, at a sample's beginning
      std::copy_n(packed.targets.begin() + 2, 4, alone.targets.begin());
      const Outcome a = run_alone(plan, weights, packed), b = run_alone(plan, weights, alone);
      for (int t = 0; t < 4; ++t) CHECK(std::abs(a.losses[2 + t] - b.losses[t]) < 1e-5);
      CHECK(std::equal(a.losses.begin() + 6, a.losses.end(), b.losses.begin() + 6));  // the other sample: the same bits
    }
  }

  TEST_CASE("tensor, sequence and pipeline parallel ranks agree with one") {
    for (Recipe recipe : recipes()) {
      const Plan one_plan = plan_of(recipe);
      const Logical weights = draw_weights(one_plan);
      const Batch batch = draw_rows(one_plan);
      const Outcome one = run_alone(one_plan, weights, batch);
      for (const auto& [tp, pp, sequence_parallel, mode] :
           {std::tuple<int64_t, int64_t, bool, RecomputeMode>{2, 1, false, RecomputeMode::kFull},
            {2, 3, true, RecomputeMode::kSelective},
            {4, 1, true, RecomputeMode::kNone},
            {1, 3, false, RecomputeMode::kFull}}) {
        CAPTURE(recipe.name);
        CAPTURE(tp);
        CAPTURE(pp);
        recipe.mesh.tp = tp;
        recipe.mesh.pp = pp;
        recipe.mesh.sequence_parallel = sequence_parallel;
        recipe.recompute.mode = mode;
        const Plan plan = plan_of(recipe);
        const Outcome got = tp > 1 ? run_threads(plan, weights, batch) : run_alone(plan, weights, batch);
        CHECK(distance({got.losses.begin(), got.losses.end()}, {one.losses.begin(), one.losses.end()}, 0) < 1e-5);
        for (size_t t = 0; t < plan.tensors.size(); ++t) {
          CAPTURE(plan.tensors[t].name);
          CHECK(distance(got.grads[t], one.grads[t], largest(one.grads)) < 1e-5);
        }
      }
    }
  }
}
