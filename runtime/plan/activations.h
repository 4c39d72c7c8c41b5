#pragma once
// Every activation and scratch buffer of a pipeline rank, as data: nn/ takes its memory from this list and the plan
// adds it up, so what `cairn plan` says is what a rank allocates.
//
// What a layer saves for its backward pass (legend below, c = bytes of the compute type): the input of its attention
// norm and of its MLP norm [R, H], q, k, v after rotary [T, QKV], the attention's output [T, N D] and log-sum-exp
// [B, N, S] float, the MLP before its activation [T, F_in]:
//   bytes a layer and micro-batch = c (2 R H + T (QKV + N D + F_in)) + 4 T N
// and by the model's options: q and k before their norms [T, (N + K) D] with qk_norm; for a block whose branches have a
// norm behind them, its input [R, H] twice; latent vectors before their norms [R, L] with mla, where values are as wide
// as keys: QKV = 3 N D; parallel blocks have no input of the MLP's own. Backward computes the norms' and the
// activation's outputs again; that costs a pass over memory, no matrix product (with sequence parallelism also one
// all-gather per norm). With Plan::keeps_norms a layer saves the outputs and statistics of its two norms too,
// 2 c R H + 8 R with RMSNorm, 16 R with LayerNorm; parallel blocks that share a norm have one, norms behind branches
// keep only statistics.
//
// Recomputation (Recipe::recompute) keeps less for the layers it is for, and computes the rest again before each of
// their backwards, into buffers that all layers share:
//   selective  all but the attention core's output and log-sum-exp: c (2 R H + T (QKV + F_in))
//   full       c R H: the layer's input alone, and the inputs of norms behind branches; c R H / tp when distributed
// Norms that are kept are then kept from what is computed again.
// With context parallelism T is a rank's rows, and the keys and values of all ranks' rows lie in buffers that all
// layers share: as they are exchanged and in the order of tokens, and their gradients, c 3 cp T 2 K D in all. Where
// sums over tokens are taken in parts the two orders are one, and gradients are float.
//
// Between the two halves of a split backward a micro-batch keeps the gradients of what the projections put out,
// c (2 R H + T F_in) a layer more (that of q, k, v replaces them), and of a recomputed layer what the second half reads
// of what was recomputed. Experts' backwards are not split. Buffers that exist in that time alone have Chunk::late
// copies instead of Chunk::in_flight.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/core/token_runs.h"
#include "runtime/plan/plan.h"

namespace cairn {

/// Sizes of one rank's part of the model.
struct StageDims {
  int64_t samples = 0;     // B, sequences of a micro-batch
  int64_t tokens = 0;      // S, of a sequence; with context parallelism those that this rank has, S / cp
  TokenRuns held;          // which ones they are
  int64_t cp = 1;          // ranks that divide the tokens of a sequence
  int64_t positions = 0;   // of the rotary table: S, all tokens of a sequence where rows say where they
                           // stand (has_own_rows), the context in a pass of generation (Plan::pass_tokens)
  int64_t rows = 0;        // T = B S
  int64_t local_rows = 0;  // R = T, or T / tp with sequence parallelism
  int64_t width = 0;       // H
  int64_t embed = 0;       // E, of token embedding and head; H but for models that project it
  int64_t heads = 0;       // N, this rank's
  int64_t kv_heads = 0;    // K, this rank's
  int64_t head_dim = 0;    // D
  int64_t qkv = 0;         // QKV = (N + 2 K) D
  // model.mla: of the latent vectors, of a head; value_dim D without it.
  int64_t q_rank = 0, kv_rank = 0, nope_dim = 0, rope_dim = 0, value_dim = 0;
  int64_t ffn = 0;                              // F, this rank's, of an MLP
  int64_t ffn_in = 0;                           // F_in = F, or 2 F with a gate
  int64_t expert_ffn = 0, expert_ffn_in = 0;    // the same of an expert
  int64_t experts = 0;                          // X; 0 without
  int64_t choices = 0;                          // k, experts of a token
  int64_t shared_ffn = 0;                       // this rank's hidden units of the experts that every token goes through
  int64_t ep = 1;                               // ranks that divide the experts
  int64_t local_experts = 0, first_expert = 0;  // this rank's
  int64_t expert_sources = 1;                   // ep ranks whose rows each expert keeps apart (Plan::expert_sources)
  bool places_groups = false;  // experts' counts stay on a device that takes them there (counts_stay())
  int64_t expert_rows = 0;     // P: rows of this rank's experts at most, those of each padded to kExpertRowsAlign
  int64_t vocab = 0;           // V, this rank's rows, padding included
  // Of the sums that tensor parallelism divides (Plan::sum_parts()) all parts, and this rank's; of those over tokens
  // (Plan::token_parts()) all, of which held.parts are this rank's; of those over rows, which both divide, this rank's.
  int64_t all_parts = 1, parts = 1, all_token_parts = 1, row_parts = 1;
  int64_t logit_rows = 0;  // rows of the logits buffer: T, or less when [T, V] would pass kLogitsBytes

  /// L: what latent vectors and the key that heads share take of a row; 0 without model.mla.
  int64_t latent() const { return q_rank + kv_rank + rope_dim; }
  /// Sums over rows are trees of parts.
  bool row_trees() const { return all_parts > 1 || all_token_parts > 1; }
};
constexpr int64_t kExpertRowsAlign = 32;
/// Bytes of kernels::GroupRows, which the plan does not know: nn/ checks that the two agree.
constexpr int64_t kGroupRowsBytes = 32;
StageDims stage_dims(const Plan& plan, const RankPlan& rank);

/// Some layer of the rank has experts.
bool holds_experts(const Plan& plan, const RankPlan& rank);

/// How a layer of a stage is recomputed: the recipe's mode for the first recompute.layers of each stage.
RecomputeMode layer_recompute(const Plan& plan, const Stage& stage, int64_t layer);

/// Norms of a layer whose outputs a forward pass leaves for its backward pass, with their statistics; norms behind
/// branches leave only statistics.
struct KeptNorms {
  bool attention = false, mlp = false, after = false;
};
/// All that the model's blocks have where Plan::keeps_norms, else none.
KeptNorms kept_norms(const Plan& plan);

/// The layer inputs kept are split over tp.
bool distributes_inputs(const Plan& plan);

/// Floats that kernels::attention_backward() wants; the plan knows no kernels, so nn/ checks that the two agree. For
/// each row and head: a dot product, and the sums of dq with the head dim padded to a multiple of 16.
int64_t attention_scratch_elems(const StageDims& dims);

/// Floats that a tree of `parts` sums of so many has under way (nn/tree_sum.h).
int64_t tree_sum_elems(int64_t parts, int64_t elems);

/// The gradient inside a block has a buffer beside that of the stream.
bool has_branch_gradient(const ModelConfig& model);

/// Floats that the gradients of q's and k's norms take while they are summed over the heads that share them: a tree
/// over heads, and where sums over tokens have parts its root for each of those.
int64_t qk_norm_sum_elems(const ModelConfig& model, const StageDims& dims);

/// Above this the head works on a part of the rows at a time and backward computes the logits again.
constexpr int64_t kLogitsBytes = int64_t{512} << 20;
constexpr int64_t kCudaLogitsBytes = int64_t{2} << 30;   // one of four products of the head less
constexpr int64_t kPassLogitsBytes = int64_t{64} << 20;  // in passes of generation and evaluation

struct BufferSpec {
  std::string name;  // "layers.3.attn.out"
  DType dtype = DType::kF32;
  int64_t elems = 0;
  int64_t copies = 1;  // one for each micro-batch that needs it at once, or one scratch buffer of the rank

  /// Of one copy, rounded up to the alignment, kBufferAlignBytes.
  int64_t bytes() const;
};
constexpr int64_t kBufferAlignBytes = 64;

/// In the order nn/ lays them out, each start rounded up to 64 bytes; the copies of a buffer follow each other. Scratch
/// is shared by the chunks of a rank: one of them runs at a time.
std::vector<BufferSpec> stage_buffers(const Plan& plan, const RankPlan& rank);

/// Bytes of all copies of all of them.
int64_t stage_buffers_bytes(const Plan& plan, const RankPlan& rank);

/// The same, of the stage of the run (Plan::step_stages) that takes most: what a training rank allocates.
int64_t largest_stage_buffers_bytes(const Plan& plan, int64_t rank);
/// How much more of it Plan::keeps_norms takes, whether the plan has it or not.
int64_t kept_norms_bytes(const Plan& plan, int64_t rank);

}  // namespace cairn
