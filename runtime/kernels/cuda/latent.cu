#include "runtime/kernels/cuda/latent.h"

#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

template <typename T>
struct RowsAt {
  T* first;
  int64_t stride;
  explicit RowsAt(const Rows<T>& rows) : first(rows.data.address()), stride(rows.stride) {}
  __device__ __forceinline__ T& at(int64_t row, int64_t c) const { return first[row * stride + c]; }
};

/// Elements of k, and of v at the same place.
template <typename T>
struct Join {
  LatentHeads d;
  const T* kv;
  RowsAt<const T> shared_key;
  RowsAt<T> k, v;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    static_assert(N == 1);
    const int64_t width = d.nope + d.rope, head = c / width, i = c % width;
    const T* const own = kv + (row * d.heads + head) * (d.nope + d.value);
    k.at(row, c) = i < d.nope ? own[i] : shared_key.at(row, i - d.nope);
    if (i < d.value) {
      v.at(row, c) = own[d.nope + i];
    } else {
      store_f32(&v.at(row, c), 0.0f);
    }
  }
};

template <typename T>
struct Split {
  LatentHeads d;
  RowsAt<const T> dk, dv;
  T* dkv;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    static_assert(N == 1);
    const int64_t width = d.nope + d.value, head = c / width, i = c % width, of_head = head * (d.nope + d.rope);
    dkv[row * d.heads * width + c] = i < d.nope ? dk.at(row, of_head + i) : dv.at(row, of_head + i - d.nope);
  }
};

template <typename T>
struct SharedKey {
  LatentHeads d;
  RowsAt<const T> dk;
  RowsAt<T> dshared_key;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    static_assert(N == 1);
    float sum = 0;
    for (int64_t head = 0; head < d.heads; ++head) {
      sum += load_f32(dk.at(row, head * (d.nope + d.rope) + d.nope + c));
    }
    store_f32(&dshared_key.at(row, c), sum);
  }
};

}  // namespace

template <typename T>
void join_latent_heads(Queue& on, const LatentHeads& d, const T* kv, const Rows<const T>& shared_key, const Rows<T>& k,
                       const Rows<T>& v) {
  map_rows<1>(on, Join<T>{d, kv, RowsAt<const T>(shared_key), RowsAt<T>(k), RowsAt<T>(v)}, d.rows,
              d.heads * (d.nope + d.rope), true);
}
template <typename T>
void split_latent_heads(Queue& on, const LatentHeads& d, const Rows<const T>& dk, const Rows<const T>& dv, T* dkv,
                        const Rows<T>& dshared_key) {
  map_rows<1>(on, Split<T>{d, RowsAt<const T>(dk), RowsAt<const T>(dv), dkv}, d.rows, d.heads * (d.nope + d.value),
              true);
  map_rows<1>(on, SharedKey<T>{d, RowsAt<const T>(dk), RowsAt<T>(dshared_key)}, d.rows, d.rope, true);
}

#define RT_INSTANTIATE(T)                                                                                         \
  template void join_latent_heads<T>(Queue&, const LatentHeads&, const T*, const Rows<const T>&, const Rows<T>&,  \
                                     const Rows<T>&);                                                             \
  template void split_latent_heads<T>(Queue&, const LatentHeads&, const Rows<const T>&, const Rows<const T>&, T*, \
                                      const Rows<T>&)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
