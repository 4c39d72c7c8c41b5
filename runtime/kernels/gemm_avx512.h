#pragma once
// What packing for AVX-512 and for AMX share: 16 vectors of 16 words, loaded and turned.

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "runtime/kernels/simd.h"

// GCC 12 takes its own _mm512_undefined for a use of something uninitialized (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#define RT_AVX512 __attribute__((target("arch=x86-64-v4")))

namespace cairn::kernels {

constexpr int64_t kWord = 4;  // bytes of a step

/// The first `bytes` (even, may be <= 0 or beyond 64) of 64; zero behind.
RT_AVX512 RT_INLINE __m512i load_part(const char* from, int64_t bytes) {
  if (bytes >= 64) return _mm512_loadu_si512(from);
  if (bytes <= 0) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi16((__mmask32{1} << (bytes / 2)) - 1, from);
}

RT_AVX512 RT_INLINE void transpose(__m512i (&x)[16]) {
  __m512i y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // a quarter of x[4 r + i] is rows 4 r to 4 r + 3 of column 4 quarter + i
    const __m512i even_low = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
    y[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    y[8 + i] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    y[4 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    y[12 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

/// Words 0 to 31 of a step from 32 lines of each of the two stored rows that it pairs (or of one row of floats).
template <bool kPairs>
RT_AVX512 RT_INLINE void step_words(const char* row, int64_t row_bytes, bool second, int64_t line, int64_t lines,
                                    __m512i* low, __m512i* high) {
  if constexpr (!kPairs) {
    *low = load_part(row + line * 4, (lines - line) * 4);
    *high = load_part(row + line * 4 + 64, (lines - line) * 4 - 64);
  } else {
    const __m512i x = load_part(row + line * 2, (lines - line) * 2);
    const __m512i y = second ? load_part(row + row_bytes + line * 2, (lines - line) * 2) : _mm512_setzero_si512();
    const __m512i ones = _mm512_set1_epi32(0x00010001);
    const __m512i from_low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                                              6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    *low = _mm512_permutex2var_epi16(x, from_low, y);
    *high = _mm512_permutex2var_epi16(x, _mm512_add_epi16(from_low, _mm512_slli_epi16(ones, 4)), y);
  }
}

}  // namespace cairn::kernels
#endif
