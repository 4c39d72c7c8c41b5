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

template <typename T>
bool in_packs(const Rows<T>& rows) {
  return rows.stride % kWide<T> == 0 && aligned_to(16, rows.data.address());
}
/// Whether a pack is of one of a head's pieces.
template <typename T>
bool in_packs(const LatentHeads& d, const T* kv) {
  return d.nope % kWide<T> == 0 && d.rope % kWide<T> == 0 && d.value % kWide<T> == 0 && aligned_to(16, kv);
}

/// Elements of k, and of v at the same place.
template <typename T>
struct Join {
  LatentHeads d;
  const T* kv;
  RowsAt<const T> shared_key;
  RowsAt<T> k, v;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    const int64_t width = d.nope + d.rope, head = ratio(c, width), i = c - head * width;
    const T* const own = kv + (row * d.heads + head) * (d.nope + d.value);
    store_pack<N>(&k.at(row, c), load_pack<N>(i < d.nope ? own + i : &shared_key.at(row, i - d.nope)));
    Pack<T, N> value;
    if (i < d.value) {
      value = load_pack<N>(own + d.nope + i);
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) store_f32(&value.at[e], 0.0f);
    }
    store_pack<N>(&v.at(row, c), value);
  }
};

template <typename T>
struct Split {
  LatentHeads d;
  RowsAt<const T> dk, dv;
  T* dkv;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    const int64_t width = d.nope + d.value, head = ratio(c, width), i = c - head * width,
                  of_head = head * (d.nope + d.rope);
    store_pack<N>(dkv + row * d.heads * width + c,
                  load_pack<N>(i < d.nope ? &dk.at(row, of_head + i) : &dv.at(row, of_head + i - d.nope)));
  }
};

template <typename T>
struct SharedKey {
  LatentHeads d;
  RowsAt<const T> dk;
  RowsAt<T> dshared_key;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    float sum[N];
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] = 0;
#pragma unroll 4
    for (int64_t head = 0; head < d.heads; ++head) {
      const auto of = load_pack<N>(&dk.at(row, head * (d.nope + d.rope) + d.nope + c));
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] += load_f32(of.at[e]);
    }
    Pack<T, N> out;
#pragma unroll
    for (int e = 0; e < N; ++e) store_f32(&out.at[e], sum[e]);
    store_pack<N>(&dshared_key.at(row, c), out);
  }
};

}  // namespace

template <typename T>
void join_latent_heads(Queue& on, const LatentHeads& d, const T* kv, const Rows<const T>& shared_key, const Rows<T>& k,
                       const Rows<T>& v) {
  map_rows<kWide<T>>(on, Join<T>{d, kv, RowsAt<const T>(shared_key), RowsAt<T>(k), RowsAt<T>(v)}, d.rows,
                     d.heads * (d.nope + d.rope),
                     in_packs(d, kv) && in_packs(shared_key) && in_packs(k) && in_packs(v));
}
template <typename T>
void split_latent_heads(Queue& on, const LatentHeads& d, const Rows<const T>& dk, const Rows<const T>& dv, T* dkv,
                        const Rows<T>& dshared_key) {
  const bool packs = in_packs(d, dkv) && in_packs(dk) && in_packs(dv) && in_packs(dshared_key);
  map_rows<kWide<T>>(on, Split<T>{d, RowsAt<const T>(dk), RowsAt<const T>(dv), dkv}, d.rows,
                     d.heads * (d.nope + d.value), packs);
  map_rows<kWide<T>>(on, SharedKey<T>{d, RowsAt<const T>(dk), RowsAt<T>(dshared_key)}, d.rows, d.rope, packs);
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
