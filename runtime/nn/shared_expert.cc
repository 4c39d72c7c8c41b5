#include "runtime/nn/shared_expert.h"

#include <fmt/format.h>

#include "runtime/nn/activation.h"
#include "runtime/nn/branch.h"

namespace cairn::nn {

template <typename Real>
SharedExpert<Real>::SharedExpert(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims,
                                 int64_t layer, const Scratch<Real>& scratch, const Buffers& buffers)
    : on_(parameters.on()),
      rows_(dims.rows),
      width_(dims.width),
      ffn_(dims.shared_ffn),
      activation_(model.activation),
      up_([&] {
        const std::string prefix = fmt::format("layers.{}.moe.shared.", layer);
        return ColumnGroup<Real>(
            {linear(parameters, prefix + "gate", model.width), linear(parameters, prefix + "up", model.width)});
      }()),
      down_(linear(parameters, fmt::format("layers.{}.moe.shared.down", layer), dims.shared_ffn)),
      scratch_(scratch),
      dhidden_(buffers.get<Real>(buffer::kMoeSharedDhidden)),
      dpre_(buffers.get<Real>(buffer::kMoeSharedDpre)) {}

template <typename Real>
void SharedExpert<Real>::forward(DevicePtr<const Real> input_TH, DevicePtr<Real> pre, DevicePtr<Real> output_TH) const {
  up_.forward(input_TH, pre, rows_);
  activate(on_, activation_, pre, scratch_.hidden, rows_, ffn_);
  down_.forward(scratch_.hidden, output_TH, width_, rows_, true);
}

template <typename Real>
void SharedExpert<Real>::backward_hidden(DevicePtr<const Real> dy_TH, DevicePtr<const Real> pre) const {
  activate(on_, activation_, pre, scratch_.hidden, rows_, ffn_);
  down_.backward_weight(dy_TH, width_, scratch_.hidden, rows_);
  down_.backward_input(dy_TH, width_, dhidden_, false, rows_);
  activate_backward(on_, activation_, dhidden_, pre, dpre_, rows_, ffn_);
}

template <typename Real>
void SharedExpert<Real>::backward_input(DevicePtr<const Real> input_TH, DevicePtr<Real> dinput_TH) const {
  up_.backward_weight(dpre_, input_TH, nullptr, rows_);
  up_.backward_input(dpre_, dinput_TH, rows_, true);
}

template class SharedExpert<float>;
template class SharedExpert<bf16>;
template class SharedExpert<f16>;

}  // namespace cairn::nn
