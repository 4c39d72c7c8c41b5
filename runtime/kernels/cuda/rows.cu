#include "runtime/kernels/cuda/rows.h"

#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

template <int N, typename From, typename To>
__device__ __forceinline__ void convert(const From* from, To* to) {
  const auto in = load_pack<N>(from);
  Pack<To, N> out;
#pragma unroll
  for (int k = 0; k < N; ++k) store_f32(&out.at[k], load_f32(in.at[k]));
  store_pack<N>(to, out);
}

template <typename From, typename To>
struct Convert {
  const From* from;
  To* to;
  template <int N>
  __device__ void at(int64_t i) const {
    convert<N>(from + i, to + i);
  }
};

template <typename T>
struct CopyRows {
  const T* from;
  T* to;
  int64_t from_stride, to_stride;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    store_pack<N>(to + row * to_stride + c, load_pack<N>(from + row * from_stride + c));
  }
};

template <typename From, typename To>
struct ConvertRows {
  const From* from;
  To* to;
  int64_t from_stride, to_stride;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    convert<N>(from + row * from_stride + c, to + row * to_stride + c);
  }
};

template <typename T>
struct ScatterRows {
  const T* from;
  T* to;
  const int64_t* places;
  int64_t from_stride, width;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    const int64_t place = places[row];
    if (place >= 0) store_pack<N>(to + place * width + c, load_pack<N>(from + row * from_stride + c));
  }
};

struct GatherFloats {
  const float* from;
  const int32_t* places;
  float* to;
  template <int N>
  __device__ void at(int64_t i) const {
    to[i] = from[places[i]];
  }
};
struct ScatterFloats {
  const float* from;
  const int32_t* places;
  float* to;
  template <int N>
  __device__ void at(int64_t i) const {
    to[places[i]] = from[i];
  }
};

constexpr int kFloats = 4;  // of an access of 16 bytes

constexpr unsigned kBlocksOfRun = 32;

/// blockIdx.x is the run, whose packs the blocks of blockIdx.y share.
__global__ void __launch_bounds__(kThreads) clear_runs(float* x, const ElemRun* runs) {
  float* const to = x + runs[blockIdx.x].begin;
  const int64_t count = runs[blockIdx.x].count, step = static_cast<int64_t>(gridDim.y) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const int64_t packs = reinterpret_cast<uintptr_t>(to) % 16 == 0 ? count / kFloats : 0;
  for (int64_t i = first; i < packs; i += step) store_pack<kFloats>(to + i * kFloats, Pack<float, kFloats>{});
  for (int64_t i = packs * kFloats + first; i < count; i += step) to[i] = 0;
}

}  // namespace

template <typename T>
void copy_rows(Queue& on, const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t width) {
  map_rows<kWide<T>>(on, CopyRows<T>{from, to, from_stride, to_stride}, rows, width,
                     aligned_to(16, from, to) && from_stride % kWide<T> == 0 && to_stride % kWide<T> == 0);
}
template <typename T>
void round_rows(Queue& on, const float* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows,
                int64_t width) {
  map_rows<kFloats>(on, ConvertRows<float, T>{from, to, from_stride, to_stride}, rows, width,
                    aligned_to(16, from, to) && from_stride % kFloats == 0 && to_stride % kFloats == 0);
}
template <typename T>
void scatter_rows(Queue& on, const T* from, int64_t from_stride, const int64_t* places, int64_t rows, int64_t width,
                  T* to) {
  map_rows<kWide<T>>(on, ScatterRows<T>{from, to, places, from_stride, width}, rows, width,
                     aligned_to(16, from, to) && from_stride % kWide<T> == 0);
}
template <typename T>
void to_floats(Queue& on, const T* from, float* to, int64_t count) {
  map<kFloats>(on, Convert<T, float>{from, to}, count, aligned_to(16, from, to));
}
template <typename T>
void from_floats(Queue& on, const float* from, T* to, int64_t count) {
  map<kFloats>(on, Convert<float, T>{from, to}, count, aligned_to(16, from, to));
}
template <typename T>
void rows_to_floats(Queue& on, const T* from, int64_t stride, int64_t rows, int64_t width, float* to) {
  map_rows<kFloats>(on, ConvertRows<T, float>{from, to, stride, width}, rows, width,
                    aligned_to(16, from, to) && stride % kFloats == 0);
}
void gather_floats(Queue& on, const float* from, const int32_t* places, int64_t count, float* to) {
  map<1>(on, GatherFloats{from, places, to}, count, true);
}
void scatter_floats(Queue& on, const float* from, const int32_t* places, int64_t count, float* to) {
  map<1>(on, ScatterFloats{from, places, to}, count, true);
}

#define RT_INSTANTIATE(T)                                                                         \
  template void copy_rows<T>(Queue&, const T*, int64_t, T*, int64_t, int64_t, int64_t);           \
  template void round_rows<T>(Queue&, const float*, int64_t, T*, int64_t, int64_t, int64_t);      \
  template void scatter_rows<T>(Queue&, const T*, int64_t, const int64_t*, int64_t, int64_t, T*); \
  template void rows_to_floats<T>(Queue&, const T*, int64_t, int64_t, int64_t, float*);           \
  template void to_floats<T>(Queue&, const T*, float*, int64_t);                                  \
  template void from_floats<T>(Queue&, const float*, T*, int64_t)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

void clear_floats_of_runs(Queue& on, float* x, const ElemRun* runs, int64_t run_count) {
  if (run_count > 0) launch(on, {{static_cast<unsigned>(run_count), kBlocksOfRun}, {kThreads}}, clear_runs, x, runs);
}

}  // namespace cairn::kernels::cuda
