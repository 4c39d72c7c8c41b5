#pragma once
// The router of a mixture of experts: scores of all experts, the largest few, their weights; and moving rows between
// the order of tokens and the order of experts. Everything is deterministic: ties go to the lower expert, and rows that
// meet in a sum are added in the order of a token's choices.

#include <cstdint>
#include <span>

#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"
#include "runtime/kernels/group_rows.h"

namespace cairn::kernels {

/// Legend: T tokens, X experts, k choices a token.
struct RouterDims {
  int64_t tokens = 0, experts = 0, choices = 0;
  bool renormalise = true;  // the weights of a token's choices are divided by their sum
  bool sigmoid = false;     // an expert's score is the sigmoid of its logit, not its part of the softmax
  // The experts lie in `groups` of equal size, at most 64; a token chooses among the groups_per_token best. A group is
  // as good as its best expert (DeepSeek-V2), with sigmoids as its two best together (DeepSeek-V3).
  int64_t groups = 1, groups_per_token = 1;
  float scale = 1;              // of all weights
  DevicePtr<const float> bias;  // [X]: added to the scores that decide on groups and choices, and to nothing else
};
inline void add_dims(OpDims& to, const RouterDims& of) {
  to.add(of.tokens);
  to.add(of.experts);
  to.add(of.choices);
}

/// logits [T, X] float become scores in place; chosen [T, k], the largest first; weights [T, k]. log_sums [T]: the
/// logarithm of the softmax's denominator; may be null.
void route_forward(const RouterDims& dims, float* logits, int32_t* chosen, float* weights, float* log_sums = nullptr);

/// What balances the experts and keeps logits small, in the gradients of a token.
struct RouterLosses {
  DevicePtr<const float> balance;   // [X]: of the scores' parts of their sum
  DevicePtr<const float> log_sums;  // [T], softmax only: z times their square is a loss
  float z = 0;
};
inline void add_dims(OpDims& /*to*/, const RouterLosses& /*of*/) {}

/// dlogits [T, X] from the scores and dweights [T, k].
template <typename T>
void route_backward(const RouterDims& dims, const float* scores, const int32_t* chosen, const float* dweights,
                    const RouterLosses& losses, T* dlogits);

/// counts[e] = how many of the choices [choices] are of expert e, for the host.
void count_choices(const int32_t* chosen, int64_t choices, std::span<int32_t> counts);
/// rows_of[i] = the row of choice i: those of expert e are rows next[e], next[e] + 1, ... in the order of choices.
/// `next` is the host's, and of no use afterwards.
void place_choices(const int32_t* chosen, int64_t choices, std::span<int64_t> next, int32_t* rows_of);

/// Both of the above where the host is to know nothing of it: groups [experts + 1], of all experts in order, one behind
/// the other; counts [experts], how often each is chosen, as floats; rows_of as above.
void group_choices(const GroupDims& dims, const int32_t* chosen, GroupRows* groups, float* counts, int32_t* rows_of);
/// Rows of padding of `count` groups of rows [., width] become zero.
template <typename T>
void clear_padding(const GroupRows* groups, int64_t count, int64_t width, T* rows);
/// Rows [all_rows at most, width] of each group become its array of `from`, of which each group has one.
template <typename T>
void fill_groups(const GroupRows* groups, int64_t all_rows, std::span<const DevicePtr<const T>> from, int64_t width,
                 T* rows);
/// sums[g][c] += the sum of column c over the rows of group g. rows [all_rows at most, stride]; sums [width] each.
template <typename T>
void add_rows_of_groups(const GroupRows* groups, int64_t all_rows, const T* rows, int64_t stride, int64_t width,
                        std::span<const DevicePtr<float>> sums);

/// to[i, :] = from[token of i, :], where `rows_of` [T * k] is the row i of each (token, choice). Other rows are
/// untouched.
template <typename T>
void rows_to_experts(const T* from, const int32_t* rows_of, int64_t tokens, int64_t choices, int64_t width, T* to);

/// to[rows_of[i], :] *= factors[i], for each choice i of [choices].
template <typename T>
void scale_expert_rows(T* to, const int32_t* rows_of, const float* factors, int64_t choices, int64_t width);

/// to[t, :] = the sum over its choices j of factor[t, j] * from[row of (t, j), :], in float, rounded once. `factors`
/// null: all 1.
template <typename T>
void rows_to_tokens(const T* from, const int32_t* rows_of, const float* factors, int64_t tokens, int64_t choices,
                    int64_t width, T* to);

/// dots[t, j] = a[row of (t, j), :] . b[row, :]; then both rows are multiplied by factors[t, j]. `rows_of` null: the
/// row of (t, j) is t * choices + j.
template <typename T>
void dot_and_scale_rows(T* a, T* b, const int32_t* rows_of, const float* factors, int64_t tokens, int64_t choices,
                        int64_t width, float* dots);

/// logits [rows] become gates, their sigmoids, in place; row r of x [rows, width] is multiplied by gate r.
template <typename T>
void gate_rows(float* logits, T* x, int64_t rows, int64_t width);
/// dlogits [rows] from the gates and their gradients: g (1 - g) dg.
template <typename T>
void gate_backward(const float* gates, const float* dgates, T* dlogits, int64_t rows);

}  // namespace cairn::kernels
