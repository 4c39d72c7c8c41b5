// Attention's gradients by warpgroups, from probabilities that are computed again by the saved logsumexp: the two
// kernels of attention_matrix_backward.cu, so no two blocks add to one element, and nothing is kept between them but
// the deltas. `scale` is a factor of the sums, not of the rounded gradients of scores.
#include "runtime/kernels/cuda/attention_warpgroup.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kRows = kGroups * kWarpgroupRows, kBlock = (kGroups + 1) * kWarpgroup;

/// Two tiles of rows, two of columns in each room, kFloats of each column, and barriers: of rows, of rooms full and
/// empty, and of the end of each warpgroup's reads.
template <int kOfD, int kOfColumns, int kOfStages, int kFloats>
struct WarpgroupBackward {
  static constexpr int kD = kOfD, kColumns = kOfColumns, kStages = kOfStages;
  static constexpr int kRowsBytes = PanelsOf<kD>::bytes(kRows), kTileBytes = PanelsOf<kD>::bytes(kColumns);
  static constexpr int kBarriers = 1 + 2 * kStages + kGroups, kStatsBytes = kStages * kFloats * kColumns * 4;
  static constexpr int64_t kBytes =
      kPanelAlign + 2 * kRowsBytes + 2 * kStages * kTileBytes + kStatsBytes + 8 * kBarriers;
  static_assert(kBytes <= kSharedOfHopper);
};
template <int kD>
using QueryGradients = WarpgroupBackward<kD, kD == 64 ? 128 : 64, 3, 0>;
template <int kD>
using KeyGradients = WarpgroupBackward<kD, 64, 2, 2>;

/// Places in a block's shared memory.
template <typename Of>
struct Rooms {
  SharedAt first, second;  // tiles of rows
  SharedAt tiles;          // for each stage the two of columns
  SharedAt stats, rows_full, full, empty, read;

  __device__ explicit Rooms(SharedAt at)
      : first(at),
        second(first + Of::kRowsBytes),
        tiles(second + Of::kRowsBytes),
        stats(tiles + 2 * Of::kStages * Of::kTileBytes),
        rows_full(stats + Of::kStatsBytes),
        full(rows_full + 8),
        empty(full + 8 * Of::kStages),
        read(empty + 8 * Of::kStages) {}
  __device__ SharedAt tile(int stage) const { return tiles + 2 * stage * Of::kTileBytes; }

  /// By one thread. `arrivals`: at a full room.
  __device__ void init(int arrivals) const {
    init_barrier(rows_full, 1);
    for (int s = 0; s < Of::kStages; ++s) {
      init_barrier(full + 8 * s, arrivals);
      init_barrier(empty + 8 * s, 4 * kGroups);
    }
    for (int g = 0; g < kGroups; ++g) init_barrier(read + 8 * g, 4);
    publish_barriers();
  }
  /// Begins to copy the tiles of rows from `row` on.
  __device__ void begin_all_rows(const TensorMap& first_map, const TensorMap& second_map, int row, int head,
                                 int sample) const {
    constexpr int kD = Of::kD;
    arrive_expecting(rows_full, 2 * Of::kRowsBytes);
    for (int g = 0; g < kGroups; ++g) {
      const int behind = g * PanelsOf<kD>::bytes(kWarpgroupRows), at = row + g * kWarpgroupRows;
      begin_rows<kD, kWarpgroupRows>(first + behind, first_map, rows_full, at, head, sample);
      begin_rows<kD, kWarpgroupRows>(second + behind, second_map, rows_full, at, head, sample);
    }
  }
  /// The same of the two tiles of columns.
  __device__ void begin_columns(int stage, const TensorMap& first_map, const TensorMap& second_map, int row, int head,
                                int sample) const {
    const SharedAt to = tile(stage), barrier = full + 8 * stage;
    arrive_expecting(barrier, 2 * Of::kTileBytes);
    begin_rows<Of::kD, Of::kColumns>(to, first_map, barrier, row, head, sample);
    begin_rows<Of::kD, Of::kColumns>(to + Of::kTileBytes, second_map, barrier, row, head, sample);
  }
};

template <int kColumns>
__device__ __forceinline__ void clear(float (&sums)[kColumns][4]) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;
}

struct BackwardMaps {
  TensorMap q, k, v, dout;
};

template <int kD, typename T>
__global__ void __launch_bounds__(kBlock, 1)
    attention_warpgroup_query_gradients(const __grid_constant__ BackwardMaps maps, AttentionArgs<T> of, TileOrder order,
                                        BackwardOut<T> grads) {
#ifdef RT_ON_HOPPER
  using Of = QueryGradients<kD>;
  constexpr int kN = Of::kColumns / 8;
  RT_DYNAMIC_SHARED(unsigned char, dynamic);
  unsigned char* const all = dynamic + to_panel(shared_at(dynamic));
  const Rooms<Of> rooms(shared_at(all));
  const int thread = static_cast<int>(threadIdx.x), warp = warp_of_block();
  if (thread == 0) {
    fetch_map(maps.q);
    fetch_map(maps.k);
    fetch_map(maps.v);
    fetch_map(maps.dout);
    rooms.init(1);
  }
  __syncthreads();
  const auto [head, sample, rank] = order.place(blockIdx.x);
  const int number = static_cast<int>(order.tiles) - 1 - rank;  // those that see most begin first
  const QueryTile tile = of.tile(sample, number, kRows);
  KeyTiles<Of::kColumns> tiles(of, sample, tile);

  if (warp < 4) {
    give_registers<RegistersOf<kGroups>::kCopying>();
    if (thread != 0) return;
    rooms.begin_all_rows(maps.q, maps.dout, tile.index, head, sample);
    Stage<Of::kStages> stage;
    for (int j = 0; j < tiles.count; ++j, stage.next()) {
      wait_barrier(rooms.empty + 8 * stage.at, stage.parity ^ 1);
      rooms.begin_columns(stage.at, maps.k, maps.v, tiles.key0 + j * Of::kColumns, head / of.group, sample);
    }
    return;
  }

  take_registers<RegistersOf<kGroups>::kMultiplying>();
  const int group = warp / 4 - 1, group_row = group * kWarpgroupRows, row0 = group_row + warp % 4 * kSquare;
  const Lane<kD> lane;
  const Seen seen = seen_by(of, sample, tile, group_row, kWarpgroupRows);
  tiles.see(seen);
  const int first = tiles.first, end = tiles.end;
  const float factor = of.scale * kLog2E;
  const int64_t out_at = tile.row * of.out_stride + head * of.head_dim;
  const int64_t stats_at = (static_cast<int64_t>(sample) * of.heads + head) * of.queries + tile.index;
  const auto leave = [&](SharedAt barrier) {
    if (lane.lane == 0) arrive(barrier);
  };

  // Beyond the tile queries and their douts are zeros, and so are the gradients of scores.
  float logsumexp[2], delta[2], sums[kD / 8][4], p[kN][4], dp[kN][4];
  uint32_t words[kN / 2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row0 + half * 8 + lane.g;
    float sum = 0;
    if (r < tile.rows) {
#pragma unroll
      for (int c = 0; c < kD / kChunk; c += 4) {  // a row's four lanes
        const int channel = (c + lane.t) * kChunk;
        if (channel >= of.head_dim) break;
        const int64_t at = out_at + r * of.out_stride + channel;
        const auto out = load_pack<kChunk>(grads.out + at), dout = load_pack<kChunk>(grads.dout + at);
#pragma unroll
        for (int k = 0; k < kChunk; ++k) sum += load_f32(out.at[k]) * load_f32(dout.at[k]);
      }
    }
    delta[half] = quad_sum(sum);
    logsumexp[half] = r < tile.rows ? grads.logsumexp[stats_at + r] * kLog2E : 0.0f;
    if (lane.t == 0 && r < tile.rows) grads.deltas[stats_at + r] = delta[half];
  }
  clear(sums);

  const SharedAt own = rooms.first + group * PanelsOf<kD>::bytes(kWarpgroupRows);
  wait_barrier(rooms.rows_full, 0);
  Stage<Of::kStages> stage;
  int before = 0;  // the room whose keys the sums still get
  const auto pass = [&] {
    wait_barrier(rooms.full + 8 * stage.at, stage.parity);
    leave(rooms.empty + 8 * stage.at);
    stage.next();
  };
  for (int j = 0; j < first; ++j) pass();
#pragma unroll 1
  for (int j = first; j < end; ++j) {
    const SharedAt keys = rooms.tile(stage.at);
    wait_barrier(rooms.full + 8 * stage.at, stage.parity);
    settled(p);
    settled(dp);
    fence_products();
    begin_rows_product<T, kD, Of::kColumns>(p, own, keys);
    end_products();
    begin_rows_product<T, kD, Of::kColumns>(dp, own + Of::kRowsBytes, keys + Of::kTileBytes);
    end_products();
    wait_for_products<1>();  // the last tile's sums, and these scores
    settled(p);
    settled(sums);
    if (j > first) leave(rooms.empty + 8 * before);
    const int at = tiles.key0 + j * Of::kColumns;
    const bool whole = seen.whole(at, Of::kColumns);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!whole) {
        leave_out_unseen<kRows>(of, sample, number, row0 + half * 8 + lane.g, half, at + lane.t * 2, p);
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) p[n][e] = fast_exp2(p[n][e] * factor - logsumexp[half]);
      }
    }
    wait_for_products<0>();
    settled(dp);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) p[n][e] *= dp[n][e] - delta[e / 2];
    }
    to_words<T>(p, words);
    settled(sums);
    fence_products();
    begin_words_product<T, kD, Of::kColumns>(sums, words, keys);
    end_products();
    before = stage.at;
    stage.next();
  }
  wait_for_products<0>();
  settled(sums);
  if (first < end) leave(rooms.empty + 8 * before);
  for (int j = end; j < tiles.count; ++j) pass();

  const float factors[2] = {of.scale, of.scale};
  leave(rooms.read + 8 * group);
  wait_barrier(rooms.read + 8 * group, 0);  // none of the warpgroup's warps reads its queries any more
  store_rows<kD>(reinterpret_cast<const float(&)[1][kD / 8][4]>(sums), factors, lane,
                 reinterpret_cast<T*>(all) + row0 * kD, tile.rows - row0, of.head_dim,
                 grads.dq + (tile.row + row0) * of.q_stride + head * of.head_dim, of.q_stride);
#endif
}

/// Rows are keys, columns queries.
template <int kD, typename T>
__global__ void __launch_bounds__(kBlock, 1)
    attention_warpgroup_key_gradients(const __grid_constant__ BackwardMaps maps, AttentionArgs<T> of, TileOrder order,
                                      BackwardOut<T> grads) {
#ifdef RT_ON_HOPPER
  using Of = KeyGradients<kD>;
  constexpr int kN = Of::kColumns / 8;
  RT_DYNAMIC_SHARED(unsigned char, dynamic);
  unsigned char* const all = dynamic + to_panel(shared_at(dynamic));
  float* const stats = reinterpret_cast<float*>(all + 2 * Of::kRowsBytes + 2 * Of::kStages * Of::kTileBytes);
  const Rooms<Of> rooms(shared_at(all));
  const int thread = static_cast<int>(threadIdx.x), warp = warp_of_block();
  if (thread == 0) {
    fetch_map(maps.q);
    fetch_map(maps.k);
    fetch_map(maps.v);
    fetch_map(maps.dout);
    rooms.init(1 + kWarp);
  }
  __syncthreads();
  const auto [kv_head, sample, number] = order.place(blockIdx.x);  // those that most see begin first
  const int key0 = number * kRows;
  const int key_rows = of.tokens - key0 < kRows ? of.tokens - key0 : kRows;

  // Tiles of queries that see any of the keys follow each other, as what they see ascends.
  int low = 0, high = (of.queries + Of::kColumns - 1) / Of::kColumns;
  while (low < high && of.visible(sample, of.tile(sample, low, Of::kColumns)).end <= key0) ++low;
  while (low < high && of.visible(sample, of.tile(sample, high - 1, Of::kColumns)).first >= key0 + key_rows) --high;
  const int first_head = kv_head * of.group, end_head = first_head + of.group;

  if (warp < 4) {
    give_registers<RegistersOf<kGroups>::kCopying>();
    if (warp != 0) return;
    if (thread == 0) rooms.begin_all_rows(maps.k, maps.v, key0, kv_head, sample);
    Stage<Of::kStages> stage;
    for (int head = first_head; head < end_head; ++head) {
      for (int at = low; at < high; ++at, stage.next()) {
        const QueryTile tile = of.tile(sample, at, Of::kColumns);
        const SharedAt full = rooms.full + 8 * stage.at;
        wait_barrier(rooms.empty + 8 * stage.at, stage.parity ^ 1);
        if (thread == 0) rooms.begin_columns(stage.at, maps.q, maps.dout, tile.index, head, sample);
        // A query has its logsumexp, in powers of 2, then its delta. Beyond the tile they are zeros.
        const int64_t stats_at = (static_cast<int64_t>(sample) * of.heads + head) * of.queries + tile.index;
        float* const of_stage = stats + stage.at * 2 * Of::kColumns;
#pragma unroll
        for (int c = thread; c < Of::kColumns; c += kWarp) {
          const bool there = c < tile.rows;
          keep_float(of_stage + c, there ? grads.logsumexp[stats_at + c] * kLog2E : 0.0f);
          keep_float(of_stage + Of::kColumns + c, there ? grads.deltas[stats_at + c] : 0.0f);
        }
        arrive(full);
      }
    }
    return;
  }

  take_registers<RegistersOf<kGroups>::kMultiplying>();
  const int group = warp / 4 - 1, group_row = group * kWarpgroupRows, row0 = group_row + warp % 4 * kSquare;
  const Lane<kD> lane;
  const int first_key = key0 + group_row, own_key = key0 + row0 + lane.g;
  const float factor = of.scale * kLog2E;
  const auto leave = [&](SharedAt barrier) {
    if (lane.lane == 0) arrive(barrier);
  };
  float dk[kD / 8][4], dv[kD / 8][4], p[kN][4], dp[kN][4];
  uint32_t p_words[kN / 2][4], dp_words[kN / 2][4];
  clear(dk);
  clear(dv);
  const SharedAt own = rooms.first + group * PanelsOf<kD>::bytes(kWarpgroupRows);
  wait_barrier(rooms.rows_full, 0);
  Stage<Of::kStages> stage;
  for (int head = first_head; head < end_head; ++head) {
#pragma unroll 1
    for (int at = low; at < high; ++at, stage.next()) {
      const QueryTile tile = of.tile(sample, at, Of::kColumns);
      const Seen seen = seen_by(of, sample, tile, 0, Of::kColumns);
      const SharedAt queries = rooms.tile(stage.at), douts = queries + Of::kTileBytes;
      wait_barrier(rooms.full + 8 * stage.at, stage.parity);
      if (seen.none_of(first_key, kWarpgroupRows)) {
        leave(rooms.empty + 8 * stage.at);
        continue;
      }
      settled(p);
      settled(dp);
      fence_products();
      begin_rows_product<T, kD, Of::kColumns>(p, own, queries);
      end_products();
      begin_rows_product<T, kD, Of::kColumns>(dp, own + Of::kRowsBytes, douts);
      end_products();
      wait_for_products<1>();
      settled(p);
      const bool whole = seen.whole(first_key, kWarpgroupRows) && tile.rows == Of::kColumns;
      const float* const shifts = stats + stage.at * 2 * Of::kColumns + lane.t * 2;
      const float* const deltas = shifts + Of::kColumns;
      if (!whole) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int c = made_here(n * 8) + lane.t * 2 + e;
            typename AttentionArgs<T>::Keys keys_seen{0, 0};  // beyond the tile: sees nothing
            if (c < tile.rows) keys_seen = of.visible(sample, tile.position(c));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int key = own_key + half * 8;
              if (key < keys_seen.first || key >= keys_seen.end) p[n][2 * half + e] = -INFINITY;
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const auto of_columns = kept_two(shifts + n * 8);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float shift = of_columns.at[e];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            p[n][2 * half + e] = fast_exp2(p[n][2 * half + e] * factor - shift);
          }
        }
      }
      to_words<T>(p, p_words);
      settled(dv);
      fence_products();
      begin_words_product<T, kD, Of::kColumns>(dv, p_words, douts);
      end_products();
      wait_for_products<1>();
      settled(dp);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const auto of_columns = kept_two(deltas + n * 8);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float delta = of_columns.at[e];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            dp[n][2 * half + e] = p[n][2 * half + e] * (dp[n][2 * half + e] - delta);
          }
        }
      }
      to_words<T>(dp, dp_words);
      settled(dk);
      fence_products();
      begin_words_product<T, kD, Of::kColumns>(dk, dp_words, queries);
      end_products();
      wait_for_products<0>();
      settled(dv);
      settled(dk);
      leave(rooms.empty + 8 * stage.at);
    }
  }

  const float ones[2] = {1.0f, 1.0f}, scales[2] = {of.scale, of.scale};
  const int64_t to_at = (sample * of.key_rows + key0 + row0) * of.kv_stride + kv_head * of.head_dim;
  const int rows = key_rows - row0;
  const auto& dk_sums = reinterpret_cast<const float(&)[1][kD / 8][4]>(dk);
  const auto& dv_sums = reinterpret_cast<const float(&)[1][kD / 8][4]>(dv);
  if (grads.dk == nullptr) {
    store_rows<kD>(dk_sums, scales, lane, rows, of.head_dim, grads.dk_sums + to_at, of.kv_stride);
    store_rows<kD>(dv_sums, ones, lane, rows, of.head_dim, grads.dv_sums + to_at, of.kv_stride);
    return;
  }
  leave(rooms.read + 8 * group);
  wait_barrier(rooms.read + 8 * group, 0);  // none of the warpgroup's warps reads its keys and values any more
  T* const room = reinterpret_cast<T*>(all) + row0 * kD;
  store_rows<kD>(dk_sums, scales, lane, room, rows, of.head_dim, grads.dk + to_at, of.kv_stride);
  store_rows<kD>(dv_sums, ones, lane, room + Of::kRowsBytes / 2, rows, of.head_dim, grads.dv + to_at, of.kv_stride);
#endif
}

}  // namespace

template <typename T>
void attention_backward_by_warpgroups(Queue& on, const AttentionArgs<T>& args, int64_t batch,
                                      const BackwardOut<T>& to) {
  const auto order = [&]<int kD>() {
    // Rows of one kernel are columns of the other, with boxes of their own.
    using Queries = QueryGradients<kD>;
    using Keys = KeyGradients<kD>;
    static_assert(Keys::kColumns == kWarpgroupRows);
    const AttentionMaps<T> make{args, batch};
    BackwardMaps of_queries{}, of_keys{};
    int error = make.of_queries(args.q, args.q_stride, kWarpgroupRows, &of_queries.q);
    if (error == 0) error = make.of_queries(to.dout, args.out_stride, kWarpgroupRows, &of_queries.dout);
    if (error == 0) error = make.of_keys(args.k, Queries::kColumns, &of_queries.k);
    if (error == 0) error = make.of_keys(args.v, Queries::kColumns, &of_queries.v);
    of_keys = of_queries;
    if (error == 0) error = make.of_keys(args.k, kWarpgroupRows, &of_keys.k);
    if (error == 0) error = make.of_keys(args.v, kWarpgroupRows, &of_keys.v);
    if (error != 0 && on.error == 0) on.error = error;
    if (error != 0) return;
    const TileOrder query_tiles(blocks_for(args.queries, kRows), args.heads, batch);
    launch_on_hopper(on, {{query_tiles.blocks()}, {kBlock}, Queries::kBytes},
                     attention_warpgroup_query_gradients<kD, T>, of_queries, args, query_tiles, to);
    const TileOrder key_tiles(blocks_for(args.tokens, kRows), args.heads / args.group, batch);
    launch_on_hopper(on, {{key_tiles.blocks()}, {kBlock}, Keys::kBytes}, attention_warpgroup_key_gradients<kD, T>,
                     of_keys, args, key_tiles, to);
  };
  if (batch == 0 || args.queries == 0) return;
  args.head_dim <= 64 ? order.template operator()<64>() : order.template operator()<128>();
}

#define RT_INSTANTIATE(T) \
  template void attention_backward_by_warpgroups<T>(Queue&, const AttentionArgs<T>&, int64_t, const BackwardOut<T>&)
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
