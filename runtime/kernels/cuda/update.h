#pragma once
// The optimizers' updates for CUDA, over all runs of a rank in one launch each: AdamW (runtime/kernels/adamw.h) and
// LAMB (lamb.h), and before them the gradients' norm, by which they are clipped. Nothing of it is known to the host
// when it is launched: where the norm is not finite an update writes nothing.
//
//   1. add_squares_of_runs(): words of an ExactSum, which ranks add up
//   2. clip_by_norm(): the factor, from the words
//   3. adamw(), or lamb_moments(), ranks' sum of the words, lamb_step(); then ema(), where weights are averaged. LAMB's
//      words are of whole tensors; its step makes the trust of them
//
// All pointers are of the device.

#include <cmath>
#include <cstdint>
#include <span>

#include "runtime/core/dtype.h"
#include "runtime/core/exact_sum.h"
#include "runtime/kernels/adamw.h"
#include "runtime/kernels/clip.h"
#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/run_tables.h"
#include "runtime/kernels/state_copies.h"

namespace cairn::kernels::cuda {

/// Of a step and of a tensor's rates.
struct UpdateNumbers {
  float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0, eps = 0;
  float kept = 0, step_size = 0;                  // AdamW: 1 - lr * decay, lr / (1 - beta1^t)
  float lr = 0, weight_decay = 0, inv_bias1 = 0;  // LAMB; the rate of its step is lr times the trust
  float inv_sqrt_bias2 = 0;                       // 1 / sqrt(1 - beta2^t)

  /// In double: 1 - beta2^t loses most of its digits in float for the first steps. grad_scale is Clip's.
  static UpdateNumbers of(const AdamwArgs& args) {
    const double beta1 = args.beta1, beta2 = args.beta2, t = static_cast<double>(args.step);
    const double bias1 = 1.0 - std::pow(beta1, t), bias2 = 1.0 - std::pow(beta2, t);
    return {.beta1 = args.beta1,
            .one_minus_beta1 = static_cast<float>(1.0 - beta1),
            .beta2 = args.beta2,
            .one_minus_beta2 = static_cast<float>(1.0 - beta2),
            .eps = args.eps,
            .kept = static_cast<float>(1.0 - static_cast<double>(args.lr) * args.weight_decay),
            .step_size = static_cast<float>(args.lr / bias1),
            .lr = args.lr,
            .weight_decay = args.weight_decay,
            .inv_bias1 = static_cast<float>(1.0 / bias1),
            .inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias2))};
  }
};

/// One run of the arrays of StateArrays.
struct StateRun {
  float *master = nullptr, *exp_avg = nullptr, *exp_avg_sq = nullptr;
};

/// A run of a tensor's elements. `to` is `from`, or does not overlap it. The weights, of type `dtype`, may be null.
struct UpdateRun {
  const float* grad = nullptr;
  StateRun from, to;
  void* weights = nullptr;
  int64_t count = 0;
  uint32_t first_chunk = 0;
  UpdateNumbers of;
  DType dtype = DType::kF32;  // kF32, kBf16, kF16
  bool counts = true;         // in the norms of its tensor
  int32_t tensor = 0;         // for LAMB: which of the tensors' words are its own
};

using UpdateTables = RunTable<UpdateRun>;

/// words [kWords] = the squares of so many runs of x, carried; add_squares_of_runs() of
/// runtime/kernels/state_copies.h. Scratch: kSquaresPartials doubles.
constexpr int64_t kSquareBlocks = 512;  // that share the chunks of all runs
constexpr int64_t kSquaresPartials = kSquareBlocks * ExactSum::kWords;
void add_squares_of_runs(Queue& on, const float* x, const ElemRun* runs, int64_t run_count, double* words);

/// words [tensors, 2, kWords]: to those of its tensor each run adds the sum over its chunks of partials
/// [chunks, 2, kWords], carried. Runs of one tensor follow one another.
void add_words_of_tensors(Queue& on, const double* partials, const UpdateTables& tables, double* words);

/// Of the squares' words: clip_of() (runtime/kernels/clip.h).
void clip_by_norm(Queue& on, const double* words, const ClipNumbers* numbers, const double* ruined,
                  const double* counted, Clip* out);

void adamw(Queue& on, const UpdateTables& tables, const Clip* clip);

/// partials [chunks of runs that count, 2, kWords]: squares of the weights, and of the steps. The first runs of the
/// table count.
void lamb_moments(Queue& on, const UpdateTables& tables, const Clip* clip, double* partials);
/// words [tensors, 2, kWords]: of the squares of whole tensors, from which each run's trust comes.
void lamb_step(Queue& on, const UpdateTables& tables, const Clip* clip, const double* words);

/// Averages of weights (runtime/kernels/ema.h): a run's `from` and `to` are averages, its `grad` is the weights. Where
/// `clip` is given and not finite, nothing.
void ema(Queue& on, double decay, const UpdateTables& tables, const Clip* clip);

}  // namespace cairn::kernels::cuda
