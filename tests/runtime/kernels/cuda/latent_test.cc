#include "runtime/kernels/cuda/latent.h"

#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::Rows;

namespace {

/// Rows of heads and of shared keys have `between` elements more, which stay.
template <typename T>
void compare(const kernels::LatentHeads& of, int64_t between) {
  const int64_t stride = of.heads * (of.nope + of.rope) + between, shared_stride = of.rope + between,
                kv_width = of.heads * (of.nope + of.value);
  const auto kv = normals<T>("kv", of.rows * kv_width), shared = normals<T>("shared", of.rows * shared_stride),
             k = normals<T>("k", of.rows * stride), v = normals<T>("v", of.rows * stride);
  std::vector<T> joined_k = k, joined_v = v, dkv(kv.size()), dshared = shared;
  const auto rows = [](const T* at, int64_t each) { return Rows<const T>{DevicePtr<const T>(at), each}; };
  const auto to = [](T* at, int64_t each) { return Rows<T>{DevicePtr<T>(at), each}; };
  kernels::join_latent_heads<T>(of, kv.data(), rows(shared.data(), shared_stride), to(joined_k.data(), stride),
                                to(joined_v.data(), stride));
  kernels::split_latent_heads<T>(of, rows(k.data(), stride), rows(v.data(), stride), dkv.data(),
                                 to(dshared.data(), shared_stride));
  in_every_order([&] {
    OnDevice<T> d_kv(kv), d_shared(shared), d_joined_k(k), d_joined_v(v), d_k(k), d_v(v), d_dkv(std::ssize(dkv)),
        d_dshared(shared);
    Queue on;
    kernels::cuda::join_latent_heads<T>(on, of, d_kv.data(), rows(d_shared.data(), shared_stride),
                                        to(d_joined_k.data(), stride), to(d_joined_v.data(), stride));
    CHECK(same_bits(d_joined_k.values(), joined_k));
    CHECK(same_bits(d_joined_v.values(), joined_v));
    kernels::cuda::split_latent_heads<T>(on, of, rows(d_k.data(), stride), rows(d_v.data(), stride), d_dkv.data(),
                                         to(d_dshared.data(), shared_stride));
    CHECK(same_bits(d_dkv.values(), dkv));
    check_alike(d_dshared.values(), dshared, sum_of<T>(of.heads));
  });
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/latent") {
  TEST_CASE_TEMPLATE("latent heads are joined and split as the CPU does", T, float, bf16, f16) {
    compare<T>({.rows = 5, .heads = 3, .nope = 4, .rope = 11, .value = 7}, 2);
  }
  TEST_CASE_TEMPLATE("latent heads whose pieces are packs, too", T, float, bf16, f16) {
    compare<T>({.rows = 5, .heads = 3, .nope = 16, .rope = 8, .value = 8}, 8);
  }
}
