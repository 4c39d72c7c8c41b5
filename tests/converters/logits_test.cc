// The proof that a model means the same here as in transformers: its logits. Round trips prove nothing about that.

#include <doctest/doctest.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "tests/converters/fixtures.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

int64_t index_of(const WeightSource& source, const std::string& name) {
  for (size_t k = 0; k < source.tensors().size(); ++k) {
    if (source.tensors()[k].name == name) return static_cast<int64_t>(k);
  }
  FAIL("no tensor ", name);
  return -1;
}

/// A square matrix, or any memory of one, as if the transpose had been skipped: same bytes, dims exchanged.
void skip_transpose(std::vector<float>& logical, const Shape& shape) {
  std::vector<float> stored(logical.size());
  for (int64_t o = 0; o < shape[0]; ++o) {
    for (int64_t i = 0; i < shape[1]; ++i) stored[i * shape[0] + o] = logical[o * shape[1] + i];
  }
  logical = stored;
}

}  // namespace

TEST_SUITE("converters/logits") {
  TEST_CASE("imported models give the logits that transformers gives") {
    for (const std::string& name : fixture_names()) {
      CAPTURE(name);
      auto folder = HfFolder::open(golden(name));
      REQUIRE_OK(folder);
      CHECK(folder.value()->warnings().empty());
      const double difference =
          logit_difference(folder.value()->model(), weights_of(*folder.value()), reference_of(name));
      MESSAGE(name, ": largest difference ", difference, " of the largest logit");
      CHECK(difference <= kLogitGate);
    }
  }

  TEST_CASE("each single mistake in the mapping exceeds 100 times the gate") {
    struct Mistake {
      std::string what;
      std::function<void(ModelConfig&, Weights&, const std::function<int64_t(const char*)>&)> make;
      bool llama = true, gpt2 = true;
    };
    const std::vector<Mistake> mistakes = {
        {"q and k exchanged",
         [](ModelConfig&, Weights& w, const auto& at) {
           std::swap(w[at("layers.1.attn.q.weight")], w[at("layers.1.attn.k.weight")]);
         },
         false, true},
        {"k and v exchanged",
         [](ModelConfig&, Weights& w, const auto& at) {
           std::swap(w[at("layers.1.attn.k.weight")], w[at("layers.1.attn.v.weight")]);
         }},
        {"a transpose skipped where the matrix is square",
         [](ModelConfig& m, Weights& w, const auto& at) {
           skip_transpose(w[at("layers.1.attn.o.weight")], {m.width, m.heads * m.head_dim});
         }},
        {"a transpose skipped where it is not",
         [](ModelConfig& m, Weights& w, const auto& at) {
           skip_transpose(w[at("layers.1.mlp.down.weight")], {m.width, m.ffn});
         }},
        {"gate and up exchanged",
         [](ModelConfig&, Weights& w, const auto& at) {
           std::swap(w[at("layers.1.mlp.gate.weight")], w[at("layers.1.mlp.up.weight")]);
         },
         true, false},
        {"another rotary base", [](ModelConfig& m, Weights&, const auto&) { m.rope_theta = 10000.0; }, true, false},
        {"rotary pairs (2j, 2j+1) instead of (j, j + d/2)",
         [](ModelConfig& m, Weights& w, const auto& at) {
           for (const char* name : {"layers.0.attn.q.weight", "layers.0.attn.k.weight"}) {
             std::vector<float>& weight = w[at(name)];
             const std::vector<float> before = weight;
             const int64_t half = m.head_dim / 2, rows = static_cast<int64_t>(weight.size()) / m.width;
             for (int64_t r = 0; r < rows; ++r) {
               const int64_t j = r % m.head_dim, from = r - j + (j % 2) * half + j / 2;
               std::copy_n(before.begin() + from * m.width, m.width, weight.begin() + r * m.width);
             }
           }
         },
         true, false},
        {"a bias dropped",
         [](ModelConfig& m, Weights& w, const auto& at) {
           if (m.bias) std::ranges::fill(w[at("layers.2.attn.o.bias")], 0.0f);
         }},
        {"the bias of q dropped",
         [](ModelConfig& m, Weights& w, const auto& at) {
           if (m.bias) std::ranges::fill(w[at("layers.0.attn.q.bias")], 0.0f);
         }},
        {"the eps of another family", [](ModelConfig& m, Weights&, const auto&) { m.norm_eps = 1e-5; }},
        {"the two norms of a layer exchanged",
         [](ModelConfig&, Weights& w, const auto& at) {
           std::swap(w[at("layers.1.attn_norm.weight")], w[at("layers.1.mlp_norm.weight")]);
         }},
        {"two layers exchanged",
         [](ModelConfig&, Weights& w, const auto& at) {
           std::swap(w[at("layers.0.mlp.up.weight")], w[at("layers.1.mlp.up.weight")]);
         }},
        {"positions shifted by one",
         [](ModelConfig& m, Weights& w, const auto& at) {
           auto& positions = w[at("embed.positions")];
           std::rotate(positions.begin(), positions.begin() + m.width, positions.end());
         },
         false, true},
        {"the head tied to the embedding",
         [](ModelConfig& m, Weights& w, const auto& at) {
           if (!m.tied_embeddings) w[at("head.weight")] = w[at("embed.tokens")];
         }},
    };
    double weakest = INFINITY;
    for (const std::string& name : fixture_names()) {
      auto opened = HfFolder::open(golden(name));
      REQUIRE(opened.ok());
      const HfFolder& folder = *opened.value();
      const Weights weights = weights_of(folder);
      const Reference reference = reference_of(name);
      const bool llama = folder.family().model_type == "llama";
      for (const Mistake& mistake : mistakes) {
        if (!(llama ? mistake.llama : mistake.gpt2)) continue;
        ModelConfig model = folder.model();
        Weights wrong = weights;
        mistake.make(model, wrong, [&](const char* tensor) { return index_of(folder, tensor); });
        const bool changed = wrong != weights || model.norm_eps != folder.model().norm_eps ||
                             model.rope_theta != folder.model().rope_theta;
        if (!changed) continue;  // no biases, or tied, in this model
        const double difference = logit_difference(model, wrong, reference);
        CAPTURE(name);
        CAPTURE(mistake.what);
        CHECK(difference > 100 * kLogitGate);
        weakest = std::min(weakest, difference);
      }
    }
    MESSAGE("the least visible mistake changes logits by ", weakest, " of the largest");
  }

  TEST_CASE("a model with the other activation is told apart") {
    auto opened = HfFolder::open(golden("hf-gpt2-tied"));
    REQUIRE(opened.ok());
    ModelConfig model = opened.value()->model();
    REQUIRE(model.activation == Activation::kGeluTanh);
    model.activation = Activation::kGeluErf;  // differs by 4.7e-4 at most: visible, though not by a factor of 100
    const double difference = logit_difference(model, weights_of(*opened.value()), reference_of("hf-gpt2-tied"));
    CHECK(difference >
          10 * logit_difference(opened.value()->model(), weights_of(*opened.value()), reference_of("hf-gpt2-tied")));
  }
}
