// Attention's gradients by matrix units, from probabilities that are computed again by the saved logsumexp. One kernel
// has a tile of queries in each block, and sums dq over the keys; the other has a tile of keys, and sums dk and dv over
// the queries of all heads that share them. So no two blocks add to one element. The next tile is copied while one is
// multiplied, a part of its columns at a time. `scale` is a factor of the sums, not of the rounded gradients of scores.
#include "runtime/kernels/cuda/attention_matrix.h"

namespace cairn::kernels::cuda {
namespace {

/// Of so many warps with kFragments * 16 rows each; tiles of kColumns, kAtOnce multiplied at once.
template <int kOfD, int kOfWarps, int kOfFragments, int kOfColumns, int kOfAtOnce>
struct Backward {
  static constexpr int kD = kOfD, kFragments = kOfFragments, kColumns = kOfColumns, kAtOnce = kOfAtOnce;
  static constexpr int kThreads = kOfWarps * kWarp, kWarpRows = kFragments * kSquare, kRows = kOfWarps * kWarpRows;
  static constexpr int kTileBytes = kColumns * kD * 2, kRowsBytes = kRows * kD * 2;
  /// Two tiles of rows, two of columns twice, and two floats of each row, or of each column twice.
  static constexpr int64_t kBytes =
      2 * kRowsBytes + 4 * kTileBytes + 2 * sizeof(float) * (kRows > 2 * kColumns ? kRows : 2 * kColumns);
  static_assert(kBytes <= kSharedOfCards);
};
template <int kD, bool kPlain>
using QueryGradients = std::conditional_t<kD == 64, Backward<64, 4, kPlain ? 2 : 1, 64, 32>,  //
                                          Backward<128, 4, 1, 64, 32>>;
// Columns at once: more would not fit into registers where it is 16. Sums have the same order with both.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1200
constexpr int kMostAtOnce = 32;
#else
constexpr int kMostAtOnce = 16;
#endif
template <int kD, bool kPlain>
using KeyGradients = std::conditional_t<kD == 64, Backward<64, 4, kPlain ? 2 : 1, 64, kPlain ? kMostAtOnce : 32>,
                                        Backward<128, 4, 1, 64, kPlain ? 32 : 16>>;

/// Deltas of the tile's queries, to `to` and to memory; 0 beyond them. By all threads of the block.
template <typename Of, typename T>
__device__ __forceinline__ void find_deltas(const AttentionArgs<T>& of, const BackwardOut<T>& grads, int rows,
                                            int64_t out_at, int64_t stats_at, float* to) {
  constexpr int kChunks = Of::kD / kChunk;
  const int thread = static_cast<int>(threadIdx.x), chunk = thread % kChunks;
#pragma unroll 2
  for (int r = thread / kChunks; r < Of::kRows; r += Of::kThreads / kChunks) {
    float delta = 0;
    if (r < rows && chunk * kChunk < of.head_dim) {
      const int64_t at = out_at + r * of.out_stride + chunk * kChunk;
      const auto out = load_pack<kChunk>(grads.out + at), dout = load_pack<kChunk>(grads.dout + at);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) delta += load_f32(out.at[k]) * load_f32(dout.at[k]);
    }
#pragma unroll
    for (int step = kChunks / 2; step > 0; step /= 2) delta += __shfl_xor_sync(kAllLanes, delta, step);
    if (chunk != 0) continue;
    to[r] = delta;
    if (r < rows) grads.deltas[stats_at + r] = delta;
  }
}

template <int kD, typename T, bool kPlain>
__global__ void __launch_bounds__(QueryGradients<kD, kPlain>::kThreads, 2)
    attention_matrix_query_gradients(AttentionArgs<T> of, TileOrder order, BackwardOut<T> grads) {
  using Of = QueryGradients<kD, kPlain>;
  constexpr int kM = Of::kFragments, kN = Of::kAtOnce / 8;
  RT_DYNAMIC_SHARED(T, queries);
  float* const deltas = reinterpret_cast<float*>(queries + (2 * Of::kRowsBytes + 4 * Of::kTileBytes) / 2);
  const SharedAt queries_at = shared_at(queries), douts_at = queries_at + Of::kRowsBytes;
  const SharedAt room = douts_at + Of::kRowsBytes;
  const Lane<kD> lane;
  const int row0 = static_cast<int>(threadIdx.x) / kWarp * Of::kWarpRows, own = row0 * Lane<kD>::kRowBytes;
  const auto [head, sample, rank] = order.place(blockIdx.x);
  const int number = static_cast<int>(order.tiles) - 1 - rank;  // those that see most begin first
  const QueryTile tile = of.tile(sample, number, Of::kRows);
  const auto range = of.visible(sample, tile);
  const Seen seen = seen_by(of, sample, tile, row0, Of::kWarpRows);
  const float head_slope = !kPlain && of.slopes != nullptr ? of.slopes[head] : 0.0f;
  const float factor = kPlain ? of.scale * kLog2E : kLog2E;  // of scores as they are kept
  const int64_t out_at = tile.row * of.out_stride + head * of.head_dim;
  const int64_t stats_at = (static_cast<int64_t>(sample) * of.heads + head) * of.queries + tile.index;
  const Copies<kD, Of::kThreads> copies(of.head_dim);
  copies.template begin<Of::kRows>(of.q + tile.row * of.q_stride + head * of.head_dim + copies.first(of.q_stride),
                                   of.q_stride, tile.rows, queries_at);
  copies.template begin<Of::kRows>(grads.dout + out_at + copies.first(of.out_stride), of.out_stride, tile.rows,
                                   douts_at);
  int key0 = range.first / Of::kColumns * Of::kColumns;
  const int64_t kv_at = (sample * of.key_rows + key0) * of.kv_stride + head / of.group * of.head_dim;
  const T *next_keys = of.k + kv_at + copies.first(of.kv_stride),
          *next_values = of.v + kv_at + copies.first(of.kv_stride);
  const auto begin = [&](int first_key, int stage) {
    const SharedAt keys = room + 2 * stage * Of::kTileBytes;
    copies.template begin<Of::kColumns>(next_keys, of.kv_stride, of.tokens - first_key, keys);
    copies.template begin<Of::kColumns>(next_values, of.kv_stride, of.tokens - first_key, keys + Of::kTileBytes);
    end_copy_group();
    next_keys += Of::kColumns * of.kv_stride;
    next_values += Of::kColumns * of.kv_stride;
  };
  begin(key0, 0);
  find_deltas<Of>(of, grads, tile.rows, out_at, stats_at, deltas);
  __syncthreads();

  // Beyond the tile queries and their douts are zeros, and so are the gradients of scores.
  float logsumexp[2 * kM], delta[2 * kM], sums[kM][kD / 8][4];
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int r = row0 + i * 8 + lane.g;
    logsumexp[i] = r < tile.rows ? grads.logsumexp[stats_at + r] * kLog2E : 0.0f;
    delta[i] = deltas[r];
  }
  const auto position_of = [&](int i) {
    const QueryTile here = of.tile(sample, made_here(number), Of::kRows);
    const int r = row0 + i * 8 + lane.g;
    return here.position(r < here.rows ? r : here.rows - 1);
  };
  clear(sums);

  for (int stage = 0; key0 < range.end; key0 += Of::kColumns, stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // all see the tile, and nobody reads the one before any more
    if (key0 + Of::kColumns < range.end) begin(key0 + Of::kColumns, stage ^ 1);
#pragma unroll 1
    for (int part = 0; part < Of::kColumns; part += Of::kAtOnce) {
      if (seen.none_of(key0 + part, Of::kAtOnce)) continue;
      const SharedAt keys = room + 2 * stage * Of::kTileBytes + part * Lane<kD>::kRowBytes;
      float p[kM][kN][4], dp[kM][kN][4];
      multiply_rows<T>(p, lane, queries_at + own, keys);
      multiply_rows<T>(dp, lane, douts_at + own, keys + Of::kTileBytes);
      const int key_at = key0 + part + lane.t * 2;
      const bool whole = seen.whole(key0 + part, Of::kAtOnce);
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        float(&of_p)[kN][4] = p[i / 2];
        const float(&of_dp)[kN][4] = dp[i / 2];
        typename AttentionArgs<T>::Keys keys_seen{0, of.tokens};
        if (!whole) keys_seen = of.visible(sample, position_of(i));
        if constexpr (kPlain) {
          if (!whole) {
#pragma unroll
            for (int n = 0; n < kN; ++n) {
#pragma unroll
              for (int e = i % 2 * 2; e < i % 2 * 2 + 2; ++e) {
                const int key = key_at + n * 8 + e % 2;
                if (key < keys_seen.first || key >= keys_seen.end) of_p[n][e] = -INFINITY;
              }
            }
          }
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = i % 2 * 2; e < i % 2 * 2 + 2; ++e) {
              of_p[n][e] = fast_exp2(of_p[n][e] * factor - logsumexp[i]) * (of_dp[n][e] - delta[i]);
            }
          }
        } else {
          const int position = position_of(i);
          const uint64_t row_key = of.drops() ? of.dropout_key(sample, head, position) : 0;
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = i % 2 * 2; e < i % 2 * 2 + 2; ++e) {
              const int key = key_at + n * 8 + e % 2;
              const auto score = of.score(of_p[n][e], head_slope, sample, key, position);
              const float kept = of.drops() ? of.kept(row_key, key) : 1.0f;
              const float gradient = fast_exp2(score.value * factor - logsumexp[i]) * (of_dp[n][e] * kept - delta[i]);
              of_p[n][e] = key < keys_seen.first || key >= keys_seen.end ? 0.0f : gradient * score.slope;
            }
          }
        }
      }
      add_scored_rows<T>(sums, lane, p, keys);
    }
  }
  float factors[2 * kM];
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) factors[i] = of.scale;
  store_rows<kD>(sums, factors, lane, queries + row0 * kD, tile.rows - row0, of.head_dim,
                 grads.dq + (tile.row + row0) * of.q_stride + head * of.head_dim, of.q_stride);
}

/// Rows are keys, columns queries.
template <int kD, typename T, bool kPlain>
__global__ void __launch_bounds__(KeyGradients<kD, kPlain>::kThreads, 2)
    attention_matrix_key_gradients(AttentionArgs<T> of, TileOrder order, BackwardOut<T> grads) {
  using Of = KeyGradients<kD, kPlain>;
  constexpr int kM = Of::kFragments, kN = Of::kAtOnce / 8;
  RT_DYNAMIC_SHARED(T, keys);
  T* const values = keys + Of::kRowsBytes / 2;
  float* const stats = reinterpret_cast<float*>(values + Of::kRowsBytes / 2 + 4 * Of::kTileBytes / 2);
  const SharedAt keys_at = shared_at(keys), values_at = keys_at + Of::kRowsBytes, room = values_at + Of::kRowsBytes;
  const SharedAt stats_room = room + 4 * Of::kTileBytes;
  const Lane<kD> lane;
  const int thread = static_cast<int>(threadIdx.x), row0 = thread / kWarp * Of::kWarpRows;
  const int own = row0 * Lane<kD>::kRowBytes;
  const auto [kv_head, sample, number] = order.place(blockIdx.x);  // those that most see begin first
  const int key0 = number * Of::kRows, first_key = key0 + row0;
  const int key_rows = of.tokens - key0 < Of::kRows ? of.tokens - key0 : Of::kRows;
  const int64_t kv_at = (sample * of.key_rows + key0) * of.kv_stride + kv_head * of.head_dim;
  const Copies<kD, Of::kThreads> copies(of.head_dim);
  const int64_t from = kv_at + copies.first(of.kv_stride);
  copies.template begin<Of::kRows>(of.k + from, of.kv_stride, key_rows, keys_at);
  copies.template begin<Of::kRows>(of.v + from, of.kv_stride, key_rows, values_at);
  end_copy_group();

  // Tiles of queries that see any of the keys follow each other, as what they see ascends.
  int low = 0, high = (of.queries + Of::kColumns - 1) / Of::kColumns;
  while (low < high && of.visible(sample, of.tile(sample, low, Of::kColumns)).end <= key0) ++low;
  while (low < high && of.visible(sample, of.tile(sample, high - 1, Of::kColumns)).first >= key0 + key_rows) --high;

  const auto begin = [&](int head, int at, int stage) {
    const QueryTile tile = of.tile(sample, at, Of::kColumns);
    const SharedAt queries = room + 2 * stage * Of::kTileBytes;
    copies.template begin<Of::kColumns>(of.q + tile.row * of.q_stride + head * of.head_dim + copies.first(of.q_stride),
                                        of.q_stride, tile.rows, queries);
    copies.template begin<Of::kColumns>(
        grads.dout + tile.row * of.out_stride + head * of.head_dim + copies.first(of.out_stride), of.out_stride,
        tile.rows, queries + Of::kTileBytes);
    static_assert(Of::kThreads == 2 * Of::kColumns);  // logsumexp, then deltas
    const int c = thread % Of::kColumns;
    const int64_t stats_at = (static_cast<int64_t>(sample) * of.heads + head) * of.queries + tile.index;
    const float* const from = thread < Of::kColumns ? grads.logsumexp : grads.deltas;
    begin_copy<4>(stats_room + (stage * Of::kThreads + thread) * 4, from + stats_at + c, c < tile.rows);
    end_copy_group();
  };

  float dk[kM][kD / 8][4], dv[kM][kD / 8][4];
  clear(dk);
  clear(dv);
  const float factor = kPlain ? of.scale * kLog2E : kLog2E;  // of scores as they are kept
  const int first_head = kv_head * of.group;
  if (low < high) begin(first_head, low, 0);
  for (int head = first_head, at = low, stage = 0; head < first_head + of.group && low < high; stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // all see the tile, and nobody reads the one before any more
    const bool last = at + 1 == high;
    const int next_head = last ? head + 1 : head, next = last ? low : at + 1;
    if (next_head < first_head + of.group) begin(next_head, next, stage ^ 1);
    const QueryTile tile = of.tile(sample, at, Of::kColumns);
    const float head_slope = !kPlain && of.slopes != nullptr ? of.slopes[head] : 0.0f;
#pragma unroll 1
    for (int part = 0; part < Of::kColumns; part += Of::kAtOnce) {
      const Seen seen = seen_by(of, sample, tile, part, Of::kAtOnce);
      if (seen.none_of(first_key, Of::kWarpRows)) continue;
      const SharedAt queries = room + 2 * stage * Of::kTileBytes + part * Lane<kD>::kRowBytes;
      const SharedAt douts = queries + Of::kTileBytes;
      float p[kM][kN][4], dp[kM][kN][4];
      multiply_rows<T>(p, lane, keys_at + own, queries);
      multiply_rows<T>(dp, lane, values_at + own, douts);
      const bool whole = seen.whole(first_key, Of::kWarpRows) && part + Of::kAtOnce <= tile.rows;
      const float* const logsumexp = stats + stage * Of::kThreads + part + lane.t * 2;
      const float* const deltas = logsumexp + Of::kColumns;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const auto of_sums = load_pack<2>(logsumexp + n * 8), of_deltas = load_pack<2>(deltas + n * 8);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = made_here(part) + n * 8 + lane.t * 2 + e;
          const float shift = of_sums.at[e] * kLog2E, delta = of_deltas.at[e];
          typename AttentionArgs<T>::Keys keys_seen{0, of.tokens};
          if (!whole) {
            keys_seen = {0, 0};  // beyond the tile: sees nothing
            if (c < tile.rows) keys_seen = of.visible(sample, tile.position(c));
          }
          if constexpr (kPlain) {
            if (!whole) {
#pragma unroll
              for (int i = 0; i < 2 * kM; ++i) {
                const int key = first_key + i * 8 + lane.g;
                if (key < keys_seen.first || key >= keys_seen.end) p[i / 2][n][i % 2 * 2 + e] = -INFINITY;
              }
            }
#pragma unroll
            for (int i = 0; i < 2 * kM; ++i) {
              float &score = p[i / 2][n][i % 2 * 2 + e], &gradient = dp[i / 2][n][i % 2 * 2 + e];
              score = fast_exp2(score * factor - shift);
              gradient = score * (gradient - delta);
            }
          } else {
            const int position = c < tile.rows ? tile.position(c) : 0;
            const uint64_t row_key = of.drops() ? of.dropout_key(sample, head, position) : 0;
#pragma unroll
            for (int i = 0; i < 2 * kM; ++i) {
              const int key = first_key + i * 8 + lane.g;
              float &product = p[i / 2][n][i % 2 * 2 + e], &gradient = dp[i / 2][n][i % 2 * 2 + e];
              const auto score = of.score(product, head_slope, sample, key, position);
              const float kept = of.drops() ? of.kept(row_key, key) : 1.0f;
              const bool hidden = key < keys_seen.first || key >= keys_seen.end;
              const float probability = hidden ? 0.0f : fast_exp2(score.value * factor - shift);
              gradient = hidden ? 0.0f : probability * (gradient * kept - delta) * score.slope;
              product = probability * kept;
            }
          }
        }
      }
      add_scored_rows<T>(dv, lane, p, douts);
      add_scored_rows<T>(dk, lane, dp, queries);
    }
    head = next_head;
    at = next;
  }
  wait_for_copies<0>();
  __syncthreads();  // keys and values are there, though nobody may have seen them
  float ones[2 * kM], scales[2 * kM];
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    ones[i] = 1.0f;
    scales[i] = of.scale;
  }
  const int64_t to_at = kv_at + row0 * of.kv_stride;
  const int rows = key_rows - row0;
  if (grads.dk != nullptr) {
    store_rows<kD>(dk, scales, lane, keys + row0 * kD, rows, of.head_dim, grads.dk + to_at, of.kv_stride);
    store_rows<kD>(dv, ones, lane, values + row0 * kD, rows, of.head_dim, grads.dv + to_at, of.kv_stride);
  } else {
    store_rows<kD>(dk, scales, lane, rows, of.head_dim, grads.dk_sums + to_at, of.kv_stride);
    store_rows<kD>(dv, ones, lane, rows, of.head_dim, grads.dv_sums + to_at, of.kv_stride);
  }
}

}  // namespace

template <typename T>
void attention_backward_by_matrix_units(Queue& on, const AttentionArgs<T>& args, int64_t batch,
                                        const BackwardOut<T>& to) {
  for_shape(args, [&]<int kD, bool kPlain>() {
    using Queries = QueryGradients<kD, kPlain>;
    const TileOrder of_queries(blocks_for(args.queries, Queries::kRows), args.heads, batch);
    launch(on, {{of_queries.blocks()}, {Queries::kThreads}, Queries::kBytes},
           attention_matrix_query_gradients<kD, T, kPlain>, args, of_queries, to);
    using Keys = KeyGradients<kD, kPlain>;
    const TileOrder of_keys(blocks_for(args.tokens, Keys::kRows), args.heads / args.group, batch);
    launch(on, {{of_keys.blocks()}, {Keys::kThreads}, Keys::kBytes}, attention_matrix_key_gradients<kD, T, kPlain>,
           args, of_keys, to);
  });
}

#define RT_INSTANTIATE(T) \
  template void attention_backward_by_matrix_units<T>(Queue&, const AttentionArgs<T>&, int64_t, const BackwardOut<T>&)
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
