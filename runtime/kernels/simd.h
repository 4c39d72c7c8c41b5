#pragma once
// What the hot loops share: run-time choice of the instruction set, rounding, and float approximations that vectorise.
//
// The build targets plain x86-64. A function f_body() that is RT_INLINE and followed by RT_CLONES(f) is compiled for
// AVX-512, AVX2 and the baseline, and f() calls the one of simd_level(). Everything that it calls must be RT_INLINE
// too, or the callee stays baseline code. The compiler's own means (target_clones) ask the processor alone, and a run
// over several hosts has to have the level that all of them have: sums are as wide as a register, so others are other
// bits. NaN goes through every function here as NaN.

#include <bit>
#include <cstdint>

#include "runtime/core/dtype.h"
#include "runtime/kernels/isa.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define RT_TARGET(level) __attribute__((target("arch=" level), noinline))
#else
#define RT_TARGET(level) __attribute__((noinline))
#endif
#define RT_INLINE inline __attribute__((always_inline))
/// f() of f_body(), which may be a template whose arguments follow from those of the call.
#define RT_CLONES(name)                                                                         \
  template <class... Args>                                                                      \
  RT_INLINE auto name(Args... args) {                                                           \
    return cloned(                                                                              \
        [](auto... of) __attribute__((always_inline)) { return name##_body(of...); }, args...); \
  }
/// The same for f<X>(), where X is declared by `parameter` and is the first of the template's arguments.
#define RT_CLONES_OF(parameter, argument, name)                                                           \
  template <parameter, class... Args>                                                                     \
  RT_INLINE auto name(Args... args) {                                                                     \
    return cloned(                                                                                        \
        [](auto... of) __attribute__((always_inline)) { return name##_body<argument>(of...); }, args...); \
  }

namespace cairn::kernels {

template <class Body, class... Args>
RT_TARGET("x86-64-v4")
auto clone_v4(Body body, Args... args) {
  return body(args...);
}
template <class Body, class... Args>
RT_TARGET("x86-64-v3")
auto clone_v3(Body body, Args... args) {
  return body(args...);
}
template <class Body, class... Args>
__attribute__((noinline)) auto clone_baseline(Body body, Args... args) {
  return body(args...);
}
template <class Body, class... Args>
RT_INLINE auto cloned(Body body, Args... args) {
  switch (simd_level()) {
    case SimdLevel::kV4:
      return clone_v4(body, args...);
    case SimdLevel::kV3:
      return clone_v3(body, args...);
    case SimdLevel::kBaseline:
      break;
  }
  return clone_baseline(body, args...);
}

/// So many floats that a loop works on at once, wherever they lie.
template <int kWidth>
struct Vector {
  typedef float Type __attribute__((vector_size(kWidth * sizeof(float)), aligned(4), may_alias));
};

RT_INLINE float load_f32(float x) { return x; }
RT_INLINE float load_f32(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
/// As f16_to_f32(), without a branch.
RT_INLINE float load_f32(f16 x) {
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & 0x0f800000u;
  const uint32_t rebias = exponent == 0x0f800000u ? 224u << 23 : 112u << 23;  // infinity and NaN; all others
  // A subnormal is read as if it had the hidden bit of 2^-14, which is then taken away.
  const float small = std::bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;
  const uint32_t bits = exponent == 0 ? std::bit_cast<uint32_t>(small) : magnitude + rebias;
  return std::bit_cast<float>(bits | static_cast<uint32_t>(x.bits & 0x8000u) << 16);
}

RT_INLINE void store_f32(float* to, float x) { *to = x; }
/// As to_bf16(), without a branch.
RT_INLINE void store_f32(bf16* to, float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (u >> 16) | 0x40u;
  to->bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

/// As f32_to_f16(), without a branch.
RT_INLINE void store_f32(f16* to, float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t bits = magnitude < 0x38800000u ? subnormal : normal;
  bits = magnitude >= 0x477ff000u ? 0x7c00u : bits;
  bits = magnitude > 0x7f800000u ? 0x7e00u : bits;
  to->bits = static_cast<uint16_t>(bits | ((u >> 16) & 0x8000u));
}

/// e^x, relative error below 2e-7 from -87.3 to 88.3; exactly 0 below -87.7, infinity above 88.4.
/// exp(x) = 2^n * exp(r), |r| <= ln(2)/2, exp(r) = 1 + r + r^2 q(r) with q a minimax fit (error 3e-9 before rounding).
RT_INLINE float exp_f32(float x) {
  x = x < -88.0f ? -88.0f : x;                          // written so that a NaN passes; n = -127 gives the factor 0
  x = x > 89.0f ? 89.0f : x;                            // n = 128 gives the factor infinity
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low mantissa bits are n
  const float n = shifted - 12582912.0f;
  float r = x - n * 0.693359375f;  // ln 2 in two parts, the first exact in few bits (Cody & Waite)
  r = r + n * 2.12194440e-4f;
  float p = 0.0013814432f;
  p = p * r + 0.0083687976f;
  p = p * r + 0.0416683964f;
  p = p * r + 0.1666651964f;
  p = p * r + 0.49999994f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // A product, not a sum of bits: it keeps every NaN.
  return p * std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + (127u << 23));
}

/// tanh x, relative error below 3e-7: near 0 an odd polynomial (Moshier's Cephes, tanhf), else from e^2x.
RT_INLINE float tanh_f32(float x) {
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const float small = x + x * z * p, large = 1.0f - 2.0f / (exp_f32(2.0f * x) + 1.0f);
  return z < 0.390625f ? small : large;  // 0.625 squared
}

/// 1 / (1 + e^-x)
RT_INLINE float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

RT_INLINE float abs_f32(float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7fffffffu); }

/// The standard normal's distribution function at x, and `gauss` = e^(-x^2/2).
/// Phi(-t) = e^(-t^2/2) R(t) for t >= 0 with R(t) = e^(t^2/2) erfc(t/sqrt 2)/2, fitted in w = 1/(1 + 0.44 t)
/// (relative error of R below 3e-7 in float, t up to 13.6, where Phi(-t) has left the float range).
RT_INLINE float normal_cdf_f32(float x, float* gauss) {
  const float t = abs_f32(x);
  const float w = 1.0f / (1.0f + 0.44f * t);
  float p = 0.026172252f;
  p = p * w + -0.110095456f;
  p = p * w + 0.136521429f;
  p = p * w + 0.0488358438f;
  p = p * w + -0.223964587f;
  p = p * w + 0.0784592479f;
  p = p * w + 0.0472942144f;
  p = p * w + 0.146117881f;
  p = p * w + 0.175108075f;
  p = p * w + 0.175551131f;
  *gauss = exp_f32(-0.5f * x * x);
  const float tail = *gauss * (p * w);
  return x < 0.0f ? tail : 1.0f - tail;
}

// --- maps over arrays ------------------------------------------------------------------------------------------------
// A loop that mixes 16-bit and 32-bit elements makes the compiler shuffle halves of vectors all along; 16-bit types
// go through blocks of floats that stay in the first-level cache instead. `f` is a functor whose call is RT_INLINE.

constexpr int64_t kMapBlock = 512;

template <typename T>
RT_INLINE void load_block(const T* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = load_f32(from[i]);
}

template <typename T>
RT_INLINE void store_block(const float* from, T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&to[i], from[i]);
}

/// The elements as floats: where they lie, or converted into `block`.
RT_INLINE const float* as_floats(const float* from, float* /*block*/, int64_t /*n*/) { return from; }
template <typename T>
RT_INLINE const float* as_floats(const T* from, float* block, int64_t n) {
  load_block(from, block, n);
  return block;
}

/// y[i] = f(x[i]); y may be x.
template <typename F>
RT_INLINE void map_array(const float* x, float* y, int64_t n, F f) {
  for (int64_t i = 0; i < n; ++i) y[i] = f(x[i]);
}
template <typename T, typename F>
RT_INLINE void map_array(const T* x, T* y, int64_t n, F f) {
  float block[kMapBlock];
  for (int64_t i = 0; i < n; i += kMapBlock) {
    const int64_t m = n - i < kMapBlock ? n - i : kMapBlock;
    load_block(x + i, block, m);
    for (int64_t j = 0; j < m; ++j) block[j] = f(block[j]);
    store_block(block, y + i, m);
  }
}

/// z[i] = f(x[i], y[i]); z may be x or y.
template <typename F>
RT_INLINE void map_arrays(const float* x, const float* y, float* z, int64_t n, F f) {
  for (int64_t i = 0; i < n; ++i) z[i] = f(x[i], y[i]);
}
template <typename T, typename F>
RT_INLINE void map_arrays(const T* x, const T* y, T* z, int64_t n, F f) {
  float a[kMapBlock], b[kMapBlock];
  for (int64_t i = 0; i < n; i += kMapBlock) {
    const int64_t m = n - i < kMapBlock ? n - i : kMapBlock;
    load_block(x + i, a, m);
    load_block(y + i, b, m);
    for (int64_t j = 0; j < m; ++j) a[j] = f(a[j], b[j]);
    store_block(a, z + i, m);
  }
}

}  // namespace cairn::kernels
