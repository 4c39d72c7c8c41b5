// A row is read once from memory, all of it at once, and stays in the registers of the threads that share it: as many
// as it takes with kPacks packs each. Rows that are no packs, or too wide (above kMostThreads * kPacks * kMany
// channels), are read again from the caches, a block's turns at a time: too wide ones in packs too.
#include "runtime/kernels/cuda/norm.h"

#include "runtime/core/check.h"
#include "runtime/kernels/cuda/elements.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kMostThreads = 512;  // that share a row
constexpr int kMany = 4;           // elements of a pack: 16 bytes of the sums that it adds to
constexpr int kPacks = 4;          // of a row that a thread holds; ptxas gives each element a register, of 16 bits too
constexpr int kTurns = 4;          // of a row that is too wide, whose loads are under way
constexpr int kRoom = 2 * kMostThreads / kWarp;
/// Bytes of a block's sums of columns that lie in shared memory; more are summed in `partials`.
constexpr int64_t kMostSums = 96 << 10;
static_assert(kMostSums + 2 * kRoom * static_cast<int64_t>(sizeof(float)) <= kSharedOfCards);

/// kOwn: of heads, centred, with weights of each. There blockIdx.y is a block's head, and rows are those of one head.
enum class Form { kRms, kCentred, kOwn };
template <Form kForm>
constexpr bool kHasMean = kForm != Form::kRms;

/// From what is of the first head to what is of the block's, where each has so much.
template <Form kForm>
__device__ __forceinline__ int64_t to_head(int64_t each) {
  if constexpr (kForm == Form::kOwn) return blockIdx.y * each;
  return 0;
}

/// Where rows stand: `heads` of them, `width` elements apart, every `stride` elements.
template <typename T>
struct RowsAt {
  T* first = nullptr;
  int64_t stride = 0, heads = 1, width = 0;
  __device__ T* operator[](int64_t row) const {
    if (heads == 1) return first + row * stride;
    const uint32_t at = static_cast<uint32_t>(row) / static_cast<uint32_t>(heads);  // rows fit, and 64 bits are slow
    return first + at * stride + (row - at * heads) * width;
  }
};
template <typename T>
RowsAt<T> dense(T* first, int64_t width) {
  return {first, width, 1, width};
}

/// Of N channels: weight + offset; 1 without a weight.
template <int N, typename T>
__device__ __forceinline__ Pack<float, N> factors(const T* weight, int64_t c, float offset) {
  Pack<float, N> out;
  if (weight == nullptr) {
#pragma unroll
    for (int k = 0; k < N; ++k) out.at[k] = 1.0f;
  } else {
    const auto w = load_pack<N>(weight + c);
#pragma unroll
    for (int k = 0; k < N; ++k) out.at[k] = load_f32(w.at[k]) + offset;
  }
  return out;
}

/// Those of the block's rows.
template <Form kForm, typename T>
__device__ __forceinline__ const T* own_weight(const T* weight, int64_t width) {
  return weight == nullptr ? nullptr : weight + to_head<kForm>(width);
}

template <typename T>
struct ForwardArgs {
  RowsAt<const T> x{}, added{};  // added.first null: x is normed as it is
  RowsAt<T> sum{}, y{};          // y.first null: statistics alone
  const T *weight = nullptr, *bias = nullptr;
  float *mean = nullptr, *rstd = nullptr;  // null: not kept
  int64_t rows = 0, width = 0;
  float eps = 0, offset = 0;
};

/// Threads of a block that share a row, as a kernel with `packs` a thread has them.
struct Shared {
  int lanes, packs;  // lanes: a power of two; 0: it takes too many
  static Shared of(int64_t width) {
    const int64_t row_packs = width / kMany;
    if (row_packs <= kWarp) {
      int lanes = 1;
      while (lanes < row_packs) lanes *= 2;
      return {lanes, 1};
    }
    int lanes = kWarp;
    while (lanes * kPacks < row_packs) lanes *= 2;
    return {lanes <= kMostThreads ? lanes : 0, kPacks};
  }
  int threads() const { return lanes > kThreads ? lanes : kThreads; }
};

/// Two sums over the threads of each row, to all of them. All threads of the block call it. room [2, kRoom]: turns
/// alternate, so the barrier of the next one says that this one's has been read.
__device__ __forceinline__ void row_sums(float& a, float& b, int lanes, float* room, int& turn) {
  for (int step = (lanes < kWarp ? lanes : kWarp) / 2; step > 0; step /= 2) {
    a += __shfl_xor_sync(kAllLanes, a, step);
    b += __shfl_xor_sync(kAllLanes, b, step);
  }
  if (lanes <= kWarp) return;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, of_row = lanes / kWarp;
  float* const sums = room + turn * kRoom;
  turn = 1 - turn;
  if (threadIdx.x % kWarp == 0) {
    sums[2 * warp] = a;
    sums[2 * warp + 1] = b;
  }
  __syncthreads();
  a = b = 0;
  const int first = warp / of_row * of_row;
  for (int w = first; w < first + of_row; ++w) {
    a += sums[2 * w];
    b += sums[2 * w + 1];
  }
}

/// This thread's packs of a row; zeros where there are none.
template <int P, int N, typename T>
__device__ __forceinline__ void load_row(const T* row, bool here, int64_t begin, int64_t step, int64_t width,
                                         Pack<T, N>* to) {
#pragma unroll
  for (int p = 0; p < P; ++p) {
    if (here && begin + p * step < width) {
      to[p] = load_pack<N>(row + begin + p * step);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) store_f32(&to[p].at[k], 0.0f);
    }
  }
}

template <Form kForm, int P, typename T>
__global__ void __launch_bounds__(kMostThreads) norm_forward(ForwardArgs<T> of, int lanes) {
  constexpr int N = kMany;
  RT_SHARED(float, room, 2 * kRoom);
  int turn = 0;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / lanes) + threadIdx.x / lanes;
  const int64_t begin = threadIdx.x % lanes * N, step = static_cast<int64_t>(lanes) * N;
  const bool here = row < of.rows;
  Pack<T, N> x[P];
  load_row<P, N>(here ? of.x[row] + to_head<kForm>(of.width) : nullptr, here, begin, step, of.width, x);
  if (of.added.first != nullptr) {
    Pack<T, N> added[P];
    load_row<P, N>(here ? of.added[row] : nullptr, here, begin, step, of.width, added);
#pragma unroll
    for (int p = 0; p < P; ++p) {
#pragma unroll
      for (int k = 0; k < N; ++k) store_f32(&x[p].at[k], load_f32(x[p].at[k]) + load_f32(added[p].at[k]));
      if (here && begin + p * step < of.width) store_pack<N>(of.sum[row] + begin + p * step, x[p]);
    }
  }
  float sum = 0, squares = 0, mean = 0;
#pragma unroll
  for (int p = 0; p < P; ++p) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float v = load_f32(x[p].at[k]);
      sum += v;
      squares += v * v;
    }
  }
  row_sums(sum, squares, lanes, room, turn);
  if (kHasMean<kForm>) {  // a second pass: E[x^2] - mean^2 cancels
    mean = sum / static_cast<float>(of.width);
    squares = 0;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (begin + p * step >= of.width) continue;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float d = load_f32(x[p].at[k]) - mean;
        squares += d * d;
      }
    }
    float none = 0;
    row_sums(squares, none, lanes, room, turn);
  }
  if (!here) return;
  const float rstd = 1.0f / sqrtf(squares / static_cast<float>(of.width) + of.eps);
  if (begin == 0) {
    if (of.mean != nullptr) of.mean[to_head<kForm>(of.rows) + row] = mean;
    if (of.rstd != nullptr) of.rstd[to_head<kForm>(of.rows) + row] = rstd;
  }
  if (of.y.first == nullptr) return;
  T* const y = of.y[row] + to_head<kForm>(of.width);
  const T* const weight = own_weight<kForm>(of.weight, of.width);
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const int64_t c = begin + p * step;
    if (c >= of.width) continue;
    const auto w = factors<N>(weight, c, of.offset);
    Pack<float, N> bias;
#pragma unroll
    for (int k = 0; k < N; ++k) bias.at[k] = 0;
    if (of.bias != nullptr) {
      const auto b = load_pack<N>(of.bias + c);
#pragma unroll
      for (int k = 0; k < N; ++k) bias.at[k] = load_f32(b.at[k]);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
      store_f32(&x[p].at[k], (load_f32(x[p].at[k]) - mean) * rstd * w.at[k] + bias.at[k]);
    }
    store_pack<N>(y + c, x[p]);
  }
}

/// A block has a row, of any width, in packs of N.
template <Form kForm, int N, typename T>
__global__ void __launch_bounds__(kThreads) norm_forward_by_turns(ForwardArgs<T> of) {
  RT_SHARED(float, room, kRoom);
  const int64_t row = blockIdx.x, begin = static_cast<int64_t>(threadIdx.x) * N, step = int64_t{kThreads} * N;
  const T* x = of.x[row] + to_head<kForm>(of.width);
  float sum = 0, squares = 0, mean = 0;
  if (of.added.first != nullptr) {
    const T* const added = of.added[row];
    T* const out = of.sum[row];
    for (int64_t c = begin; c < of.width; c += step) {
      auto v = load_pack<N>(x + c);
      const auto more = load_pack<N>(added + c);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        store_f32(&v.at[k], load_f32(v.at[k]) + load_f32(more.at[k]));
        sum += load_f32(v.at[k]);
        squares += load_f32(v.at[k]) * load_f32(v.at[k]);
      }
      store_pack<N>(out + c, v);
    }
    x = out;  // each thread reads what it wrote
  } else {
#pragma unroll kTurns
    for (int64_t c = begin; c < of.width; c += step) {
      const auto v = load_pack<N>(x + c);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        sum += load_f32(v.at[k]);
        squares += load_f32(v.at[k]) * load_f32(v.at[k]);
      }
    }
  }
  block_sums(sum, squares, room);
  if (kHasMean<kForm>) {
    mean = sum / static_cast<float>(of.width);
    squares = 0;
#pragma unroll kTurns
    for (int64_t c = begin; c < of.width; c += step) {
      const auto v = load_pack<N>(x + c);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float d = load_f32(v.at[k]) - mean;
        squares += d * d;
      }
    }
    float none = 0;
    block_sums(squares, none, room);
  }
  const float rstd = 1.0f / sqrtf(squares / static_cast<float>(of.width) + of.eps);
  if (threadIdx.x == 0) {
    if (of.mean != nullptr) of.mean[to_head<kForm>(of.rows) + row] = mean;
    if (of.rstd != nullptr) of.rstd[to_head<kForm>(of.rows) + row] = rstd;
  }
  if (of.y.first == nullptr) return;
  T* const y = of.y[row] + to_head<kForm>(of.width);
  const T* const weight = own_weight<kForm>(of.weight, of.width);
  for (int64_t c = begin; c < of.width; c += step) {
    const auto w = factors<N>(weight, c, of.offset);
    auto v = load_pack<N>(x + c);
    Pack<float, N> bias;
#pragma unroll
    for (int k = 0; k < N; ++k) bias.at[k] = 0;
    if (of.bias != nullptr) {
      const auto b = load_pack<N>(of.bias + c);
#pragma unroll
      for (int k = 0; k < N; ++k) bias.at[k] = load_f32(b.at[k]);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) store_f32(&v.at[k], (load_f32(v.at[k]) - mean) * rstd * w.at[k] + bias.at[k]);
    store_pack<N>(y + c, v);
  }
}

template <typename T>
struct BackwardArgs {
  RowsAt<const T> dy{}, x{};
  RowsAt<T> dx{};
  const T* weight = nullptr;
  const float *mean = nullptr, *rstd = nullptr;  // rstd null: computed again
  float* partials = nullptr;                     // [runs, arrays, width]; of kOwn [runs, heads, width]
  int64_t rows = 0, width = 0, arrays = 0;
  RowRuns runs{};
  float eps = 0, offset = 0;
  bool adds = false;  // the gradient, rounded, to what dx holds
};

/// Where the block leaves its sums.
template <Form kForm, typename T>
__device__ __forceinline__ float* own_partials(const BackwardArgs<T>& of) {
  if constexpr (kForm == Form::kOwn) {
    return of.partials + (static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * of.width;
  }
  return of.partials + static_cast<int64_t>(blockIdx.x) * of.arrays * of.width;
}

/// to = more, or what stands in `sums` and more.
__device__ __forceinline__ void add_sums(Pack<float, kMany> more, bool added, const float* sums, float* to) {
  if (added) {
    const auto of = load_pack<kMany>(sums);
#pragma unroll
    for (int k = 0; k < kMany; ++k) more.at[k] += of.at[k];
  }
  store_pack<kMany>(to, more);
}

/// With g = dy w and n = (x - mean) rstd: dx = rstd (g - [mean(g)] - n mean(g n)), the middle where the mean depends on
/// x. A block has a run of rows, `lanes` threads a row at a time; each thread has the sums of its columns in registers.
/// At the end threads of the same columns add theirs up, within warps first, then warp by warp.
template <Form kForm, int P, typename T>
__global__ void __launch_bounds__(kMostThreads) norm_backward(BackwardArgs<T> of, int lanes) {
  constexpr int N = kMany;
  RT_SHARED(float, room, 2 * kRoom);
  RT_DYNAMIC_SHARED(float, sums);  // [arrays, width]: of dy n, of dy
  int turn = 0;
  const int64_t begin = threadIdx.x % lanes * N, step = static_cast<int64_t>(lanes) * N;
  const int at_once = static_cast<int>(blockDim.x) / lanes, mine = static_cast<int>(threadIdx.x) / lanes;
  const int64_t end = of.runs.end(blockIdx.x);
  const T* const weight = own_weight<kForm>(of.weight, of.width);
  const float inverse_width = 1.0f / static_cast<float>(of.width);
  Pack<float, N> dweight[P], dbias[P];
#pragma unroll
  for (int p = 0; p < P; ++p) {
#pragma unroll
    for (int k = 0; k < N; ++k) dweight[p].at[k] = dbias[p].at[k] = 0;
  }
  for (int64_t first = of.runs.begin(blockIdx.x); first < end; first += at_once) {  // the block alike
    const int64_t row = first + mine;
    const bool here = row < end;
    Pack<T, N> dy[P], x[P];
    load_row<P, N>(here ? of.dy[row] + to_head<kForm>(of.width) : nullptr, here, begin, step, of.width, dy);
    load_row<P, N>(here ? of.x[row] + to_head<kForm>(of.width) : nullptr, here, begin, step, of.width, x);
    const float mean = kHasMean<kForm> && here ? of.mean[to_head<kForm>(of.rows) + row] : 0.0f;
    float rstd = of.rstd != nullptr && here ? of.rstd[to_head<kForm>(of.rows) + row] : 0.0f;
    if (of.rstd == nullptr) {
      float squares = 0, none = 0;
#pragma unroll
      for (int p = 0; p < P; ++p) {
#pragma unroll
        for (int k = 0; k < N; ++k) squares += load_f32(x[p].at[k]) * load_f32(x[p].at[k]);
      }
      row_sums(squares, none, lanes, room, turn);
      rstd = 1.0f / sqrtf(squares * inverse_width + of.eps);
    }
    float sum_g = 0, sum_gn = 0;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (begin + p * step >= of.width) continue;
      const auto w = factors<N>(weight, begin + p * step, of.offset);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float by = load_f32(dy[p].at[k]), n = (load_f32(x[p].at[k]) - mean) * rstd, g = by * w.at[k];
        sum_g += g;
        sum_gn += g * n;
        dweight[p].at[k] += by * n;
        if (kForm == Form::kCentred) dbias[p].at[k] += by;
      }
    }
    row_sums(sum_g, sum_gn, lanes, room, turn);
    const float mean_g = kHasMean<kForm> ? sum_g * inverse_width : 0.0f, mean_gn = sum_gn * inverse_width;
    if (!here) continue;
    T* const dx = of.dx[row] + to_head<kForm>(of.width);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int64_t c = begin + p * step;
      if (c >= of.width) continue;
      const auto w = factors<N>(weight, c, of.offset);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float n = (load_f32(x[p].at[k]) - mean) * rstd;
        store_f32(&dy[p].at[k], rstd * (load_f32(dy[p].at[k]) * w.at[k] - mean_g - n * mean_gn));
      }
      if (of.adds) {
        const auto held = load_pack<N>(dx + c);
#pragma unroll
        for (int k = 0; k < N; ++k) store_f32(&dy[p].at[k], load_f32(held.at[k]) + load_f32(dy[p].at[k]));
      }
      store_pack<N>(dx + c, dy[p]);
    }
  }
  for (int step_of_lanes = lanes; step_of_lanes < kWarp; step_of_lanes *= 2) {
#pragma unroll
    for (int p = 0; p < P; ++p) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        dweight[p].at[k] += __shfl_xor_sync(kAllLanes, dweight[p].at[k], step_of_lanes);
        if (kForm == Form::kCentred) dbias[p].at[k] += __shfl_xor_sync(kAllLanes, dbias[p].at[k], step_of_lanes);
      }
    }
  }
  const int together = lanes < kWarp ? kWarp : lanes, turns = static_cast<int>(blockDim.x) / together;
  const bool first_lanes = static_cast<int>(threadIdx.x) % together < lanes;
  float* const partials = own_partials<kForm>(of);
  for (int at = 0; at < turns; ++at) {
    if (at > 0) __syncthreads();
    if (static_cast<int>(threadIdx.x) / together != at || !first_lanes) continue;
    float* const to = at + 1 < turns ? sums : partials;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int64_t c = begin + p * step;
      if (c >= of.width) continue;
      add_sums(dweight[p], at > 0, sums + c, to + c);
      if (kForm == Form::kCentred && of.arrays > 1) add_sums(dbias[p], at > 0, sums + of.width + c, to + of.width + c);
    }
  }
}

/// The same of rows of any width, a row at a time, in packs of N: each thread has its columns in all rows of the run.
/// Their sums are made in shared memory, or where they end up.
template <Form kForm, int N, bool kInShared,
          typename T>  // 0: not asked for; 1: as many registers as it takes, no spills
__global__ void __launch_bounds__(kThreads, kInShared&& N == 1 ? 0 : 1) norm_backward_by_turns(BackwardArgs<T> of) {
  RT_SHARED(float, room, kRoom);
  const int64_t begin = static_cast<int64_t>(threadIdx.x) * N, step = int64_t{kThreads} * N;
  float* const partials = own_partials<kForm>(of);
  float* sums = partials;
  if constexpr (kInShared) {
    RT_DYNAMIC_SHARED(float, shared);
    sums = shared;
  }
  for (int64_t c = threadIdx.x; c < of.arrays * of.width; c += kThreads) sums[c] = 0;
  __syncthreads();
  const T* const weight = own_weight<kForm>(of.weight, of.width);
  const float inverse_width = 1.0f / static_cast<float>(of.width);
  for (int64_t row = of.runs.begin(blockIdx.x); row < of.runs.end(blockIdx.x); ++row) {
    const T *const dy = of.dy[row] + to_head<kForm>(of.width), *const x = of.x[row] + to_head<kForm>(of.width);
    const float mean = kHasMean<kForm> ? of.mean[to_head<kForm>(of.rows) + row] : 0.0f;
    float rstd = 0;
    if (of.rstd != nullptr) {
      rstd = of.rstd[to_head<kForm>(of.rows) + row];
    } else {
      float squares = 0, none = 0;
      for (int64_t c = begin; c < of.width; c += step) {
        const auto v = load_pack<N>(x + c);
#pragma unroll
        for (int k = 0; k < N; ++k) squares += load_f32(v.at[k]) * load_f32(v.at[k]);
      }
      block_sums(squares, none, room);
      rstd = 1.0f / sqrtf(squares * inverse_width + of.eps);
    }
    float sum_g = 0, sum_gn = 0;
    for (int64_t c = begin; c < of.width; c += step) {
      const auto g = load_pack<N>(dy + c), v = load_pack<N>(x + c);
      const auto w = factors<N>(weight, c, of.offset);
      auto of_weight = load_pack<N>(sums + c);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float by = load_f32(g.at[k]), n = (load_f32(v.at[k]) - mean) * rstd, by_w = by * w.at[k];
        sum_g += by_w;
        sum_gn += by_w * n;
        of_weight.at[k] += by * n;
      }
      store_pack<N>(sums + c, of_weight);
      if (of.arrays > 1) {
        auto of_bias = load_pack<N>(sums + of.width + c);
#pragma unroll
        for (int k = 0; k < N; ++k) of_bias.at[k] += load_f32(g.at[k]);
        store_pack<N>(sums + of.width + c, of_bias);
      }
    }
    block_sums(sum_g, sum_gn, room);
    const float mean_g = kHasMean<kForm> ? sum_g * inverse_width : 0.0f, mean_gn = sum_gn * inverse_width;
    T* const dx = of.dx[row] + to_head<kForm>(of.width);
    for (int64_t c = begin; c < of.width; c += step) {
      auto g = load_pack<N>(dy + c);
      const auto v = load_pack<N>(x + c);
      const auto w = factors<N>(weight, c, of.offset);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float n = (load_f32(v.at[k]) - mean) * rstd;
        store_f32(&g.at[k], rstd * (load_f32(g.at[k]) * w.at[k] - mean_g - n * mean_gn));
      }
      if (of.adds) {
        const auto held = load_pack<N>(dx + c);
#pragma unroll
        for (int k = 0; k < N; ++k) store_f32(&g.at[k], load_f32(held.at[k]) + load_f32(g.at[k]));
      }
      store_pack<N>(dx + c, g);
    }
  }
  if constexpr (kInShared) {
    for (int64_t c = begin; c < of.width; c += step) {
      for (int64_t a = 0; a < of.arrays; ++a)
        store_pack<N>(partials + a * of.width + c, load_pack<N>(sums + a * of.width + c));
    }
  }
}

template <typename T>
bool in_packs(const RowsAt<T>& rows) {
  return rows.first == nullptr || (rows.stride % kMany == 0 && rows.width % kMany == 0 &&
                                   aligned_to(kMany * static_cast<int64_t>(sizeof(T)), rows.first));
}
template <typename T>
bool in_packs(const T* columns) {
  return aligned_to(kMany * static_cast<int64_t>(sizeof(T)), columns);
}

template <Form kForm, typename T>
void forward(Queue& on, const ForwardArgs<T>& of, unsigned heads = 1) {
  const Shared shared = Shared::of(of.width);
  const bool packs = of.width % kMany == 0 && in_packs(of.x) && in_packs(of.added) && in_packs(of.sum) &&
                     in_packs(of.y) && in_packs(of.weight) && in_packs(of.bias);
  if (!packs || shared.lanes == 0) {
    launch(on, {{static_cast<unsigned>(of.rows), heads}, {kThreads}},
           packs ? norm_forward_by_turns<kForm, kMany, T> : norm_forward_by_turns<kForm, 1, T>, of);
    return;
  }
  const int threads = shared.threads();
  launch(on, {{blocks_for(of.rows, threads / shared.lanes), heads}, {static_cast<unsigned>(threads)}},
         shared.packs == 1 ? norm_forward<kForm, 1, T> : norm_forward<kForm, kPacks, T>, of, shared.lanes);
}

template <Form kForm, typename T>
void backward(Queue& on, BackwardArgs<T> of, const NormGradients& to, unsigned heads = 1) {
  const RowRuns runs = norm_runs(of.rows, parts_of(to.parts));
  of.runs = runs;
  of.arrays = kForm != Form::kRms && to.bias ? 2 : 1;
  of.partials = on.room<float>(runs.count() * of.arrays * heads * of.width);
  if (of.partials == nullptr) return;
  const Shared shared = Shared::of(of.width);
  Size size{{static_cast<unsigned>(runs.count()), heads},
            {kThreads},
            of.arrays * of.width * static_cast<int64_t>(sizeof(float))};
  const bool packs =
      of.width % kMany == 0 && in_packs(of.x) && in_packs(of.dy) && in_packs(of.dx) && in_packs(of.weight);
  if (packs && shared.lanes > 0) {
    size.threads = dim3{static_cast<unsigned>(shared.threads())};
    launch(on, size, shared.packs == 1 ? norm_backward<kForm, 1, T> : norm_backward<kForm, kPacks, T>, of,
           shared.lanes);
  } else if (size.shared_bytes <= kMostSums) {
    launch(on, size, packs ? norm_backward_by_turns<kForm, kMany, true, T> : norm_backward_by_turns<kForm, 1, true, T>,
           of);
  } else if constexpr (kForm != Form::kOwn) {
    size.shared_bytes = 0;
    launch(on, size,
           packs ? norm_backward_by_turns<kForm, kMany, false, T> : norm_backward_by_turns<kForm, 1, false, T>, of);
  } else {
    RT_CHECK(false, "heads of {} channels, each with weights of its own", of.width);
  }
  if (!to.weight) return;
  add_partials(on, of.partials, runs, of.arrays, heads * of.width, to.weight.address(), to.bias.address());
}

/// Without what a sum before it or a mean has.
template <typename T>
ForwardArgs<T> forward_args(const NormRows& of, const T* x, const T* weight, T* y, float* rstd) {
  return {.x = dense(x, of.width),
          .y = dense(y, of.width),
          .weight = weight,
          .rstd = rstd,
          .rows = of.rows,
          .width = of.width,
          .eps = of.eps,
          .offset = of.offset};
}
template <typename T>
BackwardArgs<T> backward_args(const NormRows& of, const T* dy, const T* x, const T* weight, const float* rstd, T* dx) {
  return {.dy = dense(dy, of.width),
          .x = dense(x, of.width),
          .dx = dense(dx, of.width),
          .weight = weight,
          .rstd = rstd,
          .rows = of.rows,
          .width = of.width,
          .offset = of.offset,
          .adds = of.adds};
}

void check(const HeadNorm& d, bool biased) {
  RT_CHECK(!d.own_weights || d.centred, "weights of each head are of LayerNorm");
  RT_CHECK(!biased || (d.centred && !d.own_weights), "a bias is of LayerNorm with one weight for all heads");
}
/// Rows of heads; where each has weights of its own, those of the first one.
template <typename T>
RowsAt<T> rows_of(const HeadNorm& d, const Rows<T>& rows) {
  return {rows.data.address(), rows.stride, d.own_weights ? 1 : d.heads, d.head_dim};
}
int64_t row_count(const HeadNorm& d) { return d.own_weights ? d.rows : d.rows * d.heads; }
/// Of x, to nowhere yet.
template <typename T>
ForwardArgs<T> forward_args(const HeadNorm& d, const Rows<const T>& x) {
  return {.x = rows_of(d, x), .rows = row_count(d), .width = d.head_dim, .eps = d.eps, .offset = d.offset};
}
template <typename T>
void forward(Queue& on, const HeadNorm& d, const ForwardArgs<T>& of) {
  if (d.own_weights) return forward<Form::kOwn>(on, of, static_cast<unsigned>(d.heads));
  d.centred ? forward<Form::kCentred>(on, of) : forward<Form::kRms>(on, of);
}

}  // namespace

template <typename T>
void layer_norm_forward(Queue& on, const NormRows& of, const T* x, const T* weight, const T* bias, T* y, float* mean,
                        float* rstd) {
  ForwardArgs<T> all = forward_args(of, x, weight, y, rstd);
  all.bias = bias;
  all.mean = mean;
  forward<Form::kCentred>(on, all);
}
template <typename T>
void add_layer_norm_forward(Queue& on, const NormRows& of, const T* a, const T* b, T* sum, const T* weight,
                            const T* bias, T* y, float* mean, float* rstd) {
  ForwardArgs<T> all = forward_args(of, a, weight, y, rstd);
  all.added = dense(b, of.width);
  all.sum = dense(sum, of.width);
  all.bias = bias;
  all.mean = mean;
  forward<Form::kCentred>(on, all);
}
template <typename T>
void layer_norm_backward(Queue& on, const NormRows& of, const T* dy, const T* x, const T* weight, const float* mean,
                         const float* rstd, T* dx, const NormGradients& to) {
  BackwardArgs<T> all = backward_args(of, dy, x, weight, rstd, dx);
  all.mean = mean;
  backward<Form::kCentred>(on, all, to);
}
template <typename T>
void rms_norm_forward(Queue& on, const NormRows& of, const T* x, const T* weight, T* y, float* rstd) {
  forward<Form::kRms>(on, forward_args(of, x, weight, y, rstd));
}
template <typename T>
void add_rms_norm_forward(Queue& on, const NormRows& of, const T* a, const T* b, T* sum, const T* weight, T* y,
                          float* rstd) {
  ForwardArgs<T> all = forward_args(of, a, weight, y, rstd);
  all.added = dense(b, of.width);
  all.sum = dense(sum, of.width);
  forward<Form::kRms>(on, all);
}
template <typename T>
void rms_norm_backward(Queue& on, const NormRows& of, const T* dy, const T* x, const T* weight, const float* rstd,
                       T* dx, const NormGradients& to) {
  backward<Form::kRms>(on, backward_args(of, dy, x, weight, rstd, dx), to);
}
template <typename T>
void head_norm_forward(Queue& on, const HeadNorm& d, const Rows<const T>& x, const T* weight, const T* bias,
                       const Rows<T>& y) {
  check(d, bias != nullptr);
  ForwardArgs<T> of = forward_args(d, x);
  of.y = rows_of(d, y);
  of.weight = weight;
  of.bias = bias;
  forward(on, d, of);
}
template <typename T>
void head_norm_backward(Queue& on, const HeadNorm& d, const Rows<const T>& dy, const Rows<const T>& x, const T* weight,
                        const Rows<T>& dx, const NormGradients& to, float* stats) {
  check(d, static_cast<bool>(to.bias));
  BackwardArgs<T> of{.dy = rows_of(d, dy),
                     .x = rows_of(d, x),
                     .dx = rows_of(d, dx),
                     .weight = weight,
                     .rows = row_count(d),
                     .width = d.head_dim,
                     .eps = d.eps,
                     .offset = d.offset};
  if (d.centred) {
    ForwardArgs<T> moments = forward_args(d, x);
    of.mean = moments.mean = stats;
    of.rstd = moments.rstd = stats + d.rows * d.heads;
    forward(on, d, moments);
  }
  if (d.own_weights) return backward<Form::kOwn>(on, of, to, static_cast<unsigned>(d.heads));
  d.centred ? backward<Form::kCentred>(on, of, to) : backward<Form::kRms>(on, of, to);
}

#define RT_INSTANTIATE(T)                                                 \
  template decltype(layer_norm_forward<T>) layer_norm_forward<T>;         \
  template decltype(add_layer_norm_forward<T>) add_layer_norm_forward<T>; \
  template decltype(layer_norm_backward<T>) layer_norm_backward<T>;       \
  template decltype(rms_norm_forward<T>) rms_norm_forward<T>;             \
  template decltype(add_rms_norm_forward<T>) add_rms_norm_forward<T>;     \
  template decltype(rms_norm_backward<T>) rms_norm_backward<T>;           \
  template decltype(head_norm_forward<T>) head_norm_forward<T>;           \
  template decltype(head_norm_backward<T>) head_norm_backward<T>
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
