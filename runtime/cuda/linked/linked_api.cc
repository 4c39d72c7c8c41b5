#include "runtime/cuda/linked/linked_api.h"

#include <cuda_runtime_api.h>

#include <type_traits>

namespace cairn::cuda {
namespace {

static_assert(CUDART_VERSION / 1000 == kMajor);
static_assert(kOutOfMemory == cudaErrorMemoryAllocation && kNotReady == cudaErrorNotReady);
static_assert(kNonBlocking == cudaStreamNonBlocking && kBlockingSync == cudaEventBlockingSync &&
              kDisableTiming == cudaEventDisableTiming && kPortable == cudaHostRegisterPortable);
static_assert(kToDevice == cudaMemcpyHostToDevice && kToHost == cudaMemcpyDeviceToHost &&
              kOnDevice == cudaMemcpyDeviceToDevice && kThreadLocalCapture == cudaStreamCaptureModeThreadLocal);

/// Types that are passed alike: the same, an int for an enumeration, a pointer to an int for one to an enumeration.
template <typename Table, typename Header>
constexpr bool kAlike = std::is_same_v<Table, Header>;
template <typename Header>
constexpr bool kAlike<int, Header> = std::is_same_v<int, Header> || (std::is_enum_v<Header> && sizeof(Header) == 4);
template <typename Header>
constexpr bool kAlike<int*, Header*> = kAlike<int, Header>;

template <typename Gives, typename... Table, typename GivesToo, typename... Header>
void fill(Gives (*&member)(Table...), GivesToo (*function)(Header...)) {
  static_assert(kAlike<Gives, GivesToo>);
  static_assert((kAlike<Table, Header> && ...), "the table has other parameters than the header");
  member = reinterpret_cast<Gives (*)(Table...)>(function);
}

Api filled() {
  Api out;
#define RT_MEMBER(member, function, parameters) fill(out.member, &::function);
  RT_CUDA_CALLS(RT_MEMBER)
#undef RT_MEMBER
  fill(out.error_name, &::cudaGetErrorName);
  fill(out.error_string, &::cudaGetErrorString);
  return out;
}

}  // namespace

const Api& linked_api() {
  static const Api api = filled();
  return api;
}

}  // namespace cairn::cuda
