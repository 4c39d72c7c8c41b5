#include "converters/family_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "runtime/plan/model_tensors.h"

namespace cairn::convert {

using nlohmann::json;
using nlohmann::ordered_json;

const json* ConfigReader::find(std::string_view key) const {
  const auto it = config_.find(key);
  return it == config_.end() || it->is_null() ? nullptr : &*it;
}

namespace {

/// 16, or 16.0 as some programs write it.
std::optional<int64_t> whole_number(const json& value) {
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const auto number = value.get<double>();
  if (number != std::floor(number) || std::abs(number) > 9007199254740992.0) return std::nullopt;
  return static_cast<int64_t>(number);
}

}  // namespace

int64_t ConfigReader::integer(std::string_view key, int64_t fallback) {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (const std::optional<int64_t> whole = whole_number(*value)) return *whole;
  wrong(key, "a whole number", *value);
  return fallback;
}

double ConfigReader::number(std::string_view key, double fallback) {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (value->is_number()) return value->get<double>();
  wrong(key, "a number", *value);
  return fallback;
}

bool ConfigReader::boolean(std::string_view key, bool fallback) {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  wrong(key, "true or false", *value);
  return fallback;
}

std::string ConfigReader::text(std::string_view key, std::string_view fallback) {
  const json* value = find(key);
  if (value == nullptr) return std::string(fallback);
  if (value->is_string()) return value->get<std::string>();
  wrong(key, "a string", *value);
  return std::string(fallback);
}

int64_t ConfigReader::line() const {
  const json* version = find("transformers_version");
  if (version == nullptr || !version->is_string()) return 0;
  const std::string text = version->get<std::string>();
  return text.starts_with("5.") ? 5 : text.starts_with("4.") || text.starts_with("3.") ? 4 : 0;
}

void ConfigReader::invalid(std::string message) {
  if (status_.ok()) status_ = Error{ErrorCode::kInvalidInput, std::move(message)};
}

void ConfigReader::unsupported(std::string message) {
  if (status_.ok()) status_ = Error{ErrorCode::kUnsupported, std::move(message)};
}

void ConfigReader::wrong(std::string_view key, std::string_view expected, const json& found) {
  invalid(
      fmt::format("{} must be {}, got {}", key, expected, found.dump(-1, ' ', false, json::error_handler_t::replace)));
}

// --- sizes, numbers, switches
// -------------------------------------------------------------------------------------------

namespace {

/// Refused here, not only when all is read (family.cc): a later key may go through the layers one by one.
int64_t read_size(ConfigReader& in, std::string_view name, Size field, int64_t absent) {
  const int64_t value = in.integer(name, absent);
  const auto* const bound = std::ranges::find(kSizeBounds, field, &SizeBound::field);
  RT_CHECK(bound != std::end(kSizeBounds), "{} has no bound", name);
  if (in.find(name) == nullptr || (value >= 1 && value <= bound->most)) return value;
  in.invalid(fmt::format("{} = {} is out of range, 1 to {}", name, value, bound->most));
  return absent;
}

}  // namespace

ConfigKey size(std::string_view name, Size field, int64_t absent) {
  return {{name},
          [=](ConfigReader& in, ModelConfig& m) { m.*field = read_size(in, name, field, absent); },
          [=](const ModelConfig& m, ordered_json& out) { out[std::string(name)] = m.*field; }};
}

ConfigKey size(std::string_view name, std::string_view alias, Size field, int64_t absent) {
  ConfigKey out = size(name, field, absent);
  out.names.push_back(alias);
  out.read = [=](ConfigReader& in, ModelConfig& m) {
    const int64_t other = read_size(in, alias, field, absent);
    m.*field = read_size(in, name, field, other);
    if (in.find(alias) != nullptr && m.*field != other) {
      in.invalid(
          fmt::format("{} = {} and {} = {} are two names of one number, and disagree", name, m.*field, alias, other));
    }
  };
  return out;
}

ConfigKey size(std::string_view name, Size field, int64_t (*absent)(const ModelConfig&)) {
  ConfigKey out = size(name, field, int64_t{0});
  out.read = [=](ConfigReader& in, ModelConfig& m) { m.*field = read_size(in, name, field, absent(m)); };
  return out;
}

ConfigKey kv_heads(int64_t absent) {
  constexpr const char* kName = "num_key_value_heads";
  ConfigKey out = size(kName, &ModelConfig::kv_heads, absent);
  out.read = [=](ConfigReader& in, ModelConfig& m) {
    const bool all = absent == 0 || in.contains(kName);
    m.kv_heads = read_size(in, kName, &ModelConfig::kv_heads, all ? m.heads : absent);
  };
  return out;
}

ConfigKey number(std::string_view name, double ModelConfig::*field, double absent) {
  return {{name},
          [=](ConfigReader& in, ModelConfig& m) { m.*field = in.number(name, absent); },
          [=](const ModelConfig& m, ordered_json& out) { out[std::string(name)] = m.*field; }};
}

ConfigKey flag(std::string_view name, bool ModelConfig::*field, bool absent) {
  return {{name},
          [=](ConfigReader& in, ModelConfig& m) { m.*field = in.boolean(name, absent); },
          [=](const ModelConfig& m, ordered_json& out) { out[std::string(name)] = m.*field; }};
}

ConfigKey biases(std::string_view name, int projections, bool absent) {
  return {{name},
          [=](ConfigReader& in, ModelConfig& m) {
            const bool on = in.boolean(name, absent);
            if (projections & kQkv) m.qkv_bias = on;
            if (projections & kOut) m.out_bias = on;
            if (projections & kMlp) m.mlp_bias = on;
          },
          [=](const ModelConfig& m, ordered_json& out) {
            out[std::string(name)] = has_bias(m, projections & kQkv   ? BiasOf::kQkv
                                                 : projections & kOut ? BiasOf::kOut
                                                                      : BiasOf::kMlp);
          }};
}

ConfigKey head_dim(int64_t absent, bool if_unusual) {
  const auto usual = [](const ModelConfig& m) { return m.heads > 0 ? m.width / m.heads : 0; };
  return {{"head_dim"},
          [=](ConfigReader& in, ModelConfig& m) {
            const bool derived = absent == 0 || (in.contains("head_dim") && in.find("head_dim") == nullptr);
            m.head_dim = in.integer("head_dim", derived ? usual(m) : absent);
          },
          [=](const ModelConfig& m, ordered_json& out) {
            if (!if_unusual || m.head_dim != usual(m)) out["head_dim"] = m.head_dim;
          }};
}

ConfigKey divided_head_dim() {
  return {{"head_dim"},
          [](ConfigReader& in, ModelConfig& m) {
            if (m.heads > 0 && m.width % m.heads != 0) {
              in.invalid(fmt::format("{} heads do not divide a width of {}", m.heads, m.width));
            }
            m.head_dim = m.heads > 0 ? m.width / m.heads : 0;
            if (const int64_t found = in.integer("head_dim", m.head_dim); found != m.head_dim) {
              in.unsupported(fmt::format("head_dim = {}: in this family it is the width of {} divided by {} heads, {}",
                                         found, m.width, m.heads, m.head_dim));
            }
          },
          nullptr};
}

ConfigKey divided_heads() {
  ConfigKey out = divided_head_dim();
  out.read = [divided = out.read](ConfigReader& in, ModelConfig& m) {
    divided(in, m);
    m.kv_heads = m.heads;
  };
  return out;
}

ConfigKey activation(std::string_view name, std::string_view absent, std::vector<ActivationName> known) {
  return {{name},
          [=](ConfigReader& in, ModelConfig& m) {
            const std::string found = in.text(name, absent);
            std::string names;
            for (const auto& [text, kind] : known) {
              if (text == found) {
                m.activation = kind;
                return;
              }
              names += fmt::format("{}{}", names.empty() ? "" : ", ", text);
            }
            in.unsupported(fmt::format("{} \"{}\": known are {}", name, found, names));
          },
          [=](const ModelConfig& m, ordered_json& out) {
            const auto fits = [&](const ActivationName& k) { return k.second == m.activation; };
            const auto at = std::ranges::find_if(known, fits);
            out[std::string(name)] = at == known.end() ? known.front().first : at->first;
          }};
}

// Source: transformers activations.py. The tanh forms differ in the rounding of one constant, below 3e-10.
std::vector<ActivationName> plain_activations() {
  return {{"gelu_new", Activation::kGeluTanh},
          {"gelu_pytorch_tanh", Activation::kGeluTanh},
          {"gelu_python_tanh", Activation::kGeluTanh},
          {"gelu_accurate", Activation::kGeluTanh},
          {"gelu_fast", Activation::kGeluTanh},
          {"gelu", Activation::kGeluErf},
          {"gelu_python", Activation::kGeluErf},
          {"relu", Activation::kRelu},
          {"quick_gelu", Activation::kGeluQuick},
          {"relu2", Activation::kRelu2},
          {"silu", Activation::kSilu},
          {"swish", Activation::kSilu}};
}

std::vector<ActivationName> gated_activations() {
  return {{"silu", Activation::kSwiGlu},
          {"swish", Activation::kSwiGlu},
          {"gelu", Activation::kGeGlu},
          {"gelu_python", Activation::kGeGlu},
          {"gelu_new", Activation::kGeGluTanh},
          {"gelu_pytorch_tanh", Activation::kGeGluTanh},
          {"gelu_fast", Activation::kGeGluTanh},
          {"gelu_python_tanh", Activation::kGeGluTanh},
          {"gelu_accurate", Activation::kGeGluTanh},
          {"relu", Activation::kReGlu},
          {"quick_gelu", Activation::kQuickGeGlu},
          {"relu2", Activation::kReGlu2}};
}

ConfigKey scaled_attention() {
  return {{"scale_attn_weights"},
          [](ConfigReader& in, ModelConfig& m) { m.attention_scale = in.boolean("scale_attn_weights", true) ? 0 : 1; },
          [](const ModelConfig& m, ordered_json& out) { out["scale_attn_weights"] = m.attention_scale == 0; }};
}

ConfigKey experts(std::string_view name, int64_t absent, int64_t absent_top_k) {
  constexpr int64_t kMaxExperts = 1 << 16;  // as the recipe's schema has it
  const std::string_view alias = name == "num_experts" ? "num_local_experts" : "num_experts";
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    const int64_t other = in.integer(alias, absent);
    m.moe.experts = in.integer(name, other);
    if (in.find(alias) != nullptr && other != m.moe.experts) {
      in.invalid(fmt::format("{} = {} and {} = {} are two names of one number, and disagree", name, m.moe.experts,
                             alias, other));
    }
    m.moe.top_k = in.integer("num_experts_per_tok", absent_top_k);
    const double coefficient = in.number("router_aux_loss_coef", 0.001);
    if (in.boolean("output_router_logits", false)) m.moe.aux_loss = coefficient;
    m.moe.aux_scope = AuxScope::kModel;
    if (m.moe.experts > kMaxExperts) {
      in.invalid(fmt::format("{} = {} is out of range, 1 to {}", name, m.moe.experts, kMaxExperts));
    } else if (m.moe.experts < 1 || m.moe.top_k < 1 || m.moe.top_k > m.moe.experts) {
      in.invalid(
          fmt::format("num_experts_per_tok = {} of {} = {}: each token takes at least one expert and at most all",
                      m.moe.top_k, name, m.moe.experts));
    }
  };
  const auto write = [=](const ModelConfig& m, ordered_json& out) {
    out[std::string(name)] = m.moe.experts;
    out["num_experts_per_tok"] = m.moe.top_k;
    const bool balances = m.moe.aux_loss > 0 && m.moe.aux_scope == AuxScope::kModel;
    out["router_aux_loss_coef"] = m.moe.aux_loss > 0 ? m.moe.aux_loss : 0.001;
    out["output_router_logits"] = balances;  // which switches the loss on
  };
  return {{name, alias, "num_experts_per_tok", "router_aux_loss_coef", "output_router_logits"}, read, write};
}

ConfigKey refuse_unless(std::string_view name, json value) {
  const auto read = [=](ConfigReader& in, ModelConfig&) {
    const json* found = in.find(name);
    if (found == nullptr || *found == value) return;
    in.unsupported(fmt::format("{} = {}: this model computes something that is not supported here, which is {}", name,
                               found->dump(-1, ' ', false, json::error_handler_t::replace), value.dump()));
  };
  return {{name}, read, nullptr};
}

ConfigKey only(std::string_view name, json value) {
  ConfigKey out = refuse_unless(name, value);
  out.write = constant(name, std::move(value)).write;
  return out;
}

ConfigKey dropout(std::string_view name, double ModelConfig::*field) {
  return {{name}, nullptr, [=](const ModelConfig& m, ordered_json& out) { out[std::string(name)] = m.*field; }};
}

ConfigKey constant(std::string_view name, json value) {
  return {{name}, nullptr, [=](const ModelConfig&, ordered_json& out) { out[std::string(name)] = value; }};
}

ConfigKey unread(std::initializer_list<std::string_view> names) { return {names, nullptr, nullptr}; }

// --- rotary positions
// ---------------------------------------------------------------------------------------------------

namespace {

/// A key that transformers 5 reads as `five` and 4.x as `four`: by the line that wrote the folder.
template <typename T>
T by_line(ConfigReader& in, std::string_view key, T five, T four) {
  if (five == four) return five;
  const std::string both = fmt::format("{}: transformers 5 reads {}, 4.x reads {}", key, five, four);
  if (in.line() == 0) {
    in.unsupported(both + "; transformers_version, which would say who wrote this, is missing: add it");
    return five;
  }
  in.note(fmt::format("{}; taken as {}, which wrote this folder, reads it", both,
                      in.line() == 5 ? "transformers 5" : "transformers 4"));
  return in.line() == 5 ? five : four;
}

/// A number that may stand at the top level under `flat`, in rope_parameters under `key`, which 4.x does not know, or
/// in both if they agree.
double rope_number(ConfigReader& in, const json& nested, std::string_view flat, std::string_view key, double absent) {
  const double outer = in.number(flat, absent);
  const auto inner = nested.find(key);
  if (inner == nested.end() || inner->is_null()) return outer;
  if (!inner->is_number()) {
    in.invalid(fmt::format("rope_parameters.{} must be a number, got {}", key, inner->dump()));
    return outer;
  }
  if (in.find(flat) != nullptr && inner->get<double>() != outer) {
    in.invalid(fmt::format("{} = {} and rope_parameters.{} = {} disagree", flat, outer, key, inner->get<double>()));
  }
  // Only 5.x writes rope_parameters, so that a folder that does not say who wrote it needs no guess.
  return in.line() == 4 ? by_line(in, fmt::format("rope_parameters.{}", key), inner->get<double>(), outer)
                        : inner->get<double>();
}

/// The part of a head's channels that turns, of a class that turns all: a folder that says another one is no such
/// model. 4.x does not read it; 5.x turns all without a scaling, and fails with one.
void refuse_part(ConfigReader& in, const json& nested, std::string_view place) {
  const auto part = nested.find("partial_rotary_factor");
  if (part == nested.end() || part->is_null() || *part == 1) return;
  in.unsupported(
      fmt::format("{}.partial_rotary_factor = {}: this family turns all channels of a head, whatever is said "
                  "here; take the key out if that is meant",
                  place, part->dump()));
}

/// Channels that turn, as transformers rounds it: int(head_dim * partial).
int64_t rotary_channels(double partial, int64_t head_dim) {
  return static_cast<int64_t>(static_cast<double>(head_dim) * partial);
}

/// The factor that gives these channels back.
double partial_factor(int64_t channels, int64_t head_dim) {
  double out = static_cast<double>(channels) / static_cast<double>(head_dim);
  while (rotary_channels(out, head_dim) < channels) out = std::nextafter(out, 2.0);
  return out;
}

constexpr std::pair<std::string_view, RopeScaling> kScalings[] = {{"default", RopeScaling::kNone},
                                                                  {"linear", RopeScaling::kLinear},
                                                                  {"dynamic", RopeScaling::kDynamic},
                                                                  {"yarn", RopeScaling::kYarn},
                                                                  {"llama3", RopeScaling::kLlama3}};

/// A key of the scaling both ways. Source: transformers modeling_rope_utils.py.
struct ScalingKey {
  RopeScaling of;
  std::string_view name;
  double RopeConfig::*field;
  bool required;
  double unset;  // not written when the field has this value
};
constexpr ScalingKey kScalingKeys[] = {
    {RopeScaling::kLinear, "factor", &RopeConfig::factor, true, -1},
    {RopeScaling::kDynamic, "factor", &RopeConfig::factor, true, -1},
    {RopeScaling::kLlama3, "factor", &RopeConfig::factor, true, -1},
    {RopeScaling::kLlama3, "low_freq_factor", &RopeConfig::low_freq_factor, true, -1},
    {RopeScaling::kLlama3, "high_freq_factor", &RopeConfig::high_freq_factor, true, -1},
    {RopeScaling::kYarn, "factor", &RopeConfig::factor, true, -1},
    {RopeScaling::kYarn, "attention_factor", &RopeConfig::attention_factor, false, 0},
    {RopeScaling::kYarn, "beta_fast", &RopeConfig::beta_fast, false, 32},
    {RopeScaling::kYarn, "beta_slow", &RopeConfig::beta_slow, false, 1},
    {RopeScaling::kYarn, "mscale", &RopeConfig::mscale, false, 0},
    {RopeScaling::kYarn, "mscale_all_dim", &RopeConfig::mscale_all_dim, false, 0},
};

/// The context that a scaling extends. 5.x lets a top-level key win over the nested one, 4.x knows the nested one
/// alone.
void read_original_context(ConfigReader& in, const json& scaling, std::string_view place, ModelConfig& m) {
  constexpr std::string_view kKey = "original_max_position_embeddings";
  const int64_t outer = in.integer(kKey, 0);
  int64_t inner = 0;
  if (const auto value = scaling.find(kKey); value != scaling.end() && !value->is_null()) {
    const std::optional<int64_t> whole = whole_number(*value);
    if (!whole) return in.invalid(fmt::format("{}.{} must be a whole number, got {}", place, kKey, value->dump()));
    inner = *whole;
  }
  if (outer != 0 && inner != 0 && outer != inner) {
    return in.invalid(fmt::format("{} = {} and {}.{} = {} disagree", kKey, outer, place, kKey, inner));
  }
  const bool llama3 = m.rope.scaling == RopeScaling::kLlama3;
  if (outer == 0 && inner == 0 && llama3) {
    return in.invalid(fmt::format("{}.{} is missing; rope_type \"llama3\" needs it", place, kKey));
  }
  // 4.x fails on llama3 without the nested key, so that there is one reading; with yarn it takes the whole context.
  m.rope.original_context =
      inner != 0 || llama3 || outer == 0 ? std::max(inner, outer) : by_line(in, std::string(kKey), outer, m.context);
}

void read_scaling(ConfigReader& in, const json& scaling, std::string_view place, ModelConfig& m) {
  const auto type_at = scaling.contains("rope_type") ? scaling.find("rope_type") : scaling.find("type");  // old: type
  std::string type = "default";
  if (type_at != scaling.end() && !type_at->is_null()) {
    if (!type_at->is_string()) return in.invalid(fmt::format("{}.rope_type must be a string", place));
    type = type_at->get<std::string>();
  }
  std::string known;
  const std::pair<std::string_view, RopeScaling>* found = nullptr;
  for (const auto& entry : kScalings) {
    if (entry.first == type) found = &entry;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", entry.first);
  }
  if (found == nullptr) {
    return in.unsupported(fmt::format("{}.rope_type \"{}\" is not supported here; known are {}", place, type, known));
  }
  RopeConfig& rope = m.rope;
  rope.scaling = found->second;
  for (const ScalingKey& key : kScalingKeys) {
    if (key.of != rope.scaling) continue;
    const auto value = scaling.find(key.name);
    if (value == scaling.end() || value->is_null()) {
      if (key.required) in.invalid(fmt::format("{}.{} is missing; rope_type \"{}\" needs it", place, key.name, type));
    } else if (!value->is_number()) {
      in.invalid(fmt::format("{}.{} must be a number, got {}", place, key.name, value->dump()));
    } else {
      rope.*key.field = value->get<double>();
    }
  }
  if (rope.scaling == RopeScaling::kLlama3 || rope.scaling == RopeScaling::kYarn) {
    read_original_context(in, scaling, place, m);
  }
  if (rope.scaling == RopeScaling::kYarn && scaling.contains("truncate") && scaling["truncate"].is_boolean()) {
    rope.truncate = scaling["truncate"].get<bool>();
  }
}

/// A list of longrope: a divisor for each pair of channels that turns.
std::vector<double> read_divisors(ConfigReader& in, const json& scaling, const std::string& place, const char* name,
                                  const ModelConfig& m) {
  const auto list = scaling.find(name);
  const bool numbers = list != scaling.end() && list->is_array() &&
                       std::ranges::all_of(*list, [](const json& v) { return v.is_number() && v.get<double>() > 0; });
  if (!numbers || std::ssize(*list) != rotary_dims(m) / 2) {
    in.invalid(fmt::format(
        "{}.{} must be a list of {} numbers above 0, one for each pair of channels that turns, got {}", place, name,
        rotary_dims(m) / 2, list == scaling.end() ? "none" : fmt::format("{} values", list->size())));
    return {};
  }
  return list->get<std::vector<double>>();
}

/// Phi-3's rope_scaling. Both lines take longrope for "su" and "yarn" in a file, and the context before from the top
/// level.
void read_longrope(ConfigReader& in, const json& scaling, const std::string& place, int64_t absent_context,
                   ModelConfig& m) {
  constexpr const char* kContext = "original_max_position_embeddings";
  const auto type_at = scaling.contains("rope_type") ? scaling.find("rope_type") : scaling.find("type");
  const json type = type_at == scaling.end() || type_at->is_null() ? json("default") : *type_at;
  if (type == "default") return;
  if (type != "longrope" && type != "su" && type != "yarn") {
    return in.unsupported(
        fmt::format("{}.rope_type {}: this family knows \"default\" and \"longrope\"", place, type.dump()));
  }
  for (const char* key : {"factor", "attention_factor"}) {
    const auto stated = scaling.find(key);
    if (stated == scaling.end() || stated->is_null()) continue;
    in.unsupported(
        fmt::format("{}.{} = {}: transformers 4 refuses this key; without it the factor is "
                    "max_position_embeddings divided by {}",
                    place, key, stated->dump(), kContext));
  }
  const int64_t original = in.integer(kContext, absent_context);
  if (const auto inner = scaling.find(kContext); inner != scaling.end() && *inner != original) {
    return in.invalid(
        fmt::format("{} = {} and {}.{} = {} disagree", kContext, original, place, kContext, inner->dump()));
  }
  if (original < 2) return in.invalid(fmt::format("{} = {} must be at least 2", kContext, original));
  m.rope.scaling = RopeScaling::kLongRope;
  m.rope.original_context = original;
  m.rope.factor = std::max(1.0, static_cast<double>(m.context) / static_cast<double>(original));
  m.rope.short_factor = read_divisors(in, scaling, place, "short_factor", m);
  m.rope.long_factor = read_divisors(in, scaling, place, "long_factor", m);
}

/// The one form that transformers 4 takes.
json longrope_of(const ModelConfig& m) {
  if (m.rope.scaling != RopeScaling::kLongRope) return nullptr;
  return {{"type", "longrope"}, {"short_factor", m.rope.short_factor}, {"long_factor", m.rope.long_factor}};
}

json scaling_of(const ModelConfig& m) {
  const RopeConfig& rope = m.rope;
  if (rope.scaling == RopeScaling::kNone) return nullptr;
  json out = json::object();
  for (const auto& [name, scaling] : kScalings) {
    if (scaling == rope.scaling) out["rope_type"] = name;
  }
  for (const ScalingKey& key : kScalingKeys) {
    if (key.of == rope.scaling && (key.required || rope.*key.field != key.unset)) {
      out[std::string(key.name)] = rope.*key.field;
    }
  }
  if (rope.scaling == RopeScaling::kLlama3 || rope.scaling == RopeScaling::kYarn) {
    out["original_max_position_embeddings"] = rope.original_context > 0 ? rope.original_context : m.context;
  }
  if (rope.scaling == RopeScaling::kYarn && !rope.truncate) out["truncate"] = false;
  return out;
}

}  // namespace

ConfigKey rope(RopeKeys keys) {
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    m.positions = Positions::kRotary;
    const json* parameters = in.find("rope_parameters");
    const json* scaling = in.find("rope_scaling");
    for (const auto& [name, value] : {std::pair("rope_parameters", parameters), std::pair("rope_scaling", scaling)}) {
      if (value == nullptr) continue;
      if (!value->is_object()) return in.invalid(fmt::format("{} must be an object, got {}", name, value->dump()));
      for (const auto& [key, inner] : value->items()) {
        if (!inner.is_object()) continue;
        return in.unsupported(fmt::format("{}.{}: settings by layer type are not supported here", name, key));
      }
    }
    const json nested = parameters != nullptr ? *parameters : json::object();
    m.rope_theta = rope_number(in, nested, keys.base, "rope_theta", keys.absent_base);
    if (keys.partial.empty()) {
      refuse_part(in, nested, "rope_parameters");
      if (scaling != nullptr) refuse_part(in, *scaling, "rope_scaling");
    }
    double partial = keys.absent_partial;
    if (!keys.partial.empty()) partial = rope_number(in, nested, keys.partial, "partial_rotary_factor", partial);
    if (!keys.partial.empty() && in.number("partial_rotary_factor", partial) != partial) {  // the class sets both
      in.invalid(fmt::format("{} = {} and partial_rotary_factor = {} disagree", keys.partial, partial,
                             in.number("partial_rotary_factor", partial)));
    }
    if (keys.base != "rope_theta" && in.number("rope_theta", m.rope_theta) != m.rope_theta) {
      in.invalid(fmt::format("{} = {} and rope_theta = {} disagree", keys.base, m.rope_theta,
                             in.number("rope_theta", m.rope_theta)));
    }
    if (scaling != nullptr && parameters == nullptr) {  // 5.x takes both from there, 4.x does not look
      const auto inside = [&](std::string_view key, double outer) {
        const auto value = scaling->find(key);
        if (value == scaling->end() || value->is_null()) return outer;
        if (value->is_number()) return by_line(in, fmt::format("rope_scaling.{}", key), value->get<double>(), outer);
        in.invalid(fmt::format("rope_scaling.{} must be a number, got {}", key, value->dump()));
        return outer;
      };
      m.rope_theta = inside("rope_theta", m.rope_theta);
      if (!keys.partial.empty()) partial = inside("partial_rotary_factor", partial);
    }
    if (!(partial > 0 && partial <= 1)) {
      return in.invalid(fmt::format("{} = {} must be above 0 and at most 1", keys.partial, partial));
    }
    m.rope.dims = rotary_channels(partial, m.head_dim);
    if (m.rope.dims < 2) in.invalid(fmt::format("{} of {} channels of a head turn: no pair", m.rope.dims, m.head_dim));
    const auto read_one = [&](const json& from, const char* place) {
      if (keys.longrope_context > 0) return read_longrope(in, from, place, keys.longrope_context, m);
      read_scaling(in, from, place, m);
    };
    if (scaling != nullptr) {
      read_one(*scaling, "rope_scaling");
      const RopeConfig outer = m.rope;
      if (parameters != nullptr && (parameters->contains("rope_type") || parameters->contains("type"))) {
        read_one(*parameters, "rope_parameters");
        if (!(m.rope == outer)) in.invalid("rope_scaling and rope_parameters disagree");
      }
    } else {
      read_one(nested, "rope_parameters");
      if (in.line() == 4 && m.rope.scaling != RopeScaling::kNone) {
        in.unsupported(
            "rope_parameters: transformers 4, which wrote this folder by its transformers_version, does not "
            "read it, and transformers 5 does: say the same in rope_scaling, or take it out");
      }
    }
  };
  const auto write = [=](const ModelConfig& m, ordered_json& out) {
    out[std::string(keys.base)] = m.rope_theta;
    if (!keys.partial.empty()) out[std::string(keys.partial)] = partial_factor(rotary_dims(m), m.head_dim);
    if (keys.longrope_context > 0) {
      out["original_max_position_embeddings"] = m.rope.original_context > 0 ? m.rope.original_context : m.context;
      out["rope_scaling"] = longrope_of(m);
    } else {
      out["rope_scaling"] = scaling_of(m);
    }
  };
  std::vector<std::string_view> names = {keys.base, "rope_scaling", "rope_parameters",
                                         "original_max_position_embeddings"};
  if (keys.base != "rope_theta") names.push_back("rope_theta");
  if (!keys.partial.empty()) {
    names.push_back(keys.partial);
    names.push_back("partial_rotary_factor");
  }
  return {std::move(names), read, write};
}

ConfigKey rotary_dim(int64_t absent) {
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    m.positions = Positions::kRotary;
    if (in.contains("rotary_dim") && in.find("rotary_dim") == nullptr) {
      in.unsupported("rotary_dim = null: turns the width as a whole, not heads; not supported here");
    }
    m.rope.dims = in.integer("rotary_dim", absent);
    if (m.rope.dims < 2 || m.rope.dims > m.head_dim) {
      in.invalid(fmt::format("rotary_dim = {} must be at least 2 and at most the {} channels of a head", m.rope.dims,
                             m.head_dim));
    }
  };
  return {{"rotary_dim"}, read, [](const ModelConfig& m, ordered_json& out) { out["rotary_dim"] = rotary_dims(m); }};
}

// --- windows
// ------------------------------------------------------------------------------------------------------------

ConfigKey sliding_window(int64_t absent) {
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    const bool none = in.contains("sliding_window") && in.find("sliding_window") == nullptr;
    m.sliding_window = none ? 0 : in.integer("sliding_window", absent);
    if (m.sliding_window < 0) in.invalid(fmt::format("sliding_window = {} must be positive", m.sliding_window));
  };
  const auto write = [](const ModelConfig& m, ordered_json& out) {
    out["sliding_window"] = m.sliding_window > 0 ? ordered_json(m.sliding_window) : ordered_json();
  };
  return {{"sliding_window"}, read, write};
}

ConfigKey windowed_layers() {
  const auto read = [](ConfigReader& in, ModelConfig& m) {
    const int64_t window = in.integer("sliding_window", 4096), first = in.integer("max_window_layers", 28);
    std::vector<int64_t> windowed;
    if (const json* types = in.find("layer_types"); types != nullptr) {
      if (!types->is_array() || static_cast<int64_t>(types->size()) != m.layers) {
        return in.invalid(fmt::format("layer_types must be a list of {} strings", m.layers));
      }
      for (int64_t layer = 0; layer < m.layers; ++layer) {
        const json& type = (*types)[layer];
        if (type == "sliding_attention") {
          windowed.push_back(layer);
        } else if (type != "full_attention") {
          return in.unsupported(fmt::format("layer_types[{}] = {}: known are \"full_attention\", \"sliding_attention\"",
                                            layer, type.dump()));
        }
      }
    } else {
      for (int64_t layer = std::max<int64_t>(first, 0); layer < m.layers; ++layer) windowed.push_back(layer);
    }
    if (!in.boolean("use_sliding_window", false)) windowed.clear();
    if (windowed.empty()) return;
    if (window < 1) return in.invalid(fmt::format("sliding_window = {} must be positive", window));
    m.sliding_window = window;
    m.window_layers = windowed;
  };
  const auto write = [](const ModelConfig& m, ordered_json& out) {
    const bool on = m.sliding_window > 0;
    // The class can say "from this layer on" in both lines; anything else it cannot, which reading again shows.
    const int64_t first = !on ? m.layers : m.window_layers.empty() ? 0 : m.window_layers.front();
    out["use_sliding_window"] = on;
    out["sliding_window"] = on ? ordered_json(m.sliding_window) : ordered_json();
    out["max_window_layers"] = first;
  };
  return {{"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}, read, write};
}

}  // namespace cairn::convert
