#include "converters/megatron_args.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

/// Arguments that the family's table reads (families/megatron_gpt.cc).
constexpr std::string_view kRead[] = {"hidden_size",
                                      "num_layers",
                                      "num_attention_heads",
                                      "max_position_embeddings",
                                      "group_query_attention",
                                      "num_query_groups",
                                      "kv_channels",
                                      "position_embedding_type",
                                      "rotary_percent",
                                      "rotary_base",
                                      "rotary_interleaved",
                                      "normalization",
                                      "norm_epsilon",
                                      "swiglu",
                                      "squared_relu",
                                      "openai_gelu",
                                      "bias_gelu_fusion",
                                      "ffn_hidden_size",
                                      "add_bias_linear",
                                      "add_qkv_bias",
                                      "untie_embeddings_and_output_weights",
                                      "qk_layernorm",
                                      "apply_layernorm_1p",
                                      "apply_residual_connection_post_layernorm",
                                      "multi_latent_attention",
                                      "q_lora_rank",
                                      "kv_lora_rank",
                                      "qk_head_dim",
                                      "qk_pos_emb_head_dim",
                                      "v_head_dim",
                                      "rope_type",
                                      "num_experts",
                                      "moe_router_topk",
                                      "moe_ffn_hidden_size",
                                      "moe_layer_freq",
                                      "moe_router_score_function",
                                      "moe_router_pre_softmax",
                                      "moe_router_topk_scaling_factor",
                                      "moe_router_enable_expert_bias",
                                      "moe_router_num_groups",
                                      "moe_router_group_topk",
                                      "moe_shared_expert_intermediate_size",
                                      "moe_shared_expert_gate"};

/// Arguments that change what the model computes and that no recipe has; null, false, 0 and an empty text are off.
constexpr std::string_view kRefused[] = {"hybrid_override_pattern",
                                         "hybrid_layer_pattern",
                                         "is_hybrid_model",
                                         "heterogeneous_layers_config_path",
                                         "heterogeneous_layers_config_encoded_json",
                                         "moe_latent_size",
                                         "moe_apply_probs_on_input",
                                         "mtp_num_layers",
                                         "attention_output_gate",
                                         "experimental_attention_variant",
                                         "use_rope_scaling",
                                         "rotary_seq_len_interpolation_factor",
                                         "window_size",
                                         "qk_l2_norm",
                                         "activation_func_clamp_value",
                                         "glu_linear_offset",
                                         "no_rope_freq",
                                         "spec"};

bool is_off(const nlohmann::json& value) {
  return value.is_null() || value == false || (value.is_number() && value == 0) || (value.is_string() && value == "") ||
         (value.is_array() && value.empty());
}

}  // namespace

Result<nlohmann::json> config_from_args(const nlohmann::json& args) {
  const auto has = [&](std::string_view name) {
    return args.is_object() && args.contains(name) && !args[name].is_null();
  };
  for (const std::string_view name : {"hidden_size", "num_layers", "num_attention_heads", "padded_vocab_size"}) {
    if (has(name)) continue;
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("args have no {}\n  expected the arguments of a training run of Megatron-LM\n"
                             "  write a config.json of model_type megatron_gpt, and give its folder: --config DIR",
                             name)};
  }
  for (const std::string_view name : kRefused) {
    if (!has(name) || is_off(args[name])) continue;
    return Error{ErrorCode::kUnsupported,
                 fmt::format("the run was trained with {} = {}, and Cairn computes no such model\n"
                             "  expected it to be off",
                             name, json_text(args[name]).substr(0, 100))};
  }
  if (has("softmax_type") && args["softmax_type"] != "vanilla") {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("the run was trained with softmax_type = {}, and Cairn reads no such model\n"
                             "  expected \"vanilla\"",
                             json_text(args["softmax_type"]).substr(0, 100))};
  }
  nlohmann::json out = {{"model_type", "megatron_gpt"}, {"checkpoint_version", 3.0}};
  for (const std::string_view name : kRead) {
    if (has(name)) out[std::string(name)] = args[name];
  }
  out["vocab_size"] = args["padded_vocab_size"];
  for (const auto& [name, other] :
       {std::pair("max_position_embeddings", "seq_length"), {"norm_epsilon", "layernorm_epsilon"}}) {
    if (!out.contains(name) && has(other)) out[name] = args[other];
  }
  const bool grouped = has("num_query_groups") && args["num_query_groups"] != args["num_attention_heads"];
  if (!has("group_query_attention") && grouped) out["group_query_attention"] = true;
  return out;
}

}  // namespace cairn::convert
