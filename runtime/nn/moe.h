#pragma once
// Experts in place of the MLP half of a block (Mixtral): a router picks top_k experts for each token, every chosen
// expert is computed, none has a capacity. Tensor parallelism cuts each expert as it cuts an MLP; the router is
// replicated.
//
// Two parts that know little of each other, so that experts may move to other ranks: the router decides (chosen,
// weights); dispatch puts rows in the order of experts, each expert's rows padded with zeros to a multiple of
// kExpertRowsAlign so that few shapes of products occur, and puts sums back in the order of tokens.

#include <string>
#include <vector>

#include "runtime/kernels/router.h"
#include "runtime/nn/dropout.h"
#include "runtime/nn/linear.h"
#include "runtime/nn/residual.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// What one micro-batch leaves for its backward pass. P: rows of all experts, padding included.
template <typename Real>
struct SavedMoe {
  SavedResidual<Real> residual;
  float* probabilities = nullptr;  // [T, X]
  int32_t* chosen = nullptr;       // [T, k]
  float* weights = nullptr;        // [T, k]
  Real* pre = nullptr;             // [P, F_in] before the activation
};

template <typename Real>
class Moe {
 public:
  Moe(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
      const TensorParallel<Real>& tp, const Scratch<Real>& scratch, const Buffers& buffers);

  /// As Mlp's. The loss that balances the experts is in the gradients alone: aux_loss * X * sum over e of f_e P_e for
  /// each micro-batch, f_e the choices of e a token, P_e its mean probability (Fedus et al. 2021), weighed as its
  /// tokens.
  Status forward(const SavedMoe<Real>& saved, const Real* base_RH, Real* output_RH) const;
  Status backward(const SavedMoe<Real>& saved, float loss_scale) const;

 private:
  struct Expert {
    ColumnGroup<Real> up;  // gate and up
    Linear<Real> down;
  };

  /// Rows of each expert: fills rows_of and offsets, and zeros the padding of `rows_PH`.
  void place(const int32_t* chosen, Real* rows_PH) const;
  template <typename Body>
  Status for_experts(const Body& body) const;  // body(expert, first row, rows)
  int64_t used_rows() const { return offsets_[dims_.experts]; }

  StageDims dims_;
  Activation activation_;
  kernels::RouterDims router_dims_;
  float aux_loss_;
  Residual<Real> residual_;
  Linear<Real> router_;  // [X, H]
  std::vector<Expert> experts_;
  Dropout<Real> dropout_;
  const TensorParallel<Real>& tp_;
  const Scratch<Real>& scratch_;
  Real *rows_PH_, *drows_PH_, *dhidden_PF_, *dlogits_TX_;
  int32_t *rows_of_Tk_, *offsets_;
  float *dweights_Tk_, *balance_X_;
  std::string what_in_, what_out_, what_dout_, what_din_, what_dweights_;  // names of the collectives
};

}  // namespace cairn::nn
