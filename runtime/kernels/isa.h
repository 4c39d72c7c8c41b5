#pragma once
// The processor's instruction sets that there are kernels for. All processes of a run use the same one, since another
// one gives other last bits.

#include <atomic>
#include <cstdint>
#include <string_view>

namespace cairn::kernels {

/// Each has what those before it have. Of products: they convert what is not float when they pack it; but kAvx512Bf16
/// multiplies bf16 as it is, and kAmx everything as sums of bf16.
enum class GemmIsa : int32_t { kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmx };
inline constexpr GemmIsa kGemmIsas[] = {GemmIsa::kBaseline, GemmIsa::kAvx2, GemmIsa::kAvx512, GemmIsa::kAvx512Bf16,
                                        GemmIsa::kAmx};
/// "x86-64", "avx2", "avx512", "avx512-bf16", "amx"
std::string_view gemm_isa_name(GemmIsa isa);
bool gemm_isa_runs(GemmIsa isa);
/// The one that is used in this process: that of use_gemm_isa(), or the best of this machine. Fixed, for timing would
/// change bits.
GemmIsa gemm_isa();
/// Before any kernel has run. `isa` runs here.
void use_gemm_isa(GemmIsa isa);

/// x86-64's levels, of loops that are no products.
enum class SimdLevel : int32_t { kBaseline, kV3, kV4 };

namespace detail {
inline std::atomic<int32_t> isa_of_process{-1};  // GemmIsa; -1: not chosen yet
}

inline SimdLevel simd_level() {
  const int32_t chosen = detail::isa_of_process.load(std::memory_order_relaxed);
  const GemmIsa isa = chosen < 0 ? gemm_isa() : static_cast<GemmIsa>(chosen);
  return isa >= GemmIsa::kAvx512 ? SimdLevel::kV4 : isa == GemmIsa::kAvx2 ? SimdLevel::kV3 : SimdLevel::kBaseline;
}

}  // namespace cairn::kernels
