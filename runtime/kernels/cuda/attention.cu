// A block has a tile of queries of one head, and visits the keys that they see tile by tile: a running maximum and sum
// of each query make the softmax exact. Keys and values take the same room, one after the other.
#include "runtime/kernels/cuda/attention.h"

#include "runtime/kernels/cuda/attention_matrix.h"
#include "runtime/kernels/cuda/attention_tiles.h"
#include "runtime/kernels/cuda/attention_warpgroup.h"

namespace cairn::kernels::cuda {
namespace {

/// Of queries by keys.
template <int kD>
using Forward = std::conditional_t<kD <= 128, TileShape<kD, 4, 4>, TileShape<kD, 2, 2>>;

int64_t tile_rows(int64_t head_dim) { return head_dim <= 128 ? Forward<128>::kTileRows : Forward<256>::kTileRows; }
int64_t queries_of(const AttentionDims& d) { return d.held.count == 0 ? d.tokens : d.held.count; }

template <int kD, typename T, typename Args>
__global__ void __launch_bounds__(kSide* kSide, Args::kLeastBlocks) attention_tiles(Args of, ForwardOut<T> to) {
  using Of = Forward<kD>;
  RT_DYNAMIC_SHARED(float, queries);
  float* const keys = queries + Of::kTileRows * Of::kStride;  // then values
  float* const scores = keys + Of::kTileColumns * Of::kStride;
  const int head = static_cast<int>(blockIdx.y), sample = static_cast<int>(blockIdx.z);
  const int number = static_cast<int>(gridDim.x - 1 - blockIdx.x);  // those that see most begin first
  const QueryTile tile = of.tile(sample, number, Of::kTileRows);
  const auto range = of.visible(sample, tile);
  const float head_slope = of.slopes != nullptr ? of.slopes[head] : 0.0f;
  load_tile<Of::kTileRows, kD>(of.q + tile.row * of.q_stride + head * of.head_dim, of.q_stride, tile.rows, of.head_dim,
                               of.in_packs, queries);
  const int64_t kv_at = sample * of.key_rows * of.kv_stride + head / of.group * of.head_dim;

  int position[Of::kRows], first[Of::kRows], end[Of::kRows];
  float max[Of::kRows], sum[Of::kRows], sums[Of::kRows][Of::kSums];
#pragma unroll
  for (int i = 0; i < Of::kRows; ++i) {
    const int r = static_cast<int>(threadIdx.y) * Of::kRows + i;
    first[i] = end[i] = position[i] = 0;  // beyond the tile: sees nothing
    if (r < tile.rows) {
      position[i] = tile.position(r);
      const auto seen = of.visible(sample, position[i]);
      first[i] = seen.first;
      end[i] = seen.end;
    }
    max[i] = of.sinks != nullptr ? of.sinks[head] : -INFINITY;  // a sink is the first score
    sum[i] = of.sinks != nullptr ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < Of::kSums; ++j) sums[i][j] = 0;
  }

  for (int key0 = range.first / Of::kTileColumns * Of::kTileColumns; key0 < range.end; key0 += Of::kTileColumns) {
    const int key_rows = of.tokens - key0;
    __syncthreads();  // before values are overwritten
    load_tile<Of::kTileColumns, kD>(of.k + kv_at + key0 * of.kv_stride, of.kv_stride, key_rows, of.head_dim,
                                    of.in_packs, keys);
    __syncthreads();
    float p[Of::kRows][Of::kColumns];
    multiply<Of>(queries, keys, of.depth, p);
    __syncthreads();  // before keys are
    load_tile<Of::kTileColumns, kD>(of.v + kv_at + key0 * of.kv_stride, of.kv_stride, key_rows, of.head_dim,
                                    of.in_packs, keys);
#pragma unroll
    for (int i = 0; i < Of::kRows; ++i) {
      float largest = -INFINITY;
#pragma unroll
      for (int j = 0; j < Of::kColumns; ++j) {
        const int key = key0 + static_cast<int>(threadIdx.x) + j * kSide;
        p[i][j] =
            key >= first[i] && key < end[i] ? of.score(p[i][j], head_slope, sample, key, position[i]).value : -INFINITY;
        largest = fmaxf(largest, p[i][j]);
      }
      largest = fmaxf(max[i], row_max(largest));
      // Where nothing has been seen yet there is nothing to take a difference with.
      const float shift = largest == -INFINITY ? 0.0f : largest, shrink = expf(max[i] - shift);
      const uint64_t row_key = of.drops() ? of.dropout_key(sample, head, position[i]) : 0;
      float added = 0;
#pragma unroll
      for (int j = 0; j < Of::kColumns; ++j) {
        p[i][j] = expf(p[i][j] - shift);
        added += p[i][j];  // the sum is of all probabilities
        if (of.drops()) p[i][j] *= of.kept(row_key, key0 + static_cast<int>(threadIdx.x) + j * kSide);
      }
      sum[i] = sum[i] * shrink + row_sum(added);
      max[i] = largest;
#pragma unroll
      for (int j = 0; j < Of::kSums; ++j) sums[i][j] *= shrink;
    }
    keep_scores<Of>(p, scores);
    __syncthreads();
    add_products<Of>(scores, keys, sums);
  }

  float factors[Of::kRows];
#pragma unroll
  for (int i = 0; i < Of::kRows; ++i) {
    const int r = static_cast<int>(threadIdx.y) * Of::kRows + i;
    factors[i] = 1.0f / sum[i];
    if (to.logsumexp != nullptr && threadIdx.x == 0 && r < tile.rows) {
      to.logsumexp[(static_cast<int64_t>(sample) * of.heads + head) * of.queries + tile.index + r] =
          max[i] + logf(sum[i]);
    }
  }
  store_sums<Of>(sums, factors, tile.rows, of.head_dim, of.in_packs,
                 to.out + tile.row * of.out_stride + head * of.head_dim, of.out_stride);
  if (to.maxima == nullptr) return;
  float largest = max[0];
#pragma unroll
  for (int i = 1; i < Of::kRows; ++i) largest = fmaxf(largest, max[i]);
  if (threadIdx.x == 0) queries[threadIdx.y] = largest;  // read before the last barrier: all see a key
  __syncthreads();
  if (thread_of_block() != 0) return;
  for (int row = 1; row < kSide; ++row) largest = fmaxf(largest, queries[row]);
  to.maxima[(static_cast<int64_t>(head) * gridDim.z + sample) * gridDim.x + number] = largest;
}

/// A warp has a head.
__global__ void __launch_bounds__(kWarp) raise_maxima(const float* maxima, int64_t count, float* max_scores) {
  float largest = -INFINITY;
  for (int64_t i = threadIdx.x; i < count; i += kWarp) largest = fmaxf(largest, maxima[blockIdx.x * count + i]);
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  if (threadIdx.x == 0) max_scores[blockIdx.x] = fmaxf(max_scores[blockIdx.x], largest);
}

template <typename T>
void forward(Queue& on, const AttentionArgs<T>& of, int64_t batch, const ForwardOut<T>& to) {
  for_alibi(of, [&]<typename Args>(const Args& args) {
    for_head_dim(args.head_dim, [&]<int kD>() {
      using Of = Forward<kD>;
      const Size size{
          {blocks_for(args.queries, Of::kTileRows), static_cast<unsigned>(args.heads), static_cast<unsigned>(batch)},
          {kSide, kSide},
          Of::floats(1) * static_cast<int64_t>(sizeof(float))};
      launch(on, size, attention_tiles<kD, T, Args>, args, to);
    });
  });
}

}  // namespace

int64_t attention_maxima(int64_t heads, int64_t queries, int64_t head_dim) {
  return heads * blocks_for(queries, tile_rows(head_dim));
}

int64_t attention_maxima(const AttentionDims& dims) {
  return dims.max_scores ? attention_maxima(dims.heads * dims.batch, queries_of(dims), dims.head_dim) : 0;
}

template <typename T>
bool warpgroups_take(const AttentionDims& dims, const T* q, const T* k, const T* v,
                     std::initializer_list<const void*> others) {
  return !dims.max_scores && by_warpgroups(attention_args<T>(dims, q, k, v)) &&
         std::ranges::all_of(others, [](const void* at) { return aligned_to(16, at); });
}
template bool warpgroups_take<bf16>(const AttentionDims&, const bf16*, const bf16*, const bf16*,
                                    std::initializer_list<const void*>);
template bool warpgroups_take<f16>(const AttentionDims&, const f16*, const f16*, const f16*,
                                   std::initializer_list<const void*>);

template <typename T>
void attention_forward(Queue& on, const AttentionDims& dims, const T* q, const T* k, const T* v, T* out,
                       float* logsumexp, float* maxima, Units units) {
  const bool kept = static_cast<bool>(dims.max_scores);
  const AttentionArgs<T> args = attention_args(dims, q, k, v, out);
  const ForwardOut<T> to{out, logsumexp, kept ? maxima : nullptr};
  int64_t rows = tile_rows(dims.head_dim);
  if constexpr (!std::is_same_v<T, float>) {
    if (units == Units::kWarpgroups && !kept && by_warpgroups(args)) {
      return attention_by_warpgroups(on, args, dims.batch, to);
    }
    if (by_matrix_units(args)) rows = matrix_tile_rows(args);
    if (by_matrix_units(args)) attention_by_matrix_units(on, args, dims.batch, to);
  }
  if (!by_matrix_units(args)) forward<T>(on, args, dims.batch, to);
  if (!kept || dims.batch == 0 || dims.tokens == 0) return;
  launch(on, {{static_cast<unsigned>(dims.heads)}, {kWarp}}, raise_maxima, maxima,
         dims.batch * blocks_for(queries_of(dims), rows), dims.max_scores.address());
}

template <typename T>
void attention_decode(Queue& on, const AttentionDims& dims, int64_t past, int64_t capacity, const T* q,
                      const T* k_cache, const T* v_cache, T* out) {
  AttentionDims of = dims;  // one query a sample, at the end of its keys
  of.tokens = past + 1;
  of.q_stride = of.out_stride = dims.heads * dims.head_dim;
  of.kv_stride = dims.kv_heads * dims.head_dim;
  of.mask = {};
  of.mask.window = dims.mask.window;
  of.mask.chunk = dims.mask.chunk;
  of.dropout = {};
  of.held = TokenRuns(of.tokens);
  of.held.count = 1;
  of.held.first = of.held.second = past;
  AttentionArgs<T> args = attention_args(of, q, k_cache, v_cache, out);
  args.key_rows = capacity;
  forward<T>(on, args, dims.batch, {out, nullptr, nullptr});
}

#define RT_INSTANTIATE(T)                                                                                            \
  template void attention_forward<T>(Queue&, const AttentionDims&, const T*, const T*, const T*, T*, float*, float*, \
                                     Units);                                                                         \
  template void attention_decode<T>(Queue&, const AttentionDims&, int64_t, int64_t, const T*, const T*, const T*, T*)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
