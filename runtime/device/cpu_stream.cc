#include "runtime/device/stream.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "runtime/core/check.h"
#include "runtime/core/clock.h"
#include "runtime/device/op_clock.h"

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

std::shared_ptr<std::byte> Stream::host_memory(int64_t bytes) const {
  constexpr int64_t kPage = 4096;
  const auto size = static_cast<size_t>(std::max<int64_t>((bytes + kPage - 1) / kPage, 1) * kPage);
  void* const memory = std::aligned_alloc(kPage, size);
  RT_CHECK(memory != nullptr, "no {} bytes for numbers of a device", size);
  std::memset(memory, 0, size);
  return {static_cast<std::byte*>(memory), std::free};
}

std::unique_ptr<StreamTimer> Stream::make_timer() {
  static const SystemClock clock;
  return std::make_unique<HostTimer>(clock);
}

std::unique_ptr<Stream> make_cpu_stream() { return std::make_unique<CpuStream>(); }

}  // namespace cairn
