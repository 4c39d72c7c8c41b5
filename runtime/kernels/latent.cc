#include "runtime/kernels/latent.h"

#include <algorithm>

#include "runtime/core/check.h"
#include "runtime/core/dtype.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

template <typename T>
RT_INLINE void add_channels_leaf_body(const T* x, float* sums, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sums[i] += load_f32(x[i]);
}
RT_CLONES(add_channels_leaf)

}  // namespace

template <typename T>
void join_latent_heads(const LatentHeads& d, const T* kv, const Rows<const T>& shared_key, const Rows<T>& k,
                       const Rows<T>& v) {
  const int64_t width = d.nope + d.rope, own = d.nope + d.value;
  RT_CHECK(d.value <= width, "values of {} channels in heads of {}", d.value, width);
  parallel_ranges(d.rows, 1, d.heads * 2 * width, [=](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const T* from = kv + row * d.heads * own;
      T* to_k = k.row(row);
      T* to_v = v.row(row);
      for (int64_t h = 0; h < d.heads; ++h, from += own, to_k += width, to_v += width) {
        std::copy_n(from, d.nope, to_k);
        std::copy_n(shared_key.row(row), d.rope, to_k + d.nope);
        std::copy_n(from + d.nope, d.value, to_v);
        std::fill_n(to_v + d.value, width - d.value, T{});
      }
    }
  });
}

template <typename T>
void split_latent_heads(const LatentHeads& d, const Rows<const T>& dk, const Rows<const T>& dv, T* dkv,
                        const Rows<T>& dshared_key) {
  const int64_t width = d.nope + d.rope, own = d.nope + d.value;
  parallel_ranges(d.rows, 1, d.heads * 2 * width, [=](int64_t row, int64_t end) {
    constexpr int64_t kPiece = 128;  // channels of the shared key at a time, whose sums lie on the stack
    for (; row < end; ++row) {
      const T* const from_k = dk.row(row);
      const T* const from_v = dv.row(row);
      T* to = dkv + row * d.heads * own;
      for (int64_t h = 0; h < d.heads; ++h, to += own) {
        std::copy_n(from_k + h * width, d.nope, to);
        std::copy_n(from_v + h * width, d.value, to + d.nope);
      }
      for (int64_t c = 0; c < d.rope; c += kPiece) {
        const int64_t n = std::min(kPiece, d.rope - c);
        float sums[kPiece] = {};
        for (int64_t h = 0; h < d.heads; ++h) add_channels_leaf(from_k + h * width + d.nope + c, sums, n);
        T* const shared = dshared_key.row(row) + c;
        for (int64_t i = 0; i < n; ++i) store_f32(&shared[i], sums[i]);
      }
    }
  });
}

#define RT_INSTANTIATE(T)                                                                                 \
  template void join_latent_heads<T>(const LatentHeads&, const T*, const Rows<const T>&, const Rows<T>&,  \
                                     const Rows<T>&);                                                     \
  template void split_latent_heads<T>(const LatentHeads&, const Rows<const T>&, const Rows<const T>&, T*, \
                                      const Rows<T>&)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels
