#include "runtime/nn/shared_expert.h"

#include <utility>

#include "runtime/nn/branch.h"

namespace cairn::nn {

template <typename Real>
SharedExpert<Real>::SharedExpert(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims,
                                 int64_t layer, const TensorParallel<Real>& tp, const Scratch<Real>& scratch,
                                 const Buffers& buffers)
    : on_(parameters.on()),
      rows_(dims.rows),
      width_(dims.width),
      ffn_(dims.shared_ffn),
      activation_(model),
      up_([&] {
        const std::string prefix = layer_prefix(model, layer) + "moe.shared.";
        return ColumnGroup<Real>(
            {linear(parameters, prefix + "gate", model.width), linear(parameters, prefix + "up", model.width)});
      }()),
      down_(linear(parameters, layer_prefix(model, layer) + "moe.shared.down", dims.shared_ffn)),
      down_bias_(std::exchange(down_.bias, {})),
      tp_(tp),
      scratch_(scratch),
      dhidden_(buffers.get<Real>(buffer::kMoeSharedDhidden)),
      dpre_(buffers.get<Real>(buffer::kMoeSharedDpre)) {
  if (!model.moe.shared_gate) return;
  gate_ = linear(parameters, layer_prefix(model, layer) + "moe.shared_gate", model.width);
  dgate_logits_T_ = buffers.get<Real>(buffer::kMoeSharedDgate);
}

template <typename Real>
void SharedExpert<Real>::forward(DevicePtr<const Real> input_TH, DevicePtr<Real> pre, DevicePtr<float> gate_T,
                                 DevicePtr<Real> output_TH) const {
  up_.forward(input_TH, pre, rows_);
  activate(on_, activation_, pre, scratch_.hidden, rows_, ffn_);
  if (gate_) {
    on_.matmul({.m = rows_,
                .n = 1,
                .k = width_,
                .a = input_TH,
                .lda = width_,
                .b = gate_->weight.weight,
                .ldb = width_,
                .trans_b = true,
                .c = gate_T,
                .ldc = 1,
                .ab_dtype = DTypeOf<Real>::value,
                .c_dtype = DType::kF32});
    on_.gate_rows(gate_T, scratch_.hidden, rows_, ffn_);
  }
  down_.forward(scratch_.hidden, output_TH, width_, rows_, true);
  if (down_bias_ && tp_.comm().rank() == 0) on_.add_bias(output_TH, down_bias_.weight, rows_, width_);
}

template <typename Real>
void SharedExpert<Real>::backward_hidden(DevicePtr<const Real> dy_TH, DevicePtr<const Real> pre,
                                         DevicePtr<const float> gate_T, DevicePtr<float> dgate_T) const {
  activate(on_, activation_, pre, scratch_.hidden, rows_, ffn_);
  down_.backward_input(dy_TH, width_, dhidden_, false, rows_);
  if (gate_) on_.dot_and_scale_rows(dhidden_, scratch_.hidden, nullptr, gate_T, rows_, int64_t{1}, ffn_, dgate_T);
  down_.backward_weight(dy_TH, width_, scratch_.hidden, rows_);
  // Each tp rank has all rows; with sequence parallelism gradients of what is replicated are added over tp.
  if (down_bias_ && tp_.first_row() == 0) on_.bias_backward(dy_TH, down_bias_.grad, rows_, width_, TreeParts{});
  activate_backward(on_, activation_, dhidden_, pre, dpre_, rows_, ffn_);
}

template <typename Real>
void SharedExpert<Real>::backward_input(DevicePtr<const Real> input_TH, DevicePtr<Real> dinput_TH) const {
  up_.backward_weight(dpre_, input_TH, scratch_.dbias, rows_);
  up_.backward_input(dpre_, dinput_TH, rows_, true);
}

template <typename Real>
void SharedExpert<Real>::backward_gate(DevicePtr<const float> gate_T, DevicePtr<const float> dgate_T, int64_t first_row,
                                       int64_t local_rows, DevicePtr<const Real> input_RH,
                                       DevicePtr<Real> dinput_RH) const {
  if (!gate_) return;
  on_.gate_backward(gate_T + first_row, dgate_T + first_row, dgate_logits_T_, local_rows);
  gate_->backward_weight(dgate_logits_T_, 1, input_RH, local_rows);
  gate_->backward_input(dgate_logits_T_, 1, dinput_RH, true, local_rows);
}

template class SharedExpert<float>;
template class SharedExpert<bf16>;
template class SharedExpert<f16>;

}  // namespace cairn::nn
