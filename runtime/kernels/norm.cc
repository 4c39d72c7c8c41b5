#include "runtime/kernels/norm.h"

#include <cmath>

#include "runtime/core/check.h"
#include "runtime/core/dtype.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

/// The factor of a channel; without weights 1. The question is the same for a whole row, so the compiler asks it once.
template <typename T>
RT_INLINE float factor_at(const T* weight, int64_t c, float offset) {
  return weight != nullptr ? load_f32(weight[c]) + offset : 1.0f;
}

template <typename T>
RT_INLINE void row_moments_body(const T* x, float* mean_out, float* rstd_out, int64_t width, float eps) {
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
  *mean_out = mean;
  *rstd_out = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}
RT_CLONES(row_moments)

template <typename T>
RT_INLINE void layer_norm_forward_leaf_body(const T* x, const T* weight, const T* bias, T* y, float* mean_out,
                                            float* rstd_out, int64_t width, float eps, float offset) {
  row_moments_body(x, mean_out, rstd_out, width, eps);
  const float mean = *mean_out, rstd = *rstd_out;
  if (bias != nullptr) {
    for (int64_t c = 0; c < width; ++c) {
      store_f32(&y[c], (load_f32(x[c]) - mean) * rstd * factor_at(weight, c, offset) + load_f32(bias[c]));
    }
  } else {
    for (int64_t c = 0; c < width; ++c) store_f32(&y[c], (load_f32(x[c]) - mean) * rstd * factor_at(weight, c, offset));
  }
}
RT_CLONES(layer_norm_forward_leaf)

/// dx of one row for y = (x - mean) * rstd * w, where `mean` is 0 and not a function of x for RMSNorm.
/// With g = dy * w and xhat = (x - mean) * rstd: dx = rstd * (g - [mean(g)] - xhat * mean(g * xhat)). `adds`: to dx.
template <bool kCentred, typename T>
RT_INLINE void norm_dx_leaf_body(const T* dy, const T* x, const T* weight, float mean, float rstd, T* dx, int64_t width,
                                 float offset, bool adds) {
  float sum_g = 0, sum_gx = 0;
#pragma omp simd reduction(+ : sum_g, sum_gx)
  for (int64_t c = 0; c < width; ++c) {
    const float g = load_f32(dy[c]) * factor_at(weight, c, offset);
    sum_g += g;
    sum_gx += g * ((load_f32(x[c]) - mean) * rstd);
  }
  const float mean_g = kCentred ? sum_g / static_cast<float>(width) : 0.0f;
  const float mean_gx = sum_gx / static_cast<float>(width);
  if (adds) {
    constexpr int64_t kAtOnce = 256;
    T own[kAtOnce];  // in one loop the product and the sum would be one multiply-add, rounded once
    for (int64_t begin = 0; begin < width; begin += kAtOnce) {
      const int64_t count = std::min(kAtOnce, width - begin);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t c = begin + i;
        const float g = load_f32(dy[c]) * factor_at(weight, c, offset);
        const float xhat = (load_f32(x[c]) - mean) * rstd;
        store_f32(&own[i], rstd * (g - mean_g - xhat * mean_gx));
      }
      for (int64_t i = 0; i < count; ++i) store_f32(&dx[begin + i], load_f32(dx[begin + i]) + load_f32(own[i]));
    }
    return;
  }
  for (int64_t c = 0; c < width; ++c) {
    const float g = load_f32(dy[c]) * factor_at(weight, c, offset);
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
RT_INLINE void rms_norm_forward_leaf_body(const T* x, const T* weight, T* y, float* rstd_out, int64_t width, float eps,
                                          float offset) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < width; ++c) squares += load_f32(x[c]) * load_f32(x[c]);
  const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
  *rstd_out = rstd;
  for (int64_t c = 0; c < width; ++c) store_f32(&y[c], load_f32(x[c]) * rstd * factor_at(weight, c, offset));
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

/// dweight += dy * xhat of one row, of all heads into [D] or of each into its own; dbias [D] += dy, unless null.
template <typename T>
RT_INLINE void head_dweight_leaf_body(const T* dy, const T* x, const float* mean, const float* rstd, float* dweight,
                                      float* dbias, int64_t heads, int64_t head_dim, int64_t weight_stride) {
  for (int64_t h = 0; h < heads; ++h) {
    const T* g = dy + h * head_dim;
    const T* v = x + h * head_dim;
    float* const to = dweight + h * weight_stride;
    for (int64_t c = 0; c < head_dim; ++c) to[c] += load_f32(g[c]) * ((load_f32(v[c]) - mean[h]) * rstd[h]);
    for (int64_t c = 0; dbias != nullptr && c < head_dim; ++c) dbias[c] += load_f32(g[c]);
  }
}
RT_CLONES(head_dweight_leaf)

template <typename T>
RT_INLINE float row_dot_body(const T* a, const T* b, const T* weight, int64_t width, float offset) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < width; ++c) sum += load_f32(a[c]) * load_f32(b[c]) * factor_at(weight, c, offset);
  return sum;
}
RT_CLONES(row_dot)

template <typename T>
RT_INLINE void whole_forward_leaf_body(const T* x, const T* weight, T* y, float rstd, int64_t width, float offset) {
  for (int64_t c = 0; c < width; ++c) store_f32(&y[c], load_f32(x[c]) * rstd * factor_at(weight, c, offset));
}
RT_CLONES(whole_forward_leaf)

/// `mean_gx`: of dy * weight * xhat over all channels.
template <typename T>
RT_INLINE void whole_dx_leaf_body(const T* dy, const T* x, const T* weight, float rstd, float mean_gx, T* dx,
                                  int64_t width, float offset) {
  for (int64_t c = 0; c < width; ++c) {
    const float g = load_f32(dy[c]) * factor_at(weight, c, offset);
    store_f32(&dx[c], rstd * (g - load_f32(x[c]) * rstd * mean_gx));
  }
}
RT_CLONES(whole_dx_leaf)

template <typename T>
RT_INLINE void whole_dweight_leaf_body(const T* dy, const T* x, float rstd, float* dweight, int64_t width) {
  for (int64_t c = 0; c < width; ++c) dweight[c] += load_f32(dy[c]) * (load_f32(x[c]) * rstd);
}
RT_CLONES(whole_dweight_leaf)

void check_bias(const HeadNorm& d, bool biased) {
  RT_CHECK(!biased || (d.centred && !d.own_weights), "a bias is of LayerNorm with one weight for all heads");
}

float whole_rstd(const WholeNorm& d, float squares) {
  return 1.0f / std::sqrt(squares / static_cast<float>(d.copies * d.channels) + d.eps);
}

}  // namespace

template <typename T>
void layer_norm_forward(const NormRows& of, const T* x, const T* weight, const T* bias, T* y, float* mean,
                        float* rstd) {
  const int64_t width = of.width;
  parallel_ranges(of.rows, 1, 3 * width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      layer_norm_forward_leaf(x + r * width, weight, bias, y + r * width, mean + r, rstd + r, width, of.eps, of.offset);
    }
  });
}

template <typename T>
void layer_norm_backward(const NormRows& of, const T* dy, const T* x, const T* weight, const float* mean,
                         const float* rstd, T* dx, const NormGradients& to) {
  const int64_t rows = of.rows, width = of.width;
  float* const into[] = {to.weight.address(), to.bias.address()};  // first: dx may be dy
  if (to.weight) {
    const bool biased = static_cast<bool>(to.bias);
    add_sums_over_rows(to.parts, 2, width, rows, into, [=](int64_t row, int64_t count, float* sum) {
      norm_dweight_leaf<true>(dy + row * width, x + row * width, mean + row, rstd + row, sum,
                              biased ? sum + width : nullptr, count, width);
    });
  }
  parallel_ranges(rows, 1, 3 * width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      norm_dx_leaf<true>(dy + r * width, x + r * width, weight, mean[r], rstd[r], dx + r * width, width, of.offset,
                         of.adds);
    }
  });
}

template <typename T>
void rms_norm_forward(const NormRows& of, const T* x, const T* weight, T* y, float* rstd) {
  const int64_t width = of.width;
  parallel_ranges(of.rows, 1, 2 * width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      rms_norm_forward_leaf(x + r * width, weight, y + r * width, rstd + r, width, of.eps, of.offset);
    }
  });
}

template <typename T>
void rms_norm_backward(const NormRows& of, const T* dy, const T* x, const T* weight, const float* rstd, T* dx,
                       const NormGradients& to) {
  const int64_t rows = of.rows, width = of.width;
  if (to.weight) {
    float* const into = to.weight.address();
    add_sums_over_rows(to.parts, 1, width, rows, &into, [=](int64_t row, int64_t count, float* sum) {
      norm_dweight_leaf<false>(dy + row * width, x + row * width, nullptr, rstd + row, sum, nullptr, count, width);
    });
  }
  parallel_ranges(rows, 1, 3 * width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      norm_dx_leaf<false>(dy + r * width, x + r * width, weight, 0.0f, rstd[r], dx + r * width, width, of.offset,
                          of.adds);
    }
  });
}

template <typename T>
void head_norm_forward(const HeadNorm& d, const Rows<const T>& x, const T* weight, const T* bias, const Rows<T>& y) {
  check_bias(d, bias != nullptr);
  const int64_t weight_stride = d.own_weights ? d.head_dim : 0;
  parallel_ranges(d.rows, 1, 2 * d.heads * d.head_dim, [=](int64_t r, int64_t end) {
    float mean, rstd;
    for (; r < end; ++r) {
      for (int64_t h = 0; h < d.heads; ++h) {
        const T* const from = x.row(r) + h * d.head_dim;
        T* const to = y.row(r) + h * d.head_dim;
        const T* const w = weight == nullptr ? nullptr : weight + h * weight_stride;
        if (d.centred) {
          layer_norm_forward_leaf(from, w, bias, to, &mean, &rstd, d.head_dim, d.eps, d.offset);
        } else {
          rms_norm_forward_leaf(from, w, to, &rstd, d.head_dim, d.eps, d.offset);
        }
      }
    }
  });
}

template <typename T>
void head_norm_backward(const HeadNorm& d, const Rows<const T>& dy, const Rows<const T>& x, const T* weight,
                        const Rows<T>& dx, const NormGradients& to, float* stats) {
  check_bias(d, static_cast<bool>(to.bias));
  float *const dweight = to.weight.address(), *const dbias = to.bias.address();
  const int64_t heads = d.heads, head_dim = d.head_dim, weight_stride = d.own_weights ? head_dim : 0;
  float* const rstd = stats;
  float* const mean = stats + d.rows * heads;
  parallel_ranges(d.rows, 1, heads * head_dim, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        const T* const from = x.row(r) + h * head_dim;
        if (d.centred) {
          row_moments(from, &mean[r * heads + h], &rstd[r * heads + h], head_dim, d.eps);
        } else {
          mean[r * heads + h] = 0;
          rstd[r * heads + h] = rms_rstd_leaf(from, head_dim, d.eps);
        }
      }
    }
  });
  const auto add_row = [=](int64_t r, float* sum) {
    head_dweight_leaf(dy.row(r), x.row(r), mean + r * heads, rstd + r * heads, sum, dbias, heads, head_dim,
                      weight_stride);
  };
  // dx may be dy, so this comes first. One weight of head_dim: on one thread, rows in order.
  if (dweight == nullptr) {  // nobody wants it
  } else if (d.own_weights) {
    add_sums_over_rows(to.parts, 1, heads * head_dim, d.rows, &dweight, [=](int64_t row, int64_t count, float* sum) {
      for (int64_t r = row; r < row + count; ++r) add_row(r, sum);
    });
  } else {
    for (int64_t r = 0; r < d.rows; ++r) add_row(r, dweight);
  }
  parallel_ranges(d.rows, 1, 3 * heads * head_dim, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        const T* const g = dy.row(r) + h * head_dim;
        const T* const from = x.row(r) + h * head_dim;
        const T* const w = weight == nullptr ? nullptr : weight + h * weight_stride;
        T* const into = dx.row(r) + h * head_dim;
        if (d.centred) {
          norm_dx_leaf<true>(g, from, w, mean[r * heads + h], rstd[r * heads + h], into, head_dim, d.offset, false);
        } else {
          norm_dx_leaf<false>(g, from, w, 0.0f, rstd[r * heads + h], into, head_dim, d.offset, false);
        }
      }
    }
  });
}

template <typename T>
void row_dots(const RowDots& d, const Rows<const T>& a, const Rows<const T>& b, const T* weight, float offset,
              float* sums) {
  const int64_t part_width = d.width / d.parts;
  parallel_ranges(d.rows, 1, 2 * d.width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      for (int64_t part = 0; part < d.parts; ++part) {
        const int64_t at = part * part_width;
        sums[part * d.stride + r] =
            row_dot(a.row(r) + at, b.row(r) + at, weight == nullptr ? nullptr : weight + at, part_width, offset);
      }
    }
  });
}

template <typename T>
void whole_norm_forward(const WholeNorm& d, const Rows<const T>& x, const T* weight, const float* squares,
                        const Rows<T>& y) {
  parallel_ranges(d.rows, 1, 2 * d.width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      whole_forward_leaf(x.row(r), weight, y.row(r), whole_rstd(d, squares[r]), d.width, d.offset);
    }
  });
}

template <typename T>
void whole_norm_backward(const WholeNorm& d, const Rows<const T>& dy, const Rows<const T>& x, const T* weight,
                         const float* squares, const float* dots, const Rows<T>& dx, const NormGradients& to) {
  float* const into = to.weight.address();
  add_sums_over_rows(to.parts, 1, d.width, d.rows, &into, [=](int64_t row, int64_t count, float* sum) {
    for (int64_t r = row; r < row + count; ++r) {
      whole_dweight_leaf(dy.row(r), x.row(r), whole_rstd(d, squares[r]), sum, d.width);
    }
  });
  parallel_ranges(d.rows, 1, 3 * d.width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      const float rstd = whole_rstd(d, squares[r]);
      const float mean_gx = dots[r] * rstd / static_cast<float>(d.copies * d.channels);
      whole_dx_leaf(dy.row(r), x.row(r), weight, rstd, mean_gx, dx.row(r), d.width, d.offset);
    }
  });
}

#define RT_INSTANTIATE(T)                                                                                              \
  template void layer_norm_forward<T>(const NormRows&, const T*, const T*, const T*, T*, float*, float*);              \
  template void layer_norm_backward<T>(const NormRows&, const T*, const T*, const T*, const float*, const float*, T*,  \
                                       const NormGradients&);                                                          \
  template void rms_norm_forward<T>(const NormRows&, const T*, const T*, T*, float*);                                  \
  template void rms_norm_backward<T>(const NormRows&, const T*, const T*, const T*, const float*, T*,                  \
                                     const NormGradients&);                                                            \
  template void head_norm_forward<T>(const HeadNorm&, const Rows<const T>&, const T*, const T*, const Rows<T>&);       \
  template void head_norm_backward<T>(const HeadNorm&, const Rows<const T>&, const Rows<const T>&, const T*,           \
                                      const Rows<T>&, const NormGradients&, float*);                                   \
  template void row_dots<T>(const RowDots&, const Rows<const T>&, const Rows<const T>&, const T*, float, float*);      \
  template void whole_norm_forward<T>(const WholeNorm&, const Rows<const T>&, const T*, const float*, const Rows<T>&); \
  template void whole_norm_backward<T>(const WholeNorm&, const Rows<const T>&, const Rows<const T>&, const T*,         \
                                       const float*, const float*, const Rows<T>&, const NormGradients&)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels
