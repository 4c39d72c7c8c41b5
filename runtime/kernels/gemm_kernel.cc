#include "runtime/kernels/gemm_kernel.h"

#include <algorithm>
#include <bit>

#include "runtime/core/check.h"
#include "runtime/kernels/simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
// GCC 12 takes its own _mm512_undefined for a use of something uninitialized (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#define RT_AVX512 __attribute__((target("arch=x86-64-v4")))
#define RT_AVX512_BF16 __attribute__((target("arch=x86-64-v4,avx512bf16")))
#endif

namespace cairn::kernels {
namespace {

// --- tiles -----------------------------------------------------------------------------------------------------------
// kRows x kVectors accumulators stay in registers while the sum runs: 6 x 4 vectors of 16 floats (24 of AVX-512's 32
// registers), 6 x 2 of 8 (12 of AVX2's 16), 4 x 2 of 4 (8 of SSE's 16).

template <int kWidth, int kRows, int kVectors>
RT_INLINE void tile_f32(const uint32_t* a_words, const uint32_t* b_words, int64_t steps, float* tile) {
  using V = typename Vector<kWidth>::Type;
  const auto* a = reinterpret_cast<const float*>(a_words);
  const auto* b = reinterpret_cast<const float*>(b_words);
  V sum[kRows][kVectors] = {};
  for (int64_t s = 0; s < steps; ++s) {
    V row[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) row[v] = *reinterpret_cast<const V*>(b + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] += a[r] * row[v];
    }
    a += kRows;
    b += kVectors * kWidth;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<V*>(tile + (r * kVectors + v) * kWidth) = sum[r][v];
  }
}

void tile_baseline(const uint32_t* a, const uint32_t* b, int64_t steps, float* tile) {
  tile_f32<4, 4, 2>(a, b, steps, tile);
}

#if defined(__x86_64__)
__attribute__((target("arch=x86-64-v3"))) void tile_avx2(const uint32_t* a, const uint32_t* b, int64_t steps,
                                                         float* tile) {
  tile_f32<8, 6, 2>(a, b, steps, tile);
}

RT_AVX512 void tile_avx512(const uint32_t* a, const uint32_t* b, int64_t steps, float* tile) {
  tile_f32<16, 6, 4>(a, b, steps, tile);
}

// vdpbf16ps adds both products of a pair in float, and takes denormal numbers for zero.
RT_AVX512_BF16 void tile_avx512_bf16(const uint32_t* a, const uint32_t* b, int64_t steps, float* tile) {
  constexpr int kRows = 6, kVectors = 4;
  __m512 sum[kRows][kVectors] = {};
  for (int64_t s = 0; s < steps; ++s) {
    __m512i row[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) row[v] = _mm512_loadu_si512(b + 16 * v);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512i factor = _mm512_set1_epi32(static_cast<int>(a[r]));
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = _mm512_dpbf16_ps(sum[r][v], reinterpret_cast<__m512bh>(factor), reinterpret_cast<__m512bh>(row[v]));
      }
    }
    a += kRows;
    b += 16 * kVectors;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(tile + (r * kVectors + v) * 16, sum[r][v]);
  }
}
#endif

// --- packing ---------------------------------------------------------------------------------------------------------

/// Everything of pack_panels() but where a panel begins.
struct Block {
  int64_t width = 0, lines = 0, depth = 0, steps = 0;
  uint32_t* out = nullptr;
};

/// To float panels, from any type.
template <typename T>
RT_CLONES void pack_floats(const T* from, int64_t line_stride, int64_t depth_stride, const Block& block) {
  const int64_t width = block.width;
  for (int64_t first = 0; first < block.lines; first += width) {
    auto* const out = reinterpret_cast<float*>(block.out + first * block.steps);
    const int64_t lines = std::min(width, block.lines - first);
    const T* const in = from + first * line_stride;
    if (line_stride == 1) {
      for (int64_t s = 0; s < block.depth; ++s) {
        for (int64_t l = 0; l < lines; ++l) out[s * width + l] = load_f32(in[s * depth_stride + l]);
      }
    } else {  // some lines at a time, so that their cache lines are still there at the next step
      constexpr int64_t kLines = 8, kDepth = 64;
      float part[kLines][kDepth];
      for (int64_t l0 = 0; l0 < lines; l0 += kLines) {
        const int64_t ln = std::min(kLines, lines - l0);
        for (int64_t s0 = 0; s0 < block.depth; s0 += kDepth) {
          const int64_t sn = std::min(kDepth, block.depth - s0);
          for (int64_t l = 0; l < ln; ++l) {
            const T* const line = in + (l0 + l) * line_stride + s0;
            for (int64_t s = 0; s < sn; ++s) part[l][s] = load_f32(line[s]);
          }
          for (int64_t s = 0; s < sn; ++s) {
            for (int64_t l = 0; l < ln; ++l) out[(s0 + s) * width + l0 + l] = part[l][s];
          }
        }
      }
    }
    if (lines == width) continue;
    for (int64_t s = 0; s < block.depth; ++s) std::fill_n(out + s * width + lines, width - lines, 0.0f);
  }
}

#if defined(__x86_64__)
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

/// Lines whose words lie side by side, `bytes` of each. Panels of 64: transposed 16 lines at a time.
RT_AVX512 void pack_wide_along(const char* from, int64_t line_bytes, int64_t bytes, const Block& block) {
  for (int64_t first = 0; first < block.lines; first += 16) {
    uint32_t* const out = block.out + first / 64 * 64 * block.steps + first % 64;
    const int64_t lines = block.lines - first;
    for (int64_t s = 0; s < block.steps; s += 16) {
      __m512i x[16];
#pragma GCC unroll 16
      for (int64_t l = 0; l < 16; ++l) {
        x[l] = load_part(from + (first + l) * line_bytes + s * kWord, l < lines ? bytes - s * kWord : 0);
      }
      transpose(x);
      const int64_t count = std::min<int64_t>(16, block.steps - s);
      for (int64_t i = 0; i < count; ++i) _mm512_storeu_si512(out + (s + i) * 64, x[i]);
    }
  }
  for (int64_t first = (block.lines + 15) / 16 * 16; first % 64 != 0; first += 16) {
    uint32_t* const out = block.out + first / 64 * 64 * block.steps + first % 64;
    for (int64_t s = 0; s < block.steps; ++s) _mm512_storeu_si512(out + s * 64, _mm512_setzero_si512());
  }
}

/// The same for panels of 6, two at a time.
RT_AVX512 void pack_narrow_along(const char* from, int64_t line_bytes, int64_t bytes, const Block& block) {
  for (int64_t first = 0; first < block.lines; first += 12) {
    uint32_t* const low = block.out + first * block.steps;
    const int64_t lines = block.lines - first;
    const bool both = lines > 6;
    for (int64_t s = 0; s < block.steps; s += 16) {
      __m512i x[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t l = i % 8 + i / 8 * 6;
        x[i] = load_part(from + (first + l) * line_bytes + s * kWord, i % 8 < 6 && l < lines ? bytes - s * kWord : 0);
      }
      transpose(x);
      const int64_t count = std::min<int64_t>(16, block.steps - s);
      for (int64_t i = 0; i < count; ++i) {
        uint32_t* const out = low + (s + i) * 6;
        _mm256_mask_storeu_epi32(out, 0x3f, _mm512_castsi512_si256(x[i]));
        if (both) _mm256_mask_storeu_epi32(out + 6 * block.steps, 0x3f, _mm512_extracti64x4_epi64(x[i], 1));
      }
    }
  }
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

/// Lines that lie side by side; the sum goes from stored row to stored row. Panels of 64, or of 6 by way of a row.
template <bool kPairs>
RT_AVX512 void pack_across(const char* from, int64_t row_bytes, const Block& block) {
  constexpr int64_t kSteps = 16;  // rows at a time: their pages and cache lines are still there for the next panel
  // Panels of 6 that grow side by side: they may begin a multiple of 4 KiB apart, in one set of 12 cache lines.
  constexpr int64_t kNarrowLines = 8 * 6;
  constexpr int64_t kPerStep = kPairs ? 2 : 1;
  for (int64_t s0 = 0; s0 < block.steps; s0 += kSteps) {
    const int64_t s1 = std::min(block.steps, s0 + kSteps);
    for (int64_t line = 0; line < block.lines; line += block.width == 64 ? 64 : kNarrowLines) {
      for (int64_t s = s0; s < s1; ++s) {
        const char* const row = from + s * kPerStep * row_bytes;
        const bool second = s * kPerStep + 1 < block.depth;
        if (block.width == 64) {
          uint32_t* const out = block.out + line * block.steps + s * 64;
          for (int64_t l = 0; l < 64; l += 32) {
            __m512i low, high;
            step_words<kPairs>(row, row_bytes, second, line + l, block.lines, &low, &high);
            _mm512_storeu_si512(out + l, low);
            _mm512_storeu_si512(out + l + 16, high);
          }
          continue;
        }
        alignas(64) uint32_t words[64 + 16];
        const int64_t lines = std::min(kNarrowLines, block.lines - line);
        for (int64_t l = 0; l < lines; l += 32) {
          __m512i low, high;
          step_words<kPairs>(row, row_bytes, second, line + l, block.lines, &low, &high);
          _mm512_store_si512(words + l, low);
          _mm512_store_si512(words + l + 16, high);
        }
        _mm256_store_si256(reinterpret_cast<__m256i*>(words + (lines + 31) / 32 * 32), _mm256_setzero_si256());
        for (int64_t l = 0; l < lines; l += 6) {
          const __m256i panel = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + l));
          _mm256_mask_storeu_epi32(block.out + (line + l) * block.steps + s * 6, 0x3f, panel);
        }
      }
    }
  }
}

/// `from` is the first element of the block.
void pack_avx512(bool pairs, const GemmOperand& operand, const char* from, const Block& block) {
  const int64_t elem = pairs ? 2 : 4;
  const int64_t row_bytes = operand.stride * elem;
  if (operand.along) {
    if (block.width == 64) return pack_wide_along(from, row_bytes, block.depth * elem, block);
    return pack_narrow_along(from, row_bytes, block.depth * elem, block);
  }
  return pairs ? pack_across<true>(from, row_bytes, block) : pack_across<false>(from, row_bytes, block);
}
#endif

}  // namespace

bool gemm_isa_runs(GemmIsa isa) {
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("x86-64-v4") != 0;
  if (isa == GemmIsa::kAvx512Bf16) return avx512 && __builtin_cpu_supports("avx512bf16") != 0;
  if (isa == GemmIsa::kAvx512) return avx512;
  if (isa == GemmIsa::kAvx2) return __builtin_cpu_supports("x86-64-v3") != 0;
#endif
  return isa == GemmIsa::kBaseline;
}

namespace {

// Intel's AVX512_BF16 issues one product every two cycles, half the rate of f32 FMA (measured: 105 against 215
// GFLOP/s); other makers' twice that rate.
GemmIsa best_isa() {
  if (gemm_isa_runs(GemmIsa::kAvx512)) {
#if defined(__x86_64__)
    if (__builtin_cpu_is("intel")) return GemmIsa::kAvx512;
#endif
    return gemm_isa_runs(GemmIsa::kAvx512Bf16) ? GemmIsa::kAvx512Bf16 : GemmIsa::kAvx512;
  }
  return gemm_isa_runs(GemmIsa::kAvx2) ? GemmIsa::kAvx2 : GemmIsa::kBaseline;
}

}  // namespace

GemmIsa gemm_isa() {
  static const GemmIsa kIsa = best_isa();
  return kIsa;
}

GemmKernel gemm_kernel(GemmIsa isa, DType dtype) {
#if defined(__x86_64__)
  if (isa == GemmIsa::kAvx512Bf16 && dtype == DType::kBf16) return {6, 64, true, tile_avx512_bf16};
  if (isa == GemmIsa::kAvx512Bf16 || isa == GemmIsa::kAvx512) return {6, 64, false, tile_avx512};
  if (isa == GemmIsa::kAvx2) return {6, 16, false, tile_avx2};
#endif
  RT_CHECK(isa == GemmIsa::kBaseline, "gemm_kernel: an instruction set of another machine, {}", dtype_name(dtype));
  return {4, 8, false, tile_baseline};
}

void pack_panels(GemmIsa isa, const GemmKernel& kernel, const GemmOperand& from, int64_t width, int64_t line0,
                 int64_t lines, int64_t depth0, int64_t depth, uint32_t* out) {
  const int64_t at = from.along ? line0 * from.stride + depth0 : depth0 * from.stride + line0;
  const Block block{width, lines, depth, kernel.pairs ? (depth + 1) / 2 : depth, out};
#if defined(__x86_64__)
  if ((isa == GemmIsa::kAvx512Bf16 || isa == GemmIsa::kAvx512) && (kernel.pairs || from.dtype == DType::kF32)) {
    return pack_avx512(kernel.pairs, from, static_cast<const char*>(from.data) + at * (kernel.pairs ? 2 : 4), block);
  }
#endif
  const auto pack = [&](const auto* data) {
    pack_floats(data + at, from.along ? from.stride : 1, from.along ? 1 : from.stride, block);
  };
  if (from.dtype == DType::kF32) return pack(static_cast<const float*>(from.data));
  if (from.dtype == DType::kBf16) return pack(static_cast<const bf16*>(from.data));
  return pack(static_cast<const f16*>(from.data));
}

}  // namespace cairn::kernels
