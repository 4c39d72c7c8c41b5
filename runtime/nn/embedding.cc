#include "runtime/nn/embedding.h"

#include <algorithm>

#include "runtime/kernels/embedding.h"

namespace cairn::nn {

template <typename Real>
Embedding<Real>::Embedding(const Parameters<Real>& parameters, const ModelConfig& model, double gradient_part,
                           const StageDims& dims, const TensorParallel<Real>& tp, const Scratch<Real>& scratch)
    : dims_(dims),
      tokens_(parameters.get("embed.tokens")),
      positions_(parameters.get_optional("embed.positions")),
      dropout_(model.embedding_dropout, -1, DropoutPlace::kEmbedding),
      gradient_part_(static_cast<float>(gradient_part)),
      tp_(tp),
      scratch_(scratch) {}

template <typename Real>
Status Embedding<Real>::forward(const int32_t* tokens_T, Real* output_RH) const {
  const StageDims& d = dims_;
  // A token outside this rank's rows gives zeros, so the sum over the ranks is its row.
  Real* partial_TH = scratch_.partial_TH;
  kernels::embedding_forward(tokens_T, d.rows, tokens_.weight, tokens_.first_row, tokens_.valid_rows, d.width,
                             partial_TH);
  RT_TRY(tp_.reduce(partial_TH, "embedding"));
  std::copy_n(tp_.local(partial_TH), d.local_rows * d.width, output_RH);
  if (positions_) {
    kernels::positions_forward(output_RH, positions_.weight, d.local_rows, tp_.first_row(), d.tokens, d.width);
  }
  if (dropout_.on(scratch_)) dropout_.apply(output_RH, output_RH, tp_, scratch_, d);
  return {};
}

template <typename Real>
Status Embedding<Real>::backward(const int32_t* tokens_T) const {
  const StageDims& d = dims_;
  if (dropout_.on(scratch_)) dropout_.apply(scratch_.dresidual_RH, scratch_.dresidual_RH, tp_, scratch_, d);
  if (positions_) {
    kernels::positions_backward(scratch_.dresidual_RH, positions_.grad, d.local_rows, tp_.first_row(), d.tokens,
                                d.width);
  }
  const Real* dy_TH = nullptr;
  RT_TRY(tp_.gather_from(scratch_.dresidual_RH, scratch_.partial_TH, &dy_TH, "embedding.dout"));
  kernels::embedding_backward(tokens_T, d.rows, dy_TH, tokens_.first_row, tokens_.valid_rows, d.width, tokens_.grad,
                              gradient_part_);
  return {};
}

template class Embedding<float>;
template class Embedding<bf16>;
template class Embedding<f16>;

}  // namespace cairn::nn
