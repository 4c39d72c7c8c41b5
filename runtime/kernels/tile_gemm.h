#pragma once
// Products of tiles that fit the cache, in float, on the caller's thread: attention's inner loops.

#include <cstdint>

namespace cairn::kernels {

/// C[m, n] = alpha * A[m, k] B[k, n] (+ C when accumulate). Element (i, l) of A is a[i * a_row + l * a_col]; the rows
/// of B and C are contiguous, b_row and c_row elements apart. n is a multiple of 16.
struct TileGemm {
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;
  int64_t a_row = 0, a_col = 0;
  const float* b = nullptr;
  int64_t b_row = 0;
  float* c = nullptr;
  int64_t c_row = 0;
  float alpha = 1.0f;
  bool accumulate = false;
};

void tile_gemm(const TileGemm& args);

/// The instruction sets it is compiled for. tile_gemm(args) takes the best one that runs here; tests name each.
enum class TileIsa { kBaseline, kAvx2, kAvx512 };
bool tile_isa_runs(TileIsa isa);
void tile_gemm(const TileGemm& args, TileIsa isa);

}  // namespace cairn::kernels
