#include "runtime/plan/model_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace cairn {
namespace {

/// What a projection does, for its initial weights.
enum class Role { kQueryKey, kIn, kOut };  // kIn reads the residual stream, kOut adds to it

/// Standard deviation of a projection's initial weights (ModelConfig::init).
double projection_std(const ModelConfig& m, Role role, int64_t rows, int64_t cols) {
  const auto layers = static_cast<double>(m.layers), width = static_cast<double>(m.width);
  switch (m.init) {
    case WeightInit::kPlain:
      return m.init_std;
    case WeightInit::kSmallWang:  // Nguyen & Salazar 2019; Wang & Komatsuzaki 2021 (GPT-J), as GPT-NeoX uses them
      return role == Role::kOut ? 2.0 / layers / std::sqrt(width) : std::sqrt(2.0 / (5.0 * width));
    case WeightInit::kDeepNorm: {  // Xavier normal; Wang et al. 2022 with GLM-130B's exponent
      const double gain = role == Role::kQueryKey ? 1.0 : 1.0 / std::sqrt(2.0 * layers);
      return gain * std::sqrt(2.0 / static_cast<double>(rows + cols));
    }
    case WeightInit::kScaled:
      break;
  }
  return role == Role::kOut ? m.init_std / std::sqrt(2.0 * layers) : m.init_std;
}

/// The list in the making.
class Tensors {
 public:
  explicit Tensors(const ModelConfig& m) : m_(m), std_in_(m.init_std) {
    if (m.init == WeightInit::kSmallWang) std_in_ = std::sqrt(2.0 / (5.0 * static_cast<double>(m.width)));
  }

  void embedding() {
    layer_ = kEmbeddingLayer;
    const int64_t embed = embed_dim(m_);
    matrix("embed.tokens", m_.vocab, embed, TensorCut::kDim0, std_in_, true);
    if (embed != m_.width) matrix("embed.project_in.weight", m_.width, embed, TensorCut::kReplicated, std_in_);
    if (m_.positions == Positions::kLearned) {
      matrix("embed.positions", m_.context + m_.position_offset, m_.width, TensorCut::kReplicated, std_in_);
    }
    if (m_.embedding_norm) norm("embed.norm");
  }

  void layer(int64_t index) {
    layer_ = index;
    block(layer_prefix(m_, index), has_experts(m_, index));
  }

  void head() {
    layer_ = kHeadLayer;
    const int64_t embed = embed_dim(m_);
    if (m_.final_norm) norm("final_norm");
    if (m_.top_query) {
      matrix("top_query.positions", m_.context, m_.width, TensorCut::kReplicated, std_in_);
      block(layer_prefix(m_, m_.layers), false);
    }
    for (int64_t k = 0; k < m_.mtp.depth; ++k) predicting_module(layer_prefix(m_, m_.layers + k), m_.layers + k);
    if (embed != m_.width) matrix("head.project_out.weight", embed, m_.width, TensorCut::kReplicated, std_in_);
    if (!m_.tied_embeddings) matrix("head.weight", m_.vocab, embed, TensorCut::kDim0, std_in_, true);
    if (m_.head_bias) vector("head.bias", m_.vocab, TensorCut::kDim0, InitKind::kZeros, true);
  }

  std::vector<TensorSpec> take() { return std::move(out_); }

 private:
  void block(const std::string& prefix, bool experts) {
    if (m_.block != BlockKind::kOutNorm) norm(prefix + "attn_norm");
    has_mla(m_) ? latent_projections(prefix + "attn.") : projections(prefix);
    row_cut(prefix + "attn.o", m_.heads * value_dim(m_), has_bias(m_, BiasOf::kOut));
    rest(prefix, experts);
  }

  void predicting_module(const std::string& prefix, int64_t layer) {
    norm(prefix + "embed_norm");
    norm(prefix + "hidden_norm");
    matrix(prefix + "project.weight", m_.width, 2 * m_.width, TensorCut::kReplicated, std_in_);
    block(prefix, has_experts(m_, layer));
    norm(prefix + "norm");
  }

  /// q, k and v from the stream.
  void projections(const std::string& prefix) {
    const int64_t q = m_.heads * m_.head_dim, kv = m_.kv_heads * m_.head_dim;
    column_cuts({{prefix + "attn.q", q, Role::kQueryKey},
                 {prefix + "attn.k", kv, Role::kQueryKey, m_.kv_heads},
                 {prefix + "attn.v", kv, Role::kIn, m_.kv_heads}},
                has_bias(m_, BiasOf::kQkv));
    qk_norms(prefix);
    sinks(prefix);
  }

  void latent_projections(const std::string& prefix) {
    const MlaConfig& mla = m_.mla;
    const bool bias = has_bias(m_, BiasOf::kQkv);
    const int64_t q = m_.heads * m_.head_dim, kv = m_.heads * (mla.nope_dim + mla.value_dim);
    const auto weight = [&](const char* name, int64_t rows, int64_t cols, TensorCut cut) {
      matrix(prefix + name + ".weight", rows, cols, cut, projection_std(m_, Role::kIn, rows, cols));
    };
    // Those that read the same rows stand together: their products become one.
    if (mla.q_rank > 0) weight("q_a", mla.q_rank, m_.width, TensorCut::kReplicated);
    weight("kv_a", mla.kv_rank + mla.rope_dim, m_.width, TensorCut::kReplicated);
    if (bias && mla.q_rank > 0) vector(prefix + "q_a.bias", mla.q_rank, TensorCut::kReplicated, InitKind::kZeros);
    if (bias) vector(prefix + "kv_a.bias", mla.kv_rank + mla.rope_dim, TensorCut::kReplicated, InitKind::kZeros);
    if (mla.q_rank > 0) {
      vector(prefix + "q_a_norm.weight", mla.q_rank, TensorCut::kReplicated, norm_init());
      weight("q_b", q, mla.q_rank, TensorCut::kDim0);
    } else {
      weight("q", q, m_.width, TensorCut::kDim0);
    }
    vector(prefix + "kv_a_norm.weight", mla.kv_rank, TensorCut::kReplicated, norm_init());
    weight("kv_b", kv, mla.kv_rank, TensorCut::kDim0);
  }

  /// What stands behind attention.
  void rest(const std::string& prefix, bool experts) {
    const bool out_norms = has_out_norms(m_.block), norms = m_.block != BlockKind::kOutNorm;
    if (out_norms) norm(prefix + "attn_out_norm");
    if (norms && m_.block != BlockKind::kParallelShared) norm(prefix + "mlp_norm");
    if (experts) {
      matrix(prefix + "moe.router.weight", m_.moe.experts, m_.width, TensorCut::kReplicated, std_in_);
      if (m_.moe.router_bias) {
        vector(prefix + "moe.router.logit_bias", m_.moe.experts, TensorCut::kReplicated, InitKind::kZeros);
      }
      if (has_choice_bias(m_)) {
        vector(prefix + "moe.router.bias", m_.moe.experts, TensorCut::kReplicated, InitKind::kZeros);
        out_.back().balances = true;
      }
      for (expert_ = 0; expert_ < m_.moe.experts; ++expert_) {
        mlp(fmt::format("{}moe.experts.{}.", prefix, expert_), expert_ffn(m_));
      }
      expert_ = -1;
      if (shared_ffn(m_) > 0) mlp(prefix + "moe.shared.", shared_ffn(m_));
      if (m_.moe.shared_gate) {
        matrix(prefix + "moe.shared_gate.weight", 1, m_.width, TensorCut::kReplicated, std_in_);
      }
    } else {
      mlp(prefix + "mlp.", m_.ffn);
    }
    if (out_norms) norm(prefix + "mlp_out_norm");
  }

  void qk_norms(const std::string& prefix) {
    for (const bool kv : {false, true}) {
      const std::string name = kv ? "attn.k_norm" : "attn.q_norm";
      const int64_t heads = kv ? m_.kv_heads : m_.heads;
      switch (m_.qk_norm) {
        case QkNorm::kNone:
        case QkNorm::kL2:
          return;
        case QkNorm::kHead:
        case QkNorm::kSharedLayerNorm:
          vector(prefix + name + ".weight", m_.head_dim, TensorCut::kReplicated, norm_init());
          out_.back().partial = true;
          if (m_.qk_norm == QkNorm::kHead) break;
          vector(prefix + name + ".bias", m_.head_dim, TensorCut::kReplicated, InitKind::kZeros);
          out_.back().partial = true;
          break;
        case QkNorm::kWhole:
        case QkNorm::kHeadLayerNorm:
          vector(prefix + name + ".weight", heads * m_.head_dim, TensorCut::kDim0, norm_init());
          if (m_.qk_norm == QkNorm::kHeadLayerNorm) out_.back().shape = {heads, m_.head_dim};
          if (kv) out_.back().heads = heads;
          break;
      }
    }
  }

  void sinks(const std::string& prefix) {
    if (!m_.attention_sinks) return;
    vector(prefix + "attn.sinks", m_.heads, TensorCut::kDim0, InitKind::kNormal);
    out_.back().init_std = m_.init_std;
  }

  void mlp(const std::string& prefix, int64_t ffn) {
    const bool bias = has_bias(m_, BiasOf::kMlp);
    std::vector<ColumnCut> in;
    if (is_gated(m_.activation)) in.push_back({prefix + "gate", ffn, Role::kIn});
    in.push_back({prefix + "up", ffn, Role::kIn});
    column_cuts(in, bias);
    row_cut(prefix + "down", ffn, bias);
  }

  struct ColumnCut {
    std::string name;
    int64_t rows = 0;
    Role role = Role::kIn;
    int64_t heads = 0;
  };

  /// Projections that read the same rows: their weights, then their biases. Weights that touch become one product.
  void column_cuts(const std::vector<ColumnCut>& cuts, bool bias) {
    for (const auto& [name, rows, role, heads] : cuts) {
      matrix(name + ".weight", rows, m_.width, TensorCut::kDim0, projection_std(m_, role, rows, m_.width));
      out_.back().heads = heads;
    }
    for (const auto& [name, rows, role, heads] : cuts) {
      if (!bias) break;
      vector(name + ".bias", rows, TensorCut::kDim0, InitKind::kZeros);
      out_.back().heads = heads;
    }
  }

  /// A projection onto the residual stream: its weight, then its bias, which all ranks of a tp group hold.
  void row_cut(const std::string& name, int64_t cols, bool bias) {
    matrix(name + ".weight", m_.width, cols, TensorCut::kDim1, projection_std(m_, Role::kOut, m_.width, cols));
    if (bias) vector(name + ".bias", m_.width, TensorCut::kReplicated, InitKind::kZeros);
  }

  void norm(const std::string& name) {
    if (m_.norm_weight) vector(name + ".weight", m_.width, TensorCut::kReplicated, norm_init());
    if (has_norm_bias(m_)) vector(name + ".bias", m_.width, TensorCut::kReplicated, InitKind::kZeros);
  }

  InitKind norm_init() const { return m_.norm_plus_one ? InitKind::kZeros : InitKind::kOnes; }

  void matrix(std::string name, int64_t rows, int64_t cols, TensorCut cut, double std, bool vocab = false) {
    out_.push_back({.name = std::move(name),
                    .shape = {rows, cols},
                    .cut = cut,
                    .decay = true,
                    .vocab_rows = vocab,
                    .init = InitKind::kNormal,
                    .init_std = std,
                    .layer = layer_,
                    .expert = expert_});
  }

  void vector(std::string name, int64_t size, TensorCut cut, InitKind init, bool vocab = false) {
    out_.push_back({.name = std::move(name),
                    .shape = {size},
                    .cut = cut,
                    .vocab_rows = vocab,
                    .init = init,
                    .layer = layer_,
                    .expert = expert_});
  }

  const ModelConfig& m_;
  double std_in_;  // of what is no projection of a layer
  int64_t layer_ = kEmbeddingLayer, expert_ = -1;
  std::vector<TensorSpec> out_;
};

}  // namespace

bool has_bias(const ModelConfig& m, BiasOf projections) {
  switch (projections) {
    case BiasOf::kQkv:
      return m.qkv_bias.value_or(m.bias);
    case BiasOf::kOut:
      return m.out_bias.value_or(m.bias);
    case BiasOf::kMlp:
      return m.mlp_bias.value_or(m.bias);
  }
  return m.bias;
}

bool is_gated(Activation activation) {
  switch (activation) {
    case Activation::kSwiGlu:
    case Activation::kGeGlu:
    case Activation::kGeGluTanh:
    case Activation::kReGlu:
    case Activation::kQuickGeGlu:
    case Activation::kReGlu2:
    case Activation::kSwiGluClamp:
      return true;
    default:
      return false;
  }
}

bool balances_over_layers(const ModelConfig& model) {
  return model.moe.experts > 0 && model.moe.aux_loss > 0 && model.moe.aux_scope == AuxScope::kModel;
}

bool has_experts(const ModelConfig& m, int64_t layer) {
  return m.moe.experts > 0 && layer < m.layers + m.mtp.depth &&
         std::find(m.moe.dense_layers.begin(), m.moe.dense_layers.end(), layer) == m.moe.dense_layers.end();
}

int64_t expert_layers(const ModelConfig& m) {
  int64_t n = 0;
  for (int64_t layer = 0; layer < m.layers; ++layer) n += has_experts(m, layer) ? 1 : 0;  // without those behind
  return n;
}

bool has_dense_layers(const ModelConfig& m) { return m.moe.experts == 0 || !m.moe.dense_layers.empty(); }

int64_t expert_ffn(const ModelConfig& m) { return m.moe.ffn > 0 ? m.moe.ffn : m.ffn; }

int64_t shared_ffn(const ModelConfig& m) {
  return m.moe.shared_ffn > 0 ? m.moe.shared_ffn : m.moe.shared_experts * expert_ffn(m);
}

bool has_choice_bias(const ModelConfig& m) { return m.moe.choice_bias || m.moe.bias_rate > 0; }

bool has_mla(const ModelConfig& m) { return m.mla.kv_rank > 0; }

int64_t value_dim(const ModelConfig& m) { return has_mla(m) ? m.mla.value_dim : m.head_dim; }

int64_t cached_elems(const ModelConfig& m) {
  return has_mla(m) ? m.mla.kv_rank + m.mla.rope_dim : m.kv_heads * m.head_dim;
}

namespace {

/// Multiplications a token of q, k, v and the output projection.
double projection_products(const ModelConfig& m) {
  const int64_t q = m.heads * m.head_dim, out = m.heads * value_dim(m) * m.width;
  if (!has_mla(m)) return static_cast<double>(m.width * (q + 2 * m.kv_heads * m.head_dim) + out);
  const MlaConfig& mla = m.mla;
  const int64_t of_q = mla.q_rank > 0 ? mla.q_rank * (m.width + q) : m.width * q;
  const int64_t of_kv = m.width * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * m.heads * (mla.nope_dim + mla.value_dim);
  return static_cast<double>(of_q + of_kv + out);
}

}  // namespace

double layer_products(const ModelConfig& m, int64_t layer) {
  const auto width = static_cast<double>(m.width), keys = static_cast<double>(m.context) / 2;
  const double ffn = has_experts(m, layer) ? static_cast<double>(m.moe.top_k * expert_ffn(m) + shared_ffn(m))
                                           : static_cast<double>(m.ffn);
  return projection_products(m) + keys * static_cast<double>(m.heads * (m.head_dim + value_dim(m))) +
         (is_gated(m.activation) ? 3 : 2) * width * ffn +
         (has_experts(m, layer) ? width * static_cast<double>(m.moe.experts) : 0.0);
}

bool is_parallel(BlockKind block) { return block == BlockKind::kParallel || block == BlockKind::kParallelShared; }

bool has_post_norms(BlockKind block) { return block == BlockKind::kPostNorm || has_out_norms(block); }

bool has_out_norms(BlockKind block) { return block == BlockKind::kSandwich || block == BlockKind::kOutNorm; }

bool has_norm_bias(const ModelConfig& m) { return m.norm == NormKind::kLayerNorm && m.norm_weight && m.norm_bias; }

std::string layer_prefix(const ModelConfig& m, int64_t layer) {
  if (layer < m.layers) return fmt::format("layers.{}.", layer);
  return m.top_query ? "top_query." : fmt::format("mtp.{}.", layer - m.layers);
}

int64_t layers_behind(const ModelConfig& m) { return m.top_query ? 1 : m.mtp.depth; }

bool ends_with_table(const ModelConfig& m) { return m.tied_embeddings || m.mtp.depth > 0; }

int64_t attention_layers(const ModelConfig& m) { return m.layers + (m.top_query ? 1 : 0); }

namespace {

bool names(const std::vector<int64_t>& layers, int64_t layer) {
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

}  // namespace

bool has_window(const ModelConfig& m, int64_t layer) {
  return m.sliding_window > 0 && (m.window_layers.empty() || names(m.window_layers, layer));
}

bool has_chunks(const ModelConfig& m, int64_t layer) {
  return m.attention_chunk > 0 && (m.chunk_layers.empty() || names(m.chunk_layers, layer));
}

bool has_rotary(const ModelConfig& m, int64_t layer) {
  return m.positions == Positions::kRotary && !names(m.nope_layers, layer);
}

bool has_temperature(const ModelConfig& m, int64_t layer) {
  return m.temperature_scale > 0 && (m.temperature_form == TemperatureForm::kMinistral3 || names(m.nope_layers, layer));
}

bool has_qk_norm(const ModelConfig& m, int64_t layer) {
  return m.qk_norm != QkNorm::kNone && (m.qk_norm != QkNorm::kL2 || has_rotary(m, layer));
}

int64_t shared_norm_sums(const ModelConfig& m) {
  return m.qk_norm == QkNorm::kHead ? 1 : m.qk_norm == QkNorm::kSharedLayerNorm ? 2 : 0;
}

bool has_window_rotary(const ModelConfig& m, int64_t layer) {
  return m.window_rope_theta > 0 && has_window(m, layer) && has_rotary(m, layer);
}

int64_t embed_dim(const ModelConfig& m) { return m.embed_dim > 0 ? m.embed_dim : m.width; }

int64_t rotary_dims(const ModelConfig& m) {
  if (has_mla(m)) return m.mla.rope_dim;
  return m.rope.dims > 0 ? m.rope.dims : m.head_dim;
}

std::vector<TensorSpec> model_tensors(const ModelConfig& m) {
  Tensors out(m);
  out.embedding();
  for (int64_t layer = 0; layer < m.layers; ++layer) out.layer(layer);
  out.head();
  return out.take();
}

int64_t count_parameters(const ModelConfig& model) {
  int64_t n = 0;
  for (const TensorSpec& tensor : model_tensors(model)) n += count_elems(tensor.shape);
  return n;
}

int64_t sum_parts(const ModelConfig& m) {
  if (m.moe.experts > 0 || layers_behind(m) > 0 || m.attention_sinks || has_mla(m)) return 1;
  int64_t parts = 8;
  const auto fits = [&](int64_t count, int64_t elems) {
    return count % parts == 0 && elems % (parts * kSumPartElems) == 0;
  };
  while (parts > 1 &&
         !(fits(m.kv_heads, m.kv_heads * m.head_dim) && fits(m.heads, m.heads * m.head_dim) && fits(m.ffn, m.ffn))) {
    parts /= 2;
  }
  return parts;
}

int64_t padded_vocab(int64_t vocab, int64_t tp) {
  const int64_t multiple = 64 * tp;
  return (vocab + multiple - 1) / multiple * multiple;
}

}  // namespace cairn
