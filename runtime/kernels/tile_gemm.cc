#include "runtime/kernels/tile_gemm.h"

#include "runtime/core/check.h"
#include "runtime/kernels/simd.h"

// A block of C stays in registers while the sum over k runs: kRows x kVectors accumulators, kVectors loads of B and
// kRows broadcasts of A a step. The block is 6 x 4 vectors of 16 floats (24 of AVX-512's 32 registers), 6 x 2 of 8
// (12 of AVX2's 16) or 2 x 4 of 4 (8 of SSE's 16).

namespace cairn::kernels {
namespace {

template <int kWidth, int kRows, int kVectors>
RT_INLINE void block(const TileGemm& g, int64_t i, int64_t j) {
  using V = typename Vector<kWidth>::Type;
  V sum[kRows][kVectors] = {};
  const float* a = g.a + i * g.a_row;
  const float* b = g.b + j;
  for (int64_t l = 0; l < g.k; ++l) {
    V row[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) row[v] = *reinterpret_cast<const V*>(b + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float factor = a[r * g.a_row];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] += factor * row[v];
    }
    a += g.a_col;
    b += g.b_row;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      V* c = reinterpret_cast<V*>(g.c + (i + r) * g.c_row + j + v * kWidth);
      const V x = g.alpha * sum[r][v];
      *c = g.accumulate ? *c + x : x;
    }
  }
}

/// All rows of `kVectors` vectors of columns from j on.
template <int kWidth, int kRows, int kVectors>
RT_INLINE void columns(const TileGemm& g, int64_t j) {
  int64_t i = 0;
  for (; i + kRows <= g.m; i += kRows) block<kWidth, kRows, kVectors>(g, i, j);
  if constexpr (kRows > 4) {
    for (; i + 4 <= g.m; i += 4) block<kWidth, 4, kVectors>(g, i, j);
  }
  for (; i < g.m; ++i) block<kWidth, 1, kVectors>(g, i, j);
}

template <int kWidth, int kRows, int kVectors>
RT_INLINE void product(const TileGemm& g) {
  int64_t j = 0;
  for (; j + kVectors * kWidth <= g.n; j += kVectors * kWidth) columns<kWidth, kRows, kVectors>(g, j);
  for (; j < g.n; j += kWidth) columns<kWidth, kRows, 1>(g, j);
}

#if defined(__x86_64__)
__attribute__((target("arch=x86-64-v4"))) void product_avx512(const TileGemm& g) { product<16, 6, 4>(g); }
__attribute__((target("arch=x86-64-v3"))) void product_avx2(const TileGemm& g) { product<8, 6, 2>(g); }
#endif
void product_baseline(const TileGemm& g) { product<4, 2, 4>(g); }

}  // namespace

bool tile_isa_runs(TileIsa isa) {
#if defined(__x86_64__)
  if (isa == TileIsa::kAvx512) return __builtin_cpu_supports("x86-64-v4") != 0;
  if (isa == TileIsa::kAvx2) return __builtin_cpu_supports("x86-64-v3") != 0;
#endif
  return isa == TileIsa::kBaseline;
}

void tile_gemm(const TileGemm& args, TileIsa isa) {
  RT_CHECK(args.n % 16 == 0, "tile_gemm: n {} is not a multiple of 16", args.n);
#if defined(__x86_64__)
  if (isa == TileIsa::kAvx512) return product_avx512(args);
  if (isa == TileIsa::kAvx2) return product_avx2(args);
#endif
  RT_CHECK(isa == TileIsa::kBaseline, "tile_gemm: an instruction set of another machine");
  product_baseline(args);
}

void tile_gemm(const TileGemm& args) {
  static const TileIsa kBest = tile_isa_runs(TileIsa::kAvx512) ? TileIsa::kAvx512
                               : tile_isa_runs(TileIsa::kAvx2) ? TileIsa::kAvx2
                                                               : TileIsa::kBaseline;
  tile_gemm(args, kBest);
}

}  // namespace cairn::kernels
