#pragma once
// Experts in place of the MLP half of a block (Mixtral): a router picks top_k experts for each token, every chosen
// expert is computed, none has a capacity. Tensor parallelism cuts each expert as it cuts an MLP; the router is
// replicated. Experts that every token goes through may stand beside them (shared_expert.h).
//
// A router's bias (DeepSeek-V3) has no gradient: in the place of one stand the choices of each expert, which are added
// over micro-batches and replicas as gradients are, and the update turns them into a step (runtime/optim).
//
// Two parts that know little of each other: the router decides (chosen, weights); dispatch (dispatch.h) brings rows to
// their experts, which may lie on other ranks, and back.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/kernels/router.h"
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
  float* probabilities = nullptr;  // [T, X]; sigmoids where the router has these
  float* log_sums = nullptr;       // [T]; null without z_loss
  int32_t* chosen = nullptr;       // [T, k]
  float* weights = nullptr;        // [T, k]
  int32_t* counts = nullptr;       // [ep, X]: of all ranks that divide the experts; null without
  Real* pre = nullptr;             // [P, F_in] before the activation
  Real* shared_pre = nullptr;      // [T, 2 Fs]; null without shared experts
  const float* choices = nullptr;  // [X]: of the micro-batch in all layers, for the backward; null: each for itself
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
  Status forward(const SavedMoe<Real>& saved, const Real* base_RH, Real* output_RH) const;
  Status backward(const SavedMoe<Real>& saved, float loss_scale) const;
  /// Adds how often this rank's tokens chose each expert in the forward just done.
  void add_choices(std::span<float> choices_X) const;

 private:
  struct Expert {
    ColumnGroup<Real> up;  // gate and up
    Linear<Real> down;
  };

  /// Calls body(expert, first row, rows) for the groups of rows that are not empty. Many small groups are taken by the
  /// threads side by side, each product by one; few or large ones one after another, each by all threads.
  template <typename Body>
  void for_experts(const Body& body) const;
  /// Scores, choices, weights.
  Status route(const SavedMoe<Real>& saved) const;
  Status route_backward(const SavedMoe<Real>& saved, float loss_scale) const;

  StageDims dims_;
  Activation activation_;
  kernels::RouterDims router_dims_;
  float aux_loss_, z_loss_;
  int64_t balanced_layers_;  // whose choices are weighed together
  Residual<Real> residual_;
  Linear<Real> router_;   // [X, H]
  Parameter<Real> bias_;  // [X]; may be absent
  std::optional<SharedExpert<Real>> shared_;
  std::vector<Expert> experts_;  // this rank's, each once for every source whose gradients are kept apart
  Dropout<Real> dropout_;
  const TensorParallel<Real>& tp_;
  const ContextParallel<Real>& cp_;
  Dispatch<Real>& dispatch_;
  const Scratch<Real>& scratch_;
  Real *rows_PH_, *drows_PH_, *dhidden_PF_, *dlogits_TX_;
  float *dweights_Tk_, *balance_X_, *bias_X_;
  std::string what_in_, what_out_, what_dout_, what_din_, what_dweights_, what_counts_, what_balance_, what_rows_,
      what_drows_;  // names of the collectives
};

}  // namespace cairn::nn
