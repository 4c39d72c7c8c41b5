#include "runtime/kernels/matmul.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "runtime/core/check.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/few_rows.h"
#include "runtime/kernels/matmul_impl.h"
#include "runtime/kernels/parallel.h"
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
  RT_CHECK(!args.residual || (!args.accumulate && args.ldc == args.n && args.c_dtype == args.ab_dtype),
           "matmul: a residual is as long and of the same type as its result, and all that is added to");
  RT_CHECK(args.map == MatmulMap::kNone || (!args.accumulate && !args.residual && args.pre && args.ldc == args.n &&
                                            args.c_dtype == args.ab_dtype && args.parts == 1),
           "matmul: a map is of all of a sum, into rows without gaps");
  RT_CHECK(args.map != MatmulMap::kGeluTanhGradient || !args.bias, "matmul: a gradient with a bias");
  RT_CHECK(!args.sums || (args.trans_a && args.lda == args.m && args.c_dtype == DType::kF32 && !args.bias &&
                          !args.residual && args.map == MatmulMap::kNone && args.parts == 1),
           "matmul: sums of another A than a gradient's");
  if (args.parts == 1 && args.stretches.empty()) return;
  RT_CHECK(args.parts > 0 && std::has_single_bit(static_cast<uint64_t>(args.parts)), "matmul in {} parts", args.parts);
  RT_CHECK(!args.bias && !args.residual && !args.accumulate, "matmul: a sum in parts is all there is");
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
  C* c = address_of(args.c.as<C>());
  const Bias* bias = address_of(args.bias.as<const Bias>());
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

template <typename T>
void few_rows(const MatmulArgs& args) {
  few_rows_matmul(address_of(args.a.as<const T>()), address_of(args.b.as<const T>()),
                  address_of(args.bias.as<const T>()), address_of(args.c.as<T>()), args.ldc, args.m, args.n, args.k);
}

// A CPU has these for calls by hand; layers ask where a visit is saved (Ops::fuses_products).

template <typename T>
void map_sum(const MatmulArgs& args) {
  MatmulArgs sum = args;
  sum.map = MatmulMap::kNone;
  sum.few_rows = false;
  if (args.map == MatmulMap::kGeluTanh) sum.c = args.pre;
  matmul(sum);
  const T* const pre = address_of(args.pre.as<const T>());
  T* const c = address_of(args.c.as<T>());
  if (args.map == MatmulMap::kGeluTanh) return gelu_tanh_forward(pre, c, args.m * args.n);
  gelu_tanh_backward(c, pre, c, args.m * args.n);
}

void map_sum(const MatmulArgs& args) {
  if (args.ab_dtype == DType::kF32) return map_sum<float>(args);
  return args.ab_dtype == DType::kBf16 ? map_sum<bf16>(args) : map_sum<f16>(args);
}

template <typename T>
void sum_columns(const MatmulArgs& args) {
  float* const sums = address_of(args.sums);
  std::fill_n(sums, args.m, 0.0f);
  bias_backward(address_of(args.a.as<const T>()), sums, args.k, args.m);
}

void multiply_and_sum(const MatmulArgs& args) {
  MatmulArgs product = args;
  product.sums = nullptr;
  matmul(product);
  if (args.ab_dtype == DType::kF32) return sum_columns<float>(args);
  return args.ab_dtype == DType::kBf16 ? sum_columns<bf16>(args) : sum_columns<f16>(args);
}

void add_to_residual(const MatmulArgs& args) {
  MatmulArgs sum = args;
  sum.residual = nullptr;
  sum.accumulate = true;
  sum.few_rows = false;
  if (DevicePtr<const void>(args.c) != args.residual) {
    std::memcpy(address_of(args.c), address_of(args.residual),
                static_cast<size_t>(args.m * args.n * dtype_size_bytes(args.c_dtype)));
  }
  matmul(sum);
}

}  // namespace

void matmul(const MatmulArgs& args) {
  check(args);
  if (args.residual) return add_to_residual(args);
  if (args.map != MatmulMap::kNone) return map_sum(args);
  if (args.sums) return multiply_and_sum(args);
  if (args.few_rows && args.m <= kFewRows) {
    RT_CHECK(args.trans_b && !args.trans_a && args.lda == args.k && args.ldb == args.k &&
                 args.c_dtype == args.ab_dtype && args.parts == 1 && args.stretches.empty() && !args.accumulate,
             "a product of few rows is x W^T alone");
    if (args.ab_dtype == DType::kF32) return few_rows<float>(args);
    return args.ab_dtype == DType::kBf16 ? few_rows<bf16>(args) : few_rows<f16>(args);
  }
  if (args.m == 0 || args.n == 0) return;
  if (args.k == 0) return empty_sum(args);
  matmul_packed(args, gemm_isa());
}

namespace {

/// A product of a group, with the rows that are its own.
MatmulArgs placed(MatmulArgs of, const GroupRows& at) {
  const auto moved = [&](DevicePtr<const void> matrix, int64_t stride, DType dtype) {
    return DevicePtr<const void>(static_cast<const std::byte*>(matrix.address()) +
                                 at.first * stride * dtype_size_bytes(dtype));
  };
  of.a = moved(of.a, of.lda, of.ab_dtype);
  if (of.trans_a) {
    of.k = at.rows;
    of.b = moved(of.b, of.ldb, of.ab_dtype);
  } else {
    of.m = at.rows;
    of.c = DevicePtr<void>(const_cast<void*>(moved(of.c, of.ldc, of.c_dtype).address()));
  }
  return of;
}

void matmul_placed_groups(const MatmulGroups& groups) {
  size_t product = 0;
  for (size_t group = 0; group < groups.ends.size(); ++group) {
    const GroupRows& at = groups.places.address()[group];
    for (; product < groups.ends[group]; ++product) {
      matmul(placed(groups.products[product], at));
    }
  }
}

}  // namespace

void matmul_groups(const MatmulGroups& groups) {
  if (groups.places) return matmul_placed_groups(groups);
  constexpr int64_t kSmallRows = 512;
  const bool side_by_side = groups.most_rows <= kSmallRows && groups.most_rows * team_threads() <= groups.all_rows;
  parallel_tasks(std::ssize(groups.ends), !side_by_side, [&](int64_t i) {
    const auto group = static_cast<size_t>(i);
    for (size_t k = group == 0 ? 0 : groups.ends[group - 1]; k < groups.ends[group]; ++k) matmul(groups.products[k]);
  });
}

}  // namespace cairn::kernels
