#include "runtime/plan/activations.h"

#include <fmt/format.h>

#include <algorithm>

namespace cairn {

StageDims stage_dims(const Plan& plan, const RankPlan& rank) {
  const ModelConfig& m = plan.recipe.model;
  const int64_t tp = plan.mesh.tp();
  StageDims d;
  d.samples = plan.recipe.batch.micro;
  d.tokens = plan.pass_tokens > 0 ? plan.pass_tokens : m.context;
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
    const int64_t fitting = (plan.pass_tokens > 0 ? kPassLogitsBytes : kLogitsBytes) / (d.vocab * dtype_size_bytes(plan.compute_dtype()));
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

std::vector<BufferSpec> stage_buffers(const Plan& plan, const RankPlan& rank) {
  const ModelConfig& m = plan.recipe.model;
  const StageDims d = stage_dims(plan, rank);
  const DType compute = plan.compute_dtype();
  std::vector<BufferSpec> out;
  int64_t in_flight = 1;
  const auto saved = [&](std::string name, int64_t elems, DType dtype) {
    out.push_back({std::move(name), dtype, elems, in_flight});
  };
  const auto scratch = [&](std::string name, int64_t elems, DType dtype) {
    out.push_back({std::move(name), dtype, elems});
  };

  for (const Chunk& chunk : rank.chunks) {
    in_flight = chunk.in_flight;
    for (int64_t layer = chunk.stage.first_layer; layer < chunk.stage.end_layer; ++layer) {
      const std::string prefix = fmt::format("layers.{}.", layer);
      saved(prefix + "attn.input", d.local_rows * d.width, compute);  // of its norm: the residual stream
      saved(prefix + "attn.qkv", d.rows * d.qkv, compute);
      saved(prefix + "attn.out", d.rows * d.heads * d.head_dim, compute);
      saved(prefix + "attn.logsumexp", d.rows * d.heads, DType::kF32);
      saved(prefix + "mlp.input", d.local_rows * d.width, compute);
      saved(prefix + "mlp.pre", d.rows * d.ffn_in, compute);
    }
    if (chunk.stage.head) {
      saved("head.input", d.local_rows * d.width, compute);
      saved("head.max", d.rows, DType::kF32);
      saved("head.sums", 2 * d.rows, DType::kF32);  // sum of exponentials; target logit, which becomes the loss
    }
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
  if (m.positions == Positions::kRotary) scratch("rotary.table", m.context * d.head_dim, DType::kF32);
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
