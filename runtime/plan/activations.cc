#include "runtime/plan/activations.h"

#include <fmt/format.h>

#include <algorithm>

namespace cairn {

StageDims stage_dims(const Plan& plan, const RankPlan& rank) {
  const ModelConfig& m = plan.recipe.model;
  const int64_t tp = plan.mesh.tp();
  StageDims d;
  d.samples = plan.recipe.batch.micro;
  d.tokens = m.context;
  d.rows = d.samples * d.tokens;
  d.local_rows = plan.recipe.mesh.sequence_parallel ? d.rows / tp : d.rows;
  d.width = m.width;
  d.heads = m.heads / tp;
  d.kv_heads = m.kv_heads / tp;
  d.head_dim = m.head_dim;
  d.qkv = (d.heads + 2 * d.kv_heads) * d.head_dim;
  d.ffn = m.ffn / tp;
  d.ffn_in = m.activation == Activation::kSwiGlu ? 2 * d.ffn : d.ffn;
  if (rank.head()) {
    d.vocab = plan.padded_vocab / tp;
    const int64_t fitting = kLogitsBytes / (d.vocab * dtype_size_bytes(plan.compute_dtype()));
    d.logit_rows = std::clamp<int64_t>(fitting, 1, d.rows);
  }
  return d;
}

int64_t attention_scratch_elems(const StageDims& dims) {
  return dims.rows * dims.heads * (1 + (dims.head_dim + 15) / 16 * 16);
}

int64_t BufferSpec::bytes() const {
  const int64_t raw = elems * dtype_size_bytes(dtype);
  return (raw + kBufferAlignBytes - 1) / kBufferAlignBytes * kBufferAlignBytes;
}

RecomputeMode layer_recompute(const Plan& plan, const Stage& stage, int64_t layer) {
  const RecomputeConfig& config = plan.recipe.recompute;
  const bool counted = config.layers == 0 || layer - stage.first_layer < config.layers;
  return counted ? config.mode : RecomputeMode::kNone;
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
  bool shares_core = false, shares_layer = false;

  for (const Chunk& chunk : rank.chunks) {
    const Stage& stage = chunk.stage;
    for (int64_t layer = stage.first_layer; layer < stage.end_layer; ++layer) {
      const std::string prefix = fmt::format("layers.{}.", layer);
      const RecomputeMode mode = layer_recompute(plan, stage, layer);
      const bool full = mode == RecomputeMode::kFull;
      const int64_t whole = full ? chunk.late : chunk.in_flight;
      const int64_t of_core = mode == RecomputeMode::kNone ? chunk.in_flight : chunk.late;
      shares_core |= mode != RecomputeMode::kNone;
      shares_layer |= full;
      const int64_t input = full && distributes_inputs(plan) ? stream / plan.mesh.tp() : stream;
      add(prefix + "attn.input", input, compute, chunk.in_flight);  // of its norm: the residual stream
      add(prefix + "attn.qkv", d.rows * d.qkv, compute, whole);
      add(prefix + "attn.out", core, compute, of_core);
      if (mode == RecomputeMode::kNone) {
        add(prefix + "attn.logsumexp", d.rows * d.heads, DType::kF32, chunk.in_flight);
      }
      add(prefix + "mlp.input", stream, compute, whole);
      add(prefix + "mlp.pre", d.rows * d.ffn_in, compute, whole);
      add(prefix + "attn.dout", stream, compute, chunk.late);
      add(prefix + "mlp.dout", stream, compute, chunk.late);
      add(prefix + "mlp.dpre", d.rows * d.ffn_in, compute, chunk.late);
    }
    if (stage.head) {
      add("head.input", stream, compute, chunk.in_flight);
      add("head.max", d.rows, DType::kF32, chunk.in_flight);
      add("head.sums", 2 * d.rows, DType::kF32, chunk.in_flight);  // of exponentials; target logit, becomes the loss
    }
  }
  if (shares_core) {
    scratch("shared.attn.out", core, compute);
    scratch("shared.attn.logsumexp", d.rows * d.heads, DType::kF32);
  }
  if (shares_layer) {
    scratch("shared.attn.qkv", d.rows * d.qkv, compute);
    scratch("shared.mlp.input", stream, compute);
    scratch("shared.mlp.pre", d.rows * d.ffn_in, compute);
    if (distributes_inputs(plan)) scratch("shared.attn.input", stream, compute);
  }
  scratch("scratch.rows", d.rows * d.width, compute);     // input of column-cut projections: norm output, gathered
  scratch("scratch.partial", d.rows * d.width, compute);  // summed over tp: outputs of row cuts, gradients of the above
  scratch("scratch.dresidual", d.local_rows * d.width, compute);
  scratch("scratch.hidden", d.rows * std::max(d.ffn, d.heads * d.head_dim), compute);  // between a column and a row cut
  scratch("scratch.dhidden", d.rows * std::max(d.ffn_in, d.qkv), compute);
  scratch("scratch.attention", attention_scratch_elems(d), DType::kF32);
  scratch("scratch.rstd", d.local_rows, DType::kF32);
  if (m.norm == NormKind::kLayerNorm) scratch("scratch.mean", d.local_rows, DType::kF32);
  if (m.bias) scratch("scratch.dbias", std::max(d.ffn_in, d.qkv), DType::kF32);
  if (m.positions == Positions::kRotary) scratch("rotary.table", d.tokens * d.head_dim, DType::kF32);
  if (rank.head()) {
    scratch("head.logits", d.logit_rows * d.vocab, compute);
    if (plan.mesh.tp() > 1) scratch("head.local_max", d.rows, DType::kF32);
    scratch("head.scale", d.rows, DType::kF32);
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

}  // namespace cairn
