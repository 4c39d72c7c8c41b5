#include "runtime/kernels/elementwise.h"

#include <cmath>
#include <mutex>

#include "runtime/core/check.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

// --- leaves: one thread's part ---------------------------------------------------------------------------------------

template <typename T>
RT_CLONES void add_leaf(const T* a, const T* b, T* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&out[i], load_f32(a[i]) + load_f32(b[i]));
}

/// sum[c] += column sums, eight rows at a time: fewer passes over `sum`, and a shorter chain of roundings.
template <typename T>
RT_CLONES void column_sums_leaf(const T* x, float* sum, int64_t rows, int64_t stride, int64_t width) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) {
    const T* p = x + r * stride;
    for (int64_t c = 0; c < width; ++c) {
      const T* q = p + c;
      const float s0 = load_f32(q[0]) + load_f32(q[stride]);
      const float s1 = load_f32(q[2 * stride]) + load_f32(q[3 * stride]);
      const float s2 = load_f32(q[4 * stride]) + load_f32(q[5 * stride]);
      const float s3 = load_f32(q[6 * stride]) + load_f32(q[7 * stride]);
      sum[c] += (s0 + s1) + (s2 + s3);
    }
  }
  for (; r < rows; ++r) {
    const T* p = x + r * stride;
    for (int64_t c = 0; c < width; ++c) sum[c] += load_f32(p[c]);
  }
}

// gelu_tanh(x) = x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): Hendrycks & Gimpel 2016.
constexpr float kTwoSqrtTwoOverPi = 1.5957691216f;
constexpr float kGeluCubic = 0.044715f;

struct GeluTanh {
  RT_INLINE float operator()(float x) const {
    return x * sigmoid_f32(kTwoSqrtTwoOverPi * (x + kGeluCubic * x * x * x));
  }
};

struct GeluTanhSlope {
  RT_INLINE float operator()(float dy, float x) const {
    const float s = sigmoid_f32(kTwoSqrtTwoOverPi * (x + kGeluCubic * x * x * x));
    const float slope = kTwoSqrtTwoOverPi * (1.0f + 3.0f * kGeluCubic * x * x);
    return dy * (s + x * (s * (1.0f - s)) * slope);
  }
};

struct GeluErf {
  RT_INLINE float operator()(float x) const {
    float gauss;
    return x * normal_cdf_f32(x, &gauss);
  }
};

struct GeluErfSlope {
  RT_INLINE float operator()(float dy, float x) const {
    constexpr float kOneOverSqrtTwoPi = 0.3989422804f;
    float gauss;
    const float cdf = normal_cdf_f32(x, &gauss);
    return dy * (cdf + x * (kOneOverSqrtTwoPi * gauss));
  }
};

struct SwiGlu {
  RT_INLINE float operator()(float gate, float up) const { return gate * sigmoid_f32(gate) * up; }
};

template <typename T>
RT_CLONES void gelu_tanh_forward_leaf(const T* x, T* y, int64_t n) {
  map_array(x, y, n, GeluTanh{});
}

template <typename T>
RT_CLONES void gelu_tanh_backward_leaf(const T* dy, const T* x, T* dx, int64_t n) {
  map_arrays(dy, x, dx, n, GeluTanhSlope{});
}

template <typename T>
RT_CLONES void gelu_erf_forward_leaf(const T* x, T* y, int64_t n) {
  map_array(x, y, n, GeluErf{});
}

template <typename T>
RT_CLONES void gelu_erf_backward_leaf(const T* dy, const T* x, T* dx, int64_t n) {
  map_arrays(dy, x, dx, n, GeluErfSlope{});
}

template <typename T>
RT_CLONES void relu_forward_leaf(const T* x, T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = load_f32(x[i]);
    store_f32(&y[i], v < 0.0f ? 0.0f : v);  // a NaN stays
  }
}

template <typename T>
RT_CLONES void relu_backward_leaf(const T* dy, const T* x, T* dx, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = load_f32(x[i]);
    const float g = load_f32(dy[i]);
    store_f32(&dx[i], v <= 0.0f ? 0.0f : (v > 0.0f ? g : v));  // v is a NaN in the last case
  }
}

template <typename T>
RT_CLONES void swiglu_forward_leaf(const T* gate, const T* up, T* y, int64_t n) {
  map_arrays(gate, up, y, n, SwiGlu{});
}

RT_INLINE void swiglu_slopes(float dy, float gate, float up, float* dgate, float* dup) {
  const float s = sigmoid_f32(gate);
  const float silu = gate * s;
  *dgate = dy * up * (s + silu * (1.0f - s));
  *dup = dy * silu;
}

RT_CLONES void swiglu_backward_leaf(const float* dy, const float* gate, const float* up, float* dgate, float* dup,
                                    int64_t n) {
  for (int64_t i = 0; i < n; ++i) swiglu_slopes(dy[i], gate[i], up[i], &dgate[i], &dup[i]);
}

template <typename T>
RT_CLONES void swiglu_backward_leaf(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {
  float d[kMapBlock], g[kMapBlock], u[kMapBlock];
  for (int64_t i = 0; i < n; i += kMapBlock) {
    const int64_t m = n - i < kMapBlock ? n - i : kMapBlock;
    load_block(dy + i, d, m);
    load_block(gate + i, g, m);
    load_block(up + i, u, m);
    for (int64_t j = 0; j < m; ++j) swiglu_slopes(d[j], g[j], u[j], &g[j], &u[j]);
    store_block(g, dgate + i, m);
    store_block(u, dup + i, m);
  }
}

/// Rotates `heads` heads of one row by the angles whose cosines and sines are given, pairs (i, i + distance).
template <typename T>
RT_CLONES void rotary_leaf(T* x, const float* cos, const float* sin, int64_t heads, int64_t head_dim, int64_t distance,
                           int64_t n) {
  for (int64_t h = 0; h < heads; ++h) {
    T* lo = x + h * head_dim;
    T* hi = lo + distance;
    for (int64_t i = 0; i < n; ++i) {
      const float a = load_f32(lo[i]);
      const float b = load_f32(hi[i]);
      store_f32(&lo[i], a * cos[i] - b * sin[i]);
      store_f32(&hi[i], b * cos[i] + a * sin[i]);
    }
  }
}

template <typename In, typename Out>
RT_CLONES void cast_leaf(const In* in, Out* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&out[i], load_f32(in[i]));
}

RT_CLONES void scale_leaf(float* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

RT_CLONES void add_to_leaf(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

constexpr int64_t kSquaresBlock = 16;

/// Always in the same order: i + 8 to i, then i + 4, ...
RT_INLINE double block_of_squares(const float* x) {
  double part[kSquaresBlock];
  for (int64_t i = 0; i < kSquaresBlock; ++i) part[i] = static_cast<double>(x[i]) * static_cast<double>(x[i]);
  for (int64_t i = 0; i < 8; ++i) part[i] += part[i + 8];
  for (int64_t i = 0; i < 4; ++i) part[i] += part[i + 4];
  return (part[0] + part[2]) + (part[1] + part[3]);
}

/// out[b] = the sum over block b; the last one may be short.
RT_CLONES void squares_leaf(const float* x, int64_t n, double* out) {
  const int64_t whole = n / kSquaresBlock;
  for (int64_t b = 0; b < whole; ++b) out[b] = block_of_squares(x + b * kSquaresBlock);
  if (whole * kSquaresBlock == n) return;
  float last[kSquaresBlock] = {};
  for (int64_t i = whole * kSquaresBlock; i < n; ++i) last[i - whole * kSquaresBlock] = x[i];
  out[whole] = block_of_squares(last);
}

}  // namespace

template <typename T>
void add(const T* a, const T* b, T* out, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { add_leaf(a + i, b + i, out + i, end - i); });
}

template <typename T>
void add_bias(T* x, const T* bias, int64_t rows, int64_t width) {
  parallel_ranges(rows, 1, width, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) add_leaf(x + r * width, bias, x + r * width, width);
  });
}

template <typename T>
void bias_backward(const T* dy, float* dbias, int64_t rows, int64_t width) {
  parallel_ranges(width, 64, rows,
                  [=](int64_t c, int64_t end) { column_sums_leaf(dy + c, dbias + c, rows, width, end - c); });
}

template <typename T>
void gelu_tanh_forward(const T* x, T* y, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { gelu_tanh_forward_leaf(x + i, y + i, end - i); });
}
template <typename T>
void gelu_tanh_backward(const T* dy, const T* x, T* dx, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { gelu_tanh_backward_leaf(dy + i, x + i, dx + i, end - i); });
}
template <typename T>
void gelu_erf_forward(const T* x, T* y, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { gelu_erf_forward_leaf(x + i, y + i, end - i); });
}
template <typename T>
void gelu_erf_backward(const T* dy, const T* x, T* dx, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { gelu_erf_backward_leaf(dy + i, x + i, dx + i, end - i); });
}
template <typename T>
void relu_forward(const T* x, T* y, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { relu_forward_leaf(x + i, y + i, end - i); });
}
template <typename T>
void relu_backward(const T* dy, const T* x, T* dx, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { relu_backward_leaf(dy + i, x + i, dx + i, end - i); });
}

template <typename T>
void swiglu_forward(const T* gate_up, T* y, int64_t rows, int64_t ffn) {
  parallel_ranges(rows, 1, 3 * ffn, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      const T* gate = gate_up + r * 2 * ffn;
      swiglu_forward_leaf(gate, gate + ffn, y + r * ffn, ffn);
    }
  });
}

template <typename T>
void swiglu_backward(const T* dy, const T* gate_up, T* dgate_up, int64_t rows, int64_t ffn) {
  parallel_ranges(rows, 1, 5 * ffn, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      const T* gate = gate_up + r * 2 * ffn;
      T* dgate = dgate_up + r * 2 * ffn;
      swiglu_backward_leaf(dy + r * ffn, gate, gate + ffn, dgate, dgate + ffn, ffn);
    }
  });
}

void rotary_table(float* table, int64_t first_position, int64_t tokens, int64_t head_dim, double theta) {
  RT_CHECK(head_dim % 2 == 0, "rotary needs an even head_dim, got {}", head_dim);
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
    for (int64_t t = 0; t < tokens; ++t) {
      const double angle = static_cast<double>(first_position + t) * frequency;
      table[(t * half + i) * 2] = static_cast<float>(std::cos(angle));
      table[(t * half + i) * 2 + 1] = static_cast<float>(std::sin(angle));
    }
  }
}

template <typename T>
void rotary(T* x, const float* table, int64_t rows, int64_t tokens, int64_t heads, int64_t head_dim, int64_t stride,
            bool inverse) {
  RT_CHECK(head_dim % 2 == 0, "rotary needs an even head_dim, got {}", head_dim);
  const int64_t half = head_dim / 2;
  const float sign = inverse ? -1.0f : 1.0f;
  parallel_ranges(rows, 1, heads * head_dim, [=](int64_t begin, int64_t end) {
    constexpr int64_t kPiece = 128;  // pairs a piece, so that the tables fit a stack buffer whatever head_dim is
    float cos[kPiece], sin[kPiece];
    for (int64_t r = begin; r < end; ++r) {
      const float* row_table = table + (r % tokens) * half * 2;
      for (int64_t i0 = 0; i0 < half; i0 += kPiece) {
        const int64_t n = std::min(kPiece, half - i0);
        for (int64_t i = 0; i < n; ++i) {
          cos[i] = row_table[(i0 + i) * 2];
          sin[i] = sign * row_table[(i0 + i) * 2 + 1];
        }
        rotary_leaf(x + r * stride + i0, cos, sin, heads, head_dim, half, n);
      }
    }
  });
}

void cast(const float* in, bf16* out, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { cast_leaf(in + i, out + i, end - i); });
}
void cast(const bf16* in, float* out, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { cast_leaf(in + i, out + i, end - i); });
}
void cast(const float* in, f16* out, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { cast_leaf(in + i, out + i, end - i); });
}
void cast(const f16* in, float* out, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { cast_leaf(in + i, out + i, end - i); });
}
void scale(float* x, float factor, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { scale_leaf(x + i, factor, end - i); });
}
void add_to(float* x, const float* y, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { add_to_leaf(x + i, y + i, end - i); });
}

void add_squares(const float* x, int64_t count, ExactSum& sum) {
  constexpr int64_t kBlocks = 64;
  std::mutex mutex;
  parallel_ranges(count, kSquaresBlock, 1, [&](int64_t begin, int64_t end) {
    ExactSum mine;
    double partial[kBlocks];
    for (int64_t i = begin; i < end; i += kBlocks * kSquaresBlock) {
      const int64_t n = std::min(kBlocks * kSquaresBlock, end - i);
      squares_leaf(x + i, n, partial);
      for (int64_t b = 0; b * kSquaresBlock < n; ++b) mine.add(partial[b]);
    }
    const std::lock_guard lock(mutex);  // once a thread; the sum is exact in any order
    sum.add(mine);
  });
}

#define RT_INSTANTIATE(T)                                                     \
  template void add<T>(const T*, const T*, T*, int64_t);                      \
  template void add_bias<T>(T*, const T*, int64_t, int64_t);                  \
  template void bias_backward<T>(const T*, float*, int64_t, int64_t);         \
  template void gelu_tanh_forward<T>(const T*, T*, int64_t);                  \
  template void gelu_tanh_backward<T>(const T*, const T*, T*, int64_t);       \
  template void gelu_erf_forward<T>(const T*, T*, int64_t);                   \
  template void gelu_erf_backward<T>(const T*, const T*, T*, int64_t);        \
  template void relu_forward<T>(const T*, T*, int64_t);                       \
  template void relu_backward<T>(const T*, const T*, T*, int64_t);            \
  template void swiglu_forward<T>(const T*, T*, int64_t, int64_t);            \
  template void swiglu_backward<T>(const T*, const T*, T*, int64_t, int64_t); \
  template void rotary<T>(T*, const float*, int64_t, int64_t, int64_t, int64_t, int64_t, bool)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels
