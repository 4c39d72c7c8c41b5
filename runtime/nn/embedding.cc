#include "runtime/nn/embedding.h"

#include <utility>

#include "runtime/nn/rounded.h"

namespace cairn::nn {

template <typename Real>
Embedding<Real>::Embedding(const Parameters<Real>& parameters, const ModelConfig& model, double gradient_part,
                           const StageDims& dims, const TensorParallel<Real>& tp, const Scratch<Real>& scratch)
    : on_(parameters.on()),
      dims_(dims),
      position_offset_(model.position_offset),
      tokens_(parameters.get("embed.tokens")),
      positions_(parameters.get_optional("embed.positions")),
      project_{parameters.get_optional("embed.project_in.weight"), {}, dims.width, dims.embed, &parameters.on()},
      dropout_(on_, model.embedding_dropout, -1, DropoutPlace::kEmbedding),
      scale_(rounded<Real>(model.embedding_scale)),
      gradient_part_(static_cast<float>(gradient_part * scale_)),
      tp_(tp),
      rows_tp_(tp.with_width(dims.embed)),
      scratch_(scratch) {
  if (model.embedding_norm) norm_.emplace(parameters, "embed.norm", model);
}

template <typename Real>
Status Embedding<Real>::forward(const SavedEmbedding<Real>& saved, DevicePtr<const int32_t> tokens_T,
                                DevicePtr<Real> output_RH) const {
  const StageDims& d = dims_;
  // A token outside this rank's rows gives zeros, so the sum over the ranks is its row.
  DevicePtr<Real> partial_TE = scratch_.partial_TH;
  const kernels::TableRange rows{tokens_.first_row, tokens_.valid_rows, d.embed};
  on_.embedding_forward(tokens_T, d.rows, rows, tokens_.weight, partial_TE);
  RT_TRY(rows_tp_.reduce(partial_TE, "embedding"));
  DevicePtr<Real> rows_RE = rows_tp_.local(partial_TE);
  if (scale_ != 1.0f) on_.scale(rows_RE, scale_, d.local_rows * d.embed);
  DevicePtr<Real> stream_RH = norm_ ? saved.norm_input_RH : output_RH;
  if (project_.weight) {
    on_.copy(rows_RE, saved.rows_RE, d.local_rows * d.embed);
    project_.forward(saved.rows_RE, stream_RH, d.width, d.local_rows);
  } else {
    on_.copy(rows_RE, stream_RH, d.local_rows * d.width);
  }
  if (positions_) {
    on_.positions_forward(stream_RH, positions_.weight + position_offset_ * d.width, positions(tp_.first_row()),
                          d.local_rows, d.width);
  }
  if (norm_) norm_->forward(stream_RH, output_RH, scratch_.stats, d.local_rows);
  if (dropout_.on(scratch_)) dropout_.apply(output_RH, output_RH, tp_, scratch_, d);
  return {};
}

template <typename Real>
kernels::RowPositions Embedding<Real>::positions(int64_t first) const {
  const DevicePtr<const int32_t> at = scratch_.positions ? scratch_.positions + first : nullptr;
  return {.at = at, .first_row = first, .tokens = dims_.held, .samples = dims_.samples};
}

template <typename Real>
void Embedding<Real>::add_position_gradients(DevicePtr<const Real> dstream, int64_t first, int64_t count) const {
  on_.positions_backward(dstream, positions_.grad + position_offset_ * dims_.width, positions(first), count,
                         dims_.width);
}

template <typename Real>
Status Embedding<Real>::backward(const SavedEmbedding<Real>& saved, DevicePtr<const int32_t> tokens_T) const {
  const StageDims& d = dims_;
  DevicePtr<Real> dstream_RH = scratch_.dresidual_RH;
  if (dropout_.on(scratch_)) dropout_.apply(dstream_RH, dstream_RH, tp_, scratch_, d);
  if (norm_) {
    norm_->forward(saved.norm_input_RH, scratch_.rows_TH, scratch_.stats, d.local_rows);  // for its statistics
    norm_->backward(dstream_RH, saved.norm_input_RH, scratch_.stats, dstream_RH, d.local_rows);
  }
  // A position's rows lie on several ranks: where no layout may show they are added when all rows are here.
  const bool all_rows = tp_.tree() && d.local_rows < d.rows;
  if (positions_ && !all_rows) add_position_gradients(dstream_RH, tp_.first_row(), d.local_rows);
  DevicePtr<const Real> drows_RE = dstream_RH;
  if (project_.weight) {
    project_.backward_weight(dstream_RH, d.width, saved.rows_RE, d.local_rows);
    project_.backward_input(dstream_RH, d.width, scratch_.rows_TH, false, d.local_rows);
    drows_RE = scratch_.rows_TH;
  }
  DevicePtr<const Real> dy_TE;
  RT_TRY(rows_tp_.gather_from(drows_RE, scratch_.partial_TH, &dy_TE, "embedding.dout"));
  if (positions_ && all_rows) add_position_gradients(dy_TE, 0, d.rows);
  if (tokens_.unwritten != nullptr && std::exchange(*tokens_.unwritten, 0) != 0) {
    on_.clear_floats(tokens_.grad, tokens_.rows * d.embed);
  }
  const kernels::TableRange rows{tokens_.first_row, tokens_.valid_rows, d.embed};
  if (d.all_token_parts > 1) {
    on_.embedding_backward_parts(tokens_T, d.rows, d.held.parts, rows, dy_TE, tokens_.grad, gradient_part_);
  } else {
    on_.embedding_backward(tokens_T, d.rows, rows, dy_TE, tokens_.grad, gradient_part_);
  }
  return {};
}

template class Embedding<float>;
template class Embedding<bf16>;
template class Embedding<f16>;

}  // namespace cairn::nn
