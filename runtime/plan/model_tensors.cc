#include "runtime/plan/model_tensors.h"

#include <fmt/format.h>

#include <cmath>

namespace cairn {

std::vector<TensorSpec> model_tensors(const ModelConfig& m) {
  std::vector<TensorSpec> out;
  const double std_in = m.init_std;
  const double std_out = m.init_std / std::sqrt(2.0 * static_cast<double>(m.layers));  // residual outputs
  int64_t layer = kEmbeddingLayer;

  const auto matrix = [&](std::string name, int64_t rows, int64_t cols, TensorCut cut, double std, bool vocab = false) {
    out.push_back({.name = std::move(name),
                   .shape = {rows, cols},
                   .cut = cut,
                   .decay = true,
                   .vocab_rows = vocab,
                   .init = InitKind::kNormal,
                   .init_std = std,
                   .layer = layer});
  };
  const auto vector = [&](std::string name, int64_t size, TensorCut cut, InitKind init) {
    out.push_back({.name = std::move(name), .shape = {size}, .cut = cut, .init = init, .layer = layer});
  };
  const auto norm = [&](const std::string& name) {
    vector(name + ".weight", m.width, TensorCut::kReplicated, InitKind::kOnes);
    if (m.norm == NormKind::kLayerNorm) vector(name + ".bias", m.width, TensorCut::kReplicated, InitKind::kZeros);
  };
  // A projection: its weight, then its bias, which a column cut splits and a row cut replicates.
  const auto linear = [&](const std::string& name, int64_t rows, int64_t cols, TensorCut cut, double std) {
    matrix(name + ".weight", rows, cols, cut, std);
    if (m.bias) vector(name + ".bias", rows, cut == TensorCut::kDim0 ? cut : TensorCut::kReplicated, InitKind::kZeros);
  };

  matrix("embed.tokens", m.vocab, m.width, TensorCut::kDim0, std_in, true);
  if (m.positions == Positions::kLearned) matrix("embed.positions", m.context, m.width, TensorCut::kReplicated, std_in);

  for (layer = 0; layer < m.layers; ++layer) {
    const std::string prefix = fmt::format("layers.{}.", layer);
    norm(prefix + "attn_norm");
    linear(prefix + "attn.q", m.heads * m.head_dim, m.width, TensorCut::kDim0, std_in);
    linear(prefix + "attn.k", m.kv_heads * m.head_dim, m.width, TensorCut::kDim0, std_in);
    linear(prefix + "attn.v", m.kv_heads * m.head_dim, m.width, TensorCut::kDim0, std_in);
    linear(prefix + "attn.o", m.width, m.heads * m.head_dim, TensorCut::kDim1, std_out);
    norm(prefix + "mlp_norm");
    if (m.activation == Activation::kSwiGlu) linear(prefix + "mlp.gate", m.ffn, m.width, TensorCut::kDim0, std_in);
    linear(prefix + "mlp.up", m.ffn, m.width, TensorCut::kDim0, std_in);
    linear(prefix + "mlp.down", m.width, m.ffn, TensorCut::kDim1, std_out);
  }

  layer = kHeadLayer;
  norm("final_norm");
  if (!m.tied_embeddings) matrix("head.weight", m.vocab, m.width, TensorCut::kDim0, std_in, true);
  return out;
}

int64_t count_parameters(const ModelConfig& model) {
  int64_t n = 0;
  for (const TensorSpec& tensor : model_tensors(model)) n += count_elems(tensor.shape);
  return n;
}

int64_t padded_vocab(int64_t vocab, int64_t tp) {
  const int64_t multiple = 64 * tp;
  return (vocab + multiple - 1) / multiple * multiple;
}

}  // namespace cairn
