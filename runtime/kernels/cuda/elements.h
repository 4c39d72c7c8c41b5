#pragma once
// Elements of float, bf16 and f16 in kernels, and sums over warps and blocks. For .cu files.
//
// On a CPU the conversions are those of runtime/core/dtype.h. On a device a NaN becomes the type's standard one.

#include "runtime/core/dtype.h"
#include "runtime/kernels/cuda/simt.h"

namespace cairn::kernels::cuda {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
/// Threads of a block where nothing asks for another number.
constexpr int kThreads = 256;

__device__ __forceinline__ float load_f32(float x) { return x; }
__device__ __forceinline__ float load_f32(bf16 x) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
#else
  return to_f32(x);
#endif
}
__device__ __forceinline__ float load_f32(f16 x) {
#ifdef __CUDA_ARCH__
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
  return out;
#else
  return to_f32(x);
#endif
}

__device__ __forceinline__ void store_f32(float* to, float x) { *to = x; }
__device__ __forceinline__ void store_f32(bf16* to, float x) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
#else
  *to = to_bf16(x);
#endif
}
__device__ __forceinline__ void store_f32(f16* to, float x) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
#else
  *to = to_f16(x);
#endif
}

/// `x` as a T holds it.
template <typename T>
__device__ __forceinline__ float rounded(float x) {
  T out;
  store_f32(&out, x);
  return load_f32(out);
}

/// Elements of the largest access, 16 bytes.
template <typename T>
constexpr int kWide = 16 / static_cast<int>(sizeof(T));

/// Whether accesses of `bytes` to all of these are aligned. A null pointer is.
template <typename... T>
bool aligned_to(int64_t bytes, const T*... at) {
  return ((reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(bytes) == 0) && ...);
}

/// e^x by the device's 2^x, which is within 2^-22 of it, relatively; x log2 e is rounded, too. It costs 2 instructions.
__device__ __forceinline__ float fast_exp(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  return expf(x);
#endif
}
/// a / b within 2 units in the last place; 0 for b above 2^126.
__device__ __forceinline__ float fast_ratio(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/// Over the lanes of a warp, all of which get it, always in the same order.
template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

/// Two sums over a block of whole warps along x, which all its threads get. room [2 * warps]; nothing else may be read
/// from it or written to it between two barriers around the call.
__device__ __forceinline__ void block_sums(float& a, float& b, float* room) {
  a = warp_sum(a);
  b = warp_sum(b);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  if (warps == 1) return;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (threadIdx.x % kWarp == 0) {
    room[2 * warp] = a;
    room[2 * warp + 1] = b;
  }
  __syncthreads();
  a = b = 0;
  for (int w = 0; w < warps; ++w) {
    a += room[2 * w];
    b += room[2 * w + 1];
  }
  __syncthreads();  // before the room is written again
}

}  // namespace cairn::kernels::cuda
