#pragma once
// LAMB (You et al. 2020, Algorithm 2): Adam's step with decoupled weight decay, scaled for each tensor by the ratio of
// the weights' norm to the step's. Two passes, since the ratio needs the whole tensor, which may lie on several ranks.

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

/// lamb_moments() of each. words: of each run TensorNorms::kWords, which become those of the run alone; of one that
/// does not count, anything.
void lamb_moments_of_runs(std::span<const AdamRun> runs, std::span<double> words);
/// lamb_step() of each, with the weights.
void lamb_step_of_runs(std::span<const AdamRun> runs);

}  // namespace cairn::kernels
