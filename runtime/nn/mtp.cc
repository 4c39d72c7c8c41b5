#include "runtime/nn/mtp.h"

#include <algorithm>
#include <utility>

namespace cairn::nn {

int32_t target_ahead(const int32_t* targets, int64_t row, int64_t tokens, int64_t k) {
  if (row % tokens + k + 1 >= tokens) return kNoTarget;
  const int32_t* const last = targets + row + k + 1;
  return std::find(targets + row, last, kNoTarget) == last ? *last : kNoTarget;
}

void TokensAhead::set(const int32_t* model_inputs, const int32_t* model_targets, int64_t rows, int64_t tokens,
                      int64_t k) {
  inputs.clear();
  targets.clear();
  for (int64_t r = 0; r < rows; ++r) {
    inputs.push_back(r % tokens + k + 1 < tokens ? model_inputs[r + k + 1] : 0);
    targets.push_back(target_ahead(model_targets, r, tokens, k));
  }
}

template <typename Real>
MtpInput<Real>::MtpInput(const Parameters<Real>& parameters, const ModelConfig& model, const std::string& prefix,
                         const StageDims& dims, const TensorParallel<Real>& tp, const Scratch<Real>& scratch,
                         const Buffers& buffers)
    : on_(parameters.on()),
      dims_(dims),
      embed_norm_(parameters, prefix + "embed_norm", model),
      hidden_norm_(parameters, prefix + "hidden_norm", model),
      project_{parameters.get(prefix + "project.weight"), {}, dims.width, 2 * dims.width, &parameters.on()},
      tokens_(parameters.table_at_end()),
      joined_(buffers.get<Real>(buffer::kMtpJoined)),
      tp_(tp),
      scratch_(scratch) {}

template <typename Real>
Status MtpInput<Real>::look_up(DevicePtr<const int32_t> tokens_T, DevicePtr<Real> embedded_RH) const {
  const StageDims& d = dims_;
  const kernels::TableRange rows{tokens_.first_row, tokens_.valid_rows, d.width};
  on_.embedding_forward(tokens_T, d.rows, rows, tokens_.weight, scratch_.partial_TH);
  RT_TRY(tp_.reduce(scratch_.partial_TH, "embedding ahead"));
  on_.copy(tp_.local(scratch_.partial_TH), embedded_RH, d.local_rows * d.width);
  return {};
}

template <typename Real>
void MtpInput<Real>::join(DevicePtr<const Real> embedded_RH, DevicePtr<const Real> hidden_RH) const {
  const int64_t width = dims_.width, rows = dims_.local_rows;
  const auto half = [&](const Norm<Real>& norm, DevicePtr<const Real> x_RH, int64_t column) {
    norm.forward(x_RH, scratch_.rows_TH, scratch_.stats, rows);
    on_.copy_rows(scratch_.rows_TH, width, joined_ + column, 2 * width, rows, width);
  };
  half(embed_norm_, embedded_RH, 0);
  half(hidden_norm_, hidden_RH, width);
}

template <typename Real>
void MtpInput<Real>::forward(DevicePtr<const Real> embedded_RH, DevicePtr<const Real> hidden_RH,
                             DevicePtr<Real> output_RH) const {
  join(embedded_RH, hidden_RH);
  project_.forward(joined_, output_RH, dims_.width, dims_.local_rows);
}

template <typename Real>
Status MtpInput<Real>::backward(DevicePtr<const int32_t> tokens_T, DevicePtr<const Real> embedded_RH,
                                DevicePtr<const Real> hidden_RH, DevicePtr<Real> dhidden_RH) const {
  const StageDims& d = dims_;
  const int64_t width = d.width, rows = d.local_rows;
  const DevicePtr<Real> stream_RH = scratch_.dresidual_RH, rows_RH = scratch_.rows_TH;
  join(embedded_RH, hidden_RH);
  project_.backward_weight(stream_RH, width, joined_, rows);
  project_.backward_input(stream_RH, width, joined_, false, rows);
  on_.copy_rows(joined_ + width, 2 * width, rows_RH, width, rows, width);
  hidden_norm_.backward(rows_RH, hidden_RH, scratch_.stats, dhidden_RH, rows);

  embed_norm_.forward(embedded_RH, rows_RH, scratch_.stats, rows);  // for its statistics
  on_.copy_rows(joined_, 2 * width, rows_RH, width, rows, width);
  embed_norm_.backward(rows_RH, embedded_RH, scratch_.stats, stream_RH, rows);
  DevicePtr<const Real> dy_TH;
  RT_TRY(tp_.gather_from(stream_RH, scratch_.partial_TH, &dy_TH, "embedding ahead.dout"));
  if (tokens_.unwritten != nullptr && std::exchange(*tokens_.unwritten, 0) != 0) {
    on_.clear_floats(tokens_.grad, tokens_.rows * width);
  }
  on_.embedding_backward(tokens_T, d.rows, {tokens_.first_row, tokens_.valid_rows, width}, dy_TH, tokens_.grad, 1.0f);
  return {};
}

template class MtpInput<float>;
template class MtpInput<bf16>;
template class MtpInput<f16>;

}  // namespace cairn::nn
