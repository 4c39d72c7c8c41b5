#pragma once
// The MLP half of a block: norm, up (and gate), activation, down.

#include <string>

#include "runtime/nn/activation.h"
#include "runtime/nn/dropout.h"
#include "runtime/nn/linear.h"
#include "runtime/nn/residual.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// What one micro-batch leaves for its backward pass.
template <typename Real>
struct SavedMlp {
  SavedResidual<Real> residual;
  DevicePtr<Real> pre;  // [T, F_in] before the activation; gate, then up
};

/// What the first half of a split backward leaves for the second.
template <typename Real>
struct LateMlp {
  DevicePtr<Real> dout_RH;
  DevicePtr<Real> dpre;  // [T, F_in]
};

template <typename Real>
class Mlp {
 public:
  Mlp(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
      const TensorParallel<Real>& tp, const Scratch<Real>& scratch);

  /// output [R, H] from the input and `base_RH`, which is the input but in parallel blocks (residual.h).
  Status forward(const SavedMlp<Real>& saved, DevicePtr<const Real> base_RH, DevicePtr<Real> output_RH) const;
  /// `pre` again, from the input: the first half of forward().
  Status recompute(const SavedMlp<Real>& saved) const;

  /// scratch.dresidual: from the gradient of the output to that of the input. Gradients are added to, those of the
  /// projections only when `late` is null: else it keeps for backward_weight() what it needs.
  Status backward(const SavedMlp<Real>& saved, const LateMlp<Real>* late) const;
  Status backward_weight(const SavedMlp<Real>& saved, const LateMlp<Real>& late) const;

 private:
  /// Gives the input of the first product [T, H].
  Result<DevicePtr<const Real>> read_input(const SavedMlp<Real>& saved) const;
  /// The products beside it do the activation.
  bool fuses_activation() const {
    return on_.fuses_products && activation_.kind == Activation::kGeluTanh && up_.is_one();
  }

  const kernels::Exec<Real>& on_;
  StageDims dims_;
  ModelActivation activation_;
  Residual<Real> residual_;
  ColumnGroup<Real> up_;  // gate and up
  Linear<Real> down_;
  Dropout<Real> dropout_;
  const TensorParallel<Real>& tp_;
  const Scratch<Real>& scratch_;
  std::string what_in_, what_out_, what_dout_, what_din_;  // names of the collectives
};

}  // namespace cairn::nn
