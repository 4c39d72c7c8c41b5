#include "runtime/kernels/cuda/dropout.h"

#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

template <typename T>
struct Drop {
  const T* x;
  T* out;
  int64_t width, first_row, samples;
  TokenRuns tokens;
  const uint64_t* sample_keys;
  uint64_t site;
  DropoutRate rate;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    TokenRuns::Place place;
    if (tokens.whole()) {  // by the shorter division
      place.sample = ratio(first_row + row, tokens.count);
      place.position = first_row + row - place.sample * tokens.count;
    } else {
      place = tokens.place(first_row + row, samples);
    }
    const uint64_t key = dropout_row_key(sample_keys[place.sample], site, static_cast<uint64_t>(place.position));
    auto of = load_pack<N>(x + row * width + c);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const uint32_t hash =
          dropout_hash(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(c + k));
      store_f32(&of.at[k], load_f32(of.at[k]) * (hash < rate.threshold ? 0.0f : rate.keep_scale));
    }
    store_pack<N>(out + row * width + c, of);
  }
};

}  // namespace

template <typename T>
void dropout(Queue& on, const DropoutRows& of, const T* x, T* out) {
  const Drop<T> drop{x, out, of.width, of.first_row, of.samples, of.tokens, of.sample_keys.address(), of.site, of.rate};
  map_rows<kWide<T>>(on, drop, of.rows, of.width, aligned_to(16, x, out));
}

#define RT_INSTANTIATE(T) template decltype(dropout<T>) dropout<T>
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
