#include "ckpt/copy/host_link.h"

#include <fmt/format.h>

#include <cstring>

#include "ckpt/copy/summed_copy.h"
#if defined(CAIRN_CUDA)
#include "runtime/cuda/cuda_link.h"
#endif

namespace cairn::ckpt {
namespace {

class HostLink final : public DeviceLink {
 public:
  Status use_host(std::span<std::byte> /*host*/) override { return {}; }
  Status follow_work() override { return {}; }
  bool at_once() const override { return true; }
  int64_t depth() const override { return 1; }
  Result<std::optional<uint64_t>> fetch(std::span<const std::byte> device, std::byte* host) override {
    return std::optional(summed_copy(host, device));
  }
  Status arrive() override { return {}; }
  Status store(std::span<const std::byte> host, std::byte* device) override {
    std::memcpy(device, host.data(), host.size());
    return {};
  }
  Status settle() override { return {}; }
};

}  // namespace

std::unique_ptr<DeviceLink> make_host_link() { return std::make_unique<HostLink>(); }

Result<std::unique_ptr<DeviceLink>> make_link(Device device) {
  if (device.kind == DeviceKind::kCpu) return make_host_link();
#if defined(CAIRN_CUDA)
  return make_cuda_link(device.index);
#else
  return Error{ErrorCode::kUnsupported,
               fmt::format("{}: this build has no CUDA device; configure with -DCAIRN_CUDA=ON", device_name(device))};
#endif
}

}  // namespace cairn::ckpt
