#include "tests/simt/planted.h"

#include "runtime/kernels/cuda/matrix_units.h"

namespace cairn::simt::planted {

using kernels::cuda::launch;
using kernels::cuda::load_pack;
using kernels::cuda::Pack;
using kernels::cuda::Queue;
using kernels::cuda::store_pack;

namespace {

constexpr int kThreads = 96, kWarps = kThreads / 32;

__device__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

__device__ float block_sum(float x, float* room, Bug bug) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  if (bug != Bug::kSumReadEarly) __syncthreads();
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += room[w];
  if (bug != Bug::kRoomWrittenEarly) __syncthreads();
  return sum;
}

__global__ void centre(const float* x, float* y, int64_t rows, int64_t width, Bug bug) {
  RT_SHARED(float, room, kWarps + 1);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float* const from = x + row * width;
    float* const to = y + row * width;
    float sum = 0, top = -INFINITY;
    for (int64_t c = threadIdx.x; c < width; c += kThreads) {
      sum += from[c];
      top = fmaxf(top, from[c]);
    }
    const float mean = block_sum(sum, room, bug) / static_cast<float>(width);
    top = warp_max(top);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = top;
    if (bug != Bug::kMaximaReadEarly) __syncthreads();
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, room[w]);
    __syncthreads();
    if (bug == Bug::kSharedUnwritten) top = fmaxf(top, room[kWarps]);
    const int64_t end = bug == Bug::kBehindTheRow ? width + 4 : width;
    for (int64_t c = threadIdx.x * 4; c < end; c += kThreads * 4) {
      auto pack = load_pack<4>(from + (c < width ? c : 0));
      for (float& v : pack.at) v = (v - mean) * top;
      store_pack<4>(to + c, pack);
    }
    if (bug == Bug::kBlocksMeet && threadIdx.x == 0) y[0] = top;
  }
}

__global__ void softmax(float* logits, const int32_t* targets, float* loss, int64_t width, Bug bug) {
  RT_SHARED(float, room, kWarps);
  float* const row = logits + blockIdx.x * width;
  float sum = 0;
  for (int64_t c = threadIdx.x; c < width; c += kThreads) sum += expf(row[c]);
  const float all = block_sum(sum, room, Bug::kNone);
  const int32_t target = targets[blockIdx.x];
  float at = 0;
  if (bug != Bug::kTargetOverwritten) {
    if (threadIdx.x == 0) at = row[target];
    __syncthreads();
  }
  for (int64_t c = threadIdx.x; c < width; c += kThreads) {
    if (bug == Bug::kTargetOverwritten && c == 0) at = row[target];
    row[c] = expf(row[c]) / all;
  }
  if (threadIdx.x == 0) loss[blockIdx.x] = logf(all) - at;
}

__global__ void add_scaled(float* w, const float* g, float rate, int64_t count, Bug bug) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (i + 4 <= count) {
    auto to = load_pack<4>(w + i);
    const auto by = load_pack<4>(g + i);
    for (int k = 0; k < 4; ++k) to.at[k] += rate * by.at[k];
    store_pack<4>(w + i, to);
  } else if (i < count) {
    for (int64_t k = i; k < (bug == Bug::kTailTooLong ? i + 4 : count); ++k) w[k] += rate * g[k];
  }
}

__global__ void added_tiles(const float* from, float* sums, int64_t tiles, Bug bug) {
  RT_SHARED(float, room, 2 * kThreads * 4);
  const int thread = static_cast<int>(threadIdx.x);
  const auto begin = [&](int64_t tile) {
    float* const to = room + (tile % 2 * kThreads + thread) * 4;
    kernels::cuda::begin_copy<16>(kernels::cuda::shared_at(to), from + (tile * kThreads + thread) * 4, true);
    kernels::cuda::end_copy_group();
  };
  float sum[4] = {};
  begin(0);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    if (bug != Bug::kCopyReadEarly) kernels::cuda::wait_for_copies<0>();
    if (bug != Bug::kCopySeenEarly) __syncthreads();
    if (bug == Bug::kCopySeenEarly && tile > 0) __syncthreads();
    if (bug != Bug::kCopyBegunEarly && tile + 1 < tiles) begin(tile + 1);
    const float* const at = room + (tile % 2 * kThreads + kThreads - 1 - thread) * 4;
    for (int k = 0; k < 4; ++k) sum[k] += at[3 - k];
    if (bug == Bug::kCopyBegunEarly && tile + 2 < tiles) begin(tile + 2);
    if (bug == Bug::kCopyBegunEarly && tile == 0 && tiles > 1) begin(1);
  }
  kernels::cuda::wait_for_copies<0>();
  for (int k = 0; k < 4; ++k) sums[thread * 4 + k] = sum[k];
}

__global__ void strided(const float* from, float* to, int64_t count, int64_t stride) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * stride % count;
  to[i] = from[i];
}

__global__ void transposed(const float* from, float* to, int64_t pitch) {
  RT_DYNAMIC_SHARED(float, room);
  for (int64_t r = 0; r < 32; ++r) room[r * pitch + threadIdx.x] = from[r * 32 + threadIdx.x];
  __syncthreads();
  for (int64_t r = 0; r < 32; ++r) to[r * 32 + threadIdx.x] = room[threadIdx.x * pitch + r];
}

}  // namespace

void centre_rows(Queue& on, const float* x, float* y, int64_t rows, int64_t width, Bug bug) {
  launch(on, {{2}, {kThreads}}, centre, x, y, rows, width, bug);
}
void softmax_rows(Queue& on, float* logits, const int32_t* targets, float* loss, int64_t rows, int64_t width, Bug bug) {
  launch(on, {{static_cast<unsigned>(rows)}, {kThreads}}, softmax, logits, targets, loss, width, bug);
}
void add_to(Queue& on, float* w, const float* g, float rate, int64_t count, Bug bug) {
  launch(on, {{kernels::cuda::blocks_for(count, kThreads * 4)}, {kThreads}}, add_scaled, w, g, rate, count, bug);
}
void add_tiles(Queue& on, const float* from, float* sums, int64_t tiles, Bug bug) {
  launch(on, {{1}, {kThreads}}, added_tiles, from, sums, tiles, bug);
}
void copy_strided(Queue& on, const float* from, float* to, int64_t count, int64_t stride) {
  launch(on, {{kernels::cuda::blocks_for(count, kThreads)}, {kThreads}}, strided, from, to, count, stride);
}
void transpose(Queue& on, const float* from, float* to, int64_t pitch) {
  launch(on, {{1}, {32}, 32 * pitch * 4}, transposed, from, to, pitch);
}

}  // namespace cairn::simt::planted
