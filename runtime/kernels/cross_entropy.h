#pragma once
// Softmax cross-entropy in pieces, so that a vocabulary cut over ranks exchanges [rows] floats and never logits.
//   1. row_sums  per rank, then all-reduce max; sum_exp *= exp(the rank's max - max), and all-reduce sum of both
//   2. loss[r] = log(sum_exp[r]) + max[r] - target[r]
//   3. cross_entropy_backward per rank
// Columns >= valid_cols are vocabulary padding: they count as minus infinity and get gradient 0.

#include <cstdint>

#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"

namespace cairn::kernels {

/// Logits of `rows` rows, for `cols` columns of the vocabulary from number `first` on.
struct LogitRows {
  int64_t rows = 0, cols = 0, valid_cols = 0, first = 0;
  DevicePtr<const int32_t> targets;  // [rows], of the whole vocabulary
};
inline void add_dims(OpDims& to, const LogitRows& of) {
  to.add(of.rows);
  to.add(of.cols);
}

/// max[r] of the row's logits; sum_exp[r] = sum of exp(logit - max[r]); target_logit[r] = the logit of targets[r] if it
/// is one of the columns [first, first + valid_cols), else it stays as it is.
template <typename T>
void row_sums(const LogitRows& of, const T* logits, float* max, float* sum_exp, float* target_logit);

/// Overwrites logits with d(loss)/d(logits) of loss = log Z - target + z_loss * (log Z)^2, Z the sum of all
/// exponentials: (softmax * (1 + 2 z_loss log Z) - onehot) * scale[r]. scale[r] 0 masks a row. `cap`: the logits are
/// cap * tanh(z / cap), and the derivative is that by z.
template <typename T>
void cross_entropy_backward(const LogitRows& of, T* logits, const float* max, const float* sum_exp, const float* scale,
                            float z_loss = 0, float cap = 0);

/// All of it where the vocabulary is whole and of.first is 0: loss [rows], and logits overwritten with the gradient,
/// every target's loss with the weight `scale`. max, sum_exp, scales: [rows], work memory.
template <typename T>
void cross_entropy(const LogitRows& of, T* logits, float scale, float z_loss, float* max, float* sum_exp, float* scales,
                   float* loss);

/// max [rows] = the largest of maxima [parts, rows].
void join_maxima(const float* maxima, int64_t parts, int64_t rows, float* max);
/// Sums of exponentials [parts, rows] that were taken against maxima [parts, rows] become those against max [rows];
/// parts from `filled` on have no column, and sum 0.
void rescale_sums(const float* maxima, const float* max, int64_t parts, int64_t filled, int64_t rows, float* sums);

/// loss[r] holds the target's logit and becomes the row's loss; 0 where the target is below 0, which is none.
void row_losses(const int32_t* targets, const float* max, const float* sum_exp, int64_t rows, float* loss);
/// scale[r] = value * weights[r], or value where `weights` is null; 0 where there is no target.
void row_scales(const int32_t* targets, const float* weights, float value, int64_t rows, float* scale);

}  // namespace cairn::kernels
