#include "tests/simt/matrix_probes.h"

#include "runtime/kernels/cuda/matrix_units.h"

namespace cairn::simt::probes {

using kernels::cuda::add_product;
using kernels::cuda::begin_copy;
using kernels::cuda::end_copy_group;
using kernels::cuda::launch;
using kernels::cuda::load_matrices;
using kernels::cuda::load_transposed;
using kernels::cuda::Queue;
using kernels::cuda::shared_at;
using kernels::cuda::SharedAt;
using kernels::cuda::wait_for_copies;

namespace {

template <typename T>
__device__ uint32_t word(T first, T second) {
  return first.bits | static_cast<uint32_t>(second.bits) << 16;
}

/// Words are where the PTX ISA has them.
template <typename T>
__global__ void product(const T* left, const T* right, const float* sums, float* out) {
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
  const auto a = [&](int r, int c) { return word(left[r * 16 + c], left[r * 16 + c + 1]); };
  const auto b = [&](int r) { return word(right[r * 8 + g], right[(r + 1) * 8 + g]); };
  const uint32_t words[4] = {a(g, 2 * t), a(g + 8, 2 * t), a(g, 2 * t + 8), a(g + 8, 2 * t + 8)};
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = sums[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  add_product<T>(c, words, b(2 * t), b(2 * t + 8));
  for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

__global__ void loaded(const bf16* from, bf16* out, bool transposed, int skew) {
  RT_DYNAMIC_SHARED(bf16, room);
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 256; i += 32) room[i + skew] = from[i];
  __syncthreads();
  uint32_t words[4];
  const SharedAt row = shared_at(room + lane * 8 + skew);
  if (transposed) {
    load_transposed(words, row);
  } else {
    load_matrices(words, row);
  }
  for (int j = 0; j < 4; ++j) {
    for (int half = 0; half < 2; ++half) {
      const int r = transposed ? 2 * (lane % 4) + half : lane / 4, c = transposed ? lane / 4 : 2 * (lane % 4) + half;
      out[j * 64 + r * 8 + c].bits = static_cast<uint16_t>(words[j] >> (16 * half));
    }
  }
}

/// Two groups of copies, the second one on its way when the first one is read.
__global__ void copied(const float* from, float* out, int count, bool early, bool waits) {
  RT_SHARED(float, room, 2 * 32 * 4);
  const int lane = static_cast<int>(threadIdx.x);
  begin_copy<16>(shared_at(room + lane * 4), from + lane * 4, lane * 4 < count);
  end_copy_group();
  begin_copy<4>(shared_at(room + 128 + lane), from + 128 + lane, lane < count);
  end_copy_group();
  if (!early) wait_for_copies<1>();
  for (int k = 0; k < 4; ++k) out[lane * 4 + k] = room[lane * 4 + k];
  if (waits) wait_for_copies<0>();
  out[128 + lane] = room[128 + lane];
}

}  // namespace

template <typename T>
void multiply(Queue& on, const T* left, const T* right, const float* sums, float* out) {
  launch(on, {{1}, {32}}, product<T>, left, right, sums, out);
}
template void multiply<bf16>(Queue&, const bf16*, const bf16*, const float*, float*);
template void multiply<f16>(Queue&, const f16*, const f16*, const float*, float*);
void load(Queue& on, const bf16* from, bf16* out, bool transposed, int skew) {
  launch(on, {{1}, {32}, 1024}, loaded, from, out, transposed, skew);
}
void copy(Queue& on, const float* from, float* out, int count, bool early, bool waits) {
  launch(on, {{1}, {32}}, copied, from, out, count, early, waits);
}

}  // namespace cairn::simt::probes
