#pragma once
// Experts in place of the MLP half of a block (Mixtral): a router picks top_k experts for each token, every chosen
// expert is computed, none has a capacity. Tensor parallelism cuts each expert as it cuts an MLP; the router is
// replicated. Experts that every token goes through may stand beside them (shared_expert.h). Layers may differ: of some
// a plain MLP (mlp.h) is the half (moe.dense_layers).
//
// A router's bias (DeepSeek-V3) has no gradient: in the place of one stand the choices of each expert, which are added
// over micro-batches and replicas as gradients are, and the update turns them into a step (runtime/optim).
//
// Two parts that know little of each other: the router decides (chosen, weights); dispatch (dispatch.h) brings rows to
// their experts, which may lie on other ranks, and back.
//
// Experts may have biases. That of down stands on one rank of a tp group, since outputs are added over it; its gradient
// is the sum of the routing weights times dy. The weight of a choice is a factor of what its expert puts out, or of
// what it reads (moe.scale_input).

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/nn/activation.h"
#include "runtime/nn/context_parallel.h"
#include "runtime/nn/dispatch.h"
#include "runtime/nn/dropout.h"
#include "runtime/nn/linear.h"
#include "runtime/nn/residual.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/shared_expert.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// What one micro-batch leaves for its backward pass. P: rows of all experts, padding included.
template <typename Real>
struct SavedMoe {
  SavedResidual<Real> residual;
  DevicePtr<float> probabilities;  // [T, X]; sigmoids where the router has these
  DevicePtr<float> log_sums;       // [T]; null without z_loss
  DevicePtr<int32_t> chosen;       // [T, k]
  DevicePtr<float> weights;        // [T, k]
  DevicePtr<int32_t> counts;       // [ep, X]: of all ranks that divide the experts; null without
  DevicePtr<Real> pre;             // [P, F_in] before the activation
  DevicePtr<Real> shared_pre;      // [T, 2 Fs]; null without shared experts
  DevicePtr<float> shared_gate;    // [T]; null where they have no gate
  std::span<int32_t> host_counts;  // Dispatch::kept_counts(), of the host
  /// [X]: of the micro-batch in all layers, for the backward; on the device where that places rows. None: each for
  /// itself.
  std::span<const float> choices;
  DevicePtr<const float> placed_choices;
};

template <typename Real>
class Moe {
 public:
  Moe(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
      const TensorParallel<Real>& tp, const ContextParallel<Real>& cp, Dispatch<Real>& dispatch,
      const Scratch<Real>& scratch, const Buffers& buffers);

  /// As Mlp's. The loss that balances the experts is in the gradients alone: aux_loss * X * sum over e of f_e P_e for
  /// each micro-batch, f_e the choices of e a token, P_e its mean probability (Fedus et al. 2021), weighed as its
  /// tokens; with aux_scope = model both are means over all layers, and the loss is one (transformers'
  /// load_balancing_loss_func). So is z_loss * the square of the logarithm of each token's denominator (Zoph et al.
  /// 2022).
  Status forward(const SavedMoe<Real>& saved, DevicePtr<const Real> base_RH, DevicePtr<Real> output_RH) const;
  Status backward(const SavedMoe<Real>& saved, float loss_scale) const;
  /// Adds how often this rank's tokens chose each expert in the forward just done.
  void add_choices(std::span<float> choices_X) const;
  /// The same where the device has placed them.
  void add_choices(DevicePtr<float> choices_X) const { on_.add_to(choices_X, dispatch_.counts(), dims_.experts); }

 private:
  struct Expert {
    ColumnGroup<Real> up;       // gate and up
    Linear<Real> down;          // its bias on the first rank of a tp group alone
    Parameter<Real> down_bias;  // may be absent
  };

  /// The products that body(expert, first row, rows, &products) adds for each group of rows that is not empty.
  template <typename Body>
  void for_experts(const Body& body) const;
  /// Scores, choices, weights.
  Status route(const SavedMoe<Real>& saved, DevicePtr<const Real> rows_TH) const;
  Status route_backward(const SavedMoe<Real>& saved, DevicePtr<const Real> input_RH, float loss_scale) const;
  /// From dy in rows_PH_, which is overwritten: what biases of down give to dweights, and gradients of all biases.
  Status bias_backward(const SavedMoe<Real>& saved) const;
  /// Its parts, where the device has placed rows and where the host has: rows become the biases of down; gradients.
  void lay_placed_biases() const;
  void add_placed_gradients() const;
  void lay_biases() const;
  void add_gradients() const;
  /// [T], behind dweights.
  DevicePtr<float> dgate_T() const { return dweights_Tk_ + dims_.rows * dims_.choices; }

  const kernels::Exec<Real>& on_;
  StageDims dims_;
  ModelActivation activation_;
  kernels::RouterDims router_dims_;
  float aux_loss_, z_loss_;
  int64_t balanced_layers_;  // whose choices are weighed together
  Residual<Real> residual_;
  Linear<Real> router_;                // [X, H]
  Parameter<Real> bias_, logit_bias_;  // [X]; either may be absent
  bool scale_input_;
  std::optional<SharedExpert<Real>> shared_;
  std::vector<Expert> experts_;  // this rank's, each once for every source whose gradients are kept apart
  Dropout<Real> dropout_;
  const TensorParallel<Real>& tp_;
  const ContextParallel<Real>& cp_;
  Dispatch<Real>& dispatch_;
  const Scratch<Real>& scratch_;
  DevicePtr<Real> rows_PH_, drows_PH_, dhidden_PF_, dlogits_TX_;
  DevicePtr<float> dweights_Tk_, balance_X_, bias_X_, bias_dots_Tk_;
  mutable kernels::MatmulGroups products_;  // of for_experts()
  mutable std::vector<float> host_balance_X_;
  std::string what_in_, what_out_, what_dout_, what_din_, what_dweights_, what_counts_, what_balance_, what_rows_,
      what_drows_, what_bias_;  // names of the collectives
};

}  // namespace cairn::nn
