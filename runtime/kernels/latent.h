#pragma once
// Heads of multi-head latent attention (DeepSeek-V2): what comes out of the latent vector, and what attention reads.

#include <cstdint>

#include "runtime/kernels/views.h"

namespace cairn::kernels {

/// Legend: T rows, N heads. A head has `nope` channels of a key and `value` channels of a value that are its own, and
/// `rope` channels of a key that all heads share. Attention has equally wide keys and values, nope + rope >= value.
struct LatentHeads {
  int64_t rows = 0, heads = 0, nope = 0, rope = 0, value = 0;
};
inline void add_dims(OpDims& to, const LatentHeads& of) {
  to.add(of.rows);
  to.add(of.heads);
  to.add(of.nope);
  to.add(of.rope);
  to.add(of.value);
}

/// k and v [T, N, nope + rope] from kv [T, N, nope + value] and shared_key [T, rope]. What v has beyond `value` is 0.
template <typename T>
void join_latent_heads(const LatentHeads& d, const T* kv, const Rows<const T>& shared_key, const Rows<T>& k,
                       const Rows<T>& v);

/// The other way for gradients. That of the shared key is the sum over the heads, in float, rounded once.
template <typename T>
void split_latent_heads(const LatentHeads& d, const Rows<const T>& dk, const Rows<const T>& dv, T* dkv,
                        const Rows<T>& dshared_key);

}  // namespace cairn::kernels
