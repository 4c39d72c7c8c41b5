// Gradients of attention, from probabilities that are computed again by the saved logsumexp. One kernel has a tile of
// queries in each block, and sums dq over the keys; the other has a tile of keys, and sums dk and dv over the queries
// of all heads that share them. So no two blocks add to one element.
#include "runtime/kernels/cuda/attention.h"
#include "runtime/kernels/cuda/attention_matrix.h"
#include "runtime/kernels/cuda/attention_tiles.h"
#include "runtime/kernels/cuda/attention_warpgroup.h"

namespace cairn::kernels::cuda {
namespace {

/// Of queries by keys, and of keys by queries.
template <int kD>
using Backward = std::conditional_t<kD == 64, TileShape<kD, 4, 4>,
                                    std::conditional_t<kD == 128, TileShape<kD, 4, 2>, TileShape<kD, 2, 1>>>;

template <int kD, typename T, typename Args>
__global__ void __launch_bounds__(kSide* kSide, 1) attention_query_gradients(Args of, BackwardOut<T> to) {
  using Of = Backward<kD>;
  RT_DYNAMIC_SHARED(float, queries);
  float* const douts = queries + Of::kTileRows * Of::kStride;
  float* const keys = douts + Of::kTileRows * Of::kStride;  // first values
  float* const scores = keys + Of::kTileColumns * Of::kStride;
  const int head = static_cast<int>(blockIdx.y), sample = static_cast<int>(blockIdx.z);
  const QueryTile tile = of.tile(sample, static_cast<int>(gridDim.x - 1 - blockIdx.x), Of::kTileRows);
  const auto range = of.visible(sample, tile);
  const float head_slope = of.slopes != nullptr ? of.slopes[head] : 0.0f;
  const int64_t out_at = tile.row * of.out_stride + head * of.head_dim;
  load_tile<Of::kTileRows, kD>(of.q + tile.row * of.q_stride + head * of.head_dim, of.q_stride, tile.rows, of.head_dim,
                               of.in_packs, queries);
  load_tile<Of::kTileRows, kD>(to.dout + out_at, of.out_stride, tile.rows, of.head_dim, of.in_packs, douts);
  __syncthreads();
  const int64_t kv_at = sample * of.key_rows * of.kv_stride + head / of.group * of.head_dim;
  const int64_t stats_at = (static_cast<int64_t>(sample) * of.heads + head) * of.queries + tile.index;

  int position[Of::kRows], first[Of::kRows], end[Of::kRows];
  float logsumexp[Of::kRows], delta[Of::kRows], sums[Of::kRows][Of::kSums];
#pragma unroll
  for (int i = 0; i < Of::kRows; ++i) {
    const int r = static_cast<int>(threadIdx.y) * Of::kRows + i;
    first[i] = end[i] = position[i] = 0;  // beyond the tile: sees nothing
    logsumexp[i] = delta[i] = 0;
    if (r < tile.rows) {
      position[i] = tile.position(r);
      const auto seen = of.visible(sample, position[i]);
      first[i] = seen.first;
      end[i] = seen.end;
      logsumexp[i] = to.logsumexp[stats_at + r];
      const T* const out = to.out + out_at + r * of.out_stride;
      for (int c = static_cast<int>(threadIdx.x); c < of.head_dim; c += kSide) {
        delta[i] += load_f32(out[c]) * douts[r * Of::kStride + c];
      }
    }
    delta[i] = row_sum(delta[i]);
    if (threadIdx.x == 0 && r < tile.rows) to.deltas[stats_at + r] = delta[i];
#pragma unroll
    for (int j = 0; j < Of::kSums; ++j) sums[i][j] = 0;
  }

  for (int key0 = range.first / Of::kTileColumns * Of::kTileColumns; key0 < range.end; key0 += Of::kTileColumns) {
    const int key_rows = of.tokens - key0;
    __syncthreads();  // before keys are overwritten
    load_tile<Of::kTileColumns, kD>(of.v + kv_at + key0 * of.kv_stride, of.kv_stride, key_rows, of.head_dim,
                                    of.in_packs, keys);
    __syncthreads();
    float dp[Of::kRows][Of::kColumns], p[Of::kRows][Of::kColumns];
    multiply<Of>(douts, keys, of.depth, dp);
    __syncthreads();  // before values are
    load_tile<Of::kTileColumns, kD>(of.k + kv_at + key0 * of.kv_stride, of.kv_stride, key_rows, of.head_dim,
                                    of.in_packs, keys);
    __syncthreads();
    multiply<Of>(queries, keys, of.depth, p);
#pragma unroll
    for (int i = 0; i < Of::kRows; ++i) {
      const uint64_t row_key = of.drops() ? of.dropout_key(sample, head, position[i]) : 0;
#pragma unroll
      for (int j = 0; j < Of::kColumns; ++j) {
        const int key = key0 + static_cast<int>(threadIdx.x) + j * kSide;
        float gradient = 0;
        if (key >= first[i] && key < end[i]) {
          const auto score = of.score(p[i][j], head_slope, sample, key, position[i]);
          if (of.drops()) dp[i][j] *= of.kept(row_key, key);
          gradient = expf(score.value - logsumexp[i]) * (dp[i][j] - delta[i]) * of.scale * score.slope;
        }
        p[i][j] = gradient;
      }
    }
    keep_scores<Of>(p, scores);
    __syncwarp();  // a row's scores are of its own warp
    add_products<Of>(scores, keys, sums);
  }
  float ones[Of::kRows];
#pragma unroll
  for (int i = 0; i < Of::kRows; ++i) ones[i] = 1.0f;
  store_sums<Of>(sums, ones, tile.rows, of.head_dim, of.in_packs, to.dq + tile.row * of.q_stride + head * of.head_dim,
                 of.q_stride);
}

/// Rows are keys, columns queries.
template <int kD, typename T, typename Args>
__global__ void __launch_bounds__(kSide* kSide, 1) attention_key_gradients(Args of, BackwardOut<T> to) {
  using Of = Backward<kD>;
  RT_DYNAMIC_SHARED(float, keys);
  float* const values = keys + Of::kTileRows * Of::kStride;
  float* const queries = values + Of::kTileRows * Of::kStride;  // and their douts
  float* const scores = queries + Of::kTileColumns * Of::kStride;
  const int kv_head = static_cast<int>(blockIdx.y), sample = static_cast<int>(blockIdx.z);
  const int key0 = static_cast<int>(blockIdx.x) * Of::kTileRows;
  const int key_rows = of.tokens - key0 < Of::kTileRows ? of.tokens - key0 : Of::kTileRows;
  const int64_t kv_at = (sample * of.key_rows + key0) * of.kv_stride + kv_head * of.head_dim;
  load_tile<Of::kTileRows, kD>(of.k + kv_at, of.kv_stride, key_rows, of.head_dim, of.in_packs, keys);
  load_tile<Of::kTileRows, kD>(of.v + kv_at, of.kv_stride, key_rows, of.head_dim, of.in_packs, values);
  float dk[Of::kRows][Of::kSums], dv[Of::kRows][Of::kSums], ones[Of::kRows];
#pragma unroll
  for (int i = 0; i < Of::kRows; ++i) {
    ones[i] = 1.0f;
#pragma unroll
    for (int j = 0; j < Of::kSums; ++j) dk[i][j] = dv[i][j] = 0;
  }
  const int tiles = (of.queries + Of::kTileColumns - 1) / Of::kTileColumns;
  for (int n = 0; n < of.group * tiles; ++n) {
    const int head = kv_head * of.group + n / tiles;
    const QueryTile tile = of.tile(sample, n % tiles, Of::kTileColumns);
    const auto range = of.visible(sample, tile);
    if (range.first >= key0 + key_rows || range.end <= key0) continue;
    const float head_slope = of.slopes != nullptr ? of.slopes[head] : 0.0f;
    const T* const q = of.q + tile.row * of.q_stride + head * of.head_dim;
    const int64_t stats_at = (static_cast<int64_t>(sample) * of.heads + head) * of.queries + tile.index;
    __syncthreads();  // before queries are overwritten
    load_tile<Of::kTileColumns, kD>(q, of.q_stride, tile.rows, of.head_dim, of.in_packs, queries);
    __syncthreads();
    float p[Of::kRows][Of::kColumns], dp[Of::kRows][Of::kColumns];
    multiply<Of>(keys, queries, of.depth, p);
    __syncthreads();
    load_tile<Of::kTileColumns, kD>(to.dout + tile.row * of.out_stride + head * of.head_dim, of.out_stride, tile.rows,
                                    of.head_dim, of.in_packs, queries);
    __syncthreads();
    multiply<Of>(values, queries, of.depth, dp);
#pragma unroll
    for (int j = 0; j < Of::kColumns; ++j) {
      const int c = static_cast<int>(threadIdx.x) + j * kSide;
      int position = 0, first = 0, end = 0;  // beyond the tile: sees nothing
      float logsumexp = 0, delta = 0;
      uint64_t row_key = 0;
      if (c < tile.rows) {
        position = tile.position(c);
        const auto seen = of.visible(sample, position);
        first = seen.first;
        end = seen.end;
        logsumexp = to.logsumexp[stats_at + c];
        delta = to.deltas[stats_at + c];
        if (of.drops()) row_key = of.dropout_key(sample, head, position);
      }
#pragma unroll
      for (int i = 0; i < Of::kRows; ++i) {
        const int key = key0 + static_cast<int>(threadIdx.y) * Of::kRows + i;
        float probability = 0, gradient = 0;
        if (key >= first && key < end) {
          const auto score = of.score(p[i][j], head_slope, sample, key, position);
          const float kept = of.drops() ? of.kept(row_key, key) : 1.0f;
          probability = expf(score.value - logsumexp);
          gradient = probability * (dp[i][j] * kept - delta) * of.scale * score.slope;
          probability *= kept;
        }
        p[i][j] = probability;
        dp[i][j] = gradient;
      }
    }
    keep_scores<Of>(p, scores);
    __syncwarp();  // a row's scores are of its own warp
    add_products<Of>(scores, queries, dv);
    __syncthreads();  // before douts are overwritten, and the scores
    load_tile<Of::kTileColumns, kD>(q, of.q_stride, tile.rows, of.head_dim, of.in_packs, queries);
    keep_scores<Of>(dp, scores);
    __syncthreads();
    add_products<Of>(scores, queries, dk);
  }
  if (to.dk != nullptr) {
    store_sums<Of>(dk, ones, key_rows, of.head_dim, of.in_packs, to.dk + kv_at, of.kv_stride);
    store_sums<Of>(dv, ones, key_rows, of.head_dim, of.in_packs, to.dv + kv_at, of.kv_stride);
  } else {
    store_sums<Of>(dk, ones, key_rows, of.head_dim, of.in_packs, to.dk_sums + kv_at, of.kv_stride);
    store_sums<Of>(dv, ones, key_rows, of.head_dim, of.in_packs, to.dv_sums + kv_at, of.kv_stride);
  }
}

/// A block has a head. Thread i sums every kSinkThreads-th query, from the i-th on, of one sample after the other.
constexpr int kSinkThreads = 256;
__global__ void __launch_bounds__(kSinkThreads)
    sink_sums(const float* sinks, const float* logsumexp, const float* deltas, int samples, int queries,
              float* dsinks) {
  const int head = static_cast<int>(blockIdx.x), heads = static_cast<int>(gridDim.x);
  const float sink = sinks[head];
  float sum = 0, none = 0;
  for (int sample = 0; sample < samples; ++sample) {
    const int64_t at = (static_cast<int64_t>(sample) * heads + head) * queries;
    for (int t = static_cast<int>(threadIdx.x); t < queries; t += kSinkThreads) {
      sum += expf(sink - logsumexp[at + t]) * deltas[at + t];
    }
  }
  RT_SHARED(float, room, 2 * kSinkThreads / kWarp);
  block_sums(sum, none, room);
  if (threadIdx.x == 0) dsinks[head] -= sum;
}

}  // namespace

int64_t attention_deltas(const AttentionDims& dims) {
  return dims.batch * dims.heads * (dims.held.count == 0 ? dims.tokens : dims.held.count);
}

void sink_gradients(Queue& on, const AttentionDims& dims, const float* logsumexp, const float* deltas, float* dsinks) {
  const int64_t queries = dims.held.count == 0 ? dims.tokens : dims.held.count;
  launch(on, {{static_cast<unsigned>(dims.heads)}, {kSinkThreads}}, sink_sums, dims.sinks.address(), logsumexp, deltas,
         static_cast<int>(dims.batch), static_cast<int>(queries), dsinks);
}

template <typename T, typename G>
void attention_backward(Queue& on, const AttentionDims& dims, const T* q, const T* k, const T* v, const T* out,
                        const float* logsumexp, const T* dout, T* dq, G* dk, G* dv, float* deltas, Units units) {
  const AttentionArgs<T> args = attention_args(dims, q, k, v, out, dout, dq, dk, dv);
  BackwardOut<T> to{out, dout, logsumexp, deltas, dq, nullptr, nullptr, nullptr, nullptr};
  if constexpr (std::is_same_v<G, T>) {
    to.dk = dk;
    to.dv = dv;
  } else {
    to.dk_sums = dk;
    to.dv_sums = dv;
  }
  if constexpr (!std::is_same_v<T, float>) {
    if (units == Units::kWarpgroups && by_warpgroups(args)) {
      return attention_backward_by_warpgroups(on, args, dims.batch, to);
    }
    if (by_matrix_units(args)) return attention_backward_by_matrix_units(on, args, dims.batch, to);
  }
  for_alibi(args, [&]<typename Args>(const Args& of) {
    for_head_dim(dims.head_dim, [&]<int kD>() {
      using Of = Backward<kD>;
      const auto batch = static_cast<unsigned>(dims.batch);
      const int64_t shared_bytes = Of::floats(2) * static_cast<int64_t>(sizeof(float));
      launch(on,
             {{blocks_for(of.queries, Of::kTileRows), static_cast<unsigned>(dims.heads), batch},
              {kSide, kSide},
              shared_bytes},
             attention_query_gradients<kD, T, Args>, of, to);
      launch(on,
             {{blocks_for(of.tokens, Of::kTileRows), static_cast<unsigned>(dims.kv_heads), batch},
              {kSide, kSide},
              shared_bytes},
             attention_key_gradients<kD, T, Args>, of, to);
    });
  });
}

#define RT_INSTANTIATE(T, G)                                                                                   \
  template void attention_backward<T, G>(Queue&, const AttentionDims&, const T*, const T*, const T*, const T*, \
                                         const float*, const T*, T*, G*, G*, float*, Units)
RT_INSTANTIATE(float, float);
RT_INSTANTIATE(bf16, bf16);
RT_INSTANTIATE(bf16, float);
RT_INSTANTIATE(f16, f16);
RT_INSTANTIATE(f16, float);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
