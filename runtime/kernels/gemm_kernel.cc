#include "runtime/kernels/gemm_kernel.h"

#include <algorithm>
#include <bit>

#include "runtime/core/check.h"
#include "runtime/kernels/gemm_amx.h"
#include "runtime/kernels/gemm_avx512.h"
#include "runtime/kernels/simd.h"

#if defined(__x86_64__)
#define RT_AVX512_BF16 __attribute__((target("arch=x86-64-v4,avx512bf16")))
#endif

namespace cairn::kernels {
namespace {

// --- tiles -----------------------------------------------------------------------------------------------------------
// kRows x kVectors accumulators stay in registers while the sum runs: 6 x 4 vectors of 16 floats (24 of AVX-512's 32
// registers), 6 x 2 of 8 (12 of AVX2's 16), 4 x 2 of 4 (8 of SSE's 16).

template <int kWidth, int kRows, int kVectors>
RT_INLINE void tile_f32(const void* a_words, const uint32_t* b_words, int64_t steps, float* tile) {
  using V = typename Vector<kWidth>::Type;
  const auto* a = static_cast<const float*>(a_words);
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

void tile_baseline(const void* a, int64_t /*a_row_bytes*/, const uint32_t* b, int64_t steps, bool /*add*/, float* tile,
                   int64_t /*tile_row*/, const GemmBeside& /*beside*/) {
  tile_f32<4, 4, 2>(a, b, steps, tile);
}

#if defined(__x86_64__)
__attribute__((target("arch=x86-64-v3"))) void tile_avx2(const void* a, int64_t /*a_row_bytes*/, const uint32_t* b,
                                                         int64_t steps, bool /*add*/, float* tile, int64_t /*tile_row*/,
                                                         const GemmBeside& /*beside*/) {
  tile_f32<8, 6, 2>(a, b, steps, tile);
}

RT_AVX512 void tile_avx512(const void* a, int64_t /*a_row_bytes*/, const uint32_t* b, int64_t steps, bool /*add*/,
                           float* tile, int64_t /*tile_row*/, const GemmBeside& /*beside*/) {
  tile_f32<16, 6, 4>(a, b, steps, tile);
}

// vdpbf16ps adds both products of a pair in float, and takes denormal numbers for zero.
RT_AVX512_BF16 void tile_avx512_bf16(const void* a_words, int64_t /*a_row_bytes*/, const uint32_t* b, int64_t steps,
                                     bool /*add*/, float* tile, int64_t /*tile_row*/, const GemmBeside& /*beside*/) {
  constexpr int kRows = 6, kVectors = 4;
  const auto* a = static_cast<const uint32_t*>(a_words);
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
  int64_t width = 0, lines = 0, depth = 0, steps = 0, panel_steps = 0;
  uint32_t* out = nullptr;
};

/// To float panels, from any type.
template <typename T>
RT_INLINE void pack_floats_body(const T* from, int64_t line_stride, int64_t depth_stride, const Block& block) {
  const int64_t width = block.width;
  for (int64_t first = 0; first < block.lines; first += width) {
    auto* const out = reinterpret_cast<float*>(block.out + first * block.panel_steps);
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
RT_CLONES(pack_floats)

#if defined(__x86_64__)
/// Lines whose words lie side by side, `bytes` of each. Panels of 64: transposed 16 lines at a time.
RT_AVX512 void pack_wide_along(const char* from, int64_t line_bytes, int64_t bytes, const Block& block) {
  for (int64_t first = 0; first < block.lines; first += 16) {
    uint32_t* const out = block.out + first / 64 * 64 * block.panel_steps + first % 64;
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
    uint32_t* const out = block.out + first / 64 * 64 * block.panel_steps + first % 64;
    for (int64_t s = 0; s < block.steps; ++s) _mm512_storeu_si512(out + s * 64, _mm512_setzero_si512());
  }
}

/// The same for panels of 6, two at a time.
RT_AVX512 void pack_narrow_along(const char* from, int64_t line_bytes, int64_t bytes, const Block& block) {
  for (int64_t first = 0; first < block.lines; first += 12) {
    uint32_t* const low = block.out + first * block.panel_steps;
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
        if (both) _mm256_mask_storeu_epi32(out + 6 * block.panel_steps, 0x3f, _mm512_extracti64x4_epi64(x[i], 1));
      }
    }
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
          uint32_t* const out = block.out + line * block.panel_steps + s * 64;
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
          _mm256_mask_storeu_epi32(block.out + (line + l) * block.panel_steps + s * 6, 0x3f, panel);
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
  if (isa == GemmIsa::kAmx) return amx_runs();
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
  if (gemm_isa_runs(GemmIsa::kAmx)) return GemmIsa::kAmx;
  if (gemm_isa_runs(GemmIsa::kAvx512)) {
#if defined(__x86_64__)
    if (__builtin_cpu_is("intel")) return GemmIsa::kAvx512;
#endif
    return gemm_isa_runs(GemmIsa::kAvx512Bf16) ? GemmIsa::kAvx512Bf16 : GemmIsa::kAvx512;
  }
  return gemm_isa_runs(GemmIsa::kAvx2) ? GemmIsa::kAvx2 : GemmIsa::kBaseline;
}

}  // namespace

std::string_view gemm_isa_name(GemmIsa isa) {
  switch (isa) {
    case GemmIsa::kBaseline:
      return "x86-64";
    case GemmIsa::kAvx2:
      return "avx2";
    case GemmIsa::kAvx512:
      return "avx512";
    case GemmIsa::kAvx512Bf16:
      return "avx512-bf16";
    case GemmIsa::kAmx:
      return "amx";
  }
  return "unknown";
}

GemmIsa gemm_isa() {
  int32_t chosen = detail::isa_of_process.load(std::memory_order_relaxed);
  const auto best = [] {
    static const GemmIsa kBest = best_isa();
    return static_cast<int32_t>(kBest);
  };
  if (chosen < 0 && detail::isa_of_process.compare_exchange_strong(chosen, best())) chosen = best();
  return static_cast<GemmIsa>(chosen);
}

void use_gemm_isa(GemmIsa isa) {
  RT_CHECK(gemm_isa_runs(isa), "use_gemm_isa: {} on a machine that lacks it", gemm_isa_name(isa));
  detail::isa_of_process.store(static_cast<int32_t>(isa), std::memory_order_relaxed);
}

GemmKernel gemm_kernel(GemmIsa isa, DType dtype) {
  GemmKernel kernel;
#if defined(__x86_64__)
  if (isa == GemmIsa::kAmx) {
    // Measured on Granite Rapids (48 KiB and 2 MiB of cache a core), the products of a step of GPT-2.
    kernel = {.rows = kAmxRows, .columns = kAmxColumns, .pairs = true};
    kernel.amx = true;
    kernel.pieces = amx_pieces(dtype);
    kernel.step_unit = kernel.pieces * kAmxSteps;
    if (kernel.pieces > 1) {
      // Each load serves six times the products it does in bf16: sums stay in registers for a whole chunk (in turns of
      // 240 steps: 5 % slower), and what costs are passes over B, three times as large.
      kernel.tile = dtype == DType::kF32 ? amx_tile_f32 : amx_tile_f16;
      kernel.max_steps = 768;  // 1,152 to 1,536: 14 % slower
      kernel.part_words = 192 << 10;
      kernel.least_rows = 256;
      return kernel;
    }
    // What a turn takes of a panel of B, 32 KiB, is two thirds of the first-level cache (96, 128 and 320 steps: 11, 7
    // and 5 % slower), and of A a part takes 0.9 MiB (0.6 and 1.3: 2 and 4 % slower). Memory is what tiles wait for:
    // lines of B and C that come and go all at once make it slower, spread over a tile's time faster.
    kernel.tile = amx_tile;
    kernel.lying = true;
    kernel.turn_steps = 256;
    kernel.max_steps = 1536;
    kernel.many_steps = 512;  // sums kept between chunks cost less than more passes over B for smaller parts of A
    kernel.part_words = 224 << 10;
    kernel.least_rows = 512;
    return kernel;
  }
#endif
  // Measured on Zen 5 (1 MiB of second-level cache a core) with tiles of 6 x 64: chunks of 96 to 512 steps reach 94 to
  // 99 % of the registers' peak, 1024 steps 88 %, as a panel of B must come from the first- or second-level cache.
  kernel.max_steps = 512;
  kernel.part_words = 96 << 10;
  kernel.least_rows = 128;
  const auto with = [&](int64_t rows, int64_t columns, bool pairs, GemmTile tile) {
    kernel.rows = rows;
    kernel.columns = columns;
    kernel.pairs = pairs;
    kernel.tile = tile;
    return kernel;
  };
#if defined(__x86_64__)
  if (isa == GemmIsa::kAvx512Bf16 && dtype == DType::kBf16) return with(6, 64, true, tile_avx512_bf16);
  if (isa == GemmIsa::kAvx512Bf16 || isa == GemmIsa::kAvx512) return with(6, 64, false, tile_avx512);
  if (isa == GemmIsa::kAvx2) return with(6, 16, false, tile_avx2);
#endif
  RT_CHECK(isa == GemmIsa::kBaseline, "gemm_kernel: an instruction set of another machine, {}", dtype_name(dtype));
  return with(4, 8, false, tile_baseline);
}

void pack_panels([[maybe_unused]] GemmIsa isa, const GemmKernel& kernel, const GemmOperand& from, GemmSide side,
                 int64_t line0, int64_t lines, int64_t depth0, int64_t depth, int64_t panel_steps, uint32_t* out) {
  const int64_t at = from.along ? line0 * from.stride + depth0 : depth0 * from.stride + line0;
  const Block block{kernel.width(side), lines, depth, kernel.steps_of(depth), panel_steps, out};
#if defined(__x86_64__)
  if (kernel.amx) {
    GemmOperand first = from;
    first.data = static_cast<const char*>(from.data) + at * dtype_size_bytes(from.dtype);
    return pack_amx(side, first, lines, depth, block.steps, panel_steps, out);
  }
  if (isa >= GemmIsa::kAvx512 && (kernel.pairs || from.dtype == DType::kF32)) {
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
