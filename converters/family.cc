#include "converters/family.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "converters/weights_folder.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

using nlohmann::json;

constexpr std::array<Family, 2> kFamilies = {
    {{"gpt2", "GPT2LMHeadModel", "transformer."}, {"llama", "LlamaForCausalLM", "model."}}};

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

/// Typed access to config.json: an absent or null key takes the default; a wrong type is remembered as the first error.
class Keys {
 public:
  explicit Keys(const json& config) : config_(config) {}

  const json* find(std::string_view key) const {
    const auto it = config_.find(key);
    return it == config_.end() || it->is_null() ? nullptr : &*it;
  }
  int64_t integer(std::string_view key, int64_t fallback) {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (value->is_number_integer()) return value->get<int64_t>();
    wrong(key, "a whole number", *value);
    return fallback;
  }
  double number(std::string_view key, double fallback) {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (value->is_number()) return value->get<double>();
    wrong(key, "a number", *value);
    return fallback;
  }
  bool boolean(std::string_view key, bool fallback) {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (value->is_boolean()) return value->get<bool>();
    wrong(key, "true or false", *value);
    return fallback;
  }
  std::string text(std::string_view key, std::string fallback) {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (value->is_string()) return value->get<std::string>();
    wrong(key, "a string", *value);
    return fallback;
  }
  void refuse(Error error) {
    if (status_.ok()) status_ = std::move(error);
  }
  /// Errors out unless the switch has the only value that is computed here.
  void only(std::string_view key, bool wanted) {
    if (boolean(key, wanted) != wanted) {
      refuse(
          unsupported(fmt::format("{} = {}: this model computes something that is not supported here", key, !wanted)));
    }
  }
  Status status() const { return status_; }

 private:
  void wrong(std::string_view key, std::string_view expected, const json& found) {
    refuse(invalid(fmt::format("{} must be {}, got {}", key, expected, found.dump())));
  }
  const json& config_;
  Status status_;
};

/// config.json of GPT-2 names some sizes twice; either spelling is read, the n_* one is written.
int64_t aliased(Keys& keys, std::string_view name, std::string_view alias, int64_t fallback) {
  return keys.integer(name, keys.integer(alias, fallback));
}

ModelConfig gpt2_from(Keys& keys) {
  ModelConfig m;
  m.vocab = keys.integer("vocab_size", 50257);
  m.context = aliased(keys, "n_positions", "max_position_embeddings", 1024);
  m.width = aliased(keys, "n_embd", "hidden_size", 768);
  m.layers = aliased(keys, "n_layer", "num_hidden_layers", 12);
  m.heads = aliased(keys, "n_head", "num_attention_heads", 12);
  m.kv_heads = m.heads;
  m.head_dim = m.heads > 0 ? m.width / m.heads : 0;
  m.ffn = keys.integer("n_inner", 4 * m.width);
  const std::string activation = keys.text("activation_function", "gelu_new");
  if (activation == "gelu_new" || activation == "gelu_pytorch_tanh" || activation == "gelu_fast") {
    m.activation = Activation::kGeluTanh;
  } else if (activation == "gelu") {
    m.activation = Activation::kGeluErf;
  } else if (activation == "relu") {
    m.activation = Activation::kRelu;
  } else {
    keys.refuse(unsupported(fmt::format("activation_function \"{}\": known are gelu_new, gelu, relu", activation)));
  }
  m.norm_eps = keys.number("layer_norm_epsilon", 1e-5);
  keys.only("scale_attn_weights", true);
  keys.only("scale_attn_by_inverse_layer_idx", false);
  keys.only("add_cross_attention", false);
  m.tied_embeddings = keys.boolean("tie_word_embeddings", true);
  m.init_std = keys.number("initializer_range", 0.02);
  if (m.heads > 0 && m.width % m.heads != 0) {
    keys.refuse(invalid(fmt::format("n_head = {} does not divide n_embd = {}", m.heads, m.width)));
  }
  return m;
}

/// rope_theta in its 4.x place, its 5.x place (rope_parameters), or both when they agree.
double rope_theta(Keys& keys) {
  const json* flat = keys.find("rope_theta");
  const json* nested = keys.find("rope_parameters");
  double theta = keys.number("rope_theta", 10000.0);
  if (nested != nullptr) {
    if (!nested->is_object()) {
      keys.refuse(invalid("rope_parameters must be an object"));
      return theta;
    }
    const std::string type = nested->value("rope_type", "default");
    if (type != "default") {
      keys.refuse(
          unsupported(fmt::format("rope_parameters.rope_type \"{}\": only \"default\" is supported here", type)));
    }
    for (const auto& [key, value] : nested->items()) {
      if (value.is_object()) {
        keys.refuse(unsupported(fmt::format("rope_parameters.{}: settings by layer type are not supported here", key)));
      }
    }
    if (nested->contains("rope_theta") && (*nested)["rope_theta"].is_number()) {
      const auto inner = (*nested)["rope_theta"].get<double>();
      if (flat != nullptr && inner != theta) {
        keys.refuse(invalid(fmt::format("rope_theta = {} and rope_parameters.rope_theta = {} disagree", theta, inner)));
      }
      theta = inner;
    }
  }
  if (const json* scaling = keys.find("rope_scaling")) {
    keys.refuse(unsupported(fmt::format("rope_scaling = {}: rope scaling is not supported here", scaling->dump())));
  }
  return theta;
}

ModelConfig llama_from(Keys& keys) {
  ModelConfig m;
  m.positions = Positions::kRotary;
  m.norm = NormKind::kRmsNorm;
  m.activation = Activation::kSwiGlu;
  m.vocab = keys.integer("vocab_size", 32000);
  m.width = keys.integer("hidden_size", 4096);
  m.ffn = keys.integer("intermediate_size", 11008);
  m.layers = keys.integer("num_hidden_layers", 32);
  m.heads = keys.integer("num_attention_heads", 32);
  m.kv_heads = keys.integer("num_key_value_heads", m.heads);
  m.head_dim = keys.integer("head_dim", m.heads > 0 ? m.width / m.heads : 0);
  m.context = keys.integer("max_position_embeddings", 2048);
  m.norm_eps = keys.number("rms_norm_eps", 1e-6);
  m.rope_theta = rope_theta(keys);
  const bool attention_bias = keys.boolean("attention_bias", false), mlp_bias = keys.boolean("mlp_bias", false);
  if (attention_bias != mlp_bias) {
    keys.refuse(unsupported(fmt::format("attention_bias = {} with mlp_bias = {}: biases on all projections or on none",
                                        attention_bias, mlp_bias)));
  }
  m.bias = attention_bias;
  const std::string activation = keys.text("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") {
    keys.refuse(unsupported(fmt::format("hidden_act \"{}\": known is silu", activation)));
  }
  m.tied_embeddings = keys.boolean("tie_word_embeddings", false);
  m.init_std = keys.number("initializer_range", 0.02);
  return m;
}

Status check_sizes(const ModelConfig& m) {
  const std::pair<std::string_view, int64_t> sizes[] = {
      {"vocabulary", m.vocab},  {"width", m.width},       {"layers", m.layers}, {"heads", m.heads},
      {"kv heads", m.kv_heads}, {"head_dim", m.head_dim}, {"ffn", m.ffn},       {"context", m.context}};
  for (const auto& [name, size] : sizes) {
    if (size < 1 || size > (int64_t{1} << 31)) return invalid(fmt::format("{} = {} is out of range", name, size));
  }
  if (m.heads % m.kv_heads != 0) {
    return invalid(fmt::format("{} key/value heads do not divide {} heads", m.kv_heads, m.heads));
  }
  if (m.positions == Positions::kRotary && m.head_dim % 2 != 0) {
    return invalid(fmt::format("head_dim = {} is odd: rotary positions need pairs", m.head_dim));
  }
  return {};
}

struct NamePair {
  std::string_view logical, stored;
};
constexpr NamePair kGpt2Layer[] = {{"attn_norm", "ln_1"},
                                   {"attn.o", "attn.c_proj"},
                                   {"mlp_norm", "ln_2"},
                                   {"mlp.up", "mlp.c_fc"},
                                   {"mlp.down", "mlp.c_proj"}};
constexpr NamePair kLlamaLayer[] = {
    {"attn_norm", "input_layernorm"}, {"attn.q", "self_attn.q_proj"}, {"attn.k", "self_attn.k_proj"},
    {"attn.v", "self_attn.v_proj"},   {"attn.o", "self_attn.o_proj"}, {"mlp_norm", "post_attention_layernorm"},
    {"mlp.gate", "mlp.gate_proj"},    {"mlp.up", "mlp.up_proj"},      {"mlp.down", "mlp.down_proj"}};

/// "layers.12.attn.q.weight" -> layer "12", module "attn.q", leaf "weight".
struct LayerName {
  std::string_view layer, module, leaf;
};
LayerName split_layer_name(std::string_view name) {
  name.remove_prefix(std::string_view("layers.").size());
  const size_t dot = name.find('.'), last = name.rfind('.');
  return {name.substr(0, dot), name.substr(dot + 1, last - dot - 1), name.substr(last + 1)};
}

template <size_t N>
std::string_view translate(const NamePair (&table)[N], std::string_view module) {
  for (const NamePair& pair : table) {
    if (pair.logical == module) return pair.stored;
  }
  RT_CHECK(false, "no stored name for {}", module);
}

Mapping map_gpt2(std::string_view logical) {
  Mapping out{.logical = std::string(logical)};
  if (logical == "embed.tokens")
    out.stored = "transformer.wte.weight";
  else if (logical == "embed.positions")
    out.stored = "transformer.wpe.weight";
  else if (logical == "head.weight")
    out.stored = "lm_head.weight";
  else if (logical.starts_with("final_norm."))
    out.stored = fmt::format("transformer.ln_f.{}", logical.substr(11));
  else {
    const LayerName name = split_layer_name(logical);
    const bool is_norm = name.module.ends_with("norm");
    out.transpose = name.leaf == "weight" && !is_norm;
    if (name.module == "attn.q" || name.module == "attn.k" || name.module == "attn.v") {
      out.parts = 3;
      out.part = name.module == "attn.q" ? 0 : name.module == "attn.k" ? 1 : 2;
      out.stored = fmt::format("transformer.h.{}.attn.c_attn.{}", name.layer, name.leaf);
    } else {
      out.stored = fmt::format("transformer.h.{}.{}.{}", name.layer, translate(kGpt2Layer, name.module), name.leaf);
    }
  }
  return out;
}

Mapping map_llama(std::string_view logical) {
  Mapping out{.logical = std::string(logical)};
  if (logical == "embed.tokens")
    out.stored = "model.embed_tokens.weight";
  else if (logical == "head.weight")
    out.stored = "lm_head.weight";
  else if (logical.starts_with("final_norm."))
    out.stored = fmt::format("model.norm.{}", logical.substr(11));
  else {
    const LayerName name = split_layer_name(logical);
    out.stored = fmt::format("model.layers.{}.{}.{}", name.layer, translate(kLlamaLayer, name.module), name.leaf);
  }
  return out;
}

}  // namespace

Result<Family> find_family(std::string_view model_type) {
  std::string known;
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return family;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", family.model_type);
  }
  return unsupported(fmt::format("model_type \"{}\" is not known; known: {}", model_type, known));
}

Result<Family> family_for(const ModelConfig& m) {
  if (m.positions == Positions::kLearned && m.norm == NormKind::kLayerNorm && m.bias && m.kv_heads == m.heads &&
      m.head_dim * m.heads == m.width && m.activation != Activation::kSwiGlu) {
    return kFamilies[0];
  }
  if (m.positions == Positions::kRotary && m.norm == NormKind::kRmsNorm && m.activation == Activation::kSwiGlu) {
    return kFamilies[1];
  }
  return unsupported(
      "no Hugging Face family holds this model: gpt2 needs learned positions, layernorm, biases, one key/value head a "
      "head and a plain activation; llama needs rotary positions, rmsnorm and swiglu");
}

Result<ModelConfig> model_from_config(const json& config) {
  if (!config.is_object()) return invalid("it is no JSON object");
  if (!config.contains("model_type") || !config["model_type"].is_string()) {
    return invalid("\"model_type\" is missing or no string: it selects the family");
  }
  RT_TRY_SET(const Family family, find_family(config["model_type"].get<std::string>()));
  Keys keys(config);
  const ModelConfig model = family.model_type == "gpt2" ? gpt2_from(keys) : llama_from(keys);
  RT_TRY(keys.status());
  RT_TRY(check_sizes(model));
  return model;
}

Result<nlohmann::ordered_json> config_from_model(const ModelConfig& m, DType weights) {
  RT_TRY_SET(const Family family, family_for(m));
  nlohmann::ordered_json out;
  out["architectures"] = {family.architecture};
  out["model_type"] = family.model_type;
  out["vocab_size"] = m.vocab;
  if (family.model_type == "gpt2") {
    out["n_positions"] = m.context;
    out["n_embd"] = m.width;
    out["n_layer"] = m.layers;
    out["n_head"] = m.heads;
    out["n_inner"] = m.ffn;
    out["activation_function"] = m.activation == Activation::kGeluTanh  ? "gelu_new"
                                 : m.activation == Activation::kGeluErf ? "gelu"
                                                                        : "relu";
    out["layer_norm_epsilon"] = m.norm_eps;
    out["scale_attn_weights"] = true;
    out["scale_attn_by_inverse_layer_idx"] = false;
    out["reorder_and_upcast_attn"] = false;
    out["add_cross_attention"] = false;
    out["embd_pdrop"] = 0.0;
    out["attn_pdrop"] = 0.0;
    out["resid_pdrop"] = 0.0;
  } else {
    out["hidden_size"] = m.width;
    out["intermediate_size"] = m.ffn;
    out["num_hidden_layers"] = m.layers;
    out["num_attention_heads"] = m.heads;
    out["num_key_value_heads"] = m.kv_heads;
    out["head_dim"] = m.head_dim;
    out["hidden_act"] = "silu";
    out["max_position_embeddings"] = m.context;
    out["rms_norm_eps"] = m.norm_eps;
    out["rope_theta"] = m.rope_theta;
    out["rope_scaling"] = nullptr;
    out["attention_bias"] = m.bias;
    out["mlp_bias"] = m.bias;
    out["attention_dropout"] = 0.0;
    out["pretraining_tp"] = 1;
  }
  // Token ids are the tokenizer's business; null keeps transformers from assuming its own defaults.
  out["bos_token_id"] = nullptr;
  out["eos_token_id"] = nullptr;
  out["pad_token_id"] = nullptr;
  out["tie_word_embeddings"] = m.tied_embeddings;
  out["initializer_range"] = m.init_std;
  out["use_cache"] = true;
  out["torch_dtype"] = weights == DType::kBf16 ? "bfloat16" : weights == DType::kF16 ? "float16" : "float32";
  return out;
}

std::vector<Mapping> tensor_map(const Family& family, const ModelConfig& model) {
  std::vector<Mapping> out;
  for (const TensorSpec& tensor : model_tensors(model)) {
    out.push_back(family.model_type == "gpt2" ? map_gpt2(tensor.name) : map_llama(tensor.name));
  }
  return out;
}

std::vector<RowRun> row_runs(const Mapping& mapping, const Shape& logical) {
  const int64_t rows = row_count(logical);
  return {{0, mapping.part * rows, rows}};
}

Shape stored_shape(const Mapping& mapping, const Shape& logical) {
  Shape out = logical;
  out[0] *= mapping.parts;
  if (mapping.transpose) std::swap(out[0], out[1]);
  return out;
}

bool is_ignored_tensor(const Family& family, std::string_view stored) {
  // Whole names only: ".attn.bias" is a mask here and a projection's bias elsewhere.
  const bool gpt2 = family.model_type == "gpt2";
  std::string_view rest = stored;
  if (rest.starts_with(family.prefix)) rest.remove_prefix(family.prefix.size());
  const std::string_view start = gpt2 ? "h." : "layers.";
  if (!rest.starts_with(start)) return false;
  rest.remove_prefix(start.size());
  int64_t layer = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), layer);
  if (error != std::errc()) return false;
  rest.remove_prefix(end - rest.data());
  if (!gpt2) return rest == ".self_attn.rotary_emb.inv_freq";
  return rest == ".attn.bias" || rest == ".attn.masked_bias" || rest == ".crossattention.bias";
}

}  // namespace cairn::convert
