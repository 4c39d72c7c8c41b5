// Compares the table of NVML (runtime/cuda/nvml_api.h) with the library's header, where it is; nothing is linked for
// it.
#include "runtime/cuda/nvml_api.h"

#if __has_include(<nvml.h>)
#include <nvml.h>

#include <cstddef>
#include <type_traits>

namespace cairn::cuda {
namespace {

static_assert(kNvmlOk == NVML_SUCCESS && kNvmlTooSmall == NVML_ERROR_INSUFFICIENT_SIZE &&
              kNvmlLost == NVML_ERROR_GPU_IS_LOST && kNvmlNeedsReset == NVML_ERROR_RESET_REQUIRED);
static_assert(kNvmlUncorrected == NVML_MEMORY_ERROR_TYPE_UNCORRECTED && kNvmlSinceDriver == NVML_VOLATILE_ECC);
static_assert(kNvmlBySingleBits == NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS &&
              kNvmlByDoubleBit == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR);
static_assert(kNvmlLinks == NVML_NVLINK_MAX_LINKS);
static_assert(kSlowedByHardware == nvmlClocksThrottleReasonHwSlowdown &&
              kSlowedByHeat == nvmlClocksEventReasonSwThermalSlowdown &&
              kSlowedByHeatInHardware == nvmlClocksThrottleReasonHwThermalSlowdown &&
              kSlowedByPowerBrake == nvmlClocksThrottleReasonHwPowerBrakeSlowdown);
static_assert(NVML_FEATURE_DISABLED == 0 && NVML_FEATURE_ENABLED == 1);

#define RT_PLACE(ours, our_member, theirs, their_member) \
  static_assert(sizeof(ours) == sizeof(theirs) && offsetof(ours, our_member) == offsetof(theirs, their_member))
RT_PLACE(NvmlPci, domain, nvmlPciInfo_t, domain);
RT_PLACE(NvmlPci, bus, nvmlPciInfo_t, bus);
RT_PLACE(NvmlPci, device, nvmlPciInfo_t, device);
RT_PLACE(NvmlPci, text, nvmlPciInfo_t, busId);
RT_PLACE(NvmlProcess, pid, nvmlProcessInfo_t, pid);
RT_PLACE(NvmlProcess, memory_bytes, nvmlProcessInfo_t, usedGpuMemory);
#undef RT_PLACE

/// Types that are passed alike.
template <typename Table, typename Header>
constexpr bool kAlike = std::is_same_v<Table, Header> ||
                        (std::is_same_v<Table, int> && std::is_enum_v<Header> && sizeof(Header) == 4);
template <typename Header>
constexpr bool kAlike<int*, Header*> = kAlike<int, Header>;
template <>
constexpr bool kAlike<NvmlPci*, nvmlPciInfo_t*> = true;
template <>
constexpr bool kAlike<NvmlProcess*, nvmlProcessInfo_t*> = true;
template <typename Table, typename Header>
struct SameCall;
template <typename Gives, typename... Table, typename GivesToo, typename... Header>
struct SameCall<Gives (*)(Table...), GivesToo (*)(Header...)>
    : std::bool_constant<kAlike<Gives, GivesToo> && (kAlike<Table, Header> && ...)> {};

#define RT_COMPARED(member, function, parameters) \
  static_assert(SameCall<decltype(NvmlApi::member), decltype(&::function)>::value, #function);
RT_NVML_CALLS(RT_COMPARED)
#undef RT_COMPARED
static_assert(SameCall<decltype(NvmlApi::error_string), decltype(&::nvmlErrorString)>::value);

}  // namespace
}  // namespace cairn::cuda
#endif
