// A block has a row. Each thread joins maximum and sum of its columns on the way, then lanes do, then warps, always in
// the same order.
#include "runtime/kernels/cuda/loss.h"

#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kRowThreads = 512;
constexpr int kLoads = 4;          // packs that a thread has under way
constexpr int64_t kNarrow = 1024;  // columns for which fewer threads do
constexpr int kNarrowThreads = 128;

/// Maximum, and the sum of exponentials against it; -inf and 0 of nothing. A NaN comes into the sum.
struct MaxSum {
  float max, sum;
};

__device__ __forceinline__ MaxSum join(MaxSum a, MaxSum b) {
  const float max = a.max > b.max ? a.max : b.max;
  // An unchanged maximum leaves its sum as it is: -inf less -inf would be a NaN.
  const float mine = a.max == max ? a.sum : a.sum * expf(a.max - max);
  const float other = b.max == max ? b.sum : b.sum * expf(b.max - max);
  return {max, mine + other};
}

/// With so many logits more, logit(k) each: their maximum first, so that one exponential is of the sum so far.
template <int kCount, typename Logit>
__device__ __forceinline__ MaxSum with_logits(MaxSum of, const Logit& logit) {
  float max = of.max;
#pragma unroll
  for (int k = 0; k < kCount; ++k) max = logit(k) > max ? logit(k) : max;
  float sum = of.max == max ? of.sum : of.sum * fast_exp(of.max - max);
#pragma unroll
  for (int k = 0; k < kCount; ++k) sum += fast_exp(logit(k) - max);
  return {max, sum};
}

/// Of a row's first `valid` columns, to all threads. `at`, read before a barrier, is the logit of column `wanted`, if
/// that is one of them. room [2 * warps].
template <int N, typename T>
__device__ __forceinline__ MaxSum row_max_sum(const T* row, int64_t valid, int64_t wanted, float* at, float* room) {
  MaxSum mine{-INFINITY, 0};
  const int64_t stride = static_cast<int64_t>(blockDim.x) * N;
  int64_t c = static_cast<int64_t>(threadIdx.x) * N;
  for (; c + (kLoads - 1) * stride + N <= valid; c += kLoads * stride) {
    Pack<T, N> of[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) of[load] = load_pack<N>(row + c + load * stride);
    mine = with_logits<kLoads * N>(mine, [&](int k) { return load_f32(of[k / N].at[k % N]); });
  }
  for (; c < valid; c += stride) {
    const auto of = load_pack<N>(row + c);
    mine = with_logits<N>(mine, [&](int k) { return c + k < valid ? load_f32(of.at[k]) : -INFINITY; });
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float max = __shfl_xor_sync(kAllLanes, mine.max, step), sum = __shfl_xor_sync(kAllLanes, mine.sum, step);
    mine = join(mine, {max, sum});  // the same bits for both
  }
  *at = wanted >= 0 && wanted < valid ? load_f32(row[wanted]) : 0.0f;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  if (threadIdx.x % kWarp == 0) {
    room[2 * (threadIdx.x / kWarp)] = mine.max;
    room[2 * (threadIdx.x / kWarp) + 1] = mine.sum;
  }
  __syncthreads();
  mine = {room[0], room[1]};
  for (int w = 1; w < warps; ++w) mine = join(mine, {room[2 * w], room[2 * w + 1]});
  return mine;
}

/// The row becomes (softmax (1 + 2 z log Z) - onehot) scale, its padding 0. `target` is a column, or none of them.
/// inverse_cap: 1 / cap where logits are cap tanh(z / cap), and the gradient is by z; else 0.
template <int N, typename T>
__device__ __forceinline__ void to_gradient(T* row, int64_t cols, int64_t valid, int64_t target, MaxSum of, float scale,
                                            float z_loss, float inverse_cap) {
  const float more = z_loss == 0.0f ? 1.0f : 1.0f + 2.0f * z_loss * (logf(of.sum) + of.max);
  const float factor = more / of.sum;
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * N; c < cols; c += static_cast<int64_t>(blockDim.x) * N) {
    auto pack = load_pack<N>(row + c);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float logit = load_f32(pack.at[k]), t = logit * inverse_cap;
      const float p = expf(logit - of.max) * factor;
      const float gradient = (p - (c + k == target ? 1.0f : 0.0f)) * scale * (1.0f - t * t);
      store_f32(&pack.at[k], scale == 0.0f || c + k >= valid ? 0.0f : gradient);
    }
    store_pack<N>(row + c, pack);
  }
}

template <int N, typename T>
__global__ void __launch_bounds__(kRowThreads)
    sums(const T* logits, int64_t cols, int64_t valid, int64_t first, const int32_t* targets, float* max,
         float* sum_exp, float* target_logit) {
  RT_SHARED(float, room, 2 * kRowThreads / kWarp);
  const int64_t row = blockIdx.x, target = targets[row] - first;
  float at;
  const MaxSum of = row_max_sum<N>(logits + row * cols, valid, target, &at, room);
  if (threadIdx.x != 0) return;
  max[row] = of.max;
  sum_exp[row] = of.sum;
  if (target >= 0 && target < valid) target_logit[row] = at;
}

template <int N, typename T>
__global__ void __launch_bounds__(kRowThreads)
    gradient(T* logits, int64_t cols, int64_t valid, int64_t first, const int32_t* targets, const float* max,
             const float* sum_exp, const float* scale, float z_loss, float inverse_cap) {
  const int64_t row = blockIdx.x, target = targets[row] - first;
  to_gradient<N>(logits + row * cols, cols, valid, target < valid ? target : -1, {max[row], sum_exp[row]}, scale[row],
                 z_loss, inverse_cap);
}

template <int N, typename T>
__global__ void __launch_bounds__(kRowThreads)
    loss_and_gradient(T* logits, int64_t cols, int64_t valid, const int32_t* targets, float scale, float z_loss,
                      float* loss) {
  RT_SHARED(float, room, 2 * kRowThreads / kWarp);
  T* const row = logits + static_cast<int64_t>(blockIdx.x) * cols;
  const int64_t target = targets[blockIdx.x];
  float at;
  const MaxSum of = row_max_sum<N>(row, valid, target, &at, room);
  if (threadIdx.x == 0) loss[blockIdx.x] = target < 0 ? 0.0f : logf(of.sum) + (of.max - at);
  to_gradient<N>(row, cols, valid, target, of, target < 0 ? 0.0f : scale, z_loss, 0.0f);
}

__device__ __forceinline__ int64_t element() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

__global__ void __launch_bounds__(kThreads)
    maxima_joined(const float* maxima, int64_t parts, int64_t rows, float* max) {
  const int64_t r = element();
  if (r >= rows) return;
  float most = maxima[r];
  for (int64_t part = 1; part < parts; ++part) {
    const float other = maxima[part * rows + r];
    most = most < other ? other : most;
  }
  max[r] = most;
}

__global__ void __launch_bounds__(kThreads)
    sums_rescaled(const float* maxima, const float* max, int64_t parts, int64_t filled, int64_t rows, float* sums) {
  const int64_t i = element();
  if (i >= parts * rows) return;
  sums[i] = i / rows < filled ? sums[i] * expf(maxima[i] - max[i % rows]) : 0.0f;
}

__global__ void __launch_bounds__(kThreads)
    losses(const int32_t* targets, const float* max, const float* sum_exp, int64_t rows, float* loss) {
  const int64_t r = element();
  if (r < rows) loss[r] = targets[r] < 0 ? 0.0f : logf(sum_exp[r]) + (max[r] - loss[r]);
}

__global__ void __launch_bounds__(kThreads)
    scales(const int32_t* targets, const float* weights, float value, int64_t rows, float* scale) {
  const int64_t r = element();
  if (r < rows) scale[r] = targets[r] < 0 ? 0.0f : weights == nullptr ? value : value * weights[r];
}

Size one_a_row(int64_t rows, int64_t cols) {
  return {{static_cast<unsigned>(rows)}, {static_cast<unsigned>(cols <= kNarrow ? kNarrowThreads : kRowThreads)}};
}
Size one_an_element(int64_t count) { return {{blocks_for(count, kThreads)}, {kThreads}}; }

template <typename T>
bool in_packs(const T* logits, int64_t cols) {
  return cols % kWide<T> == 0 && aligned_to(16, logits);
}

}  // namespace

template <typename T>
void row_sums(Queue& on, const LogitRows& of, const T* logits, float* max, float* sum_exp, float* target_logit) {
  launch(on, one_a_row(of.rows, of.cols), in_packs(logits, of.cols) ? sums<kWide<T>, T> : sums<1, T>, logits, of.cols,
         of.valid_cols, of.first, of.targets.address(), max, sum_exp, target_logit);
}
template <typename T>
void cross_entropy_backward(Queue& on, const LogitRows& of, T* logits, const float* max, const float* sum_exp,
                            const float* scale, float z_loss, float cap) {
  launch(on, one_a_row(of.rows, of.cols), in_packs(logits, of.cols) ? gradient<kWide<T>, T> : gradient<1, T>, logits,
         of.cols, of.valid_cols, of.first, of.targets.address(), max, sum_exp, scale, z_loss,
         cap > 0 ? 1.0f / cap : 0.0f);
}
void join_maxima(Queue& on, const float* maxima, int64_t parts, int64_t rows, float* max) {
  launch(on, one_an_element(rows), maxima_joined, maxima, parts, rows, max);
}
void rescale_sums(Queue& on, const float* maxima, const float* max, int64_t parts, int64_t filled, int64_t rows,
                  float* sums) {
  launch(on, one_an_element(parts * rows), sums_rescaled, maxima, max, parts, filled, rows, sums);
}
void row_losses(Queue& on, const int32_t* targets, const float* max, const float* sum_exp, int64_t rows, float* loss) {
  launch(on, one_an_element(rows), losses, targets, max, sum_exp, rows, loss);
}
void row_scales(Queue& on, const int32_t* targets, const float* weights, float value, int64_t rows, float* scale) {
  launch(on, one_an_element(rows), scales, targets, weights, value, rows, scale);
}
template <typename T>
void cross_entropy(Queue& on, const LogitRows& of, T* logits, float scale, float z_loss, float* /*max*/,
                   float* /*sum_exp*/, float* /*scales*/, float* loss) {
  launch(on, one_a_row(of.rows, of.cols),
         in_packs(logits, of.cols) ? loss_and_gradient<kWide<T>, T> : loss_and_gradient<1, T>, logits, of.cols,
         of.valid_cols, of.targets.address(), scale, z_loss, loss);
}

#define RT_INSTANTIATE(T)                                                 \
  template decltype(row_sums<T>) row_sums<T>;                             \
  template decltype(cross_entropy_backward<T>) cross_entropy_backward<T>; \
  template decltype(cross_entropy<T>) cross_entropy<T>
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
