#include "converters/mechanisms.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

using nlohmann::json;

/// What a value must be for the key to show the mechanism; null and an absent key never do.
enum class Shows {
  kAny,
  kTrue,
  kAboveZero,  // a number above 0, or a list that is not empty
  kAboveOne,
};
struct KeyOf {
  std::string_view mechanism;
  Shows shows;
  std::vector<std::string_view> keys;
};

// Source: the configuration classes of transformers 4.57 and 5.24.
const std::vector<KeyOf>& keys_of() {
  static const std::vector<KeyOf> kKeys = {
      {"state-space layers",
       Shows::kAny,
       {"state_size", "ssm_state_size", "mamba_d_state", "mamba_d_ssm", "ssm_cfg", "time_step_rank"}},
      {"linear attention",
       Shows::kAny,
       {"linear_num_value_heads", "linear_num_heads", "linear_attn_config", "linear_attn_alpha_factor",
        "attention_hidden_size", "attn_type_list"}},
      {"recurrent layers", Shows::kAny, {"lru_width", "qk_dim_factor"}},
      {"short convolutions between tokens", Shows::kAny, {"conv_L_cache"}},
      {"attention to keys that an indexer picks", Shows::kAny, {"index_topk"}},
      {"compressed keys and values", Shows::kAny, {"compress_rates"}},
      {"several residual streams", Shows::kAboveOne, {"hc_mult"}},
      {"two rotary bases in a layer", Shows::kAny, {"compress_rope_theta"}},
      {"LayerNorm of whole queries and keys", Shows::kTrue, {"qk_ln"}},
      {"prediction of several tokens", Shows::kAboveZero, {"num_nextn_predict_layers", "num_mtp_layers"}},
      {"embeddings in every layer", Shows::kAboveZero, {"hidden_size_per_layer_input"}},
      {"layers that share keys and values", Shows::kAboveZero, {"num_kv_shared_layers"}},
      {"an encoder", Shows::kTrue, {"is_encoder_decoder"}},
      {"an encoder", Shows::kAboveZero, {"encoder_layers", "num_encoder_layers"}},
      {"pictures or sound as input", Shows::kAny, {"vision_config", "audio_config"}},
  };
  return kKeys;
}

/// What a class does without a key that says so.
struct TypeOf {
  std::string_view mechanism;
  std::vector<std::string_view> types;
};
const std::vector<TypeOf>& types_of() {
  static const std::vector<TypeOf> kTypes = {
      {"xIELU", {"apertus"}},
      {"a router of its own (sparsemixer)", {"phimoe"}},
      {"norms of queries and keys behind the rotation", {"hunyuan_v1_dense"}},
  };
  return kTypes;
}

bool shown_by(Shows shows, const json& value) {
  const auto above = [&](double bound) { return value.is_number() && value.get<double>() > bound; };
  switch (shows) {
    case Shows::kAny:
      return !value.is_null();
    case Shows::kTrue:
      return value == true || above(0);  // a number that Python reads as true
    case Shows::kAboveZero:
      return above(0) || (value.is_array() && !value.empty());
    case Shows::kAboveOne:
      return above(1);
  }
  return false;
}

/// A list or an object would fill a screen.
std::string shown(const json& value) { return value.is_structured() ? "..." : json_text(value); }

/// What layer_types may call a layer that no family has.
constexpr std::pair<std::string_view, std::string_view> kLayerTypes[] = {{"linear_attention", "linear attention"},
                                                                         {"mamba", "state-space layers"},
                                                                         {"conv", "short convolutions between tokens"},
                                                                         {"recurrent", "recurrent layers"}};

class Found {
 public:
  void look(const json& config) {
    for (const KeyOf& entry : keys_of()) {
      for (const std::string_view key : entry.keys) {
        const auto value = config.find(key);
        if (value != config.end() && shown_by(entry.shows, *value))
          add(entry.mechanism, fmt::format(" ({} = {})", key, shown(*value)));
      }
    }
    for (const char* key : {"layer_types", "layers_block_type", "block_types"}) {
      const auto list = config.find(key);
      if (list == config.end() || !list->is_array()) continue;
      for (const auto& [type, mechanism] : kLayerTypes) {
        if (std::ranges::find(*list, json(type)) != list->end())
          add(mechanism, fmt::format(" ({} has \"{}\")", key, type));
      }
    }
    const auto rope = config.find("rope_parameters");
    if (rope != config.end() && rope->is_object()) {
      const auto beta = rope->find("llama_4_scaling_beta");
      if (config.contains("kv_lora_rank") && beta != rope->end() && shown_by(Shows::kAboveZero, *beta))
        add("a temperature of latent attention by position", fmt::format(" (llama_4_scaling_beta = {})", shown(*beta)));
    }
    for (const TypeOf& entry : types_of()) {
      for (const std::string_view type : entry.types) {
        if (json_field(config, "model_type") == type) add(entry.mechanism, "");
      }
    }
  }
  std::vector<std::string> take() { return std::move(out_); }

 private:
  void add(std::string_view mechanism, const std::string& by) {
    if (seen_.insert(mechanism).second) out_.push_back(std::string(mechanism) + by);
  }
  std::set<std::string_view> seen_;
  std::vector<std::string> out_;
};

}  // namespace

std::vector<std::string> missing_mechanisms(const json& config) {
  Found found;
  found.look(config);
  if (const auto text = config.find("text_config"); text != config.end() && text->is_object()) found.look(*text);
  return found.take();
}

}  // namespace cairn::convert
