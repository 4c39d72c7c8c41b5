// Products of groups of floats, by the cores that add floats: the matrix units would round the factors. A block makes a
// tile of kTile x kTile elements, a thread kSide x kSide of them, kDepth steps of k at a time.
#include "runtime/kernels/cuda/group_tiles.h"
#include "runtime/kernels/cuda/grouped.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kTile = static_cast<int>(kGroupTile), kDepth = 8, kSide = 8, kAcross = kTile / kSide;
constexpr int kRow = kTile + 4;  // of a tile in shared memory, so that fewer stores conflict
static_assert(kThreads == kAcross * kAcross);

/// A matrix as it is stored: element (at, depth) of the other dim and of k, of `count` and `depth` of them.
struct Factor {
  const float* first;
  int64_t at_step, depth_step, count, depth;
};

/// room [kDepth, kRow]: the tile at `at` and `depth`; zeros where the matrix has nothing. Neighbouring threads read
/// neighbours in memory.
__device__ __forceinline__ void load_tile(const Factor& of, int64_t at, int64_t depth, float* room) {
#pragma unroll
  for (int turn = 0; turn < kTile * kDepth / kThreads; ++turn) {
    const int i = turn * kThreads + static_cast<int>(threadIdx.x);
    const int row = of.depth_step == 1 ? i / kDepth : i % kTile, step = of.depth_step == 1 ? i % kDepth : i / kTile;
    const int64_t r = at + row, d = depth + step;
    room[step * kRow + row] = r < of.count && d < of.depth ? of.first[r * of.at_step + d * of.depth_step] : 0.0f;
  }
}

/// The tile at (row, col) of left * right, plus bias [right.count] or null: c becomes it, or it is added to c.
__device__ __forceinline__ void multiply_tile(const Factor& left, const Factor& right, int64_t row, int64_t col,
                                              float* c, int64_t ldc, bool accumulate, const float* bias) {
  RT_SHARED(float, lefts, kDepth* kRow);
  RT_SHARED(float, rights, kDepth* kRow);
  const int my_row = static_cast<int>(threadIdx.x) / kAcross * kSide,
            my_col = static_cast<int>(threadIdx.x) % kAcross * kSide;
  float sums[kSide][kSide] = {};
  for (int64_t depth = 0; depth < left.depth; depth += kDepth) {
    __syncthreads();  // none still reads the one before
    load_tile(left, row, depth, lefts);
    load_tile(right, col, depth, rights);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      float a[kSide], b[kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        a[i] = lefts[d * kRow + my_row + i];
        b[i] = rights[d * kRow + my_col + i];
      }
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) sums[i][j] += a[i] * b[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const int64_t r = row + my_row + i, k = col + my_col + j;
      if (r >= left.count || k >= right.count) continue;
      float* const to = c + r * ldc + k;
      const float sum = bias == nullptr ? sums[i][j] : sums[i][j] + bias[k];
      *to = accumulate ? *to + sum : sum;
    }
  }
}

/// blockIdx.x: a tile of the rows of all groups; y: of the columns.
__global__ void __launch_bounds__(kThreads) float_rows_of_groups(RowProducts<float> of) {
  const TileOfGroup tile = tile_of_block(of.groups);
  if (tile.group < 0) return;
  const GroupRows mine = of.groups.rows[tile.group];
  const int64_t at = tile.group - of.groups.begin;
  const float* const b = of.b + at * of.b_step;
  const Factor left{of.a + mine.first * of.lda, of.lda, 1, mine.rows, of.k};
  const Factor right{b, of.transposed ? of.ldb : 1, of.transposed ? 1 : of.ldb, of.n, of.k};
  multiply_tile(left, right, tile.row, static_cast<int64_t>(blockIdx.y) * kTile, of.c + mine.first * of.ldc, of.ldc,
                of.accumulate, of.bias == nullptr ? nullptr : of.bias + at * of.bias_step);
}

/// blockIdx.x: a tile of c's rows; y: of its columns; z: a group.
__global__ void __launch_bounds__(kThreads) float_sums_over_groups(SumProducts<float> of) {
  const GroupRows mine = of.groups.rows[of.groups.begin + blockIdx.z];
  if (mine.rows == 0 && of.accumulate) return;
  const Factor left{of.a + mine.first * of.lda, 1, of.lda, of.m, mine.rows};
  const Factor right{of.b + mine.first * of.ldb, 1, of.ldb, of.n, mine.rows};
  multiply_tile(left, right, static_cast<int64_t>(blockIdx.x) * kTile, static_cast<int64_t>(blockIdx.y) * kTile,
                of.c + blockIdx.z * of.c_step, of.ldc, of.accumulate, nullptr);
}

}  // namespace

template <>
void multiply_rows_of_groups<float>(Queue& on, const RowProducts<float>& of) {
  launch(on, {{static_cast<unsigned>(of.groups.tiles), blocks_for(of.n, kTile)}, {kThreads}}, float_rows_of_groups, of);
}
template <>
void multiply_over_rows_of_groups<float>(Queue& on, const SumProducts<float>& of) {
  launch(on,
         {{blocks_for(of.m, kTile), blocks_for(of.n, kTile), static_cast<unsigned>(of.groups.end - of.groups.begin)},
          {kThreads}},
         float_sums_over_groups, of);
}

}  // namespace cairn::kernels::cuda
