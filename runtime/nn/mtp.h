#pragma once
// The beginning of a module that predicts a further token (MtpConfig; DeepSeek-V3, arXiv 2412.19437, section 2.2):
//
//   u = W [N_e E(t) | N_h h]
//
// E is the model's table of embeddings, t the tokens ahead, h the rows of the module before behind its last norm, or of
// the model behind the final norm. What follows is a layer of the model, a norm and the model's head (stage_model.cc).
// Module k (from 0) reads the token k + 1 ahead of a row and guesses the one behind that. The last k + 1 rows of a
// sequence have none: they read token 0, and no loss counts there; since attention is causal no other row sees them.
// Nor does it count where a row from here to there has no target, as at the end of a document.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/nn/linear.h"
#include "runtime/nn/norm.h"
#include "runtime/nn/parameters.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// What module `k` is to guess at `row`, from the targets of the model, in sequences of `tokens` rows; or kNoTarget.
int32_t target_ahead(const int32_t* targets, int64_t row, int64_t tokens, int64_t k);

/// What a module reads and what it is to guess, [T] each.
struct TokensAhead {
  std::vector<int32_t> inputs, targets;
  void set(const int32_t* model_inputs, const int32_t* model_targets, int64_t rows, int64_t tokens, int64_t k);
};

template <typename Real>
class MtpInput {
 public:
  /// `prefix` as in "mtp.0.".
  MtpInput(const Parameters<Real>& parameters, const ModelConfig& model, const std::string& prefix,
           const StageDims& dims, const TensorParallel<Real>& tp, const Scratch<Real>& scratch, const Buffers& buffers);

  /// `hidden_RH`: h, which may stand in scratch.partial. Keeps E(t) of this rank's rows in `embedded_RH`.
  Status look_up(DevicePtr<const int32_t> tokens_T, DevicePtr<Real> embedded_RH) const;
  void forward(DevicePtr<const Real> embedded_RH, DevicePtr<const Real> hidden_RH, DevicePtr<Real> output_RH) const;

  /// From the gradient of the output in scratch.dresidual, which is of no use afterwards: adds to the gradients, and
  /// sets `dhidden_RH`.
  Status backward(DevicePtr<const int32_t> tokens_T, DevicePtr<const Real> embedded_RH, DevicePtr<const Real> hidden_RH,
                  DevicePtr<Real> dhidden_RH) const;

 private:
  /// Both norms' outputs side by side; leaves the statistics of the hidden rows' norm.
  void join(DevicePtr<const Real> embedded_RH, DevicePtr<const Real> hidden_RH) const;

  const kernels::Exec<Real>& on_;
  StageDims dims_;
  Norm<Real> embed_norm_, hidden_norm_;
  Linear<Real> project_;    // [H, 2H]
  Parameter<Real> tokens_;  // [V, H]
  DevicePtr<Real> joined_;  // [R, 2H]
  const TensorParallel<Real>& tp_;
  const Scratch<Real>& scratch_;
};

}  // namespace cairn::nn
