#pragma once
// Matrix product. Nothing is allocated after the first call of a shape.

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"
#include "runtime/kernels/group_rows.h"
#include "runtime/kernels/scratch.h"

namespace cairn::kernels {

/// A run of rows of op(B), stored as MatmulArgs says, from `b` on.
struct MatmulStretch {
  DevicePtr<const void> b;
  int64_t k = 0;
};

/// A map of a product's sum, bias included, before it is rounded.
enum class MatmulMap {
  kNone,
  kGeluTanh,          // C = gelu_tanh(sum), and `pre` = sum
  kGeluTanhGradient,  // C = sum gelu_tanh'(pre); without a bias
};

/// C[M,N] = op(A)[M,K] * op(B)[K,N] (+ C when accumulate) (+ bias[N] broadcast over rows) (+ residual[M,N]).
/// Row-major; `trans_a` means A is stored [K,M], `trans_b` that B is stored [N,K]. Leading dims are in elements.
/// A and B are f32, bf16 or f16, the same; C is that dtype or f32; accumulation is in f32 always. bias has A's dtype.
struct MatmulArgs {
  int64_t m = 0, n = 0, k = 0;
  DevicePtr<const void> a;
  int64_t lda = 0;
  bool trans_a = false;
  DevicePtr<const void> b;
  int64_t ldb = 0;
  bool trans_b = false;
  DevicePtr<void> c;
  int64_t ldc = 0;
  DType ab_dtype = DType::kF32;
  DType c_dtype = DType::kF32;
  bool accumulate = false;
  DevicePtr<const void> bias;
  /// Added before the one rounding; its rows, as C's, lie one behind the other. It has C's dtype, which is A's, and may
  /// be C. Goes with neither `accumulate` nor parts.
  DevicePtr<const void> residual;
  /// Goes with none of `accumulate`, `residual` and parts. `pre` is [M,N] of C's dtype, which is A's, rows as C's one
  /// behind the other.
  MatmulMap map = MatmulMap::kNone;
  DevicePtr<void> pre;
  /// [M]: becomes the sum of op(A) over K. Beside a float C, of a transposed A whose rows have no gaps; not with a
  /// bias, the two above or parts.
  DevicePtr<float> sums;
  /// The sum over k as equal parts, a power of two: each is summed by itself, and the sums are added in float by a
  /// balanced tree. So calls with a subtree's part of k alone give, as float, sums whose tree has the same bits.
  int64_t parts = 1;
  /// Runs that k consists of, where B is not one matrix or parts are cut from each run: part p is the p-th of every
  /// run, in order. Empty: one run, b. Neither parts nor runs go with `accumulate` or `bias`.
  std::span<const MatmulStretch> stretches;
  /// Generation, where bits may depend on how many rows there are: few take a kernel that reads B once.
  bool few_rows = false;
};
inline void add_dims(OpDims& to, const MatmulArgs& of) {
  to.add(of.m);
  to.add(of.n);
  to.add(of.k);
  to.say_if(of.trans_a, "at");
  to.say_if(of.trans_b, "bt");
  to.say_if(of.accumulate, "adds");
  to.say_if(static_cast<bool>(of.bias), "bias");
  to.say_if(static_cast<bool>(of.residual), "residual");
  to.say_if(of.map == MatmulMap::kGeluTanh, "gelu");
  to.say_if(of.map == MatmulMap::kGeluTanhGradient, "gelu_gradient");
  to.say_if(static_cast<bool>(of.sums), "sums");
}

/// Own kernels: AMX, AVX-512 (with bf16 where that is fast), AVX2 or plain; what these have no instructions for is
/// multiplied as float. The choice is fixed per machine. An element's bits depend on its row of A, its
/// column of B and how the sum is cut alone.
/// AMX multiplies f32 as sums of three bf16 each, f16 of two (gemm_amx.h): with errors as of multiply-adds of floats or
/// smaller, but of operands and of their products what is below 2^-110 loses digits, below 2^-126 is zero, and
/// infinities and what is above 3.38e38 become NaN.
void matmul(const MatmulArgs& args);
/// At most, on any processor and for any dtype of A and B: packed B (6 MiB), of 16-bit results whose sums have chunks
/// up to 2048 rows of these in float, for each level of the parts' tree; and each thread's part of A (0.9 MiB). Larger
/// products of the same kind take no less.
ScratchElems matmul_scratch(const MatmulArgs& args);

/// Products of groups of rows, as experts have them: those of one group in order, groups in any order.
struct MatmulGroups {
  std::vector<MatmulArgs> products;
  std::vector<size_t> ends;             // of each group's
  int64_t most_rows = 0, all_rows = 0;  // of the largest group, and of all
  /// [groups + 1] (GroupRows): then the rows that a product names do not count, and those of the group are the rows
  /// of A and C, or with `trans_a` those of A and B. Each group has as many products as the others, with the sizes of
  /// theirs, and all_rows is how many rows there may be. Without parts, residual, map and sums.
  DevicePtr<const GroupRows> places;
};
/// Columns and depth of each group's first product. How many rows a group has differs from step to step.
inline void add_dims(OpDims& to, const MatmulGroups& of) {
  if (of.products.empty()) return;
  to.add(of.products.front().n);
  to.add(of.products.front().k);
}
/// Many small groups are taken by the threads side by side, each by one; few or large ones one after another, each
/// product by all threads.
void matmul_groups(const MatmulGroups& groups);

}  // namespace cairn::kernels
