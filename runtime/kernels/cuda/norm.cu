// A row is read once from memory, and again from the first-level cache. Rows of up to kWarpWidth columns have a warp
// each, longer ones a block.
#include "runtime/kernels/cuda/norm.h"

#include "runtime/kernels/cuda/elements.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int64_t kWarpWidth = 1024;
constexpr int kMany = 4;  // elements at once
constexpr int kRoom = 2 * kThreads / kWarp;

/// Where rows stand: `heads` of them, `width` elements apart, every `stride` elements.
template <typename T>
struct RowsAt {
  T* first;
  int64_t stride, heads, width;
  __device__ T* operator[](int64_t row) const { return first + row / heads * stride + row % heads * width; }
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

template <typename T>
struct ForwardArgs {
  RowsAt<const T> x, added;  // added.first null: x is normed as it is
  RowsAt<T> sum, y;
  const T *weight, *bias;
  float *mean, *rstd;  // null: not kept
  int64_t rows, width;
  float eps, offset;
};

template <bool kCentred, int N, typename T>
__global__ void __launch_bounds__(kThreads) norm_forward(ForwardArgs<T> of) {
  RT_SHARED(float, room, kRoom);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= of.rows) return;  // a warp alone
  const int64_t begin = threadIdx.x * N, step = blockDim.x * N;
  const T* x = of.x[row];
  float sum = 0, squares = 0;
  if (of.added.first != nullptr) {
    const T* const added = of.added[row];
    T* const out = of.sum[row];
    for (int64_t c = begin; c < of.width; c += step) {
      auto a = load_pack<N>(x + c);
      const auto b = load_pack<N>(added + c);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        store_f32(&a.at[k], load_f32(a.at[k]) + load_f32(b.at[k]));
        const float v = load_f32(a.at[k]);
        sum += v;
        squares += v * v;
      }
      store_pack<N>(out + c, a);
    }
    x = out;  // each thread reads what it wrote
  } else {
    for (int64_t c = begin; c < of.width; c += step) {
      const auto a = load_pack<N>(x + c);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float v = load_f32(a.at[k]);
        sum += v;
        squares += v * v;
      }
    }
  }
  block_sums(sum, squares, room);
  float mean = 0;
  if (kCentred) {  // a second pass: E[x^2] - mean^2 cancels
    mean = sum / static_cast<float>(of.width);
    squares = 0;
    for (int64_t c = begin; c < of.width; c += step) {
      const auto a = load_pack<N>(x + c);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float d = load_f32(a.at[k]) - mean;
        squares += d * d;
      }
    }
    float none = 0;
    block_sums(squares, none, room);
  }
  const float rstd = 1.0f / sqrtf(squares / static_cast<float>(of.width) + of.eps);
  if (threadIdx.x == 0) {
    if (of.mean != nullptr) of.mean[row] = mean;
    if (of.rstd != nullptr) of.rstd[row] = rstd;
  }
  T* const y = of.y[row];
  for (int64_t c = begin; c < of.width; c += step) {
    auto a = load_pack<N>(x + c);
    const auto w = factors<N>(of.weight, c, of.offset);
    if (of.bias != nullptr) {
      const auto b = load_pack<N>(of.bias + c);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        store_f32(&a.at[k], (load_f32(a.at[k]) - mean) * rstd * w.at[k] + load_f32(b.at[k]));
      }
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) store_f32(&a.at[k], (load_f32(a.at[k]) - mean) * rstd * w.at[k]);
    }
    store_pack<N>(y + c, a);
  }
}

template <typename T>
struct BackwardArgs {
  RowsAt<const T> dy, x;
  RowsAt<T> dx;
  const T* weight;
  const float *mean, *rstd;  // rstd null: computed again
  float* partials;           // [blocks, arrays, width]
  int64_t rows, width, arrays;
  RowRuns runs;
  float eps, offset;
};

/// With g = dy w and n = (x - mean) rstd: dx = rstd (g - [mean(g)] - n mean(g n)), the middle where the mean depends on
/// x. Each thread has its columns in all rows of the block's run, so the sums of columns need no barrier.
template <bool kCentred, int N, typename T>
__global__ void __launch_bounds__(kThreads) norm_backward(BackwardArgs<T> of) {
  RT_SHARED(float, room, kRoom);
  RT_DYNAMIC_SHARED(float, sums);  // [arrays, width]: of dy n, of dy
  const int64_t begin = threadIdx.x * N, step = blockDim.x * N;
  Pack<float, N> zeros;
#pragma unroll
  for (int k = 0; k < N; ++k) zeros.at[k] = 0;
  for (int64_t c = begin; c < of.width; c += step) {
    for (int64_t a = 0; a < of.arrays; ++a) store_pack<N>(sums + a * of.width + c, zeros);
  }
  const int64_t first = of.runs.begin(blockIdx.x), end = of.runs.end(blockIdx.x);
  const float inverse_width = 1.0f / static_cast<float>(of.width);
  for (int64_t row = first; row < end; ++row) {
    const T *const dy = of.dy[row], *const x = of.x[row];
    const float mean = kCentred ? of.mean[row] : 0.0f;
    float rstd = 0;
    if (of.rstd != nullptr) {
      rstd = of.rstd[row];
    } else {
      float squares = 0, none = 0;
      for (int64_t c = begin; c < of.width; c += step) {
        const auto a = load_pack<N>(x + c);
#pragma unroll
        for (int k = 0; k < N; ++k) squares += load_f32(a.at[k]) * load_f32(a.at[k]);
      }
      block_sums(squares, none, room);
      rstd = 1.0f / sqrtf(squares / static_cast<float>(of.width) + of.eps);
    }
    float sum_g = 0, sum_gn = 0;
    for (int64_t c = begin; c < of.width; c += step) {
      const auto d = load_pack<N>(dy + c), a = load_pack<N>(x + c);
      const auto w = factors<N>(of.weight, c, of.offset);
      auto dweight = load_pack<N>(sums + c);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float by = load_f32(d.at[k]), n = (load_f32(a.at[k]) - mean) * rstd, g = by * w.at[k];
        sum_g += g;
        sum_gn += g * n;
        dweight.at[k] += by * n;
      }
      store_pack<N>(sums + c, dweight);
      if (of.arrays > 1) {
        auto dbias = load_pack<N>(sums + of.width + c);
#pragma unroll
        for (int k = 0; k < N; ++k) dbias.at[k] += load_f32(d.at[k]);
        store_pack<N>(sums + of.width + c, dbias);
      }
    }
    block_sums(sum_g, sum_gn, room);
    const float mean_g = kCentred ? sum_g * inverse_width : 0.0f, mean_gn = sum_gn * inverse_width;
    T* const dx = of.dx[row];
    for (int64_t c = begin; c < of.width; c += step) {
      auto d = load_pack<N>(dy + c);
      const auto a = load_pack<N>(x + c);
      const auto w = factors<N>(of.weight, c, of.offset);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float n = (load_f32(a.at[k]) - mean) * rstd;
        store_f32(&d.at[k], rstd * (load_f32(d.at[k]) * w.at[k] - mean_g - n * mean_gn));
      }
      store_pack<N>(dx + c, d);
    }
  }
  float* const partials = of.partials + static_cast<int64_t>(blockIdx.x) * of.arrays * of.width;
  for (int64_t c = begin; c < of.width; c += step) {
    for (int64_t a = 0; a < of.arrays; ++a) {
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

template <bool kCentred, typename T>
void forward(Queue& on, const ForwardArgs<T>& of) {
  const bool by_warps = of.width <= kWarpWidth;
  const dim3 threads = by_warps ? dim3{kWarp, 4} : dim3{kThreads};
  const Size size{{blocks_for(of.rows, by_warps ? 4 : 1)}, threads};
  if (in_packs(of.x) && in_packs(of.added) && in_packs(of.sum) && in_packs(of.y) && in_packs(of.weight) &&
      in_packs(of.bias)) {
    launch(on, size, norm_forward<kCentred, kMany, T>, of);
  } else {
    launch(on, size, norm_forward<kCentred, 1, T>, of);
  }
}

template <bool kCentred, typename T>
void backward(Queue& on, BackwardArgs<T> of, float* dweight, float* dbias, int64_t parts) {
  const RowRuns runs = norm_runs(of.rows, parts);
  of.runs = runs;
  of.arrays = dbias != nullptr ? 2 : 1;
  const bool packs =
      in_packs(of.x) && in_packs(of.dy) && in_packs(of.dx) && in_packs(of.weight) && in_packs(of.partials);
  const int64_t warps = blocks_for(of.width, (packs ? kMany : 1) * kWarp);
  const Size size{{static_cast<unsigned>(runs.count())},
                  {static_cast<unsigned>((warps < kThreads / kWarp ? warps : kThreads / kWarp) * kWarp)},
                  of.arrays * of.width * static_cast<int64_t>(sizeof(float))};
  if (packs) {
    launch(on, size, norm_backward<kCentred, kMany, T>, of);
  } else {
    launch(on, size, norm_backward<kCentred, 1, T>, of);
  }
  if (dweight != nullptr) add_partials(on, of.partials, runs, of.arrays, of.width, dweight, dbias);
}

}  // namespace

template <typename T>
void layer_norm_forward(Queue& on, const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd,
                        int64_t rows, int64_t width, float eps, float offset) {
  forward<true, T>(on, {dense(x, width),
                        {nullptr, 0, 1, 0},
                        {nullptr, 0, 1, 0},
                        dense(y, width),
                        weight,
                        bias,
                        mean,
                        rstd,
                        rows,
                        width,
                        eps,
                        offset});
}
template <typename T>
void add_layer_norm_forward(Queue& on, const T* a, const T* b, T* sum, const T* weight, const T* bias, T* y,
                            float* mean, float* rstd, int64_t rows, int64_t width, float eps, float offset) {
  forward<true, T>(on, {dense(a, width), dense(b, width), dense(sum, width), dense(y, width), weight, bias, mean, rstd,
                        rows, width, eps, offset});
}
template <typename T>
void layer_norm_backward(Queue& on, const T* dy, const T* x, const T* weight, const float* mean, const float* rstd,
                         T* dx, float* dweight, float* dbias, int64_t rows, int64_t width, float* partials,
                         float offset, int64_t parts) {
  backward<true, T>(on,
                    {dense(dy, width),
                     dense(x, width),
                     dense(dx, width),
                     weight,
                     mean,
                     rstd,
                     partials,
                     rows,
                     width,
                     0,
                     {},
                     0,
                     offset},
                    dweight, dbias, parts);
}
template <typename T>
void rms_norm_forward(Queue& on, const T* x, const T* weight, T* y, float* rstd, int64_t rows, int64_t width, float eps,
                      float offset) {
  forward<false, T>(on, {dense(x, width),
                         {nullptr, 0, 1, 0},
                         {nullptr, 0, 1, 0},
                         dense(y, width),
                         weight,
                         nullptr,
                         nullptr,
                         rstd,
                         rows,
                         width,
                         eps,
                         offset});
}
template <typename T>
void add_rms_norm_forward(Queue& on, const T* a, const T* b, T* sum, const T* weight, T* y, float* rstd, int64_t rows,
                          int64_t width, float eps, float offset) {
  forward<false, T>(on, {dense(a, width), dense(b, width), dense(sum, width), dense(y, width), weight, nullptr, nullptr,
                         rstd, rows, width, eps, offset});
}
template <typename T>
void rms_norm_backward(Queue& on, const T* dy, const T* x, const T* weight, const float* rstd, T* dx, float* dweight,
                       int64_t rows, int64_t width, float* partials, float offset, int64_t parts) {
  backward<false, T>(on,
                     {dense(dy, width),
                      dense(x, width),
                      dense(dx, width),
                      weight,
                      nullptr,
                      rstd,
                      partials,
                      rows,
                      width,
                      0,
                      {},
                      0,
                      offset},
                     dweight, nullptr, parts);
}
template <typename T>
void head_norm_forward(Queue& on, const T* x, int64_t x_stride, const T* weight, T* y, int64_t y_stride, int64_t rows,
                       int64_t heads, int64_t head_dim, float eps, float offset) {
  forward<false, T>(on, {{x, x_stride, heads, head_dim},
                         {nullptr, 0, 1, 0},
                         {nullptr, 0, 1, 0},
                         {y, y_stride, heads, head_dim},
                         weight,
                         nullptr,
                         nullptr,
                         nullptr,
                         rows * heads,
                         head_dim,
                         eps,
                         offset});
}
template <typename T>
void head_norm_backward(Queue& on, const T* dy, int64_t dy_stride, const T* x, int64_t x_stride, const T* weight, T* dx,
                        int64_t dx_stride, float* dweight, int64_t rows, int64_t heads, int64_t head_dim, float eps,
                        float* partials, float offset) {
  backward<false, T>(on,
                     {{dy, dy_stride, heads, head_dim},
                      {x, x_stride, heads, head_dim},
                      {dx, dx_stride, heads, head_dim},
                      weight,
                      nullptr,
                      nullptr,
                      partials,
                      rows * heads,
                      head_dim,
                      0,
                      {},
                      eps,
                      offset},
                     dweight, nullptr, 1);
}

#define RT_INSTANTIATE(T)                                                                                              \
  template void layer_norm_forward<T>(Queue&, const T*, const T*, const T*, T*, float*, float*, int64_t, int64_t,      \
                                      float, float);                                                                   \
  template void add_layer_norm_forward<T>(Queue&, const T*, const T*, T*, const T*, const T*, T*, float*, float*,      \
                                          int64_t, int64_t, float, float);                                             \
  template void layer_norm_backward<T>(Queue&, const T*, const T*, const T*, const float*, const float*, T*, float*,   \
                                       float*, int64_t, int64_t, float*, float, int64_t);                              \
  template void rms_norm_forward<T>(Queue&, const T*, const T*, T*, float*, int64_t, int64_t, float, float);           \
  template void add_rms_norm_forward<T>(Queue&, const T*, const T*, T*, const T*, T*, float*, int64_t, int64_t, float, \
                                        float);                                                                        \
  template void rms_norm_backward<T>(Queue&, const T*, const T*, const T*, const float*, T*, float*, int64_t, int64_t, \
                                     float*, float, int64_t);                                                          \
  template void head_norm_forward<T>(Queue&, const T*, int64_t, const T*, T*, int64_t, int64_t, int64_t, int64_t,      \
                                     float, float);                                                                    \
  template void head_norm_backward<T>(Queue&, const T*, int64_t, const T*, int64_t, const T*, T*, int64_t, float*,     \
                                      int64_t, int64_t, int64_t, float, float*, float)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
