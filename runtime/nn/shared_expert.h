#pragma once
// The shared experts: every token goes through them, besides those that the router chooses. They are one MLP, cut over
// tp as an MLP is; its output joins the others' before the sum over tp, with the bias of down from one rank alone.
//
// It may have a gate: y = s(w . x) W h with s the sigmoid and h a token's hidden row. Every rank knows w and x, so it
// multiplies its own part of h. Backward, ds = dy . W h = (W^T dy) . h is of a rank's part of h, so these numbers, one
// a token, are added over tp with the routing weights' gradients (moe.cc); the rest is as of the router.

#include <optional>

#include "runtime/nn/activation.h"
#include "runtime/nn/linear.h"
#include "runtime/nn/scratch.h"

namespace cairn::nn {

template <typename Real>
class SharedExpert {
 public:
  SharedExpert(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
               const TensorParallel<Real>& tp, const Scratch<Real>& scratch, const Buffers& buffers);

  bool gated() const { return gate_.has_value(); }

  /// Adds to output [T, H]; keeps pre [T, 2 Fs] and, with a gate, its values gate [T] for backward. scratch.hidden is
  /// overwritten.
  void forward(DevicePtr<const Real> input_TH, DevicePtr<Real> pre, DevicePtr<float> gate_T,
               DevicePtr<Real> output_TH) const;
  /// From the gradient of the output, which scratch.hidden and scratch.dhidden do not hold, to that before the
  /// activation, kept in a buffer of its own; adds to the gradient of down. With a gate, dgate [T] is this rank's part.
  void backward_hidden(DevicePtr<const Real> dy_TH, DevicePtr<const Real> pre, DevicePtr<const float> gate_T,
                       DevicePtr<float> dgate_T) const;
  /// The rest: adds to the gradients of gate and up, and to dinput [T, H].
  void backward_input(DevicePtr<const Real> input_TH, DevicePtr<Real> dinput_TH) const;
  /// Behind the sum over tp, of dgate [T] too: adds to the gradient of the gate's weight and to dinput [R, H] what this
  /// rank's rows give, those from `first_row` on. Nothing without a gate.
  void backward_gate(DevicePtr<const float> gate_T, DevicePtr<const float> dgate_T, int64_t first_row,
                     int64_t local_rows, DevicePtr<const Real> input_RH, DevicePtr<Real> dinput_RH) const;

 private:
  const kernels::Exec<Real>& on_;
  int64_t rows_, width_, ffn_;
  ModelActivation activation_;
  ColumnGroup<Real> up_;  // gate and up
  Linear<Real> down_;
  Parameter<Real> down_bias_;         // may be absent
  std::optional<Linear<Real>> gate_;  // [1, H]
  const TensorParallel<Real>& tp_;
  const Scratch<Real>& scratch_;
  DevicePtr<Real> dhidden_, dpre_, dgate_logits_T_;
};

}  // namespace cairn::nn
