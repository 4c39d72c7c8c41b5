#include "runtime/device/stream.h"

namespace cairn {
namespace {

class CpuStream final : public Stream {
 public:
  Device device() const override { return {DeviceKind::kCpu, 0}; }
  std::unique_ptr<Stream> beside() const override { return make_cpu_stream(); }

 private:
  Status wait() override { return {}; }
  DevicePtr<const void> give_bytes(std::span<const std::byte> host, DevicePtr<void>) override {
    return DevicePtr<const void>(host.data());
  }
};

}  // namespace

std::unique_ptr<Stream> make_cpu_stream() { return std::make_unique<CpuStream>(); }

}  // namespace cairn
