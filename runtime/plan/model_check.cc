#include "runtime/plan/model_check.h"

#include <fmt/format.h>

#include "runtime/plan/model_tensors.h"

namespace cairn {
namespace {

/// Collects mistakes.
class Check {
 public:
  explicit Check(const ModelConfig& m) : m_(m) {}

  std::vector<ModelMistake> run() {
    if (m_.positions == Positions::kRotary) rotary();
    if (m_.position_offset > 0 && m_.positions != Positions::kLearned) {
      found("model.position_offset", "is for learned positions only");
    }
    if (m_.residual_scale != 1.0 && m_.block != BlockKind::kDeepNorm) {
      found("model.residual_scale", "is for model.block = deep_norm only");
    }
    if (m_.top_query && !m_.final_norm) found("model.top_query", "comes after the final norm, which is off");
    windows();
    if (m_.moe.experts > 0) moe();
    not_computed();
    return std::move(found_);
  }

 private:
  void found(const std::string& field, const std::string& what, std::string accepted = "") {
    found_.push_back({field, field + " " + what, std::move(accepted)});
  }

  void rotary() {
    const RopeConfig& rope = m_.rope;
    const int64_t dims = rotary_dims(m_);
    const std::string field = rope.dims > 0 ? "model.rope.dims" : "model.head_dim";
    const std::string name = rope.dims > 0 ? "dims" : "head_dim";
    if (dims > m_.head_dim) {
      found(field, fmt::format("= {} is more than model.head_dim = {}: no such channels", dims, m_.head_dim));
    } else if (dims % 2 != 0) {
      found(field, fmt::format("= {} is odd, and rotary positions turn pairs of channels", dims),
            dims == 1 ? name + " 2" : fmt::format("{} {} or {}", name, dims - 1, dims + 1));
    } else if (rope.scaling == RopeScaling::kDynamic && dims < 4) {
      found("model.rope.scaling", fmt::format("= dynamic needs 4 or more channels that turn, got {}", dims));
    }
    if (rope.scaling == RopeScaling::kLlama3 && rope.low_freq_factor >= rope.high_freq_factor) {
      found("model.rope.low_freq_factor",
            fmt::format("= {} must be less than high_freq_factor = {}", rope.low_freq_factor, rope.high_freq_factor));
    }
    if (rope.scaling == RopeScaling::kYarn && rope.beta_slow >= rope.beta_fast) {
      found("model.rope.beta_slow",
            fmt::format("= {} must be less than beta_fast = {}", rope.beta_slow, rope.beta_fast));
    }
  }

  void windows() {
    if (!m_.window_layers.empty() && m_.sliding_window == 0) {
      found("model.window_layers", "names layers, but model.sliding_window is 0: set the window too");
    }
    for (const int64_t layer : m_.window_layers) {
      if (layer < m_.layers) continue;
      found("model.window_layers", fmt::format("names layer {}; there are 0 to {}", layer, m_.layers - 1));
      break;
    }
    if (m_.sliding_window > 0 && m_.mask != Mask::kCausal) {
      found("model.sliding_window", "looks back only: it needs model.mask = causal");
    }
  }

  void moe() {
    if (m_.moe.top_k > m_.moe.experts) {
      found("model.moe.top_k", fmt::format("= {} is more than model.moe.experts = {}", m_.moe.top_k, m_.moe.experts));
    }
    if (!is_gated(m_.activation)) {
      found("model.activation", "must have a gate with experts", "swiglu, geglu, geglu_tanh or reglu");
    }
    if (has_bias(m_, BiasOf::kMlp)) found("model.mlp_bias", "must be false with experts: theirs have no biases");
  }

  void not_yet(const std::string& field, const std::string& value) {
    found(field, fmt::format("= {} is not computed by this build yet", value));
  }

  /// What has a name and a place in files but no kernel yet.
  void not_computed() {
    if (m_.positions == Positions::kAlibi) not_yet("model.positions", "alibi");
    if (m_.position_offset > 0) not_yet("model.position_offset", "more than 0");
    if (m_.positions == Positions::kRotary) {
      if (rotary_dims(m_) < m_.head_dim) not_yet("model.rope.dims", "a part of the head");
      if (m_.rope.pairs != RotaryPairs::kHalf) not_yet("model.rope.pairs", "interleaved");
      if (m_.rope.scaling != RopeScaling::kNone) not_yet("model.rope.scaling", "other than none");
    }
    if (embed_dim(m_) != m_.width) not_yet("model.embed_dim", "another than model.width");
    if (m_.embedding_norm) not_yet("model.embedding_norm", "true");
    if (m_.block != BlockKind::kPreNorm) not_yet("model.block", "other than pre_norm");
    if (!m_.final_norm) not_yet("model.final_norm", "false");
    switch (m_.activation) {
      case Activation::kGeluQuick:
      case Activation::kRelu2:
      case Activation::kSilu:
      case Activation::kGeGlu:
      case Activation::kGeGluTanh:
      case Activation::kReGlu:
        not_yet("model.activation", "this one");
        break;
      default:
        break;
    }
    if (m_.head_bias) not_yet("model.head_bias", "true");
    if (has_bias(m_, BiasOf::kQkv) != m_.bias) not_yet("model.qkv_bias", "other than model.bias");
    if (has_bias(m_, BiasOf::kOut) != m_.bias) not_yet("model.out_bias", "other than model.bias");
    if (has_bias(m_, BiasOf::kMlp) != m_.bias) not_yet("model.mlp_bias", "other than model.bias");
    if (m_.qk_norm != QkNorm::kNone) not_yet("model.qk_norm", "head");
    if (m_.mask != Mask::kCausal) not_yet("model.mask", "other than causal");
    if (m_.sliding_window > 0) not_yet("model.sliding_window", "more than 0");
    if (m_.attention_scale > 0) not_yet("model.attention_scale", "more than 0");
    if (m_.attention_scale_by_layer) not_yet("model.attention_scale_by_layer", "true");
    if (m_.logit_scale != 1.0) not_yet("model.logit_scale", "other than 1");
    if (m_.top_query) not_yet("model.top_query", "true");
    if (m_.moe.experts > 0) not_yet("model.moe.experts", "more than 0");
  }

  const ModelConfig& m_;
  std::vector<ModelMistake> found_;
};

}  // namespace

std::vector<ModelMistake> find_mistakes(const ModelConfig& model) { return Check(model).run(); }

}  // namespace cairn
