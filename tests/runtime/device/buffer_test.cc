#include "runtime/device/buffer.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

using namespace cairn;

namespace {
constexpr Device kCpu{};

bool all_zero(const Buffer& b) {
  return std::all_of(b.data(), b.data() + b.size_bytes(), [](std::byte x) { return x == std::byte{0}; });
}
}  // namespace

TEST_SUITE("runtime/device/buffer") {
  TEST_CASE("the count of bytes is what was asked for, and moves with the owner") {
    const int64_t before = allocated_bytes(kCpu);
    {
      Result<Buffer> small = Buffer::allocate(kCpu, 100);
      REQUIRE(small.ok());
      CHECK(allocated_bytes(kCpu) == before + 100);
      Result<Buffer> large = Buffer::allocate(kCpu, (5 << 20) + 3);
      REQUIRE(large.ok());
      CHECK(allocated_bytes(kCpu) == before + 100 + (5 << 20) + 3);
      Buffer moved = std::move(small).value();
      CHECK(moved.size_bytes() == 100);
      moved = std::move(large).value();  // releases the 100
      CHECK(allocated_bytes(kCpu) == before + (5 << 20) + 3);
      CHECK(moved.as<float>().size() == ((5 << 20) + 3) / 4);
    }
    CHECK(allocated_bytes(kCpu) == before);
  }

  TEST_CASE("memory is aligned, writable to its end and zero, also when it was used before") {
    for (const int64_t bytes : {int64_t{1}, int64_t{4096}, int64_t{70000}, int64_t{2} << 20, (int64_t{3} << 20) + 17}) {
      CAPTURE(bytes);
      const std::byte* at = nullptr;
      for (int round = 0; round < 2; ++round) {
        Result<Buffer> got = Buffer::allocate(kCpu, bytes);
        REQUIRE(got.ok());
        Buffer& b = got.value();
        CHECK(reinterpret_cast<uintptr_t>(b.data()) % 64 == 0);
        if (bytes >= 2 << 20) CHECK(reinterpret_cast<uintptr_t>(b.data()) % (2 << 20) == 0);
        CHECK(all_zero(b));
        std::fill_n(b.data(), bytes, std::byte{0xff});
        if (round == 1) CHECK(b.data() == at);  // kept, not given back
        at = b.data();
      }
    }
  }

  TEST_CASE("nothing, too much and a device that is not there") {
    Result<Buffer> nothing = Buffer::allocate(kCpu, 0);
    REQUIRE(nothing.ok());
    CHECK(nothing.value().size_bytes() == 0);

    for (const int64_t bytes : {int64_t{1} << 50, INT64_MAX}) {
      const Result<Buffer> huge = Buffer::allocate(kCpu, bytes);
      REQUIRE_FALSE(huge.ok());
      CHECK(huge.error().code == ErrorCode::kNoSpace);
      CHECK(huge.error().message.find(std::to_string(bytes)) != std::string::npos);
    }

    const Result<Buffer> cuda = Buffer::allocate({DeviceKind::kCuda, 1}, 64);
    REQUIRE_FALSE(cuda.ok());
    CHECK(cuda.error().code == ErrorCode::kUnsupported);
    CHECK(cuda.error().message == "64 bytes on cuda:1: no memory is reserved there; use device \"cpu\"");
  }

  TEST_CASE("threads that take and release at once leave the count where it was") {
    const int64_t before = allocated_bytes(kCpu);
    std::vector<std::thread> threads;
    std::atomic<int> good = 0;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([t, &good] {
        for (int i = 0; i < 200; ++i) {
          Result<Buffer> b = Buffer::allocate(kCpu, 1000 + 4096 * ((i + t) % 3));
          if (!b.ok()) continue;
          good += all_zero(b.value());
          b.value().data()[i] = std::byte{1};
        }
      });
    }
    for (std::thread& t : threads) t.join();
    CHECK(good == 4 * 200);
    CHECK(allocated_bytes(kCpu) == before);
  }
}
