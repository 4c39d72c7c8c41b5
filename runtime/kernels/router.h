#pragma once
// The router of a mixture of experts: softmax over all experts, the largest few, their weights; and moving rows between
// the order of tokens and the order of experts. Everything is deterministic: ties go to the lower expert, and rows that
// meet in a sum are added in the order of a token's choices.

#include <cstdint>

namespace cairn::kernels {

/// Legend: T tokens, X experts, k choices a token.
struct RouterDims {
  int64_t tokens = 0, experts = 0, choices = 0;
  bool renormalise = true;  // the weights of a token's choices are divided by their sum
};

/// logits [T, X] float become probabilities in place; chosen [T, k], the largest first; weights [T, k].
void route_forward(const RouterDims& dims, float* logits, int32_t* chosen, float* weights);

/// dlogits [T, X] from dweights [T, k]. `dbalance` [X]: what is added to the gradient of each token's probabilities,
/// from the loss that balances the experts; may be null.
template <typename T>
void route_backward(const RouterDims& dims, const float* probabilities, const int32_t* chosen, const float* dweights,
                    const float* dbalance, T* dlogits);

/// to[i, :] = from[token of i, :], where `rows_of` [T * k] is the row i of each (token, choice). Other rows are
/// untouched.
template <typename T>
void rows_to_experts(const T* from, const int32_t* rows_of, int64_t tokens, int64_t choices, int64_t width, T* to);

/// to[t, :] = the sum over its choices j of factor[t, j] * from[row of (t, j), :], in float, rounded once. `factors`
/// null: all 1.
template <typename T>
void rows_to_tokens(const T* from, const int32_t* rows_of, const float* factors, int64_t tokens, int64_t choices,
                    int64_t width, T* to);

/// dots[t, j] = a[row of (t, j), :] . b[row, :]; then both rows are multiplied by factors[t, j].
template <typename T>
void dot_and_scale_rows(T* a, T* b, const int32_t* rows_of, const float* factors, int64_t tokens, int64_t choices,
                        int64_t width, float* dots);

}  // namespace cairn::kernels
