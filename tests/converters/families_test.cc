// Every family against what transformers computes: tests/golden/hf-* and hf-class-defaults.json, both written by
// tests/fixtures/make_hf_fixtures.py. A family that is added is tested by adding its fixtures.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "converters/config_keys.h"
#include "converters/model_compare.h"
#include "tests/converters/fixtures.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

nlohmann::json json_in(const fs::path& path) { return nlohmann::json::parse(slurp(path)); }

/// Floats of every stored tensor of the folder, by name.
std::map<std::string, std::vector<float>> stored_floats(const HfFolder& folder) {
  std::map<std::string, std::vector<float>> out;
  for (const FolderTensor& tensor : folder.weights().tensors()) {
    std::vector<float>& values = out[tensor.name];
    values.resize(count_elems(tensor.shape));
    REQUIRE(folder.weights().read(tensor, 0, static_cast<int64_t>(values.size()), values.data()).ok());
  }
  return out;
}

std::unique_ptr<HfFolder> opened(const std::string& name) {
  auto folder = HfFolder::open(golden(name));
  INFO(name);
  REQUIRE_OK(folder);
  return std::move(folder).value();
}

/// One wrong line in a table, or one option misread.
struct BadConfig {
  std::string what;
  /// Changes the model or its weights; false when this model has nothing of the kind.
  std::function<bool(const HfFolder&, ModelConfig&, Weights&)> make;
};

int64_t index_of(const HfFolder& folder, std::string_view name) {
  for (size_t k = 0; k < folder.tensors().size(); ++k) {
    if (folder.tensors()[k].name == name) return static_cast<int64_t>(k);
  }
  return -1;
}

bool exchange(const HfFolder& folder, Weights& weights, std::string_view a, std::string_view b) {
  const int64_t i = index_of(folder, a), j = index_of(folder, b);
  if (i < 0 || j < 0 || weights[i].size() != weights[j].size()) return false;
  std::swap(weights[i], weights[j]);
  return true;
}

bool change(const HfFolder& folder, Weights& weights, std::string_view name, const auto& how) {
  const int64_t k = index_of(folder, name);
  if (k < 0) return false;
  how(weights[k], folder.tensors()[k].shape);
  return true;
}

/// The stored tensors read with another table.
bool remap(const HfFolder& folder, Weights& weights, const std::function<bool(Mapping&, const Shape&)>& wrong) {
  const auto stored = stored_floats(folder);
  bool changed = false;
  for (Mapping mapping : folder.mappings()) {
    const int64_t k = mapping.tensor;
    const Shape& shape = folder.tensors()[k].shape;
    if (!wrong(mapping, shape)) continue;
    changed = true;
    const std::vector<float>& from = stored.at(mapping.stored);
    const int64_t columns = column_count(shape);
    for (const RowRun& run : row_runs(mapping, shape)) {
      for (int64_t r = 0; r < run.count; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t row = run.stored + r * run.stride;
          weights[k][(run.logical + r) * columns + c] =
              from.at(mapping.transpose ? (mapping.line + c) * mapping.shape.back() + row : row * columns + c);
        }
      }
    }
  }
  return changed;
}

/// Of predicting each token but the first, in nats, from the logits of the one before.
std::vector<double> losses_of(const std::vector<float>& logits, const std::vector<int32_t>& tokens) {
  const size_t vocab = logits.size() / tokens.size();
  std::vector<double> out;
  for (size_t t = 0; t + 1 < tokens.size(); ++t) {
    const float* const row = logits.data() + t * vocab;
    const double largest = *std::max_element(row, row + vocab);
    double sum = 0;
    for (size_t v = 0; v < vocab; ++v) sum += std::exp(row[v] - largest);
    out.push_back(largest + std::log(sum) - row[tokens[t + 1]]);
  }
  return out;
}

/// In some layer.
bool turns(const ModelConfig& m) {
  for (int64_t layer = 0; layer < m.layers; ++layer) {
    if (has_rotary(m, layer)) return true;
  }
  return false;
}

const std::vector<BadConfig>& mistakes() {
  static const std::vector<BadConfig> kMistakes = {
      {"q and k exchanged",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return exchange(f, w, "layers.1.attn.q.weight", "layers.1.attn.k.weight");
       }},
      {"k and v exchanged",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return exchange(f, w, "layers.1.attn.k.weight", "layers.1.attn.v.weight");
       }},
      {"gate and up exchanged",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return exchange(f, w, "layers.1.mlp.gate.weight", "layers.1.mlp.up.weight") ||
                exchange(f, w, "layers.1.moe.experts.0.gate.weight", "layers.1.moe.experts.0.up.weight");
       }},
      {"the two norms of a layer exchanged",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return exchange(f, w, "layers.1.attn_norm.weight", "layers.1.mlp_norm.weight");
       }},
      {"the norms of q and k exchanged",
       [](const HfFolder& f, ModelConfig& m, Weights& w) {
         const int64_t layer = has_rotary(m, 1) ? 1 : 0;  // q k is w_q w_k times the same where nothing turns
         return m.positions == Positions::kRotary && has_rotary(m, layer) &&
                exchange(f, w, fmt::format("layers.{}.attn.q_norm.weight", layer),
                         fmt::format("layers.{}.attn.k_norm.weight", layer));
       }},
      {"two experts exchanged",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return exchange(f, w, "layers.1.moe.experts.0.up.weight", "layers.1.moe.experts.1.up.weight");
       }},
      {"groups of heads read as three blocks",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return remap(f, w, [&](Mapping& m, const Shape& shape) {
           if (m.run == 0 || m.logical.find(".attn.") == std::string::npos) return false;
           const bool k = m.logical.find(".attn.k.") != std::string::npos;
           m.first = (k ? 1 : m.logical.find(".attn.v.") != std::string::npos ? 2 : 0) * shape[0];
           m.run = m.stride = 0;
           return true;
         });
       }},
      {"gates and ups of experts side by side read as every other row, or the other way round",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return remap(f, w, [&](Mapping& m, const Shape& shape) {
           const bool up = m.logical.ends_with(".up.weight");
           if (!m.transpose || (!up && !m.logical.ends_with(".gate.weight"))) return false;
           if (m.logical.find(".experts.") == std::string::npos) return false;
           const bool blocks = m.run == 0;
           m.first = !up ? 0 : blocks ? 1 : shape[0];
           m.run = blocks ? 1 : 0;
           m.stride = blocks ? 2 : 0;
           return true;
         });
       }},
      {"a transpose skipped in a matrix that is square, or could be",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.attn.o.weight", [](std::vector<float>& values, const Shape& shape) {
           std::vector<float> other(values.size());
           for (int64_t o = 0; o < shape[0]; ++o) {
             for (int64_t i = 0; i < shape[1]; ++i) other[i * shape[0] + o] = values[o * shape[1] + i];
           }
           values = other;
         });
       }},
      {"the other pairs of rotary channels",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         const bool half = m.rope.pairs == RotaryPairs::kHalf;
         m.rope.pairs = half ? RotaryPairs::kInterleaved : RotaryPairs::kHalf;
         return turns(m);
       }},
      {"another rotary base",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         m.rope_theta *= 10;
         m.window_rope_theta *= 10;
         return turns(m);
       }},
      {"all channels rotary",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         if (m.positions != Positions::kRotary || m.rope.dims == 0) return false;
         m.rope.dims = 0;
         return true;
       }},
      {"the scaling of rotary positions dropped",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         // dynamic changes nothing within the context
         if (m.rope.scaling == RopeScaling::kNone || m.rope.scaling == RopeScaling::kDynamic) return false;
         m.rope.scaling = RopeScaling::kNone;
         return true;
       }},
      {"positions shifted by one",
       [](const HfFolder& f, ModelConfig& m, Weights& w) {
         return change(f, w, "embed.positions", [&](std::vector<float>& values, const Shape&) {
           std::rotate(values.begin(), values.begin() + m.width, values.end());
         });
       }},
      {"the short and the long factors of longrope exchanged",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         std::swap(m.rope.short_factor, m.rope.long_factor);
         return m.rope.scaling == RopeScaling::kLongRope;
       }},
      {"the factor of longrope's cosines left out",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         m.rope.factor = 1;
         return m.rope.scaling == RopeScaling::kLongRope;
       }},
      {"scores scaled by the usual factor",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.attention_scale, 0) != 0; }},
      {"the bias of attention's output dropped",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.attn.o.bias", [](auto& values, const Shape&) { std::ranges::fill(values, 0); });
       }},
      {"a bias of attention dropped",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.attn.v.bias", [](auto& values, const Shape&) { std::ranges::fill(values, 0); });
       }},
      {"a bias of the MLP dropped",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.mlp.up.bias", [](auto& values, const Shape&) { std::ranges::fill(values, 0); });
       }},
      {"the bias of the head dropped",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "head.bias", [](auto& values, const Shape&) { std::ranges::fill(values, 0); });
       }},
      {"the norm after the embedding without its weight",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "embed.norm.weight", [](auto& values, const Shape&) { std::ranges::fill(values, 1); });
       }},
      {"the eps of another family",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         const bool told = m.norm_eps > 1e-3;  // OPT has no key for it
         m.norm_eps = 1e-6;
         return told;
       }},
      {"the window dropped",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         const bool had = m.sliding_window > 0;
         m.sliding_window = 0;
         m.window_layers.clear();
         return had;
       }},
      {"the window one key wider",
       [](const HfFolder&, ModelConfig& m, Weights&) { return m.sliding_window > 0 && ++m.sliding_window > 0; }},
      {"the window in every layer",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         return !std::exchange(m.window_layers, {}).empty() && m.sliding_window > 0;
       }},
      {"the router's weights divided by their sum where they are not, or the other way round",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         m.moe.renormalise = !m.moe.renormalise;
         return m.moe.experts > 0;
       }},
      {"the biases of the choice of experts left out",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.moe.router.bias",
                       [](auto& values, const Shape&) { std::ranges::fill(values, 0); });
       }},
      {"the gate of the MLP beside the experts half open for all",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.moe.shared_gate.weight",
                       [](auto& values, const Shape&) { std::ranges::fill(values, 0); });
       }},
      {"the MLP beside the experts left out",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.moe.shared.down.weight",
                       [](auto& values, const Shape&) { std::ranges::fill(values, 0); });
       }},
      {"the factor of scores that comes with the rotary scaling left out",
       [](const HfFolder&, ModelConfig& m, Weights&) { return has_mla(m) && std::exchange(m.attention_scale, 0) > 0; }},
      {"the norm of latent keys and values without its weight",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.attn.kv_a_norm.weight",
                       [](auto& values, const Shape&) { std::ranges::fill(values, 1); });
       }},
      {"a head's values before its keys",
       [](const HfFolder& f, ModelConfig& m, Weights& w) {
         return change(f, w, "layers.1.attn.kv_b.weight", [&](auto& values, const Shape& shape) {
           const int64_t head = (m.mla.nope_dim + m.mla.value_dim) * shape[1];
           for (auto at = values.begin(); at != values.end(); at += head) {
             std::rotate(at, at + m.mla.nope_dim * shape[1], at + head);
           }
         });
       }},
      {"the channels of latent queries that turn before those that stay",
       [](const HfFolder& f, ModelConfig& m, Weights& w) {
         return change(f, w, "layers.1.attn.q_b.weight", [&](auto& values, const Shape& shape) {
           const int64_t head = m.head_dim * shape[1];
           for (auto at = values.begin(); at != values.end(); at += head) {
             std::rotate(at, at + m.mla.nope_dim * shape[1], at + head);
           }
         });
       }},
      {"the groups of experts left out",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         m.moe.groups_per_token = 1;
         return std::exchange(m.moe.groups, 1) > 1;
       }},
      {"the experts' weights without their factor",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.moe.scale, 1.0) != 1.0; }},
      {"softmax for sigmoids in the router, or the other way round",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         const bool softmax = m.moe.router == RouterKind::kSoftmax;
         m.moe.router = softmax ? RouterKind::kSigmoid : RouterKind::kSoftmax;
         return m.moe.experts > 0;
       }},
      {"norm weights that count from 1 taken as they are",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.norm_plus_one, false); }},
      {"the embedding not scaled",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.embedding_scale, 1.0) != 1.0; }},
      {"the branches not scaled",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.branch_scale, 1.0) != 1.0; }},
      {"the logits not scaled",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.logit_scale, 1.0) != 1.0; }},
      {"the scores not capped",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.score_cap, 0.0) > 0; }},
      {"the logits not capped",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.logit_cap, 0.0) > 0; }},
      {"q, k and v not clipped",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.clip_qkv, 0.0) > 0; }},
      {"the rotary bases of layers with and without a window exchanged",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         if (m.window_rope_theta == 0 || m.window_rope_theta == m.rope_theta) return false;
         std::swap(m.window_rope_theta, m.rope_theta);
         return true;
       }},
      {"one rotary table for all layers",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.window_rope_theta, 0.0) > 0; }},
      {"the layers that turn exchanged with those that do not",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         std::vector<int64_t> others;
         for (int64_t layer = 0; layer < m.layers; ++layer) {
           if (has_rotary(m, layer)) others.push_back(layer);
         }
         return !std::exchange(m.nope_layers, others).empty();
       }},
      {"whole queries and keys normed head by head, with the weight of the first",
       [](const HfFolder& f, ModelConfig& m, Weights& w) {
         if (m.qk_norm != QkNorm::kWhole) return false;
         m.qk_norm = QkNorm::kHead;
         for (size_t k = 0; k < w.size(); ++k) {
           const std::string& name = f.tensors()[k].name;
           if (name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight")) w[k].resize(m.head_dim);
         }
         return true;
       }},
      {"a weight of each head's norm exchanged with the next head's",
       [](const HfFolder& f, ModelConfig& m, Weights& w) {
         return m.qk_norm == QkNorm::kHeadLayerNorm &&
                change(f, w, "layers.1.attn.q_norm.weight", [&](std::vector<float>& values, const Shape&) {
                  std::rotate(values.begin(), values.begin() + m.head_dim, values.end());
                });
       }},
      {"the sinks of attention left out",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.attn.sinks", [](auto& values, const Shape&) { std::ranges::fill(values, -90); });
       }},
      {"the sinks of two heads exchanged",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.attn.sinks", [](auto& values, const Shape&) { std::swap(values[0], values[1]); });
       }},
      {"the trained biases of the router left out",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.moe.router.logit_bias",
                       [](auto& values, const Shape&) { std::ranges::fill(values, 0); });
       }},
      {"an expert's biases left out",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.moe.experts.0.down.bias",
                       [](auto& values, const Shape&) { std::ranges::fill(values, 0); });
       }},
      {"the biases of an expert's gate and up exchanged",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return exchange(f, w, "layers.1.moe.experts.0.gate.bias", "layers.1.moe.experts.0.up.bias");
       }},
      {"another bound of the clamped gate",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.swiglu_limit, 7.0) < 7.0; }},
      {"another factor of the clamped gate",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         m.swiglu_alpha = 1;
         return m.activation == Activation::kSwiGluClamp;
       }},
      {"a plain gate for the clamped one",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         if (m.activation != Activation::kSwiGluClamp) return false;
         m.activation = Activation::kQuickGeGlu;
         return true;
       }},
      {"the experts' outputs scaled in place of their inputs",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.moe.scale_input, false); }},
      {"the chunks of attention left out",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         m.chunk_layers.clear();
         return std::exchange(m.attention_chunk, 0) > 0;
       }},
      {"chunks one key longer",
       [](const HfFolder&, ModelConfig& m, Weights&) { return m.attention_chunk > 0 && ++m.attention_chunk > 0; }},
      {"a window for the chunks",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         m.sliding_window = std::exchange(m.attention_chunk, 0);
         m.window_layers = std::exchange(m.chunk_layers, {});
         return m.sliding_window > 0 && !m.window_layers.empty();
       }},
      {"queries as warm at every position",
       [](const HfFolder&, ModelConfig& m, Weights&) { return std::exchange(m.temperature_scale, 0.0) > 0; }},
      {"queries warmer one position later",
       [](const HfFolder&, ModelConfig& m, Weights&) { return m.temperature_scale > 0 && ++m.temperature_floor > 0; }},
      {"the norms of q and k without weights left out",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         return std::exchange(m.qk_norm, QkNorm::kNone) == QkNorm::kL2;
       }},
      {"the bias of queries' norm left out",
       [](const HfFolder& f, ModelConfig&, Weights& w) {
         return change(f, w, "layers.1.attn.q_norm.bias", [](auto& values, const Shape&) { std::ranges::fill(values, 0); });
       }},
      {"ALiBi by distance where what is added is rounded and scaled",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         return std::exchange(m.alibi, AlibiForm::kDistance) == AlibiForm::kRounded;
       }},
      {"the parallel block computed one after the other",
       [](const HfFolder&, ModelConfig& m, Weights&) {
         if (m.block != BlockKind::kParallel) return false;
         m.block = BlockKind::kPreNorm;
         return true;
       }},
  };
  return kMistakes;
}

}  // namespace

TEST_SUITE("converters/families") {
  TEST_CASE("every family has three fixtures, one of them with gradients") {
    std::map<std::string, int> count, with_gradients;
    for (const std::string& name : all_fixtures()) {
      const std::string type = json_in(golden(name) / "config.json")["model_type"];
      ++count[type];
      with_gradients[type] += has_gradients(name);
    }
    for (const Family& family : families()) {
      if (!family.joins.empty()) continue;  // no class of transformers: ranks_test.cc
      CAPTURE(family.model_type);
      CHECK(count[std::string(family.model_type)] >= 3);
      CHECK(with_gradients[std::string(family.model_type)] >= 1);
    }
  }

  TEST_CASE("the fixtures of a family have at most 120 KB, of all those after the first fourteen 4 MB") {
    std::map<std::string, int64_t> bytes;
    for (const std::string& name : all_fixtures()) {
      const std::string type = json_in(golden(name) / "config.json")["model_type"];
      for (const auto& file : fs::directory_iterator(golden(name)))
        bytes[type] += static_cast<int64_t>(file.file_size());
    }
    for (const char* first : {"gpt2", "opt", "bloom", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "mixtral",
                              "glm", "glm4", "chatglm", "codegen", "gptj"})
      bytes.erase(first);
    int64_t all = 0;
    for (const auto& [type, size] : bytes) {
      CAPTURE(type);
      CHECK(size <= 120'000);
      all += size;
    }
    MESSAGE(bytes.size(), " families, ", all, " bytes");
    CHECK(all <= 4'000'000);
  }

  TEST_CASE("absent keys take the class defaults of both lines of transformers") {
    const nlohmann::json defaults = json_in(golden("hf-class-defaults.json"));
    for (const Family& family : families()) {
      if (!defaults.contains(family.model_type)) continue;
      for (const auto& [line, keys] : defaults[std::string(family.model_type)].items()) {
        CAPTURE(family.model_type);
        CAPTURE(line);
        nlohmann::json all = keys;
        all["model_type"] = family.model_type;
        // The lines have other rotary bases for cohere and olmo3.
        all["transformers_version"] = line == "4.x" ? "4.57.6" : "5.24.0";
        nlohmann::json none = {{"model_type", family.model_type},
                               {"transformers_version", all["transformers_version"]}};
        // Of the 42 channels that the class takes, 21 would turn; the published files say 128.
        if (family.model_type == "glm4_moe") all["head_dim"] = none["head_dim"] = 128;
        // The class has no number, and fails on that.
        if (family.model_type == "deepseek_v2") all["num_experts_per_tok"] = none["num_experts_per_tok"] = 6;
        const auto from_all = model_from_config(all);
        const auto from_none = model_from_config(none);
        REQUIRE_OK(from_all);
        REQUIRE_OK(from_none);
        const std::vector<std::string> different = differing_fields(from_none.value(), from_all.value());
        CHECK_MESSAGE(different.empty(), fmt::format("{}", fmt::join(different, ", ")));
      }
    }
  }

  TEST_CASE("a config that is written says the same model, every key of the source kept") {
    for_each_fixture([&](const std::string& name) {
      const auto folder = opened(name);
      const nlohmann::json source = json_in(golden(name) / "config.json");
      if (folder->family().architecture.empty()) return;  // goes out as another family
      const auto family = family_for(folder->model(), std::string(source["model_type"]));
      REQUIRE_OK(family);
      if (folder->family().own_code && family.value().model_type == "llama") return;
      CHECK(family.value().model_type == source["model_type"].get<std::string>());
      const nlohmann::json written = config_from_model(family.value(), folder->model(), DType::kBf16, source);
      const auto again = model_from_config(written);
      REQUIRE_OK(again);
      CHECK(differing_fields(again.value(), folder->model()).empty());
      for (const auto& [key, value] : written.items()) {
        if (!source.contains(key) || key.ends_with("_token_id")) continue;  // export adds the token ids
        CAPTURE(key);
        CHECK(value == source[key]);
        CHECK(value.type_name() == source[key].type_name());
      }
      // Without the source: other spellings, the same model.
      const auto bare = model_from_config(config_from_model(family.value(), folder->model(), DType::kF32, nullptr));
      REQUIRE(bare.ok());
      CHECK(differing_fields(bare.value(), folder->model()).empty());
    });
  }

  TEST_CASE("the size of a head stays in config.json where the source says it, though the class would divide") {
    for (const char* type : {"granite", "qwen3_moe", "stablelm"}) {
      CAPTURE(type);
      nlohmann::json source = {{"model_type", type},
                               {"hidden_size", 64},
                               {"num_attention_heads", 8},
                               {"num_key_value_heads", 4},
                               {"head_dim", 8}};
      const auto model = model_from_config(source);
      REQUIRE_OK(model);
      const Family family = find_family(type).value();
      CHECK(config_from_model(family, model.value(), DType::kF32, source).value("head_dim", 0) == 8);
      source["head_dim"] = nullptr;
      CHECK_FALSE(config_from_model(family, model.value(), DType::kF32, source).contains("head_dim"));
    }
  }

  TEST_CASE(
      "config.json keeps the source's spellings, where one is under another name and where several say a thing "
      "together") {
    const auto written = [](const nlohmann::json& source) {
      const auto model = model_from_config(source);
      REQUIRE_OK(model);
      return config_from_model(find_family(source["model_type"].get<std::string>()).value(), model.value(), DType::kF32,
                               source);
    };
    CHECK(written({{"model_type", "exaone"}, {"hidden_act", "gelu_pytorch_tanh"}})["activation_function"] ==
          "gelu_pytorch_tanh");
    const auto falcon = written({{"model_type", "falcon"},
                                 {"new_decoder_architecture", true},
                                 {"num_kv_heads", 1},
                                 {"num_ln_in_parallel_attn", 1}});
    CHECK(falcon["new_decoder_architecture"] == true);
    CHECK(falcon["num_kv_heads"] == 1);
    CHECK(falcon["num_ln_in_parallel_attn"] == 1);
  }

  TEST_CASE("MiniCPM of any width goes out as granite, to the last bit of the factor of its logits") {
    for (int64_t base = 1; base < 300; base += 7) {
      CAPTURE(base);
      const auto model = model_from_config(
          {{"model_type", "minicpm"}, {"hidden_size", 2304}, {"num_attention_heads", 36}, {"dim_model_base", base}});
      REQUIRE_OK(model);
      const auto family = family_for(model.value());
      REQUIRE_OK(family);
      CHECK(family.value().model_type == "granite");
    }
  }

  TEST_CASE("every stored element is one logical element and comes back to its place") {
    for_each_fixture([&](const std::string& name) {
      const auto folder = opened(name);
      if (name == "hf-gpt_oss-clamped") {
        REQUIRE(folder->warnings().size() == 2);
        CHECK(folder->warnings()[0] == "swiglu_alpha = 1.3: transformers 4 takes 1.702");
        CHECK(folder->warnings()[1] == "swiglu_limit = 1.6: transformers 4 takes 7");
      } else if (name == "hf-deepseek_v2-greedy") {
        REQUIRE(folder->warnings().size() == 1);
        CHECK(folder->warnings()[0].find("mscale_all_dim = 0.8: scores are multiplied by 1.15") == 0);
      } else if (name == "hf-ernie4_5_moe-bias") {
        REQUIRE(folder->warnings().size() == 1);
        CHECK(folder->warnings()[0].find("use_bias = true: transformers 5 has no biases on experts") == 0);
      } else {
        CHECK(folder->warnings().empty());
      }
      CHECK(folder->ignored().empty());
      const auto source = stored_floats(*folder);
      const auto again = to_stored(folder->mappings(), folder->tensors(), weights_of(*folder));
      REQUIRE(again.size() == source.size());
      for (const auto& [tensor, values] : source) {
        CAPTURE(tensor);
        CHECK(again.at(tensor) == values);
      }
    });
  }

  TEST_CASE("config.json of Llama and its followers has its keys in one order, each family's own among them") {
    const std::vector<std::string> front = {
        "architectures",           "model_type",          "vocab_size",          "hidden_size", "intermediate_size",
        "num_hidden_layers",       "num_attention_heads", "num_key_value_heads", "head_dim",    "hidden_act",
        "max_position_embeddings", "rms_norm_eps",        "rope_theta"};
    const std::vector<std::string> back = {"attention_dropout", "tie_word_embeddings", "initializer_range"};
    using Keys = std::vector<std::string>;
    for (const auto& [type, own, last] :
         {std::tuple("llama", Keys{"rope_scaling", "attention_bias", "mlp_bias"}, Keys{"pretraining_tp"}),
          {"mistral", Keys{"rope_scaling", "sliding_window"}, Keys{}},
          {"mixtral",
           Keys{"rope_scaling", "sliding_window", "num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"},
           Keys{"router_jitter_noise"}},
          {"qwen2", Keys{"rope_scaling", "use_sliding_window", "sliding_window", "max_window_layers"}, Keys{}},
          {"qwen3", Keys{"rope_scaling", "attention_bias", "use_sliding_window", "sliding_window", "max_window_layers"},
           Keys{}},
          {"glm", Keys{"partial_rotary_factor", "rope_scaling", "attention_bias"}, Keys{}},
          {"glm4", Keys{"partial_rotary_factor", "rope_scaling", "attention_bias"}, Keys{}}}) {
      CAPTURE(type);
      const auto model = model_from_config({{"model_type", type}});
      REQUIRE_OK(model);
      Keys expected = front, found;
      if (type == std::string("qwen2")) std::erase(expected, "head_dim");  // its class has no such key
      for (const Keys& more : {own, back, last, Keys{"bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}})
        expected.insert(expected.end(), more.begin(), more.end());
      expected.emplace_back("torch_dtype");
      const auto written = config_from_model(find_family(type).value(), model.value(), DType::kF32, nullptr);
      for (const auto& [key, value] : written.items()) {
        if (key != "output_router_logits") found.push_back(key);  // beside the router's, wherever that is
      }
      CHECK_MESSAGE(found == expected, fmt::format("{}", fmt::join(found, " ")));
    }
  }

  TEST_CASE("a model that no family holds is refused with what the nearest has no place for") {
    auto llama = model_from_config(nlohmann::json::parse(R"({"model_type": "llama"})"));
    REQUIRE(llama.ok());
    ModelConfig model = llama.value();
    CHECK(family_for(model).value().model_type == "llama");
    CHECK(family_for(model, "mistral").value().model_type == "mistral");  // without a window it is the same model
    CHECK(family_for(model, "gpt2").value().model_type == "llama");
    model.embedding_norm = true;
    const auto refused = family_for(model);
    REQUIRE(!refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnsupported);
    CHECK(refused.error().message.find("is the nearest and has no place for embedding_norm = true") !=
          std::string::npos);
  }

  TEST_CASE("a switch that is on and that the family does not have is refused by name") {
    for (const Family& family : families()) {
      CAPTURE(family.model_type);
      if (family.model_type == "megatron_gpt") continue;  // has keys that must be there
      nlohmann::json config = {
          {"model_type", family.model_type}, {"use_clever_attention", true}, {"transformers_version", "4.57.6"}};
      if (family.model_type == "glm4_moe") config["head_dim"] = 128;
      if (family.model_type == "deepseek_v2") config["num_experts_per_tok"] = 6;
      const auto refused = model_from_config(config);
      REQUIRE(!refused.ok());
      CHECK(refused.error().code == ErrorCode::kUnsupported);
      CHECK(refused.error().message.find("use_clever_attention = true") != std::string::npos);
      config["use_clever_attention"] = false;
      config["use_cache"] = true;
      CHECK(model_from_config(config).ok());
    }
  }

  TEST_CASE("keys of config.json that change no numbers pass, unknown ones are named, all at once") {
    const Family llama = find_family("llama").value();
    nlohmann::json config = {{"model_type", "llama"},
                             {"is_llama_config", true},
                             {"rope_interleaved", false},
                             {"bf16", true},
                             {"pretraining_tp", 1},
                             {"unsloth_fixed", true},
                             {"_attn_implementation_autoset", true},
                             {"attention_softmax_in_fp32", true},
                             {"bias_dropout_fusion", true},
                             {"embedding_multiplier", 1.0},
                             {"attention_multiplier", 0.08838834764831845},
                             {"no_rope_layers", {1, 1}},
                             {"clip_qkv", nullptr}};
    const auto model = model_from_config(config);
    REQUIRE_OK(model);
    CHECK(unread_keys(llama, model.value(), config).not_read.empty());
    config["scale_of_things"] = 3;
    config["a_list"] = {1, 2};
    CHECK(model_from_config(config).ok());
    CHECK(unread_keys(llama, model.value(), config).not_read == std::vector<std::string>{"a_list", "scale_of_things"});
    config["first_switch"] = config["second_switch"] = true;
    const auto refused = model_from_config(config);
    REQUIRE_FALSE(refused.ok());
    for (const char* name : {"first_switch = true", "second_switch = true"}) {
      CHECK(refused.error().message.find(name) != std::string::npos);
    }
  }

  TEST_CASE("a model that only calls itself llama is refused by its own keys, with its name") {
    for (const auto& [key, value, says] :
         {std::tuple("embedding_multiplier", nlohmann::json(12.0), "granite"),
          std::tuple("attention_multiplier", nlohmann::json(0.0078125), "granite"),
          std::tuple("logits_scaling", nlohmann::json(8), "granite"),
          std::tuple("residual_multiplier", nlohmann::json(0.22), "granite"),
          std::tuple("no_rope_layers", nlohmann::json({1, 1, 1, 0}), "smollm3"),
          std::tuple("no_rope_layer_interval", nlohmann::json(4), "smollm3"),
          std::tuple("hidden_activation", nlohmann::json("gelu_pytorch_tanh"), "gemma"),
          std::tuple("final_logit_softcapping", nlohmann::json(30.0), "gemma2"),
          std::tuple("query_pre_attn_scalar", nlohmann::json(256), "gemma2"),
          std::tuple("use_bias", nlohmann::json(false), "ernie4_5"),
          std::tuple("clip_qkv", nlohmann::json(8.0), "olmo"),
          std::tuple("partial_rotary_factor", nlohmann::json(0.5), "turns a part"),
          std::tuple("layer_types", nlohmann::json({"full_attention", "sliding_attention"}), "layer_types"),
          std::tuple("architectures", nlohmann::json({"HeliumForCausalLM"}), "HeliumForCausalLM")}) {
      CAPTURE(key);
      const auto refused = model_from_config({{"model_type", "llama"}, {key, value}});
      REQUIRE_FALSE(refused.ok());
      CHECK(refused.error().code == ErrorCode::kUnsupported);
      CHECK(refused.error().message.find(key) != std::string::npos);
      CHECK(refused.error().message.find(says) != std::string::npos);
    }
  }

  TEST_CASE("a decoder of another kind is refused with what it needs, by the keys that show it") {
    using Config = nlohmann::json;
    for (const auto& [type, keys, says] :
         {std::tuple("mamba2", Config{{"state_size", 128}}, "it needs state-space layers (state_size = 128), which"),
          {"jamba", Config{{"mamba_d_state", 16}, {"expert_layer_period", 2}},
           "it needs state-space layers (mamba_d_state = 16), which"},
          {"qwen3_next",
           Config{{"linear_num_value_heads", 32}, {"decoder_sparse_step", 1}, {"mlp_only_layers", Config::array()}},
           "it needs linear attention (linear_num_value_heads = 32), which"},
          {"lfm2", Config{{"layer_types", {"conv", "full_attention"}}},
           "short convolutions between tokens (layer_types has \"conv\")"},
          {"deepseek_v32", Config{{"kv_lora_rank", 512}, {"index_topk", 2048}},
           "it needs attention to keys that an indexer picks (index_topk = 2048), which"},
          {"gemma3", Config{{"vision_config", {{"depth", 3}}}, {"text_config", {{"attn_logit_softcapping", 50.0}}}},
           "it needs pictures or sound as input (vision_config = ...), which"},
          {"mistral4", Config{{"kv_lora_rank", 256}, {"rope_parameters", {{"llama_4_scaling_beta", 0.1}}}},
           "a temperature of latent attention by position (llama_4_scaling_beta = 0.1)"},
          {"t5", Config{{"is_encoder_decoder", true}}, "it needs an encoder (is_encoder_decoder = true), which"}}) {
      CAPTURE(type);
      Config config = keys;
      config["model_type"] = type;
      const auto refused = model_from_config(config);
      REQUIRE_FALSE(refused.ok());
      CHECK(refused.error().code == ErrorCode::kUnsupported);
      CHECK_MESSAGE(refused.error().message.find(says) != std::string::npos, refused.error().message);
      CHECK(refused.error().message.find(fmt::format("model_type \"{}\" is not known; known: ", type)) !=
            std::string::npos);
    }
    const auto nothing = model_from_config({{"model_type", "sort_of_llama"}, {"attn_logit_softcapping", nullptr}});
    REQUIRE_FALSE(nothing.ok());
    CHECK(nothing.error().message.starts_with("model_type \"sort_of_llama\" is not known"));
  }

  TEST_CASE("keys that the files of a family contradict are refused with what was found and what is read") {
    using Config = nlohmann::json;
    const Config longrope = {{"max_position_embeddings", 64},
                             {"original_max_position_embeddings", 16},
                             {"hidden_size", 48},
                             {"num_attention_heads", 6}};
    const auto phi3 = [&](const Config& scaling, const Config& more = Config::object()) {
      Config out = longrope;
      out.update(more);
      out["rope_scaling"] = scaling;
      return out;
    };
    const Config four = {1, 1.5, 2, 3}, three = {1, 2, 3};
    for (
        const auto& [type, keys, says] :
        {std::tuple("phi3", phi3({{"type", "longrope"}, {"short_factor", three}, {"long_factor", four}}),
                    "rope_scaling.short_factor must be a list of 4 numbers above 0, one for each pair of channels that "
                    "turns, got 3 values"),
         {"phi3", phi3({{"type", "longrope"}, {"short_factor", four}}),
          "rope_scaling.long_factor must be a list of 4 numbers above 0, one for each pair of channels that turns, got "
          "none"},
         {"phi3", phi3({{"type", "longrope"}, {"short_factor", {1, 2, 3, 0}}, {"long_factor", four}}), "above 0"},
         {"phi3", phi3({{"type", "linear"}, {"factor", 2}}),
          "rope_scaling.rope_type \"linear\": this family knows \"default\" and \"longrope\""},
         {"phi3",
          phi3({{"type", "longrope"}, {"short_factor", four}, {"long_factor", four}, {"attention_factor", 1.2}}),
          "rope_scaling.attention_factor = 1.2: transformers 4 refuses this key"},
         {"phi3",
          phi3({{"type", "longrope"},
                {"short_factor", four},
                {"long_factor", four},
                {"original_max_position_embeddings", 32}}),
          "original_max_position_embeddings = 16 and rope_scaling.original_max_position_embeddings = 32 disagree"},
         {"phi3", Config{{"full_attn_mod", 2}}, "full_attn_mod = 2"},
         {"falcon", Config{{"new_decoder_architecture", true}, {"parallel_attn", false}},
          "new_decoder_architecture without parallel_attn"},
         {"falcon", Config{{"num_ln_in_parallel_attn", 2}}, "num_ln_in_parallel_attn = 2 without"},
         {"falcon", Config{{"new_decoder_architecture", true}, {"num_ln_in_parallel_attn", 3}},
          "num_ln_in_parallel_attn = 3: a layer has 1 or 2 norms"},
         {"falcon", Config{{"multi_query", false}, {"num_kv_heads", 8}}, "num_kv_heads = 8 of 71 heads without"},
         {"gpt_neo", Config{{"num_layers", 3}}, "attention_types names more layers, num_layers = 3"},
         {"gpt_neo", Config{{"num_layers", 3}, {"attention_types", {{{"global"}, 2}}}},
          "attention_types names 2 layers, num_layers = 3"},
         {"gpt_neo", Config{{"num_layers", 1}, {"attention_types", {{{"round"}, 1}}}},
          "attention_types must be a list"},
         {"gpt_neo",
          Config{{"num_layers", 1},
                 {"attention_types", {{{"global"}, 1}}},
                 {"attention_layers", Config::array({"local"})}},
          "attention_types and attention_layers disagree"},
         {"gpt_neo", Config{{"num_layers", 1}, {"attention_types", {{{"global"}, int64_t{1} << 62}}}},
          "names more layers"},
         {"gpt_bigcode", Config{{"num_key_value_heads", 12}},
          "num_key_value_heads = 12 and multi_query, which means 1, disagree"},
         {"stablelm", Config{{"head_dim", 64}}, "head_dim = 64: in this family it is the width of 2560 divided by 32"},
         {"qwen3_moe", Config{{"decoder_sparse_step", 25}},
          "decoder_sparse_step = 25 and mlp_only_layers leave no layer"},
         {"qwen3_moe", Config{{"decoder_sparse_step", 0}}, "decoder_sparse_step = 0 must be positive"},
         {"qwen3_moe", Config{{"mlp_only_layers", Config::array({"0"})}}, "mlp_only_layers must be a list of layers"},
         {"qwen3_moe", Config{{"moe_intermediate_size", 0}}, "moe_intermediate_size = 0 is out of range"},
         {"qwen2_moe", Config{{"use_sliding_window", true}}, "use_sliding_window = true: transformers 4 gives"},
         {"qwen2_moe", Config{{"shared_expert_intermediate_size", 0}}, "shared_expert_intermediate_size = 0 is out"},
         {"deepseek_v3", Config{{"num_key_value_heads", 8}}, "num_key_value_heads = 8 of num_attention_heads = 128"},
         {"deepseek_v3", Config{{"head_dim", 192}}, "head_dim = 192: with these heads it is 64"},
         {"deepseek_v3", Config{{"qk_rope_head_dim", 63}}, "qk_rope_head_dim = 63 is odd"},
         {"deepseek_v3", Config{{"v_head_dim", 193}}, "v_head_dim = 193 is more than"},
         {"deepseek_v3", Config{{"kv_lora_rank", 0}}, "kv_lora_rank = 0 is out of range"},
         {"deepseek_v3", Config{{"scoring_func", "softmax"}}, "scoring_func = \"softmax\""},
         {"deepseek_v3", Config{{"topk_method", "greedy"}}, "topk_method = \"greedy\""},
         {"deepseek_v3", Config{{"moe_layer_freq", 2}}, "moe_layer_freq = 2"},
         {"deepseek_v3", Config{{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}, {"mscale_all_dim", 1.0}}}},
          "rope_scaling.mscale_all_dim = 1.0: read with yarn alone"},
         {"deepseek_v2", Config{{"vocab_size", 64}}, "num_experts_per_tok is missing"},
         {"deepseek_v2", Config{{"num_experts_per_tok", 6}},
          "vocab_size is absent: transformers 5 takes 102400, 4.x takes 32000"},
         {"deepseek_v2", Config{{"vocab_size", 64}, {"num_experts_per_tok", 6}, {"topk_method", "noaux_tc"}},
          "topk_method = \"noaux_tc\""},
         {"deepseek_v2",
          Config{{"vocab_size", 64},
                 {"num_experts_per_tok", 6},
                 {"topk_method", "group_limited_greedy"},
                 {"n_group", 3},
                 {"topk_group", 1}},
          "64 experts in n_group = 3 groups"},
         {"deepseek_v2", Config{{"vocab_size", 64}, {"num_experts_per_tok", 6}, {"norm_topk_prob", true}},
          "norm_topk_prob = true"},
         {"gpt_oss", Config{{"rope_scaling", nullptr}},
          "rope_scaling = null: transformers 4 takes no scaling, 5.x yarn"},
         {"gpt_oss", Config{{"attention_bias", false}}, "attention_bias = false"},
         {"gpt_oss", Config{{"swiglu_limit", 0}}, "swiglu_limit = 0 must be above 0"},
         {"gpt_oss", Config{{"sliding_window", nullptr}}, "sliding_window = null: transformers fails on it"},
         {"gpt_oss", Config{{"num_local_experts", 8}, {"num_experts", 4}}, "num_local_experts = 8 and num_experts = 4"},
         {"llama4_text", Config{{"attention_chunk_size", nullptr}},
          "attention_chunk_size = null: transformers 4 fails"},
         {"llama4_text", Config{{"attention_chunk_size", 0}}, "attention_chunk_size = 0 is out of range"},
         {"llama4_text", Config{{"attention_bias", true}}, "attention_bias = true"},
         {"llama4_text", Config{{"num_hidden_layers", 1}, {"layer_types", {"sliding_attention"}}},
          "layer_types[0] = \"sliding_attention\": known are \"full_attention\", \"chunked_attention\""},
         {"llama4_text", Config{{"num_hidden_layers", 2}, {"layer_types", {"full_attention"}}},
          "layer_types must be a list of 2 strings"},
         {"llama4_text", Config{{"num_hidden_layers", 2}, {"no_rope_layers", {1}}},
          "no_rope_layers must be a list of 2 numbers, 1 or 0"},
         {"llama4_text", Config{{"interleave_moe_layer_step", 49}}, "leave no layer with experts"},
         {"llama4_text", Config{{"interleave_moe_layer_step", 0}}, "interleave_moe_layer_step = 0 must be positive"},
         {"llama4_text", Config{{"moe_layers", {48}}}, "moe_layers must be a list of layers, 0 to 47"},
         {"llama4_text", Config{{"floor_scale", 0}}, "floor_scale = 0 must be a whole number, 1 to"},
         {"llama4_text", Config{{"attn_scale", -0.1}}, "attn_scale = -0.1: below 0"},
         {"llama4_text", Config{{"attn_temperature_tuning", "on"}}, "attn_temperature_tuning must be true or false"},
         {"ministral3", Config{{"rope_theta", 370.0}}, "without rope_parameters: transformers takes 1000000 and 16384"},
         {"ministral3", Config{{"rope_parameters", {{"rope_type", "yarn"}, {"factor", 2.5}}}},
          "rope_parameters.llama_4_scaling_beta must be a number, got null"},
         {"ministral3", Config{{"rope_parameters", {{"llama_4_scaling_beta", -0.1}}}},
          "rope_parameters.llama_4_scaling_beta = -0.1: below 0"},
         {"ministral3", Config{{"rope_parameters", {{"llama_4_scaling_beta", 0.1}}}},
          "rope_parameters.original_max_position_embeddings must be a number, got null"},
         {"ministral3",
          Config{{"rope_parameters", {{"llama_4_scaling_beta", 0.1}, {"original_max_position_embeddings", 2.5}}}},
          "rope_parameters.original_max_position_embeddings = 2.5 must be a whole number, 1 to"},
         {"ministral3",
          Config{{"original_max_position_embeddings", 14},
                 {"rope_parameters", {{"rope_type", "yarn"}, {"factor", 2.5}, {"llama_4_scaling_beta", 0.1}}}},
          "original_max_position_embeddings = 14 and rope_parameters.original_max_position_embeddings = null disagree"},
         {"ministral3",
          Config{{"rope_scaling", {{"llama_4_scaling_beta", 0.1}, {"original_max_position_embeddings", 14}}},
                 {"rope_parameters", {{"llama_4_scaling_beta", 0.2}}}},
          "two values of llama_4_scaling_beta disagree"},
         {"ministral3", Config{{"layer_types", {"sliding_attention"}}}, "layer_types"},
         {"glm4_moe", Config{{"first_k_dense_replace", 46}}, "first_k_dense_replace = 46 of 46 layers: none has"},
         {"glm4_moe", Config{{"n_group", 3}}, "128 experts in n_group = 3 groups"},
         {"glm4_moe", Config{{"n_group", 64}, {"topk_group", 2}, {"num_experts_per_tok", 5}},
          "128 experts in n_group = 64 groups, topk_group = 2 of them a token: no place for 5"},
         {"glm4_moe", Config{{"routed_scaling_factor", 0.0}}, "routed_scaling_factor = 0 must be above 0"},
         {"ernie4_5_moe", Config{{"use_bias", true}, {"transformers_version", "5.24.0"}},
          "use_bias = true, written by transformers 5: its experts have no biases"},
         {"ernie4_5_moe", Config{{"moe_layer_start_index", 28}}, "leave no layer with experts"},
         {"ernie4_5_moe", Config{{"moe_norm_min", 0.5}}, "moe_norm_min = 0.5: a bound that sums of weights can meet"},
         {"ernie4_5_moe", Config{{"moe_k", 65}}, "moe_k = 65 of moe_num_experts = 64"},
         {"minimax_m2", Config{{"rotary_dim", 64}, {"partial_rotary_factor", 0.25}},
          "rotary_dim = 64, and 32 channels turn"},
         {"minimax_m2", Config{{"scoring_func", "softmax"}}, "scoring_func = \"softmax\" is not supported here, "},
         {"qwen3_moe", Config{{"num_experts", 8}, {"num_local_experts", 4}},
          "num_experts = 8 and num_local_experts = 4 are two names of one number"},
         {"qwen3_moe", Config{{"num_experts", 4}}, "num_experts_per_tok = 8 of num_experts = 4"},
         {"internlm3", Config{{"qkv_bias", true}}, "qkv_bias (attention_bias) = true and bias (mlp_bias) = false"},
         {"exaone", Config{{"layer_norm_epsilon", 1e-5}, {"rms_norm_eps", 1e-6}}, "are two names of one value"},
         {"starcoder2", Config{{"norm_type", "rms_norm"}}, "norm_type = \"rms_norm\""},
         {"gemma2", Config{{"sliding_window", nullptr}}, "sliding_window = null: transformers fails on it"},
         {"gemma2", Config{{"attn_logit_softcapping", 0.0}}, "attn_logit_softcapping = 0: it must be above 0, or null"},
         {"gemma2", Config{{"query_pre_attn_scalar", 0}}, "query_pre_attn_scalar = 0 must be above 0"},
         {"gemma2", Config{{"num_hidden_layers", 2}, {"layer_types", {"full_attention"}}},
          "layer_types must be a list of 2 strings"},
         {"gemma2", Config{{"num_hidden_layers", 1}, {"layer_types", Config::array({"chunked_attention"})}},
          "layer_types[0] = \"chunked_attention\": known are"},
         {"gemma3_text", Config{{"attn_logit_softcapping", 50.0}},
          "attn_logit_softcapping = 50.0 is not supported here, null is"},
         {"gemma3_text", Config{{"sliding_window_pattern", 0}}, "sliding_window_pattern = 0 must be positive"},
         {"gemma3_text", Config{{"rope_parameters", {{"full_attention", {{"rope_theta", 1e6}}}}}},
          "rope_parameters.sliding_attention must be an object"},
         {"gemma3_text",
          Config{{"rope_local_base_freq", 5e3},
                 {"rope_parameters",
                  {{"full_attention", {{"rope_theta", 1e6}}}, {"sliding_attention", {{"rope_theta", 1e4}}}}}},
          "rope_local_base_freq = 5000 and rope_parameters.sliding_attention.rope_theta = 10000 disagree"},
         {"gemma3_text",
          Config{{"rope_parameters",
                  {{"full_attention", {{"rope_theta", 1e6}}},
                   {"sliding_attention", {{"rope_theta", 1e4}, {"rope_type", "linear"}, {"factor", 8.0}}}}}},
          "rope_parameters.sliding_attention.rope_type = \"linear\": layers with a window have no scaling"},
         {"gemma3_text",
          Config{{"rope_theta", 5e5},
                 {"rope_parameters",
                  {{"full_attention", {{"rope_theta", 1e6}}}, {"sliding_attention", {{"rope_theta", 1e4}}}}}},
          "rope_theta = 500000 and rope_parameters.rope_theta = 1000000 disagree"},
         {"granite", Config{{"residual_multiplier", 0.0}}, "residual_multiplier = 0: factors are above 0"},
         {"granite", Config{{"logits_scaling", -8.0}}, "logits_scaling = -8: divisors are above 0"},
         {"olmo", Config{{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}}}},
          "transformers 4 takes none but linear and dynamic"},
         {"olmo", Config{{"clip_qkv", -1.0}}, "clip_qkv = -1: it must be above 0, or null"},
         {"olmo3", Config{{"hidden_act", "silu"}},
          "rope_theta is absent: transformers 5 reads 500000, 4.x reads 10000"},
         {"cohere", Config{{"hidden_act", "silu"}},
          "rope_theta is absent: transformers 5 reads 500000, 4.x reads 10000"},
         {"cohere2", Config{{"sliding_window", nullptr}}, "sliding_window = null: transformers fails on it"},
         {"exaone4",
          Config{{"num_hidden_layers", 1},
                 {"sliding_window", nullptr},
                 {"layer_types", Config::array({"sliding_attention"})}},
          "layer_types has sliding_attention, and sliding_window is null"},
         {"exaone4", Config{{"sliding_window_pattern", "LLLG"}}, "sliding_window_pattern must be a whole number"},
         {"smollm3", Config{{"use_sliding_window", true}}, "use_sliding_window = true"},
         {"smollm3", Config{{"num_hidden_layers", 2}, {"no_rope_layers", Config::array()}},
          "no_rope_layers must be a list of 2 numbers, 1 or 0"},
         {"smollm3", Config{{"num_hidden_layers", 2}, {"no_rope_layers", {1, 2}}},
          "no_rope_layers[1] = 2 must be 1 or 0"},
         {"olmoe", Config{{"clip_qkv", 8.0}}, "clip_qkv = 8.0 is not supported here, null is"},
         {"nemotron", Config{{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}}},
          "rope_scaling: transformers 4 passes over it in this family"},
         {"minicpm", Config{{"scale_depth", 0.0}}, "scale_depth = 0 and dim_model_base = 1 must be above 0"}}) {
      CAPTURE(says);
      Config config = keys;
      config["model_type"] = type;
      const auto refused = model_from_config(config);
      REQUIRE_FALSE(refused.ok());
      CHECK_MESSAGE(refused.error().message.find(says) != std::string::npos, refused.error().message);
    }
  }

  TEST_CASE("keys of published files that a class does not look at stop nothing, and are not called unread") {
    using Config = nlohmann::json;
    for (const auto& [type, keys] :
         {std::pair("phi3", Config{{"full_attn_mod", 1},
                                   {"interpolate_factor", 1},
                                   {"attention_bias", false},
                                   {"lm_head_bias", false},
                                   {"mlp_bias", false}}),
          {"starcoder2", Config{{"mlp_type", "default"},
                                {"norm_type", "layer_norm"},
                                {"scale_attn_weights", true},
                                {"rms_norm_eps", 1e-5},
                                {"layer_norm_epsilon", 1e-5},
                                {"activation_function", "gelu"}}},
          {"falcon", Config{{"apply_residual_connection_post_layernorm", false}, {"num_kv_heads", 71}}},
          {"gpt_bigcode", Config{{"inference_runner", 0},
                                 {"max_batch_size", nullptr},
                                 {"pad_key_length", true},
                                 {"pre_allocate_kv_cache", false},
                                 {"validate_runner_input", true}}},
          {"qwen3_moe", Config{{"max_window_layers", 48}, {"sliding_window", nullptr}, {"head_dim", 128}}},
          {"qwen2_moe", Config{{"max_window_layers", 21}, {"sliding_window", 32768}, {"use_sliding_window", false}}},
          {"deepseek_v3", Config{{"num_nextn_predict_layers", 1},
                                 {"scoring_func", "sigmoid"},
                                 {"topk_method", "noaux_tc"},
                                 {"ep_size", 1},
                                 {"moe_layer_freq", 1},
                                 {"seq_aux", true},
                                 {"head_dim", 64}}},
          {"deepseek_v2", Config{{"num_experts_per_tok", 6},
                                 {"vocab_size", 64},
                                 {"scoring_func", "softmax"},
                                 {"ep_size", 1},
                                 {"moe_layer_freq", 1},
                                 {"seq_aux", true}}},
          {"gpt_oss", Config{{"experts_per_token", 4},
                             {"initial_context_length", 4096},
                             {"swiglu_limit", 7.0},
                             {"hidden_act", "silu"},
                             {"attention_bias", true}}},
          {"llama4_text", Config{{"attn_temperature_tuning", 4},
                                 {"moe_layers", {0, 1}},
                                 {"no_rope_layers", Config::array()},
                                 {"router_aux_loss_coef", 0.001},
                                 {"router_jitter_noise", 0.0},
                                 {"output_router_logits", false}}},
          {"ministral3", Config{{"rope_parameters",
                                 {{"rope_type", "yarn"},
                                  {"type", "yarn"},
                                  {"rope_theta", 1000000.0},
                                  {"factor", 16.0},
                                  {"original_max_position_embeddings", 16384},
                                  {"max_position_embeddings", 262144},
                                  {"beta_fast", 32.0},
                                  {"beta_slow", 1.0},
                                  {"mscale_all_dim", 1.0},
                                  {"mscale", 1.0},
                                  {"llama_4_scaling_beta", 0.1}}},
                                {"sliding_window", nullptr},
                                {"hidden_act", "silu"}}},
          {"glm4_moe", Config{{"num_nextn_predict_layers", 1}, {"use_qk_norm", true}, {"head_dim", 128}}},
          {"ernie4_5_moe", Config{{"moe_layer_end_index", 27}, {"moe_num_shared_experts", 2}}},
          {"minimax_m2", Config{{"rotary_dim", 64},
                                {"attn_type_list", {1, 1}},
                                {"num_mtp_modules", 3},
                                {"mtp_transformer_layers", 1},
                                {"use_mtp", true},
                                {"qk_norm_type", "per_layer"},
                                {"scoring_func", "sigmoid"},
                                {"shared_intermediate_size", 0},
                                {"use_qk_norm", true},
                                {"use_routing_bias", true}}},
          {"ernie4_5", Config{{"compression_ratio", 1.0}, {"weight_share_add_bias", true}}},
          {"exaone", Config{{"embed_dropout", 0.0}, {"num_layers", 32}, {"layer_norm_epsilon", 1e-5}}},
          {"exaone4", Config{{"sliding_window_pattern", "LLLG"},
                             {"num_hidden_layers", 1},
                             {"layer_types", Config::array({"full_attention"})}}},
          {"gemma", Config{{"hidden_act", "gelu"}, {"hidden_activation", "gelu_pytorch_tanh"}}},
          {"gemma3_text", Config{{"_sliding_window_pattern", 6}, {"use_bidirectional_attention", false}}},
          {"cohere2", Config{{"cache_implementation", "hybrid"},
                             {"rotary_pct", 1.0},
                             {"layer_switch", 4},
                             {"order_of_interleaved_layers", "local_attn_first"},
                             {"position_embedding_type", "rope_gptj"},
                             {"use_embedding_sharing", true},
                             {"use_gated_activation", true},
                             {"use_parallel_block", true},
                             {"use_parallel_embedding", false}}}}) {
      CAPTURE(type);
      Config config = keys;
      config["model_type"] = type;
      const auto model = model_from_config(config);
      REQUIRE_OK(model);
      const auto unread = unread_keys(find_family(type).value(), model.value(), config).not_read;
      CHECK_MESSAGE(unread.empty(), fmt::format("{}", fmt::join(unread, ", ")));
    }
  }

  TEST_CASE("16.0 is 16, null is the default, and two names of one number must agree") {
    const auto model = model_from_config({{"model_type", "llama"},
                                          {"hidden_size", 64.0},
                                          {"num_attention_heads", 4.0},
                                          {"num_key_value_heads", nullptr},
                                          {"head_dim", nullptr},
                                          {"rope_scaling", nullptr}});
    REQUIRE_OK(model);
    CHECK(model.value().width == 64);
    CHECK(model.value().kv_heads == 4);
    CHECK(model.value().head_dim == 16);
    const nlohmann::json mistral = {{"model_type", "mistral"}};  // absent: the class's 8; null: as many as heads
    CHECK(model_from_config(mistral).value().kv_heads == 8);
    CHECK(model_from_config({{"model_type", "mistral"}, {"num_key_value_heads", nullptr}}).value().kv_heads == 32);
    CHECK_FALSE(model_from_config({{"model_type", "llama"}, {"hidden_size", 64.5}}).ok());
    const nlohmann::json bloom = {{"model_type", "bloom"}, {"n_embed", 64}, {"num_attention_heads", 4}, {"n_layer", 3}};
    REQUIRE_OK(model_from_config(bloom));
    CHECK(model_from_config(bloom).value().heads == 4);
    nlohmann::json both = bloom;
    both["n_head"] = 8;
    const auto refused = model_from_config(both);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message.find("two names of one number") != std::string::npos);
  }

  TEST_CASE("rotary keys that the lines of transformers read differently: as who wrote the folder, with a note") {
    const auto read = [](const char* version, const std::string& rest, std::vector<std::string>* notes = nullptr) {
      nlohmann::json config = nlohmann::json::parse(R"({"model_type": "llama", )" + rest + "}");
      if (*version != '\0') config["transformers_version"] = version;
      return model_from_config(config, notes);
    };
    const std::string theta = R"("rope_scaling": {"rope_type": "default", "rope_theta": 5e5})";
    std::vector<std::string> notes;
    CHECK(read("5.1.0", theta, &notes).value().rope_theta == 5e5);
    REQUIRE(notes.size() == 1);
    CHECK(notes[0].find("4.x reads 10000") != std::string::npos);
    CHECK(read("4.57.1", theta, &notes).value().rope_theta == 1e4);
    CHECK(notes.at(0).find("transformers 5 reads 500000") != std::string::npos);
    const auto unknown = read("", theta);
    REQUIRE_FALSE(unknown.ok());
    CHECK(unknown.error().message.find("rope_scaling.rope_theta") != std::string::npos);
    CHECK(read("", R"("rope_theta": 5e5, )" + theta, &notes).value().rope_theta == 5e5);  // no difference
    CHECK(notes.empty());
    const std::string part = R"("rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5})";
    for (const char* version : {"5.0.0", "4.40.0", ""}) {  // no line turns a half: whose model is it?
      CHECK(
          read(version, part).error().message.find("rope_scaling.partial_rotary_factor = 0.5: this family turns all") !=
          std::string::npos);
    }
    CHECK(read("5.0.0", R"("rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0})").ok());
    CHECK_FALSE(read("5.0.0", R"("rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25})").ok());
    const auto glm = [&](const char* version, const std::string& rest) {
      return model_from_config(nlohmann::json::parse(fmt::format(
                                   R"({{"model_type": "glm", "transformers_version": "{}", {}}})", version, rest)),
                               &notes);
    };
    CHECK(rotary_dims(
              glm("5.0.0", R"("rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25})").value()) ==
          32);
    CHECK(rotary_dims(
              glm("4.57.1", R"("rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25})").value()) ==
          64);
    CHECK(notes.size() == 1);
    CHECK(rotary_dims(glm("4.57.1", R"("rope_parameters": {"partial_rotary_factor": 0.25})").value()) == 64);
    CHECK(notes.at(0).find("rope_parameters.partial_rotary_factor: transformers 5 reads 0.25") != std::string::npos);
    CHECK(read("4.57.1", R"("rope_parameters": {"rope_theta": 5e5})").value().rope_theta == 1e4);
    CHECK(read("", R"("rope_parameters": {"rope_theta": 5e5})").value().rope_theta == 5e5);
    CHECK_FALSE(read("4.57.1", R"("rope_parameters": {"rope_type": "linear", "factor": 2.0})").ok());
    const std::string yarn = R"("max_position_embeddings": 8192, "original_max_position_embeddings": 2048,
                                "rope_scaling": {"rope_type": "yarn", "factor": 4.0)";
    CHECK(read("5.0.0", yarn + "}").value().rope.original_context == 2048);
    CHECK(read("4.57.1", yarn + "}").value().rope.original_context == 0);  // all of the context
    CHECK_FALSE(read("", yarn + "}").ok());
    CHECK(read("", yarn + R"(, "original_max_position_embeddings": 2048})").ok());
    CHECK_FALSE(read("5.0.0", yarn + R"(, "original_max_position_embeddings": 1024})").ok());
    const std::string llama3 =
        R"("max_position_embeddings": 8192, "original_max_position_embeddings": 2048, "rope_scaling": {"rope_type": "llama3",
                                  "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})";
    CHECK(read("", llama3).value().rope.original_context == 2048);  // 4.x cannot read it at all
  }

  TEST_CASE("names as wrappers leave them are those of the table, and rotary tables are passed over anywhere") {
    const Family llama = find_family("llama").value();
    const std::set<std::string> known = {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight",
                                         "lm_head.weight"};
    for (const char* name :
         {"_orig_mod.model.layers.0.mlp.up_proj.weight", "module.model.layers.0.mlp.up_proj.weight",
          "model.layers.0._fsdp_wrapped_module.mlp._checkpoint_wrapped_module.up_proj.weight",
          "app.model.layers.0.mlp.up_proj.weight", "model.model.layers.0.mlp.up_proj.weight",
          "module._orig_mod.model.model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"}) {
      CAPTURE(name);
      CHECK(known_name(llama, known, name) == "model.layers.0.mlp.up_proj.weight");
    }
    CHECK(known_name(llama, known, "_orig_mod.lm_head.weight") == "lm_head.weight");
    CHECK(known_name(llama, known, "model.layers.0.mlp.up_proj.weight.more").empty());
    CHECK(known_name(llama, known, "student.model.layers.0.mlp.up_proj.weight").empty());
    CHECK(known_name(find_family("gpt_neox").value(), {"embed_out.weight"}, "lm_head.weight") == "embed_out.weight");
    for (const char* name : {"model.rotary_emb.inv_freq", "model.layers.3.self_attn.rotary_emb.inv_freq",
                             "_orig_mod.model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}) {
      CHECK(is_ignored_tensor(llama, name));
    }
    CHECK_FALSE(is_ignored_tensor(llama, "model.layers.3.self_attn.q_proj.weight"));
  }

  TEST_CASE("4.x and 5.x forms of rotary settings are one model, and disagreement is refused") {
    const auto model = [](const std::string& rest) {
      return model_from_config(nlohmann::json::parse(R"({"model_type": "llama", )" + rest + "}"));
    };
    const std::string inner = R"("factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 8192)";
    const auto old_form = model(R"("rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", )" + inner + "}");
    const auto older = model(R"("rope_theta": 5e5, "rope_scaling": {"type": "llama3", )" + inner + "}");
    const auto new_form = model(R"("rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", )" + inner + "}");
    REQUIRE_OK(old_form);
    REQUIRE_OK(new_form);
    REQUIRE(older.ok());
    CHECK(old_form.value().rope.scaling == RopeScaling::kLlama3);
    CHECK(old_form.value().rope.original_context == 8192);
    CHECK(differing_fields(old_form.value(), new_form.value()).empty());
    CHECK(differing_fields(older.value(), new_form.value()).empty());
    const auto message = [&](const std::string& rest) { return model(rest).error().message; };
    CHECK(message(R"("rope_scaling": {"rope_type": "longrope"})").find("\"longrope\" is not supported here; known") !=
          std::string::npos);
    CHECK(message(R"("rope_scaling": {"rope_type": "linear"})").find("rope_scaling.factor is missing") !=
          std::string::npos);
    CHECK(message(R"("rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0})").find("disagree") !=
          std::string::npos);
    CHECK(message(R"("rope_parameters": {"full_attention": {"rope_theta": 2.0}})").find("by layer type") !=
          std::string::npos);
  }

  TEST_CASE("rows of fused tensors lie where the reference's reshapes put them") {
    const auto rows = [](const char* type, const nlohmann::json& sizes, const char* logical) {
      nlohmann::json config = sizes;
      config["model_type"] = type;
      const auto model = model_from_config(config);
      REQUIRE_OK(model);
      const auto mappings = tensor_map(find_family(type).value(), model.value());
      const auto tensors = model_tensors(model.value());
      std::vector<int64_t> out;
      for (const Mapping& mapping : mappings) {
        if (mapping.logical != logical) continue;
        for (const RowRun& run : row_runs(mapping, tensors[mapping.tensor].shape)) {
          for (int64_t r = 0; r < run.count; ++r) out.push_back(run.stored + r);
        }
      }
      return out;
    };
    using Rows = std::vector<int64_t>;
    const nlohmann::json bloom = {{"hidden_size", 4}, {"n_head", 2}};  // [2 heads, 3, 2 channels]
    CHECK(rows("bloom", bloom, "layers.0.attn.q.weight") == Rows{0, 1, 6, 7});
    CHECK(rows("bloom", bloom, "layers.0.attn.k.bias") == Rows{2, 3, 8, 9});
    CHECK(rows("bloom", bloom, "layers.0.attn.v.weight") == Rows{4, 5, 10, 11});
    const nlohmann::json codegen = {{"n_embd", 16}, {"n_head", 8}, {"rotary_dim", 2}};
    CHECK(rows("codegen", codegen, "layers.0.attn.q.weight") ==
          Rows{0, 1, 2, 3, 12, 13, 14, 15, 24, 25, 26, 27, 36, 37, 38, 39});
    CHECK(rows("codegen", codegen, "layers.0.attn.v.weight") ==
          Rows{4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31, 40, 41, 42, 43});
    CHECK(rows("codegen", codegen, "layers.0.attn.k.weight") ==
          Rows{8, 9, 10, 11, 20, 21, 22, 23, 32, 33, 34, 35, 44, 45, 46, 47});
    const nlohmann::json glm = {{"intermediate_size", 2}};
    CHECK(rows("glm", glm, "layers.0.mlp.gate.weight") == Rows{0, 1});
    CHECK(rows("glm", glm, "layers.0.mlp.up.weight") == Rows{2, 3});
  }

  TEST_CASE("float32 logits are those of transformers") {
    int64_t waiting = 0;
    for_each_fixture([&](const std::string& name) {
      const auto folder = opened(name);
      if (!is_computed(folder->model())) {
        ++waiting;
        return;
      }
      const double difference = logit_difference(folder->model(), weights_of(*folder), reference_of(name));
      MESSAGE(name, ": largest difference ", difference, " of the largest logit");
      CHECK(difference <= kLogitGate);
    });
    if (waiting > 0) MESSAGE(waiting, " fixtures use options that this build has no kernel for");
  }

  TEST_CASE("the loss of each token is that of transformers, of either line") {
    for_each_fixture([&](const std::string& name) {
      const auto folder = opened(name);
      if (!is_computed(folder->model())) return;
      const Reference reference = reference_of(name);
      const auto session = session_of(folder->model(), weights_of(*folder));
      double worst = 0, rounding = 0;
      for (size_t n = 0; n < reference.inputs.size(); ++n) {
        const auto losses = session->token_losses(reference.inputs[n]);
        REQUIRE_OK(losses);
        const std::vector<double> wanted = losses_of(reference.logits[n], reference.inputs[n]);
        REQUIRE(losses.value().size() == wanted.size());
        for (size_t k = 0; k < wanted.size(); ++k)
          worst = std::max(worst, std::abs(losses.value()[k] - wanted[k]) / std::max(1.0, wanted[k]));
        const std::vector<double>& exact = reference.exact_losses[n];
        for (size_t k = 0; k < exact.size(); ++k)
          rounding = std::max(rounding, std::abs(wanted.at(k) - exact[k]) / std::max(1.0, exact[k]));
      }
      const nlohmann::json config = json_in(golden(name) / "config.json");
      MESSAGE(name, ": largest difference ", worst, " of a loss, written by transformers ",
              config.value("transformers_version", "nobody"), ", whose own error is ", rounding);
      CHECK(worst <= kLossGate + kLossErrorFactor * rounding);
    });
  }

  TEST_CASE("bf16 logits are as near to the float32 ones as transformers' own bf16 is") {
    for_each_fixture([&](const std::string& name) {
      const auto folder = opened(name);
      const Reference reference = reference_of(name);
      // Rounding sends a token to another expert now and then; then its logits are another model's.
      if (!is_computed(folder->model()) || reference.bf16_error.empty() || folder->model().moe.experts > 0) return;
      const std::vector<double> errors =
          logit_errors(folder->model(), weights_of(*folder), reference, Precision::kBf16);
      for (size_t n = 0; n < errors.size(); ++n) {
        CAPTURE(n);
        MESSAGE(name, ": root mean square error ", errors[n], ", of transformers ", reference.bf16_error[n]);
        CHECK(errors[n] <= kBf16LogitFactor * reference.bf16_error[n]);
      }
    });
  }

  TEST_CASE("gradients of the loss are those of transformers") {
    for_each_fixture([&](const std::string& name) {
      const auto folder = opened(name);
      if (!has_gradients(name) || !is_computed(folder->model())) return;
      const GradientReference reference = gradient_reference_of(name);
      const double worst = gradient_difference(*folder, folder->model(), reference);
      MESSAGE(name, ": largest difference ", worst, " of a tensor's largest gradient");
    });
  }

  TEST_CASE("import into tp 2, pp 2, then export, gives the weights and the config's values back") {
    for_each_fixture([&](const std::string& name) {
      const auto source_folder = opened(name);
      const ModelConfig& model = source_folder->model();
      if (!is_computed(model)) return;
      TempDir temp;
      ckpt::PosixBackend io;
      ImportOptions options;
      options.mesh = {.tp = tp_of(model), .pp = std::min<int64_t>(2, model.layers), .dp = 1};
      const auto imported = import_hf(io, golden(name), temp / "run", options, encode);
      REQUIRE_OK(imported);
      const bool blocks = json_in(golden(name) / "config.json").contains("quantization_config");
      const auto exported = export_hf(io, imported.value().dir, temp / "out", {.block_fp8 = blocks}, decode);
      REQUIRE_OK(exported);
      const Family& family = source_folder->family();
      const bool as_another = exported.value().model_type != family.model_type;
      CHECK(as_another == (family.architecture.empty() || (family.own_code && model.positions == Positions::kRotary)));
      const bool for_5 = !written_for(family, model).warning.empty();
      CHECK(exported.value().warnings.empty() == (as_another || (!family.own_code && !for_5)));
      if (as_another) {  // the same model
        const auto other = HfFolder::open(temp / "out");
        REQUIRE_OK(other);
        CHECK(weights_of(*other.value()) == weights_of(*source_folder));
        CHECK(differing_fields(other.value()->model(), model).empty());
        return;
      }
      for (const auto& entry : fs::directory_iterator(golden(name))) {
        const std::string file = entry.path().filename().string();
        if (file == "config.json" || file == "reference.safetensors") continue;
        CAPTURE(file);
        CHECK(slurp(temp / "out" / file) == slurp(entry.path()));
      }
      const nlohmann::json source = json_in(golden(name) / "config.json"),
                           written = json_in(temp / "out" / "config.json");
      CHECK(written["model_type"] == source["model_type"]);
      CHECK(written["architectures"] == source["architectures"]);
      CHECK(written.value("quantization_config", nlohmann::json()) ==
            source.value("quantization_config", nlohmann::json()));
    });
  }

  TEST_CASE("each single mistake exceeds 100 times the gate") {
    double weakest = INFINITY;
    std::set<std::string> made;
    for_each_fixture([&](const std::string& name) {
      const auto folder = opened(name);
      if (!is_computed(folder->model())) return;
      const Weights weights = weights_of(*folder);
      const Reference reference = reference_of(name);
      for (const BadConfig& mistake : mistakes()) {
        ModelConfig model = folder->model();
        Weights wrong = weights;
        if (!mistake.make(*folder, model, wrong) || !is_computed(model)) continue;
        CAPTURE(mistake.what);
        const double difference = logit_difference(model, wrong, reference);
        CHECK(difference > 100 * kLogitGate);
        weakest = std::min(weakest, difference);
        made.insert(mistake.what);
      }
    });
    MESSAGE(made.size(), " of ", mistakes().size(), " mistakes made; the least visible changes logits by ", weakest);
  }
}
