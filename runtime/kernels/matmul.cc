#include "runtime/kernels/matmul.h"

#include <bit>

#include "runtime/core/check.h"
#include "runtime/kernels/matmul_impl.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

void check(const MatmulArgs& args) {
  RT_CHECK(args.m >= 0 && args.n >= 0 && args.k >= 0, "matmul of {}x{}x{}", args.m, args.k, args.n);
  RT_CHECK(args.lda >= (args.trans_a ? args.m : args.k), "matmul: lda {} is below its row", args.lda);
  RT_CHECK(args.ldb >= (args.trans_b ? args.k : args.n), "matmul: ldb {} is below its row", args.ldb);
  RT_CHECK(args.ldc >= args.n, "matmul: ldc {} is below n {}", args.ldc, args.n);
  RT_CHECK(args.ab_dtype == DType::kF32 || args.ab_dtype == DType::kBf16 || args.ab_dtype == DType::kF16,
           "matmul of {}", dtype_name(args.ab_dtype));
  RT_CHECK(args.c_dtype == args.ab_dtype || args.c_dtype == DType::kF32, "matmul: {} into {}",
           dtype_name(args.ab_dtype), dtype_name(args.c_dtype));
  if (args.parts == 1 && args.stretches.empty()) return;
  RT_CHECK(args.parts > 0 && std::has_single_bit(static_cast<uint64_t>(args.parts)), "matmul in {} parts", args.parts);
  RT_CHECK(args.bias == nullptr && !args.accumulate, "matmul: a sum in parts is all there is");
  int64_t k = args.stretches.empty() ? args.k : 0;
  for (const MatmulStretch& stretch : args.stretches) {
    RT_CHECK(stretch.k % args.parts == 0, "matmul: {} of k in {} parts", stretch.k, args.parts);
    k += stretch.k;
  }
  RT_CHECK(k == args.k && k % args.parts == 0, "matmul: {} of k = {} in {} parts", k, args.k, args.parts);
}

/// k = 0: an empty sum.
template <typename C, typename Bias>
void fill_bias(const MatmulArgs& args) {
  C* c = static_cast<C*>(args.c);
  const Bias* bias = static_cast<const Bias*>(args.bias);
  for (int64_t i = 0; i < args.m; ++i) {
    for (int64_t j = 0; j < args.n; ++j) {
      C& x = c[i * args.ldc + j];
      store_f32(&x, (args.accumulate ? load_f32(x) : 0.0f) + (bias != nullptr ? load_f32(bias[j]) : 0.0f));
    }
  }
}

void empty_sum(const MatmulArgs& args) {
  if (args.ab_dtype == DType::kF32) return fill_bias<float, float>(args);
  const bool is_bf16 = args.ab_dtype == DType::kBf16;
  if (args.c_dtype == DType::kF32) return is_bf16 ? fill_bias<float, bf16>(args) : fill_bias<float, f16>(args);
  return is_bf16 ? fill_bias<bf16, bf16>(args) : fill_bias<f16, f16>(args);
}

}  // namespace

void matmul(const MatmulArgs& args) {
  check(args);
  if (args.m == 0 || args.n == 0) return;
  if (args.k == 0) return empty_sum(args);
  matmul_packed(args, gemm_isa());
}

}  // namespace cairn::kernels
