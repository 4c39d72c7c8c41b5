#include "runtime/kernels/router.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

/// Returns the logarithm of the denominator.
float softmax_row(float* x, int64_t n) {
  float max = x[0], sum = 0;
  for (int64_t i = 1; i < n; ++i) max = x[i] > max ? x[i] : max;
  for (int64_t i = 0; i < n; ++i) {
    x[i] = std::exp(x[i] - max);
    sum += x[i];
  }
  for (int64_t i = 0; i < n; ++i) x[i] /= sum;
  return max + std::log(sum);
}

/// What decides between experts: the score and its bias.
float merit(const RouterDims& d, const float* p, int64_t e) { return !d.bias ? p[e] : p[e] + address_of(d.bias)[e]; }

/// A bit for each group that a token may choose from, the lower one first among equals.
uint64_t choose_groups(const RouterDims& d, const float* p) {
  if (d.groups_per_token >= d.groups) return ~uint64_t{0};
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t size = d.experts / d.groups;
  float merits[64];
  for (int64_t g = 0; g < d.groups; ++g) {
    float best = kNone, second = kNone;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      const float m = merit(d, p, e);
      second = std::max(second, std::min(best, m));
      best = std::max(best, m);
    }
    merits[g] = d.sigmoid && size > 1 ? best + second : best;
  }
  uint64_t out = 0;
  for (int64_t n = 0; n < d.groups_per_token; ++n) {
    int64_t best = -1;
    for (int64_t g = 0; g < d.groups; ++g) {
      if ((out >> g & 1) == 0 && (best < 0 || merits[g] > merits[best])) best = g;
    }
    out |= uint64_t{1} << best;
  }
  return out;
}

/// The `choices` largest, the largest first, the lower index first among equals.
void choose(const RouterDims& d, const float* p, int32_t* chosen) {
  const uint64_t groups = choose_groups(d, p);
  const int64_t size = d.experts / d.groups;
  for (int64_t j = 0; j < d.choices; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < d.experts; ++e) {
      if ((groups >> (e / size) & 1) == 0) continue;
      if (std::find(chosen, chosen + j, static_cast<int32_t>(e)) != chosen + j) continue;
      if (best < 0 || merit(d, p, e) > merit(d, p, best)) best = e;
    }
    chosen[j] = static_cast<int32_t>(best);
  }
}

/// What the weights are divided by.
float chosen_sum(const RouterDims& d, const float* p, const int32_t* chosen) {
  if (!d.renormalise) return 1;
  float sum = d.sigmoid ? 1e-20f : 0.0f;  // sigmoids may all be zero
  for (int64_t j = 0; j < d.choices; ++j) sum += p[chosen[j]];
  return sum;
}

template <typename T>
RT_INLINE void add_row_leaf_body(float* sum, float factor, const T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += factor * load_f32(x[i]);
}
RT_CLONES(add_row_leaf)

template <typename T>
RT_INLINE void store_row_leaf_body(const float* x, T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&to[i], x[i]);
}
RT_CLONES(store_row_leaf)

template <typename T>
RT_INLINE float dot_leaf_body(const T* a, const T* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += load_f32(a[i]) * load_f32(b[i]);
  return sum;
}
RT_CLONES(dot_leaf)

template <typename T>
RT_INLINE void scale_row_leaf_body(T* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&x[i], factor * load_f32(x[i]));
}
RT_CLONES(scale_row_leaf)

}  // namespace

void route_forward(const RouterDims& d, float* logits, int32_t* chosen, float* weights, float* log_sums) {
  parallel_ranges(d.tokens, 16, 8 * d.experts * d.choices, [=](int64_t t, int64_t end) {
    for (; t < end; ++t) {
      float* p = logits + t * d.experts;
      int32_t* picks = chosen + t * d.choices;
      if (d.sigmoid) {
        for (int64_t e = 0; e < d.experts; ++e) p[e] = 1.0f / (1.0f + std::exp(-p[e]));
      } else {
        const float log_sum = softmax_row(p, d.experts);
        if (log_sums != nullptr) log_sums[t] = log_sum;
      }
      choose(d, p, picks);
      const float sum = chosen_sum(d, p, picks);
      for (int64_t j = 0; j < d.choices; ++j) weights[t * d.choices + j] = d.scale * (p[picks[j]] / sum);
    }
  });
}

template <typename T>
void route_backward(const RouterDims& d, const float* scores, const int32_t* chosen, const float* dweights,
                    const RouterLosses& losses, T* dlogits) {
  const float *const balances = address_of(losses.balance), *const log_sums = address_of(losses.log_sums);
  parallel_ranges(d.tokens, 16, 8 * d.experts, [=](int64_t t, int64_t end) {
    for (; t < end; ++t) {
      const float* p = scores + t * d.experts;
      const int32_t* picks = chosen + t * d.choices;
      const float* dw = dweights + t * d.choices;
      T* out = dlogits + t * d.experts;
      // w_j = scale p_j / S, S the sum of the chosen: dp_j = scale (dw_j - sum over i of dw_i p_i / S) / S
      const float sum = chosen_sum(d, p, picks);
      float mean = 0;
      for (int64_t j = 0; d.renormalise && j < d.choices; ++j) mean += dw[j] * (p[picks[j]] / sum);
      const auto of_choice = [&](int64_t j) { return d.scale * ((dw[j] - mean) / sum); };
      if (d.sigmoid) {
        // The balance is of p_e / A, A the sum of all: its gradient is (b_e - sum over i of b_i p_i / A) / A.
        float all = 1e-20f, balance = 0;
        for (int64_t e = 0; balances != nullptr && e < d.experts; ++e) all += p[e];
        for (int64_t e = 0; balances != nullptr && e < d.experts; ++e) balance += balances[e] * (p[e] / all);
        const auto dlogit = [&](int64_t e, float dp) {
          if (balances != nullptr) dp += (balances[e] - balance) / all;
          return p[e] * (1.0f - p[e]) * dp;
        };
        for (int64_t e = 0; e < d.experts; ++e) store_f32(&out[e], dlogit(e, 0.0f));
        for (int64_t j = 0; j < d.choices; ++j) store_f32(&out[picks[j]], dlogit(picks[j], of_choice(j)));
        continue;
      }
      float along = 0;  // sum over all experts of p dp
      for (int64_t j = 0; j < d.choices; ++j) along += p[picks[j]] * of_choice(j);
      for (int64_t e = 0; balances != nullptr && e < d.experts; ++e) along += p[e] * balances[e];
      const float z = log_sums == nullptr ? 0.0f : 2 * losses.z * log_sums[t];
      const auto dlogit = [&](int64_t e, float dp) {
        return p[e] * (dp + (balances == nullptr ? 0.0f : balances[e]) - along + z);
      };
      for (int64_t e = 0; e < d.experts; ++e) store_f32(&out[e], dlogit(e, 0.0f));
      for (int64_t j = 0; j < d.choices; ++j) store_f32(&out[picks[j]], dlogit(picks[j], of_choice(j)));
    }
  });
}

void count_choices(const int32_t* chosen, int64_t choices, std::span<int32_t> counts) {
  std::ranges::fill(counts, 0);
  for (int64_t i = 0; i < choices; ++i) ++counts[static_cast<size_t>(chosen[i])];
}

void place_choices(const int32_t* chosen, int64_t choices, std::span<int64_t> next, int32_t* rows_of) {
  for (int64_t i = 0; i < choices; ++i) rows_of[i] = static_cast<int32_t>(next[static_cast<size_t>(chosen[i])]++);
}

void group_choices(const GroupDims& d, const int32_t* chosen, GroupRows* groups, float* counts, int32_t* rows_of) {
  std::vector<int32_t> of(static_cast<size_t>(d.experts));
  count_choices(chosen, d.choices, of);
  std::vector<int64_t> next;
  GroupRows at;
  for (int64_t e = 0; e < d.experts; ++e) {
    at.filled = of[static_cast<size_t>(e)];
    at.rows = (at.filled + d.align - 1) / d.align * d.align;
    groups[e] = at;
    counts[e] = static_cast<float>(at.filled);
    next.push_back(at.first);
    at.first += at.rows;
    at.tiles += GroupRows::tiles_of(at.rows);
  }
  groups[d.experts] = {.first = at.first, .tiles = at.tiles};
  place_choices(chosen, d.choices, next, rows_of);
}

template <typename T>
void clear_padding(const GroupRows* groups, int64_t count, int64_t width, T* rows) {
  for (const GroupRows& group : std::span(groups, static_cast<size_t>(count))) {
    std::fill_n(rows + (group.first + group.filled) * width, (group.rows - group.filled) * width, T{});
  }
}

template <typename T>
void fill_groups(const GroupRows* groups, int64_t /*all_rows*/, std::span<const DevicePtr<const T>> from, int64_t width,
                 T* rows) {
  for (const DevicePtr<const T> of : from) {
    for (int64_t r = groups->first; r < groups->first + groups->rows; ++r) {
      std::copy_n(of.address(), width, rows + r * width);
    }
    ++groups;
  }
}

template <typename T>
void add_rows_of_groups(const GroupRows* groups, int64_t /*all_rows*/, const T* rows, int64_t stride, int64_t width,
                        std::span<const DevicePtr<float>> sums) {
  for (const DevicePtr<float> sum : sums) {
    std::vector<float> of_group(static_cast<size_t>(width));
    for (int64_t r = groups->first; r < groups->first + groups->rows; ++r) {
      for (int64_t c = 0; c < width; ++c) of_group[static_cast<size_t>(c)] += load_f32(rows[r * stride + c]);
    }
    for (int64_t c = 0; c < width; ++c) sum.address()[c] += of_group[static_cast<size_t>(c)];
    ++groups;
  }
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
void scale_expert_rows(T* to, const int32_t* rows_of, const float* factors, int64_t choices, int64_t width) {
  parallel_ranges(choices, 1, width, [=](int64_t i, int64_t end) {
    for (; i < end; ++i) scale_row_leaf(to + rows_of[i] * width, factors[i], width);
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
      const int64_t row = rows_of == nullptr ? i : rows_of[i];
      T* x = a + row * width;
      T* y = b + row * width;
      dots[i] = dot_leaf(x, y, width);
      scale_row_leaf(x, factors[i], width);
      scale_row_leaf(y, factors[i], width);
    }
  });
}

template <typename T>
void gate_rows(float* logits, T* x, int64_t rows, int64_t width) {
  parallel_ranges(rows, 1, width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      logits[r] = 1.0f / (1.0f + std::exp(-logits[r]));
      scale_row_leaf(x + r * width, logits[r], width);
    }
  });
}

template <typename T>
void gate_backward(const float* gates, const float* dgates, T* dlogits, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) store_f32(&dlogits[r], gates[r] * (1.0f - gates[r]) * dgates[r]);
}

#define RT_INSTANTIATE(T)                                                                                             \
  template void route_backward<T>(const RouterDims&, const float*, const int32_t*, const float*, const RouterLosses&, \
                                  T*);                                                                                \
  template void clear_padding<T>(const GroupRows*, int64_t, int64_t, T*);                                             \
  template void fill_groups<T>(const GroupRows*, int64_t, std::span<const DevicePtr<const T>>, int64_t, T*);          \
  template void add_rows_of_groups<T>(const GroupRows*, int64_t, const T*, int64_t, int64_t,                          \
                                      std::span<const DevicePtr<float>>);                                             \
  template void rows_to_experts<T>(const T*, const int32_t*, int64_t, int64_t, int64_t, T*);                          \
  template void scale_expert_rows<T>(T*, const int32_t*, const float*, int64_t, int64_t);                             \
  template void rows_to_tokens<T>(const T*, const int32_t*, const float*, int64_t, int64_t, int64_t, T*);             \
  template void dot_and_scale_rows<T>(T*, T*, const int32_t*, const float*, int64_t, int64_t, int64_t, float*);       \
  template void gate_rows<T>(float*, T*, int64_t, int64_t);                                                           \
  template void gate_backward<T>(const float*, const float*, T*, int64_t)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels
