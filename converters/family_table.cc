#include "converters/family_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "runtime/json/json.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {

using nlohmann::json;
using nlohmann::ordered_json;

const json* ConfigReader::find(std::string_view key) const {
  const auto it = config_.find(key);
  return it == config_.end() || it->is_null() ? nullptr : &*it;
}

namespace {

/// A number that is none of NaN and the infinities, which Python writes too.
bool is_finite(const json& value) { return value.is_number() && std::isfinite(value.get<double>()); }

/// 16, or 16.0 as some programs write it.
std::optional<int64_t> whole_number(const json& value) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX) return std::nullopt;
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
  constexpr int64_t kMost = int64_t{1} << 31;  // sums and products of two stay within 64 bits
  const std::optional<int64_t> whole = whole_number(*value);
  if (whole && *whole >= -kMost && *whole <= kMost) return *whole;
  if (whole) {
    invalid(fmt::format("{} = {} is out of range", key, *whole));
  } else {
    wrong(key, "a whole number", *value);
  }
  return fallback;
}

double ConfigReader::number(std::string_view key, double fallback) {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (is_finite(*value)) return value->get<double>();
  if (value->is_number()) {
    invalid(fmt::format("{} = {} must be a finite number", key, value->get<double>()));
  } else {
    wrong(key, "a number", *value);
  }
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
  invalid(fmt::format("{} must be {}, got {}", key, expected, json_text(found)));
}

// --- sizes, numbers, switches
// -------------------------------------------------------------------------------------------

/// Refused here, not only when all is read (family.cc): a later key may go through the layers one by one.
int64_t read_size(ConfigReader& in, std::string_view name, Size field, int64_t absent) {
  const int64_t value = in.integer(name, absent);
  const auto* const bound = std::ranges::find(kSizeBounds, field, &SizeBound::field);
  RT_CHECK(bound != std::end(kSizeBounds), "{} has no bound", name);
  if (in.find(name) == nullptr || (value >= 1 && value <= bound->most)) return value;
  in.invalid(fmt::format("{} = {} is out of range, 1 to {}", name, value, bound->most));
  return absent;
}

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
  out.may_keep = [](std::string_view, const json&) { return true; };  // null is the class's own default
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

ConfigKey factor(std::string_view name, double ModelConfig::*field, double absent) {
  ConfigKey out = number(name, field, absent);
  out.read = [=, plain = out.read](ConfigReader& in, ModelConfig& m) {
    plain(in, m);
    if (!(m.*field > 0)) in.unsupported(fmt::format("{} = {}: factors are above 0 here", name, m.*field));
  };
  return out;
}

ConfigKey bound(std::string_view name, double ModelConfig::*field, double absent) {
  return {{name},
          [=](ConfigReader& in, ModelConfig& m) {
            m.*field = in.number(name, in.contains(name) ? 0 : absent);
            if (in.find(name) != nullptr && !(m.*field > 0)) {
              in.unsupported(fmt::format("{} = {}: it must be above 0, or null for none", name, m.*field));
            }
          },
          [=](const ModelConfig& m, ordered_json& out) {
            out[std::string(name)] = m.*field > 0 ? ordered_json(m.*field) : ordered_json();
          }};
}

namespace {

/// A whole number as an integer: classes keep what they are given.
ordered_json shortest(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e15) return static_cast<int64_t>(value);
  return value;
}

/// A number x with f(x) = wanted, for an f that falls; near `guess`, whole if that does.
template <typename F>
double inverse_of(double wanted, double guess, const F& f) {
  if (f(std::round(guess)) == wanted) return std::round(guess);
  double low = guess, high = guess;
  for (int tries = 0; tries < 8; ++tries) {
    if (f(low) == wanted) return low;
    if (f(high) == wanted) return high;
    low = std::nextafter(low, 0.0);
    high = std::nextafter(high, std::numeric_limits<double>::infinity());
  }
  return guess;
}

double one_by(double x) { return 1.0 / x; }
double one_by_root(double x) { return 1.0 / std::sqrt(x); }

}  // namespace

ConfigKey reciprocal(std::string_view name, double ModelConfig::*field, double absent) {
  return {{name},
          [=](ConfigReader& in, ModelConfig& m) {
            const double value = in.number(name, absent);
            if (!(value > 0)) in.unsupported(fmt::format("{} = {}: divisors are above 0 here", name, value));
            m.*field = one_by(value);
          },
          [=](const ModelConfig& m, ordered_json& out) {
            out[std::string(name)] = inverse_of(m.*field, one_by(m.*field), one_by);
          }};
}

ConfigKey query_scalar(double absent) {
  constexpr const char* kName = "query_pre_attn_scalar";
  return {{kName},
          [=](ConfigReader& in, ModelConfig& m) {
            const double value = in.number(kName, absent);
            if (!(value > 0)) in.unsupported(fmt::format("{} = {} must be above 0", kName, value));
            m.attention_scale = one_by_root(value);
          },
          [=](const ModelConfig& m, ordered_json& out) {
            const double scale = m.attention_scale;
            out[kName] =
                scale == 0 ? ordered_json(m.head_dim) : shortest(inverse_of(scale, 1.0 / (scale * scale), one_by_root));
          }};
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
            m.head_dim = read_size(in, "head_dim", &ModelConfig::head_dim, derived ? usual(m) : absent);
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

ConfigKey experts(std::string_view name, int64_t absent, int64_t absent_top_k, double absent_loss) {
  return experts({.count = name,
                  .alias = name == "num_experts" ? "num_local_experts" : "num_experts",
                  .absent = absent,
                  .absent_top_k = absent_top_k,
                  .absent_loss = absent_loss});
}

ConfigKey experts(ExpertKeys keys) {
  constexpr int64_t kMaxExperts = 1 << 16;  // as the recipe's schema has it
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    const int64_t other = keys.alias.empty() ? keys.absent : in.integer(keys.alias, keys.absent);
    m.moe.experts = in.integer(keys.count, other);
    if (!keys.alias.empty() && in.find(keys.alias) != nullptr && other != m.moe.experts) {
      in.invalid(fmt::format("{} = {} and {} = {} are two names of one number, and disagree", keys.count, m.moe.experts,
                             keys.alias, other));
    }
    m.moe.top_k = in.integer(keys.top_k, keys.absent_top_k);
    if (keys.absent_loss >= 0) {
      const double coefficient = in.number("router_aux_loss_coef", keys.absent_loss);
      if (in.boolean("output_router_logits", false)) m.moe.aux_loss = coefficient;
    }
    m.moe.aux_scope = AuxScope::kModel;
    if (m.moe.experts > kMaxExperts) {
      in.invalid(fmt::format("{} = {} is out of range, 1 to {}", keys.count, m.moe.experts, kMaxExperts));
    } else if (m.moe.experts < 1 || m.moe.top_k < 1 || m.moe.top_k > m.moe.experts) {
      in.invalid(fmt::format("{} = {} of {} = {}: each token takes at least one expert and at most all", keys.top_k,
                             m.moe.top_k, keys.count, m.moe.experts));
    }
  };
  const auto write = [=](const ModelConfig& m, ordered_json& out) {
    out[std::string(keys.count)] = m.moe.experts;
    out[std::string(keys.top_k)] = m.moe.top_k;
    if (keys.absent_loss < 0) return;
    const bool balances = m.moe.aux_loss > 0 && m.moe.aux_scope == AuxScope::kModel;
    out["router_aux_loss_coef"] = m.moe.aux_loss > 0 ? m.moe.aux_loss : keys.absent_loss;
    out["output_router_logits"] = balances;  // which switches the loss on
  };
  std::vector<std::string_view> names = {keys.count, keys.top_k};
  if (!keys.alias.empty()) names.push_back(keys.alias);
  if (keys.absent_loss >= 0) names.insert(names.end(), {"router_aux_loss_coef", "output_router_logits"});
  return {std::move(names), read, write};
}

ConfigKey renormalised_experts(bool absent) {
  return {{"norm_topk_prob"},
          [=](ConfigReader& in, ModelConfig& m) { m.moe.renormalise = in.boolean("norm_topk_prob", absent); },
          [](const ModelConfig& m, ordered_json& out) { out["norm_topk_prob"] = m.moe.renormalise; }};
}

namespace {

constexpr int64_t kMaxFfn = 1 << 22;  // as the recipe's schema has it

/// A number of MoeConfig that has bounds.
int64_t read_within(ConfigReader& in, std::string_view name, int64_t absent, int64_t least, int64_t most) {
  const int64_t value = in.integer(name, absent);
  if (value >= least && value <= most) return value;
  in.invalid(fmt::format("{} = {} is out of range, {} to {}", name, value, least, most));
  return absent;
}

}  // namespace

ConfigKey expert_width(std::string_view name, int64_t absent, int64_t unused) {
  return {{name},
          [=](ConfigReader& in, ModelConfig& m) { m.moe.ffn = read_within(in, name, absent, 1, kMaxFfn); },
          [=](const ModelConfig& m, ordered_json& out) {
            out[std::string(name)] = expert_ffn(m);
            if (!has_dense_layers(m) && unused > 0) out["intermediate_size"] = unused;
          }};
}

ConfigKey sparse_steps() {
  constexpr const char *kStep = "decoder_sparse_step", *kLayers = "mlp_only_layers";
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    const int64_t step = in.integer(kStep, 1);
    if (step < 1) return in.invalid(fmt::format("{} = {} must be positive", kStep, step));
    std::vector<bool> dense(static_cast<size_t>(m.layers));
    for (int64_t layer = 0; layer < m.layers; ++layer) dense[static_cast<size_t>(layer)] = (layer + 1) % step != 0;
    if (const json* named = in.find(kLayers)) {
      if (!named->is_array())
        return in.invalid(fmt::format("{} must be a list of layers, got {}", kLayers, json_text(*named)));
      for (const json& layer : *named) {
        if (!layer.is_number_integer()) {
          return in.invalid(fmt::format("{} must be a list of layers, got {}", kLayers, json_text(*named)));
        }
        const auto number = layer.get<int64_t>();  // one that does not exist changes nothing in the class
        if (number >= 0 && number < m.layers) dense[static_cast<size_t>(number)] = true;
      }
    }
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      if (dense[static_cast<size_t>(layer)]) m.moe.dense_layers.push_back(layer);
    }
    if (std::ssize(m.moe.dense_layers) == m.layers) {
      in.unsupported(fmt::format("{} = {} and {} leave no layer with experts: a dense model of another family", kStep,
                                 step, kLayers));
    }
  };
  const auto write = [=](const ModelConfig& m, ordered_json& out) {
    out[kStep] = 1;
    out[kLayers] = m.moe.dense_layers;
  };
  return {{kStep, kLayers}, read, write};
}

ConfigKey first_dense(std::string_view name, int64_t absent) {
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    const int64_t count = std::max<int64_t>(0, in.integer(name, absent));
    if (count >= m.layers) {
      in.unsupported(fmt::format("{} = {} of {} layers: none has experts", name, count, m.layers));
      return;
    }
    for (int64_t layer = 0; layer < count; ++layer) m.moe.dense_layers.push_back(layer);
  };
  const auto write = [=](const ModelConfig& m, ordered_json& out) {
    int64_t count = 0;  // of the first ones; the class has no other dense layers, which reading again shows
    while (count < m.layers && !has_experts(m, count)) ++count;
    out[std::string(name)] = count;
  };
  return {{name}, read, write};
}

ConfigKey shared_experts(std::string_view name, int64_t absent) {
  return {{name},
          [=](ConfigReader& in, ModelConfig& m) { m.moe.shared_experts = read_within(in, name, absent, 0, 1 << 10); },
          [=](const ModelConfig& m, ordered_json& out) { out[std::string(name)] = shared_ffn(m) / expert_ffn(m); }};
}

ConfigKey further_tokens(std::string_view name) {
  return {{name},
          [=](ConfigReader& in, ModelConfig& m) {
            // The class of transformers 5 takes one, and leaves it out of config.json.
            m.mtp.depth = read_within(in, name, in.line() == 5 ? 1 : 0, 0, 16);
          },
          [=](const ModelConfig& m, ordered_json& out) { out[std::string(name)] = m.mtp.depth; }};
}

std::vector<ConfigKey> grouped_router(GroupedRouter absent) {
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    m.moe.router = RouterKind::kSigmoid;
    m.moe.choice_bias = true;
    m.moe.groups = read_within(in, "n_group", absent.groups, 1, 64);
    m.moe.groups_per_token = read_within(in, "topk_group", absent.groups_per_token, 1, 64);
    m.moe.scale = in.number("routed_scaling_factor", absent.scale);
    if (!(m.moe.scale > 0)) in.unsupported(fmt::format("routed_scaling_factor = {} must be above 0", m.moe.scale));
    if (m.moe.experts % m.moe.groups != 0 || m.moe.groups_per_token > m.moe.groups ||
        m.moe.top_k > m.moe.experts / m.moe.groups * m.moe.groups_per_token) {
      in.invalid(
          fmt::format("{} experts in n_group = {} groups, topk_group = {} of them a token: no place for {} experts "
                      "a token",
                      m.moe.experts, m.moe.groups, m.moe.groups_per_token, m.moe.top_k));
    } else if (m.moe.experts / m.moe.groups < 2) {
      in.unsupported(
          fmt::format("n_group = {} of {} experts: the class adds a group's two best", m.moe.groups, m.moe.experts));
    }
  };
  const auto write = [](const ModelConfig& m, ordered_json& out) {
    out["n_group"] = m.moe.groups;
    out["topk_group"] = m.moe.groups_per_token;
    out["routed_scaling_factor"] = m.moe.scale;
  };
  return {{{"n_group", "topk_group", "routed_scaling_factor"}, read, write}};
}

ConfigKey refuse_unless(std::string_view name, json value) {
  const auto read = [=](ConfigReader& in, ModelConfig&) {
    const json* found = in.find(name);
    if (found == nullptr || *found == value) return;
    in.unsupported(fmt::format("{} = {} is not supported here, {} is", name, json_text(*found), json_text(value)));
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
  if (!is_finite(*inner)) {
    in.invalid(fmt::format("rope_parameters.{} must be a number, got {}", key, json_text(*inner)));
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
                  place, json_text(*part)));
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
  double unset;      // not written when the field has this value
  double least = 0;  // as the recipe's schema has it
  bool above = true;
};
constexpr ScalingKey kScalingKeys[] = {
    {RopeScaling::kLinear, "factor", &RopeConfig::factor, true, -1, 1, false},
    {RopeScaling::kDynamic, "factor", &RopeConfig::factor, true, -1, 1, false},
    {RopeScaling::kLlama3, "factor", &RopeConfig::factor, true, -1, 1, false},
    {RopeScaling::kLlama3, "low_freq_factor", &RopeConfig::low_freq_factor, true, -1},
    {RopeScaling::kLlama3, "high_freq_factor", &RopeConfig::high_freq_factor, true, -1},
    {RopeScaling::kYarn, "factor", &RopeConfig::factor, true, -1, 1, false},
    {RopeScaling::kYarn, "attention_factor", &RopeConfig::attention_factor, false, 0},
    {RopeScaling::kYarn, "beta_fast", &RopeConfig::beta_fast, false, 32},
    {RopeScaling::kYarn, "beta_slow", &RopeConfig::beta_slow, false, 1},
    {RopeScaling::kYarn, "mscale", &RopeConfig::mscale, false, 0, 0, false},
    {RopeScaling::kYarn, "mscale_all_dim", &RopeConfig::mscale_all_dim, false, 0, 0, false},
};

/// The context that a scaling extends. 5.x lets a top-level key win over the nested one, 4.x knows the nested one
/// alone.
void read_original_context(ConfigReader& in, const json& scaling, std::string_view place, ModelConfig& m) {
  constexpr std::string_view kKey = "original_max_position_embeddings";
  const int64_t outer = in.integer(kKey, 0);
  int64_t inner = 0;
  if (const auto value = scaling.find(kKey); value != scaling.end() && !value->is_null()) {
    const std::optional<int64_t> whole = whole_number(*value);
    if (!whole) return in.invalid(fmt::format("{}.{} must be a whole number, got {}", place, kKey, json_text(*value)));
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

/// The kind of a scaling: rope_type, or type, its older name. Nothing where it is no string, which is reported.
std::optional<std::string> scaling_type(ConfigReader& in, const json& scaling, std::string_view place,
                                        const RopeKeys& keys) {
  std::optional<std::string> newer, old;
  for (const auto& [out, name] : {std::pair(&newer, "rope_type"), {&old, "type"}}) {
    const auto found = scaling.find(name);
    if (found == scaling.end() || found->is_null()) continue;
    if (!found->is_string()) {
      in.invalid(fmt::format("{}.{} must be a string, got {}", place, name, json_text(*found)));
      return std::nullopt;
    }
    *out = found->get<std::string>();
    const bool older = keys.longrope_context > 0 && (**out == "su" || **out == "yarn");  // Phi-3's names of longrope
    if (older) *out = "longrope";
  }
  if (!newer && !old) return "default";
  if (!newer || !old || *newer == *old) return newer ? newer : old;
  if (keys.old_type_counts && place == "rope_scaling")
    return by_line(in, fmt::format("{}.rope_type and {}.type disagree", place, place), *newer, *old);
  in.note(fmt::format("{}.rope_type = {} and {}.type = {} disagree; transformers reads rope_type", place, *newer, place,
                      *old));
  return newer;
}

void read_scaling(ConfigReader& in, const json& scaling, std::string_view place, const RopeKeys& keys, ModelConfig& m) {
  const std::optional<std::string> stated = scaling_type(in, scaling, place, keys);
  if (!stated) return;
  const std::string& type = *stated;
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
    } else if (!is_finite(*value)) {
      in.invalid(fmt::format("{}.{} must be a number, got {}", place, key.name, json_text(*value)));
    } else {
      rope.*key.field = value->get<double>();
      const bool bounded = key.above ? rope.*key.field > key.least : rope.*key.field >= key.least;
      if (!bounded) {
        in.unsupported(fmt::format("{}.{} = {} must be {} {}", place, key.name, rope.*key.field,
                                   key.above ? "above" : "at least", key.least));
      }
    }
  }
  if (rope.scaling == RopeScaling::kLlama3 || rope.scaling == RopeScaling::kYarn) {
    read_original_context(in, scaling, place, m);
  }
  if (rope.scaling != RopeScaling::kYarn || json_field(scaling, "truncate").is_null()) return;
  if (!scaling["truncate"].is_boolean()) {
    return in.invalid(fmt::format("{}.truncate must be true or false, got {}", place, json_text(scaling["truncate"])));
  }
  rope.truncate = scaling["truncate"].get<bool>();
}

/// A list of longrope: a divisor for each pair of channels that turns.
std::vector<double> read_divisors(ConfigReader& in, const json& scaling, const std::string& place, const char* name,
                                  const ModelConfig& m) {
  const auto list = scaling.find(name);
  const bool numbers = list != scaling.end() && list->is_array() &&
                       std::ranges::all_of(*list, [](const json& v) { return is_finite(v) && v.get<double>() > 0; });
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
void read_longrope(ConfigReader& in, const json& scaling, const std::string& place, const RopeKeys& keys,
                   ModelConfig& m) {
  constexpr const char* kContext = "original_max_position_embeddings";
  const std::optional<std::string> type = scaling_type(in, scaling, place, keys);
  if (!type || *type == "default") return;
  if (*type != "longrope") {
    return in.unsupported(
        fmt::format("{}.rope_type \"{}\": this family knows \"default\" and \"longrope\"", place, *type));
  }
  for (const char* key : {"factor", "attention_factor"}) {
    const auto stated = scaling.find(key);
    if (stated == scaling.end() || stated->is_null()) continue;
    in.unsupported(
        fmt::format("{}.{} = {}: transformers 4 refuses this key; without it the factor is "
                    "max_position_embeddings divided by {}",
                    place, key, json_text(*stated), kContext));
  }
  const int64_t original = in.integer(kContext, keys.longrope_context);
  if (const auto inner = scaling.find(kContext); inner != scaling.end() && *inner != original) {
    return in.invalid(
        fmt::format("{} = {} and {}.{} = {} disagree", kContext, original, place, kContext, json_text(*inner)));
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

/// Whether transformers 4 finds all that it looks for in a rope_scaling: a kind, and the numbers of one that has any.
bool opens_in_4(const json& scaling) {
  if (!scaling.is_object()) return false;
  const json newer = json_field(scaling, "rope_type"), old = scaling.contains("type") ? scaling["type"] : newer;
  return newer.is_null() ? old.is_string() && old != "default" : newer == old && newer != "default";
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
      if (!value->is_object()) return in.invalid(fmt::format("{} must be an object, got {}", name, json_text(*value)));
      for (const auto& [key, inner] : value->items()) {
        if (!inner.is_object()) continue;
        return in.unsupported(fmt::format("{}.{}: settings by layer type are not supported here", name, key));
      }
    }
    const json nested = parameters != nullptr ? *parameters : json::object();
    double absent_base = keys.absent_base;
    const auto stated_in = [](const json* object) {
      return object != nullptr && object->contains("rope_theta") && !(*object)["rope_theta"].is_null();
    };
    if (keys.absent_base_5 > 0 && in.find(keys.base) == nullptr && !stated_in(parameters) && !stated_in(scaling)) {
      absent_base = by_line(in, fmt::format("{} is absent", keys.base), keys.absent_base_5, keys.absent_base);
    }
    m.rope_theta = rope_number(in, nested, keys.base, "rope_theta", absent_base);
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
        if (is_finite(*value)) return by_line(in, fmt::format("rope_scaling.{}", key), value->get<double>(), outer);
        in.invalid(fmt::format("rope_scaling.{} must be a number, got {}", key, json_text(*value)));
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
      if (keys.longrope_context > 0) return read_longrope(in, from, place, keys, m);
      read_scaling(in, from, place, keys, m);
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
  const auto may_keep = [=](std::string_view name, const json& value) {
    return name == "rope_scaling" ? !keys.own_spelling && opens_in_4(value) : !value.is_null();
  };
  return {std::move(names), read, write, may_keep};
}

ConfigKey rope(RopeKeys keys, WindowRope window) {
  const ConfigKey plain = rope(keys);
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    constexpr const char* kFull = "full_attention";
    constexpr const char* kSliding = "sliding_attention";
    const json* parameters = in.find("rope_parameters");
    const bool by_layer = parameters != nullptr && parameters->is_object() &&
                          (parameters->contains(kFull) || parameters->contains(kSliding));
    if (!by_layer) {
      plain.read(in, m);
      m.window_rope_theta = window.window_base.empty() ? m.rope_theta : in.number(window.window_base, window.absent);
      if (!(m.window_rope_theta > 0)) {
        in.unsupported(fmt::format("{} = {} must be above 0", window.window_base, m.window_rope_theta));
      }
      if (window.fixed_5 > 0 && window.fixed_5 != m.window_rope_theta) {
        in.note(
            fmt::format("{} = {} is for all layers, as transformers 4 takes it; 5.x takes {} in layers with a "
                        "window",
                        keys.base, m.rope_theta, window.fixed_5));
      }
      return;
    }
    for (const char* kind : {kFull, kSliding}) {
      if (parameters->contains(kind) && (*parameters)[kind].is_object()) continue;
      return in.invalid(fmt::format("rope_parameters.{} must be an object: the layers of either kind have one", kind));
    }
    json flat = in.config();
    flat["rope_parameters"] = (*parameters)[kFull];
    ConfigReader full(flat);
    plain.read(full, m);
    for (const std::string& note : full.notes()) in.note(note);
    if (const Status status = full.status(); !status.ok()) {
      return status.error().code == ErrorCode::kInvalidInput ? in.invalid(status.error().message)
                                                             : in.unsupported(status.error().message);
    }
    const json& sliding = (*parameters)[kSliding];
    if (sliding.contains("rope_type") && sliding["rope_type"] != "default") {
      return in.unsupported(fmt::format("rope_parameters.{}.rope_type = {}: layers with a window have no scaling here",
                                        kSliding, json_text(sliding["rope_type"])));
    }
    if (!sliding.contains("rope_theta") || !is_finite(sliding["rope_theta"])) {
      return in.invalid(fmt::format("rope_parameters.{}.rope_theta must be a number", kSliding));
    }
    m.window_rope_theta = sliding["rope_theta"].get<double>();
    if (!(m.window_rope_theta > 0)) {
      in.unsupported(fmt::format("rope_parameters.{}.rope_theta = {} must be above 0", kSliding, m.window_rope_theta));
    }
    if (!window.window_base.empty() && in.number(window.window_base, m.window_rope_theta) != m.window_rope_theta) {
      in.invalid(fmt::format("{} = {} and rope_parameters.{}.rope_theta = {} disagree", window.window_base,
                             in.number(window.window_base, 0), kSliding, m.window_rope_theta));
    }
  };
  const auto write = [=](const ModelConfig& m, ordered_json& out) {
    plain.write(m, out);
    const double theta = m.window_rope_theta > 0 ? m.window_rope_theta : m.rope_theta;
    if (!window.window_base.empty()) out[std::string(window.window_base)] = theta;
    const bool one_reading = window.window_base.empty() ? theta == m.rope_theta && theta == window.fixed_5 : true;
    if (one_reading) return;
    ordered_json full =
        m.rope.scaling == RopeScaling::kNone ? ordered_json{{"rope_type", "default"}} : ordered_json(scaling_of(m));
    full["rope_theta"] = m.rope_theta;
    out["rope_parameters"] = {{"full_attention", full},
                              {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", theta}}}};
  };
  std::vector<std::string_view> names = plain.names;
  if (!window.window_base.empty()) names.push_back(window.window_base);
  return {std::move(names), read, write, plain.may_keep};
}

ConfigKey turning_layers(bool may_be_empty) {
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    const int64_t interval = in.integer("no_rope_layer_interval", 4);
    const json* stated = in.find("no_rope_layers");
    if (may_be_empty && stated != nullptr && stated->is_array() && stated->empty()) stated = nullptr;
    if (interval < 1) return in.invalid(fmt::format("no_rope_layer_interval = {} must be positive", interval));
    if (stated != nullptr && (!stated->is_array() || static_cast<int64_t>(stated->size()) != m.layers)) {
      return in.invalid(fmt::format("no_rope_layers must be a list of {} numbers, 1 or 0", m.layers));
    }
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      const json turns = stated == nullptr ? json((layer + 1) % interval != 0 ? 1 : 0) : (*stated)[layer];
      if (turns != 0 && turns != 1) {
        return in.invalid(fmt::format("no_rope_layers[{}] = {} must be 1 or 0", layer, json_text(turns)));
      }
      if (turns == 0) m.nope_layers.push_back(layer);
    }
  };
  const auto write = [](const ModelConfig& m, ordered_json& out) {
    ordered_json turns = ordered_json::array();
    for (int64_t layer = 0; layer < m.layers; ++layer) turns.push_back(has_rotary(m, layer) ? 1 : 0);
    out["no_rope_layers"] = turns;
    out["no_rope_layer_interval"] = 4;
  };
  return {{"no_rope_layers", "no_rope_layer_interval"}, read, write};
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

namespace {

/// Layers that layer_types calls sliding_attention; nothing where the key is absent.
std::optional<std::vector<int64_t>> sliding_layers(ConfigReader& in, const ModelConfig& m) {
  const json* types = in.find("layer_types");
  if (types == nullptr) return std::nullopt;
  std::vector<int64_t> out;
  if (!types->is_array() || static_cast<int64_t>(types->size()) != m.layers) {
    in.invalid(fmt::format("layer_types must be a list of {} strings", m.layers));
    return out;
  }
  for (int64_t layer = 0; layer < m.layers; ++layer) {
    const json& type = (*types)[layer];
    if (type == "sliding_attention") {
      out.push_back(layer);
    } else if (type != "full_attention") {
      in.unsupported(fmt::format("layer_types[{}] = {}: known are \"full_attention\", \"sliding_attention\"", layer,
                                 json_text(type)));
      return out;
    }
  }
  return out;
}

}  // namespace

ConfigKey windows_by_pattern(WindowPattern pattern) {
  const auto read = [=](ConfigReader& in, ModelConfig& m) {
    const bool null = in.contains("sliding_window") && in.find("sliding_window") == nullptr;
    std::optional<std::vector<int64_t>> windowed = sliding_layers(in, m);
    if (null) {
      if (!pattern.may_be_null) return in.unsupported("sliding_window = null: transformers fails on it");
      if (windowed && !windowed->empty()) in.invalid("layer_types has sliding_attention, and sliding_window is null");
      return;
    }
    if (!windowed) {
      const int64_t every = pattern.pattern.empty() ? pattern.every : in.integer(pattern.pattern, pattern.every);
      if (every < 1) return in.invalid(fmt::format("{} = {} must be positive", pattern.pattern, every));
      windowed.emplace();
      for (int64_t layer = 0; layer < m.layers; ++layer) {
        if ((layer + 1) % every != 0) windowed->push_back(layer);
      }
    }
    const int64_t window = in.integer("sliding_window", pattern.window);
    if (window < 1) return in.invalid(fmt::format("sliding_window = {} must be positive", window));
    if (!windowed->empty()) {
      m.sliding_window = window;
      m.window_layers = *windowed;
    }
    for (int64_t layer = 0; layer < m.layers && pattern.full_is_nope; ++layer) {
      if (std::ranges::find(*windowed, layer) == windowed->end()) m.nope_layers.push_back(layer);
    }
  };
  const auto write = [=](const ModelConfig& m, ordered_json& out) {
    const bool none = pattern.may_be_null && m.sliding_window == 0 && m.nope_layers.empty();
    ordered_json types = ordered_json::array();
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      types.push_back(has_window(m, layer) ? "sliding_attention" : "full_attention");
    }
    out["sliding_window"] = none                   ? ordered_json()
                            : m.sliding_window > 0 ? ordered_json(m.sliding_window)
                                                   : ordered_json(pattern.window);
    // Of the classes with such a key the one that takes a null window keeps it, though layer_types says all.
    if (pattern.may_be_null && !pattern.pattern.empty()) out[std::string(pattern.pattern)] = pattern.every;
    out["layer_types"] = types;  // which counts, whatever the pattern
  };
  std::vector<std::string_view> names = {"sliding_window", "layer_types", "_sliding_window_pattern"};
  if (!pattern.pattern.empty()) names.push_back(pattern.pattern);
  return {std::move(names), read, write};
}

ConfigKey windowed_layers() {
  const auto read = [](ConfigReader& in, ModelConfig& m) {
    const int64_t window = in.integer("sliding_window", 4096), first = in.integer("max_window_layers", 28);
    std::vector<int64_t> windowed;
    if (const auto stated = sliding_layers(in, m)) {
      windowed = *stated;
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
    int64_t first = m.layers;  // from which on all have a window
    while (on && first > 0 && has_window(m, first - 1)) --first;
    out["use_sliding_window"] = on;
    out["sliding_window"] = on ? ordered_json(m.sliding_window) : ordered_json();
    out["max_window_layers"] = first;
    bool others = false;  // which only layer_types says, and both lines read before max_window_layers
    for (int64_t layer = 0; layer < first; ++layer) others = others || has_window(m, layer);
    if (!others) return;
    ordered_json types = ordered_json::array();
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      types.push_back(has_window(m, layer) ? "sliding_attention" : "full_attention");
    }
    out["layer_types"] = std::move(types);
  };
  return {{"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}, read, write};
}

}  // namespace cairn::convert
