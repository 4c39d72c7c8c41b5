#include "runtime/kernels/elementwise.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <mutex>
#include <span>

#include "runtime/core/check.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

// --- leaves: one thread's part ---------------------------------------------------------------------------------------

template <typename T>
RT_INLINE void add_leaf_body(const T* a, const T* b, T* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&out[i], load_f32(a[i]) + load_f32(b[i]));
}
RT_CLONES(add_leaf)

/// sum[c] += column sums, eight rows at a time: fewer passes over `sum`, and a shorter chain of roundings.
template <typename T>
RT_INLINE void column_sums_leaf_body(const T* x, float* sum, int64_t rows, int64_t width) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) {
    const T* p = x + r * width;
    for (int64_t c = 0; c < width; ++c) {
      const T* q = p + c;
      const float s0 = load_f32(q[0]) + load_f32(q[width]);
      const float s1 = load_f32(q[2 * width]) + load_f32(q[3 * width]);
      const float s2 = load_f32(q[4 * width]) + load_f32(q[5 * width]);
      const float s3 = load_f32(q[6 * width]) + load_f32(q[7 * width]);
      sum[c] += (s0 + s1) + (s2 + s3);
    }
  }
  for (; r < rows; ++r) {
    const T* p = x + r * width;
    for (int64_t c = 0; c < width; ++c) sum[c] += load_f32(p[c]);
  }
}
RT_CLONES(column_sums_leaf)

// gelu_tanh(x) = x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): Hendrycks & Gimpel 2016.
constexpr float kTwoSqrtTwoOverPi = 1.5957691216f;
constexpr float kGeluCubic = 0.044715f;

// An activation: its value, and value and slope together.
struct GeluTanh {
  RT_INLINE float operator()(float x) const {
    return x * sigmoid_f32(kTwoSqrtTwoOverPi * (x + kGeluCubic * x * x * x));
  }
  RT_INLINE float value_and_slope(float x, float* slope) const {
    const float s = sigmoid_f32(kTwoSqrtTwoOverPi * (x + kGeluCubic * x * x * x));
    *slope = s + x * (s * (1.0f - s)) * (kTwoSqrtTwoOverPi * (1.0f + 3.0f * kGeluCubic * x * x));
    return x * s;
  }
};

struct GeluErf {
  RT_INLINE float operator()(float x) const {
    float gauss;
    return x * normal_cdf_f32(x, &gauss);
  }
  RT_INLINE float value_and_slope(float x, float* slope) const {
    constexpr float kOneOverSqrtTwoPi = 0.3989422804f;
    float gauss;
    const float cdf = normal_cdf_f32(x, &gauss);
    *slope = cdf + x * (kOneOverSqrtTwoPi * gauss);
    return x * cdf;
  }
};

/// x sigmoid(k x): SiLU, and the quick GELU.
template <int kThousandths>
struct Swish {
  static constexpr float kFactor = kThousandths / 1000.0f;
  RT_INLINE float operator()(float x) const { return x * sigmoid_f32(kFactor * x); }
  RT_INLINE float value_and_slope(float x, float* slope) const {
    const float s = sigmoid_f32(kFactor * x);
    const float value = x * s;
    *slope = s + kFactor * value * (1.0f - s);
    return value;
  }
};
using Silu = Swish<1000>;
using GeluQuick = Swish<1702>;

struct Relu {
  RT_INLINE float operator()(float x) const { return x < 0.0f ? 0.0f : x; }  // a NaN stays
  RT_INLINE float value_and_slope(float x, float* slope) const {
    *slope = x <= 0.0f ? 0.0f : (x > 0.0f ? 1.0f : x);  // x is a NaN in the last case
    return x < 0.0f ? 0.0f : x;
  }
};

struct Relu2 {
  RT_INLINE float operator()(float x) const { return x < 0.0f ? 0.0f : x * x; }
  RT_INLINE float value_and_slope(float x, float* slope) const {
    *slope = x < 0.0f ? 0.0f : 2.0f * x;
    return x < 0.0f ? 0.0f : x * x;
  }
};

template <typename Act>
struct Backward {
  RT_INLINE float operator()(float dy, float x) const {
    float slope;
    Act{}.value_and_slope(x, &slope);
    return dy * slope;
  }
};

template <typename Act>
struct Gated {
  RT_INLINE float operator()(float gate, float up) const { return Act{}(gate)*up; }
};

template <typename Act, typename T>
RT_INLINE void activation_forward_leaf_body(const T* x, T* y, int64_t n) {
  map_array(x, y, n, Act{});
}
RT_CLONES_OF(typename Act, Act, activation_forward_leaf)

template <typename Act, typename T>
RT_INLINE void activation_backward_leaf_body(const T* dy, const T* x, T* dx, int64_t n) {
  map_arrays(dy, x, dx, n, Backward<Act>{});
}
RT_CLONES_OF(typename Act, Act, activation_backward_leaf)

/// The value by the same expression as forward, for its bits; the compiler finds what both share.
template <typename Act, typename T>
RT_INLINE void activation_both_leaf_body(const T* x, T* dy, T* y, int64_t n) {
  float slopes[kMapBlock], values[kMapBlock];
  for (int64_t i = 0; i < n; i += kMapBlock) {
    const int64_t m = n - i < kMapBlock ? n - i : kMapBlock;
    load_block(dy + i, slopes, m);
    load_block(x + i, values, m);
    for (int64_t j = 0; j < m; ++j) {
      const float at = values[j];
      slopes[j] = Backward<Act>{}(slopes[j], at);
      values[j] = Act{}(at);
    }
    store_block(slopes, dy + i, m);
    store_block(values, y + i, m);
  }
}
RT_CLONES_OF(typename Act, Act, activation_both_leaf)

template <typename Act, typename T>
RT_INLINE void gated_forward_leaf_body(const T* gate, const T* up, T* y, int64_t n) {
  map_arrays(gate, up, y, n, Gated<Act>{});
}
RT_CLONES_OF(typename Act, Act, gated_forward_leaf)

template <typename Act>
RT_INLINE void gated_slopes(float dy, float gate, float up, float* dgate, float* dup) {
  float slope;
  const float value = Act{}.value_and_slope(gate, &slope);
  *dgate = dy * up * slope;
  *dup = dy * value;
}

template <typename Act>
RT_INLINE void gated_backward_leaf_body(const float* dy, const float* gate, const float* up, float* dgate, float* dup,
                                        int64_t n) {
  for (int64_t i = 0; i < n; ++i) gated_slopes<Act>(dy[i], gate[i], up[i], &dgate[i], &dup[i]);
}

/// 16-bit elements.
template <typename Act, typename T>
RT_INLINE void gated_backward_leaf_body(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {
  float d[kMapBlock], g[kMapBlock], u[kMapBlock];
  for (int64_t i = 0; i < n; i += kMapBlock) {
    const int64_t m = n - i < kMapBlock ? n - i : kMapBlock;
    load_block(dy + i, d, m);
    load_block(gate + i, g, m);
    load_block(up + i, u, m);
    for (int64_t j = 0; j < m; ++j) gated_slopes<Act>(d[j], g[j], u[j], &g[j], &u[j]);
    store_block(g, dgate + i, m);
    store_block(u, dup + i, m);
  }
}
RT_CLONES_OF(typename Act, Act, gated_backward_leaf)

struct ClampedForward {
  float alpha, limit;
  RT_INLINE float operator()(float gate, float up) const {  // written so that a NaN passes
    const float g = gate > limit ? limit : gate;
    const float below = up > limit ? limit : up;
    const float u = below < -limit ? -limit : below;
    return (u + 1.0f) * (g * sigmoid_f32(alpha * g));
  }
};
template <typename T>
RT_INLINE void clamped_forward_leaf_body(const T* gate, const T* up, T* y, int64_t n, float alpha, float limit) {
  map_arrays(gate, up, y, n, ClampedForward{alpha, limit});
}
RT_CLONES(clamped_forward_leaf)

template <typename T>
RT_INLINE void clamped_backward_leaf_body(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t n,
                                          float alpha, float limit) {
  float d[kMapBlock], g[kMapBlock], u[kMapBlock];
  for (int64_t i = 0; i < n; i += kMapBlock) {
    const int64_t m = n - i < kMapBlock ? n - i : kMapBlock;
    load_block(dy + i, d, m);
    load_block(gate + i, g, m);
    load_block(up + i, u, m);
    for (int64_t j = 0; j < m; ++j) {
      const float at = g[j] > limit ? limit : g[j];
      const float below = u[j] > limit ? limit : u[j];
      const float factor = (below < -limit ? -limit : below) + 1.0f;
      const float s = sigmoid_f32(alpha * at);
      const float of_gate = g[j] > limit ? 0.0f : d[j] * factor * s * (1.0f + alpha * at * (1.0f - s));
      const float of_up = abs_f32(u[j]) > limit ? 0.0f : d[j] * at * s;
      g[j] = of_gate;
      u[j] = of_up;
    }
    store_block(g, dgate + i, m);
    store_block(u, dup + i, m);
  }
}
RT_CLONES(clamped_backward_leaf)

/// Rotates `heads` heads of one row by the angles whose cosines and sines are given, pairs (i, i + distance).
template <typename T>
RT_INLINE void rotary_leaf_body(T* x, const float* cos, const float* sin, int64_t heads, int64_t head_dim,
                                int64_t distance, int64_t n) {
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
RT_CLONES(rotary_leaf)

/// The same for pairs (2i, 2i + 1); x points at the first of them.
template <typename T>
RT_INLINE void rotary_interleaved_leaf_body(T* x, const float* cos, const float* sin, int64_t heads, int64_t head_dim,
                                            int64_t n) {
  for (int64_t h = 0; h < heads; ++h) {
    T* pair = x + h * head_dim;
    for (int64_t i = 0; i < n; ++i) {
      const float a = load_f32(pair[2 * i]);
      const float b = load_f32(pair[2 * i + 1]);
      store_f32(&pair[2 * i], a * cos[i] - b * sin[i]);
      store_f32(&pair[2 * i + 1], b * cos[i] + a * sin[i]);
    }
  }
}
RT_CLONES(rotary_interleaved_leaf)

template <typename In, typename Out>
RT_INLINE void cast_leaf_body(const In* in, Out* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&out[i], load_f32(in[i]));
}
RT_CLONES(cast_leaf)

template <typename T>
RT_INLINE void scale_leaf_body(T* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&x[i], factor * load_f32(x[i]));
}
RT_CLONES(scale_leaf)

struct Cap {
  float limit, inverse;
  RT_INLINE float operator()(float x) const { return limit * tanh_f32(x * inverse); }
};
struct Clip {
  float limit;
  RT_INLINE float operator()(float x) const {  // written so that a NaN passes
    const float below = x > limit ? limit : x;
    return below < -limit ? -limit : below;
  }
};
struct ClipGradient {
  float limit;
  RT_INLINE float operator()(float x, float dx) const { return abs_f32(x) > limit ? 0.0f : dx; }
};

template <typename T>
RT_INLINE void cap_leaf_body(T* x, float limit, int64_t n) {
  map_array(x, x, n, Cap{limit, 1.0f / limit});
}
RT_CLONES(cap_leaf)

template <typename T>
RT_INLINE void clip_leaf_body(T* x, float limit, int64_t n) {
  map_array(x, x, n, Clip{limit});
}
RT_CLONES(clip_leaf)

template <typename T>
RT_INLINE void clip_backward_leaf_body(const T* x, T* dx, float limit, int64_t n) {
  map_arrays(x, dx, dx, n, ClipGradient{limit});
}
RT_CLONES(clip_backward_leaf)

template <typename T>
RT_INLINE void add_scaled_leaf_body(const T* a, float factor, const T* b, T* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&out[i], load_f32(a[i]) + factor * load_f32(b[i]));
}
RT_CLONES(add_scaled_leaf)

RT_INLINE void add_to_leaf_body(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}
RT_CLONES(add_to_leaf)

constexpr int64_t kSquaresBlock = 16;

/// The sum of a block's squares, always in the same order: i + 8 to i, then i + 4, ...; here of four blocks, in
/// vectors.
RT_INLINE void four_blocks_of_squares(const float* x, double* out) {
  typedef float Floats __attribute__((vector_size(32), aligned(4), may_alias));
  typedef double Doubles __attribute__((vector_size(64)));
  typedef double Half __attribute__((vector_size(32), aligned(8), may_alias));
  Half fours[4];
#pragma GCC unroll 4
  for (int64_t b = 0; b < 4; ++b) {
    const auto low = __builtin_convertvector(*reinterpret_cast<const Floats*>(x + b * kSquaresBlock), Doubles);
    const auto high = __builtin_convertvector(*reinterpret_cast<const Floats*>(x + b * kSquaresBlock + 8), Doubles);
    const Doubles sums = low * low + high * high;
    fours[b] = __builtin_shufflevector(sums, sums, 0, 1, 2, 3) + __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
  }
  Half twos[2];
#pragma GCC unroll 2
  for (int64_t b = 0; b < 2; ++b) {
    const Half one = fours[2 * b], other = fours[2 * b + 1];
    twos[b] = __builtin_shufflevector(one, other, 0, 1, 4, 5) + __builtin_shufflevector(one, other, 2, 3, 6, 7);
  }
  *reinterpret_cast<Half*>(out) =
      __builtin_shufflevector(twos[0], twos[1], 0, 2, 4, 6) + __builtin_shufflevector(twos[0], twos[1], 1, 3, 5, 7);
}

constexpr int64_t kSumsAtOnce = 64;

/// The sums of up to kSumsAtOnce blocks; zero behind them.
RT_INLINE void squares_leaf_body(const float* x, int64_t n, double* out) {
  constexpr int64_t kStep = 4 * kSquaresBlock;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) four_blocks_of_squares(x + i, out + i / kSquaresBlock);
  for (; i < kSumsAtOnce * kSquaresBlock; i += kStep) {
    float last[kStep] = {};
    for (int64_t k = i; k < n; ++k) last[k - i] = x[k];
    four_blocks_of_squares(last, out + i / kSquaresBlock);
  }
}
RT_CLONES(squares_leaf)

/// sums[0] + sums[1] + sums[2] is the sum of kSumsAtOnce terms that are not negative, each of the three being exact: of
/// the bits from 2^45 below the largest term on, of the next 45, of 45 more. False where terms have bits below, or such
/// as ExactSum cuts off or calls infinite, or are no numbers.
RT_INLINE bool sums_by_bits_leaf_body(const double* terms, double* sums) {
  double largest = 0, smallest = 1;
#pragma omp simd reduction(max : largest) reduction(min : smallest)
  for (int64_t i = 0; i < kSumsAtOnce; ++i) {
    const double term = terms[i], at_least = term == 0 ? 1 : term;
    largest = term > largest ? term : largest;
    smallest = at_least < smallest ? at_least : smallest;
  }
  if (!(largest < 0x1p100 && smallest >= 0x1p-116)) return false;
  // Added to 2^8 times the power of two in the largest term, a term keeps 44 bits below that power.
  constexpr uint64_t kExponent = uint64_t{0x7ff} << 52;
  const double high = std::bit_cast<double>((std::bit_cast<uint64_t>(largest) & kExponent) + (uint64_t{8} << 52));
  const double middle = high * 0x1p-45, low = middle * 0x1p-45;
  double sum0 = 0, sum1 = 0, sum2 = 0, left = 0;
#pragma omp simd reduction(+ : sum0, sum1, sum2, left)
  for (int64_t i = 0; i < kSumsAtOnce; ++i) {
    const double part0 = (terms[i] + high) - high, rest0 = terms[i] - part0;
    const double part1 = (rest0 + middle) - middle, rest1 = rest0 - part1;
    const double part2 = (rest1 + low) - low, rest2 = rest1 - part2;
    sum0 += part0;
    sum1 += part1;
    sum2 += part2;
    left += rest2 < 0 ? -rest2 : rest2;  // a NaN stays
  }
  sums[0] = sum0;
  sums[1] = sum1;
  sums[2] = sum2;
  return left == 0;
}
RT_CLONES(sums_by_bits_leaf)

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
void bias_backward(const T* dy, float* dbias, int64_t rows, int64_t width, const TreeParts& parts) {
  add_sums_over_rows(parts, 1, width, rows, &dbias, [=](int64_t row, int64_t count, float* sum) {
    column_sums_leaf(dy + row * width, sum, count, width);
  });
}

#define RT_ACTIVATION(name, Act)                                                                                       \
  template <typename T>                                                                                                \
  void name##_forward(const T* x, T* y, int64_t count) {                                                               \
    parallel_elements(count, [=](int64_t i, int64_t end) { activation_forward_leaf<Act>(x + i, y + i, end - i); });    \
  }                                                                                                                    \
  template <typename T>                                                                                                \
  void name##_backward(const T* dy, const T* x, T* dx, int64_t count) {                                                \
    parallel_elements(count,                                                                                           \
                      [=](int64_t i, int64_t end) { activation_backward_leaf<Act>(dy + i, x + i, dx + i, end - i); }); \
  }                                                                                                                    \
  template <typename T>                                                                                                \
  void name##_both(const T* x, T* dy, T* y, int64_t count) {                                                           \
    parallel_elements(count,                                                                                           \
                      [=](int64_t i, int64_t end) { activation_both_leaf<Act>(x + i, dy + i, y + i, end - i); });      \
  }
RT_ACTIVATION(gelu_tanh, GeluTanh)
RT_ACTIVATION(gelu_erf, GeluErf)
RT_ACTIVATION(gelu_quick, GeluQuick)
RT_ACTIVATION(relu, Relu)
RT_ACTIVATION(relu2, Relu2)
RT_ACTIVATION(silu, Silu)
#undef RT_ACTIVATION

namespace {

template <typename Act, typename T>
void gated_forward_by(const T* gate_up, T* y, int64_t rows, int64_t ffn) {
  parallel_ranges(rows, 1, 3 * ffn, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      const T* gate = gate_up + r * 2 * ffn;
      gated_forward_leaf<Act>(gate, gate + ffn, y + r * ffn, ffn);
    }
  });
}

template <typename Act, typename T>
void gated_backward_by(const T* dy, const T* gate_up, T* dgate_up, int64_t rows, int64_t ffn) {
  parallel_ranges(rows, 1, 5 * ffn, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      const T* gate = gate_up + r * 2 * ffn;
      T* dgate = dgate_up + r * 2 * ffn;
      gated_backward_leaf<Act>(dy + r * ffn, gate, gate + ffn, dgate, dgate + ffn, ffn);
    }
  });
}

}  // namespace

template <typename T>
void gated_forward(Gate gate, const T* gate_up, T* y, int64_t rows, int64_t ffn) {
  switch (gate) {
    case Gate::kSilu:
      return gated_forward_by<Silu>(gate_up, y, rows, ffn);
    case Gate::kGeluErf:
      return gated_forward_by<GeluErf>(gate_up, y, rows, ffn);
    case Gate::kGeluTanh:
      return gated_forward_by<GeluTanh>(gate_up, y, rows, ffn);
    case Gate::kRelu:
      return gated_forward_by<Relu>(gate_up, y, rows, ffn);
    case Gate::kGeluQuick:
      return gated_forward_by<GeluQuick>(gate_up, y, rows, ffn);
    case Gate::kRelu2:
      return gated_forward_by<Relu2>(gate_up, y, rows, ffn);
  }
}

template <typename T>
void gated_backward(Gate gate, const T* dy, const T* gate_up, T* dgate_up, int64_t rows, int64_t ffn) {
  switch (gate) {
    case Gate::kSilu:
      return gated_backward_by<Silu>(dy, gate_up, dgate_up, rows, ffn);
    case Gate::kGeluErf:
      return gated_backward_by<GeluErf>(dy, gate_up, dgate_up, rows, ffn);
    case Gate::kGeluTanh:
      return gated_backward_by<GeluTanh>(dy, gate_up, dgate_up, rows, ffn);
    case Gate::kRelu:
      return gated_backward_by<Relu>(dy, gate_up, dgate_up, rows, ffn);
    case Gate::kGeluQuick:
      return gated_backward_by<GeluQuick>(dy, gate_up, dgate_up, rows, ffn);
    case Gate::kRelu2:
      return gated_backward_by<Relu2>(dy, gate_up, dgate_up, rows, ffn);
  }
}

template <typename T>
void clamped_gate_forward(const ClampedGate& of, const T* gate_up, T* y, int64_t rows, int64_t ffn) {
  parallel_ranges(rows, 1, 3 * ffn, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      const T* gate = gate_up + r * 2 * ffn;
      clamped_forward_leaf(gate, gate + ffn, y + r * ffn, ffn, of.alpha, of.limit);
    }
  });
}

template <typename T>
void clamped_gate_backward(const ClampedGate& of, const T* dy, const T* gate_up, T* dgate_up, int64_t rows,
                           int64_t ffn) {
  parallel_ranges(rows, 1, 5 * ffn, [=](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      const T* gate = gate_up + r * 2 * ffn;
      T* dgate = dgate_up + r * 2 * ffn;
      clamped_backward_leaf(dy + r * ffn, gate, gate + ffn, dgate, dgate + ffn, ffn, of.alpha, of.limit);
    }
  });
}

void rotary_table(float* table, int64_t first_position, int64_t tokens, std::span<const float> frequencies,
                  double factor) {
  const int64_t pairs = std::ssize(frequencies);
  for (int64_t i = 0; i < pairs; ++i) {
    for (int64_t t = 0; t < tokens; ++t) {
      const double angle = static_cast<float>(first_position + t) * frequencies[i];
      table[(t * pairs + i) * 2] = static_cast<float>(factor * std::cos(angle));
      table[(t * pairs + i) * 2 + 1] = static_cast<float>(factor * std::sin(angle));
    }
  }
}

template <typename T>
void rotary(const RotaryDims& d, T* x, const float* table, bool inverse) {
  RT_CHECK(d.turning % 2 == 0 && d.turning <= d.head_dim, "rotary of {} channels of {}", d.turning, d.head_dim);
  const int64_t half = d.turning / 2;
  const float sign = inverse ? -1.0f : 1.0f;
  const int32_t* const positions = address_of(d.positions);
  parallel_ranges(d.rows, 1, d.heads * d.turning, [=](int64_t begin, int64_t end) {
    constexpr int64_t kPiece = 128;  // pairs a piece, so that the tables fit a stack buffer whatever head_dim is
    float cos[kPiece], sin[kPiece];
    for (int64_t r = begin; r < end; ++r) {
      const int64_t position = positions != nullptr ? positions[r] : r % d.tokens;
      const float* row_table = table + position * half * 2;
      for (int64_t i0 = 0; i0 < half; i0 += kPiece) {
        const int64_t n = std::min(kPiece, half - i0);
        for (int64_t i = 0; i < n; ++i) {
          cos[i] = row_table[(i0 + i) * 2];
          sin[i] = sign * row_table[(i0 + i) * 2 + 1];
        }
        if (d.interleaved) {
          rotary_interleaved_leaf(x + r * d.stride + 2 * i0, cos, sin, d.heads, d.head_dim, n);
        } else {
          rotary_leaf(x + r * d.stride + i0, cos, sin, d.heads, d.head_dim, half, n);
        }
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
template <typename T>
void scale(T* x, float factor, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { scale_leaf(x + i, factor, end - i); });
}
template <typename T>
void cap(T* x, float limit, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { cap_leaf(x + i, limit, end - i); });
}
template <typename T>
void clip(T* x, float limit, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { clip_leaf(x + i, limit, end - i); });
}
template <typename T>
void clip_backward(const T* x, T* dx, float limit, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { clip_backward_leaf(x + i, dx + i, limit, end - i); });
}
template <typename T>
void add_scaled(const T* a, float factor, const T* b, T* out, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { add_scaled_leaf(a + i, factor, b + i, out + i, end - i); });
}
void add_to(float* x, const float* y, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { add_to_leaf(x + i, y + i, end - i); });
}

void scale_floats(float* x, float factor, int64_t count) { scale(x, factor, count); }

void add_squares(const float* x, int64_t count, ExactSum& sum) {
  std::mutex mutex;
  parallel_ranges(count, kSquaresBlock, 1, [&](int64_t begin, int64_t end) {
    constexpr int64_t kElems = kSumsAtOnce * kSquaresBlock;
    ExactSum mine;
    alignas(64) double terms[kSumsAtOnce], sums[3];
    for (int64_t i = begin; i < end; i += kElems) {
      squares_leaf(x + i, std::min(kElems, end - i), terms);
      const bool exact = sums_by_bits_leaf(terms, sums);
      for (const double term : exact ? std::span<const double>(sums) : std::span<const double>(terms)) mine.add(term);
    }
    const std::lock_guard lock(mutex);  // once a thread; the sum is exact in any order
    sum.add(mine);
  });
}

#define RT_INSTANTIATE_ACTIVATION(name, T)                           \
  template void name##_forward<T>(const T*, T*, int64_t);            \
  template void name##_backward<T>(const T*, const T*, T*, int64_t); \
  template void name##_both<T>(const T*, T*, T*, int64_t)
#define RT_INSTANTIATE(T)                                                                               \
  template void add<T>(const T*, const T*, T*, int64_t);                                                \
  template void add_bias<T>(T*, const T*, int64_t, int64_t);                                            \
  template void bias_backward<T>(const T*, float*, int64_t, int64_t, const TreeParts&);                 \
  template void scale<T>(T*, float, int64_t);                                                           \
  template void cap<T>(T*, float, int64_t);                                                             \
  template void clip<T>(T*, float, int64_t);                                                            \
  template void clip_backward<T>(const T*, T*, float, int64_t);                                         \
  template void add_scaled<T>(const T*, float, const T*, T*, int64_t);                                  \
  RT_INSTANTIATE_ACTIVATION(gelu_tanh, T);                                                              \
  RT_INSTANTIATE_ACTIVATION(gelu_erf, T);                                                               \
  RT_INSTANTIATE_ACTIVATION(gelu_quick, T);                                                             \
  RT_INSTANTIATE_ACTIVATION(relu, T);                                                                   \
  RT_INSTANTIATE_ACTIVATION(relu2, T);                                                                  \
  RT_INSTANTIATE_ACTIVATION(silu, T);                                                                   \
  template void gated_forward<T>(Gate, const T*, T*, int64_t, int64_t);                                 \
  template void gated_backward<T>(Gate, const T*, const T*, T*, int64_t, int64_t);                      \
  template void clamped_gate_forward<T>(const ClampedGate&, const T*, T*, int64_t, int64_t);            \
  template void clamped_gate_backward<T>(const ClampedGate&, const T*, const T*, T*, int64_t, int64_t); \
  template void rotary<T>(const RotaryDims&, T*, const float*, bool)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE
#undef RT_INSTANTIATE_ACTIVATION

}  // namespace cairn::kernels
