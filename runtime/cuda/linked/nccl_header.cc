// Compares the table of NCCL (runtime/cuda/nccl_api.h) with the library's header, where it is; nothing is linked for
// it.
#include "runtime/cuda/nccl_api.h"

#if __has_include(<nccl.h>)
#include <nccl.h>

#include <type_traits>

namespace cairn::cuda {
namespace {

static_assert(sizeof(NcclId) == sizeof(ncclUniqueId) && sizeof(NcclId) == NCCL_UNIQUE_ID_BYTES);
static_assert(kNcclOk == ncclSuccess && kNcclInProgress == ncclInProgress);
static_assert(kNcclBytes == ncclUint8 && kNcclI64 == ncclInt64 && kNcclF16 == ncclFloat16 && kNcclF32 == ncclFloat32 &&
              kNcclF64 == ncclFloat64 && kNcclBf16 == ncclBfloat16 && kNcclSum == ncclSum);
static_assert(kNcclNoColor == NCCL_SPLIT_NOCOLOR && kNcclLeast == NCCL_VERSION(2, 26, 0));

// The structure of 2.18 is the beginning of every later one.
constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
constexpr NcclConfig kOurs;
#define RT_PLACE(ours, theirs) static_assert(offsetof(NcclConfig, ours) == offsetof(ncclConfig_t, theirs))
RT_PLACE(size, size);
RT_PLACE(magic, magic);
RT_PLACE(version, version);
RT_PLACE(blocking, blocking);
RT_PLACE(cga_cluster_size, cgaClusterSize);
RT_PLACE(min_ctas, minCTAs);
RT_PLACE(max_ctas, maxCTAs);
RT_PLACE(net_name, netName);
RT_PLACE(split_share, splitShare);
#undef RT_PLACE
static_assert(kOurs.magic == kTheirs.magic && kOurs.blocking == kTheirs.blocking &&
              kOurs.split_share == kTheirs.splitShare && kOurs.net_name == kTheirs.netName);
static_assert(kOurs.size <= kTheirs.size && kOurs.version <= kTheirs.version);

/// Types that are passed alike.
template <typename Table, typename Header>
constexpr bool kAlike = std::is_same_v<Table, Header> ||
                        (std::is_same_v<Table, int> && std::is_enum_v<Header> && sizeof(Header) == 4);
template <>
constexpr bool kAlike<int*, ncclResult_t*> = sizeof(ncclResult_t) == sizeof(int);
template <>
constexpr bool kAlike<NcclId, ncclUniqueId> = true;
template <>
constexpr bool kAlike<NcclId*, ncclUniqueId*> = true;
template <>
constexpr bool kAlike<NcclConfig*, ncclConfig_t*> = true;
template <typename Table, typename Header>
struct SameCall;
template <typename Gives, typename... Table, typename GivesToo, typename... Header>
struct SameCall<Gives (*)(Table...), GivesToo (*)(Header...)>
    : std::bool_constant<kAlike<Gives, GivesToo> && (kAlike<Table, Header> && ...)> {};

#define RT_COMPARED(member, function, parameters) \
  static_assert(SameCall<decltype(NcclApi::member), decltype(&::function)>::value, #function);
RT_NCCL_CALLS(RT_COMPARED)
#undef RT_COMPARED
static_assert(SameCall<decltype(NcclApi::error_string), decltype(&::ncclGetErrorString)>::value);
static_assert(SameCall<decltype(NcclApi::last_error), decltype(&::ncclGetLastError)>::value);

}  // namespace
}  // namespace cairn::cuda
#endif
