#include "converters/config_keys.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "converters/family_table.h"
#include "runtime/json/json.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

using nlohmann::json;

/// Whatever they say, the logits of a decoder are the same.
constexpr std::string_view kHarmless[] = {
    // Who wrote the file, and how it is loaded.
    "_name_or_path", "_commit_hash", "model_type", "architectures", "auto_map", "transformers_version", "torch_dtype",
    "dtype", "tokenizer_class", "processor_class", "name", "license", "quantization_config", "max_shard_size",
    "transformers.js_config", "onnx", "neuron", "_from_model_config", "_pre_quantization_dtype", "trust_remote_code",
    "low_cpu_mem_usage", "xla_device", "add_bos_token", "add_eos_token",
    // Of programs that train, and their way to compute the same.
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "attn_implementation",
    "_flash_attn_2_enabled", "use_flash_attn", "use_flash_attention", "use_flash_attention_2", "flash_attention",
    "use_sdpa", "cache_implementation", "use_bfloat16", "bf16", "fp16", "fp32", "torchscript", "tf_legacy_loss",
    "use_cache", "gradient_checkpointing", "use_gradient_checkpointing", "is_llama_config", "unsloth_fixed",
    "unsloth_version", "unsloth_template", "use_fused_rope", "use_fused_rms_norm", "use_fused_mlp",
    "use_fused_cross_entropy", "fuse_cross_entropy", "fused_bias_fc", "fused_dropout_add_ln", "fused_mlp",
    "bias_dropout_fusion", "bias_gelu_fusion", "masked_softmax_fusion", "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32", "softmax_in_fp32", "fp32_residual_connection", "skip_bias_add",
    "skip_bias_add_qkv", "offset_alibi", "pretraining_tp", "tensor_parallel_degree", "keys_to_ignore_at_inference",
    "use_flash_rotary", "use_xformers", "use_memory_efficient_attention", "use_triton", "use_liger_kernel",
    "use_parallel_embedding", "sequence_parallel", "sequence_parallel_enabled", "tensor_parallel_output",
    "expert_parallel", "use_recompute", "recompute_granularity", "fuse_rope", "fuse_rms_norm", "fuse_swiglu",
    "fuse_linear", "fuse_softmax_mask", "use_fast_layer_norm", "use_fused_head_and_loss_fn", "use_unsloth",
    "output_past", "predict_special_tokens",
    // Training: the recipe says how.
    "initializer_range", "initializer_factor", "init_std", "embd_pdrop", "attn_pdrop", "resid_pdrop", "hidden_dropout",
    "hidden_dropout_prob", "attention_dropout", "attention_probs_dropout_prob", "classifier_dropout", "ffn_dropout",
    "dropout", "layerdrop", "activation_dropout", "moe_dropout_prob", "router_aux_loss_coef", "router_z_loss_coef",
    "router_jitter_noise", "aux_loss_alpha", "output_router_logits", "seq_aux", "recompute",
    "scale_attn_by_inverse_layer_idx_init",
    // Ids of tokens and what the class passes on to generation.
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "bad_words_ids", "prefix", "max_length", "max_new_tokens", "min_length", "temperature", "top_k", "top_p", "min_p",
    "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "num_beams", "num_beam_groups", "num_return_sequences", "do_sample",
    "early_stopping", "epsilon_cutoff", "eta_cutoff", "renormalize_logits", "exponential_decay_length_penalty",
    "penalty_alpha",
    // What the class returns, and heads that are no language model's.
    "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores",
    "remove_invalid_values", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "_num_labels",
    "eos_token_ids", "task_specific_params", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout", "pruned_heads", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "is_decoder", "tie_encoder_decoder"};

/// A key of published files that the family's own table does not read. No class of transformers reads it either; the
/// value says what the class computes, or another model.
struct Statement {
  enum class Off { kPasses, kRefused };  // `false` where the model has it: the tensors say so, or nothing else does

  std::vector<std::string_view> keys;
  bool (*holds)(const ModelConfig&);
  Off off = Off::kPasses;
};
const std::vector<Statement>& statements() {
  using M = ModelConfig;
  constexpr auto kRefused = Statement::Off::kRefused;
  static const auto all_biased = [](const M& m) {
    return has_bias(m, BiasOf::kQkv) && has_bias(m, BiasOf::kOut) && has_bias(m, BiasOf::kMlp);
  };
  static const std::vector<Statement> kStatements = {
      {{"use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm"},
       [](const M& m) { return m.qk_norm != QkNorm::kNone; }},
      {{"qkv_bias", "use_qkv_bias", "add_qkv_bias", "attention_bias", "attention_qkv_bias"},
       [](const M& m) { return has_bias(m, BiasOf::kQkv); }},
      {{"attention_out_bias", "attention_o_bias", "o_bias"}, [](const M& m) { return has_bias(m, BiasOf::kOut); }},
      {{"mlp_bias", "use_mlp_bias", "ffn_bias"}, [](const M& m) { return has_bias(m, BiasOf::kMlp); }},
      {{"bias", "add_bias_linear", "enable_bias"}, [](const M& m) { return all_biased(m); }},
      {{"no_bias"},
       [](const M& m) {
         return !has_bias(m, BiasOf::kQkv) && !has_bias(m, BiasOf::kOut) && !has_bias(m, BiasOf::kMlp) && !m.head_bias;
       }},
      {{"lm_head_bias", "head_bias"}, [](const M& m) { return m.head_bias; }},
      {{"moe_use_aux_free", "use_aux_free", "use_routing_bias", "use_expert_bias"},
       [](const M& m) { return has_choice_bias(m); }},
      {{"use_embedding_sharing", "share_embedding", "tie_embeddings"}, [](const M& m) { return m.tied_embeddings; }},
      {{"norm_topk_prob"}, [](const M& m) { return m.moe.experts > 0 && m.moe.renormalise; }},
      {{"use_sliding_window"}, [](const M& m) { return m.sliding_window > 0; }},
      {{"attention_sinks", "use_attention_sinks"}, [](const M& m) { return m.attention_sinks; }},
      {{"rope_interleaved", "rope_interleave", "rotary_interleaved"},
       [](const M& m) { return m.positions == Positions::kRotary && m.rope.pairs == RotaryPairs::kInterleaved; }},
      {{"learned_embeddings"}, [](const M& m) { return m.positions == Positions::kLearned; }},
      {{"alibi", "use_alibi"}, [](const M& m) { return m.positions == Positions::kAlibi; }},
      {{"scale_embedding", "scale_embeddings"}, [](const M& m) { return m.embedding_scale != 1.0; }},
      {{"is_causal", "causal"}, [](const M& m) { return m.mask == Mask::kCausal; }, kRefused},
      {{"rotary", "use_rope", "use_rotary", "use_rotary_position_embeddings"},
       [](const M& m) { return m.positions == Positions::kRotary; },
       kRefused},
      {{"use_parallel_block", "parallel_attn", "use_parallel_residual", "parallel_residual"},
       [](const M& m) { return is_parallel(m.block); },
       kRefused},
      {{"use_gated_activation", "use_glu", "gated_mlp"}, [](const M& m) { return is_gated(m.activation); }, kRefused},
      {{"use_rms_norm", "use_rmsnorm", "rms_norm", "rmsnorm"},
       [](const M& m) { return m.norm == NormKind::kRmsNorm; },
       kRefused},
      {{"layer_norm_elementwise_affine", "norm_elementwise_affine"},
       [](const M& m) { return m.norm_weight; },
       kRefused},
      {{"scale_attn_weights", "scale_attention"}, [](const M& m) { return m.attention_scale != 1; }, kRefused},
  };
  return kStatements;
}

bool is_number(const json& value, double wanted) { return value.is_number() && value.get<double>() == wanted; }

/// Reads a key that counts experts. A dense model has none, or one that every token takes.
bool says_experts(const json& value, const ModelConfig& m) {
  return m.moe.experts > 0 ? is_number(value, static_cast<double>(m.moe.experts))
                           : is_number(value, 0) || is_number(value, 1);
}
/// Reads a key that says which part of a head's channels turns.
bool says_part(const json& value, const ModelConfig& m) {
  if (m.positions != Positions::kRotary) return is_number(value, 1);
  return value.is_number() && value.get<double>() > 0 && value.get<double>() <= 1 &&
         static_cast<int64_t>(value.get<double>() * static_cast<double>(m.head_dim)) == rotary_dims(m);
}
bool is_one(const json& value, const ModelConfig&) { return is_number(value, 1); }
bool is_zero(const json& value, const ModelConfig&) { return is_number(value, 0); }
bool never(const json&, const ModelConfig&) { return false; }

/// A model that is called by a family's name and computes something else, by a key of its own.
struct Foreign {
  std::string_view key, model;
  bool (*neutral)(const json& value, const ModelConfig&);  // says that it does not; null always does
};
constexpr Foreign kForeign[] = {
    {"embedding_multiplier", "granite", is_one},
    {"residual_multiplier", "granite", is_one},
    {"logits_scaling", "granite", is_one},
    {"logit_scale", "cohere", is_one},
    {"scale_emb", "minicpm", is_one},
    {"scale_depth", "minicpm", never},
    {"dim_model_base", "minicpm", never},
    {"attn_logit_softcapping", "gemma2", is_zero},
    {"final_logit_softcapping", "gemma2", is_zero},
    {"query_pre_attn_scalar", "gemma2", never},
    {"hidden_activation", "gemma", never},
    {"rope_local_base_freq", "gemma3", never},
    {"sliding_window_pattern", "gemma3", never},
    {"compression_ratio", "ernie4_5", is_one},
    {"weight_share_add_bias", "ernie4_5", never},
    {"use_bias", "ernie4_5, whose rotary pairs are interleaved,", never},
    {"no_rope_layer_interval", "smollm3", is_zero},
    {"no_rope_layers", "smollm3", never},
    {"clip_qkv", "olmo", never},
    {"partial_rotary_factor", "a model that turns a part of each head", says_part},
    {"rotary_pct", "gpt_neox", says_part},
    {"rotary_percent", "a model that turns a part of each head", says_part},
    {"rope_percent", "a model that turns a part of each head", says_part},
    {"rope_pct", "a model that turns a part of each head", says_part},
    {"rotary_dim", "gptj",
     [](const json& value, const ModelConfig& m) {
       return m.positions == Positions::kRotary && is_number(value, static_cast<double>(rotary_dims(m)));
     }},
    {"q_lora_rank", "deepseek", is_zero},
    {"kv_lora_rank", "deepseek", is_zero},
    {"num_experts", "a mixture of experts", says_experts},
    {"num_local_experts", "a mixture of experts", says_experts},
    {"n_routed_experts", "a mixture of experts", says_experts},
    {"moe_num_experts", "a mixture of experts", says_experts},
    {"moe_intermediate_size", "a mixture of experts",
     [](const json& value, const ModelConfig& m) {
       return is_number(value, m.moe.experts > 0 ? static_cast<double>(expert_ffn(m)) : 0);
     }},
    {"layer_norm_eps", "a model with LayerNorm",
     [](const json& value, const ModelConfig& m) {
       return m.norm == NormKind::kLayerNorm && is_number(value, m.norm_eps);
     }},
    {"layer_norm_epsilon", "a model with LayerNorm",
     [](const json& value, const ModelConfig& m) {
       return m.norm == NormKind::kLayerNorm && is_number(value, m.norm_eps);
     }},
};

/// Classes of transformers whose tensors are called as a family's and whose numbers are others.
constexpr std::string_view kForeignClasses[] = {
    "GraniteForCausalLM",  "SmolLM3ForCausalLM", "GemmaForCausalLM",    "Gemma2ForCausalLM",  "Gemma3ForCausalLM",
    "Ernie4_5ForCausalLM", "HeliumForCausalLM",  "OlmoForCausalLM",     "Olmo2ForCausalLM",   "Olmo3ForCausalLM",
    "Phi3ForCausalLM",     "PhiForCausalLM",     "CohereForCausalLM",   "Cohere2ForCausalLM", "MiniCPMForCausalLM",
    "Exaone4ForCausalLM",  "GptOssForCausalLM",  "StableLmForCausalLM", "NemotronForCausalLM"};

/// A switch, also as the number 1 or 0, which Python reads as true or false. Nothing: it is none.
std::optional<bool> switch_of(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (is_number(value, 0) || is_number(value, 1)) return is_number(value, 1);
  return std::nullopt;
}

bool says_nothing(const json& value) {
  return value.is_null() || value == false || ((value.is_structured() || value.is_string()) && value.empty());
}

bool is_neutral(const Foreign& foreign, const json& value, const ModelConfig& model, const json& config) {
  if (value.is_null()) return true;
  if (foreign.key == "no_rope_layers") {  // 1: the layer has rotary positions
    return value.is_array() && std::ranges::all_of(value, [](const json& one) { return one == 1 || one == true; });
  }
  if (foreign.key == "no_rope_layer_interval" && config.contains("no_rope_layers"))
    return true;  // which says it layer by layer
  return foreign.neutral(value, model);
}

/// A list that names each layer by what it attends to here.
bool names_layers(const json& types, const ModelConfig& model) {
  if (!types.is_array() || std::ssize(types) != model.layers) return false;
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    const std::string_view kind = has_window(model, layer)   ? "sliding_attention"
                                  : has_chunks(model, layer) ? "chunked_attention"
                                                             : "full_attention";
    if (types[static_cast<size_t>(layer)] != kind) return false;
  }
  return true;
}

/// shared_expert_intermediate_size and its other names: hidden units that every token goes through besides.
bool says_shared_width(std::string_view key, const json& value, const ModelConfig& model) {
  return (key == "shared_expert_intermediate_size" || key == "shared_intermediate_size") &&
         is_number(value, static_cast<double>(model.moe.experts > 0 ? shared_ffn(model) : 0));
}

}  // namespace

UnreadKeys unread_keys(const Family& family, const ModelConfig& model, const json& config) {
  UnreadKeys out;
  for (const auto& [key, value] : config.items()) {
    const auto named = [&](std::string_view name) { return name == key; };
    if (std::ranges::any_of(family.keys, [&](const ConfigKey& k) { return std::ranges::any_of(k.names, named); }))
      continue;
    if (std::ranges::any_of(kHarmless, named)) continue;
    if (key == "attention_multiplier") {  // granite's scale of the scores
      const double usual = 1 / std::sqrt(static_cast<double>(std::max<int64_t>(1, model.head_dim)));
      const bool same = value.is_number() && std::abs(value.get<double>() - usual) <= 1e-6 * usual;
      if (!value.is_null() && !same)
        out.refused.push_back(fmt::format("{} = {}, a key of granite", key, json_text(value)));
      continue;
    }
    if (key == "layer_types") {
      if (!value.is_null() && !names_layers(value, model)) {
        out.refused.push_back(fmt::format("{} = {}", key, json_text(value)));
      }
      continue;
    }
    const auto* const foreign = std::ranges::find(kForeign, std::string_view(key), &Foreign::key);
    if (foreign != std::end(kForeign)) {
      if (!is_neutral(*foreign, value, model, config)) {
        out.refused.push_back(fmt::format("{} = {}, a key of {}", key, json_text(value), foreign->model));
      }
      continue;
    }
    if (says_shared_width(key, value, model)) continue;
    const auto statement =
        std::ranges::find_if(statements(), [&](const Statement& one) { return std::ranges::any_of(one.keys, named); });
    // Any other key that is a number may be one that counts.
    const std::optional<bool> said =
        statement != statements().end() || value.is_boolean() ? switch_of(value) : std::nullopt;
    if (statement != statements().end() && said) {
      const bool holds = statement->holds(model);
      if (*said == holds) continue;
      if (holds && statement->off == Statement::Off::kRefused) {
        out.refused.push_back(fmt::format("{} = {}, which the class does not look at", key, json_text(value)));
        continue;
      }
    }
    if (said == true) {
      out.refused.push_back(fmt::format("{} = {}, a switch that the family does not have", key, json_text(value)));
    } else if (said == false) {
      continue;
    } else if (!says_nothing(value)) {
      out.not_read.push_back(key);
    }
  }
  const auto classes = config.find("architectures");
  // What is read only has no class of transformers, and its published one is no stranger.
  if (!family.architecture.empty() && classes != config.end() && classes->is_array()) {
    for (const json& name : *classes) {
      if (name.is_string() && name != family.architecture &&
          std::ranges::find(kForeignClasses, name.get<std::string>()) != std::end(kForeignClasses)) {
        out.refused.push_back(fmt::format("architectures = {}, another model's class", json_text(name)));
      }
    }
  }
  return out;  // json's keys come sorted
}

Status refuse_unread_keys(const Family& family, const ModelConfig& model, const json& config) {
  const UnreadKeys keys = unread_keys(family, model, config);
  if (keys.refused.empty()) return {};
  return Error{
      ErrorCode::kUnsupported,
      fmt::format("it calls itself {}, and has {}: that is not what the {} family computes here; take a key out "
                  "if the model does not depend on it",
                  family.model_type, fmt::join(keys.refused, "; "), family.model_type)};
}

}  // namespace cairn::convert
