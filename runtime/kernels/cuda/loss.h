#pragma once
// Softmax cross-entropy for CUDA. For a vocabulary cut over ranks the pieces of runtime/kernels/cross_entropy.h, for a
// whole one a single kernel that reads a row of logits from memory once.

#include <cstdint>

#include "runtime/kernels/cross_entropy.h"
#include "runtime/kernels/cuda/queue.h"

namespace cairn::kernels::cuda {

template <typename T>
void row_sums(Queue& on, const LogitRows& of, const T* logits, float* max, float* sum_exp, float* target_logit);
template <typename T>
void cross_entropy_backward(Queue& on, const LogitRows& of, T* logits, const float* max, const float* sum_exp,
                            const float* scale, float z_loss, float cap = 0);
void join_maxima(Queue& on, const float* maxima, int64_t parts, int64_t rows, float* max);
void rescale_sums(Queue& on, const float* maxima, const float* max, int64_t parts, int64_t filled, int64_t rows,
                  float* sums);
void row_losses(Queue& on, const int32_t* targets, const float* max, const float* sum_exp, int64_t rows, float* loss);
void row_scales(Queue& on, const int32_t* targets, const float* weights, float value, int64_t rows, float* scale);

/// row_sums(), row_losses(), row_scales() and cross_entropy_backward() of a whole vocabulary. A target below 0 is none:
/// its loss is 0, and so is the gradient of its row. The CPU's work memory is not touched.
template <typename T>
void cross_entropy(Queue& on, const LogitRows& of, T* logits, float scale, float z_loss, float* max, float* sum_exp,
                   float* scales, float* loss);

}  // namespace cairn::kernels::cuda
