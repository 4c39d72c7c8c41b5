#pragma once
// LAMB (You et al. 2020, Algorithm 2): Adam's step with decoupled weight decay, scaled for each tensor by the ratio of
// the weights' norm to the step's. Two passes, since the ratio needs the whole tensor, which may lie on several ranks.

#include <cmath>
#include <cstdint>
#include <span>

#include "runtime/kernels/adamw.h"
#include "runtime/kernels/tensor_norms.h"

namespace cairn::kernels {

/// First pass: `to`'s moments become `from`'s with grad * clip.grad_scale; adds to `norms` the squares of the weights
/// and of the steps r = m^ / (sqrt(v^) + eps) + weight_decay * w. `to` is `from` or does not overlap it; its master is
/// left alone. AdamwArgs::lr, stream and portable are not read.
void lamb_moments(const AdamwArgs& args, const float* grad, const StateArrays& from, const StateArrays& to,
                  int64_t count, const TensorNorms& norms);

/// Second pass: to.master = from.master - args.lr * trust * r with the moments in `to`.
void lamb_step(const AdamwArgs& args, float trust, const StateArrays& from, const StateArrays& to, int64_t count);

/// The weights' norm over the step's, of their squares; 1 where either is 0 or no number.
inline float trust_of(double weight_squares, double step_squares) {
  const double weight = std::sqrt(weight_squares), step = std::sqrt(step_squares);
  return static_cast<float>(weight > 0 && step > 0 ? weight / step : 1.0);
}

/// lamb_moments() of each. partials [chunks of the runs that count, TensorNorms::kWords] receive their squares, for
/// add_norms_of_runs() (tensor_norms.h), which adds those of several calls. Runs that count come first.
void lamb_moments_of_runs(std::span<const AdamRun> runs, double* partials);
/// lamb_step() of each, with the trust that comes of its tensor's words, and with the weights.
void lamb_step_of_runs(std::span<const AdamRun> runs, const double* words);

}  // namespace cairn::kernels
