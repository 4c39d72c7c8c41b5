// A warp has a token in the router; a block has an expert where choices are counted and placed. So no two threads add
// to one number, and rows of an expert come in the order of choices.
#include "runtime/kernels/cuda/experts.h"

#include "runtime/kernels/cuda/group_tiles.h"
#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kMany = 4;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostGroups = 64;

/// RouterDims, as kernels have them.
struct Router {
  int64_t tokens;
  int experts, choices, groups, groups_per_token, group_size;
  bool renormalise, sigmoids;
  float scale;
  const float* bias;
  explicit Router(const RouterDims& d)
      : tokens(d.tokens),
        experts(static_cast<int>(d.experts)),
        choices(static_cast<int>(d.choices)),
        groups(static_cast<int>(d.groups)),
        groups_per_token(static_cast<int>(d.groups_per_token)),
        group_size(static_cast<int>(d.experts / d.groups)),
        renormalise(d.renormalise),
        sigmoids(d.sigmoid),
        scale(d.scale),
        bias(d.bias.address()) {}

  /// What decides between experts.
  __device__ __forceinline__ float merit(const float* p, int e) const {
    const float of = bias == nullptr ? p[e] : p[e] + bias[e];
    return isnan(of) ? -INFINITY : of;
  }
  /// What the weights are divided by.
  __device__ __forceinline__ float chosen_sum(const float* p, const int32_t* chosen) const {
    if (!renormalise) return 1;
    float sum = sigmoids ? 1e-20f : 0.0f;  // sigmoids may all be zero
    for (int j = 0; j < choices; ++j) sum += p[chosen[j]];
    return sum;
  }
};

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

/// The largest of the lanes' values and whose it is, the lowest of equals; -1: nobody's.
struct Best {
  float value = -INFINITY;
  int index = -1;
  __device__ __forceinline__ void take(float other, int of) {
    if (of >= 0 && (index < 0 || other > value || (other == value && of < index))) {
      value = other;
      index = of;
    }
  }
};
__device__ __forceinline__ Best warp_best(Best of) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, of.value, step);
    of.take(other, __shfl_xor_sync(kAllLanes, of.index, step));
  }
  return of;
}

/// A bit for each group that the token may choose from.
__device__ __forceinline__ uint64_t choose_groups(const Router& d, const float* p) {
  if (d.groups_per_token >= d.groups) return ~uint64_t{0};
  float merits[kMostGroups / kWarp] = {-INFINITY, -INFINITY};  // of groups lane, lane + 32
  for (int g = 0; g < d.groups; ++g) {
    float best = -INFINITY, second = -INFINITY;
    for (int i = static_cast<int>(threadIdx.x); i < d.group_size; i += kWarp) {
      const float m = d.merit(p, g * d.group_size + i);
      second = fmaxf(second, fminf(best, m));
      best = fmaxf(best, m);
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, best, step);
      second = fmaxf(fmaxf(second, __shfl_xor_sync(kAllLanes, second, step)), fminf(best, other));
      best = fmaxf(best, other);
    }
    if (g % kWarp == static_cast<int>(threadIdx.x)) {
      const float merit = d.sigmoids && d.group_size > 1 ? best + second : best;
      if (g < kWarp) {
        merits[0] = merit;
      } else {
        merits[1] = merit;
      }
    }
  }
  uint64_t out = 0;
  for (int n = 0; n < d.groups_per_token; ++n) {
    Best best;
#pragma unroll
    for (int slot = 0; slot < kMostGroups / kWarp; ++slot) {
      const int g = slot * kWarp + static_cast<int>(threadIdx.x);
      if (g < d.groups && (out >> g & 1) == 0) best.take(merits[slot], g);
    }
    out |= uint64_t{1} << warp_best(best).index;
  }
  return out;
}

__global__ void __launch_bounds__(kThreads)
    route_tokens(Router d, float* logits, int32_t* chosen, float* weights, float* log_sums) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (t >= d.tokens) return;  // a warp alone
  float* const p = logits + t * d.experts;
  int32_t* const picks = chosen + t * d.choices;
  const int lane = static_cast<int>(threadIdx.x);
  if (d.sigmoids) {
    for (int e = lane; e < d.experts; e += kWarp) p[e] = sigmoid(p[e]);
  } else {
    float max = -INFINITY, sum = 0;
    for (int e = lane; e < d.experts; e += kWarp) max = fmaxf(max, p[e]);
    max = warp_max(max);
    for (int e = lane; e < d.experts; e += kWarp) {
      p[e] = expf(p[e] - max);
      sum += p[e];
    }
    sum = warp_sum(sum);
    for (int e = lane; e < d.experts; e += kWarp) p[e] /= sum;
    if (log_sums != nullptr && lane == 0) log_sums[t] = max + logf(sum);
  }
  __syncwarp();  // scores are read by other lanes
  const uint64_t groups = choose_groups(d, p);
  uint64_t taken = 0;  // a bit for each of this lane's experts
  for (int j = 0; j < d.choices; ++j) {
    Best best;
    for (int e = lane, slot = 0; e < d.experts; e += kWarp, ++slot) {
      if ((taken >> slot & 1) == 0 && (groups >> (e / d.group_size) & 1) != 0) best.take(d.merit(p, e), e);
    }
    best = warp_best(best);
    if (best.index % kWarp == lane) {
      taken |= uint64_t{1} << (best.index / kWarp);
      picks[j] = best.index;
    }
  }
  __syncwarp();
  const float sum = d.chosen_sum(p, picks);
  for (int j = lane; j < d.choices; j += kWarp) weights[t * d.choices + j] = d.scale * (p[picks[j]] / sum);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    route_gradients(Router d, const float* scores, const int32_t* chosen, const float* dweights, const float* balances,
                    const float* log_sums, float z_loss, T* dlogits) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (t >= d.tokens) return;  // a warp alone
  const float* const p = scores + t * d.experts;
  const int32_t* const picks = chosen + t * d.choices;
  const float* const dw = dweights + t * d.choices;
  const int lane = static_cast<int>(threadIdx.x);
  // w_j = scale p_j / S, S the sum of the chosen: dp_j = scale (dw_j - sum over i of dw_i p_i / S) / S
  const float sum = d.chosen_sum(p, picks);
  float mean = 0;
  for (int j = 0; d.renormalise && j < d.choices; ++j) mean += dw[j] * (p[picks[j]] / sum);
  const auto of_expert = [&](int e) {
    for (int j = 0; j < d.choices; ++j) {
      if (picks[j] == e) return d.scale * ((dw[j] - mean) / sum);
    }
    return 0.0f;
  };
  // Of sigmoids the balance is of p_e / A, A the sum of all: its gradient is (b_e - sum over i of b_i p_i / A) / A.
  float all = 1.0f, balance = 0, along = 0;
  if (balances != nullptr && d.sigmoids) {
    all = 0;
    for (int e = lane; e < d.experts; e += kWarp) all += p[e];
    all = warp_sum(all) + 1e-20f;
  }
  for (int e = lane; balances != nullptr && e < d.experts; e += kWarp) balance += balances[e] * (p[e] / all);
  balance = warp_sum(balance);
  if (!d.sigmoids) {  // the sum over all experts of p dp
    along = balance;
    for (int j = 0; j < d.choices; ++j) along += p[picks[j]] * (d.scale * ((dw[j] - mean) / sum));
  }
  const float z = log_sums == nullptr ? 0.0f : 2 * z_loss * log_sums[t];
  for (int e = lane; e < d.experts; e += kWarp) {
    float dp = of_expert(e);
    if (d.sigmoids) {
      if (balances != nullptr) dp += (balances[e] - balance) / all;
      store_f32(dlogits + t * d.experts + e, p[e] * (1.0f - p[e]) * dp);
    } else {
      if (balances != nullptr) dp += balances[e];
      store_f32(dlogits + t * d.experts + e, p[e] * (dp - along + z));
    }
  }
}

/// A block for each expert.
__global__ void __launch_bounds__(kThreads) choices_of_expert(const int32_t* chosen, int64_t choices, int32_t* counts) {
  RT_SHARED(int32_t, room, kWarps);
  const auto expert = static_cast<int32_t>(blockIdx.x);
  int32_t count = 0;
  for (int64_t i = threadIdx.x; i < choices; i += kThreads) count += chosen[i] == expert ? 1 : 0;
  count = warp_sum(count);
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = count;
  __syncthreads();
  if (threadIdx.x != 0) return;
  count = 0;
  for (int warp = 0; warp < kWarps; ++warp) count += room[warp];
  counts[expert] = count;
}

__device__ __forceinline__ int bits_in(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}

/// A block for each expert: kThreads choices at a time, each thread's place by those of lower threads.
__global__ void __launch_bounds__(kThreads)
    places_of_expert(const int32_t* chosen, int64_t choices, const int64_t* next, const GroupRows* groups,
                     int32_t* rows_of) {
  RT_SHARED(int32_t, room, 2 * kWarps);
  const auto expert = static_cast<int32_t>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t row = groups != nullptr ? groups[expert].first : next[expert];
  int32_t* counts = room;
  for (int64_t first = 0; first < choices; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const bool mine = i < choices && chosen[i] == expert;
    const uint32_t lanes = __ballot_sync(kAllLanes, mine);
    if (lane == 0) counts[warp] = bits_in(lanes);
    __syncthreads();
    int before = bits_in(lanes & ((uint32_t{1} << lane) - 1)), all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += counts[w];
      all += counts[w];
    }
    if (mine) rows_of[i] = static_cast<int32_t>(row + before);
    row += all;
    counts = counts == room ? room + kWarps : room;  // the next are written while these are read
  }
}

/// A thread has neighbouring experts: their rows and tiles together, then behind those of the threads before.
__global__ void __launch_bounds__(kThreads, 1)  // as many registers as it takes: else ptxas spills for 10.0
    groups_of_experts(const int32_t* counts, int64_t experts, int64_t align, GroupRows* groups, float* as_floats) {
  RT_SHARED(int64_t, room, 2 * kThreads);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t each = (experts + kThreads - 1) / kThreads, first = thread * each;
  const int64_t end = first + each < experts ? first + each : experts;
  const auto padded = [&](int64_t e) { return (counts[e] + align - 1) / align * align; };
  int64_t rows = 0, tiles = 0;
  for (int64_t e = first; e < end; ++e) {
    rows += padded(e);
    tiles += (padded(e) + kGroupTile - 1) / kGroupTile;
  }
  room[2 * thread] = rows;
  room[2 * thread + 1] = tiles;
  __syncthreads();
  rows = tiles = 0;
  for (int before = 0; before < thread; ++before) {
    rows += room[2 * before];
    tiles += room[2 * before + 1];
  }
  for (int64_t e = first; e < end; ++e) {
    GroupRows* const to = groups + e;
    to->first = rows;
    to->filled = counts[e];
    to->rows = padded(e);
    to->tiles = tiles;
    as_floats[e] = static_cast<float>(counts[e]);
    rows += padded(e);
    tiles += (padded(e) + kGroupTile - 1) / kGroupTile;
  }
  if (first >= experts || end < experts) return;
  GroupRows* const behind = groups + experts;
  behind->first = rows;
  behind->filled = behind->rows = 0;
  behind->tiles = tiles;
}

/// blockIdx.y: a group.
template <int N, typename T>
__global__ void __launch_bounds__(kThreads) padding_cleared(const GroupRows* groups, int64_t width, T* rows) {
  const GroupRows mine = groups[blockIdx.y];
  const int64_t begin = (mine.first + mine.filled) * width, end = (mine.first + mine.rows) * width;
  Pack<T, N> zeros;
#pragma unroll
  for (int k = 0; k < N; ++k) store_f32(&zeros.at[k], 0.0f);
  for (int64_t i = begin + (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N; i < end;
       i += static_cast<int64_t>(gridDim.x) * kThreads * N) {
    store_pack<N>(rows + i, zeros);
  }
}

/// Rows of the block's tile, of all groups' rows.
struct TileRows {
  int64_t group, first, end;  // group: of Groups::begin
};
__device__ __forceinline__ TileRows rows_of_tile(const Groups& of) {
  const TileOfGroup tile = tile_of_block(of);
  if (tile.group < 0) return {-1, 0, 0};
  const GroupRows mine = of.rows[tile.group];
  const int64_t rows = mine.rows - tile.row < kGroupTile ? mine.rows - tile.row : kGroupTile;
  return {tile.group - of.begin, mine.first + tile.row, mine.first + tile.row + rows};
}

/// A block has a tile.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    groups_filled(Groups of, const T* from, int64_t step, int64_t width, T* rows) {
  const TileRows mine = rows_of_tile(of);
  if (mine.group < 0) return;
  from += mine.group * step;
  for (int64_t c = threadIdx.x; c < width; c += kThreads) {
    const T x = from[c];
    for (int64_t r = mine.first; r < mine.end; ++r) rows[r * width + c] = x;
  }
}

/// A thread has a column of a tile. partials [tiles, width].
template <typename T>
__global__ void __launch_bounds__(kThreads)
    tiles_summed(Groups of, const T* rows, int64_t stride, int64_t width, float* partials) {
  const TileRows mine = rows_of_tile(of);
  const int64_t c = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (mine.group < 0 || c >= width) return;
  float sum = 0;
#pragma unroll 8
  for (int64_t r = mine.first; r < mine.end; ++r) sum += load_f32(rows[r * stride + c]);
  partials[blockIdx.x * width + c] = sum;
}
/// A thread has a column of a group, which is blockIdx.y.
__global__ void __launch_bounds__(kThreads)
    tiles_added(Groups of, const float* partials, int64_t width, float* sums, int64_t step) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= width) return;
  const GroupRows* const mine = of.rows + of.begin + blockIdx.y;
  const int64_t before = of.rows[of.begin].tiles;
  float sum = 0;
#pragma unroll 8
  for (int64_t tile = mine[0].tiles - before; tile < mine[1].tiles - before; ++tile) sum += partials[tile * width + c];
  sums[blockIdx.y * step + c] += sum;
}

template <typename T>
struct ToExperts {
  const T* from;
  const int32_t* rows_of;
  T* to;
  int64_t choices, width;
  template <int N>
  __device__ void at(int64_t i, int64_t c) const {
    store_pack<N>(to + rows_of[i] * width + c, load_pack<N>(from + i / choices * width + c));
  }
};

template <typename T>
struct ToTokens {
  const T* from;
  const int32_t* rows_of;
  const float* factors;
  T* to;
  int64_t choices, width;
  template <int N>
  __device__ void at(int64_t t, int64_t c) const {
    Pack<float, N> sum;
#pragma unroll
    for (int k = 0; k < N; ++k) sum.at[k] = 0;
    for (int64_t i = t * choices; i < (t + 1) * choices; ++i) {
      const auto of = load_pack<N>(from + rows_of[i] * width + c);
      const float factor = factors == nullptr ? 1.0f : factors[i];
#pragma unroll
      for (int k = 0; k < N; ++k) sum.at[k] += factor * load_f32(of.at[k]);
    }
    Pack<T, N> out;
#pragma unroll
    for (int k = 0; k < N; ++k) store_f32(&out.at[k], sum.at[k]);
    store_pack<N>(to + t * width + c, out);
  }
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> scaled(Pack<T, N> of, float factor) {
#pragma unroll
  for (int k = 0; k < N; ++k) store_f32(&of.at[k], load_f32(of.at[k]) * factor);
  return of;
}

/// A warp has a row.
template <int N, typename T>
__global__ void __launch_bounds__(kThreads)
    dot_and_scale(T* a, T* b, const int32_t* rows_of, const float* factors, int64_t count, int64_t width, float* dots) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (i >= count) return;  // a warp alone
  const int64_t row = rows_of == nullptr ? i : rows_of[i];
  float sum = 0;
  for (int64_t c = threadIdx.x * N; c < width; c += kWarp * N) {
    T *const x_at = a + row * width + c, *const y_at = b + row * width + c;
    const auto x = load_pack<N>(x_at), y = load_pack<N>(y_at);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += load_f32(x.at[k]) * load_f32(y.at[k]);
    store_pack<N>(x_at, scaled<N>(x, factors[i]));
    store_pack<N>(y_at, scaled<N>(y, factors[i]));
  }
  sum = warp_sum(sum);
  if (threadIdx.x == 0) dots[i] = sum;
}
/// A warp has a choice.
template <int N, typename T>
__global__ void __launch_bounds__(kThreads)
    scale_rows_of(T* x, const int32_t* rows_of, const float* factors, int64_t choices, int64_t width) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (i >= choices) return;  // a warp alone
  const int64_t row = rows_of[i];
  for (int64_t c = threadIdx.x * N; c < width; c += kWarp * N) {
    T* const at = x + row * width + c;
    store_pack<N>(at, scaled<N>(load_pack<N>(at), factors[i]));
  }
}
/// A warp has a row.
template <int N, typename T>
__global__ void __launch_bounds__(kThreads) gate_and_scale(float* logits, T* x, int64_t rows, int64_t width) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (row >= rows) return;  // a warp alone
  const float gate = sigmoid(logits[row]);
  __syncwarp();  // all have read it
  if (threadIdx.x == 0) logits[row] = gate;
  for (int64_t c = threadIdx.x * N; c < width; c += kWarp * N) {
    T* const at = x + row * width + c;
    store_pack<N>(at, scaled<N>(load_pack<N>(at), gate));
  }
}

template <typename T>
struct GateGradient {
  const float *gates, *dgates;
  T* dlogits;
  template <int N>
  __device__ void at(int64_t i) const {
    static_assert(N == 1);
    store_f32(dlogits + i, gates[i] * (1.0f - gates[i]) * dgates[i]);
  }
};

template <typename T>
bool in_packs(int64_t width, const T* a, const T* b) {
  return width % kMany == 0 && aligned_to(kMany * static_cast<int64_t>(sizeof(T)), a, b);
}
Size a_warp_each(int64_t count) { return {{blocks_for(count, kWarps)}, {kWarp, kWarps}}; }

}  // namespace

void route_forward(Queue& on, const RouterDims& dims, float* logits, int32_t* chosen, float* weights, float* log_sums) {
  launch(on, a_warp_each(dims.tokens), route_tokens, Router(dims), logits, chosen, weights, log_sums);
}

template <typename T>
void route_backward(Queue& on, const RouterDims& dims, const float* scores, const int32_t* chosen,
                    const float* dweights, const RouterLosses& losses, T* dlogits) {
  launch(on, a_warp_each(dims.tokens), route_gradients<T>, Router(dims), scores, chosen, dweights,
         losses.balance.address(), losses.log_sums.address(), losses.z, dlogits);
}

void count_choices(Queue& on, const int32_t* chosen, int64_t choices, int64_t experts, int32_t* counts) {
  launch(on, {{static_cast<unsigned>(experts)}, {kThreads}}, choices_of_expert, chosen, choices, counts);
}
void place_choices(Queue& on, const int32_t* chosen, int64_t choices, int64_t experts, const int64_t* next,
                   int32_t* rows_of) {
  launch(on, {{static_cast<unsigned>(experts)}, {kThreads}}, places_of_expert, chosen, choices, next, nullptr, rows_of);
}
void group_choices(Queue& on, const GroupDims& d, const int32_t* chosen, GroupRows* groups, float* counts,
                   int32_t* rows_of) {
  auto* const own_counts = on.room<int32_t>(d.experts);
  if (own_counts == nullptr) return;
  count_choices(on, chosen, d.choices, d.experts, own_counts);
  launch(on, {{1}, {kThreads}}, groups_of_experts, own_counts, d.experts, d.align, groups, counts);
  launch(on, {{static_cast<unsigned>(d.experts)}, {kThreads}}, places_of_expert, chosen, d.choices, nullptr, groups,
         rows_of);
}

template <typename T>
void rows_to_experts(Queue& on, const T* from, const int32_t* rows_of, int64_t tokens, int64_t choices, int64_t width,
                     T* to) {
  map_rows<kWide<T>>(on, ToExperts<T>{from, rows_of, to, choices, width}, tokens * choices, width,
                     aligned_to(16, from, to));
}
template <typename T>
void rows_to_tokens(Queue& on, const T* from, const int32_t* rows_of, const float* factors, int64_t tokens,
                    int64_t choices, int64_t width, T* to) {
  map_rows<kMany>(on, ToTokens<T>{from, rows_of, factors, to, choices, width}, tokens, width,
                  in_packs(width, from, to));
}
template <typename T>
void dot_and_scale_rows(Queue& on, T* a, T* b, const int32_t* rows_of, const float* factors, int64_t tokens,
                        int64_t choices, int64_t width, float* dots) {
  const int64_t count = tokens * choices;
  if (in_packs(width, a, b)) {
    launch(on, a_warp_each(count), dot_and_scale<kMany, T>, a, b, rows_of, factors, count, width, dots);
  } else {
    launch(on, a_warp_each(count), dot_and_scale<1, T>, a, b, rows_of, factors, count, width, dots);
  }
}
template <typename T>
void scale_expert_rows(Queue& on, T* to, const int32_t* rows_of, const float* factors, int64_t choices, int64_t width) {
  if (in_packs(width, to, to)) {
    launch(on, a_warp_each(choices), scale_rows_of<kMany, T>, to, rows_of, factors, choices, width);
  } else {
    launch(on, a_warp_each(choices), scale_rows_of<1, T>, to, rows_of, factors, choices, width);
  }
}
template <typename T>
void gate_rows(Queue& on, float* logits, T* x, int64_t rows, int64_t width) {
  if (in_packs(width, x, x)) {
    launch(on, a_warp_each(rows), gate_and_scale<kMany, T>, logits, x, rows, width);
  } else {
    launch(on, a_warp_each(rows), gate_and_scale<1, T>, logits, x, rows, width);
  }
}
template <typename T>
void gate_backward(Queue& on, const float* gates, const float* dgates, T* dlogits, int64_t rows) {
  map<1>(on, GateGradient<T>{gates, dgates, dlogits}, rows, true);
}

template <typename T>
void clear_padding(Queue& on, const GroupRows* groups, int64_t count, int64_t width, T* rows) {
  constexpr unsigned kBlocks = 8;  // of a group
  const Size size{{kBlocks, static_cast<unsigned>(count)}, {kThreads}};
  if (in_packs(width, rows, rows)) {
    launch(on, size, padding_cleared<kMany, T>, groups, width, rows);
  } else {
    launch(on, size, padding_cleared<1, T>, groups, width, rows);
  }
}

template <typename T>
void fill_groups(Queue& on, const Groups& of, const T* from, int64_t step, int64_t width, T* rows) {
  const Size size{{static_cast<unsigned>(of.tiles)}, {kThreads}};
  launch(on, size, groups_filled<T>, of, from, step, width, rows);
}
template <typename T>
void add_rows_of_groups(Queue& on, const Groups& of, const T* rows, int64_t stride, int64_t width, float* sums,
                        int64_t step) {
  auto* const partials = on.room<float>(of.tiles * width);
  if (partials == nullptr) return;
  const unsigned columns = blocks_for(width, kThreads);
  launch(on, {{static_cast<unsigned>(of.tiles), columns}, {kThreads}}, tiles_summed<T>, of, rows, stride, width,
         partials);
  launch(on, {{columns, static_cast<unsigned>(of.end - of.begin)}, {kThreads}}, tiles_added, of, partials, width, sums,
         step);
}

#define RT_INSTANTIATE(T)                                                                                         \
  template void fill_groups<T>(Queue&, const Groups&, const T*, int64_t, int64_t, T*);                            \
  template void add_rows_of_groups<T>(Queue&, const Groups&, const T*, int64_t, int64_t, float*, int64_t);        \
  template void clear_padding<T>(Queue&, const GroupRows*, int64_t, int64_t, T*);                                 \
  template void route_backward<T>(Queue&, const RouterDims&, const float*, const int32_t*, const float*,          \
                                  const RouterLosses&, T*);                                                       \
  template void rows_to_experts<T>(Queue&, const T*, const int32_t*, int64_t, int64_t, int64_t, T*);              \
  template void rows_to_tokens<T>(Queue&, const T*, const int32_t*, const float*, int64_t, int64_t, int64_t, T*); \
  template void dot_and_scale_rows<T>(Queue&, T*, T*, const int32_t*, const float*, int64_t, int64_t, int64_t,    \
                                      float*);                                                                    \
  template void scale_expert_rows<T>(Queue&, T*, const int32_t*, const float*, int64_t, int64_t);                 \
  template void gate_rows<T>(Queue&, float*, T*, int64_t, int64_t);                                               \
  template void gate_backward<T>(Queue&, const float*, const float*, T*, int64_t)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
