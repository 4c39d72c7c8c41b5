#pragma once
// Products of 16-bit matrices by a warp, and copies to shared memory that go on while it works: instructions of compute
// capability 8.0 and later (PTX ISA: mma.m16n8k16, ldmatrix, cp.async). For .cu files. T is bf16 or f16.
//
// All lanes of a warp call together. A word is two elements, the first one in its lower half. With g = lane / 4 and
// t = lane % 4 a lane has, of
//   a left matrix [16, 16], words     {[g, 2t], [g + 8, 2t], [g, 2t + 8], [g + 8, 2t + 8]}, each with the next column;
//   a right matrix [16, 8], words     {[2t, g], [2t + 8, g]}, each with the next row;
//   their product [16, 8], floats     {[g, 2t], [g, 2t + 1], [g + 8, 2t], [g + 8, 2t + 1]}.
// So two products side by side are, rounded, a left matrix: pack_words().
//
// The executor's forms take the same fragments from the same lanes. A copy there fills its place with NaN when it
// begins, and brings the data when the thread waits for it: what reads too early, or begins too early, shows.

#include "runtime/kernels/cuda/elements.h"

namespace cairn::kernels::cuda {

/// A place in shared memory.
#ifdef __CUDACC__
using SharedAt = uint32_t;
__device__ __forceinline__ SharedAt shared_at(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}
#else
using SharedAt = char*;
inline SharedAt shared_at(void* at) { return static_cast<char*>(at); }
#endif

/// 2^x, to a relative 2^-22; results below 2^-126 may be 0.
__device__ __forceinline__ float fast_exp2(float x) {
#ifdef __CUDACC__
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return exp2f(x);
#endif
}

/// `x`, as a value that comes to be here: what is computed from it is not kept in registers from before a loop.
__device__ __forceinline__ int made_here(int x) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

template <typename T>
__device__ __forceinline__ uint32_t pack_words(float first, float second) {
#ifdef __CUDACC__
  uint32_t out;
  if constexpr (std::is_same_v<T, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  }
  return out;
#else
  T a, b;
  store_f32(&a, first);
  store_f32(&b, second);
  return a.bits | static_cast<uint32_t>(b.bits) << 16;
#endif
}

#ifdef __CUDACC__

/// sums += left * right.
template <typename T>
__device__ __forceinline__ void add_product(float (&sums)[4], const uint32_t (&left)[4], uint32_t right0,
                                            uint32_t right1) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
  }
}

/// Four matrices of 8 x 8 elements. Lane 8 * j + r says where row r of the j-th is: 16 bytes, at a multiple of that.
/// The lane gets elements [g, 2t] and [g, 2t + 1] of each.
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], SharedAt row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row));
}
/// The same of their transposes: elements [2t, g] and [2t + 1, g].
__device__ __forceinline__ void load_transposed(uint32_t (&out)[4], SharedAt row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row));
}

/// Begins to copy kBytes, 4 or 16, at multiples of that. Zeros where not `there`: then nothing is read.
template <int kBytes>
__device__ __forceinline__ void begin_copy(SharedAt to, const void* from, bool there) {
  static_assert(kBytes == 4 || kBytes == 16);
  const int read = there ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(read) : "memory");
  }
}
/// What this thread began since the last call is a group.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Until all of this thread's groups are there, except for the last kGroups. Other threads see them behind a barrier.
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

#else

template <typename T>
__device__ __forceinline__ void add_product(float (&sums)[4], const uint32_t (&left)[4], uint32_t right0,
                                            uint32_t right1, const char* file = __builtin_FILE(),
                                            int line = __builtin_LINE()) {
  constexpr int kWords = 3;
  const uint64_t mine[kWords] = {left[0] | uint64_t{left[1]} << 32, left[2] | uint64_t{left[3]} << 32,
                                 right0 | uint64_t{right1} << 32};
  const uint64_t* const all = simt::exchange(kAllLanes, mine, kWords, {file, line});
  const auto element = [&](int lane, int word, int half) {
    T out;
    out.bits = static_cast<uint16_t>(all[lane * kWords + word / 2] >> (word % 2 * 32 + half * 16));
    return load_f32(out);
  };
  const int g = simt::here->lane / 4, t = simt::here->lane % 4;
  for (int k = 0; k < 16; ++k) {
    const int from = k % 8 / 2, half = k % 2, high = k / 8;
    const float a0 = element(4 * g + from, 2 * high, half), a1 = element(4 * g + from, 2 * high + 1, half);
    const float b0 = element(4 * (2 * t) + from, 4 + high, half), b1 = element(4 * (2 * t + 1) + from, 4 + high, half);
    sums[0] += a0 * b0;
    sums[1] += a0 * b1;
    sums[2] += a1 * b0;
    sums[3] += a1 * b1;
  }
}

__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], SharedAt row, const char* file = __builtin_FILE(),
                                              int line = __builtin_LINE()) {
  simt::check_aligned(row, 16);
  const uint64_t* const rows = simt::exchange(kAllLanes, reinterpret_cast<uint64_t>(row), {file, line});
  const int lane = simt::here->lane;
  for (int j = 0; j < 4; ++j) {
    const auto* const at = reinterpret_cast<const uint16_t*>(rows[8 * j + lane / 4]) + lane % 4 * 2;
    const auto two = load_pack<2>(at);
    out[j] = two.at[0] | static_cast<uint32_t>(two.at[1]) << 16;
  }
}
__device__ __forceinline__ void load_transposed(uint32_t (&out)[4], SharedAt row, const char* file = __builtin_FILE(),
                                                int line = __builtin_LINE()) {
  uint32_t words[4];
  load_matrices(words, row, file, line);
  const uint64_t mine[2] = {words[0] | uint64_t{words[1]} << 32, words[2] | uint64_t{words[3]} << 32};
  const uint64_t* const all = simt::exchange(kAllLanes, mine, 2, {file, line});
  const int g = simt::here->lane / 4, t = simt::here->lane % 4;
  for (int j = 0; j < 4; ++j) {
    const auto element = [&](int r, int c) {
      return static_cast<uint16_t>(all[(4 * r + c / 2) * 2 + j / 2] >> (j % 2 * 32 + c % 2 * 16));
    };
    out[j] = element(2 * t, g) | static_cast<uint32_t>(element(2 * t + 1, g)) << 16;
  }
}

template <int kBytes>
__device__ __forceinline__ void begin_copy(SharedAt to, const void* from, bool there) {
  static_assert(kBytes == 4 || kBytes == 16);
  constexpr int kHalves = kBytes / 2;
  if (there) simt::check_aligned(from, kBytes);
  Pack<uint16_t, kHalves> unknown;
  for (uint16_t& half : unknown.at) half = 0xffff;
  store_pack<kHalves>(reinterpret_cast<uint16_t*>(to), unknown);
  simt::begin_copy({to, there ? from : nullptr, kBytes});
}
__device__ __forceinline__ void end_copy_group() { simt::end_copy_group(); }
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
  const auto copy = []<int kHalves>(const simt::AsyncCopy& of) {
    Pack<uint16_t, kHalves> pack{};
    if (of.from != nullptr) pack = load_pack<kHalves>(static_cast<const uint16_t*>(of.from));
    store_pack<kHalves>(static_cast<uint16_t*>(of.to), pack);
  };
  for (simt::AsyncCopy of; simt::take_copy(kGroups, &of);) {
    if (of.bytes == 16) {
      copy.template operator()<8>(of);
    } else {
      copy.template operator()<2>(of);
    }
  }
}

#endif

}  // namespace cairn::kernels::cuda
