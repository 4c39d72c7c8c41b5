#pragma once
// The logical parameters of a model: names, global shapes, how tensor parallelism cuts them. No layout appears in a
// name or a shape; checkpoints, converters and ranks all speak in these. Weights are [out, in].
//
//   embed.tokens [V, E]                                      embed.project_in.weight [H, E]  (E not H)
//   embed.positions [S + offset, H]  (learned positions)     embed.norm.{weight,bias} [H]  (embedding_norm)
//   layers.I.attn_norm.{weight,bias} [H]                     parallel_shared: the only norm of the layer
//   layers.I.attn.{q,k,v}.weight [N*D or K*D, H], .bias      layers.I.attn.o.weight [H, N*D], .bias [H]
//   layers.I.attn.{q,k}_norm.weight [D]  (qk_norm head), [N*D or K*D] (whole), [N or K, D] (head_layernorm);
//   .weight, .bias [D]  (shared_layernorm)
//   layers.I.attn.sinks [N]  (attention_sinks)
//   with mla, for q, k, v: layers.I.attn.q_a.weight [Rq, H], .bias, attn.q_a_norm.weight [Rq], attn.q_b.weight [N*D,
//   Rq] (q_rank; else attn.q.weight [N*D, H]); attn.kv_a.weight [Rk + Dr, H], .bias, attn.kv_a_norm.weight [Rk],
//   attn.kv_b.weight [N*(Dn + Dv), Rk]; and attn.o.weight is [H, N*Dv]. Biases as those of q, k, v
//   layers.I.attn_out_norm.{weight,bias} [H]  (sandwich, out_norm)
//   layers.I.mlp_norm.{weight,bias} [H]
//   layers.I.mlp.{gate,up}.weight [F, H], .bias [F]          layers.I.mlp.down.weight [H, F], .bias [H]
//   layers.I.mlp_out_norm.{weight,bias} [H]  (sandwich, out_norm)
//   layers.I.moe.router.weight [X, H] and, for each expert J, layers.I.moe.experts.J.{gate,up}.weight [F, H],
//   .down.weight [H, F], .bias  (experts, F = moe.ffn where set; then no mlp.*, but in moe.dense_layers);
//   layers.I.moe.router.logit_bias [X]  (router_bias);
//   layers.I.moe.router.bias [X]  (choice_bias, bias_rate), updated beside the gradients;
//   layers.I.moe.shared.{gate,up}.weight [Fs, H], .down.weight [H, Fs], .bias  (shared_ffn, or shared_experts times F);
//   layers.I.moe.shared_gate.weight [1, H]  (shared_gate)
//   final_norm.{weight,bias} [H]                             head.project_out.weight [E, H]  (E not H)
//   top_query.positions [S, H], then the tensors of a layer with "top_query." for "layers.I."  (top_query)
//   mtp.K.embed_norm.{weight,bias} [H], mtp.K.hidden_norm.{weight,bias} [H], mtp.K.project.weight [H, 2H], the
//   embedding's columns first, then the tensors of a layer with "mtp.K." for "layers.I.", and mtp.K.norm.{weight,bias}
//   [H], for K below mtp.depth; with experts in place of an MLP where the model has experts
//   head.weight [V, E]  (untied)                             head.bias [V]  (head_bias)
// Bias tensors exist only where ModelConfig says so (norm biases: LayerNorm only), and so do weights of norms; gate
// only for gated activations. post_norm: attn_norm and mlp_norm act on the sums. out_norm has neither.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/model.h"
#include "runtime/core/shape.h"

namespace cairn {

enum class TensorCut { kReplicated, kDim0, kDim1 };  // over tp; kDim0 of embed.tokens and head is the padded vocabulary
enum class InitKind { kZeros, kOnes, kNormal };

constexpr int64_t kEmbeddingLayer = -1;  // TensorSpec::layer of embed.*: the first stage
constexpr int64_t kHeadLayer = -2;       // of final_norm.*, top_query.*, mtp.* and head.*: the last stage

struct TensorSpec {
  std::string name;
  Shape shape;  // logical, unpadded
  TensorCut cut = TensorCut::kReplicated;
  bool decay = false;    // weight decay applies (matrices), not to biases and norm weights
  bool partial = false;  // replicated, but each tp rank's gradient is of its own heads: to be summed over tp
  int64_t heads =
      0;  // k and v: dim 0 is so many key/value heads, each held by several ranks when tp is more; 0: no heads
  bool vocab_rows = false;  // dim 0 is the vocabulary: padded in memory, never in a file
  InitKind init = InitKind::kZeros;
  double init_std = 0;  // kNormal
  int64_t layer = 0;
  bool balances =
      false;  // a router's bias: its "gradient" counts the choices of each expert (OptimizerConfig is not read)
  int64_t expert = -1;  // of the layer's experts; -1: no expert's. Expert parallelism divides whole experts
};

enum class BiasOf { kQkv, kOut, kMlp };
bool has_bias(const ModelConfig& model, BiasOf projections);
bool is_gated(Activation activation);
/// The loss that balances experts is of the choices of all layers together.
bool balances_over_layers(const ModelConfig& model);
/// The layer has experts instead of an MLP.
bool has_experts(const ModelConfig& model, int64_t layer);
int64_t expert_layers(const ModelConfig& model);
/// Some layer has an MLP of model.ffn units.
bool has_dense_layers(const ModelConfig& model);
/// Hidden units of an expert, and of what every token goes through besides (0: nothing).
int64_t expert_ffn(const ModelConfig& model);
int64_t shared_ffn(const ModelConfig& model);
/// Biases decide with the scores which experts a token takes.
bool has_choice_bias(const ModelConfig& model);
/// q, k and v come from latent vectors.
bool has_mla(const ModelConfig& model);
/// Channels of a head's values.
int64_t value_dim(const ModelConfig& model);
/// What a cache keeps of a token in a layer: of each head a key and as much of a value, or the latent vector and the
/// key that heads share.
int64_t cached_elems(const ModelConfig& model);
/// Multiplications a token in the forward of a layer, the core of attention over half the context among them.
double layer_products(const ModelConfig& model, int64_t layer);
/// Attention and MLP read the same input.
bool is_parallel(BlockKind block);
/// A norm stands behind each branch: on its output, or on the sum.
bool has_post_norms(BlockKind block);
/// It stands on the branch's output, before the sum.
bool has_out_norms(BlockKind block);
/// The norms of the stream have biases.
bool has_norm_bias(const ModelConfig& model);
/// What the names of a layer's tensors begin with: "layers.I."; for I = model.layers "top_query." where the model has
/// such a layer, and from there on "mtp.K." where it predicts several tokens.
std::string layer_prefix(const ModelConfig& model, int64_t layer);
/// Layers from model.layers on that come behind the final norm, in the head's place.
int64_t layers_behind(const ModelConfig& model);
/// The last stage reads the table of token embeddings too.
bool ends_with_table(const ModelConfig& model);
/// Layers that keep keys and values: model.layers, and the top query layer.
int64_t attention_layers(const ModelConfig& model);
/// The layer uses model.sliding_window.
bool has_window(const ModelConfig& model, int64_t layer);
/// The layer uses model.attention_chunk.
bool has_chunks(const ModelConfig& model, int64_t layer);
/// Queries of the layer are multiplied as model.temperature_scale says.
bool has_temperature(const ModelConfig& model, int64_t layer);
/// q and k of the layer have norms.
bool has_qk_norm(const ModelConfig& model, int64_t layer);
/// Numbers that the norm of q, and that of k, has for each channel of a head and all heads share: weight, bias.
int64_t shared_norm_sums(const ModelConfig& model);
/// q and k of the layer turn.
bool has_rotary(const ModelConfig& model, int64_t layer);
/// By the angles of model.window_rope_theta.
bool has_window_rotary(const ModelConfig& model, int64_t layer);
/// E: channels of token embedding and head.
int64_t embed_dim(const ModelConfig& model);
/// Channels of a head that turn with rotary positions.
int64_t rotary_dims(const ModelConfig& model);

/// In canonical order: embedding, layers 0.., head.
std::vector<TensorSpec> model_tensors(const ModelConfig& model);

/// Parameters of the whole model, each logical element once.
int64_t count_parameters(const ModelConfig& model);

/// Into how many parts deterministic = "layout" cuts the sums that tensor parallelism divides: a power of two up to 8
/// that divides heads, key/value heads and hidden units so that each part has a multiple of kSumPartElems. 1 for what
/// it does not know how to cut: experts, latent attention, sinks, and a top query layer.
int64_t sum_parts(const ModelConfig& model);
constexpr int64_t kSumPartElems = 16;  // squares of gradients are added in blocks of so many (kernels::add_squares)

/// Vocabulary rows in memory: V rounded up to a multiple of 64 * tp, so that every rank has equal, fast matrices (64 *
/// sum_parts() where those do not depend on tp). Padded rows are zero, masked to minus infinity in the loss, and never
/// stored.
int64_t padded_vocab(int64_t vocab, int64_t tp);

}  // namespace cairn
