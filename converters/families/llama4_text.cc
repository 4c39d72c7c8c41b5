// The text model of Llama 4: chunks, layers that do not turn, experts that read their input times its weight. Source:
// transformers models/llama4.
#include <fmt/format.h>

#include <algorithm>

#include "converters/llama_like.h"
#include "runtime/json/json.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::json;
using nlohmann::ordered_json;

ModelConfig base() {
  M m = llama_like_base();
  m.rope.pairs = RotaryPairs::kInterleaved;
  m.moe.router = RouterKind::kSigmoid;
  m.moe.renormalise = false;
  m.moe.scale_input = true;
  m.moe.shared_experts = 1;
  return m;
}

ConfigKey normed_heads() {
  return {{"use_qk_norm"},
          [](ConfigReader& in, M& m) { m.qk_norm = in.boolean("use_qk_norm", true) ? QkNorm::kL2 : QkNorm::kNone; },
          [](const M& m, ordered_json& out) { out["use_qk_norm"] = m.qk_norm == QkNorm::kL2; }};
}

/// layer_types says which layers have chunks; absent: those that turn.
ConfigKey chunks() {
  constexpr int64_t kAbsent = 8192;
  constexpr const char *kFull = "full_attention", *kChunked = "chunked_attention";
  const auto read = [=](ConfigReader& in, M& m) {
    const json* types = in.find("layer_types");
    if (types != nullptr && (!types->is_array() || static_cast<int64_t>(types->size()) != m.layers)) {
      return in.invalid(fmt::format("layer_types must be a list of {} strings", m.layers));
    }
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      const json type = types == nullptr ? json(has_rotary(m, layer) ? kChunked : kFull) : (*types)[layer];
      if (type == kChunked) {
        m.chunk_layers.push_back(layer);
      } else if (type != kFull) {
        return in.unsupported(
            fmt::format("layer_types[{}] = {}: known are \"{}\", \"{}\"", layer, json_text(type), kFull, kChunked));
      }
    }
    if (m.chunk_layers.empty()) return;
    if (in.contains("attention_chunk_size") && in.find("attention_chunk_size") == nullptr) {
      return in.unsupported("attention_chunk_size = null: transformers 4 fails on it; let layer_types name no chunks");
    }
    m.attention_chunk = in.integer("attention_chunk_size", kAbsent);
    if (m.attention_chunk < 1 || m.attention_chunk > 1 << 24) {
      in.invalid(fmt::format("attention_chunk_size = {} is out of range, 1 to {}", m.attention_chunk, 1 << 24));
    }
  };
  const auto write = [=](const M& m, ordered_json& out) {
    ordered_json types = ordered_json::array();
    for (int64_t layer = 0; layer < m.layers; ++layer) types.push_back(has_chunks(m, layer) ? kChunked : kFull);
    out["attention_chunk_size"] = m.attention_chunk > 0 ? m.attention_chunk : kAbsent;
    out["layer_types"] = types;
  };
  return {{"attention_chunk_size", "layer_types"}, read, write};
}

/// Of the layers that do not turn. Published files have numbers for true.
ConfigKey warm_queries() {
  constexpr const char *kOn = "attn_temperature_tuning", *kScale = "attn_scale", *kFloor = "floor_scale";
  const auto read = [=](ConfigReader& in, M& m) {
    const json* on = in.find(kOn);
    if (on != nullptr && !on->is_boolean() && !on->is_number()) {
      return in.invalid(fmt::format("{} must be true or false, got {}", kOn, json_text(*on)));
    }
    const double scale = in.number(kScale, 0.1), floor = in.number(kFloor, 8192);
    if (scale < 0) in.unsupported(fmt::format("{} = {}: below 0", kScale, scale));
    if (!(floor >= 1 && floor <= 1 << 24) || floor != static_cast<double>(static_cast<int64_t>(floor))) {
      return in.invalid(fmt::format("{} = {} must be a whole number, 1 to {}", kFloor, floor, 1 << 24));
    }
    const bool off = on != nullptr && (*on == false || *on == 0);
    if (off || m.nope_layers.empty()) return;
    m.temperature_scale = scale;
    m.temperature_floor = static_cast<int64_t>(floor);
  };
  const auto write = [=](const M& m, ordered_json& out) {
    const bool on = m.temperature_scale > 0;
    out[kOn] = on || m.nope_layers.empty();
    out[kScale] = on ? m.temperature_scale : 0.1;
    out[kFloor] = m.temperature_floor;
  };
  return {{kOn, kScale, kFloor}, read, write};
}

/// Absent: every interleave_moe_layer_step-th layer.
ConfigKey sparse_layers() {
  constexpr const char *kLayers = "moe_layers", *kStep = "interleave_moe_layer_step";
  const auto read = [=](ConfigReader& in, M& m) {
    const int64_t step = in.integer(kStep, 1);
    if (step < 1) return in.invalid(fmt::format("{} = {} must be positive", kStep, step));
    const json* stated = in.find(kLayers);
    const auto is_layer = [&](const json& value) {
      return value.is_number_integer() && value.get<int64_t>() >= 0 && value.get<int64_t>() < m.layers;
    };
    if (stated != nullptr && (!stated->is_array() || !std::ranges::all_of(*stated, is_layer))) {
      return in.invalid(fmt::format("{} must be a list of layers, 0 to {}", kLayers, m.layers - 1));
    }
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      const bool sparse =
          stated == nullptr ? (layer + 1) % step == 0 : std::ranges::find(*stated, json(layer)) != stated->end();
      if (!sparse) m.moe.dense_layers.push_back(layer);
    }
    if (std::ssize(m.moe.dense_layers) == m.layers) {
      in.unsupported(fmt::format("{} and {} leave no layer with experts", kLayers, kStep));
    }
  };
  const auto write = [=](const M& m, ordered_json& out) {
    ordered_json with = ordered_json::array();
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      if (has_experts(m, layer)) with.push_back(layer);
    }
    out[kLayers] = with;
    out[kStep] = 1;
  };
  return {{kLayers, kStep}, read, write};
}

/// The class has the keys and no loss.
ConfigKey unbalanced() {
  return {{"router_aux_loss_coef", "output_router_logits"}, nullptr, [](const M&, ordered_json& out) {
            out["router_aux_loss_coef"] = 0.001;
            out["output_router_logits"] = false;
          }};
}

std::string beyond_4(const M& m) {
  if (m.rope.scaling == RopeScaling::kNone || m.rope.scaling == RopeScaling::kLlama3) return "";
  return "4.x takes any rope_scaling of this family for llama3, and fails on this one";
}

constexpr auto kTensors = with_llama_rows({
    {"layers.*.mlp.gate.*", "model.layers.*.feed_forward.gate_proj.*"},
    {"layers.*.mlp.up.*", "model.layers.*.feed_forward.up_proj.*"},
    {"layers.*.mlp.down.*", "model.layers.*.feed_forward.down_proj.*"},
    {"layers.*.moe.router.weight", "model.layers.*.feed_forward.router.weight"},
    {.logical = "layers.*.moe.experts.#.{gate,up}.weight",
     .stored = "model.layers.*.feed_forward.experts.gate_up_proj",
     .transpose = true},
    {.logical = "layers.*.moe.experts.#.down.weight",
     .stored = "model.layers.*.feed_forward.experts.down_proj",
     .transpose = true},
    {"layers.*.moe.shared.gate.*", "model.layers.*.feed_forward.shared_expert.gate_proj.*"},
    {"layers.*.moe.shared.up.*", "model.layers.*.feed_forward.shared_expert.up_proj.*"},
    {"layers.*.moe.shared.down.*", "model.layers.*.feed_forward.shared_expert.down_proj.*"},
});

}  // namespace

Family llama4_text_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.vocab = 202048,
       .width = 5120,
       .ffn = 16384,
       .layers = 48,
       .heads = 40,
       .kv_heads = 8,
       .head_dim = 128,
       .context = 131072,
       .norm_eps = 1e-5,
       .rope = {.absent_base = 500000.0, .old_type_counts = false, .own_spelling = true},
       .ffn_key = "intermediate_size_mlp"},
      {only("attention_bias", false), turning_layers(true), normed_heads(), chunks(), warm_queries(),
       expert_width("intermediate_size", 8192, 0),
       experts({.count = "num_local_experts", .absent = 16, .absent_top_k = 1}), sparse_layers(), unbalanced()},
      {constant("router_jitter_noise", 0.0)});
  return llama_like({.model_type = "llama4_text",
                     .architecture = "Llama4ForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .beyond_4 = beyond_4});
}

}  // namespace cairn::convert
