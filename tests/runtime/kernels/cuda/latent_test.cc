#include "runtime/kernels/cuda/latent.h"

#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::Rows;

TEST_SUITE("runtime/kernels/cuda/latent") {
  TEST_CASE_TEMPLATE("latent heads are joined and split as the CPU does", T, float, bf16, f16) {
    constexpr kernels::LatentHeads kHeads{.rows = 5, .heads = 3, .nope = 4, .rope = 11, .value = 7};
    constexpr int64_t kStride = 3 * 15 + 2, kShared = 14, kKv = 3 * 11;
    const auto kv = normals<T>("kv", 5 * kKv), shared = normals<T>("shared", 5 * kShared),
               k = normals<T>("k", 5 * kStride), v = normals<T>("v", 5 * kStride);  // what stands between rows stays
    std::vector<T> joined_k = k, joined_v = v, dkv(kv.size()), dshared = shared;
    const auto rows = [](const T* of, int64_t stride) { return Rows<const T>{DevicePtr<const T>(of), stride}; };
    const auto to = [](T* of, int64_t stride) { return Rows<T>{DevicePtr<T>(of), stride}; };
    kernels::join_latent_heads<T>(kHeads, kv.data(), rows(shared.data(), kShared), to(joined_k.data(), kStride),
                                  to(joined_v.data(), kStride));
    kernels::split_latent_heads<T>(kHeads, rows(k.data(), kStride), rows(v.data(), kStride), dkv.data(),
                                   to(dshared.data(), kShared));
    in_every_order([&] {
      OnDevice<T> d_kv(kv), d_shared(shared), d_joined_k(k), d_joined_v(v), d_k(k), d_v(v), d_dkv(std::ssize(dkv)),
          d_dshared(shared);
      Queue on;
      kernels::cuda::join_latent_heads<T>(on, kHeads, d_kv.data(), rows(d_shared.data(), kShared),
                                          to(d_joined_k.data(), kStride), to(d_joined_v.data(), kStride));
      CHECK(same_bits(d_joined_k.values(), joined_k));
      CHECK(same_bits(d_joined_v.values(), joined_v));
      kernels::cuda::split_latent_heads<T>(on, kHeads, rows(d_k.data(), kStride), rows(d_v.data(), kStride),
                                           d_dkv.data(), to(d_dshared.data(), kShared));
      CHECK(same_bits(d_dkv.values(), dkv));
      check_alike(d_dshared.values(), dshared, sum_of<T>(kHeads.heads));
    });
  }
}
