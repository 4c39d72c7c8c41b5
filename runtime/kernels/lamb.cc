#include "runtime/kernels/lamb.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "runtime/core/check.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"
#include "runtime/kernels/state_copies.h"

namespace cairn::kernels {
namespace {

constexpr int64_t kBlock = 1024;  // parallel_elements cuts at multiples of it, so threads change no bit of the sums

struct Coefficients {
  float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2;
  float inv_bias1, inv_sqrt_bias2, eps, decay;
};

Coefficients coefficients(const AdamwArgs& args) {
  RT_CHECK(args.step >= 1, "LAMB counts steps from 1, got {}", args.step);
  const double beta1 = args.beta1, beta2 = args.beta2, t = static_cast<double>(args.step);
  return {.grad_scale = args.clip.address()->grad_scale,
          .beta1 = args.beta1,
          .one_minus_beta1 = static_cast<float>(1.0 - beta1),
          .beta2 = args.beta2,
          .one_minus_beta2 = static_cast<float>(1.0 - beta2),
          .inv_bias1 = static_cast<float>(1.0 / (1.0 - std::pow(beta1, t))),
          .inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, t))),
          .eps = args.eps,
          .decay = args.weight_decay};
}

/// StateArrays, as a rule of three arrays takes them.
struct Run {
  explicit Run(const StateArrays& of)
      : master(of.master.address()), exp_avg(of.exp_avg.address()), exp_avg_sq(of.exp_avg_sq.address()) {}
  float *master, *exp_avg, *exp_avg_sq;
};

RT_INLINE float step_of(const Coefficients& k, float weight, float m, float v) {
  return m * k.inv_bias1 / (std::sqrt(v) * k.inv_sqrt_bias2 + k.eps) + k.decay * weight;
}

RT_INLINE void moments_block_body(Coefficients k, const float* grad, Run from, Run to, int64_t at, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = at; i < at + n; ++i) {
    const float g = grad[i] * k.grad_scale;
    to.exp_avg[i] = k.beta1 * from.exp_avg[i] + k.one_minus_beta1 * g;
    to.exp_avg_sq[i] = k.beta2 * from.exp_avg_sq[i] + k.one_minus_beta2 * g * g;
  }
}
RT_CLONES(moments_block)

RT_INLINE void norms_block_body(Coefficients k, const float* master, Run to, int64_t at, int64_t n, double* weight,
                                double* step) {
  double w2 = 0, r2 = 0;
#pragma omp simd reduction(+ : w2, r2)
  for (int64_t i = at; i < at + n; ++i) {
    const double w = master[i], r = step_of(k, master[i], to.exp_avg[i], to.exp_avg_sq[i]);
    w2 += w * w;
    r2 += r * r;
  }
  *weight = w2;
  *step = r2;
}
RT_CLONES(norms_block)

RT_INLINE void step_range_body(Coefficients k, float rate, const float* master, Run to, int64_t begin, int64_t end) {
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    to.master[i] = master[i] - rate * step_of(k, master[i], to.exp_avg[i], to.exp_avg_sq[i]);
  }
}
RT_CLONES(step_range)

}  // namespace

void lamb_moments(const AdamwArgs& args, const float* grad, const StateArrays& from, const StateArrays& to,
                  int64_t count, const TensorNorms& norms) {
  if (args.clip.address()->finite == 0) return;
  const Coefficients k = coefficients(args);
  const Run source(from), target(to);
  ExactSum all_weight, all_step;
  std::mutex mutex;
  parallel_elements(count, [&](int64_t begin, int64_t end) {
    ExactSum mine_weight, mine_step;
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t n = std::min(kBlock, end - i);
      moments_block(k, grad, source, target, i, n);
      if (!norms.wanted()) continue;
      double weight = 0, step = 0;
      norms_block(k, source.master, target, i, n, &weight, &step);
      mine_weight.add(weight);
      mine_step.add(step);
    }
    if (!norms.wanted()) return;
    const std::lock_guard lock(mutex);  // once a thread; the sums are exact in any order
    all_weight.add(mine_weight);
    all_step.add(mine_step);
  });
  if (norms.wanted()) norms.add(all_weight, all_step);
}

void lamb_step(const AdamwArgs& args, float trust, const StateArrays& from, const StateArrays& to, int64_t count) {
  if (args.clip.address()->finite == 0) return;
  const Coefficients k = coefficients(args);
  const Run source(from), target(to);
  parallel_elements(
      count, [&](int64_t begin, int64_t end) { step_range(k, args.lr * trust, source.master, target, begin, end); });
}

namespace {

std::span<const double> words_of(const AdamRun& run, const double* words) {
  return {words + run.tensor * TensorNorms::kWords, static_cast<size_t>(TensorNorms::kWords)};
}

}  // namespace

void lamb_moments_of_runs(std::span<const AdamRun> runs, double* partials) {
  for (const AdamRun& run : runs) {
    const int64_t words = run.counts ? norm_chunks(run.count) * TensorNorms::kWords : 0;
    std::fill_n(partials, words, 0.0);
    const std::span first(partials, static_cast<size_t>(std::min(words, TensorNorms::kWords)));
    lamb_moments(run.args, run.grad.address(), run.from, run.to, run.count, {first});
    partials += words;
  }
}

void lamb_step_of_runs(std::span<const AdamRun> runs, const double* words) {
  for (const AdamRun& run : runs) {
    const std::span<const double> of = words_of(run, words);
    const ExactSum weight = ExactSum::from(of.first<ExactSum::kWords>()),
                   step = ExactSum::from(of.last<ExactSum::kWords>());
    lamb_step(run.args, trust_of(weight.value(), step.value()), run.from, run.to, run.count);
    if (run.weights) put_weights(run.to.master.address(), run.count, run.dtype, run.weights.address());
  }
}

}  // namespace cairn::kernels
