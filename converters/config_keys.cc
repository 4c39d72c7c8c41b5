#include "converters/config_keys.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using nlohmann::json;

/// Whatever they say, the logits of a decoder are the same.
constexpr std::string_view kHarmless[] = {
    // Who wrote the file, and how it is loaded.
    "_name_or_path", "_commit_hash", "model_type", "architectures", "auto_map", "transformers_version", "torch_dtype",
    "dtype", "tokenizer_class", "processor_class", "name", "license", "quantization_config", "max_shard_size",
    "transformers.js_config", "onnx", "neuron",
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
    // Training: the recipe says how.
    "initializer_range", "initializer_factor", "init_std", "embd_pdrop", "attn_pdrop", "resid_pdrop", "hidden_dropout",
    "hidden_dropout_prob", "attention_dropout", "attention_probs_dropout_prob", "classifier_dropout", "ffn_dropout",
    "dropout", "layerdrop", "router_aux_loss_coef", "router_z_loss_coef", "router_jitter_noise", "aux_loss_alpha",
    "output_router_logits", "seq_aux", "recompute", "scale_attn_by_inverse_layer_idx_init",
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
    "remove_invalid_values", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "pruned_heads", "chunk_size_feed_forward", "cross_attention_hidden_size", "is_decoder",
    "tie_encoder_decoder"};

/// A model that is called by a family's name and computes something else, by a key of its own.
struct Foreign {
  std::string_view key, model;
  json neutral;  // says that it does not; null: no value says so
};
const std::vector<Foreign>& foreign_keys() {
  static const std::vector<Foreign> kKeys = {{"embedding_multiplier", "granite", 1},
                                             {"residual_multiplier", "granite", 1},
                                             {"logits_scaling", "granite", 1},
                                             {"logit_scale", "cohere", 1},
                                             {"scale_emb", "minicpm", 1},
                                             {"scale_depth", "minicpm", nullptr},
                                             {"dim_model_base", "minicpm", nullptr},
                                             {"attn_logit_softcapping", "gemma2", nullptr},
                                             {"final_logit_softcapping", "gemma2", nullptr},
                                             {"query_pre_attn_scalar", "gemma2", nullptr},
                                             {"hidden_activation", "gemma", nullptr},
                                             {"rope_local_base_freq", "gemma3", nullptr},
                                             {"sliding_window_pattern", "gemma3", nullptr},
                                             {"compression_ratio", "ernie4_5", nullptr},
                                             {"weight_share_add_bias", "ernie4_5", nullptr},
                                             {"use_bias", "ernie4_5, whose rotary pairs are interleaved,", nullptr},
                                             {"no_rope_layer_interval", "smollm3", nullptr},
                                             {"no_rope_layers", "smollm3", nullptr},
                                             {"clip_qkv", "olmo", nullptr},
                                             {"use_qk_norm", "a model with normalised queries", false},
                                             {"qk_layernorm", "phi", false},
                                             {"alibi", "falcon", false},
                                             {"parallel_attn", "falcon", false},
                                             {"use_parallel_residual", "gpt_neox", false},
                                             {"partial_rotary_factor", "a model that turns a part of each head", 1},
                                             {"rotary_pct", "gpt_neox", 1},
                                             {"rotary_dim", "gptj", nullptr},
                                             {"q_lora_rank", "deepseek", nullptr},
                                             {"kv_lora_rank", "deepseek", nullptr},
                                             {"num_experts", "a mixture of experts", 1},
                                             {"num_local_experts", "a mixture of experts", 1},
                                             {"n_routed_experts", "a mixture of experts", 1},
                                             {"moe_intermediate_size", "a mixture of experts", nullptr},
                                             {"layer_norm_eps", "a model with LayerNorm", nullptr},
                                             {"layer_norm_epsilon", "a model with LayerNorm", nullptr}};
  return kKeys;
}

/// Classes of transformers whose tensors are called as a family's and whose numbers are others.
constexpr std::string_view kForeignClasses[] = {
    "GraniteForCausalLM",  "SmolLM3ForCausalLM", "GemmaForCausalLM",    "Gemma2ForCausalLM",  "Gemma3ForCausalLM",
    "Ernie4_5ForCausalLM", "HeliumForCausalLM",  "OlmoForCausalLM",     "Olmo2ForCausalLM",   "Olmo3ForCausalLM",
    "Phi3ForCausalLM",     "PhiForCausalLM",     "CohereForCausalLM",   "Cohere2ForCausalLM", "MiniCPMForCausalLM",
    "Exaone4ForCausalLM",  "GptOssForCausalLM",  "StableLmForCausalLM", "NemotronForCausalLM"};

std::string dump(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

bool says_nothing(const json& value) {
  return value.is_null() || value == false || ((value.is_structured() || value.is_string()) && value.empty());
}

bool equal_numbers(const json& a, const json& b) {
  if (a.is_number() && b.is_number()) return a.get<double>() == b.get<double>();
  return a == b;
}

/// Of a foreign key: does the value leave the family's numbers as they are?
bool is_neutral(const Foreign& foreign, const json& value, const json& config) {
  if (value.is_null()) return true;
  if (foreign.key == "no_rope_layers") {  // 1: the layer has rotary positions
    return value.is_array() && std::ranges::all_of(value, [](const json& one) { return one == 1 || one == true; });
  }
  if (foreign.key == "no_rope_layer_interval")
    return config.contains("no_rope_layers");  // which says it layer by layer
  return !foreign.neutral.is_null() && equal_numbers(value, foreign.neutral);
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
      if (!value.is_null() && !same) out.refused.push_back(fmt::format("{} = {}, a key of granite", key, dump(value)));
      continue;
    }
    if (key == "layer_types") {
      const bool full =
          value.is_array() && std::ranges::all_of(value, [](const json& t) { return t == "full_attention"; });
      if (!value.is_null() && !full) out.refused.push_back(fmt::format("{} = {}", key, dump(value)));
      continue;
    }
    const auto foreign = std::ranges::find(foreign_keys(), key, &Foreign::key);
    if (foreign != foreign_keys().end()) {
      if (!is_neutral(*foreign, value, config)) {
        out.refused.push_back(fmt::format("{} = {}, a key of {}", key, dump(value), foreign->model));
      }
      continue;
    }
    if (value == true) {
      out.refused.push_back(fmt::format("{} = true, a switch that the family does not have", key));
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
        out.refused.push_back(fmt::format("architectures = {}, another model's class", dump(name)));
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
