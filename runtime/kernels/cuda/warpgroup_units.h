#pragma once
// Products of 16-bit matrices by a warpgroup, and copies of tiles to shared memory, each begun by one thread:
// instructions of compute capability 9.0 (PTX ISA, for sm_90a: wgmma.mma_async, cp.async.bulk.tensor, mbarrier,
// setmaxnreg). For .cu files. T is bf16 or f16.
//
// A panel is `rows` x 64 elements in shared memory, 128 bytes a row, at a multiple of 1,024 bytes. Its 16-byte chunks
// are swizzled: chunk c of row r lies where chunk c ^ (r % 8) would. Wider tiles are panels one after the other.
//
// Four warps, a warpgroup, call together; the first of them is a multiple of 4. In sums [64, N] warp w has rows
// [16 w, 16 w + 16), and its lanes have of each 8 columns what they have of a product in matrix_units.h; so it is with
// a left matrix in registers.
//
// The executor's forms (tests/simt/warpgroups.cc) read panels by nothing but the bits of descriptors. They delay what a
// device may delay: a copy fills its place with NaN until a thread waits for its barrier, and a product its sums until
// it is waited for, when it reads its operands. A thread whose product reads what the thread has not waited for stops
// the launch.

#include "runtime/kernels/cuda/matrix_units.h"

/// Kernels have a body where this is defined: on the executor, and in code for sm_90a. Elsewhere they are empty, and
/// never launched.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define RT_ON_HOPPER
#endif

#ifdef __CUDACC__
#include <cuda.h>
#else
#include "runtime/kernels/cuda/warpgroup_simt.h"
#endif

namespace cairn::kernels::cuda {

constexpr int kWarpgroup = 4 * kWarp;
constexpr int kPanelWidth = 64, kPanelRowBytes = 128, kPanelAlign = 1024;
constexpr int kWarpgroupRows = 64, kDepth = 16;  // of a product; elements that one instruction sums over

/// Bytes of shared memory that a block may have on cards of compute capability 9.0.
constexpr int64_t kSharedOfHopper = 227 << 10;

#ifdef __CUDACC__
using TensorMap = CUtensorMap;
#else
using TensorMap = simt::TensorMap;
#endif

/// Heads' rows in memory as a copy takes them: [samples, rows, heads, channels], of which a box has `box_rows` rows and
/// kPanelWidth channels of one head. The copy writes zeros beyond rows and channels. Strides in elements; all of these
/// begin at 16 bytes. Errors: a cudaError_t, also where the driver has no such maps.
struct HeadRows {
  const void* base;
  int64_t channels, rows, heads, samples;
  int64_t row_stride, head_stride, sample_stride;
  int box_rows;
};
template <typename T>
int make_map(const HeadRows& of, TensorMap* out) {
  constexpr int64_t kBytes = sizeof(T);
#ifdef __CUDACC__
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult state{};
#if CUDART_VERSION >= 12050
    const auto error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &state);
#else
    const auto error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &state);
#endif
    return error == cudaSuccess && state == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto unsigned_of = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t sizes[4] = {unsigned_of(of.channels), unsigned_of(of.rows), unsigned_of(of.heads),
                               unsigned_of(of.samples)};
  const cuuint64_t strides[3] = {unsigned_of(of.row_stride * kBytes), unsigned_of(of.head_stride * kBytes),
                                 unsigned_of(of.sample_stride * kBytes)};
  const cuuint32_t box[4] = {kPanelWidth, static_cast<cuuint32_t>(of.box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  constexpr auto kType = std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult made =
      encode(out, kType, 4, const_cast<void*>(of.base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
#else
  out->base = of.base;
  out->element_bytes = kBytes;
  out->dims = 4;
  const int64_t sizes[4] = {of.channels, of.rows, of.heads, of.samples};
  const int64_t strides[4] = {1, of.row_stride, of.head_stride, of.sample_stride};
  const int box[4] = {kPanelWidth, of.box_rows, 1, 1};
  for (int i = 0; i < 4; ++i) {
    out->sizes[i] = static_cast<uint64_t>(sizes[i]);
    out->strides[i] = static_cast<uint64_t>(strides[i] * kBytes);
    out->box[i] = static_cast<uint32_t>(box[i]);
  }
  return simt::check_map(*out);
#endif
}

/// launch() of a kernel for 9.0, with up to kSharedOfHopper bytes of shared memory.
template <typename... P, typename... A>
void launch_on_hopper(Queue& on, const Size& size, void (*kernel)(P...), const A&... args) {
#ifndef __CUDACC__
  simt::allow_shared(reinterpret_cast<const void*>(kernel), kSharedOfHopper);
#endif
  launch(on, size, kernel, args...);
}

/// The warp's number in its block, as a value that ptxas knows to be the same in all lanes: else it takes what depends
/// on it for divergent, and orders products there one after the other.
__device__ __forceinline__ int warp_of_block() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
}

/// Bytes from a place in shared memory to where a panel may begin.
__device__ __forceinline__ int to_panel(SharedAt at) {
#ifdef __CUDACC__
  return static_cast<int>(-at & (kPanelAlign - 1));
#else
  return static_cast<int>(-simt::shared_window(at) & (kPanelAlign - 1));
#endif
}

/// Where a product finds a panel, as instructions take it. `at`: a multiple of 16 elements of a row from the panel's
/// begin, at a multiple of 8 rows. Beyond 64 columns, `further` bytes on, comes the next panel of a right matrix by
/// rows.
__device__ __forceinline__ uint64_t panel(SharedAt at, int further = 16) {
#ifdef __CUDACC__
  const uint32_t window = at;
#else
  const uint32_t window = simt::shared_window(at);
#endif
  constexpr uint64_t kEightRows = 8 * kPanelRowBytes, kSwizzled = uint64_t{1} << 62;
  return kSwizzled | (kEightRows >> 4) << 32 | static_cast<uint64_t>((further & 0x3ffff) >> 4) << 16 |
         (window & 0x3ffff) >> 4;
}
/// The same, `bytes` further.
__device__ __forceinline__ uint64_t panel_behind(uint64_t panel, int bytes) {
  return panel + static_cast<uint64_t>(bytes >> 4);
}

#ifdef __CUDACC__

// --- barriers -------------------------------------------------------------------------------------------------------

/// A barrier is 8 bytes of shared memory. A phase ends when `arrivals` threads and all expected bytes have
/// come.
__device__ __forceinline__ void init_barrier(SharedAt barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Behind init_barrier() and before the __syncthreads() by which others see the barriers, copies too.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(SharedAt barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and this phase expects `bytes` more.
__device__ __forceinline__ void arrive_expecting(SharedAt barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Until the phase of this parity has ended: phases count from 0, and before the first one an odd one has.
__device__ __forceinline__ void wait_barrier(SharedAt barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- copies ---------------------------------------------------------------------------------------------------------

/// Begins to copy the map's box of a head from this row and channel on to a panel. The barrier gets its bytes.
__device__ __forceinline__ void begin_panel(SharedAt to, const TensorMap& map, SharedAt barrier, int channel, int row,
                                            int head, int sample) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(channel), "r"(row), "r"(head), "r"(sample)
      : "memory");
}
/// So that the first copy by this map need not wait for it.
__device__ __forceinline__ void fetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// --- products -------------------------------------------------------------------------------------------------------

/// Before the first product, and before products of registers that were written or read since.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Products begun since the last call are a group.
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until all groups are done except for the last kGroups. The caller then names what it uses: settled().
template <int kGroups>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
/// Sums whose products were waited for, or are to begin: no use of them moves over this.
template <int kColumns>
__device__ __forceinline__ void settled(float (&sums)[kColumns][4]) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    asm volatile("" : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])::"memory");
  }
}

/// Threads of the warpgroup, all of which call, have kCount registers from now on.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Registers of sums in asm: their names, and their places.
#define RT_NAMES_64                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RT_SUMS_64                                                                                                \
  "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]), "+f"(sums[1][0]), "+f"(sums[1][1]),     \
      "+f"(sums[1][2]), "+f"(sums[1][3]), "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]), \
      "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3]), "+f"(sums[4][0]), "+f"(sums[4][1]), \
      "+f"(sums[4][2]), "+f"(sums[4][3]), "+f"(sums[5][0]), "+f"(sums[5][1]), "+f"(sums[5][2]), "+f"(sums[5][3]), \
      "+f"(sums[6][0]), "+f"(sums[6][1]), "+f"(sums[6][2]), "+f"(sums[6][3]), "+f"(sums[7][0]), "+f"(sums[7][1]), \
      "+f"(sums[7][2]), "+f"(sums[7][3])
#define RT_NAMES_128                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
  "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RT_SUMS_128                                                                                                 \
  "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]), "+f"(sums[1][0]), "+f"(sums[1][1]),       \
      "+f"(sums[1][2]), "+f"(sums[1][3]), "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]),   \
      "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3]), "+f"(sums[4][0]), "+f"(sums[4][1]),   \
      "+f"(sums[4][2]), "+f"(sums[4][3]), "+f"(sums[5][0]), "+f"(sums[5][1]), "+f"(sums[5][2]), "+f"(sums[5][3]),   \
      "+f"(sums[6][0]), "+f"(sums[6][1]), "+f"(sums[6][2]), "+f"(sums[6][3]), "+f"(sums[7][0]), "+f"(sums[7][1]),   \
      "+f"(sums[7][2]), "+f"(sums[7][3]), "+f"(sums[8][0]), "+f"(sums[8][1]), "+f"(sums[8][2]), "+f"(sums[8][3]),   \
      "+f"(sums[9][0]), "+f"(sums[9][1]), "+f"(sums[9][2]), "+f"(sums[9][3]), "+f"(sums[10][0]), "+f"(sums[10][1]), \
      "+f"(sums[10][2]), "+f"(sums[10][3]), "+f"(sums[11][0]), "+f"(sums[11][1]), "+f"(sums[11][2]),                \
      "+f"(sums[11][3]), "+f"(sums[12][0]), "+f"(sums[12][1]), "+f"(sums[12][2]), "+f"(sums[12][3]),                \
      "+f"(sums[13][0]), "+f"(sums[13][1]), "+f"(sums[13][2]), "+f"(sums[13][3]), "+f"(sums[14][0]),                \
      "+f"(sums[14][1]), "+f"(sums[14][2]), "+f"(sums[14][3]), "+f"(sums[15][0]), "+f"(sums[15][1]),                \
      "+f"(sums[15][2]), "+f"(sums[15][3])

#define RT_PANELS(type, columns, names, places, left, right, add)                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add                                                               \
               ", 0;\n"                                                                                              \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" names "}, " left ", " right \
               ", p, 1, 1, 0, 0;\n}"                                                                                 \
               : places                                                                                              \
               : "l"(left_panel), "l"(right_panel), "r"(static_cast<int>(add_to)))
#define RT_WORDS(type, columns, names, places, words, right, add)                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add                                         \
               ", 0;\n"                                                                        \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" names \
               "}, "                                                                           \
               "{" words "}, " right ", p, 1, 1, 1;\n}"                                        \
               : places                                                                        \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right_panel),     \
                 "r"(static_cast<int>(add_to)))

/// sums = (add_to ? sums : 0) + left [64, 16] times the transpose of right [8 * kColumns, 16], both panels' rows.
template <typename T, int kColumns>
__device__ __forceinline__ void begin_product(float (&sums)[kColumns][4], uint64_t left_panel, uint64_t right_panel,
                                              bool add_to) {
  static_assert(kColumns == 8 || kColumns == 16);
  constexpr bool kBf16 = std::is_same_v<T, bf16>;
  if constexpr (kColumns == 8 && kBf16) {
    RT_PANELS("bf16", "64", RT_NAMES_64, RT_SUMS_64, "%32", "%33", "%34");
  } else if constexpr (kColumns == 8) {
    RT_PANELS("f16", "64", RT_NAMES_64, RT_SUMS_64, "%32", "%33", "%34");
  } else if constexpr (kBf16) {
    RT_PANELS("bf16", "128", RT_NAMES_128, RT_SUMS_128, "%64", "%65", "%66");
  } else {
    RT_PANELS("f16", "128", RT_NAMES_128, RT_SUMS_128, "%64", "%65", "%66");
  }
}
/// sums = (add_to ? sums : 0) + left [64, 16] times right [16, 8 * kColumns], which is panels' rows. The words of
/// `left` stay as they are until the product was waited for.
template <typename T, int kColumns>
__device__ __forceinline__ void begin_product(float (&sums)[kColumns][4], const uint32_t (&left)[4],
                                              uint64_t right_panel, bool add_to) {
  static_assert(kColumns == 8 || kColumns == 16);
  constexpr bool kBf16 = std::is_same_v<T, bf16>;
  if constexpr (kColumns == 8 && kBf16) {
    RT_WORDS("bf16", "64", RT_NAMES_64, RT_SUMS_64, "%32, %33, %34, %35", "%36", "%37");
  } else if constexpr (kColumns == 8) {
    RT_WORDS("f16", "64", RT_NAMES_64, RT_SUMS_64, "%32, %33, %34, %35", "%36", "%37");
  } else if constexpr (kBf16) {
    RT_WORDS("bf16", "128", RT_NAMES_128, RT_SUMS_128, "%64, %65, %66, %67", "%68", "%69");
  } else {
    RT_WORDS("f16", "128", RT_NAMES_128, RT_SUMS_128, "%64, %65, %66, %67", "%68", "%69");
  }
}
#undef RT_PANELS
#undef RT_WORDS
#undef RT_NAMES_64
#undef RT_NAMES_128
#undef RT_SUMS_64
#undef RT_SUMS_128

/// A float that another thread reads behind a barrier, to which the one that keeps it arrives.
__device__ __forceinline__ void keep_float(float* to, float x) { *to = x; }
__device__ __forceinline__ float kept_float(const float* from) { return *from; }
/// Two side by side, at a multiple of 8 bytes.
__device__ __forceinline__ Pack<float, 2> kept_two(const float* from) { return load_pack<2>(from); }

#else

inline void init_barrier(SharedAt barrier, int arrivals) { simt::init_barrier(barrier, arrivals); }
inline void publish_barriers() { simt::publish_barriers(); }
inline void arrive(SharedAt barrier) { simt::arrive(barrier, 0); }
inline void arrive_expecting(SharedAt barrier, int bytes) { simt::arrive(barrier, bytes); }
inline void wait_barrier(SharedAt barrier, int parity, const char* file = __builtin_FILE(),
                         int line = __builtin_LINE()) {
  simt::wait_barrier(barrier, parity, {file, line});
}
inline void begin_panel(SharedAt to, const TensorMap& map, SharedAt barrier, int channel, int row, int head,
                        int sample) {
  const int at[4] = {channel, row, head, sample};
  simt::copy_box(to, map, barrier, at);
}
inline void fetch_map(const TensorMap& /*map*/) {}

inline void fence_products() { simt::fence_products(); }
inline void end_products() { simt::end_products(); }
template <int kGroups>
inline void wait_for_products(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  simt::wait_for_products(kGroups, {file, line});
}
template <int kColumns>
inline void settled(float (&/*sums*/)[kColumns][4]) {}
template <int kCount>
inline void take_registers() {}
template <int kCount>
inline void give_registers() {}

template <typename T>
float value_of(uint16_t bits) {
  T out;
  out.bits = bits;
  return load_f32(out);
}
template <typename T, int kColumns>
inline void begin_product(float (&sums)[kColumns][4], uint64_t left_panel, uint64_t right_panel, bool add_to,
                          const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  simt::begin_product({left_panel, right_panel, nullptr, &sums[0][0], 8 * kColumns, add_to, false, &value_of<T>},
                      {file, line});
}
template <typename T, int kColumns>
inline void begin_product(float (&sums)[kColumns][4], const uint32_t (&left)[4], uint64_t right_panel, bool add_to,
                          const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  simt::begin_product({0, right_panel, left, &sums[0][0], 8 * kColumns, add_to, true, &value_of<T>}, {file, line});
}

inline void keep_float(float* to, float x) { simt::keep_float(to, x); }
inline float kept_float(const float* from) { return simt::kept_float(from); }
inline Pack<float, 2> kept_two(const float* from) {
  simt::check_aligned(from, 8);
  return {{simt::kept_float(from), simt::kept_float(from + 1)}};
}

#endif

}  // namespace cairn::kernels::cuda
