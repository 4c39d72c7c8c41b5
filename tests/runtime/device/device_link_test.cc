#include "runtime/device/device_link.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/support/ok.h"

using namespace cairn;

namespace {

/// To memory that the host reaches by store() alone; nothing is there before settle().
class FarLink final : public DeviceLink {
 public:
  Status use_host(std::span<std::byte>) override { return {}; }
  Status follow_work() override { return {}; }
  bool at_once() const override { return false; }
  Result<std::optional<uint64_t>> fetch(DeviceBytes, std::byte*) override { return std::optional<uint64_t>(); }
  Result<bool> has_arrived(const Event&) override { return true; }
  Status store(std::span<const std::byte> host, DevicePtr<std::byte> device) override {
    coming_.push_back({{host.begin(), host.end()}, device});
    return {};
  }
  Status settle() override {
    for (const auto& [bytes, device] : coming_) std::ranges::copy(bytes, address_of(device));
    coming_.clear();
    return {};
  }

 private:
  std::vector<std::pair<std::vector<std::byte>, DevicePtr<std::byte>>> coming_;
};

}  // namespace

TEST_SUITE("runtime/device") {
  TEST_CASE("what a link fills is on the device when it returns, each run from its own host memory") {
    std::vector<std::byte> device(100, std::byte{9});
    FarLink link;
    const DeviceBytes runs[] = {{DevicePtr(device.data()), 10}, {DevicePtr(device.data() + 50), 3}};
    REQUIRE_OK(link.fill(runs, [&](std::span<const std::span<std::byte>> areas) -> Status {
      REQUIRE(areas.size() == 2);
      CHECK(areas[0].size() == 10);
      CHECK(areas[1].size() == 3);
      CHECK(areas[0].data() != device.data());
      std::ranges::fill(areas[0], std::byte{1});
      std::ranges::fill(areas[1], std::byte{2});
      CHECK(device[0] == std::byte{9});
      return {};
    }));
    CHECK(std::count(device.begin(), device.begin() + 10, std::byte{1}) == 10);
    CHECK(std::count(device.begin() + 50, device.begin() + 53, std::byte{2}) == 3);
    CHECK(std::ranges::count(device, std::byte{9}) == 87);
  }

  TEST_CASE("where the host could not write what was wanted, the device is left alone") {
    std::vector<std::byte> device(4, std::byte{9});
    FarLink link;
    const DeviceBytes run{DevicePtr(device.data()), 4};
    const Status filled = link.fill({&run, 1}, [](std::span<const std::span<std::byte>>) -> Status {
      return Error{ErrorCode::kIo, "no such file"};
    });
    REQUIRE_FALSE(filled.ok());
    CHECK(filled.error().message == "no such file");
    CHECK(std::ranges::count(device, std::byte{9}) == 4);
  }
}
