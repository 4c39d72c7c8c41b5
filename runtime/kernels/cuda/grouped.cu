// A block makes a tile of kTile x kTile elements, 8 warps of 64 x 32 each, in steps of kDepth along k. Three steps'
// tiles lie in shared memory, the next two on their way. Within a row of a tile 16-byte chunks stand in an order by
// which no two lanes of a copy or of ldmatrix meet in shared memory.
#include "runtime/kernels/cuda/grouped.h"

#include "runtime/kernels/cuda/group_tiles.h"
#include "runtime/kernels/cuda/matrix_units.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kTile = 128, kDepth = 32, kStages = 3;
constexpr int kChunk = 8;  // elements of 16 bytes
constexpr int kWarpRows = 64, kWarpCols = 32, kWarpsAcross = kTile / kWarpCols;
constexpr int kLeft = kWarpRows / 16, kRight = kWarpCols / 8;  // fragments of a warp
constexpr int kTileBytes = kTile * kDepth * 2;
static_assert(kTile == kGroupTile);
static_assert(kThreads == kWarp * (kTile / kWarpRows) * kWarpsAcross);

/// A matrix as it is stored: `rows` of `cols` elements, `stride` apart.
template <typename T>
struct Stored {
  const T* first;
  int64_t stride, rows, cols;
};

/// Where a chunk of a tile's row is. kByDepth: rows are of k and have kTile elements; else they have kDepth.
template <bool kByDepth>
__device__ __forceinline__ int place_of(int row, int chunk) {
  if constexpr (kByDepth) return (row * (kTile / kChunk) + (chunk ^ (row & 7))) * 16;
  return (row * (kDepth / kChunk) + (chunk ^ (row >> 1 & 3))) * 16;
}

/// Begins to copy the tile at element `at` of the other dim and `depth` of k. Zeros where the matrix has nothing.
template <bool kByDepth, typename T>
__device__ __forceinline__ void begin_tile(const Stored<T>& of, int64_t at, int64_t depth, SharedAt room) {
  constexpr int kChunks = (kByDepth ? kTile : kDepth) / kChunk;  // of a row
  constexpr int kTurns = kTile * kDepth / kChunk / kThreads;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int i = turn * kThreads + static_cast<int>(threadIdx.x), row = i / kChunks, chunk = i % kChunks;
    const int64_t r = (kByDepth ? depth : at) + row, c = (kByDepth ? at : depth) + chunk * kChunk;
    const bool there = r < of.rows && c < of.cols;
    begin_copy<16>(room + place_of<kByDepth>(row, chunk), there ? of.first + r * of.stride + c : of.first, there);
  }
}

/// The left fragment [16, 16] at (row, depth) of a tile.
template <bool kByDepth>
__device__ __forceinline__ void load_left(uint32_t (&out)[4], SharedAt room, int row, int depth) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, j = lane / 8, r = lane % 8;
  if constexpr (kByDepth) {
    load_transposed(out, room + place_of<true>(depth + (j >> 1) * 8 + r, row / kChunk + (j & 1)));
  } else {
    load_matrices(out, room + place_of<false>(row + (j & 1) * 8 + r, depth / kChunk + (j >> 1)));
  }
}
/// Two right fragments [16, 8] side by side, from column `col` on: words 0 and 1, then 2 and 3.
template <bool kByDepth>
__device__ __forceinline__ void load_right(uint32_t (&out)[4], SharedAt room, int col, int depth) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, j = lane / 8, r = lane % 8;
  if constexpr (kByDepth) {
    load_transposed(out, room + place_of<true>(depth + (j & 1) * 8 + r, col / kChunk + (j >> 1)));
  } else {
    load_matrices(out, room + place_of<false>(col + (j >> 1) * 8 + r, depth / kChunk + (j & 1)));
  }
}

struct Sums {
  float at[kLeft][kRight][4];
};

/// The tile at (row, col) of left * right, over k in [0, depth). Warps without an element of [rows, cols] do not
/// multiply.
template <bool kLeftByDepth, bool kRightByDepth, typename T>
__device__ __forceinline__ Sums multiply_tile(const Stored<T>& left, const Stored<T>& right, int64_t row, int64_t col,
                                              int64_t rows, int64_t cols, int64_t depth) {
  RT_DYNAMIC_SHARED(T, shared);
  const SharedAt room = shared_at(shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warp_row = warp / kWarpsAcross * kWarpRows, warp_col = warp % kWarpsAcross * kWarpCols;
  const bool works = row + warp_row < rows && col + warp_col < cols;
  const auto steps = static_cast<int>((depth + kDepth - 1) / kDepth);
  const auto begin = [&](int step) {
    const SharedAt stage = room + step % kStages * 2 * kTileBytes;
    begin_tile<kLeftByDepth>(left, row, static_cast<int64_t>(step) * kDepth, stage);
    begin_tile<kRightByDepth>(right, col, static_cast<int64_t>(step) * kDepth, stage + kTileBytes);
  };
  Sums sums;
#pragma unroll
  for (int i = 0; i < kLeft; ++i) {
#pragma unroll
    for (int j = 0; j < kRight; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sums.at[i][j][k] = 0;
    }
  }
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) begin(step);
    end_copy_group();
  }
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // all have this step's, and none still reads the one before, whose room the next takes
    if (step + kStages - 1 < steps) begin(step + kStages - 1);
    end_copy_group();
    if (!works) continue;
    const SharedAt stage = room + step % kStages * 2 * kTileBytes;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[kLeft][4], b[kRight / 2][4];
#pragma unroll
      for (int i = 0; i < kLeft; ++i) load_left<kLeftByDepth>(a[i], stage, warp_row + i * 16, k);
#pragma unroll
      for (int j = 0; j < kRight / 2; ++j) load_right<kRightByDepth>(b[j], stage + kTileBytes, warp_col + j * 16, k);
#pragma unroll
      for (int i = 0; i < kLeft; ++i) {
#pragma unroll
        for (int j = 0; j < kRight; ++j) {
          add_product<T>(sums.at[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
  wait_for_copies<0>();
  return sums;
}

/// Stores what of the tile is within [rows, cols] of c, plus bias [cols] or null, rounded to C's type; or adds it.
template <typename C>
__device__ __forceinline__ void store_tile(const Sums& sums, int64_t row, int64_t col, int64_t rows, int64_t cols, C* c,
                                           int64_t ldc, bool accumulate, const C* bias) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  row += warp / kWarpsAcross * kWarpRows + lane / 4;
  col += warp % kWarpsAcross * kWarpCols + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kLeft; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t r = row + i * 16 + half * 8;
      if (r >= rows) continue;
#pragma unroll
      for (int j = 0; j < kRight; ++j) {
        if (col + j * 8 >= cols) continue;
        C* const to = c + r * ldc + col + j * 8;
        float first = sums.at[i][j][half * 2], second = sums.at[i][j][half * 2 + 1];
        if (bias != nullptr) {
          first += load_f32(bias[col + j * 8]);
          second += load_f32(bias[col + j * 8 + 1]);
        }
        if (accumulate) {
          const auto held = load_pack<2>(to);
          first += load_f32(held.at[0]);
          second += load_f32(held.at[1]);
        }
        Pack<C, 2> out;
        store_f32(&out.at[0], first);
        store_f32(&out.at[1], second);
        store_pack<2>(to, out);
      }
    }
  }
}

/// blockIdx.x: a tile of the rows of all groups; y: of the columns.
template <bool kTransposed, typename T>
__global__ void __launch_bounds__(kThreads) rows_of_groups(RowProducts<T> of) {
  const TileOfGroup tile = tile_of_block(of.groups);
  if (tile.group < 0) return;
  const GroupRows mine = of.groups.rows[tile.group];
  const int64_t row = tile.row, col = static_cast<int64_t>(blockIdx.y) * kTile, at = tile.group - of.groups.begin;
  const T* const b = of.b + at * of.b_step;
  const T* const bias = of.bias == nullptr ? nullptr : of.bias + at * of.bias_step;
  const Stored<T> left{of.a + mine.first * of.lda, of.lda, mine.rows, of.k};
  const Stored<T> right{b, of.ldb, kTransposed ? of.n : of.k, kTransposed ? of.k : of.n};
  const Sums sums = multiply_tile<false, !kTransposed>(left, right, row, col, mine.rows, of.n, of.k);
  store_tile(sums, row, col, mine.rows, of.n, of.c + mine.first * of.ldc, of.ldc, of.accumulate, bias);
}

/// blockIdx.x: a tile of c's rows; y: of its columns; z: a group.
template <typename T>
__global__ void __launch_bounds__(kThreads) sums_over_groups(SumProducts<T> of) {
  const GroupRows mine = of.groups.rows[of.groups.begin + blockIdx.z];
  if (mine.rows == 0 && of.accumulate) return;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTile, col = static_cast<int64_t>(blockIdx.y) * kTile;
  const Stored<T> left{of.a + mine.first * of.lda, of.lda, mine.rows, of.m};
  const Stored<T> right{of.b + mine.first * of.ldb, of.ldb, mine.rows, of.n};
  const Sums sums = multiply_tile<true, true>(left, right, row, col, of.m, of.n, mine.rows);
  store_tile(sums, row, col, of.m, of.n, of.c + blockIdx.z * of.c_step, of.ldc, of.accumulate,
             static_cast<const float*>(nullptr));
}

constexpr int64_t kSharedBytes = int64_t{kStages} * 2 * kTileBytes;
static_assert(kSharedBytes <= kSharedOfCards);

}  // namespace

template <typename T>
void multiply_rows_of_groups(Queue& on, const RowProducts<T>& of) {
  launch(on, {{static_cast<unsigned>(of.groups.tiles), blocks_for(of.n, kTile)}, {kThreads}, kSharedBytes},
         of.transposed ? rows_of_groups<true, T> : rows_of_groups<false, T>, of);
}
template <typename T>
void multiply_over_rows_of_groups(Queue& on, const SumProducts<T>& of) {
  launch(on,
         {{blocks_for(of.m, kTile), blocks_for(of.n, kTile), static_cast<unsigned>(of.groups.end - of.groups.begin)},
          {kThreads},
          kSharedBytes},
         sums_over_groups<T>, of);
}

#define RT_INSTANTIATE(T)                                                  \
  template void multiply_rows_of_groups<T>(Queue&, const RowProducts<T>&); \
  template void multiply_over_rows_of_groups<T>(Queue&, const SumProducts<T>&);
RT_INSTANTIATE(bf16)
RT_INSTANTIATE(f16)
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
