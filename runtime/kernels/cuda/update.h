#pragma once
// The optimizers' updates for CUDA, over all runs of a rank in one launch each: AdamW (runtime/kernels/adamw.h) and
// LAMB (lamb.h), and before them the gradients' norm, by which they are clipped. Nothing of it is known to the host
// when it is launched: where the norm is not finite an update writes nothing.
//
//   1. squares()   sums of squares by chunk, exact, so that their order does not matter
//   2. add_words() the sum of all: words of an ExactSum, which ranks add up
//   3. clip_by_norm(): the factor, from the words
//   4. adamw(), or lamb_moments(), add_words(), ranks' sum, lamb_trust(), lamb_step()
//
// All pointers are of the device. What changes from step to step is read from there, so that launches can be replayed.

#include <cmath>
#include <cstdint>

#include "runtime/core/dtype.h"
#include "runtime/core/exact_sum.h"
#include "runtime/kernels/adamw.h"
#include "runtime/kernels/clip.h"
#include "runtime/kernels/cuda/chunks.h"
#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/state_copies.h"

namespace cairn::kernels::cuda {

struct Floats {
  const float* data = nullptr;
  int64_t count = 0;
};

/// partials [chunks, ExactSum::kWords]. Blocks of 16 elements are summed first, as add_squares() does, with its bits.
void squares(Queue& on, const Floats* runs, const Chunk* chunks, int64_t chunk_count, double* partials);

/// words [kWords] = the squares of so many runs of x, carried; add_squares_of_runs() of
/// runtime/kernels/state_copies.h. partials: memory for kSquaresPartials doubles.
constexpr int64_t kSquareBlocks = 512;  // that share the chunks of all runs
constexpr int64_t kSquaresPartials = kSquareBlocks * ExactSum::kWords;
void add_squares_of_runs(Queue& on, const float* x, const ElemRun* runs, int64_t run_count, double* partials,
                         double* words);

/// words [groups, sums, kWords] = for each group the sum over its chunks of partials [chunks, sums, kWords], carried.
/// begins [groups + 1] as chunk_begins() has it.
void add_words(Queue& on, const double* partials, const int32_t* begins, int64_t groups, int64_t sums, double* words);

/// words [sums, kWords] += the sum over chunks of partials [chunks, sums, kWords], carried.
void add_words_to(Queue& on, const double* partials, int64_t chunks, int64_t sums, double* words);

/// Of the squares' words: clip_of() (runtime/kernels/clip.h).
void clip_by_norm(Queue& on, const double* words, const ClipNumbers* numbers, Clip* out);

/// Of a step, and of the tensors that have the same rates.
struct UpdateNumbers {
  float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0, eps = 0;
  float kept = 0, step_size = 0;                  // AdamW: 1 - lr * decay, lr / (1 - beta1^t)
  float lr = 0, weight_decay = 0, inv_bias1 = 0;  // LAMB
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

/// A run of a tensor's elements. `to` is `from`, or does not overlap it. At most one of the weights is given.
struct UpdateRun {
  const float* grad = nullptr;
  StateRun from, to;
  float* weight = nullptr;
  bf16* weight_bf16 = nullptr;
  f16* weight_f16 = nullptr;
  int64_t count = 0;
  int32_t numbers = 0;  // which UpdateNumbers
  int32_t tensor = 0;   // for LAMB
};

struct UpdateTables {
  const UpdateRun* runs = nullptr;
  const Chunk* chunks = nullptr;
  int64_t chunk_count = 0;
  const UpdateNumbers* numbers = nullptr;
};

void adamw(Queue& on, const UpdateTables& tables, const Clip* clip);

/// Of one run alone, whose numbers are those of the call: `of.numbers` and `of.tensor` are not read.
void adamw(Queue& on, const UpdateRun& of, const UpdateNumbers& numbers, const Clip* clip);

/// partials [chunks, 2, kWords]: squares of the weights, and of the steps.
void lamb_moments(Queue& on, const UpdateTables& tables, const Clip* clip, double* partials);
/// trust [tensors] from words [tensors, 2, kWords]: the weights' norm over the step's; 1 where either is 0.
void lamb_trust(Queue& on, const double* words, int64_t tensors, float* trust);
void lamb_step(Queue& on, const UpdateTables& tables, const Clip* clip, const float* trust);

/// Of one run alone, as adamw() has it. partials null: no norms are wanted.
void lamb_moments(Queue& on, const UpdateRun& of, const UpdateNumbers& numbers, const Clip* clip, double* partials);
void lamb_step(Queue& on, const UpdateRun& of, const UpdateNumbers& numbers, const Clip* clip, float trust);

}  // namespace cairn::kernels::cuda
