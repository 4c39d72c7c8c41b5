#include "runtime/kernels/tile_gemm.h"

#include "kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::TileGemm;
using kernels::TileIsa;

TEST_SUITE("runtime/kernels/tile_gemm") {
  TEST_CASE("every instruction set agrees with the naive product, for any rows, widths, strides and scales") {
    for (const TileIsa isa : {TileIsa::kBaseline, TileIsa::kAvx2, TileIsa::kAvx512}) {
      if (!kernels::tile_isa_runs(isa)) {
        MESSAGE("not on this machine: instruction set ", static_cast<int>(isa));
        continue;
      }
      CAPTURE(static_cast<int>(isa));
      for (const int64_t m : {1, 5, 6, 11, 64}) {
        for (const int64_t n : {16, 48, 64, 80, 144}) {
          for (const int64_t k : {1, 7, 64}) {
            for (const bool transposed : {false, true}) {
              CAPTURE(m);
              CAPTURE(n);
              CAPTURE(k);
              const int64_t a_row = transposed ? 1 : k + 3, a_col = transposed ? m + 2 : 1;
              const int64_t b_row = n + 4, c_row = n + 1;
              const auto a = normals<float>("a", transposed ? k * a_col : m * a_row),
                         b = normals<float>("b", k * b_row);
              const auto before = normals<float>("c", m * c_row);
              auto c = before;
              auto wanted = doubles(before);  // the gaps between rows stay
              for (int64_t i = 0; i < m; ++i) {
                for (int64_t j = 0; j < n; ++j) {
                  double sum = 0;
                  for (int64_t l = 0; l < k; ++l) {
                    sum += static_cast<double>(a[i * a_row + l * a_col]) * b[l * b_row + j];
                  }
                  wanted[i * c_row + j] = 0.5 * sum + (transposed ? wanted[i * c_row + j] : 0.0);
                }
              }
              kernels::tile_gemm({.m = m,
                                  .n = n,
                                  .k = k,
                                  .a = a.data(),
                                  .a_row = a_row,
                                  .a_col = a_col,
                                  .b = b.data(),
                                  .b_row = b_row,
                                  .c = c.data(),
                                  .c_row = c_row,
                                  .alpha = 0.5f,
                                  .accumulate = transposed},
                                 isa);
              check_close(c, wanted, sum_of<float>(k));
            }
          }
        }
      }
    }
  }
}
