// Attention's forward pass by matrix units. A block has a tile of queries of one head, and visits the keys that they
// see tile by tile: the next tile is copied while one is multiplied.
#include "runtime/kernels/cuda/attention_matrix.h"

namespace cairn::kernels::cuda {
namespace {

/// Of so many warps with kFragments * 16 queries each.
template <int kOfD, int kOfWarps, int kOfFragments, int kOfKeys>
struct Forward {
  static constexpr int kD = kOfD, kFragments = kOfFragments, kKeys = kOfKeys, kThreads = kOfWarps * kWarp;
  static constexpr int kWarpRows = kFragments * kSquare, kRows = kOfWarps * kWarpRows;
  static constexpr int64_t kBytes = (kRows + 4 * kKeys) * kD * 2;
  static_assert(kBytes <= kSharedOfCards);
};
template <int kD, bool kPlain>
using ForwardOf = Forward<kD, 4, kPlain && kD == 64 ? 2 : 1, 64>;

template <int kD, typename T, bool kPlain>
__global__ void __launch_bounds__(ForwardOf<kD, kPlain>::kThreads, 2)
    attention_matrix(AttentionArgs<T> of, TileOrder order, ForwardOut<T> to) {
  using Of = ForwardOf<kD, kPlain>;
  constexpr int kM = Of::kFragments, kN = Of::kKeys / 8;
  RT_DYNAMIC_SHARED(T, queries);
  const SharedAt queries_at = shared_at(queries), room = queries_at + Of::kRows * Lane<kD>::kRowBytes;
  const Lane<kD> lane;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, row0 = warp * Of::kWarpRows;
  const auto [head, sample, rank] = order.place(blockIdx.x);
  const int number = static_cast<int>(order.tiles) - 1 - rank;  // those that see most begin first
  const QueryTile tile = of.tile(sample, number, Of::kRows);
  const auto range = of.visible(sample, tile);
  const Seen seen = seen_by(of, sample, tile, row0, Of::kWarpRows);
  const float head_slope = !kPlain && of.slopes != nullptr ? of.slopes[head] : 0.0f;
  const float factor = kPlain ? of.scale * kLog2E : kLog2E;  // of scores as they are kept
  constexpr int kTileBytes = Of::kKeys * Lane<kD>::kRowBytes;
  const Copies<kD, Of::kThreads> copies(of.head_dim);
  copies.template begin<Of::kRows>(of.q + tile.row * of.q_stride + head * of.head_dim + copies.first(of.q_stride),
                                   of.q_stride, tile.rows, queries_at);
  int key0 = range.first / Of::kKeys * Of::kKeys;
  const int64_t kv_at = (sample * of.key_rows + key0) * of.kv_stride + head / of.group * of.head_dim;
  const T *next_keys = of.k + kv_at + copies.first(of.kv_stride),
          *next_values = of.v + kv_at + copies.first(of.kv_stride);
  const auto begin = [&](int first_key, int stage) {
    const SharedAt keys = room + 2 * stage * kTileBytes;
    copies.template begin<Of::kKeys>(next_keys, of.kv_stride, of.tokens - first_key, keys);
    copies.template begin<Of::kKeys>(next_values, of.kv_stride, of.tokens - first_key, keys + kTileBytes);
    end_copy_group();
    next_keys += Of::kKeys * of.kv_stride;
    next_values += Of::kKeys * of.kv_stride;
  };
  begin(key0, 0);

  const SharedAt own = queries_at + row0 * Lane<kD>::kRowBytes;
  // Of the row whose floats 2 * half and 2 * half + 1 of fragment m this thread has. Rows beyond the tile see what the
  // last one sees.
  const auto position_of = [&](int m, int half) {
    const QueryTile here = of.tile(sample, made_here(number), Of::kRows);
    const int r = row0 + m * kSquare + half * 8 + lane.g;
    return here.position(r < here.rows ? r : here.rows - 1);
  };
  float max[2 * kM], sum[2 * kM], sums[kM][kD / 8][4];
  const float first_score = of.sinks != nullptr ? of.sinks[head] * (kLog2E / factor) : -INFINITY;
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    max[i] = first_score;
    sum[i] = of.sinks != nullptr && lane.t == 0 ? 1.0f : 0.0f;  // a row's sum is that of its four lanes
  }
  clear(sums);

  for (int stage = 0; key0 < range.end; key0 += Of::kKeys, stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // all see the tile, and nobody reads the one before any more
    if (key0 + Of::kKeys < range.end) begin(key0 + Of::kKeys, stage ^ 1);
    if (seen.none_of(key0, Of::kKeys)) continue;
    const SharedAt keys = room + 2 * stage * kTileBytes;
    float p[kM][kN][4];
    multiply_rows<T>(p, lane, own, keys);
    const int key_at = key0 + lane.t * 2;
    const bool whole = seen.whole(key0, Of::kKeys);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 2 * m + half;
        if constexpr (!kPlain) {
          const int position = position_of(m, half);
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
              p[m][n][e] = of.score(p[m][n][e], head_slope, sample, key_at + n * 8 + e % 2, position).value;
            }
          }
        }
        if (!whole) {
          const auto keys_seen = of.visible(sample, position_of(m, half));
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
              const int key = key_at + n * 8 + e % 2;
              if (key < keys_seen.first || key >= keys_seen.end) p[m][n][e] = -INFINITY;
            }
          }
        }
        float largest = max[i];
#pragma unroll
        for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(p[m][n][2 * half], p[m][n][2 * half + 1]));
        largest = quad_max(largest);
        // Where nothing has been seen yet there is nothing to take a difference with.
        const float shift = largest == -INFINITY ? 0.0f : largest * factor;
        const float shrink = fast_exp2(max[i] * factor - shift);
        float added = 0;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            p[m][n][e] = fast_exp2(p[m][n][e] * factor - shift);
            added += p[m][n][e];  // the sum is of all probabilities
          }
        }
        if (!kPlain && of.drops()) {
          const uint64_t row_key = of.dropout_key(sample, head, position_of(m, half));
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) p[m][n][e] *= of.kept(row_key, key_at + n * 8 + e % 2);
          }
        }
        sum[i] = sum[i] * shrink + added;
        max[i] = largest;
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) {
          sums[m][n][2 * half] *= shrink;
          sums[m][n][2 * half + 1] *= shrink;
        }
      }
    }
    add_scored_rows<T>(sums, lane, p, keys + kTileBytes);
  }

  float factors[2 * kM], top = -INFINITY;
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    sum[i] = quad_sum(sum[i]);
    factors[i] = 1.0f / sum[i];
    top = fmaxf(top, max[i]);
    const int r = row0 + i * 8 + lane.g;
    if (to.logsumexp != nullptr && lane.t == 0 && r < tile.rows) {
      to.logsumexp[(static_cast<int64_t>(sample) * of.heads + head) * of.queries + tile.index + r] =
          max[i] * (factor * kLn2) + logf(sum[i]);
    }
  }
  store_rows<kD>(sums, factors, lane, queries + row0 * kD, tile.rows - row0, of.head_dim,
                 to.out + (tile.row + row0) * of.out_stride + head * of.head_dim, of.out_stride);
  if (to.maxima == nullptr) return;
  float* const tops = reinterpret_cast<float*>(queries);
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
  __syncthreads();  // before rows are overwritten
  if (lane.lane == 0) tops[warp] = top;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < Of::kThreads / kWarp; ++w) top = fmaxf(top, tops[w]);
  const int64_t samples = order.pairs / order.heads;
  to.maxima[(head * samples + sample) * order.tiles + number] = top * (factor * kLn2);
}

template <int kD, typename T, bool kPlain>
void launch_forward(Queue& on, const AttentionArgs<T>& args, int64_t batch, const ForwardOut<T>& to) {
  using Of = ForwardOf<kD, kPlain>;
  const TileOrder order(blocks_for(args.queries, Of::kRows), args.heads, batch);
  launch(on, {{order.blocks()}, {Of::kThreads}, Of::kBytes}, attention_matrix<kD, T, kPlain>, args, order, to);
}

}  // namespace

template <typename T>
int matrix_tile_rows(const AttentionArgs<T>& args) {
  if (args.head_dim <= 64) return is_plain(args) ? ForwardOf<64, true>::kRows : ForwardOf<64, false>::kRows;
  return is_plain(args) ? ForwardOf<128, true>::kRows : ForwardOf<128, false>::kRows;
}

template <typename T>
void attention_by_matrix_units(Queue& on, const AttentionArgs<T>& args, int64_t batch, const ForwardOut<T>& to) {
  for_shape(args, [&]<int kD, bool kPlain>() { launch_forward<kD, T, kPlain>(on, args, batch, to); });
}

#define RT_INSTANTIATE(T)                                    \
  template int matrix_tile_rows<T>(const AttentionArgs<T>&); \
  template void attention_by_matrix_units<T>(Queue&, const AttentionArgs<T>&, int64_t, const ForwardOut<T>&)
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
