// One rank: against the double-precision reference, its finite differences, and itself in other orders.
//
// Tolerances, relative to the largest value of the tensor compared:
//   float against double      2e-5: some hundred operations of error 6e-8 each, no cancellation to speak of
//   gradient against finite differences of the double reference   2e-5: the differences themselves are good to 1e-8
//   bf16 against float with the same (bf16) weights: losses 5e-2 absolute, gradients 8e-2 of the tensor's largest:
//     8 bits of mantissa, 4e-3 per rounding, some ten roundings deep
#include <omp.h>

#include <algorithm>
#include <numeric>

#include "tests/runtime/nn/stage_testing.h"

using namespace cairn;
using namespace cairn::nn;
using namespace cairn::nn::testing;

namespace {

std::vector<Variant> variants() {
  std::vector<Variant> out = {{"gpt2 tied", gpt2_recipe()}, {"llama untied", llama_recipe()}};
  Recipe r = gpt2_recipe();
  r.model.tied_embeddings = false;
  r.model.activation = Activation::kGeluErf;
  out.push_back({"gpt2 untied, exact gelu", r});
  r.model.bias = false;
  r.model.activation = Activation::kRelu;
  out.push_back({"gpt2 without projection biases, relu", r});
  r = llama_recipe();
  r.model.tied_embeddings = true;
  r.model.bias = true;
  out.push_back({"llama tied, with biases", r});
  r = llama_recipe();
  r.model.kv_heads = 2;
  r.model.context = 20;
  r.model.norm = NormKind::kLayerNorm;
  r.model.positions = Positions::kNone;
  out.push_back({"grouped 4 to 1, layer norm, no positions, longer", r});
  for (Variant& variant : option_variants()) out.push_back(std::move(variant));
  return out;
}

/// Central difference of `loss` along element `x`.
template <typename Loss>
double difference(double& x, const Loss& loss) {
  const double kept = x, step = 1e-5;
  x = kept + step;
  const double above = loss();
  x = kept - step;
  const double below = loss();
  x = kept;
  return (above - below) / (2 * step);
}

}  // namespace

TEST_SUITE("runtime/nn/stage_model") {
  TEST_CASE("losses and logits equal the double-precision reference") {
    for (const Variant& variant : variants()) {
      CAPTURE(variant.name);
      const Plan plan = plan_of(variant.recipe);
      const Logical weights = draw_weights(plan);
      const Weights reference = reference_weights(plan, weights);
      const Batch batch = draw_batch(plan);
      const Reference judge(plan.recipe.model, reference);
      const Matrix x = judge.layers(judge.embed(batch.tokens), 0, plan.recipe.model.layers);

      LoneComm comm;
      Rank rank(plan, 0, comm, weights, false);  // evaluation: no gradients
      REQUIRE(rank.model().forward(0, batch.tokens.data(), batch.targets.data(), nullptr, nullptr).ok());
      std::vector<double> wanted = judge.losses(x, batch.targets);
      if (plan.recipe.model.mtp.depth > 0) {
        for (const auto& module : judge.further_losses(x, batch.targets))
          wanted.insert(wanted.end(), module.begin(), module.end());
      }
      const auto got = rank.all_losses(0);
      CHECK(distance({got.begin(), got.end()}, wanted, 0) < 2e-5);

      const Matrix logits = judge.logits(x);
      std::vector<float> flat(logits.size() * plan.recipe.model.vocab);
      REQUIRE(rank.model().logits(0, flat).ok());
      std::vector<double> wanted_flat;
      for (const auto& row : logits) wanted_flat.insert(wanted_flat.end(), row.begin(), row.end());
      REQUIRE(wanted_flat.size() == flat.size());
      CHECK(distance({flat.begin(), flat.end()}, wanted_flat, 0) < 2e-5);
      CHECK(rank.guards_whole());
    }
  }

  TEST_CASE("the gradient of every tensor equals finite differences") {
    for (const Variant& variant : variants()) {
      CAPTURE(variant.name);
      const Plan plan = plan_of(variant.recipe);
      const Logical weights = draw_weights(plan);
      Weights reference = reference_weights(plan, weights);
      const Batch batch = draw_batch(plan);
      const Reference judge(plan.recipe.model, reference);
      const auto loss = [&] { return judge.loss(batch.tokens, batch.targets); };
      const Outcome outcome = run_alone(plan, weights, batch);
      const double floor = largest(outcome.grads);

      for (size_t t = 0; t < plan.tensors.size(); ++t) {
        const std::string& name = plan.tensors[t].name;
        CAPTURE(name);
        std::vector<double>& values = reference[name];
        const std::vector<double>& grad = outcome.grads[t];
        std::vector<double> got, wanted;
        for (int k = 0; k < 6; ++k) {  // single elements
          const auto at = static_cast<size_t>(uniform_at(stream_key(11, name), k) * static_cast<double>(grad.size()));
          got.push_back(grad[at]);
          wanted.push_back(difference(values[at], loss));
        }
        CHECK(distance(got, wanted, std::max(floor, largest(grad) * 100)) < 2e-5);

        // All elements at once, along a random direction of signs.
        const std::vector<double> kept = values;
        double along = 0, size = 0;
        double at = 0;
        const auto sign = [&](size_t i) { return uniform_at(stream_key(12, name), i) < 0.5 ? -1.0 : 1.0; };
        for (size_t i = 0; i < grad.size(); ++i) {
          along += sign(i) * grad[i];
          size += grad[i] * grad[i];
        }
        const double slope = difference(at, [&] {
          for (size_t i = 0; i < kept.size(); ++i) values[i] = kept[i] + at * sign(i);
          return loss();
        });
        values = kept;
        CHECK(std::abs(along - slope) < 2e-5 * std::max(std::sqrt(size), 0.01 * floor));
      }
    }
  }

  TEST_CASE("z-loss adds its gradient, and the told loss stays the cross-entropy") {
    Recipe recipe = gpt2_recipe();
    const Plan plain = plan_of(recipe);
    recipe.optimizer.z_loss = 0.05;
    const Plan plan = plan_of(recipe);
    const Logical weights = draw_weights(plan);
    Weights reference = reference_weights(plan, weights);
    const Batch batch = draw_batch(plan);
    const Outcome without = run_alone(plain, weights, batch), outcome = run_alone(plan, weights, batch);
    CHECK(outcome.losses == without.losses);
    const Reference judge(plan.recipe.model, reference);
    const auto loss = [&] {
      const Matrix x = judge.layers(judge.embed(batch.tokens), 0, plan.recipe.model.layers);
      double sum = 0;
      for (const double l : judge.losses(x, batch.targets)) sum += l;
      for (const std::vector<double>& row : judge.logits(x)) {
        double z = 0;
        for (const double v : row) z += std::exp(v);
        sum += 0.05 * std::log(z) * std::log(z);
      }
      return sum;
    };
    const double floor = largest(outcome.grads);
    for (size_t t = 0; t < plan.tensors.size(); ++t) {
      const std::string& name = plan.tensors[t].name;
      CAPTURE(name);
      std::vector<double> got, wanted;
      for (int k = 0; k < 4; ++k) {
        const auto at =
            static_cast<size_t>(uniform_at(stream_key(14, name), k) * static_cast<double>(outcome.grads[t].size()));
        got.push_back(outcome.grads[t][at]);
        wanted.push_back(difference(reference[name][at], loss));
      }
      CHECK(distance(got, wanted, std::max(floor, largest(outcome.grads[t]) * 100)) < 2e-5);
    }
    CHECK(outcome.grads.back() != without.grads.back());
  }

  TEST_CASE("the embedding's gradient is shrunk on the input's side alone") {
    for (const bool tied : {false, true}) {
      Recipe recipe = gpt2_recipe();
      recipe.model.tied_embeddings = tied;
      const Plan plain = plan_of(recipe);
      const auto at = [&](double part) {
        recipe.optimizer.embedding_gradient = part;
        const Plan plan = plan_of(recipe);
        return run_alone(plan, draw_weights(plan), draw_batch(plan));
      };
      const Outcome whole = at(1), half = at(0.5), none = at(0);
      for (size_t t = 1; t < plain.tensors.size(); ++t) CHECK(half.grads[t] == whole.grads[t]);
      const double size = largest(whole.grads[0]);
      for (size_t i = 0; i < whole.grads[0].size(); ++i) {
        CHECK(std::abs(whole.grads[0][i] + none.grads[0][i] - 2 * half.grads[0][i]) < 1e-5 * size);
      }
      CHECK((largest(none.grads[0]) > 0) == tied);  // the head's part is whole
    }
  }

  TEST_CASE("with dropout, losses and gradients equal the reference's under the same masks") {
    Recipe gpt2 = gpt2_recipe(), llama = llama_recipe();
    for (Recipe* recipe : {&gpt2, &llama}) {
      CAPTURE(recipe->name);
      recipe->model.embedding_dropout = 0.2;
      recipe->model.attention_dropout = 0.3;
      recipe->model.residual_dropout = 0.4;
      const Plan plan = plan_of(*recipe);
      const Logical weights = draw_weights(plan);
      Weights reference = reference_weights(plan, weights);
      Batch batch = draw_batch(plan);
      const Outcome dry = run_alone(plan, weights, batch);
      batch.dropout_keys = {mix64(1), mix64(2)};
      const Outcome wet = run_alone(plan, weights, batch);
      CHECK(dry.losses != wet.losses);
      const Reference judge(plan.recipe.model, reference, batch.dropout_keys);
      const auto loss = [&] { return judge.loss(batch.tokens, batch.targets); };
      const Matrix x = judge.layers(judge.embed(batch.tokens), 0, plan.recipe.model.layers);
      CHECK(distance({wet.losses.begin(), wet.losses.end()}, judge.losses(x, batch.targets), 0) < 2e-5);
      const double floor = largest(wet.grads);
      for (size_t t = 0; t < plan.tensors.size(); ++t) {
        const std::string& name = plan.tensors[t].name;
        CAPTURE(name);
        std::vector<double> got, wanted;
        for (int k = 0; k < 6; ++k) {
          const auto at =
              static_cast<size_t>(uniform_at(stream_key(13, name), k) * static_cast<double>(wet.grads[t].size()));
          got.push_back(wet.grads[t][at]);
          wanted.push_back(difference(reference[name][at], loss));
        }
        CHECK(distance(got, wanted, std::max(floor, largest(wet.grads[t]) * 100)) < 2e-5);
      }
      // The samples change places with their keys: so do their masks, and the sum of the losses stays.
      Batch swapped = batch;
      const int64_t context = plan.recipe.model.context;
      std::swap(swapped.dropout_keys[0], swapped.dropout_keys[1]);
      std::swap_ranges(swapped.tokens.begin(), swapped.tokens.begin() + context, swapped.tokens.begin() + context);
      std::swap_ranges(swapped.targets.begin(), swapped.targets.begin() + context, swapped.targets.begin() + context);
      const Outcome other = run_alone(plan, weights, swapped);
      CHECK(std::equal(wet.losses.begin(), wet.losses.begin() + context, other.losses.begin() + context));
    }
  }

  TEST_CASE("the gradient of a stage's input equals finite differences, and stages chained equal one stage") {
    for (const Variant& variant : variants()) {
      for (const int64_t pp : {2, 3}) {
        CAPTURE(variant.name);
        CAPTURE(pp);
        Recipe recipe = variant.recipe;
        const Plan whole = plan_of(recipe);
        recipe.mesh.pp = pp;
        const Plan plan = plan_of(recipe);
        const Logical weights = draw_weights(plan);
        Weights reference = reference_weights(plan, weights);
        const Batch batch = draw_batch(plan);
        const Outcome one = run_alone(whole, weights, batch);
        const Outcome chained = run_alone(plan, weights, batch);
        CHECK(chained.losses == one.losses);  // the same operations in the same order
        const double floor = largest(one.grads);
        for (size_t t = 0; t < plan.tensors.size(); ++t) {
          CAPTURE(plan.tensors[t].name);
          CHECK(distance(chained.grads[t], one.grads[t], floor) < 1e-6);  // tied: the two parts are added elsewhere
        }

        const Reference judge(plan.recipe.model, reference);
        for (int64_t p = 1; p < pp; ++p) {
          const int64_t layer = plan.stages[p].first_layer;
          Matrix x = judge.layers(judge.embed(batch.tokens), 0, layer);
          std::vector<double> got, wanted;
          for (int k = 0; k < 8; ++k) {
            const size_t at = uniform_at(5, k) * chained.dinputs[p - 1].size();
            got.push_back(chained.dinputs[p - 1][at]);
            wanted.push_back(difference(x[at / plan.recipe.model.width][at % plan.recipe.model.width],
                                        [&] { return judge.loss_from(x, layer, batch.targets); }));
          }
          CHECK(distance(got, wanted, 100 * largest(chained.dinputs[p - 1])) < 2e-5);
        }
      }
    }
  }

  TEST_CASE("micro-batches in flight do not meet, and gradients add up over them") {
    for (Recipe recipe : {gpt2_recipe(), llama_recipe()}) {
      recipe.batch.samples = 6;  // three micro-batches
      recipe.schedule = PipelineKind::k1F1B;
      const Plan one_plan = plan_of(recipe);
      recipe.schedule = PipelineKind::kGpipe;
      const Plan plan = plan_of(recipe);
      const Logical weights = draw_weights(plan);
      LoneComm comm;
      Rank one(one_plan, 0, comm, weights), all(plan, 0, comm, weights);
      REQUIRE(one.plan().chunks[0].in_flight == 1);
      REQUIRE(all.plan().chunks[0].in_flight == 3);
      std::vector<Batch> batches;
      for (uint64_t k = 0; k < 3; ++k) batches.push_back(draw_batch(plan, 40 + k));

      for (const Batch& b : batches) {
        REQUIRE(one.model().forward(0, b.tokens.data(), b.targets.data(), nullptr, nullptr).ok());
        REQUIRE(one.model().backward(0, b.tokens.data(), b.targets.data(), nullptr, nullptr, 0.25f).ok());
      }
      for (int64_t k = 0; k < 3; ++k) {
        REQUIRE(all.model().forward(k, batches[k].tokens.data(), batches[k].targets.data(), nullptr, nullptr).ok());
      }
      const std::vector<float> middle = all.token_losses(1);
      for (int64_t k = 0; k < 3; ++k) {
        REQUIRE(
            all.model().backward(k, batches[k].tokens.data(), batches[k].targets.data(), nullptr, nullptr, 0.25f).ok());
      }
      CHECK(one.grads() == all.grads());  // bit for bit: the logits computed again are the same ones

      // A slot taken again gives what a fresh one does.
      REQUIRE(all.model().forward(0, batches[1].tokens.data(), batches[1].targets.data(), nullptr, nullptr).ok());
      const auto again = all.token_losses(0);
      CHECK(std::equal(middle.begin(), middle.end(), again.begin()));
    }
  }

  TEST_CASE("in the place of a router bias's gradient stand the choices of each expert, whatever the loss scale") {
    for (const Variant& variant : option_variants()) {
      const MoeConfig& moe = variant.recipe.model.moe;
      if (moe.bias_rate == 0) continue;
      const Plan plan = plan_of(variant.recipe);
      Logical weights = draw_weights(plan);
      const Batch batch = draw_batch(plan);
      const int64_t rows = std::ssize(batch.tokens);
      for (size_t t = 0; t < plan.tensors.size(); ++t) {
        if (!plan.tensors[t].balances) continue;
        CHECK(plan.tensors[t].name == fmt::format("layers.{}.moe.router.bias", plan.tensors[t].layer));
        // A bias above every score takes the expert to all tokens, and one far below to none.
        weights[t][3] = 10;
        weights[t][5] = -10;
      }
      const Outcome outcome = run_alone(plan, weights, batch, 0.25f);
      for (size_t t = 0; t < plan.tensors.size(); ++t) {
        if (!plan.tensors[t].balances) continue;
        const std::vector<double>& counts = outcome.counts[t];
        CHECK(std::accumulate(counts.begin(), counts.end(), 0.0) == static_cast<double>(rows * moe.top_k));
        CHECK(counts[3] == static_cast<double>(rows));
        CHECK(counts[5] == 0);
      }
    }
  }

  TEST_CASE("experts side by side on three threads give the bits of one after another on one") {
    int compared = 0;
    for (const Variant& variant : option_variants()) {
      if (variant.recipe.model.moe.experts == 0) continue;
      CAPTURE(variant.name);
      const Plan plan = plan_of(variant.recipe);
      const Logical weights = draw_weights(plan);
      const Batch batch = draw_batch(plan);
      const int before = omp_get_max_threads();
      omp_set_num_threads(1);
      const Outcome alone = run_alone(plan, weights, batch);
      omp_set_num_threads(3);
      const Outcome beside = run_alone(plan, weights, batch);
      omp_set_num_threads(before);
      CHECK(beside.losses == alone.losses);
      CHECK(beside.grads == alone.grads);
      ++compared;
    }
    CHECK(compared >= 4);
  }

  TEST_CASE("the loss scale multiplies the gradients") {
    const Plan plan = plan_of(gpt2_recipe());
    const Logical weights = draw_weights(plan);
    const Batch batch = draw_batch(plan);
    const Outcome whole = run_alone(plan, weights, batch), half = run_alone(plan, weights, batch, 0.5f);
    for (size_t t = 0; t < plan.tensors.size(); ++t) {
      std::vector<double> doubled = half.grads[t];
      for (double& g : doubled) g *= 2;
      CHECK(doubled == whole.grads[t]);  // a power of two: exact
    }
  }

  TEST_CASE("bf16 is close to float") {
    for (const Variant& variant : variants()) {
      CAPTURE(variant.name);
      Recipe recipe = variant.recipe;
      // A unit that rounding carries over relu's corner changes its gradient by all of it: no tolerance fits 12 rows.
      if (recipe.model.activation == Activation::kRelu) recipe.model.activation = Activation::kGeluErf;
      if (recipe.model.moe.top_k < recipe.model.moe.experts) continue;  // a choice that rounding turns is another model
      const Plan plan = plan_of(recipe);
      recipe.precision = Precision::kBf16;
      const Plan rounded = plan_of(recipe);
      Logical weights = draw_weights(plan);
      round_to_bf16(weights);
      const Batch batch = draw_batch(plan);
      const Outcome exact = run_alone(plan, weights, batch), got = run_alone(rounded, weights, batch);
      for (size_t r = 0; r < exact.losses.size(); ++r) {
        CHECK(std::abs(got.losses[r] - exact.losses[r]) < 5e-2);
      }
      const double floor = largest(exact.grads);
      // Warm queries make scores, and with them what their rounding changes, several times as large: 0.11 with
      // bf16 instructions.
      const double most = recipe.model.temperature_scale > 0 ? 0.16 : 8e-2;
      for (size_t t = 0; t < plan.tensors.size(); ++t) {
        CAPTURE(plan.tensors[t].name);
        CHECK(distance(got.grads[t], exact.grads[t], floor) < most);
      }
    }
  }

  TEST_CASE("fp16 is close to float, and a loss scale keeps small gradients") {
    for (const Variant& variant : variants()) {
      CAPTURE(variant.name);
      Recipe recipe = variant.recipe;
      if (recipe.model.activation == Activation::kRelu) recipe.model.activation = Activation::kGeluErf;
      if (recipe.model.moe.top_k < recipe.model.moe.experts) continue;  // a choice that rounding turns is another model
      const Plan plan = plan_of(recipe);
      recipe.precision = Precision::kF16;
      const Plan rounded = plan_of(recipe);
      Logical weights = draw_weights(plan);
      round_to_f16(weights);
      const Batch batch = draw_batch(plan);
      constexpr float kSmall = 1e-6f, kScale = 65536.0f;  // losses weigh as in a batch of a million tokens
      const Outcome exact = run_alone(plan, weights, batch, kSmall);
      const Outcome scaled = run_alone(rounded, weights, batch, kSmall * kScale);
      const Outcome bare = run_alone(rounded, weights, batch, kSmall);
      for (size_t r = 0; r < exact.losses.size(); ++r) {
        CHECK(std::abs(scaled.losses[r] - exact.losses[r]) < 7e-3);
      }
      const double floor = largest(exact.grads);
      double worst = 0;
      for (size_t t = 0; t < plan.tensors.size(); ++t) {
        CAPTURE(plan.tensors[t].name);
        std::vector<double> unscaled = scaled.grads[t];
        for (double& g : unscaled) g /= kScale;
        CHECK(distance(unscaled, exact.grads[t], floor) < 1.5e-2);
        worst = std::max(worst, distance(bare.grads[t], exact.grads[t], floor));
      }
      CHECK(worst > 5e-2);  // without a scale they are lost
    }
  }

  TEST_CASE("ids outside the vocabulary are refused by place") {
    const Plan plan = plan_of(gpt2_recipe());
    LoneComm comm;
    Rank rank(plan, 0, comm, draw_weights(plan));
    Batch batch = draw_batch(plan);
    batch.tokens[4] = 65;
    const Status token = rank.model().forward(0, batch.tokens.data(), batch.targets.data(), nullptr, nullptr);
    REQUIRE(!token.ok());
    CHECK(token.error().code == ErrorCode::kInvalidInput);
    CHECK(token.error().message.find("token 65 at position 4") != std::string::npos);
    batch.tokens[4] = 64;
    batch.targets[11] = -2;
    const Status target = rank.model().forward(0, batch.tokens.data(), batch.targets.data(), nullptr, nullptr);
    REQUIRE(!target.ok());
    CHECK(target.error().message.find("target -2 at position 11") != std::string::npos);
  }

  TEST_CASE("memory of another size and odd heads under rotary are refused") {
    const Plan plan = plan_of(gpt2_recipe());
    const RankPlan rank = plan.rank(0);
    LoneComm comm;
    std::vector<float> weights(rank.flat_elems);
    std::vector<std::byte> memory(stage_buffers_bytes(plan, rank) - 64);
    const auto small = StageModel::make(*make_cpu_stream(), plan, rank, 0, {.tp = &comm}, DevicePtr(weights.data()),
                                        nullptr, {DevicePtr(memory.data()), std::ssize(memory)});
    REQUIRE(!small.ok());
    CHECK(small.error().code == ErrorCode::kInternal);

    Recipe odd = llama_recipe();
    odd.model.head_dim = 5;
    const auto refused = make_plan(odd, 1);
    REQUIRE(!refused.ok());
    CHECK(refused.error().code == ErrorCode::kInvalidInput);
  }
}
