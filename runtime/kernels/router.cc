#include "runtime/kernels/router.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/core/dtype.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

void softmax_row(float* x, int64_t n) {
  float max = x[0], sum = 0;
  for (int64_t i = 1; i < n; ++i) max = x[i] > max ? x[i] : max;
  for (int64_t i = 0; i < n; ++i) {
    x[i] = std::exp(x[i] - max);
    sum += x[i];
  }
  for (int64_t i = 0; i < n; ++i) x[i] /= sum;
}

/// The `choices` largest, the largest first, the lower index first among equals.
void choose(const float* p, int64_t experts, int64_t choices, int32_t* chosen) {
  for (int64_t j = 0; j < choices; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; ++e) {
      if (std::find(chosen, chosen + j, static_cast<int32_t>(e)) != chosen + j) continue;
      if (best < 0 || p[e] > p[best]) best = e;
    }
    chosen[j] = static_cast<int32_t>(best);
  }
}

float chosen_sum(const float* p, const int32_t* chosen, int64_t choices) {
  float sum = 0;
  for (int64_t j = 0; j < choices; ++j) sum += p[chosen[j]];
  return sum;
}

template <typename T>
RT_CLONES void add_row_leaf(float* sum, float factor, const T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += factor * load_f32(x[i]);
}

template <typename T>
RT_CLONES void store_row_leaf(const float* x, T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&to[i], x[i]);
}

template <typename T>
RT_CLONES float dot_leaf(const T* a, const T* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += load_f32(a[i]) * load_f32(b[i]);
  return sum;
}

template <typename T>
RT_CLONES void scale_row_leaf(T* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&x[i], factor * load_f32(x[i]));
}

}  // namespace

void route_forward(const RouterDims& d, float* logits, int32_t* chosen, float* weights) {
  parallel_ranges(d.tokens, 16, 8 * d.experts * d.choices, [=](int64_t t, int64_t end) {
    for (; t < end; ++t) {
      float* p = logits + t * d.experts;
      int32_t* picks = chosen + t * d.choices;
      softmax_row(p, d.experts);
      choose(p, d.experts, d.choices, picks);
      const float sum = d.renormalise ? chosen_sum(p, picks, d.choices) : 1.0f;
      for (int64_t j = 0; j < d.choices; ++j) weights[t * d.choices + j] = p[picks[j]] / sum;
    }
  });
}

template <typename T>
void route_backward(const RouterDims& d, const float* probabilities, const int32_t* chosen, const float* dweights,
                    const float* dbalance, T* dlogits) {
  parallel_ranges(d.tokens, 16, 8 * d.experts, [=](int64_t t, int64_t end) {
    for (; t < end; ++t) {
      const float* p = probabilities + t * d.experts;
      const int32_t* picks = chosen + t * d.choices;
      const float* dw = dweights + t * d.choices;
      T* out = dlogits + t * d.experts;
      // w_j = p_j / S, S the sum of the chosen: dp_j = (dw_j - sum over i of dw_i w_i) / S
      const float sum = d.renormalise ? chosen_sum(p, picks, d.choices) : 1.0f;
      float mean = 0, along = 0;  // along: sum over all experts of p dp
      for (int64_t j = 0; d.renormalise && j < d.choices; ++j) mean += dw[j] * (p[picks[j]] / sum);
      for (int64_t j = 0; j < d.choices; ++j) along += p[picks[j]] * ((dw[j] - mean) / sum);
      for (int64_t e = 0; dbalance != nullptr && e < d.experts; ++e) along += p[e] * dbalance[e];
      const auto dlogit = [&](int64_t e, float dp) {
        return p[e] * (dp + (dbalance == nullptr ? 0.0f : dbalance[e]) - along);
      };
      for (int64_t e = 0; e < d.experts; ++e) store_f32(&out[e], dlogit(e, 0.0f));
      for (int64_t j = 0; j < d.choices; ++j) store_f32(&out[picks[j]], dlogit(picks[j], (dw[j] - mean) / sum));
    }
  });
}

template <typename T>
void rows_to_experts(const T* from, const int32_t* rows_of, int64_t tokens, int64_t choices, int64_t width, T* to) {
  const size_t row_bytes = static_cast<size_t>(width) * sizeof(T);
  parallel_ranges(tokens, 1, choices * width, [=](int64_t t, int64_t end) {
    for (; t < end; ++t) {
      for (int64_t j = 0; j < choices; ++j) {
        std::memcpy(to + rows_of[t * choices + j] * width, from + t * width, row_bytes);
      }
    }
  });
}

template <typename T>
void rows_to_tokens(const T* from, const int32_t* rows_of, const float* factors, int64_t tokens, int64_t choices,
                    int64_t width, T* to) {
  parallel_ranges(tokens, 1, choices * width, [=](int64_t t, int64_t end) {
    constexpr int64_t kPiece = 512;
    float sum[kPiece];
    for (; t < end; ++t) {
      for (int64_t c = 0; c < width; c += kPiece) {
        const int64_t n = std::min(kPiece, width - c);
        std::fill_n(sum, n, 0.0f);
        for (int64_t j = 0; j < choices; ++j) {
          const int64_t at = t * choices + j;
          add_row_leaf(sum, factors == nullptr ? 1.0f : factors[at], from + rows_of[at] * width + c, n);
        }
        store_row_leaf(sum, to + t * width + c, n);
      }
    }
  });
}

template <typename T>
void dot_and_scale_rows(T* a, T* b, const int32_t* rows_of, const float* factors, int64_t tokens, int64_t choices,
                        int64_t width, float* dots) {
  parallel_ranges(tokens * choices, 1, 3 * width, [=](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      T* x = a + rows_of[i] * width;
      T* y = b + rows_of[i] * width;
      dots[i] = dot_leaf(x, y, width);
      scale_row_leaf(x, factors[i], width);
      scale_row_leaf(y, factors[i], width);
    }
  });
}

#define RT_INSTANTIATE(T)                                                                                           \
  template void route_backward<T>(const RouterDims&, const float*, const int32_t*, const float*, const float*, T*); \
  template void rows_to_experts<T>(const T*, const int32_t*, int64_t, int64_t, int64_t, T*);                        \
  template void rows_to_tokens<T>(const T*, const int32_t*, const float*, int64_t, int64_t, int64_t, T*);           \
  template void dot_and_scale_rows<T>(T*, T*, const int32_t*, const float*, int64_t, int64_t, int64_t, float*)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels
