#include "runtime/kernels/latent.h"

#include "kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

constexpr kernels::LatentHeads kHeads{.rows = 5, .heads = 3, .nope = 4, .rope = 130, .value = 7};
constexpr int64_t kWidth = kHeads.nope + kHeads.rope, kOwn = kHeads.nope + kHeads.value;
constexpr int64_t kStride = kHeads.heads * kWidth + 3, kSharedStride = kHeads.rope + 2;

template <typename T>
kernels::Rows<const T> rows_of(const std::vector<T>& x, int64_t stride) {
  return {DevicePtr<const T>(x.data()), stride};
}
template <typename T>
kernels::Rows<T> rows_to(std::vector<T>& x, int64_t stride) {
  return {DevicePtr<T>(x.data()), stride};
}

template <typename T>
void check_join() {
  const std::vector<T> kv = normals<T>("kv", kHeads.rows * kHeads.heads * kOwn);
  const std::vector<T> shared = normals<T>("shared", kHeads.rows * kSharedStride);
  std::vector<T> k = normals<T>("before", kHeads.rows * kStride), v = k;
  std::vector<double> want_k = doubles(k), want_v = doubles(v);
  for (int64_t r = 0; r < kHeads.rows; ++r) {
    for (int64_t h = 0; h < kHeads.heads; ++h) {
      for (int64_t c = 0; c < kWidth; ++c) {
        const int64_t at = r * kStride + h * kWidth + c, own = (r * kHeads.heads + h) * kOwn;
        want_k[at] = to_f32(c < kHeads.nope ? kv[own + c] : shared[r * kSharedStride + c - kHeads.nope]);
        want_v[at] = c < kHeads.value ? to_f32(kv[own + kHeads.nope + c]) : 0.0f;
      }
    }
  }
  kernels::join_latent_heads(kHeads, kv.data(), rows_of(shared, kSharedStride), rows_to(k, kStride),
                             rows_to(v, kStride));
  CHECK(doubles(k) == want_k);
  CHECK(doubles(v) == want_v);
}

template <typename T>
void check_split() {
  const std::vector<T> dk = normals<T>("dk", kHeads.rows * kStride), dv = normals<T>("dv", kHeads.rows * kStride);
  std::vector<T> dkv = normals<T>("dkv", kHeads.rows * kHeads.heads * kOwn);
  std::vector<T> shared = normals<T>("dshared", kHeads.rows * kSharedStride);
  std::vector<double> want(dkv.size()), want_shared = doubles(shared);
  for (int64_t r = 0; r < kHeads.rows; ++r) {
    for (int64_t c = 0; c < kHeads.rope; ++c) want_shared[r * kSharedStride + c] = 0;
    for (int64_t h = 0; h < kHeads.heads; ++h) {
      const int64_t at = r * kStride + h * kWidth, own = (r * kHeads.heads + h) * kOwn;
      for (int64_t c = 0; c < kOwn; ++c) {
        want[own + c] = to_f32(c < kHeads.nope ? dk[at + c] : dv[at + c - kHeads.nope]);
      }
      for (int64_t c = 0; c < kHeads.rope; ++c) want_shared[r * kSharedStride + c] += to_f32(dk[at + kHeads.nope + c]);
    }
  }
  kernels::split_latent_heads(kHeads, rows_of(dk, kStride), rows_of(dv, kStride), dkv.data(),
                              rows_to(shared, kSharedStride));
  CHECK(doubles(dkv) == want);
  check_close(shared, want_shared, sum_of<T>(kHeads.heads));
}

}  // namespace

TEST_SUITE("runtime/kernels/latent") {
  TEST_CASE("keys and values of all heads from what each has and what they share") {
    check_join<float>();
    check_join<bf16>();
    check_join<f16>();
  }
  TEST_CASE("the gradient of what heads share is the sum over them, rounded once") {
    check_split<float>();
    check_split<bf16>();
    check_split<f16>();
  }
}
