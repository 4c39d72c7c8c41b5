#pragma once
// Softmax cross-entropy in pieces, so that a vocabulary cut over ranks exchanges [rows] floats and never logits.
//   1. row_sums  per rank, then all-reduce max; sum_exp *= exp(the rank's max - max), and all-reduce sum of both
//   2. loss[r] = log(sum_exp[r]) + max[r] - target[r]
//   3. cross_entropy_backward per rank
// Columns >= valid_cols are vocabulary padding: they count as minus infinity and get gradient 0.

#include <cstdint>

namespace cairn::kernels {

/// max[r] of the row's logits; sum_exp[r] = sum of exp(logit - max[r]); target_logit[r] = the logit of targets[r] if it
/// is one of the columns [first, first + valid_cols), else it stays as it is.
template <typename T>
void row_sums(const T* logits, int64_t rows, int64_t cols, int64_t valid_cols, int64_t first, const int32_t* targets,
              float* max, float* sum_exp, float* target_logit);

/// Overwrites logits with d(loss)/d(logits) of loss = log Z - target + z_loss * (log Z)^2, Z the sum of all
/// exponentials: (softmax * (1 + 2 z_loss log Z) - onehot) * scale[r]. scale[r] 0 masks a row.
template <typename T>
void cross_entropy_backward(T* logits, int64_t rows, int64_t cols, int64_t valid_cols, int64_t first,
                            const int32_t* targets, const float* max, const float* sum_exp, const float* scale,
                            float z_loss = 0);

}  // namespace cairn::kernels
