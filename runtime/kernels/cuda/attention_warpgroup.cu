// Attention's forward pass by warpgroups. Scores of the next tile of keys are multiplied beside the values of the one
// before, while the other warpgroups compute probabilities.
#include "runtime/kernels/cuda/attention.h"
#include "runtime/kernels/cuda/attention_warpgroup.h"

namespace cairn::kernels::cuda {
namespace {

template <int kOfD>
struct WarpgroupForward {
  static constexpr int kD = kOfD, kGroups = kD == 64 ? 3 : 2, kKeys = 128, kStages = 2;
  static constexpr int kRows = kGroups * kWarpgroupRows, kThreads = (kGroups + 1) * kWarpgroup;
  static constexpr int kRowsBytes = PanelsOf<kD>::bytes(kRows), kTileBytes = PanelsOf<kD>::bytes(kKeys);
  /// For queries, for keys and values full and empty, and for the end of each warpgroup's reads.
  static constexpr int kBarriers = 1 + 4 * kStages + kGroups;
  static constexpr int64_t kBytes = kPanelAlign + kRowsBytes + 2 * kStages * kTileBytes + 8 * kBarriers;
  static_assert(kBytes <= kSharedOfHopper);
};

struct ForwardMaps {
  TensorMap q, k, v;
};

template <int kD, typename T>
__global__ void __launch_bounds__(WarpgroupForward<kD>::kThreads, 1)
    attention_warpgroup(const __grid_constant__ ForwardMaps maps, AttentionArgs<T> of, TileOrder order,
                        ForwardOut<T> to) {
#ifdef RT_ON_HOPPER
  using Of = WarpgroupForward<kD>;
  constexpr int kN = Of::kKeys / 8;
  RT_DYNAMIC_SHARED(unsigned char, dynamic);
  unsigned char* const all = dynamic + to_panel(shared_at(dynamic));
  T* const queries = reinterpret_cast<T*>(all);
  const SharedAt queries_at = shared_at(all), keys_at = queries_at + Of::kRowsBytes;
  const SharedAt values_at = keys_at + Of::kStages * Of::kTileBytes;
  const SharedAt queries_full = values_at + Of::kStages * Of::kTileBytes, keys_full = queries_full + 8;
  const SharedAt values_full = keys_full + 8 * Of::kStages, keys_empty = values_full + 8 * Of::kStages;
  const SharedAt values_empty = keys_empty + 8 * Of::kStages, read = values_empty + 8 * Of::kStages;
  const int thread = static_cast<int>(threadIdx.x), warp = warp_of_block();
  if (thread == 0) {
    fetch_map(maps.q);
    fetch_map(maps.k);
    fetch_map(maps.v);
    init_barrier(queries_full, 1);
    for (int s = 0; s < Of::kStages; ++s) {
      init_barrier(keys_full + 8 * s, 1);
      init_barrier(values_full + 8 * s, 1);
      init_barrier(keys_empty + 8 * s, 4 * Of::kGroups);
      init_barrier(values_empty + 8 * s, 4 * Of::kGroups);
    }
    for (int g = 0; g < Of::kGroups; ++g) init_barrier(read + 8 * g, 4);
    publish_barriers();
  }
  __syncthreads();
  const auto [head, sample, rank] = order.place(blockIdx.x);
  const int number = static_cast<int>(order.tiles) - 1 - rank;  // those that see most begin first
  const QueryTile tile = of.tile(sample, number, Of::kRows);
  KeyTiles<Of::kKeys> tiles(of, sample, tile);

  if (warp < 4) {
    give_registers<RegistersOf<Of::kGroups>::kCopying>();
    if (thread != 0) return;
    arrive_expecting(queries_full, Of::kRowsBytes);
    for (int g = 0; g < Of::kGroups; ++g) {
      begin_rows<kD, kWarpgroupRows>(queries_at + g * PanelsOf<kD>::bytes(kWarpgroupRows), maps.q, queries_full,
                                     tile.index + g * kWarpgroupRows, head, sample);
    }
    Stage<Of::kStages> stage;
    for (int j = 0; j < tiles.count; ++j, stage.next()) {
      const int key = tiles.key0 + j * Of::kKeys, kv_head = head / of.group, s = stage.at;
      wait_barrier(keys_empty + 8 * s, stage.parity ^ 1);
      arrive_expecting(keys_full + 8 * s, Of::kTileBytes);
      begin_rows<kD, Of::kKeys>(keys_at + s * Of::kTileBytes, maps.k, keys_full + 8 * s, key, kv_head, sample);
      wait_barrier(values_empty + 8 * s, stage.parity ^ 1);
      arrive_expecting(values_full + 8 * s, Of::kTileBytes);
      begin_rows<kD, Of::kKeys>(values_at + s * Of::kTileBytes, maps.v, values_full + 8 * s, key, kv_head, sample);
    }
    return;
  }

  take_registers<RegistersOf<Of::kGroups>::kMultiplying>();
  const int group = warp / 4 - 1, group_row = group * kWarpgroupRows, row0 = group_row + warp % 4 * kSquare;
  const Lane<kD> lane;
  const Seen seen = seen_by(of, sample, tile, group_row, kWarpgroupRows);
  tiles.see(seen);
  const int first = tiles.first, end = tiles.end;
  const float factor = of.scale * kLog2E;  // of scores as they are kept
  const SharedAt own = queries_at + group * PanelsOf<kD>::bytes(kWarpgroupRows);
  const auto leave = [&](SharedAt barrier) {
    if (lane.lane == 0) arrive(barrier);
  };
  float max[2], sum[2], shrink[2], p[kN][4], sums[kD / 8][4];
  uint32_t words[kN / 2][4];
  const float first_score = of.sinks != nullptr ? of.sinks[head] * (kLog2E / factor) : -INFINITY;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    max[half] = first_score;
    sum[half] = of.sinks != nullptr && lane.t == 0 ? 1.0f : 0.0f;  // a row's sum is that of its four lanes
  }
#pragma unroll
  for (int n = 0; n < kD / 8; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;

  // Scores to probabilities; sums of what was seen before are to shrink.
  const auto find_probabilities = [&](int at) {
    const bool whole = seen.whole(at, Of::kKeys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!whole) {
        leave_out_unseen<Of::kRows>(of, sample, number, row0 + half * 8 + lane.g, half, at + lane.t * 2, p);
      }
      float largest = max[half];
#pragma unroll
      for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(p[n][2 * half], p[n][2 * half + 1]));
      largest = quad_max(largest);
      // Where nothing has been seen yet there is nothing to take a difference with.
      const float shift = largest == -INFINITY ? 0.0f : largest * factor;
      shrink[half] = fast_exp2(max[half] * factor - shift);
      float added = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          p[n][e] = fast_exp2(p[n][e] * factor - shift);
          added += p[n][e];
        }
      }
      sum[half] = sum[half] * shrink[half] + added;
      max[half] = largest;
    }
  };
  const auto shrink_sums = [&] {
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] *= shrink[e / 2];
    }
  };

  wait_barrier(queries_full, 0);
  Stage<Of::kStages> stage, before;  // of the next tile's keys, and of the values that are due
  const auto pass = [&] {
    wait_barrier(keys_full + 8 * stage.at, stage.parity);
    leave(keys_empty + 8 * stage.at);
    wait_barrier(values_full + 8 * stage.at, stage.parity);
    leave(values_empty + 8 * stage.at);
    stage.next();
  };
  for (int j = 0; j < first; ++j) pass();
  if (first < end) {
    before = stage;
    wait_barrier(keys_full + 8 * stage.at, stage.parity);
    settled(p);
    fence_products();
    begin_rows_product<T, kD, Of::kKeys>(p, own, keys_at + stage.at * Of::kTileBytes);
    end_products();
    wait_for_products<0>();
    settled(p);
    leave(keys_empty + 8 * stage.at);
    stage.next();
    find_probabilities(tiles.key0 + first * Of::kKeys);
    to_words<T>(p, words);
#pragma unroll 1
    for (int j = first + 1; j < end; ++j) {
      wait_barrier(keys_full + 8 * stage.at, stage.parity);
      settled(p);
      settled(sums);
      fence_products();
      begin_rows_product<T, kD, Of::kKeys>(p, own, keys_at + stage.at * Of::kTileBytes);
      end_products();
      wait_barrier(values_full + 8 * before.at, before.parity);
      begin_words_product<T, kD, Of::kKeys>(sums, words, values_at + before.at * Of::kTileBytes);
      end_products();
      wait_for_products<1>();
      settled(p);
      leave(keys_empty + 8 * stage.at);
      stage.next();
      find_probabilities(tiles.key0 + j * Of::kKeys);
      wait_for_products<0>();
      settled(sums);
      leave(values_empty + 8 * before.at);
      before.next();
      to_words<T>(p, words);
      shrink_sums();
    }
    wait_barrier(values_full + 8 * before.at, before.parity);
    settled(sums);
    fence_products();
    begin_words_product<T, kD, Of::kKeys>(sums, words, values_at + before.at * Of::kTileBytes);
    end_products();
    wait_for_products<0>();
    settled(sums);
    leave(values_empty + 8 * before.at);
  }
  for (int j = end; j < tiles.count; ++j) pass();

  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = quad_sum(sum[half]);
    factors[half] = 1.0f / sum[half];
    const int r = row0 + half * 8 + lane.g;
    if (to.logsumexp != nullptr && lane.t == 0 && r < tile.rows) {
      to.logsumexp[(static_cast<int64_t>(sample) * of.heads + head) * of.queries + tile.index + r] =
          max[half] * (factor * kLn2) + logf(sum[half]);
    }
  }
  leave(read + 8 * group);
  wait_barrier(read + 8 * group, 0);  // none of the warpgroup's warps reads its queries any more
  store_rows<kD>(reinterpret_cast<const float(&)[1][kD / 8][4]>(sums), factors, lane, queries + row0 * kD,
                 tile.rows - row0, of.head_dim, to.out + (tile.row + row0) * of.out_stride + head * of.head_dim,
                 of.out_stride);
#endif
}

}  // namespace

bool has_warpgroups() {
#ifdef __CUDACC__
  constexpr int kHopper = 9;
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == kHopper;
#else
  return simt::has_warpgroups();
#endif
}

template <typename T>
void attention_by_warpgroups(Queue& on, const AttentionArgs<T>& args, int64_t batch, const ForwardOut<T>& to) {
  const auto order = [&]<int kD>() {
    using Of = WarpgroupForward<kD>;
    const AttentionMaps<T> make{args, batch};
    ForwardMaps maps{};
    int error = make.of_queries(args.q, args.q_stride, kWarpgroupRows, &maps.q);
    if (error == 0) error = make.of_keys(args.k, Of::kKeys, &maps.k);
    if (error == 0) error = make.of_keys(args.v, Of::kKeys, &maps.v);
    if (error != 0 && on.error == 0) on.error = error;
    if (error != 0) return;
    const TileOrder tiles(blocks_for(args.queries, Of::kRows), args.heads, batch);
    launch_on_hopper(on, {{tiles.blocks()}, {Of::kThreads}, Of::kBytes}, attention_warpgroup<kD, T>, maps, args, tiles,
                     to);
  };
  if (batch == 0 || args.queries == 0) return;
  args.head_dim <= 64 ? order.template operator()<64>() : order.template operator()<128>();
}

#define RT_INSTANTIATE(T) \
  template void attention_by_warpgroups<T>(Queue&, const AttentionArgs<T>&, int64_t, const ForwardOut<T>&)
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
