#pragma once
// AdamW with decoupled weight decay (Loshchilov & Hutter 2019, Algorithm 2; bias correction as in Kingma & Ba 2015).

#include <cstdint>

#include "runtime/core/dtype.h"

namespace cairn::kernels {

struct AdamwArgs {
  float lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  float grad_scale = 1;  // clip coefficient
  int64_t step = 1;      // 1 for the first update
};

/// One fused pass over `count` elements: master, exp_avg, exp_avg_sq are updated from grad * grad_scale; if weight is
/// not null it receives the new master rounded to bf16.
void adamw(const AdamwArgs& args, const float* grad, float* master, float* exp_avg, float* exp_avg_sq, bf16* weight,
           int64_t count);

}  // namespace cairn::kernels
