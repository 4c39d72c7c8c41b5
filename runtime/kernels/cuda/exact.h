#pragma once
// ExactSum (runtime/core/exact_sum.h) in kernels: a thread's digits in registers. For .cu files.

#include "runtime/core/exact_sum.h"
#include "runtime/kernels/cuda/elements.h"

namespace cairn::kernels::cuda {

constexpr int kExactDigits = ExactSum::kDigits;
constexpr int kExactWords = static_cast<int>(ExactSum::kWords);
constexpr int kDigitBits = 24;
constexpr int64_t kDigitMask = (int64_t{1} << kDigitBits) - 1;
constexpr int kLowestBit = -168;   // of the last digit
constexpr int kHighestTerm = 120;  // terms are below 2^this

__device__ __forceinline__ uint64_t bits_of(double x) {
#ifdef __CUDA_ARCH__
  return static_cast<uint64_t>(__double_as_longlong(x));
#else
  uint64_t out;
  __builtin_memcpy(&out, &x, sizeof(out));
  return out;
#endif
}

/// Of terms that are not negative.
struct ExactDigits {
  int64_t digit[kExactDigits];
  double special;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int k = 0; k < kExactDigits; ++k) digit[k] = 0;
    special = 0;
  }
  /// Fewer than 2^36 of them.
  __device__ __forceinline__ void add(double x) {
    const uint64_t bits = bits_of(x);
    const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
    if (exponent == 0) return;  // zero, or below 2^-1022
    if (exponent - 1022 > kHighestTerm) {
      special += exponent == 0x7ff ? x : static_cast<double>(INFINITY);
      return;
    }
    const uint64_t mantissa = (bits & ((uint64_t{1} << 52) - 1)) | uint64_t{1} << 52;
    const int shift = exponent - 1075 - kLowestBit;
#pragma unroll
    for (int k = 0; k < kExactDigits; ++k) {  // every digit of the term, most of which are 0
      const int at = shift - k * kDigitBits;
      const uint64_t part = at >= kDigitBits ? 0 : at >= 0 ? mantissa << at : at > -53 ? mantissa >> -at : 0;
      digit[k] += static_cast<int64_t>(part) & kDigitMask;
    }
  }
};

/// The block's sum as words that add up in any order, to `words` [kExactWords]. room [kExactWords * warps].
__device__ __forceinline__ void block_words(const ExactDigits& mine, double* words, double* room) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll
  for (int k = 0; k < kExactWords; ++k) {
    // Integers in doubles: exact.
    const double sum = warp_sum(k < kExactDigits ? static_cast<double>(mine.digit[k % kExactDigits]) : mine.special);
    if (threadIdx.x % kWarp == 0) room[warp * kExactWords + k] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= kExactWords) return;
  double sum = 0;
  for (int w = 0; w < warps; ++w) sum += room[w * kExactWords + threadIdx.x];
  words[threadIdx.x] = sum;
}

/// Digits of `words` with their carries done.
__device__ __forceinline__ ExactDigits carried(const double* words) {
  ExactDigits out;
#pragma unroll
  for (int k = 0; k < kExactDigits; ++k) out.digit[k] = static_cast<int64_t>(words[k]);
#pragma unroll
  for (int k = 0; k + 1 < kExactDigits; ++k) {
    out.digit[k + 1] += out.digit[k] >> kDigitBits;
    out.digit[k] &= kDigitMask;
  }
  out.special = words[kExactDigits];
  return out;
}

/// As ExactSum::value().
__device__ __forceinline__ double value_of(const double* words) {
  const ExactDigits of = carried(words);
  if (of.special != 0) return of.special;
  double sum = 0, unit = 0x1p120;  // of digit 12: 2^(12 * 24 - 168)
#pragma unroll
  for (int k = kExactDigits - 1; k >= 0; --k) {
    sum += static_cast<double>(of.digit[k]) * unit;
    unit *= 0x1p-24;
  }
  return sum;
}

}  // namespace cairn::kernels::cuda
