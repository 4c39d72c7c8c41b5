#pragma once
// Heads of multi-head latent attention for CUDA: runtime/kernels/latent.h.

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/latent.h"

namespace cairn::kernels::cuda {

template <typename T>
void join_latent_heads(Queue& on, const LatentHeads& d, const T* kv, const Rows<const T>& shared_key, const Rows<T>& k,
                       const Rows<T>& v);
template <typename T>
void split_latent_heads(Queue& on, const LatentHeads& d, const Rows<const T>& dk, const Rows<const T>& dv, T* dkv,
                        const Rows<T>& dshared_key);

}  // namespace cairn::kernels::cuda
