#include "runtime/kernels/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/core/dtype.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

// A NaN logit is skipped here and shows in sum_exp.
template <typename T>
RT_INLINE float row_max_leaf_body(const T* logits, int64_t n) {
  float max = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : max)
  for (int64_t c = 0; c < n; ++c) {
    const float v = load_f32(logits[c]);
    max = v > max ? v : max;
  }
  return max;
}
RT_CLONES(row_max_leaf)

// Blocks are joined in double: a float sum over 50,000 columns would lose digits.
template <typename T>
RT_INLINE float sum_exp_leaf_body(const T* logits, int64_t n, float max) {
  float block[kMapBlock];
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kMapBlock) {
    const int64_t m = n - begin < kMapBlock ? n - begin : kMapBlock;
    const float* const x = as_floats(logits + begin, block, m);
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t c = 0; c < m; ++c) part += exp_f32(x[c] - max);
    sum += part;
  }
  return static_cast<float>(sum);
}
RT_CLONES(sum_exp_leaf)

struct ScaledExp {
  float max, factor;
  RT_INLINE float operator()(float x) const { return exp_f32(x - max) * factor; }
};

template <typename T>
RT_INLINE void softmax_scaled_leaf_body(T* logits, int64_t n, float max, float factor) {
  map_array(logits, logits, n, ScaledExp{max, factor});
}
RT_CLONES(softmax_scaled_leaf)

struct CappedExp {
  float max, factor, inverse;  // of the cap
  RT_INLINE float operator()(float y) const {
    const float t = y * inverse;
    return exp_f32(y - max) * factor * (1.0f - t * t);
  }
};

template <typename T>
RT_INLINE void softmax_capped_leaf_body(T* logits, int64_t n, float max, float factor, float inverse) {
  map_array(logits, logits, n, CappedExp{max, factor, inverse});
}
RT_CLONES(softmax_capped_leaf)

}  // namespace

template <typename T>
void row_sums(const LogitRows& of, const T* logits, float* max, float* sum_exp, float* target_logit) {
  const int64_t cols = of.cols, valid_cols = of.valid_cols, first = of.first;
  const int32_t* const targets = of.targets.address();
  parallel_ranges(of.rows, 1, 4 * valid_cols, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      max[r] = row_max_leaf(logits + r * cols, valid_cols);  // which brings the row into a core's cache
      sum_exp[r] = sum_exp_leaf(logits + r * cols, valid_cols, max[r]);
      const int64_t target = targets[r] - first;
      if (target >= 0 && target < valid_cols) target_logit[r] = load_f32(logits[r * cols + target]);
    }
  });
}

template <typename T>
void cross_entropy_backward(const LogitRows& of, T* logits, const float* max, const float* sum_exp, const float* scale,
                            float z_loss, float cap) {
  const int64_t cols = of.cols, valid_cols = of.valid_cols, first = of.first;
  const int32_t* const targets = of.targets.address();
  parallel_ranges(of.rows, 1, 4 * valid_cols, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      T* row = logits + r * cols;
      if (scale[r] == 0.0f) {
        std::memset(static_cast<void*>(row), 0, static_cast<size_t>(cols) * sizeof(T));
        continue;
      }
      const int64_t target = targets[r] - first;
      const bool here = target >= 0 && target < valid_cols;
      const float target_logit = here ? load_f32(row[target]) : 0.0f;
      const float more = z_loss == 0.0f ? 1.0f : 1.0f + 2.0f * z_loss * (std::log(sum_exp[r]) + max[r]);
      float slope = 1.0f;  // of the cap at the target
      if (cap > 0.0f) {
        softmax_capped_leaf(row, valid_cols, max[r], scale[r] * more / sum_exp[r], 1.0f / cap);
        slope -= target_logit / cap * (target_logit / cap);
      } else {
        softmax_scaled_leaf(row, valid_cols, max[r], scale[r] * more / sum_exp[r]);
      }
      // From the float logit again: subtracting from the rounded probability would round twice.
      if (here) {
        store_f32(&row[target], (exp_f32(target_logit - max[r]) / sum_exp[r] * more - 1.0f) * scale[r] * slope);
      }
      std::memset(static_cast<void*>(row + valid_cols), 0, static_cast<size_t>(cols - valid_cols) * sizeof(T));
    }
  });
}

void join_maxima(const float* maxima, int64_t parts, int64_t rows, float* max) {
  std::copy_n(maxima, rows, max);
  for (int64_t part = 1; part < parts; ++part) {
    for (int64_t r = 0; r < rows; ++r) max[r] = std::max(max[r], maxima[part * rows + r]);
  }
}

void rescale_sums(const float* maxima, const float* max, int64_t parts, int64_t filled, int64_t rows, float* sums) {
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t r = 0; r < rows; ++r) {
      float& sum = sums[part * rows + r];
      sum = part < filled ? sum * std::exp(maxima[part * rows + r] - max[r]) : 0;
    }
  }
}

void row_losses(const int32_t* targets, const float* max, const float* sum_exp, int64_t rows, float* loss) {
  for (int64_t r = 0; r < rows; ++r) {
    loss[r] = targets[r] < 0 ? 0.0f : std::log(sum_exp[r]) + (max[r] - loss[r]);
  }
}

void row_scales(const int32_t* targets, const float* weights, float value, int64_t rows, float* scale) {
  for (int64_t r = 0; r < rows; ++r) {
    scale[r] = targets[r] < 0 ? 0.0f : weights == nullptr ? value : value * weights[r];
  }
}

template <typename T>
void cross_entropy(const LogitRows& of, T* logits, float scale, float z_loss, float* max, float* sum_exp, float* scales,
                   float* loss) {
  std::fill_n(loss, of.rows, 0.0f);
  row_sums<T>(of, logits, max, sum_exp, loss);
  row_losses(of.targets.address(), max, sum_exp, of.rows, loss);
  row_scales(of.targets.address(), nullptr, scale, of.rows, scales);
  cross_entropy_backward<T>(of, logits, max, sum_exp, scales, z_loss);
}

#define RT_INSTANTIATE(T)                                                                                        \
  template void row_sums<T>(const LogitRows&, const T*, float*, float*, float*);                                 \
  template void cross_entropy_backward<T>(const LogitRows&, T*, const float*, const float*, const float*, float, \
                                          float);                                                                \
  template void cross_entropy<T>(const LogitRows&, T*, float, float, float*, float*, float*, float*)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels
