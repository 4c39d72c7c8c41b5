#include "runtime/kernels/matmul.h"

#include <dnnl.hpp>

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
}

/// k = 0: an empty sum, which oneDNN does not define.
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

enum class Bf16Products { kNone, kHalfRate, kFast };

/// How this processor multiplies bf16, next to its f32: oneDNN 2.6 has no bf16 without AVX-512. Intel's AVX512_BF16
/// issues one product every two cycles, half the rate of f32 FMA (measured: 105 against 215 GFLOP/s); AMX has eight
/// times the rate, and other makers' AVX512_BF16 twice. A fixed answer per machine: timing would change bits.
Bf16Products bf16_products() {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto has = [isa](dnnl::cpu_isa wanted) {
    return (isa & static_cast<unsigned>(wanted)) == static_cast<unsigned>(wanted);
  };
  if (has(dnnl::cpu_isa::avx512_core_amx)) return Bf16Products::kFast;
  if (!has(dnnl::cpu_isa::avx512_core_bf16)) return Bf16Products::kNone;
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel")) return Bf16Products::kHalfRate;
#endif
  return Bf16Products::kFast;
}

bool panels_pay(const MatmulArgs& args) {
  constexpr int64_t kReuse = 64;  // an element copied is used this often, or the copy costs more than it saves
  const bool reused = args.m >= kReuse && args.n >= kReuse;
  if (args.ab_dtype == DType::kF16) return true;  // oneDNN 2.6 multiplies none
  if (args.ab_dtype == DType::kBf16) {
    static const Bf16Products kProducts = bf16_products();
    return kProducts == Bf16Products::kNone || (kProducts == Bf16Products::kHalfRate && reused);
  }
  // Rows of B that start a multiple of 4 KiB apart fall into the same few cache sets (measured: 3072 columns run at
  // 70-90 GFLOP/s as they lie, at 190 from panels).
  return reused && !args.trans_b && args.n >= 2048 && args.ldb % 1024 == 0;
}

}  // namespace

Status matmul(const MatmulArgs& args) {
  check(args);
  if (args.m == 0 || args.n == 0) return {};
  if (args.k == 0) {
    empty_sum(args);
    return {};
  }
  return panels_pay(args) ? matmul_panels(args) : matmul_onednn(args);
}

}  // namespace cairn::kernels
