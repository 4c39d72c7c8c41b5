#include "runtime/nn/embedding.h"

#include <algorithm>

#include "runtime/kernels/embedding.h"

namespace cairn::nn {

template <typename Real>
Embedding<Real>::Embedding(const Parameters<Real>& parameters, const StageDims& dims, const TensorParallel<Real>& tp,
                           const Scratch<Real>& scratch)
    : dims_(dims),
      tokens_(parameters.get("embed.tokens")),
      positions_(parameters.get_optional("embed.positions")),
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
  if (positions_ && scratch_.cached != nullptr) {
    for (int64_t r = 0; r < d.rows; ++r) {
      const int64_t position = std::max(0, scratch_.cached->position[r]);
      kernels::positions_forward(output_RH + r * d.width, positions_.weight + position * d.width, 1, 0, 1, d.width);
    }
  } else if (positions_) {
    kernels::positions_forward(output_RH, positions_.weight, d.local_rows, tp_.first_row(), d.tokens, d.width);
  }
  return {};
}

template <typename Real>
Status Embedding<Real>::backward(const int32_t* tokens_T) const {
  const StageDims& d = dims_;
  if (positions_) {
    kernels::positions_backward(scratch_.dresidual_RH, positions_.grad, d.local_rows, tp_.first_row(), d.tokens,
                                d.width);
  }
  const Real* dy_TH = nullptr;
  RT_TRY(tp_.gather_from(scratch_.dresidual_RH, scratch_.partial_TH, &dy_TH, "embedding.dout"));
  kernels::embedding_backward(tokens_T, d.rows, dy_TH, tokens_.first_row, tokens_.valid_rows, d.width, tokens_.grad);
  return {};
}

template class Embedding<float>;
template class Embedding<bf16>;

}  // namespace cairn::nn
