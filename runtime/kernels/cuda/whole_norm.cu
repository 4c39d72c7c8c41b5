#include "runtime/kernels/cuda/whole_norm.h"

#include "runtime/kernels/cuda/column_sums.h"
#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kMany = 4;
constexpr int kWarps = kThreads / kWarp;

/// Rows of elements, as kernels have them.
template <typename T>
struct RowsAt {
  T* first;
  int64_t stride;
  explicit RowsAt(const Rows<T>& rows) : first(rows.data.address()), stride(rows.stride) {}
  __device__ __forceinline__ T* at(int64_t row, int64_t c) const { return first + row * stride + c; }
};
template <typename T>
bool in_packs(const Rows<T>& rows) {
  return rows.stride % kMany == 0 && aligned_to(kMany * static_cast<int64_t>(sizeof(T)), rows.data.address());
}
template <typename T>
bool in_packs(const T* columns) {
  return aligned_to(kMany * static_cast<int64_t>(sizeof(T)), columns);
}

/// The factor of each of N channels; 1 without weights.
template <int N, typename T>
__device__ __forceinline__ Pack<float, N> factors(const T* weight, int64_t c, float offset) {
  Pack<float, N> out;
#pragma unroll
  for (int k = 0; k < N; ++k) out.at[k] = 1.0f;
  if (weight == nullptr) return out;
  const auto of = load_pack<N>(weight + c);
#pragma unroll
  for (int k = 0; k < N; ++k) out.at[k] = load_f32(of.at[k]) + offset;
  return out;
}

/// A warp has a part of a row.
template <int N, typename T>
__global__ void __launch_bounds__(kThreads)
    dots_of_rows(RowDots d, RowsAt<const T> a, RowsAt<const T> b, const T* weight, float offset, float* sums) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (at >= d.rows * d.parts) return;  // a warp alone
  const int64_t row = at / d.parts, part = at % d.parts, width = d.width / d.parts;
  float sum = 0;
  for (int64_t c = part * width + threadIdx.x * N; c < (part + 1) * width; c += kWarp * N) {
    const auto x = load_pack<N>(a.at(row, c)), y = load_pack<N>(b.at(row, c));
    const auto w = factors<N>(weight, c, offset);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += load_f32(x.at[k]) * load_f32(y.at[k]) * w.at[k];
  }
  sum = warp_sum(sum);
  if (threadIdx.x == 0) sums[part * d.stride + row] = sum;
}

struct Stats {
  const float* squares;
  float eps, channels;
  explicit Stats(const WholeNorm& d, const float* of)
      : squares(of), eps(d.eps), channels(static_cast<float>(d.copies * d.channels)) {}
  __device__ __forceinline__ float rstd(int64_t row) const { return 1.0f / sqrtf(squares[row] / channels + eps); }
};

template <typename T>
struct Forward {
  Stats stats;
  RowsAt<const T> x;
  RowsAt<T> y;
  const T* weight;
  float offset;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    const float rstd = stats.rstd(row);
    auto of = load_pack<N>(x.at(row, c));
    const auto w = factors<N>(weight, c, offset);
#pragma unroll
    for (int k = 0; k < N; ++k) store_f32(&of.at[k], load_f32(of.at[k]) * rstd * w.at[k]);
    store_pack<N>(y.at(row, c), of);
  }
};

template <typename T>
struct Backward {
  Stats stats;
  const float* dots;
  RowsAt<const T> dy, x;
  RowsAt<T> dx;
  const T* weight;
  float offset;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    const float rstd = stats.rstd(row), mean = dots[row] * rstd / stats.channels;
    auto by = load_pack<N>(dy.at(row, c));
    const auto of = load_pack<N>(x.at(row, c));
    const auto w = factors<N>(weight, c, offset);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      store_f32(&by.at[k], rstd * (load_f32(by.at[k]) * w.at[k] - load_f32(of.at[k]) * rstd * mean));
    }
    store_pack<N>(dx.at(row, c), by);
  }
};

template <typename T>
struct WeightGradients {
  Stats stats;
  RowsAt<const T> dy, x;
  template <int N>
  __device__ __forceinline__ Pack<float, N> at(int64_t row, int64_t c) const {
    const float rstd = stats.rstd(row);
    const auto by = load_pack<N>(dy.at(row, c)), of = load_pack<N>(x.at(row, c));
    Pack<float, N> out;
#pragma unroll
    for (int k = 0; k < N; ++k) out.at[k] = load_f32(by.at[k]) * (load_f32(of.at[k]) * rstd);
    return out;
  }
};

}  // namespace

template <typename T>
void row_dots(Queue& on, const RowDots& d, const Rows<const T>& a, const Rows<const T>& b, const T* weight,
              float offset, float* sums) {
  const Size size{{blocks_for(d.rows * d.parts, kWarps)}, {kWarp, kWarps}};
  if (d.width / d.parts % kMany == 0 && in_packs(a) && in_packs(b) && in_packs(weight)) {
    launch(on, size, dots_of_rows<kMany, T>, d, RowsAt<const T>(a), RowsAt<const T>(b), weight, offset, sums);
  } else {
    launch(on, size, dots_of_rows<1, T>, d, RowsAt<const T>(a), RowsAt<const T>(b), weight, offset, sums);
  }
}

template <typename T>
void whole_norm_forward(Queue& on, const WholeNorm& d, const Rows<const T>& x, const T* weight, const float* squares,
                        const Rows<T>& y) {
  map_rows<kMany>(on, Forward<T>{Stats(d, squares), RowsAt<const T>(x), RowsAt<T>(y), weight, d.offset}, d.rows,
                  d.width, in_packs(x) && in_packs(y) && in_packs(weight));
}

template <typename T>
void whole_norm_backward(Queue& on, const WholeNorm& d, const Rows<const T>& dy, const Rows<const T>& x,
                         const T* weight, const float* squares, const float* dots, const Rows<T>& dx,
                         const NormGradients& to) {
  const Stats stats(d, squares);
  if (to.weight) {  // first: dx may be dy
    add_columns(on, WeightGradients<T>{stats, RowsAt<const T>(dy), RowsAt<const T>(x)}, d.rows, d.width,
                in_packs(dy) && in_packs(x), to.weight.address(), parts_of(to.parts));
  }
  map_rows<kMany>(on,
                  Backward<T>{stats, dots, RowsAt<const T>(dy), RowsAt<const T>(x), RowsAt<T>(dx), weight, d.offset},
                  d.rows, d.width, in_packs(dy) && in_packs(x) && in_packs(dx) && in_packs(weight));
}

#define RT_INSTANTIATE(T)                                         \
  template decltype(row_dots<T>) row_dots<T>;                     \
  template decltype(whole_norm_forward<T>) whole_norm_forward<T>; \
  template decltype(whole_norm_backward<T>) whole_norm_backward<T>
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
