#pragma once
// The logical parameters of a model: names, global shapes, how tensor parallelism cuts them. No layout appears in a
// name or a shape; checkpoints, converters and ranks all speak in these. Weights are [out, in].
//
//   embed.tokens [V, H]          embed.positions [S, H]  (learned positions)
//   layers.I.attn_norm.{weight,bias} [H]
//   layers.I.attn.{q,k,v}.weight [N*D or K*D, H], .bias      layers.I.attn.o.weight [H, N*D], .bias [H]
//   layers.I.mlp_norm.{weight,bias} [H]
//   layers.I.mlp.{gate,up}.weight [F, H], .bias [F]          layers.I.mlp.down.weight [H, F], .bias [H]
//   final_norm.{weight,bias} [H]                             head.weight [V, H]  (untied)
// bias tensors exist only where ModelConfig says so (norm biases: LayerNorm only); gate only for gated activations.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/core/shape.h"

namespace cairn {

enum class TensorCut { kReplicated, kDim0, kDim1 };  // over tp; kDim0 of embed.tokens and head is the padded vocabulary
enum class InitKind { kZeros, kOnes, kNormal };

constexpr int64_t kEmbeddingLayer = -1;  // TensorSpec::layer of embed.*: the first stage
constexpr int64_t kHeadLayer = -2;       // of final_norm.* and head.*: the last stage

struct TensorSpec {
  std::string name;
  Shape shape;  // logical, unpadded
  TensorCut cut = TensorCut::kReplicated;
  bool decay = false;       // weight decay applies (matrices), not to biases and norm weights
  bool vocab_rows = false;  // dim 0 is the vocabulary: padded in memory, never in a file
  InitKind init = InitKind::kZeros;
  double init_std = 0;  // kNormal
  int64_t layer = 0;
};

/// In canonical order: embedding, layers 0.., head.
std::vector<TensorSpec> model_tensors(const ModelConfig& model);

/// Parameters of the whole model, each logical element once.
int64_t count_parameters(const ModelConfig& model);

/// Vocabulary rows in memory: V rounded up to a multiple of 64 * tp, so that every rank has equal, fast matrices.
/// Padded rows are zero, masked to minus infinity in the loss, and never stored.
int64_t padded_vocab(int64_t vocab, int64_t tp);

}  // namespace cairn
