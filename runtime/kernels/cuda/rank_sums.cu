#include "runtime/kernels/cuda/rank_sums.h"

#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

// What sums are taken in: float for bf16 and f16, else the type itself; words of i64 wrap.
template <typename T>
struct Summed {
  using Type = float;
  static __device__ __forceinline__ float load(T x) { return load_f32(x); }
  static __device__ __forceinline__ void store(T* to, float x) { store_f32(to, x); }
};
template <>
struct Summed<double> {
  using Type = double;
  static __device__ __forceinline__ double load(double x) { return x; }
  static __device__ __forceinline__ void store(double* to, double x) { *to = x; }
};
template <>
struct Summed<uint64_t> {
  using Type = uint64_t;
  static __device__ __forceinline__ uint64_t load(uint64_t x) { return x; }
  static __device__ __forceinline__ void store(uint64_t* to, uint64_t x) { *to = x; }
};

/// Of two equal ones the later, of a NaN and another the NaN.
template <typename A>
__device__ __forceinline__ A larger(A a, A b) {
  return a > b || a != a ? a : b;
}
__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) {
  return static_cast<int64_t>(a) > static_cast<int64_t>(b) ? a : b;
}

template <typename T>
struct From {
  const unsigned char* inputs;
  int64_t stride_bytes;
  int own_rank;
  const T* own;

  __device__ __forceinline__ const T* of(int rank) const {
    return own != nullptr && rank == own_rank ? own : reinterpret_cast<const T*>(inputs + rank * stride_bytes);
  }
};

template <typename T, bool kMax>
struct InOrder {
  From<T> from;
  T* out;
  int ranks;
  bool adds;  // to what is at `out`
  template <int N>
  __device__ void at(int64_t i) const {
    using S = Summed<T>;
    auto pack = load_pack<N>(adds ? out + i : from.of(0) + i);
    typename S::Type sum[N];
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] = S::load(pack.at[k]);
    for (int rank = adds ? 0 : 1; rank < ranks; ++rank) {
      pack = load_pack<N>(from.of(rank) + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const typename S::Type x = S::load(pack.at[k]);
        sum[k] = kMax ? larger(sum[k], x) : sum[k] + x;
      }
    }
#pragma unroll
    for (int k = 0; k < N; ++k) S::store(&pack.at[k], sum[k]);
    store_pack<N>(out + i, pack);
  }
};

/// As a binary counter of ranks: `waiting` holds the sums of subtrees of 1, 2, 4, ... ranks that wait for their right
/// neighbour. Levels are told apart at compile time, so that they stay in registers.
template <typename T, int kLevels>
struct Trees {
  From<T> from;
  T* out;
  int ranks, tree;
  bool adds;
  template <int N>
  __device__ void at(int64_t i) const {
    using S = Summed<T>;
    Pack<T, N> pack;
    typename S::Type total[N] = {};
    if (adds) {
      pack = load_pack<N>(out + i);
#pragma unroll
      for (int k = 0; k < N; ++k) total[k] = S::load(pack.at[k]);
    }
    for (int first = 0; first < ranks; first += tree) {
      typename S::Type waiting[kLevels][N] = {}, sum[N] = {};
      for (int leaf = 0; leaf < tree; ++leaf) {
        pack = load_pack<N>(from.of(first + leaf) + i);
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] = S::load(pack.at[k]);
        bool carries = true;
#pragma unroll
        for (int level = 0; level < kLevels; ++level) {
          const bool taken = (leaf >> level & 1) != 0;
#pragma unroll
          for (int k = 0; k < N; ++k) {
            if (carries && taken) sum[k] = waiting[level][k] + sum[k];
            if (carries && !taken) waiting[level][k] = sum[k];
          }
          carries = carries && taken;
        }
      }
      // What is left are the trees of the bits of `tree`: the smaller ones first become the right part of the next.
      bool begun = false;
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {
        const bool there = (tree >> level & 1) != 0;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          if (there) sum[k] = begun ? waiting[level][k] + sum[k] : waiting[level][k];
        }
        begun = begun || there;
      }
#pragma unroll
      for (int k = 0; k < N; ++k) total[k] = adds ? total[k] + sum[k] : sum[k];
    }
#pragma unroll
    for (int k = 0; k < N; ++k) S::store(&pack.at[k], total[k]);
    store_pack<N>(out + i, pack);
  }
};

template <typename T>
From<T> typed(const RankInputs& from) {
  return {static_cast<const unsigned char*>(from.inputs), from.stride_bytes, static_cast<int>(from.own_rank),
          static_cast<const T*>(from.own)};
}
template <typename T>
bool all_aligned(const RankInputs& from, const void* out, int64_t bytes) {
  return aligned_to(bytes, static_cast<const unsigned char*>(from.inputs), static_cast<const unsigned char*>(from.own),
                    static_cast<const unsigned char*>(out)) &&
         from.stride_bytes % bytes == 0;
}

template <typename T, bool kMax = false>
void in_order(Queue& on, const RankInputs& from, bool adds, void* out, int64_t count) {
  map<kWide<T>>(on, InOrder<T, kMax>{typed<T>(from), static_cast<T*>(out), static_cast<int>(from.ranks), adds}, count,
                all_aligned<T>(from, out, 16));
}

template <typename T, int kLevels>
void trees_of(Queue& on, const RankInputs& from, int64_t tree, bool adds, void* out, int64_t count) {
  // What waits is to stay in registers.
  constexpr int kMany = kLevels > 4 || sizeof(typename Summed<T>::Type) > 4 ? 1 : 4;
  map<kMany>(on,
             Trees<T, kLevels>{typed<T>(from), static_cast<T*>(out), static_cast<int>(from.ranks),
                               static_cast<int>(tree), adds},
             count, all_aligned<T>(from, out, kMany * static_cast<int64_t>(sizeof(T))));
}
template <typename T>
void trees(Queue& on, const RankInputs& from, int64_t tree, bool adds, void* out, int64_t count) {
  constexpr int kFew = 4, kMost = 12;
  static_assert(kMostRankSums == (1 << kMost) - 1);
  if (tree < 1 << kFew) {
    trees_of<T, kFew>(on, from, tree, adds, out, count);
  } else {
    trees_of<T, kMost>(on, from, tree, adds, out, count);
  }
}

/// body(a T of that type).
template <typename Body>
void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kBf16:
      return body(bf16{});
    case DType::kF16:
      return body(f16{});
    case DType::kF64:
      return body(double{});
    case DType::kI64:
      return body(uint64_t{});
    default:
      return body(float{});
  }
}

}  // namespace

void fold_ranks(Queue& on, const RankInputs& from, void* out, int64_t count, DType dtype, RankFold fold) {
  with_type(dtype, [&](auto of) {
    using T = decltype(of);
    if (fold == RankFold::kMax) {
      in_order<T, true>(on, from, false, out, count);
    } else if (fold == RankFold::kTreeSum) {
      trees<T>(on, from, from.ranks, false, out, count);
    } else {
      in_order<T>(on, from, false, out, count);
    }
  });
}

void add_ranks(Queue& on, const RankInputs& from, int64_t tree, void* out, int64_t count, DType dtype) {
  with_type(dtype, [&](auto of) {
    using T = decltype(of);
    if (tree == 1) {
      in_order<T>(on, from, true, out, count);
    } else {
      trees<T>(on, from, tree, true, out, count);
    }
  });
}

const RankSums& rank_sums() {
  static const RankSums all = {
      .fold =
          [](CUstream_st* on, const RankInputs& from, void* out, int64_t count, DType dtype, RankFold fold) {
            Queue queue{on};
            fold_ranks(queue, from, out, count, dtype, fold);
            return queue.error;
          },
      .add =
          [](CUstream_st* on, const RankInputs& from, int64_t tree, void* out, int64_t count, DType dtype) {
            Queue queue{on};
            add_ranks(queue, from, tree, out, count, dtype);
            return queue.error;
          }};
  return all;
}

}  // namespace cairn::kernels::cuda
