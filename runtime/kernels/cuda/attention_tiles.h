#pragma once
// Tiles of queries and keys that attention's kernels work on. For .cu files.
//
// A block has 16 x 16 threads. In a product of tiles, thread (x, y) has rows y * kRows + i of the result; of scores,
// columns x + 16 * j; of sums over keys or queries, channels 4 * x + 64 * j + k. So the 16 lanes of a row share its
// maximum and sum, and what they leave in shared memory of a row is read by themselves alone.

#include "runtime/kernels/cuda/attention_args.h"

namespace cairn::kernels::cuda {

constexpr int kSide = 16;  // of a block
/// Floats from row to row of a tile of this many columns: neighbouring rows begin at other banks.
constexpr int stride_of(int columns) { return columns + kPack; }

/// A tile of scores: kRows * 16 rows, kColumns * 16 columns; of heads of at most kD channels.
template <int kOfD, int kOfRows, int kOfColumns>
struct TileShape {
  static constexpr int kD = kOfD, kRows = kOfRows, kColumns = kOfColumns;
  static constexpr int kTileRows = kRows * kSide, kTileColumns = kColumns * kSide;
  static constexpr int kStride = stride_of(kD), kScoreStride = stride_of(kTileColumns);
  static constexpr int kSums = kD / kSide;  // channels that a thread has of each row
  /// Floats of shared memory: so many tiles of rows, one of columns, one of scores.
  static constexpr int64_t floats(int row_tiles) {
    return (row_tiles * kTileRows + kTileColumns) * kStride + kTileRows * kScoreStride;
  }
};

__device__ __forceinline__ int thread_of_block() { return static_cast<int>(threadIdx.y * kSide + threadIdx.x); }

/// to[r, 0:kD] = from[r, 0:head_dim], zero beyond it and beyond `rows`, by all threads of the block.
template <int kTileRows, int kD, typename T>
__device__ __forceinline__ void load_tile(const T* from, int64_t stride, int rows, int head_dim, bool in_packs,
                                          float* to) {
  constexpr int kPacks = kD / kPack;
#pragma unroll 4
  for (int at = thread_of_block(); at < kTileRows * kPacks; at += kSide * kSide) {
    const int r = at / kPacks, c = at % kPacks * kPack;
    Pack<float, kPack> out;
#pragma unroll
    for (int k = 0; k < kPack; ++k) out.at[k] = 0;
    if (r < rows && c < head_dim) {
      const T* const row = from + r * stride + c;
      if (in_packs) {
        const auto of = load_pack<kPack>(row);
#pragma unroll
        for (int k = 0; k < kPack; ++k) out.at[k] = load_f32(of.at[k]);
      } else {
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
          if (c + k < head_dim) out.at[k] = load_f32(row[k]);
        }
      }
    }
    store_pack<kPack>(to + r * stride_of(kD) + c, out);
  }
}

/// out[i][j] = the product of this thread's row i of `rows` and column j, a row of `columns`.
template <typename Of>
__device__ __forceinline__ void multiply(const float* rows, const float* columns, int depth,
                                         float (&out)[Of::kRows][Of::kColumns]) {
#pragma unroll
  for (int i = 0; i < Of::kRows; ++i) {
#pragma unroll
    for (int j = 0; j < Of::kColumns; ++j) out[i][j] = 0;
  }
  const float* const a_at = rows + threadIdx.y * Of::kRows * Of::kStride;
  const float* const b_at = columns + threadIdx.x * Of::kStride;
  for (int d = 0; d < depth; d += kPack) {
    Pack<float, kPack> a[Of::kRows];
#pragma unroll
    for (int i = 0; i < Of::kRows; ++i) a[i] = load_pack<kPack>(a_at + i * Of::kStride + d);
#pragma unroll
    for (int j = 0; j < Of::kColumns; ++j) {
      const auto b = load_pack<kPack>(b_at + j * kSide * Of::kStride + d);
#pragma unroll
      for (int i = 0; i < Of::kRows; ++i) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) out[i][j] += a[i].at[k] * b.at[k];
      }
    }
  }
}

/// sums[i][.] += the sum over columns c of scores[row i, c] * columns[c, .]. The scores of a row are by its own lanes.
template <typename Of>
__device__ __forceinline__ void add_products(const float* scores, const float* columns,
                                             float (&sums)[Of::kRows][Of::kSums]) {
  const float* const a_at = scores + threadIdx.y * Of::kRows * Of::kScoreStride;
  const float* const b_at = columns + threadIdx.x * kPack;
#pragma unroll 1
  for (int c = 0; c < Of::kTileColumns; c += kPack) {
    Pack<float, kPack> a[Of::kRows];
#pragma unroll
    for (int i = 0; i < Of::kRows; ++i) a[i] = load_pack<kPack>(a_at + i * Of::kScoreStride + c);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
#pragma unroll
      for (int j = 0; j < Of::kSums; j += kPack) {
        const auto b = load_pack<kPack>(b_at + (c + e) * Of::kStride + j * kSide);
#pragma unroll
        for (int i = 0; i < Of::kRows; ++i) {
#pragma unroll
          for (int k = 0; k < kPack; ++k) sums[i][j + k] += a[i].at[e] * b.at[k];
        }
      }
    }
  }
}

/// This thread's scores to where add_products() reads them.
template <typename Of>
__device__ __forceinline__ void keep_scores(const float (&scores)[Of::kRows][Of::kColumns], float* to) {
#pragma unroll
  for (int i = 0; i < Of::kRows; ++i) {
#pragma unroll
    for (int j = 0; j < Of::kColumns; ++j) {
      to[(threadIdx.y * Of::kRows + i) * Of::kScoreStride + threadIdx.x + j * kSide] = scores[i][j];
    }
  }
}

/// to[row of the tile, 0:head_dim] = sums * factors[i], for this thread's rows below `rows`.
template <typename Of, typename G>
__device__ __forceinline__ void store_sums(const float (&sums)[Of::kRows][Of::kSums], const float (&factors)[Of::kRows],
                                           int rows, int head_dim, bool in_packs, G* to, int64_t stride) {
#pragma unroll
  for (int i = 0; i < Of::kRows; ++i) {
    const int r = static_cast<int>(threadIdx.y) * Of::kRows + i;
    if (r >= rows) continue;
    G* const row = to + r * stride;
#pragma unroll
    for (int j = 0; j < Of::kSums; j += kPack) {
      const int c = static_cast<int>(threadIdx.x) * kPack + j * kSide;
      if (c >= head_dim) continue;
      Pack<G, kPack> out;
#pragma unroll
      for (int k = 0; k < kPack; ++k) store_f32(&out.at[k], sums[i][j + k] * factors[i]);
      if (in_packs) {
        store_pack<kPack>(row + c, out);
        continue;
      }
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (c + k < head_dim) row[c + k] = out.at[k];
      }
    }
  }
}

/// Over the 16 lanes of a row.
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

/// body.operator()<kD>() with the narrowest kD that takes the heads.
template <typename Body>
void for_head_dim(int64_t head_dim, const Body& body) {
  if (head_dim <= 64) return body.template operator()<64>();
  if (head_dim <= 128) return body.template operator()<128>();
  body.template operator()<256>();
}

}  // namespace cairn::kernels::cuda
