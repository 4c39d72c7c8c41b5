#pragma once
// The shared experts: every token goes through them, besides those that the router chooses. They are one MLP of
// shared_experts * F hidden units, cut over tp as an MLP is; its output joins the others' before the sum over tp.

#include <string>

#include "runtime/nn/linear.h"
#include "runtime/nn/scratch.h"

namespace cairn::nn {

template <typename Real>
class SharedExpert {
 public:
  SharedExpert(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
               const Scratch<Real>& scratch, const Buffers& buffers);

  /// Adds to output [T, H]; keeps pre [T, 2 Fs] for backward. scratch.hidden is overwritten.
  void forward(DevicePtr<const Real> input_TH, DevicePtr<Real> pre, DevicePtr<Real> output_TH) const;
  /// From the gradient of the output, which scratch.hidden and scratch.dhidden do not hold, to that before the
  /// activation, kept in a buffer of its own; adds to the gradient of down.
  void backward_hidden(DevicePtr<const Real> dy_TH, DevicePtr<const Real> pre) const;
  /// The rest: adds to the gradients of gate and up, and to dinput [T, H].
  void backward_input(DevicePtr<const Real> input_TH, DevicePtr<Real> dinput_TH) const;

 private:
  const kernels::Exec<Real>& on_;
  int64_t rows_, width_, ffn_;
  Activation activation_;
  ColumnGroup<Real> up_;  // gate and up
  Linear<Real> down_;
  const Scratch<Real>& scratch_;
  DevicePtr<Real> dhidden_, dpre_;
};

}  // namespace cairn::nn
