// Ministral 3: Mistral with yarn, and queries whose factor grows with the position in all layers. Source: transformers
// 5.24 models/ministral3; 4.x has no class for it.
#include <fmt/format.h>

#include <cmath>

#include "converters/llama_like.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char *kScale = "llama_4_scaling_beta", *kOriginal = "original_max_position_embeddings";

/// What the class takes where config.json has no rotary settings, whatever rope_theta says beside them.
void read_absent_settings(ConfigReader& in, M& m) {
  constexpr double kBase = 1000000;
  constexpr int64_t kContext = 16384;
  if (in.number("rope_theta", kBase) != kBase || in.integer(kOriginal, kContext) != kContext) {
    return in.unsupported(
        fmt::format("rope_theta or {} without rope_parameters: transformers takes {} and {}, whatever "
                    "they say",
                    kOriginal, kBase, kContext));
  }
  m.rope_theta = kBase;
  m.rope.scaling = RopeScaling::kYarn;
  m.rope.factor = 16;
  m.rope.original_context = m.temperature_floor = kContext;
  m.rope.mscale = m.rope.mscale_all_dim = 1;
  m.temperature_scale = 0.1;
  m.temperature_form = TemperatureForm::kMinistral3;
}

/// The value in both objects that config.json may have, as transformers 5 reads it; null where neither has it.
json stated(ConfigReader& in, const char* key) {
  json out;
  for (const char* place : {"rope_scaling", "rope_parameters"}) {
    const json* settings = in.find(place);
    if (settings == nullptr || !settings->contains(key) || (*settings)[key].is_null()) continue;
    if (!out.is_null() && out != (*settings)[key]) in.invalid(fmt::format("two values of {} disagree", key));
    out = (*settings)[key];
  }
  return out;
}

/// This class reads no such key beside its settings, as others do.
void refuse_original_beside(ConfigReader& in) {
  const json original = stated(in, kOriginal);
  if (const json* outer = in.find(kOriginal); outer != nullptr && *outer != original) {
    in.invalid(fmt::format("{} = {} and rope_parameters.{} = {} disagree; transformers reads the latter", kOriginal,
                           json_text(*outer), kOriginal, json_text(original)));
  }
}

/// The factor of queries, whose steps are as long as the context before scaling.
void read_warm_queries(ConfigReader& in, M& m) {
  const json scale = stated(in, kScale), original = stated(in, kOriginal);
  if (!scale.is_number() || !std::isfinite(scale.get<double>())) {
    return in.invalid(fmt::format("rope_parameters.{} must be a number, got {}; transformers fails without it", kScale,
                                  json_text(scale)));
  }
  if (scale < 0) return in.unsupported(fmt::format("rope_parameters.{} = {}: below 0", kScale, json_text(scale)));
  const bool scaled = m.rope.scaling == RopeScaling::kYarn || m.rope.scaling == RopeScaling::kLlama3;
  double floor = static_cast<double>(m.context);  // with such a scaling transformers sets the missing number to it
  if (original.is_number()) {
    floor = original.get<double>();
  } else if (!scaled || !original.is_null()) {
    return in.invalid(fmt::format("rope_parameters.{} must be a number, got {}; transformers fails without it",
                                  kOriginal, json_text(original)));
  }
  if (!(floor >= 1 && floor <= 1 << 24) || floor != static_cast<double>(static_cast<int64_t>(floor))) {
    return in.invalid(
        fmt::format("rope_parameters.{} = {} must be a whole number, 1 to {}", kOriginal, floor, 1 << 24));
  }
  if (scale == 0) return;
  m.temperature_form = TemperatureForm::kMinistral3;
  m.temperature_scale = scale.get<double>();
  m.temperature_floor = static_cast<int64_t>(floor);
}

/// Written in the 5.x form, which published folders have.
ConfigKey rope_and_warm_queries() {
  ConfigKey out = rope({.old_type_counts = false});
  out.read = [read = out.read](ConfigReader& in, M& m) {
    const bool said = in.find("rope_parameters") != nullptr || in.find("rope_scaling") != nullptr;
    if (said) refuse_original_beside(in);
    read(in, m);
    said ? read_warm_queries(in, m) : read_absent_settings(in, m);
  };
  out.write = [write = out.write](const M& m, ordered_json& config) {
    ordered_json flat;
    write(m, flat);
    const bool scaled = m.rope.scaling != RopeScaling::kNone;
    ordered_json settings = scaled ? flat["rope_scaling"] : ordered_json{{"rope_type", "default"}};
    settings["rope_theta"] = flat["rope_theta"];
    if (!settings.contains(kOriginal)) settings[kOriginal] = m.temperature_scale > 0 ? m.temperature_floor : m.context;
    settings[kScale] = m.temperature_scale;
    config["rope_parameters"] = settings;
  };
  return out;
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = [] {
    std::vector<ConfigKey> out = llama_like_keys({.vocab = 131072,
                                                  .ffn = 14336,
                                                  .layers = 34,
                                                  .kv_heads = 8,
                                                  .head_dim = 128,
                                                  .context = 262144,
                                                  .norm_eps = 1e-5},
                                                 {sliding_window(0)});
    for (ConfigKey& key : out) {
      if (key.names.front() == "rope_theta") key = rope_and_warm_queries();
    }
    return out;
  }();
  return kKeys;
}

}  // namespace

Family ministral3_family() {
  return llama_like({.model_type = "ministral3",
                     .architecture = "Ministral3ForCausalLM",
                     .keys = keys(),
                     .last_choice = true,
                     .since_5 = true});
}

}  // namespace cairn::convert
