#include "runtime/nn/kernel_scratch.h"

#include <algorithm>
#include <set>
#include <utility>

#include "runtime/kernels/attention.h"
#include "runtime/kernels/embedding.h"
#include "runtime/kernels/matmul.h"
#include "runtime/kernels/sums_over_rows.h"
#include "runtime/plan/activations.h"

namespace cairn::nn {
namespace {

kernels::ScratchElems scratch_of(const Plan& plan, const StageDims& d) {
  const int64_t widest = std::max({d.width, d.embed, d.qkv, d.heads * d.head_dim, d.ffn, d.ffn_in, d.expert_ffn,
                                   d.expert_ffn_in, 2 * d.shared_ffn, d.latent(), d.heads * (d.nope_dim + d.value_dim),
                                   plan.mtp_depth() > 0 ? 2 * d.width : 0});
  const int64_t rows = std::max(d.rows, d.expert_rows), parts = std::max({d.all_parts, d.row_parts, d.all_token_parts});
  kernels::ScratchElems out = kernels::attention_scratch({.batch = d.samples,
                                                          .tokens = d.held.tokens,
                                                          .heads = d.heads,
                                                          .kv_heads = d.kv_heads,
                                                          .head_dim = d.head_dim,
                                                          .held = d.held,
                                                          .key_parts = d.all_token_parts});
  // Forward, gradients of inputs and of weights: each side of a product is rows or a width.
  const int64_t largest = std::max({rows, widest, d.vocab, d.experts});
  const kernels::MatmulArgs product{.m = largest,
                                    .n = std::max({widest, d.vocab, d.experts}),
                                    .k = largest,
                                    .c_dtype = plan.compute_dtype(),
                                    .parts = parts};
  const kernels::ScratchElems of_product = kernels::matmul_scratch(product);
  out.raise(of_product);
  if (d.experts > 0) out.raise({.task = of_product.own + of_product.task});  // products of small groups, side by side
  // Norms have two arrays of sums, biases one; that of the head is summed as a whole.
  for (const int64_t width : {2 * d.width, widest}) {
    out.raise(kernels::sums_over_rows_scratch(d.row_parts, 1, width, d.rows));
  }
  if (plan.recipe.model.head_bias) out.raise(kernels::sums_over_rows_scratch(1, 1, d.vocab, d.rows));
  if (d.all_token_parts > 1) out.raise(kernels::embedding_backward_parts_scratch(d.rows, d.embed));
  return out;
}

}  // namespace

kernels::ScratchBytes kernel_scratch(const Plan& plan, int64_t rank) {
  kernels::ScratchElems out;
  std::set<std::pair<int64_t, int64_t>> seen;  // shapes of micro-batches
  for (size_t stage = 0; stage < plan.step_stages.size(); ++stage) {
    if (!seen.insert({plan.step_stages[stage].micro, plan.step_stages[stage].tokens}).second) continue;
    const Plan at = plan.at(stage);
    out.raise(scratch_of(at, stage_dims(at, at.rank(rank))));
  }
  return kernels::ScratchBytes::of(out);
}

}  // namespace cairn::nn
