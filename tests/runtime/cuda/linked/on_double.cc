// What only a double of the CUDA runtime can do: refuse any call, and tell of what a real one need not notice.
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "ckpt/copy/state_copier.h"
#include "runtime/core/word_sums.h"
#include "runtime/cuda/cuda_link.h"
#include "runtime/cuda/linked/linked_api.h"
#include "tests/runtime/cuda/linked/cudart_double.h"
#include "tests/support/copy_gate.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

constexpr int kDevice = 1;
constexpr int64_t kBytes = (int64_t{12} << 20) + 4;

/// A life of a link: state goes to the device, is copied back twice beside an update, and that was it.
Status live(std::byte* device, std::span<std::byte> from, std::span<std::byte> slot, std::vector<uint64_t>& sums) {
  RT_TRY_SET(std::unique_ptr<DeviceLink> link, make_cuda_link(cuda::linked_api(), kDevice));
  RT_TRY(link->use_host(slot));
  RT_TRY(link->store(from, DevicePtr(device)));
  RT_TRY(link->settle());
  StateCopier copier(std::move(link), 0);
  RT_TRY(copier.cover(std::vector<std::vector<CopyArray>>{{{DevicePtr(device), 0, kBytes, 0}}}, 1));
  for (int round = 0; round < 2; ++round) {
    RT_TRY(copier.start(slot.data(), [&](std::span<const uint64_t> told) {
      sums.push_back(told[0]);
      return Status();
    }));
    const std::span<std::byte> all(device, kBytes);
    cairn::testing::wait_for(copier, all);
    RT_TRY(copier.status());
    RT_TRY(copier.finish());
  }
  return {};
}

}  // namespace

TEST_SUITE("runtime/cuda") {
  TEST_CASE("a refused CUDA call, once or from then on, gives a complete copy or an error, and nothing stays behind") {
    const std::vector<std::string> had = cudart_double::left();
    REQUIRE(cudaSetDevice(kDevice) == cudaSuccess);
    std::byte* device = nullptr;
    REQUIRE(cudaMalloc(reinterpret_cast<void**>(&device), kBytes) == cudaSuccess);
    const std::vector<std::string> owned = cudart_double::left();
    const auto map = [] {
      void* const raw = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
      REQUIRE(raw != MAP_FAILED);
      return std::span(static_cast<std::byte*>(raw), static_cast<size_t>(kBytes));
    };
    const std::span<std::byte> from = map(), slot = map();
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 4096);
    const uint64_t expected = word_sums(from.data(), kBytes / 4);
    for (const bool from_then_on : {false, true}) {
      bool refused = true;
      int64_t told = 0;
      for (int64_t calls = 0; refused; ++calls) {
        CAPTURE(from_then_on);
        CAPTURE(calls);
        std::memset(slot.data(), 0, slot.size());
        REQUIRE(cudaMemset(device, 0, kBytes) == cudaSuccess);
        std::vector<uint64_t> sums;
        cudart_double::refuse_call(calls, from_then_on ? cudaErrorIllegalAddress : cudaErrorMemoryAllocation,
                                   from_then_on);
        const Status lived = live(device, from, slot, sums);
        refused = cudart_double::refuse_no_more();
        for (const uint64_t sum : sums) CHECK(sum == expected);
        if (lived.ok()) {
          CHECK(sums.size() == 2);
          CHECK(std::memcmp(slot.data(), from.data(), from.size()) == 0);
        } else {
          ++told;
          CHECK(refused);
          CHECK(lived.error().message.find("cudaErrorOfDouble") != std::string::npos);
        }
        if (from_then_on && refused && calls < 40) CHECK_FALSE(lived.ok());
        CHECK(cudart_double::left() == owned);
        CHECK(cudart_double::misuses().empty());
        const cudaError_t found = cudaGetLastError();  // of this thread, which is the trainer's
        CHECK((found == cudaSuccess || from_then_on));
      }
      CHECK(told > 40);
    }
    munmap(slot.data(), slot.size());
    munmap(from.data(), from.size());
    REQUIRE(cudaFree(device) == cudaSuccess);
    CHECK(cudart_double::left() == had);
  }

  TEST_CASE("an error of the copier's thread reaches who waits, and a dead device reaches the next copy") {
    REQUIRE(cudaSetDevice(kDevice) == cudaSuccess);
    std::byte* device = nullptr;
    REQUIRE(cudaMalloc(reinterpret_cast<void**>(&device), kBytes) == cudaSuccess);
    void* const raw = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(raw != MAP_FAILED);
    auto* const slot = static_cast<std::byte*>(raw);
    {
      auto link = make_cuda_link(cuda::linked_api(), kDevice).value();
      REQUIRE(link->use_host({slot, kBytes}).ok());
      StateCopier copier(std::move(link), 0);
      REQUIRE(copier.cover(std::vector<std::vector<CopyArray>>{{{DevicePtr(device), 0, kBytes, 0}}}, 1).ok());
      std::atomic<bool> done = false;
      const auto tells = [&](std::span<const uint64_t>) {
        done = true;
        return Status();
      };
      REQUIRE(copier.start(slot, tells).ok());
      cudart_double::refuse_call(3, cudaErrorIllegalAddress, /*from_then_on=*/true);
      const std::span<std::byte> all(device, kBytes);
      cairn::testing::wait_for(copier, all);  // nobody waits for ever
      CHECK_FALSE(copier.finish().ok());
      CHECK_FALSE(copier.start(slot, tells).ok());
      CHECK_FALSE(done);
      CHECK(cudart_double::refuse_no_more());
    }
    munmap(raw, kBytes);
    REQUIRE(cudaFree(device) == cudaSuccess);
  }

  TEST_CASE("the links of all tests before gave back what they took, and stayed on their device") {
    CHECK(cudart_double::left().empty());
    for (const std::string& what : cudart_double::misuses()) FAIL_CHECK(what);
    CHECK(cudart_double::devices_used() == std::vector<int>{kDevice});
  }
}
