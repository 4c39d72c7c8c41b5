// ERNIE 4.5 with experts: softmax, biases of the choice, neighbouring rotary channels as pairs. Source: transformers
// models/ernie4_5_moe.
#include <fmt/format.h>

#include "converters/llama_like.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.rope.pairs = RotaryPairs::kInterleaved;
  m.moe.choice_bias = true;
  return m;
}

/// Layer i has experts where start <= i <= end and interval divides i + 1.
ConfigKey spread_layers() {
  constexpr const char *kStart = "moe_layer_start_index", *kEnd = "moe_layer_end_index",
                       *kInterval = "moe_layer_interval";
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    const int64_t start = in.integer(kStart, 1), interval = in.integer(kInterval, 1);
    int64_t end = in.integer(kEnd, -1);
    if (interval < 1) return in.invalid(fmt::format("{} = {} must be positive", kInterval, interval));
    if (end == -1) end = m.layers - 1;
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      if (layer < start || layer > end || (layer + 1) % interval != 0) m.moe.dense_layers.push_back(layer);
    }
    if (std::ssize(m.moe.dense_layers) == m.layers) {
      in.unsupported(fmt::format("{} = {}, {} = {} and {} = {} leave no layer with experts", kStart, start, kEnd, end,
                                 kInterval, interval));
    }
  };
  const auto write = [=](const ModelConfig& m, nlohmann::ordered_json& out) {
    std::vector<int64_t> with;  // experts
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      if (has_experts(m, layer)) with.push_back(layer);
    }
    if (with.empty()) with.push_back(0);  // another family's model
    const int64_t first = with.front(), last = with.back(), interval = with.size() > 1 ? with[1] - first : first + 1;
    // The widest range with this interval, in which a source's own fits. What none of these can say is lost, which
    // reading again shows.
    const int64_t start = first >= interval ? first : 0, end = last + interval < m.layers ? last : m.layers - 1;
    out[kStart] = start;
    out[kEnd] = end;
    out[kInterval] = interval;
  };
  return {{kStart, kEnd, kInterval}, read, write};
}

/// What the sum of a token's weights is at least. Softmax's largest few are above one by the number of experts.
ConfigKey least_sum() {
  return {{"moe_norm_min"},
          [](ConfigReader& in, ModelConfig& m) {
            const double least = in.number("moe_norm_min", 1e-12);
            if (least > 0.1 / static_cast<double>(std::max<int64_t>(1, m.moe.experts))) {
              in.unsupported(fmt::format("moe_norm_min = {}: a bound that sums of weights can meet", least));
            }
          },
          [](const ModelConfig&, nlohmann::ordered_json& out) { out["moe_norm_min"] = 1e-12; }};
}

/// Biases of attention, of every MLP and of the head. transformers 5 has stacks for experts, and these have none: what
/// it writes lacks them, and what has them it reads without.
ConfigKey all_biases() {
  const ConfigKey layers = biases("use_bias", kQkv | kOut | kMlp, false);
  return {{"use_bias"},
          [read = layers.read](ConfigReader& in, ModelConfig& m) {
            read(in, m);
            m.head_bias = in.boolean("use_bias", false);
            if (!m.head_bias) return;
            if (in.line() == 5) {
              in.unsupported(
                  "use_bias = true, written by transformers 5: its experts have no biases, those of transformers 4 and "
                  "of the model have; save it with transformers 4");
            } else {
              in.note("use_bias = true: transformers 5 has no biases on experts and passes over these");
            }
          },
          layers.write};
}

constexpr int64_t kDenseFfn = 12288;

constexpr TensorRow kOwn[] = {{.logical = "layers.*.moe.router.bias",
                               .stored = "model.layers.*.mlp.moe_statics.e_score_correction_bias",
                               .one_row = true},
                              {"head.*", "lm_head.*"}};
constexpr auto kTensors = with_llama_rows(kOwn, kExpertRows);

/// In transformers 5's memory. Source: transformers 5.24 conversion_mapping.py, "ernie4_5_moe".
constexpr TensorRow kAlso[] = {
    {.logical = "layers.*.moe.router.bias",
     .stored = "model.layers.*.mlp.gate.moe_statics.e_score_correction_bias",
     .one_row = true},
    kQwenMoeStacks[0],
    kQwenMoeStacks[1],
};

}  // namespace

Family ernie4_5_moe_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.vocab = 103424,
       .width = 2560,
       .ffn = kDenseFfn,
       .layers = 28,
       .heads = 20,
       .kv_heads = 4,
       .has_head_dim = HeadDim::kIfUnusual,
       .context = 131072,
       .norm_eps = 1e-5,
       .rope = {.absent_base = 500000.0},
       .has_dropout = false,
       .tied = true},
      {all_biases(), expert_width("moe_intermediate_size", 1536, kDenseFfn),
       experts({.count = "moe_num_experts",
                .alias = "num_experts",
                .top_k = "moe_k",
                .absent = 64,
                .absent_top_k = 6,
                .absent_loss = 0.001}),
       shared_experts("moe_num_shared_experts", 2), spread_layers(), least_sum(),
       // Published files have these, and no class looks at them: how training chose, and the module left out below.
       unread({"moe_gate", "moe_capacity", "moe_group", "num_nextn_predict_layers"})});
  return llama_like({.model_type = "ernie4_5_moe",
                     .architecture = "Ernie4_5_MoeForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .also = kAlso,
                     .passed_over = "mtp"});
}

}  // namespace cairn::convert
