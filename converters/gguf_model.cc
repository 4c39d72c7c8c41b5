#include "converters/gguf_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <optional>
#include <utility>

#include "converters/weights_folder.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

enum class Window { kNone, kKey, kPattern };

struct Architecture {
  std::string_view model_type, name;
  Activation activation = Activation::kSwiGlu;
  bool interleaved = false;   // channels 2i and 2i + 1 turn together
  bool fused_qkv = false;     // attn_qkv
  bool fused_gate = false;    // gate and up are ffn_up
  bool renormalised = false;  // weights of a token's experts
  Window window = Window::kNone;
  int64_t pattern = 0;             // kPattern: the last of each `pattern` layers has no window
  bool caps = false;               // scores and logits are always capped
  int64_t other_scale_layers = 0;  // a model of this depth divides scores by the root of width / heads
};

constexpr Architecture kArchitectures[] = {
    {"llama", "llama", Activation::kSwiGlu, true},
    {"mistral", "llama", Activation::kSwiGlu, true},
    {.model_type = "mixtral", .name = "llama", .interleaved = true, .renormalised = true},
    {"qwen2", "qwen2"},
    {"qwen2_moe", "qwen2moe"},
    {"qwen3", "qwen3"},
    {.model_type = "qwen3_moe", .name = "qwen3moe", .renormalised = true},
    {"gemma", "gemma", Activation::kGeGluTanh},
    {.model_type = "gemma2",
     .name = "gemma2",
     .activation = Activation::kGeGluTanh,
     .window = Window::kPattern,
     .pattern = 2,
     .caps = true,
     .other_scale_layers = 46},
    {.model_type = "gemma3_text",
     .name = "gemma3",
     .activation = Activation::kGeGluTanh,
     .window = Window::kPattern,
     .pattern = 6,
     .other_scale_layers = 62},
    {.model_type = "gpt2", .name = "gpt2", .activation = Activation::kGeluTanh, .fused_qkv = true},
    {.model_type = "phi3", .name = "phi3", .fused_qkv = true, .fused_gate = true, .window = Window::kKey},
    {"starcoder2", "starcoder2", Activation::kGeluTanh},
};

const Architecture* find(const Family& family) {
  const auto* const found = std::ranges::find(kArchitectures, family.model_type, &Architecture::model_type);
  return found == std::end(kArchitectures) ? nullptr : found;
}

/// A layer's tensors, without the layer, the expert and ".weight" or ".bias".
constexpr std::pair<std::string_view, std::string_view> kLayerNames[] = {
    {"attn_norm", "attn_norm"},
    {"attn.q", "attn_q"},
    {"attn.k", "attn_k"},
    {"attn.v", "attn_v"},
    {"attn.q_norm", "attn_q_norm"},
    {"attn.k_norm", "attn_k_norm"},
    {"attn.o", "attn_output"},
    {"attn_out_norm", "post_attention_norm"},
    {"mlp_norm", "ffn_norm"},
    {"mlp.gate", "ffn_gate"},
    {"mlp.up", "ffn_up"},
    {"mlp.down", "ffn_down"},
    {"mlp_out_norm", "post_ffw_norm"},
    {"moe.router", "ffn_gate_inp"},
    {"moe.experts.gate", "ffn_gate_exps"},
    {"moe.experts.up", "ffn_up_exps"},
    {"moe.experts.down", "ffn_down_exps"},
    {"moe.shared.gate", "ffn_gate_shexp"},
    {"moe.shared.up", "ffn_up_shexp"},
    {"moe.shared.down", "ffn_down_shexp"},
    {"moe.shared_gate", "ffn_gate_inp_shexp"},
};
constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {{"embed.tokens", "token_embd.weight"},
                                                                         {"embed.positions", "position_embd.weight"},
                                                                         {"final_norm.weight", "output_norm.weight"},
                                                                         {"final_norm.bias", "output_norm.bias"},
                                                                         {"head.weight", "output.weight"}};

/// A logical tensor's name in the file; empty: it has none.
std::string name_of(const Architecture& to, const TensorSpec& tensor) {
  for (const auto& [logical, name] : kOtherNames) {
    if (tensor.name == logical) return std::string(name);
  }
  const std::string layer = fmt::format("layers.{}.", tensor.layer);
  if (!tensor.name.starts_with(layer)) return {};
  std::string_view rest = std::string_view(tensor.name).substr(layer.size());
  const size_t dot = rest.rfind('.');
  const std::string_view suffix = rest.substr(dot);
  std::string stem(rest.substr(0, dot));
  if (const std::string expert = fmt::format("experts.{}.", tensor.expert); stem.starts_with("moe." + expert)) {
    stem.replace(4, expert.size(), "experts.");
  }
  for (const auto& [logical, own] : kLayerNames) {
    if (stem != logical) continue;
    std::string_view name = own;
    if (to.fused_qkv && (name == "attn_q" || name == "attn_k" || name == "attn_v")) name = "attn_qkv";
    if (to.fused_gate && name == "ffn_gate") name = "ffn_up";
    return fmt::format("blk.{}.{}{}", tensor.layer, name, suffix);
  }
  return {};
}

/// Router, learned positions and whatever has one dim.
bool is_kept_whole(const GgufTensor& tensor) {
  return tensor.shape.size() == 1 || tensor.name == "position_embd.weight" ||
         tensor.name.find(".ffn_gate_inp") != std::string::npos;
}

class Builder {
 public:
  Builder(const Architecture& to, const WeightSource& source, GgufType type, GgufKeys& keys)
      : to_(to), source_(source), m_(source.model()), type_(type), keys_(keys) {}

  Result<GgufModel> build() {
    RT_TRY(check());
    RT_TRY(add_tensors());
    put_keys();
    return std::move(out_);
  }

 private:
  Error no_place(std::string_view what) const {
    return unsupported(fmt::format("GGUF's architecture {} has no place for {}", to_.name, what));
  }

  Status check() {
    if (m_.activation != to_.activation) return no_place("this activation (model.activation)");
    if (m_.attention_scale_by_layer) return no_place("scores divided by layer + 1 (model.attention_scale_by_layer)");
    if (m_.position_offset != 0) return no_place("positions that begin elsewhere (model.position_offset)");
    if (m_.mtp.depth > 0) return no_place("layers that predict further tokens (model.mtp)");
    if (m_.positions == Positions::kRotary && m_.rope.pairs != RotaryPairs::kHalf) {
      return no_place("channels that turn in other pairs (model.rope.pairs)");
    }
    if (m_.moe.experts > 0) {
      if (m_.moe.renormalise != to_.renormalised) {
        return no_place(to_.renormalised ? "weights of experts as the softmax gives them (model.moe.renormalise)"
                                         : "weights of experts divided by their sum (model.moe.renormalise)");
      }
      if (!m_.moe.dense_layers.empty()) return no_place("layers without experts (model.moe.dense_layers)");
    }
    const double usual =
        1 / std::sqrt(static_cast<double>(m_.layers == to_.other_scale_layers ? m_.width / m_.heads : m_.head_dim));
    const double own = m_.attention_scale == 0 ? 1 / std::sqrt(static_cast<double>(m_.head_dim)) : m_.attention_scale;
    if (std::abs(own - usual) > 1e-6 * usual) {
      return no_place(fmt::format("scores times {:.6g} instead of {:.6g} (model.attention_scale)", own, usual));
    }
    const RopeScaling scaling = m_.rope.scaling;
    if (scaling == RopeScaling::kDynamic) return no_place("rotary angles that follow the length (dynamic scaling)");
    if (scaling == RopeScaling::kYarn && (m_.rope.mscale != 0 || m_.rope.mscale_all_dim != 0)) {
      return no_place("yarn's mscale");
    }
    RT_TRY(check_caps());
    return check_window();
  }

  Status check_caps() {
    if (to_.caps && (m_.score_cap == 0 || m_.logit_cap == 0)) {
      return no_place("scores or logits without a cap (model.score_cap, model.logit_cap)");
    }
    if (!to_.caps && m_.score_cap > 0) return no_place("capped scores (model.score_cap)");
    if (!to_.caps && m_.logit_cap > 0) return no_place("capped logits (model.logit_cap)");
    return {};
  }

  Status check_window() {
    if (to_.window == Window::kPattern && m_.sliding_window == 0) {
      return no_place("a model without a sliding window (model.sliding_window)");
    }
    if (m_.sliding_window == 0) return {};
    if (to_.window != Window::kPattern) {
      out_.warnings.push_back(fmt::format(
          "llama.cpp computes {} without a sliding window: a token sees more than the {} before it, and longer "
          "texts get other numbers",
          to_.name, m_.sliding_window));
      return {};
    }
    for (int64_t layer = 0; layer < m_.layers; ++layer) {
      const bool windowed =
          m_.window_layers.empty() || std::ranges::find(m_.window_layers, layer) != m_.window_layers.end();
      if (windowed == ((layer + 1) % to_.pattern != 0)) continue;
      return no_place(
          fmt::format("a window in other layers than all but each {}th (model.window_layers)", to_.pattern));
    }
    if (m_.window_rope_theta != 0 && m_.window_rope_theta != 10000) {
      return no_place(fmt::format("a rotary base of {} in layers with a window", m_.window_rope_theta));
    }
    return {};
  }

  Status add_tensors() {
    std::map<std::string, size_t> index;
    std::vector<std::string> homeless;
    for (size_t k = 0; k < source_.tensors().size(); ++k) {
      const TensorSpec& tensor = source_.tensors()[k];
      const std::string name = name_of(to_, tensor);
      if (name.empty()) homeless.push_back(tensor.name);
      if (name.empty()) continue;
      const auto [at, is_new] = index.emplace(name, out_.outputs.size());
      if (is_new) out_.outputs.push_back(begin_output(name, tensor));
      append(out_.outputs[at->second], static_cast<int64_t>(k), tensor);
    }
    if (!homeless.empty()) {
      return no_place(fmt::format("{}{}", homeless.front(),
                                  homeless.size() > 1 ? fmt::format(" and {} more", homeless.size() - 1) : ""));
    }
    for (GgufOutput& output : out_.outputs) settle(output);
    add_rope_factors();
    return {};
  }

  GgufOutput begin_output(const std::string& name, const TensorSpec& tensor) const {
    GgufOutput out{.tensor = {.name = name}};
    out.rows.name = name;
    out.rows.own_dtype = DType::kF32;
    out.plus_one = m_.norm_plus_one && name.ends_with("_norm.weight");
    const bool turns = tensor.name.ends_with(".attn.q.weight") || tensor.name.ends_with(".attn.q.bias") ||
                       tensor.name.ends_with(".attn.k.weight") || tensor.name.ends_with(".attn.k.bias");
    if (to_.interleaved && turns) out.pair_rows = m_.head_dim;
    return out;
  }

  static void append(GgufOutput& to, int64_t source, const TensorSpec& tensor) {
    const int64_t rows = row_count(tensor.shape);
    int64_t before = 0;
    for (const OutputRun& run : to.rows.runs) before += run.count;
    to.rows.runs.push_back({.stored = before, .count = rows, .source = source});
    Shape& shape = to.tensor.shape;
    if (tensor.expert >= 0) {  // [experts, out, in]
      if (shape.empty()) {
        shape = tensor.shape;
        shape.insert(shape.begin(), 0);
      }
      ++shape[0];
    } else if (shape.empty()) {
      shape = tensor.shape;
    } else {
      shape[0] += tensor.shape[0];
    }
  }

  void settle(GgufOutput& output) const {
    if (output.tensor.name.ends_with("ffn_gate_inp_shexp.weight"))
      output.tensor.shape.erase(output.tensor.shape.begin());
    output.rows.shape = output.tensor.shape;
    output.tensor.type = is_kept_whole(output.tensor)                                             ? GgufType::kF32
                         : type_ == GgufType::kQ8_0 && output.tensor.shape.back() % kQ8Group != 0 ? GgufType::kF16
                                                                                                  : type_;
  }

  void add_values(std::string name, std::vector<float> values) {
    out_.outputs.push_back(
        {.tensor = {.name = std::move(name), .shape = {std::ssize(values)}}, .values = std::move(values)});
  }

  /// Adds divisors of the frequencies, where a key cannot say them.
  void add_rope_factors() {
    const RopeConfig& rope = m_.rope;
    if (m_.positions != Positions::kRotary) return;
    if (rope.scaling == RopeScaling::kLongRope) {
      add_values("rope_factors_long.weight", {rope.long_factor.begin(), rope.long_factor.end()});
      add_values("rope_factors_short.weight", {rope.short_factor.begin(), rope.short_factor.end()});
    }
    if (rope.scaling != RopeScaling::kLlama3) return;
    std::vector<float> factors;
    const int64_t dims = rotary_dims(m_);
    const auto context = static_cast<double>(original_context());
    for (int64_t k = 0; k < dims; k += 2) {
      const double length =
          2 * std::numbers::pi * std::pow(m_.rope_theta, static_cast<double>(k) / static_cast<double>(dims));
      const double turns = context / length;
      const double share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
      const double inverse = turns > rope.high_freq_factor  ? 1
                             : turns < rope.low_freq_factor ? 1 / rope.factor
                                                            : (1 - share) / rope.factor + share;
      factors.push_back(static_cast<float>(1 / inverse));
    }
    add_values("rope_freqs.weight", std::move(factors));
  }

  int64_t original_context() const { return m_.rope.original_context > 0 ? m_.rope.original_context : m_.context; }

  std::string key(std::string_view name) const { return fmt::format("{}.{}", to_.name, name); }
  void count(std::string_view name, int64_t value) { keys_.put(key(name), static_cast<uint32_t>(value)); }
  void number(std::string_view name, double value) { keys_.put(key(name), static_cast<float>(value)); }

  void put_keys() {
    count("context_length", m_.context);
    count("embedding_length", m_.width);
    count("block_count", m_.layers);
    count("feed_forward_length", m_.moe.experts > 0 && to_.name == "llama" ? expert_ffn(m_) : m_.ffn);
    count("attention.head_count", m_.heads);
    count("attention.head_count_kv", m_.kv_heads);
    number(m_.norm == NormKind::kRmsNorm ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon",
           m_.norm_eps);
    count("attention.key_length", m_.head_dim);
    count("attention.value_length", m_.head_dim);
    count("vocab_size", m_.vocab);
    if (m_.sliding_window > 0 && to_.window != Window::kNone) count("attention.sliding_window", m_.sliding_window);
    if (m_.score_cap > 0) number("attn_logit_softcapping", m_.score_cap);
    if (m_.logit_cap > 0) number("final_logit_softcapping", m_.logit_cap);
    if (m_.positions == Positions::kRotary) put_rope();
    if (m_.moe.experts == 0) return;
    count("expert_count", m_.moe.experts);
    count("expert_used_count", m_.moe.top_k);
    if (to_.name == "llama") return;
    count("expert_feed_forward_length", expert_ffn(m_));
    if (shared_ffn(m_) > 0) count("expert_shared_feed_forward_length", shared_ffn(m_));
  }

  void put_rope() {
    const RopeConfig& rope = m_.rope;
    count("rope.dimension_count", rotary_dims(m_));
    number("rope.freq_base", m_.rope_theta);
    if (rope.scaling == RopeScaling::kLinear) {
      keys_.put(key("rope.scaling.type"), "linear");
      number("rope.scaling.factor", rope.factor);
    }
    if (rope.scaling == RopeScaling::kYarn) {
      keys_.put(key("rope.scaling.type"), "yarn");
      number("rope.scaling.factor", rope.factor);
      count("rope.scaling.original_context_length", original_context());
      if (rope.attention_factor > 0) number("rope.scaling.attn_factor", yarn_factor());
      number("rope.scaling.yarn_beta_fast", rope.beta_fast);
      number("rope.scaling.yarn_beta_slow", rope.beta_slow);
    }
    if (rope.scaling == RopeScaling::kLongRope) {
      count("rope.scaling.original_context_length", original_context());
      const double factor = static_cast<double>(m_.context) / static_cast<double>(original_context());
      const double usual =
          factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(static_cast<double>(original_context())));
      number("rope.scaling.attn_factor", rope.attention_factor > 0 ? rope.attention_factor : usual);
    }
  }

  /// llama.cpp multiplies cos and sin with this and with 1 + 0.1 ln(factor).
  double yarn_factor() const { return m_.rope.attention_factor / (1 + 0.1 * std::log(m_.rope.factor)); }

  const Architecture& to_;
  const WeightSource& source_;
  const M& m_;
  GgufType type_;
  GgufKeys& keys_;
  GgufModel out_;
};

}  // namespace

Result<std::string> gguf_architecture(const Family& family) {
  const Architecture* const found = find(family);
  if (found != nullptr) return std::string(found->name);
  std::vector<std::string_view> known;
  for (const Architecture& one : kArchitectures) known.push_back(one.model_type);
  return unsupported(
      fmt::format("models of the family {} are not written as GGUF\n  expected one of {}\n  `--to hf` writes a Hugging "
                  "Face folder",
                  family.model_type, fmt::join(known, ", ")));
}

Result<GgufModel> gguf_model(const Family& family, const WeightSource& source, GgufType type, GgufKeys& keys) {
  RT_TRY(gguf_architecture(family));
  return Builder(*find(family), source, type, keys).build();
}

}  // namespace cairn::convert
