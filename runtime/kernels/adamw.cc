#include "runtime/kernels/adamw.h"

#include <cmath>

#include "runtime/core/check.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

struct Coefficients {
  float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2;
  float decay;           // 1 - lr * weight_decay
  float step_size;       // lr / (1 - beta1^t)
  float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^t)
  float eps;
};

RT_INLINE float update(const Coefficients& k, float grad, float* master, float* exp_avg, float* exp_avg_sq) {
  const float g = grad * k.grad_scale;
  const float m = k.beta1 * *exp_avg + k.one_minus_beta1 * g;
  const float v = k.beta2 * *exp_avg_sq + k.one_minus_beta2 * g * g;
  *exp_avg = m;
  *exp_avg_sq = v;
  const float w = k.decay * *master - k.step_size * m / (std::sqrt(v) * k.inv_sqrt_bias2 + k.eps);
  *master = w;
  return w;
}

RT_CLONES void adamw_leaf(Coefficients k, const float* __restrict grad, float* __restrict master,
                          float* __restrict exp_avg, float* __restrict exp_avg_sq, int64_t n) {
  for (int64_t i = 0; i < n; ++i) update(k, grad[i], &master[i], &exp_avg[i], &exp_avg_sq[i]);
}

RT_CLONES void adamw_bf16_leaf(Coefficients k, const float* __restrict grad, float* __restrict master,
                               float* __restrict exp_avg, float* __restrict exp_avg_sq, bf16* __restrict weight,
                               int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    store_f32(&weight[i], update(k, grad[i], &master[i], &exp_avg[i], &exp_avg_sq[i]));
  }
}

}  // namespace

void adamw(const AdamwArgs& args, const float* grad, float* master, float* exp_avg, float* exp_avg_sq, bf16* weight,
           int64_t count) {
  RT_CHECK(args.step >= 1, "AdamW counts steps from 1, got {}", args.step);
  // In double: 1 - beta2^t loses most of its digits in float for the first steps.
  const double beta1 = args.beta1, beta2 = args.beta2, t = static_cast<double>(args.step);
  const Coefficients k{
      .grad_scale = args.grad_scale,
      .beta1 = args.beta1,
      .one_minus_beta1 = static_cast<float>(1.0 - beta1),
      .beta2 = args.beta2,
      .one_minus_beta2 = static_cast<float>(1.0 - beta2),
      .decay = static_cast<float>(1.0 - static_cast<double>(args.lr) * args.weight_decay),
      .step_size = static_cast<float>(args.lr / (1.0 - std::pow(beta1, t))),
      .inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, t))),
      .eps = args.eps,
  };
  parallel_elements(count, [=](int64_t i, int64_t end) {
    if (weight == nullptr) {
      adamw_leaf(k, grad + i, master + i, exp_avg + i, exp_avg_sq + i, end - i);
    } else {
      adamw_bf16_leaf(k, grad + i, master + i, exp_avg + i, exp_avg_sq + i, weight + i, end - i);
    }
  });
}

}  // namespace cairn::kernels
