// InternLM3: Llama with another name for its biases. Source: transformers 5.24 models/internlm3, which computes it with
// Llama's class; 4.x has no class for it.
#include <fmt/format.h>

#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

/// qkv_bias and bias, or attention_bias and mlp_bias as transformers 5 writes them. The published code gives o the bias
/// of the MLP, transformers 5 that of q, k and v: where the two are equal they agree.
ConfigKey all_biases() {
  return {{"qkv_bias", "attention_bias", "bias", "mlp_bias"},
          [](ConfigReader& in, ModelConfig& m) {
            const bool attention = in.boolean("qkv_bias", in.boolean("attention_bias", false));
            const bool mlp = in.boolean("bias", in.boolean("mlp_bias", false));
            if (attention != mlp || in.boolean("attention_bias", attention) != attention ||
                in.boolean("mlp_bias", mlp) != mlp) {
              in.unsupported(
                  fmt::format("qkv_bias (attention_bias) = {} and bias (mlp_bias) = {}: read only where all are equal, "
                              "as the published code and transformers 5 differ on o otherwise",
                              attention, mlp));
            }
            m.bias = attention;
          },
          [](const ModelConfig& m, nlohmann::ordered_json& out) { out["qkv_bias"] = out["bias"] = m.bias; }};
}

}  // namespace

Family internlm3_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys({.vocab = 128512,
                                                               .ffn = 10240,
                                                               .layers = 48,
                                                               .kv_heads = 2,
                                                               .head_dim = 128,
                                                               .context = 32768,
                                                               .norm_eps = 1e-5,
                                                               .rope = {.old_type_counts = false}},
                                                              {all_biases()});
  Family out = llama_like({.model_type = "internlm3", .architecture = "InternLM3ForCausalLM", .keys = kKeys});
  out.last_choice = true;
  out.since_5 = true;
  return out;
}

}  // namespace cairn::convert
