#include "runtime/plan/activations.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <set>
#include <tuple>
#include <utility>

#include "runtime/plan/buffer_names.h"
#include "runtime/plan/model_tensors.h"

namespace cairn {
namespace {

/// Experts' counts stay on the device where one rank has all experts. Products of groups take packs of 16 bytes.
bool counts_stay(const Plan& plan, const StageDims& d) {
  constexpr int64_t kPack = 8;
  return plan.recipe.device == DeviceChoice::kCuda && plan.pass_tokens == 0 && d.ep == 1 && d.row_parts == 1 &&
         d.width % kPack == 0 && d.expert_ffn % kPack == 0;
}

}  // namespace

StageDims stage_dims(const Plan& plan, const RankPlan& rank) {
  const ModelConfig& m = plan.recipe.model;
  const int64_t tp = plan.mesh.tp();
  StageDims d;
  const int64_t sequence = plan.pass_tokens > 0 ? plan.pass_tokens : plan.sequence_tokens;
  d.cp = plan.mesh.cp();
  d.all_token_parts = plan.token_parts();
  d.held = TokenRuns::of_rank(sequence, d.cp, rank.at.cp, d.all_token_parts);
  d.tokens = d.held.count;
  d.samples = plan.recipe.batch.micro * (plan.pass_tokens > 0 ? 1 : m.context / sequence);
  d.positions = plan.pass_tokens > 0 ? m.context : has_own_rows(plan.recipe) ? sequence : d.tokens;
  d.rows = d.samples * d.tokens;
  d.local_rows = plan.recipe.mesh.sequence_parallel ? d.rows / tp : d.rows;
  d.width = m.width;
  d.embed = embed_dim(m);
  d.heads = m.heads / tp;
  d.kv_heads = m.kv_heads * plan.kv_copies() / tp;
  d.head_dim = m.head_dim;
  d.qkv = (d.heads + 2 * d.kv_heads) * d.head_dim;
  d.value_dim = value_dim(m);
  if (has_mla(m)) {
    d.q_rank = m.mla.q_rank;
    d.kv_rank = m.mla.kv_rank;
    d.nope_dim = m.mla.nope_dim;
    d.rope_dim = m.mla.rope_dim;
  }
  d.ffn = m.ffn / tp;
  d.ffn_in = is_gated(m.activation) ? 2 * d.ffn : d.ffn;
  d.all_parts = plan.sum_parts();
  d.parts = std::max<int64_t>(1, d.all_parts / tp);
  d.row_parts = d.held.parts * (plan.recipe.mesh.sequence_parallel ? d.parts : d.all_parts);
  if (m.moe.experts > 0) {
    d.experts = m.moe.experts;
    d.choices = m.moe.top_k;
    d.expert_ffn = expert_ffn(m) / tp;
    d.expert_ffn_in = is_gated(m.activation) ? 2 * d.expert_ffn : d.expert_ffn;
    d.shared_ffn = shared_ffn(m) / tp;
    d.ep = plan.mesh.ep();
    d.local_experts = d.experts / d.ep;
    d.first_expert = rank.expert_part * d.local_experts;
    d.expert_sources = plan.expert_sources();
    d.places_groups = counts_stay(plan, d);
    // The worst case: all tokens of the ep group choose experts of this rank, as many of them as there are, and each is
    // one row over a multiple.
    const int64_t apart = d.ep / d.expert_sources * d.rows * std::min(d.choices, d.local_experts);
    const int64_t used = std::min(d.local_experts, apart);
    d.expert_rows = d.expert_sources * ((apart + used * (kExpertRowsAlign - 1)) / kExpertRowsAlign * kExpertRowsAlign);
  }
  if (rank.head()) {
    d.vocab = plan.padded_vocab / tp;
    const bool on_cuda = plan.recipe.device == DeviceChoice::kCuda;
    const int64_t bytes = plan.pass_tokens > 0 ? kPassLogitsBytes : on_cuda ? kCudaLogitsBytes : kLogitsBytes;
    // Gradients of weights are sums over these rows: where no layout may show, tp must not decide how many there are.
    const int64_t columns = d.all_parts > 1 ? plan.padded_vocab : d.vocab;
    const int64_t fitting = bytes / (columns * dtype_size_bytes(plan.compute_dtype()));
    d.logit_rows = std::clamp<int64_t>(fitting, 1, d.rows);
    if (on_cuda) {  // equal ones: the last one's kernels would not fill a device
      const int64_t blocks = (d.rows + d.logit_rows - 1) / d.logit_rows;
      d.logit_rows = (d.rows + blocks - 1) / blocks;
    }
    if (d.all_token_parts > 1) {  // whole subtrees of the parts
      int64_t blocks = 1;
      while (blocks < d.held.parts && d.rows / blocks > fitting) blocks *= 2;
      d.logit_rows = d.rows / blocks;
    }
  }
  return d;
}

int64_t attention_scratch_elems(const StageDims& dims) {
  return dims.rows * dims.heads * (1 + (dims.head_dim + 15) / 16 * 16);
}

int64_t tree_sum_elems(int64_t parts, int64_t elems) { return (std::bit_width(static_cast<uint64_t>(parts))) * elems; }

bool has_branch_gradient(const ModelConfig& m) {
  return is_parallel(m.block) || has_out_norms(m.block) || m.branch_scale != 1.0;
}

int64_t qk_norm_sum_elems(const ModelConfig& model, const StageDims& dims) {
  const int64_t sums = shared_norm_sums(model) * dims.head_dim, of_heads = tree_sum_elems(dims.parts, sums);
  return dims.all_token_parts == 1 ? of_heads : of_heads + 2 * dims.held.parts * sums;
}

int64_t BufferSpec::bytes() const {
  const int64_t raw = elems * dtype_size_bytes(dtype);
  return (raw + kBufferAlignBytes - 1) / kBufferAlignBytes * kBufferAlignBytes;
}

bool holds_experts(const Plan& plan, const RankPlan& rank) {
  for (const Chunk& chunk : rank.chunks) {
    for (int64_t l = chunk.stage.first_layer; l < chunk.stage.end_layer; ++l) {
      if (has_experts(plan.recipe.model, l)) return true;
    }
    const ModelConfig& m = plan.recipe.model;
    if (chunk.stage.head && plan.mtp_depth() > 0 && has_experts(m, m.layers)) return true;
  }
  return false;
}

RecomputeMode layer_recompute(const Plan& plan, const Stage& stage, int64_t layer) {
  const RecomputeConfig& config = plan.recipe.recompute;
  const bool counted = config.layers == 0 || layer - stage.first_layer < config.layers;
  return counted ? config.mode : RecomputeMode::kNone;
}

KeptNorms kept_norms(const Plan& plan) {
  const BlockKind block = plan.recipe.model.block;
  if (!plan.keeps_norms || plan.pass_tokens > 0) return {};
  const bool before = block != BlockKind::kPostNorm && block != BlockKind::kOutNorm;
  return {.attention = before, .mlp = before && block != BlockKind::kParallelShared, .after = has_post_norms(block)};
}

bool distributes_inputs(const Plan& plan) {
  const RecomputeConfig& config = plan.recipe.recompute;
  return config.mode == RecomputeMode::kFull && config.distribute && plan.mesh.tp() > 1;
}

std::vector<BufferSpec> stage_buffers(const Plan& plan, const RankPlan& rank) {
  const ModelConfig& m = plan.recipe.model;
  const StageDims d = stage_dims(plan, rank);
  const DType compute = plan.compute_dtype();
  std::vector<BufferSpec> out;
  const auto add = [&](std::string name, int64_t elems, DType dtype, int64_t copies) {
    if (copies > 0) out.push_back({std::move(name), dtype, elems, copies});
  };
  const auto scratch = [&](std::string name, int64_t elems, DType dtype) { add(std::move(name), elems, dtype, 1); };

  const int64_t stream = d.local_rows * d.width, core = d.rows * d.heads * d.head_dim;
  const int64_t some_qk = m.clip_qkv > 0               ? d.rows * d.qkv
                          : m.qk_norm != QkNorm::kNone ? d.rows * (d.heads + d.kv_heads) * d.head_dim
                                                       : 0;
  const int64_t latent = d.local_rows * d.latent();
  const bool parallel = is_parallel(m.block);
  const KeptNorms norms = kept_norms(plan);
  const int64_t stats = d.local_rows * (m.norm == NormKind::kLayerNorm ? 2 : 1);
  bool shares_core = false, shares_dense = false, shares_sparse = false, some_dense = false, some_sparse = false;
  for (const Chunk& chunk : rank.chunks) {
    const Stage& stage = chunk.stage;
    const int64_t in_flight = chunk.in_flight;
    const auto add_layer = [&](int64_t layer, int64_t late) {  // late: micro-batches between the halves of its backward
      const std::string prefix = layer_prefix(m, layer);
      const RecomputeMode mode = layer_recompute(plan, stage, layer);
      const bool full = mode == RecomputeMode::kFull, dense = !has_experts(m, layer);
      (dense ? some_dense : some_sparse) = true;
      const int64_t whole = full ? late : in_flight;  // what the second half of a backward reads too
      const int64_t first = full ? 0 : in_flight;     // what it does not
      const int64_t of_core = mode == RecomputeMode::kNone ? in_flight : late;
      const int64_t qk = m.clip_qkv > 0 || has_qk_norm(m, layer) ? some_qk : 0;
      shares_core |= mode != RecomputeMode::kNone;
      if (full) (dense ? shares_dense : shares_sparse) = true;
      const int64_t input = full && distributes_inputs(plan) ? stream / plan.mesh.tp() : stream;
      add(prefix + buffer::kAttnInput, input, compute, in_flight);  // the residual stream
      add(prefix + buffer::kAttnQkv, d.rows * d.qkv, compute, whole);
      if (qk > 0) add(prefix + buffer::kAttnQk, qk, compute, first);
      if (latent > 0) add(prefix + buffer::kAttnLatent, latent, compute, whole);
      add(prefix + buffer::kAttnOut, core, compute, of_core);
      if (mode == RecomputeMode::kNone) add(prefix + buffer::kAttnLogsumexp, d.rows * d.heads, DType::kF32, in_flight);
      if (has_post_norms(m.block)) add(prefix + buffer::kAttnPost, stream, compute, in_flight);
      if (norms.attention) {
        add(prefix + buffer::kAttnNormed, stream, compute, whole);
        add(prefix + buffer::kAttnStats, stats, DType::kF32, first);
      }
      if (norms.mlp) {
        add(prefix + buffer::kMlpNormed, stream, compute, dense ? whole : first);
        add(prefix + buffer::kMlpStats, stats, DType::kF32, first);
      }
      if (norms.after) {
        add(prefix + buffer::kAttnPostStats, stats, DType::kF32, in_flight);
        add(prefix + buffer::kMlpPostStats, stats, DType::kF32, in_flight);
      }
      if (!parallel) add(prefix + buffer::kMlpInput, stream, compute, dense ? whole : first);
      if (dense) {
        add(prefix + buffer::kMlpPre, d.rows * d.ffn_in, compute, whole);
      } else {
        add(prefix + buffer::kMoeProbabilities, d.rows * d.experts, DType::kF32, first);
        add(prefix + buffer::kMoeChosen, d.rows * d.choices, DType::kI32, first);
        add(prefix + buffer::kMoeWeights, d.rows * d.choices, DType::kF32, first);
        if (m.moe.z_loss > 0) add(prefix + buffer::kMoeLogSums, d.rows, DType::kF32, first);
        if (d.ep > 1) add(prefix + buffer::kMoeCounts, d.ep * d.experts, DType::kI32, first);
        if (d.shared_ffn > 0) add(prefix + buffer::kMoeSharedPre, d.rows * 2 * d.shared_ffn, compute, first);
        if (m.moe.shared_gate) add(prefix + buffer::kMoeSharedGate, d.rows, DType::kF32, first);
        add(prefix + buffer::kMoePre, d.expert_rows * d.expert_ffn_in, compute, first);
      }
      if (has_post_norms(m.block)) add(prefix + buffer::kMlpPost, stream, compute, in_flight);
      add(prefix + buffer::kAttnDout, stream, compute, late);
      if (latent > 0) add(prefix + buffer::kAttnDlatent, latent, compute, late);
      if (dense) {
        add(prefix + buffer::kMlpDout, stream, compute, late);
        add(prefix + buffer::kMlpDpre, d.rows * d.ffn_in, compute, late);
      }
    };
    for (int64_t layer = stage.first_layer; layer < stage.end_layer; ++layer) add_layer(layer, chunk.late);
    if (d.places_groups && balances_over_layers(m)) {
      add(layer_prefix(m, stage.first_layer) + buffer::kMoeChoices, d.experts, DType::kF32, in_flight);
    }
    if (stage.embedding) {
      if (d.embed != d.width) add(buffer::kEmbedRows, d.local_rows * d.embed, compute, in_flight);
      if (m.embedding_norm) add(buffer::kEmbedInput, stream, compute, in_flight);  // of its norm
    }
    if (stage.head) {
      if (m.top_query) {
        add(buffer::kTopQueryNormInput, stream, compute, in_flight);
        add_layer(m.layers, 0);  // the head's backward is not split, and this is a part of it
      }
      const auto add_head = [&](const std::string& prefix) {
        add(prefix + buffer::kHeadInput, stream, compute, in_flight);
        add(prefix + buffer::kHeadMax, d.rows, DType::kF32, in_flight);
        add(prefix + buffer::kHeadSums, 2 * d.rows, DType::kF32, in_flight);  // exponentials; target logit, then loss
      };
      add_head("");
      for (int64_t k = 0; k < plan.mtp_depth(); ++k) {
        const std::string prefix = layer_prefix(m, m.layers + k);
        add(prefix + buffer::kMtpEmbedded, stream, compute, in_flight);
        add_layer(m.layers + k, 0);  // like the head's
        add_head(prefix);
      }
    }
  }
  if (shares_core) {
    scratch(buffer::shared(buffer::kAttnOut), core, compute);
    scratch(buffer::shared(buffer::kAttnLogsumexp), d.rows * d.heads, DType::kF32);
  }
  if (shares_dense || shares_sparse) {
    scratch(buffer::shared(buffer::kAttnQkv), d.rows * d.qkv, compute);
    if (some_qk > 0) scratch(buffer::shared(buffer::kAttnQk), some_qk, compute);
    if (latent > 0) scratch(buffer::shared(buffer::kAttnLatent), latent, compute);
    if (!parallel) scratch(buffer::shared(buffer::kMlpInput), stream, compute);
    if (norms.attention) {
      scratch(buffer::shared(buffer::kAttnNormed), stream, compute);
      scratch(buffer::shared(buffer::kAttnStats), stats, DType::kF32);
    }
    if (norms.mlp) {
      scratch(buffer::shared(buffer::kMlpNormed), stream, compute);
      scratch(buffer::shared(buffer::kMlpStats), stats, DType::kF32);
    }
    if (parallel || shares_sparse) scratch(buffer::shared(buffer::kOutput), stream, compute);
    if (shares_dense) scratch(buffer::shared(buffer::kMlpPre), d.rows * d.ffn_in, compute);
    if (shares_sparse) {
      scratch(buffer::shared(buffer::kMoeProbabilities), d.rows * d.experts, DType::kF32);
      scratch(buffer::shared(buffer::kMoeChosen), d.rows * d.choices, DType::kI32);
      scratch(buffer::shared(buffer::kMoeWeights), d.rows * d.choices, DType::kF32);
      if (m.moe.z_loss > 0) scratch(buffer::shared(buffer::kMoeLogSums), d.rows, DType::kF32);
      if (d.ep > 1) scratch(buffer::shared(buffer::kMoeCounts), d.ep * d.experts, DType::kI32);
      if (d.shared_ffn > 0) scratch(buffer::shared(buffer::kMoeSharedPre), d.rows * 2 * d.shared_ffn, compute);
      if (m.moe.shared_gate) scratch(buffer::shared(buffer::kMoeSharedGate), d.rows, DType::kF32);
      scratch(buffer::shared(buffer::kMoePre), d.expert_rows * d.expert_ffn_in, compute);
    }
    if (distributes_inputs(plan)) scratch(buffer::shared(buffer::kAttnInput), stream, compute);
  }
  const int64_t widest = std::max(d.width, d.embed);
  scratch(buffer::kScratchRows, d.rows * widest, compute);  // input of column-cut projections: norm output, gathered
  scratch(buffer::kScratchPartial, d.rows * widest,
          compute);  // summed over tp: outputs of row cuts, gradients of the above
  if (d.all_parts > 1 && plan.mesh.tp() > 1 && compute != DType::kF32) {
    scratch(buffer::kScratchSums, d.rows * widest, DType::kF32);  // the same before it is rounded
  }
  const bool column_bias = has_bias(m, BiasOf::kQkv) || has_bias(m, BiasOf::kMlp);
  if (d.row_trees()) {  // gradients of norms' weights and biases, of q's and k's; of biases
    int64_t sums = std::max(tree_sum_elems(d.row_parts, 2 * d.width), qk_norm_sum_elems(m, d));
    if (d.all_token_parts > 1 && column_bias) {
      sums = std::max(sums, tree_sum_elems(d.held.parts, std::max(d.ffn_in, d.qkv)));
    }
    if (d.all_token_parts > 1 && m.head_bias && rank.head()) sums = std::max(sums, d.held.parts * d.vocab);
    scratch(buffer::kScratchRowSums, sums, DType::kF32);
  }
  scratch(buffer::kScratchDresidual, stream, compute);
  if (has_branch_gradient(m)) scratch(buffer::kScratchDbranch, stream, compute);
  // Between a column and a row cut.
  int64_t hidden = core, dhidden = d.rows * d.qkv;
  if (has_mla(m)) {  // keys and values of their own; in generation queries and answers as wide as latent vectors
    hidden = std::max(hidden, d.rows * d.heads * (d.nope_dim + d.value_dim));
    const int64_t absorbed = plan.pass_tokens > 0 ? d.rows * d.heads * (d.kv_rank + d.rope_dim) : 0;
    hidden = std::max(hidden, absorbed);
    dhidden = std::max(dhidden, absorbed);
    scratch(buffer::kScratchLatents, d.rows * d.latent(), compute);
    scratch(buffer::kScratchDlatents, d.rows * d.latent(), compute);
  }
  if (some_dense) {
    hidden = std::max(hidden, d.rows * d.ffn);
    dhidden = std::max(dhidden, d.rows * d.ffn_in);
  }
  if (some_sparse) {
    hidden = std::max({hidden, d.expert_rows * d.expert_ffn, d.rows * d.shared_ffn});
    dhidden = std::max(dhidden, d.expert_rows * d.expert_ffn_in);
  }
  scratch(buffer::kScratchHidden, hidden, compute);
  scratch(buffer::kScratchDhidden, dhidden, compute);
  if (some_sparse) {
    scratch(buffer::kMoeRows, d.expert_rows * d.width, compute);
    scratch(buffer::kMoeDrows, d.expert_rows * d.width, compute);
    scratch(buffer::kMoeDhidden, d.expert_rows * d.expert_ffn, compute);
    scratch(buffer::kMoeDlogits, d.rows * d.experts, compute);
    scratch(buffer::kMoeRowsOf, d.rows * d.choices, DType::kI32);
    if (d.places_groups) scratch(buffer::kMoeGroups, (d.experts + 1) * kGroupRowsBytes / 4, DType::kI32);
    // First the routing weights', then the shared MLP's gate's: they are added over tp together.
    scratch(buffer::kMoeDweights, d.rows * (d.choices + (m.moe.shared_gate ? 1 : 0)), DType::kF32);
    if (m.moe.shared_gate) scratch(buffer::kMoeSharedDgate, d.rows, compute);
    scratch(buffer::kMoeBalance, d.experts, DType::kF32);
    if (has_bias(m, BiasOf::kMlp)) scratch(buffer::kMoeBiasDots, d.rows * d.choices, DType::kF32);
    if (has_choice_bias(m)) scratch(buffer::kMoeBias, d.experts, DType::kF32);
    if (d.shared_ffn > 0) {
      scratch(buffer::kMoeSharedDhidden, d.rows * d.shared_ffn, compute);
      scratch(buffer::kMoeSharedDpre, d.rows * 2 * d.shared_ffn, compute);
    }
    if (d.ep > 1) {
      scratch(buffer::kMoeSent, d.rows * d.choices * d.width, compute);
      scratch(buffer::kMoeSentNumbers, d.rows * d.choices, DType::kF32);
      scratch(buffer::kMoeRowWeights, d.expert_rows, DType::kF32);
      scratch(buffer::kMoeRowDots, d.expert_rows, DType::kF32);
    }
  }
  scratch(buffer::kScratchAttention, attention_scratch_elems(d), DType::kF32);
  if (d.cp > 1) {
    const int64_t kv = d.cp * d.rows * 2 * d.kv_heads * d.head_dim;
    scratch(buffer::kCpExchanged, kv, compute);
    if (d.all_token_parts == 1) scratch(buffer::kCpKv, kv, compute);
    scratch(buffer::kCpDkv, kv, d.all_token_parts == 1 ? compute : DType::kF32);
  }
  scratch(buffer::kScratchRstd, d.local_rows, DType::kF32);
  if (m.norm == NormKind::kLayerNorm) scratch(buffer::kScratchMean, d.local_rows, DType::kF32);
  if (column_bias) {
    const int64_t shared_in = has_bias(m, BiasOf::kMlp) ? 2 * d.shared_ffn : 0;
    scratch(buffer::kScratchDbias, std::max({d.ffn_in, d.expert_ffn_in, shared_in, d.qkv, d.latent()}), DType::kF32);
  }
  if (m.positions == Positions::kRotary) scratch(buffer::kRotaryTable, d.positions * rotary_dims(m), DType::kF32);
  if (m.window_rope_theta > 0) scratch(buffer::kWindowRotaryTable, d.positions * rotary_dims(m), DType::kF32);
  if (m.temperature_scale > 0) scratch(buffer::kTemperatureTable, d.positions * d.head_dim, DType::kF32);
  if (m.attention_sinks) scratch(buffer::kSinks, d.heads, DType::kF32);
  if (m.positions == Positions::kAlibi) scratch(buffer::kAlibiSlopes, d.heads, DType::kF32);
  if (rank.head() && plan.mtp_depth() > 0) {
    scratch(buffer::kMtpJoined, 2 * stream, compute);
    scratch(buffer::kMtpDhidden, stream, compute);
  }
  if (rank.head()) {
    scratch(buffer::kHeadLogits, d.logit_rows * d.vocab, compute);
    if (plan.mesh.tp() > 1 || d.all_parts > 1) scratch(buffer::kHeadLocalMax, d.parts * d.rows, DType::kF32);
    if (d.all_parts > 1) scratch(buffer::kHeadPartSums, d.parts * d.rows, DType::kF32);
    scratch(buffer::kHeadScale, d.rows, DType::kF32);
    if (d.all_token_parts > 1 && d.logit_rows < d.rows) {  // gradients of the matrix, from a part of the rows each
      scratch(buffer::kHeadWeightSums, tree_sum_elems(d.rows / d.logit_rows, d.vocab * d.embed), DType::kF32);
    }
  }
  return out;
}

int64_t stage_buffers_bytes(const Plan& plan, const RankPlan& rank) {
  int64_t bytes = 0;
  for (const BufferSpec& buffer : stage_buffers(plan, rank)) {
    bytes += buffer.bytes() * buffer.copies;
  }
  return bytes;
}

int64_t largest_stage_buffers_bytes(const Plan& plan, int64_t rank) {
  const int64_t pipeline_rank = plan.mesh.coords(rank).pp;
  int64_t bytes = 0;
  std::set<std::tuple<int64_t, int64_t, int64_t>> shapes;                // most stages of a ramp are alike
  std::set<std::pair<std::vector<int64_t>, std::vector<int64_t>>> seen;  // and many of the others take the same
  for (size_t k = 0; k < plan.step_stages.size(); ++k) {
    const StepStage& stage = plan.step_stages[k];
    const ScheduleShape shape = long_enough(schedule_shape(plan.recipe, stage.micro_batches(plan.mesh.dp())));
    if (!shapes.insert({stage.micro, stage.tokens, shape.micro_batches}).second) continue;
    std::vector<int64_t> held = in_flight_micro_batches(shape, pipeline_rank);
    const std::vector<int64_t> late = late_micro_batches(shape, pipeline_rank);
    held.insert(held.end(), late.begin(), late.end());
    if (!seen.insert({{stage.micro, stage.tokens}, std::move(held)}).second) continue;
    const Plan then = plan.at(k);
    bytes = std::max(bytes, stage_buffers_bytes(then, then.rank(rank)));
  }
  return bytes;
}

int64_t kept_norms_bytes(const Plan& plan, int64_t rank) {
  Plan with = plan, without = plan;
  with.keeps_norms = true;
  without.keeps_norms = false;
  return largest_stage_buffers_bytes(with, rank) - largest_stage_buffers_bytes(without, rank);
}

}  // namespace cairn
