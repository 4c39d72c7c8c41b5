#include "runtime/nn/position_queries.h"

#include <algorithm>

#include "runtime/kernels/embedding.h"
#include "runtime/nn/branch.h"

namespace cairn::nn {

template <typename Real>
PositionQueries<Real>::PositionQueries(const Parameters<Real>& parameters, const ModelConfig& model,
                                       const StageDims& dims, const TensorParallel<Real>& tp,
                                       const Scratch<Real>& scratch)
    : dims_(dims),
      table_(parameters.get("top_query.positions")),
      q_({linear(parameters, "top_query.attn.q", model.width)}, 0, dims.qkv),
      tp_(tp),
      scratch_(scratch) {}

template <typename Real>
int64_t PositionQueries<Real>::position_of(int64_t row) const {
  if (scratch_.cached != nullptr) return std::max(0, scratch_.cached->position_of(row));
  if (scratch_.positions != nullptr) return scratch_.positions[row];
  return dims_.held.position(row % dims_.tokens);
}

template <typename Real>
void PositionQueries<Real>::look_up() const {
  const int64_t width = dims_.width;
  for (int64_t r = 0; r < dims_.rows; ++r) {
    std::copy_n(table_.weight + position_of(r) * width, width, scratch_.partial_TH + r * width);
  }
}

template <typename Real>
void PositionQueries<Real>::forward(Real* qkv) const {
  look_up();
  q_.forward(scratch_.partial_TH, qkv, dims_.rows);
}

template <typename Real>
Status PositionQueries<Real>::backward(const Real* dqkv) const {
  const int64_t width = dims_.width;
  look_up();
  q_.backward_weight(dqkv, scratch_.partial_TH, scratch_.dbias, dims_.rows);
  q_.backward_input(dqkv, scratch_.partial_TH, dims_.rows);
  RT_TRY(tp_.reduce(scratch_.partial_TH, "top query attn.dpositions"));
  const Real* drow = tp_.local(scratch_.partial_TH);
  for (int64_t r = 0; r < dims_.local_rows; ++r, drow += width) {
    float* const dtable = table_.grad + position_of(tp_.first_row() + r) * width;
    kernels::positions_backward(drow, dtable, 1, 0, 1, 1, width);
  }
  return {};
}

template class PositionQueries<float>;
template class PositionQueries<bf16>;
template class PositionQueries<f16>;

}  // namespace cairn::nn
