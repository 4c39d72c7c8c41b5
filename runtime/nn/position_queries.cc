#include "runtime/nn/position_queries.h"

#include "runtime/nn/branch.h"

namespace cairn::nn {

template <typename Real>
PositionQueries<Real>::PositionQueries(const Parameters<Real>& parameters, const ModelConfig& model,
                                       const StageDims& dims, const TensorParallel<Real>& tp,
                                       const Scratch<Real>& scratch)
    : on_(parameters.on()),
      dims_(dims),
      table_(parameters.get("top_query.positions")),
      q_({linear(parameters, "top_query.attn.q", model.width)}, 0, dims.qkv),
      tp_(tp),
      scratch_(scratch) {}

template <typename Real>
kernels::RowPositions PositionQueries<Real>::positions(int64_t first) const {
  const DevicePtr<const int32_t> at = scratch_.positions ? scratch_.positions + first : nullptr;
  return {.at = at, .first_row = first, .tokens = dims_.held, .samples = dims_.samples};
}

template <typename Real>
void PositionQueries<Real>::look_up() const {
  on_.positions_look_up(table_.weight, positions(0), dims_.rows, dims_.width, scratch_.partial_TH);
}

template <typename Real>
void PositionQueries<Real>::forward(DevicePtr<Real> qkv) const {
  look_up();
  q_.forward(scratch_.partial_TH, qkv, dims_.rows);
}

template <typename Real>
Status PositionQueries<Real>::backward(DevicePtr<const Real> dqkv) const {
  look_up();
  q_.backward_weight(dqkv, scratch_.partial_TH, scratch_.dbias, dims_.rows);
  q_.backward_input(dqkv, scratch_.partial_TH, dims_.rows);
  RT_TRY(tp_.reduce(scratch_.partial_TH, "top query attn.dpositions"));
  on_.positions_backward(tp_.local(scratch_.partial_TH), table_.grad, positions(tp_.first_row()), dims_.local_rows,
                         dims_.width);
  return {};
}

template class PositionQueries<float>;
template class PositionQueries<bf16>;
template class PositionQueries<f16>;

}  // namespace cairn::nn
