#pragma once
// The router of a mixture of experts and the moves of its rows, for CUDA: runtime/kernels/router.h.

#include <cstdint>

#include "runtime/kernels/cuda/grouped.h"
#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/router.h"

namespace cairn::kernels::cuda {

constexpr int64_t kMostExperts = 2048;

/// A NaN counts as less than any number where experts are chosen.
void route_forward(Queue& on, const RouterDims& dims, float* logits, int32_t* chosen, float* weights, float* log_sums);
template <typename T>
void route_backward(Queue& on, const RouterDims& dims, const float* scores, const int32_t* chosen,
                    const float* dweights, const RouterLosses& losses, T* dlogits);

/// counts [experts].
void count_choices(Queue& on, const int32_t* chosen, int64_t choices, int64_t experts, int32_t* counts);
/// next [experts], of the device.
void place_choices(Queue& on, const int32_t* chosen, int64_t choices, int64_t experts, const int64_t* next,
                   int32_t* rows_of);

/// The function of runtime/kernels/router.h. Scratch: [experts] int32.
void group_choices(Queue& on, const GroupDims& dims, const int32_t* chosen, GroupRows* groups, float* counts,
                   int32_t* rows_of);
template <typename T>
void clear_padding(Queue& on, const GroupRows* groups, int64_t count, int64_t width, T* rows);
/// Rows of group `of.begin + i` become from [width] + i * step.
template <typename T>
void fill_groups(Queue& on, const Groups& of, const T* from, int64_t step, int64_t width, T* rows);
/// To sums [width] + i * step those over the rows of group `of.begin + i`: over the rows of each tile in order, then
/// over the tiles in order. Scratch: [of.tiles, width] floats.
template <typename T>
void add_rows_of_groups(Queue& on, const Groups& of, const T* rows, int64_t stride, int64_t width, float* sums,
                        int64_t step);

template <typename T>
void rows_to_experts(Queue& on, const T* from, const int32_t* rows_of, int64_t tokens, int64_t choices, int64_t width,
                     T* to);
template <typename T>
void scale_expert_rows(Queue& on, T* to, const int32_t* rows_of, const float* factors, int64_t choices, int64_t width);
template <typename T>
void rows_to_tokens(Queue& on, const T* from, const int32_t* rows_of, const float* factors, int64_t tokens,
                    int64_t choices, int64_t width, T* to);
template <typename T>
void dot_and_scale_rows(Queue& on, T* a, T* b, const int32_t* rows_of, const float* factors, int64_t tokens,
                        int64_t choices, int64_t width, float* dots);
template <typename T>
void gate_rows(Queue& on, float* logits, T* x, int64_t rows, int64_t width);
template <typename T>
void gate_backward(Queue& on, const float* gates, const float* dgates, T* dlogits, int64_t rows);

}  // namespace cairn::kernels::cuda
