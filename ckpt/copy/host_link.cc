#include "ckpt/copy/host_link.h"

#include <cstring>
#include <vector>

#include "ckpt/copy/summed_copy.h"
#include "runtime/device/guard.h"

namespace cairn::ckpt {
namespace {

class HostLink final : public DeviceLink {
 public:
  Status use_host(std::span<std::byte> /*host*/) override { return {}; }
  Status follow_work() override { return {}; }
  bool at_once() const override { return true; }
  Result<std::optional<uint64_t>> fetch(DeviceBytes device, std::byte* host) override {
    const DeviceAccess inside;
    return std::optional(summed_copy(host, reached(device)));
  }
  Result<bool> has_arrived(const Event& /*mark*/) override { return true; }
  Status store(std::span<const std::byte> host, DevicePtr<std::byte> device) override {
    const DeviceAccess inside;
    std::memcpy(device.address(), host.data(), host.size());
    return {};
  }
  Status settle() override { return {}; }
  Status fill(std::span<const DeviceBytes> device, const Write& write) override {
    const DeviceAccess inside;
    std::vector<std::span<std::byte>> areas;
    for (const DeviceBytes& run : device) areas.push_back(reached(run));
    return write(areas);
  }

 private:
  static std::span<std::byte> reached(DeviceBytes run) { return {run.first.address(), static_cast<size_t>(run.size)}; }
};

}  // namespace

std::unique_ptr<DeviceLink> make_host_link() { return std::make_unique<HostLink>(); }

}  // namespace cairn::ckpt
