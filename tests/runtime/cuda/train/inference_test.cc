// A model that continues texts and gives losses on a CUDA device that is a double: the CPU's numbers up to rounding,
// the CPU's tokens.

#include <algorithm>
#include <cmath>
#include <random>

#include "runtime/inference/generate.h"
#include "runtime/inference/session.h"
#include "tests/runtime/cuda/train/trained_double.h"
#include "tests/runtime/inference/drawn_session.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::inference;
using cairn::inference::testing::session_of;
using cairn::testing::TrainedDouble;

namespace {

constexpr int64_t kContext = 24, kVocab = 61;

enum class Family { kGpt, kLlama, kExperts, kLatent };

Recipe recipe_of(Family family, Precision precision) {
  Recipe r;
  r.name = "inference";
  r.seed = 5;
  r.model = {.layers = 2,
             .width = 16,
             .heads = 2,
             .kv_heads = 2,
             .head_dim = 8,
             .ffn = 24,
             .context = kContext,
             .vocab = kVocab};
  if (family != Family::kGpt) {
    r.model.positions = Positions::kRotary;
    r.model.norm = NormKind::kRmsNorm;
    r.model.activation = Activation::kSwiGlu;
    r.model.bias = false;
    r.model.tied_embeddings = false;
    r.model.kv_heads = 1;
  }
  if (family == Family::kLlama) {
    r.model.temperature_scale = 0.5;
    r.model.temperature_floor = 5;
    r.model.temperature_form = TemperatureForm::kMinistral3;
    r.model.attention_chunk = 7;
    r.model.qk_norm = QkNorm::kHeadLayerNorm;
  }
  if (family == Family::kExperts) {
    r.model.moe = {.experts = 4, .top_k = 2};
    r.model.attention_sinks = true;
    r.model.positions = Positions::kAlibi;
    r.model.alibi = AlibiForm::kRounded;
    r.model.qk_norm = QkNorm::kSharedLayerNorm;
  }
  if (family == Family::kLatent) {
    r.model.kv_heads = 2;
    r.model.mla = {.kv_rank = 12, .q_rank = 10, .nope_dim = 4, .rope_dim = 4, .value_dim = 6};
  }
  r.model.init_std = 0.3;  // so that tokens differ in their likelihood by more than rounding
  r.batch = {1, 1};
  r.optimizer.peak_lr = 1e-3;
  r.precision = precision;
  return r;
}

std::vector<int32_t> random_tokens(size_t count, unsigned seed) {
  std::mt19937 draw(seed);
  std::vector<int32_t> out(count);
  for (int32_t& token : out) token = static_cast<int32_t>(draw() % kVocab);
  return out;
}

std::vector<std::vector<int32_t>> continued(Session& session, const std::vector<std::vector<int32_t>>& prompts) {
  std::vector<std::vector<int32_t>> out(prompts.size());
  const auto done = generate(session, prompts, {.max_tokens = 6, .sampling = {.temperature = 0}, .batch = 2},
                             [&](size_t k, int32_t token) {
                               out[k].push_back(token);
                               return true;
                             });
  REQUIRE_OK(done);
  return out;
}

double apart(std::span<const float> a, std::span<const float> b) {
  REQUIRE(a.size() == b.size());
  double most = 0, scale = 1;
  for (size_t k = 0; k < a.size(); ++k) {
    most = std::max(most, std::abs(static_cast<double>(a[k]) - b[k]));
    scale = std::max(scale, std::abs(static_cast<double>(b[k])));
  }
  return most / scale;
}

}  // namespace

TEST_SUITE("runtime/cuda/train/inference") {
  TEST_CASE("a device continues texts as the CPU does, and gives its losses and logits") {
    for (const Family family : {Family::kGpt, Family::kLlama, Family::kExperts, Family::kLatent}) {
      for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
        CAPTURE(static_cast<int>(family));
        CAPTURE(static_cast<int>(precision));
        const Recipe recipe = recipe_of(family, precision);
        TrainedDouble device(3);
        auto machine = device.open();
        REQUIRE_OK(machine);
        const std::unique_ptr<Session> cpu = session_of(recipe, nullptr);
        const std::unique_ptr<Session> cuda = session_of(recipe, machine.value().get());
        const double gate = precision == Precision::kF32 ? 2e-5 : 4e-2;

        const std::vector<int32_t> text = random_tokens(kContext, 3);
        const auto losses_there = cuda->token_losses(text), losses = cpu->token_losses(text);
        REQUIRE_OK(losses_there);
        REQUIRE_OK(losses);
        CHECK(apart(losses_there.value(), losses.value()) < gate);
        const auto logits_there = cuda->logits(text), logits = cpu->logits(text);
        REQUIRE_OK(logits_there);
        REQUIRE_OK(logits);
        CHECK(apart(logits_there.value(), logits.value()) < gate);
        if (precision != Precision::kF32) continue;              // the likeliest of two tokens may be the other one
        CHECK(apart(logits_there.value(), logits.value()) > 0);  // not by the same kernels
        // One is longer than the smallest pass that reads a prompt; the last one's context comes round.
        const std::vector<std::vector<int32_t>> prompts = {random_tokens(3, 1), random_tokens(11, 2),
                                                           random_tokens(kContext - 2, 4)};
        CHECK(continued(*cuda, prompts) == continued(*cpu, prompts));
      }
    }
  }
}
