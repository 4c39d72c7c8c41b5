#pragma once
// What kernels are written in: one source, `.cu`. nvcc compiles it as CUDA C++. A C++ compiler makes each thread of a
// block a fiber of an executor that is linked to it (tests/simt/executor.h): there a kernel runs without a device, in
// any order of threads that barriers allow. docs/cuda-tests.md says what that proves.
//
// Beyond CUDA's words there are RT_SHARED, RT_DYNAMIC_SHARED, Pack and launch(). Of warp functions there is what
// kernels use; add others in both halves. No kernel may use an atomic: sums have a fixed order.

#include <math.h>

#include <cstdint>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/shared_limits.h"

/// Of an array in shared memory, whatever its elements: kernels access packs of 16 bytes, and copy these to it.
#define RT_SHARED_ALIGN 16

#ifdef __CUDACC__

#include <cuda_runtime.h>

/// An array in the block's shared memory. Its content is anything at first.
#define RT_SHARED(Type, name, count)    \
  __shared__ __align__(RT_SHARED_ALIGN) \
  Type name[count]
/// The launch's shared_bytes, at a multiple of 256.
#define RT_DYNAMIC_SHARED(Type, name)                                 \
  extern __shared__ __align__(256) unsigned char rt_dynamic_shared[]; \
  Type* const name = reinterpret_cast<Type*>(rt_dynamic_shared)

#else

#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

namespace cairn::simt {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

/// Of the thread that runs.
struct Here {
  Dim3 thread, block, block_dim, grid;
  int lane = 0;
};
extern constinit thread_local const Here* here;

/// Of a kernel's source.
struct Place {
  const char* file = nullptr;
  int line = 0;
};

void barrier(Place place);
/// All lanes of `mask` give `count` values, at most kMostExchanged. Returns those of 32 lanes, lane after lane, valid
/// until the lane's next exchange.
constexpr int kMostExchanged = 3;
const uint64_t* exchange(uint32_t mask, const uint64_t* values, int count, Place place);
inline const uint64_t* exchange(uint32_t mask, uint64_t value, Place place) { return exchange(mask, &value, 1, place); }

/// A copy to shared memory that goes on while the thread works (matrix_units.h). `from` null: zeros.
struct AsyncCopy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t bytes = 0;
};
/// The executor keeps the copies of a thread in groups, and carries out none: who waits takes each and does it.
void begin_copy(const AsyncCopy& copy);
void end_copy_group();
/// The oldest copy that is of none of the last `groups` groups that were ended; false: there is none.
bool take_copy(int groups, AsyncCopy* out);
/// The block's array that `tag` stands for.
void* shared_array(const void* tag, int64_t bytes);
void* dynamic_shared();
/// Stops a kernel at an access that a device refuses.
void check_aligned(const void* at, int64_t bytes);

struct Launch {
  Dim3 blocks, threads;
  int64_t shared_bytes = 0;
  const void* kernel = nullptr;
};
/// 0, or why the launch was refused: a cudaError_t.
int launch(const Launch& launch, CUstream_st* stream, std::function<void()> thread);

}  // namespace cairn::simt

#define threadIdx (::cairn::simt::here->thread)
#define blockIdx (::cairn::simt::here->block)
#define blockDim (::cairn::simt::here->block_dim)
#define gridDim (::cairn::simt::here->grid)
#define RT_SHARED(Type, name, count)                                 \
  Type* const name = static_cast<Type*>(::cairn::simt::shared_array( \
      [] {                                                           \
        static char tag;                                             \
        return &tag;                                                 \
      }(),                                                           \
      static_cast<int64_t>(sizeof(Type)) * (count)))
#define RT_DYNAMIC_SHARED(Type, name) Type* const name = static_cast<Type*>(::cairn::simt::dynamic_shared())

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  cairn::simt::barrier({file, line});
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int other, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  const uint64_t out = cairn::simt::exchange(mask, bits, {file, line})[(cairn::simt::here->lane ^ other) & 31];
  __builtin_memcpy(&value, &out, sizeof(T));
  return value;
}
template <typename T>
T __shfl_sync(uint32_t mask, T value, int lane, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  const uint64_t out = cairn::simt::exchange(mask, bits, {file, line})[lane & 31];
  __builtin_memcpy(&value, &out, sizeof(T));
  return value;
}
inline uint32_t __ballot_sync(uint32_t mask, bool value, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
  const uint64_t* const of = cairn::simt::exchange(mask, value ? 1 : 0, {file, line});
  uint32_t out = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && of[lane] != 0) out |= uint32_t{1} << lane;
  }
  return out;
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline void __syncwarp(uint32_t mask = 0xffffffffu, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  cairn::simt::exchange(mask, 0, {file, line});
}

#endif

namespace cairn::kernels::cuda {

#ifndef __CUDACC__
using dim3 = simt::Dim3;
#endif

/// Bytes of shared memory that a block may have, static arrays included: no card of compute capability 8.0 or later
/// gives less (8.6, 8.9 and 12.0 give this). So no launch is refused for it on one card and made on another.
constexpr int64_t kSharedOfCards = 99 << 10;

/// Of a launch.
struct Size {
  dim3 blocks, threads;
  int64_t shared_bytes = 0;
};

/// Blocks that have `count` things, `each` a block.
inline unsigned blocks_for(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

#ifdef __CUDACC__
inline cudaError_t allow_shared(const void* kernel, int64_t bytes) {
  static SharedLimits limits;
  int device = 0;
  if (bytes <= SharedLimits::kUnasked) return cudaSuccess;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return static_cast<cudaError_t>(limits.allow(device, kernel, bytes, [&] {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  }));
}
#endif

/// Launches nothing where there is no block. A refusal is left in the queue.
template <typename... P, typename... A>
void launch(Queue& on, const Size& size, void (*kernel)(P...), A... args) {
  if (size.blocks.x == 0 || size.blocks.y == 0 || size.blocks.z == 0) return;
#ifdef __CUDACC__
  cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), size.shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = size.blocks;
  config.blockDim = size.threads;
  config.dynamicSmemBytes = static_cast<size_t>(size.shared_bytes);
  config.stream = on.stream;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
  if (error != cudaSuccess && on.error == 0) on.error = static_cast<int>(error);
#else
  const int error = simt::launch({size.blocks, size.threads, size.shared_bytes, reinterpret_cast<const void*>(kernel)},
                                 on.stream, [=] { kernel(static_cast<P>(args)...); });
  if (error != 0 && on.error == 0) on.error = error;
#endif
}

/// N elements that move as one access of at most 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* from) {
  using Of = Pack<T, N>;
  static_assert(sizeof(Of) <= 16);
#ifdef __CUDACC__
  return *reinterpret_cast<const Of*>(from);
#else
  // One access in the instrumented build too, which would see a copy of a struct as its elements.
  simt::check_aligned(from, sizeof(Of));
  typedef unsigned __int128 Word16 __attribute__((may_alias));
  typedef uint64_t Word8 __attribute__((may_alias));
  typedef uint32_t Word4 __attribute__((may_alias));
  Of out;
  if constexpr (sizeof(Of) == 16) {
    const Word16 word = *reinterpret_cast<const Word16*>(from);
    __builtin_memcpy(static_cast<void*>(&out), &word, 16);
  } else if constexpr (sizeof(Of) == 8) {
    const Word8 word = *reinterpret_cast<const Word8*>(from);
    __builtin_memcpy(static_cast<void*>(&out), &word, 8);
  } else if constexpr (sizeof(Of) == 4 && N > 1) {
    const Word4 word = *reinterpret_cast<const Word4*>(from);
    __builtin_memcpy(static_cast<void*>(&out), &word, 4);
  } else {
    static_assert(N == 1);
    out.at[0] = *from;
  }
  return out;
#endif
}

template <int N, typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, N>& pack) {
  using Of = Pack<T, N>;
  static_assert(sizeof(Of) <= 16);
#ifdef __CUDACC__
  *reinterpret_cast<Of*>(to) = pack;
#else
  simt::check_aligned(to, sizeof(Of));
  typedef unsigned __int128 Word16 __attribute__((may_alias));
  typedef uint64_t Word8 __attribute__((may_alias));
  typedef uint32_t Word4 __attribute__((may_alias));
  if constexpr (sizeof(Of) == 16) {
    Word16 word;
    __builtin_memcpy(&word, static_cast<const void*>(&pack), 16);
    *reinterpret_cast<Word16*>(to) = word;
  } else if constexpr (sizeof(Of) == 8) {
    Word8 word;
    __builtin_memcpy(&word, static_cast<const void*>(&pack), 8);
    *reinterpret_cast<Word8*>(to) = word;
  } else if constexpr (sizeof(Of) == 4 && N > 1) {
    Word4 word;
    __builtin_memcpy(&word, static_cast<const void*>(&pack), 4);
    *reinterpret_cast<Word4*>(to) = word;
  } else {
    static_assert(N == 1);
    *to = pack.at[0];
  }
#endif
}

}  // namespace cairn::kernels::cuda
