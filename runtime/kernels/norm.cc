#include "runtime/kernels/norm.h"

#include <cmath>

#include "runtime/core/dtype.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

template <typename T>
RT_INLINE void layer_norm_forward_leaf_body(const T* x, const T* weight, const T* bias, T* y, float* mean_out,
                                            float* rstd_out, int64_t width, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < width; ++c) sum += load_f32(x[c]);
  const float mean = sum / static_cast<float>(width);
  float squares = 0;  // a second pass: E[x^2] - mean^2 cancels
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < width; ++c) {
    const float d = load_f32(x[c]) - mean;
    squares += d * d;
  }
  const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
  *mean_out = mean;
  *rstd_out = rstd;
  if (bias != nullptr) {
    for (int64_t c = 0; c < width; ++c) {
      store_f32(&y[c], (load_f32(x[c]) - mean) * rstd * load_f32(weight[c]) + load_f32(bias[c]));
    }
  } else {
    for (int64_t c = 0; c < width; ++c) store_f32(&y[c], (load_f32(x[c]) - mean) * rstd * load_f32(weight[c]));
  }
}
RT_CLONES(layer_norm_forward_leaf)

/// dx of one row for y = (x - mean) * rstd * w, where `mean` is 0 and not a function of x for RMSNorm.
/// With g = dy * w and xhat = (x - mean) * rstd: dx = rstd * (g - [mean(g)] - xhat * mean(g * xhat)).
template <bool kCentred, typename T>
RT_INLINE void norm_dx_leaf_body(const T* dy, const T* x, const T* weight, float mean, float rstd, T* dx,
                                 int64_t width) {
  float sum_g = 0, sum_gx = 0;
#pragma omp simd reduction(+ : sum_g, sum_gx)
  for (int64_t c = 0; c < width; ++c) {
    const float g = load_f32(dy[c]) * load_f32(weight[c]);
    sum_g += g;
    sum_gx += g * ((load_f32(x[c]) - mean) * rstd);
  }
  const float mean_g = kCentred ? sum_g / static_cast<float>(width) : 0.0f;
  const float mean_gx = sum_gx / static_cast<float>(width);
  for (int64_t c = 0; c < width; ++c) {
    const float g = load_f32(dy[c]) * load_f32(weight[c]);
    const float xhat = (load_f32(x[c]) - mean) * rstd;
    store_f32(&dx[c], rstd * (g - mean_g - xhat * mean_gx));
  }
}
RT_CLONES_OF(bool kCentred, kCentred, norm_dx_leaf)

/// dweight[c] += sum over rows of dy * xhat, dbias[c] += sum of dy, four rows at a time; `mean`, `dbias` may be null.
template <bool kCentred, typename T>
RT_INLINE void norm_dweight_leaf_body(const T* dy, const T* x, const float* mean, const float* rstd, float* dweight,
                                      float* dbias, int64_t rows, int64_t width) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const T* g = dy + r * width;
    const T* v = x + r * width;
    const float m0 = kCentred ? mean[r] : 0.0f, m1 = kCentred ? mean[r + 1] : 0.0f;
    const float m2 = kCentred ? mean[r + 2] : 0.0f, m3 = kCentred ? mean[r + 3] : 0.0f;
    const float s0 = rstd[r], s1 = rstd[r + 1], s2 = rstd[r + 2], s3 = rstd[r + 3];
    for (int64_t c = 0; c < width; ++c) {
      const float a = load_f32(g[c]) * ((load_f32(v[c]) - m0) * s0);
      const float b = load_f32(g[c + width]) * ((load_f32(v[c + width]) - m1) * s1);
      const float d = load_f32(g[c + 2 * width]) * ((load_f32(v[c + 2 * width]) - m2) * s2);
      const float e = load_f32(g[c + 3 * width]) * ((load_f32(v[c + 3 * width]) - m3) * s3);
      dweight[c] += (a + b) + (d + e);
    }
    if (dbias != nullptr) {
      for (int64_t c = 0; c < width; ++c) {
        dbias[c] +=
            (load_f32(g[c]) + load_f32(g[c + width])) + (load_f32(g[c + 2 * width]) + load_f32(g[c + 3 * width]));
      }
    }
  }
  for (; r < rows; ++r) {
    const T* g = dy + r * width;
    const T* v = x + r * width;
    const float m = kCentred ? mean[r] : 0.0f;
    for (int64_t c = 0; c < width; ++c) dweight[c] += load_f32(g[c]) * ((load_f32(v[c]) - m) * rstd[r]);
    if (dbias != nullptr) {
      for (int64_t c = 0; c < width; ++c) dbias[c] += load_f32(g[c]);
    }
  }
}
RT_CLONES_OF(bool kCentred, kCentred, norm_dweight_leaf)

template <typename T>
RT_INLINE void rms_norm_forward_leaf_body(const T* x, const T* weight, T* y, float* rstd_out, int64_t width,
                                          float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < width; ++c) squares += load_f32(x[c]) * load_f32(x[c]);
  const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
  *rstd_out = rstd;
  for (int64_t c = 0; c < width; ++c) store_f32(&y[c], load_f32(x[c]) * rstd * load_f32(weight[c]));
}
RT_CLONES(rms_norm_forward_leaf)

template <typename T>
RT_INLINE float rms_rstd_leaf_body(const T* x, int64_t width, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < width; ++c) squares += load_f32(x[c]) * load_f32(x[c]);
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}
RT_CLONES(rms_rstd_leaf)

/// dweight[c] += the sum over heads of dy * xhat of one row.
template <typename T>
RT_INLINE void head_dweight_leaf_body(const T* dy, const T* x, const float* rstd, float* dweight, int64_t heads,
                                      int64_t head_dim) {
  for (int64_t h = 0; h < heads; ++h) {
    const T* g = dy + h * head_dim;
    const T* v = x + h * head_dim;
    for (int64_t c = 0; c < head_dim; ++c) dweight[c] += load_f32(g[c]) * (load_f32(v[c]) * rstd[h]);
  }
}
RT_CLONES(head_dweight_leaf)

}  // namespace

template <typename T>
void layer_norm_forward(const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd, int64_t rows,
                        int64_t width, float eps) {
  parallel_ranges(rows, 1, 3 * width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      layer_norm_forward_leaf(x + r * width, weight, bias, y + r * width, mean + r, rstd + r, width, eps);
    }
  });
}

template <typename T>
void layer_norm_backward(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, T* dx,
                         float* dweight, float* dbias, int64_t rows, int64_t width, const TreeParts& parts) {
  float* const into[] = {dweight, dbias};  // first: dx may be dy
  add_sums_over_rows(parts, 2, width, rows, into, [=](int64_t row, int64_t count, float* sum) {
    norm_dweight_leaf<true>(dy + row * width, x + row * width, mean + row, rstd + row, sum,
                            dbias == nullptr ? nullptr : sum + width, count, width);
  });
  parallel_ranges(rows, 1, 3 * width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      norm_dx_leaf<true>(dy + r * width, x + r * width, weight, mean[r], rstd[r], dx + r * width, width);
    }
  });
}

template <typename T>
void rms_norm_forward(const T* x, const T* weight, T* y, float* rstd, int64_t rows, int64_t width, float eps) {
  parallel_ranges(rows, 1, 2 * width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) rms_norm_forward_leaf(x + r * width, weight, y + r * width, rstd + r, width, eps);
  });
}

template <typename T>
void rms_norm_backward(const T* dy, const T* x, const T* weight, const float* rstd, T* dx, float* dweight, int64_t rows,
                       int64_t width, const TreeParts& parts) {
  add_sums_over_rows(parts, 1, width, rows, &dweight, [=](int64_t row, int64_t count, float* sum) {
    norm_dweight_leaf<false>(dy + row * width, x + row * width, nullptr, rstd + row, sum, nullptr, count, width);
  });
  parallel_ranges(rows, 1, 3 * width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      norm_dx_leaf<false>(dy + r * width, x + r * width, weight, 0.0f, rstd[r], dx + r * width, width);
    }
  });
}

template <typename T>
void head_norm_forward(const T* x, int64_t x_stride, const T* weight, T* y, int64_t y_stride, int64_t rows,
                       int64_t heads, int64_t head_dim, float eps) {
  parallel_ranges(rows, 1, 2 * heads * head_dim, [=](int64_t r, int64_t end) {
    float rstd;
    for (; r < end; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        rms_norm_forward_leaf(x + r * x_stride + h * head_dim, weight, y + r * y_stride + h * head_dim, &rstd, head_dim,
                              eps);
      }
    }
  });
}

template <typename T>
void head_norm_backward(const T* dy, int64_t dy_stride, const T* x, int64_t x_stride, const T* weight, T* dx,
                        int64_t dx_stride, float* dweight, float* rstd, int64_t rows, int64_t heads, int64_t head_dim,
                        float eps) {
  parallel_ranges(rows, 1, heads * head_dim, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        rstd[r * heads + h] = rms_rstd_leaf(x + r * x_stride + h * head_dim, head_dim, eps);
      }
    }
  });
  // One weight of head_dim: on one thread, rows in order. dx may be dy, so this comes first.
  for (int64_t r = 0; r < rows; ++r) {
    head_dweight_leaf(dy + r * dy_stride, x + r * x_stride, rstd + r * heads, dweight, heads, head_dim);
  }
  parallel_ranges(rows, 1, 3 * heads * head_dim, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        norm_dx_leaf<false>(dy + r * dy_stride + h * head_dim, x + r * x_stride + h * head_dim, weight, 0.0f,
                            rstd[r * heads + h], dx + r * dx_stride + h * head_dim, head_dim);
      }
    }
  });
}

#define RT_INSTANTIATE(T)                                                                                            \
  template void layer_norm_forward<T>(const T*, const T*, const T*, T*, float*, float*, int64_t, int64_t, float);    \
  template void layer_norm_backward<T>(const T*, const T*, const T*, const float*, const float*, T*, float*, float*, \
                                       int64_t, int64_t, const TreeParts&);                                          \
  template void rms_norm_forward<T>(const T*, const T*, T*, float*, int64_t, int64_t, float);                        \
  template void rms_norm_backward<T>(const T*, const T*, const T*, const float*, T*, float*, int64_t, int64_t,       \
                                     const TreeParts&);                                                              \
  template void head_norm_forward<T>(const T*, int64_t, const T*, T*, int64_t, int64_t, int64_t, int64_t, float);    \
  template void head_norm_backward<T>(const T*, int64_t, const T*, int64_t, const T*, T*, int64_t, float*, float*,   \
                                      int64_t, int64_t, int64_t, float)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels
