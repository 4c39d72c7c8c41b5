#include "runtime/comm/reduce.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

// The build's -O2 leaves these loops scalar; they are plain element-wise folds, so wider vectors change no bit.
#pragma GCC optimize("O3")
#if defined(__x86_64__) && !defined(CAIRN_SANITIZED)
#define CAIRN_WIDE __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define CAIRN_WIDE  // ifunc resolvers run before a sanitizer's runtime is up
#endif

namespace cairn::comm {
namespace {

constexpr int64_t kBlock = 2048;  // elements folded in one go: the accumulator stays in the first-level cache
constexpr int64_t kTreeBlock = 512;
constexpr int64_t kMostLevels = 20;  // of a tree: far more ranks than there are

CAIRN_WIDE void load_f32(float* __restrict acc, const float* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = x[i];
}
CAIRN_WIDE void add_f32(float* __restrict acc, const float* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += x[i];
}
CAIRN_WIDE void max_f32(float* __restrict acc, const float* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = (acc[i] > x[i] || acc[i] != acc[i]) ? acc[i] : x[i];
}
CAIRN_WIDE void store_f32(float* __restrict out, const float* __restrict acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = acc[i];
}

CAIRN_WIDE void load_bf16(float* __restrict acc, const bf16* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = to_f32(x[i]);
}
CAIRN_WIDE void add_bf16(float* __restrict acc, const bf16* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += to_f32(x[i]);
}
CAIRN_WIDE void max_bf16(float* __restrict acc, const bf16* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = to_f32(x[i]);
    acc[i] = (acc[i] > v || acc[i] != acc[i]) ? acc[i] : v;
  }
}
CAIRN_WIDE void store_bf16(bf16* __restrict out, const float* __restrict acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(acc[i]);
}

// runtime/kernels converts f16 faster; activations in f16 cross ranks only with tensor parallelism.
CAIRN_WIDE void load_f16(float* __restrict acc, const f16* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = to_f32(x[i]);
}
CAIRN_WIDE void add_f16(float* __restrict acc, const f16* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += to_f32(x[i]);
}
CAIRN_WIDE void max_f16(float* __restrict acc, const f16* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = to_f32(x[i]);
    acc[i] = (acc[i] > v || acc[i] != acc[i]) ? acc[i] : v;
  }
}
CAIRN_WIDE void store_f16(f16* __restrict out, const float* __restrict acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_f16(acc[i]);
}

CAIRN_WIDE void load_f64(double* __restrict acc, const double* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = x[i];
}
CAIRN_WIDE void add_f64(double* __restrict acc, const double* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += x[i];
}
CAIRN_WIDE void max_f64(double* __restrict acc, const double* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = (acc[i] > x[i] || acc[i] != acc[i]) ? acc[i] : x[i];
}
CAIRN_WIDE void store_f64(double* __restrict out, const double* __restrict acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = acc[i];
}

CAIRN_WIDE void load_i64(uint64_t* __restrict acc, const uint64_t* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = x[i];
}
CAIRN_WIDE void add_i64(uint64_t* __restrict acc, const uint64_t* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += x[i];
}
CAIRN_WIDE void max_i64(uint64_t* __restrict acc, const uint64_t* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = static_cast<int64_t>(acc[i]) > static_cast<int64_t>(x[i]) ? acc[i] : x[i];
}
CAIRN_WIDE void store_i64(uint64_t* __restrict out, const uint64_t* __restrict acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = acc[i];
}

template <typename T, typename Acc>
struct Fold {
  void (*load)(Acc*, const T*, int64_t);
  void (*fold)(Acc*, const T*, int64_t);
  void (*store)(T*, const Acc*, int64_t);
  void (*join)(Acc*, const Acc*, int64_t);
};

// Blocks go through a private accumulator: `out` may then be one of the inputs.
template <typename T, typename Acc>
void fold_blocks(void* out, const void* const* inputs, int64_t n, int64_t count, const Fold<T, Acc>& f) {
  alignas(64) Acc acc[kBlock];
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t m = std::min(kBlock, count - at);
    f.load(acc, static_cast<const T*>(inputs[0]) + at, m);
    for (int64_t r = 1; r < n; ++r) f.fold(acc, static_cast<const T*>(inputs[r]) + at, m);
    f.store(static_cast<T*>(out) + at, acc, m);
  }
}

// As a binary counter: acc holds the sums of subtrees that wait for their right neighbour, largest first. Leaves the
// sum of m elements from `at` on in acc[0].
template <typename T, typename Acc>
void fold_tree_block(Acc (*acc)[kTreeBlock], const void* const* inputs, int64_t n, int64_t at, int64_t m,
                     const Fold<T, Acc>& f) {
  for (int64_t r = 0; r < n; ++r) {
    const T* const input = static_cast<const T*>(inputs[r]) + at;
    int depth = std::popcount(static_cast<uint64_t>(r));
    if (r % 2 == 0) {
      f.load(acc[depth], input, m);
      continue;
    }
    f.fold(acc[--depth], input, m);
    for (int64_t bits = r >> 1; bits & 1; bits >>= 1, --depth) f.join(acc[depth - 1], acc[depth], m);
  }
  for (int depth = std::popcount(static_cast<uint64_t>(n)); --depth > 0;) f.join(acc[depth - 1], acc[depth], m);
}

template <typename T, typename Acc>
void fold_tree(void* out, const void* const* inputs, int64_t n, int64_t count, const Fold<T, Acc>& f) {
  RT_CHECK(n < int64_t{1} << (kMostLevels - 1), "a tree of {} inputs", n);
  alignas(64) Acc acc[kMostLevels][kTreeBlock];
  for (int64_t at = 0; at < count; at += kTreeBlock) {
    const int64_t m = std::min(kTreeBlock, count - at);
    fold_tree_block<T, Acc>(acc, inputs, n, at, m, f);
    f.store(static_cast<T*>(out) + at, acc[0], m);
  }
}

template <typename T, typename Acc>
void fold_trees(void* out, const void* const* inputs, int64_t n, int64_t tree, int64_t count, const Fold<T, Acc>& f) {
  RT_CHECK(tree < int64_t{1} << (kMostLevels - 1), "a tree of {} inputs", tree);
  alignas(64) Acc acc[kMostLevels][kTreeBlock], total[kTreeBlock];
  for (int64_t at = 0; at < count; at += kTreeBlock) {
    const int64_t m = std::min(kTreeBlock, count - at);
    T* const to = static_cast<T*>(out) + at;
    f.load(total, to, m);
    for (int64_t first = 0; first < n; first += tree) {
      if (tree == 1) {
        f.fold(total, static_cast<const T*>(inputs[first]) + at, m);
        continue;
      }
      fold_tree_block<T, Acc>(acc, inputs + first, tree, at, m, f);
      f.join(total, acc[0], m);
    }
    f.store(to, total, m);
  }
}

/// What is done with inputs of a dtype, for a maximum or a sum; calls body(Fold).
template <typename Body>
void with_fold(DType dtype, bool sum, const Body& body) {
  switch (dtype) {
    case DType::kF32:
      return body(Fold<float, float>{load_f32, sum ? add_f32 : max_f32, store_f32, add_f32});
    case DType::kBf16:
      return body(Fold<bf16, float>{load_bf16, sum ? add_bf16 : max_bf16, store_bf16, add_f32});
    case DType::kF16:
      return body(Fold<f16, float>{load_f16, sum ? add_f16 : max_f16, store_f16, add_f32});
    case DType::kF64:
      return body(Fold<double, double>{load_f64, sum ? add_f64 : max_f64, store_f64, add_f64});
    case DType::kI64:
      return body(Fold<uint64_t, uint64_t>{load_i64, sum ? add_i64 : max_i64, store_i64, add_i64});
    default:
      RT_CHECK(false, "{} is not reducible", dtype_name(dtype));
  }
}

}  // namespace

void reduce_ordered(void* out, const void* const* inputs, int64_t n, int64_t count, DType dtype, ReduceOp op) {
  RT_CHECK(n >= 1 && count >= 0);
  with_fold(dtype, op != ReduceOp::kMax, [&]<typename T, typename Acc>(const Fold<T, Acc>& fold) {
    op == ReduceOp::kTreeSum ? fold_tree(out, inputs, n, count, fold) : fold_blocks(out, inputs, n, count, fold);
  });
}

void add_ordered(void* out, const void* const* inputs, int64_t n, int64_t tree, int64_t count, DType dtype) {
  RT_CHECK(n >= 1 && count >= 0 && tree >= 1 && n % tree == 0, "{} inputs in trees of {}", n, tree);
  with_fold(dtype, true,
            [&]<typename T, typename Acc>(const Fold<T, Acc>& fold) { fold_trees(out, inputs, n, tree, count, fold); });
}

Status check_reducible(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kBf16:
    case DType::kF16:
    case DType::kF64:
    case DType::kI64:
      return {};
    default:
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("collectives reduce f32, bf16, f16, f64 and i64, got {}", dtype_name(dtype))};
  }
}

std::string_view reduce_op_name(ReduceOp op) {
  return op == ReduceOp::kSum ? "sum" : op == ReduceOp::kMax ? "max" : "tree sum";
}

}  // namespace cairn::comm
