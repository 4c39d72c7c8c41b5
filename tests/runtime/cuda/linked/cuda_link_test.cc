// The link to a CUDA device, alone and under the copier. Where there is no device these say so and check what can be
// checked without; runtime/cuda/double runs them against a double of the runtime. The last device is taken: what
// forgets to make it the current one works with the first.
#include "runtime/cuda/cuda_link.h"

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "ckpt/copy/state_copier.h"
#include "runtime/core/random.h"
#include "runtime/core/word_sums.h"
#include "runtime/cuda/linked/linked_api.h"
#include "tests/support/copy_gate.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

int device_number() { return cuda_devices(cuda::linked_api()) - 1; }

bool no_device() {
  if (cuda_devices(cuda::linked_api()) > 0) {
    REQUIRE(cudaSetDevice(device_number()) == cudaSuccess);
    return false;
  }
  MESSAGE("skipped: this machine has no CUDA device");
  return true;
}

/// Shared memory, as the agent's.
struct Slot {
  explicit Slot(int64_t size) : bytes(size) {
    base = static_cast<std::byte*>(
        mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    REQUIRE(base != MAP_FAILED);
  }
  ~Slot() { munmap(base, static_cast<size_t>(bytes)); }
  std::span<std::byte> all() const { return {base, static_cast<size_t>(bytes)}; }
  bool is_pinned() const {
    cudaPointerAttributes seen{};
    REQUIRE(cudaPointerGetAttributes(&seen, base + bytes - 1) == cudaSuccess);
    return seen.type == cudaMemoryTypeHost;
  }
  std::byte* base = nullptr;
  int64_t bytes;
};

struct DeviceMemory {
  explicit DeviceMemory(int64_t bytes) {
    void* raw = nullptr;
    REQUIRE(cudaMalloc(&raw, static_cast<size_t>(bytes)) == cudaSuccess);
    data = static_cast<std::byte*>(raw);
  }
  ~DeviceMemory() { cudaFree(data); }
  std::byte* data = nullptr;
};

/// What a trainer puts its work into.
struct CudaStream {
  CudaStream() { REQUIRE(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking) == cudaSuccess); }
  ~CudaStream() { cudaStreamDestroy(handle); }
  cudaStream_t handle = nullptr;
};

std::vector<std::byte> noise(int64_t bytes, uint64_t seed = 0) {
  std::vector<std::byte> out(static_cast<size_t>(bytes));
  for (size_t i = 0; i + 8 <= out.size(); i += 8) {
    const uint64_t word = mix64(seed + i);
    std::memcpy(&out[i], &word, 8);
  }
  return out;
}

std::unique_ptr<DeviceLink> link_to_device(cudaStream_t work = nullptr) {
  auto link = make_cuda_link(cuda::linked_api(), device_number(), {.work = work});
  REQUIRE_OK(link);
  return std::move(link).value();
}

std::vector<std::vector<CopyArray>> only(std::byte* from, int64_t offset, int64_t bytes) {
  return {{{DevicePtr(from), offset, bytes, 0}}};
}

StateCopier::Done tells(std::atomic<uint64_t>& sums) {
  return [&sums](std::span<const uint64_t> told) {
    sums = told[0];
    return Status();
  };
}

}  // namespace

TEST_SUITE("runtime/cuda") {
  TEST_CASE("a device that is not there is refused in words") {
    for (const int number : {-1, 4096}) {
      const auto link = make_cuda_link(cuda::linked_api(), number);
      REQUIRE_FALSE(link.ok());
      CHECK(link.error().code == ErrorCode::kUnavailable);
      MESSAGE(link.error().message);
      if (cuda_devices(cuda::linked_api()) > 0) CHECK(cudaGetLastError() == cudaSuccess);
    }
  }

  TEST_CASE("state goes to the device and comes back bit for bit, with its sums") {
    if (no_device()) return;
    constexpr int64_t kBytes = (int64_t{37} << 20) + 12;
    const std::vector<std::byte> state = noise(kBytes);
    DeviceMemory device(kBytes);
    Slot slot(kBytes + 4096), from(kBytes);
    std::vector<std::byte> there(kBytes);
    std::memcpy(from.base, state.data(), state.size());
    auto link = link_to_device();
    REQUIRE(link->use_host(slot.all()).ok());
    CHECK(slot.is_pinned());
    for (const bool pinned : {false, true}) {  // what other ranks save is in memory that this one has not pinned
      if (pinned) REQUIRE(link->use_host(from.all()).ok());
      CHECK(from.is_pinned() == pinned);
      REQUIRE(cudaMemset(device.data, 0, kBytes) == cudaSuccess);
      REQUIRE(link->store(from.all(), DevicePtr(device.data)).ok());
      REQUIRE(link->settle().ok());
      // On a stream that waits for no other, and at once.
      REQUIRE(cudaMemcpy(there.data(), device.data, kBytes, cudaMemcpyDeviceToHost) == cudaSuccess);
      CHECK(std::memcmp(there.data(), state.data(), state.size()) == 0);
    }
    {
      StateCopier copier(std::move(link), 0);
      REQUIRE(copier.cover(only(device.data, 64, kBytes), 1).ok());
      for (int round = 0; round < 3; ++round) {
        std::memset(slot.base, 0, static_cast<size_t>(slot.bytes));
        std::atomic<uint64_t> told = 0;
        REQUIRE(copier.start(slot.base, tells(told)).ok());
        std::span<std::byte> area(device.data, static_cast<size_t>(kBytes));
        cairn::testing::wait_for(copier, area);
        REQUIRE(cudaMemset(device.data, 0, kBytes) == cudaSuccess);  // read already
        REQUIRE(copier.finish().ok());
        CHECK(std::memcmp(slot.base + 64, state.data(), state.size()) == 0);
        CHECK(slot.base[kBytes + 64] == std::byte{0});
        CHECK(told == word_sums(state.data(), kBytes / 4));
        REQUIRE(cudaMemcpy(device.data, state.data(), kBytes, cudaMemcpyHostToDevice) == cudaSuccess);
      }
    }
    CHECK_FALSE(slot.is_pinned());
    CHECK_FALSE(from.is_pinned());
  }

  TEST_CASE("a copy follows the work that was ordered before it") {
    if (no_device()) return;
    constexpr int64_t kBytes = int64_t{64} << 20;
    DeviceMemory device(kBytes);
    Slot slot(kBytes);
    for (const bool own : {true, false}) {  // a stream of the trainer's, or the default one
      CAPTURE(own);
      const CudaStream stream;
      const cudaStream_t work = own ? stream.handle : nullptr;
      auto link = link_to_device(work);
      REQUIRE(link->use_host(slot.all()).ok());
      StateCopier copier(std::move(link), 0);
      REQUIRE(copier.cover(only(device.data, 0, kBytes), 1).ok());
      for (int value = 1; value < 10; ++value) {
        for (int again = 0; again < 16; ++again) cudaMemsetAsync(device.data, 0xee, kBytes, work);
        REQUIRE(cudaMemsetAsync(device.data, value, kBytes, work) == cudaSuccess);
        REQUIRE(cudaSetDevice(0) == cudaSuccess);  // the current device is the link's own business
        std::atomic<uint64_t> sums = 0;
        REQUIRE(copier.start(slot.base, tells(sums)).ok());
        REQUIRE(copier.finish().ok());
        REQUIRE(cudaSetDevice(device_number()) == cudaSuccess);
        CHECK(slot.base[0] == static_cast<std::byte>(value));
        CHECK(std::memcmp(slot.base, slot.base + 1, kBytes - 1) == 0);
      }
    }
  }

  TEST_CASE("an update overwrites block by block behind a copy, and the copy is of before it") {
    if (no_device()) return;
    constexpr int64_t kBytes = (int64_t{24} << 20) + 4, kBlock = int64_t{3} << 19;
    const std::vector<std::byte> states[] = {noise(kBytes, 1), noise(kBytes, 2)};
    DeviceMemory device(kBytes), next[] = {DeviceMemory(kBytes), DeviceMemory(kBytes)};
    for (int k : {0, 1}) {
      REQUIRE(cudaMemcpy(next[k].data, states[k].data(), kBytes, cudaMemcpyHostToDevice) == cudaSuccess);
    }
    REQUIRE(cudaMemcpy(device.data, next[0].data, kBytes, cudaMemcpyDeviceToDevice) == cudaSuccess);
    Slot slot(kBytes);
    const CudaStream work;
    auto link = link_to_device(work.handle);
    REQUIRE(link->use_host(slot.all()).ok());
    StateCopier copier(std::move(link), 0);
    REQUIRE(copier.cover(only(device.data, 0, kBytes), 1).ok());
    for (int step = 0; step < 8; ++step) {
      std::atomic<uint64_t> sums = 0;
      REQUIRE(copier.start(slot.base, tells(sums)).ok());
      for (int64_t at = 0; at < kBytes; at += kBlock) {
        const std::span<std::byte> area(device.data + at, static_cast<size_t>(std::min(kBlock, kBytes - at)));
        cairn::testing::wait_for(copier, area);
        REQUIRE(cudaMemcpyAsync(area.data(), next[(step + 1) % 2].data + at, area.size(), cudaMemcpyDeviceToDevice,
                                work.handle) == cudaSuccess);
      }
      REQUIRE(copier.finish().ok());
      const std::vector<std::byte>& before = states[step % 2];
      CHECK(std::memcmp(slot.base, before.data(), before.size()) == 0);
      CHECK(sums == word_sums(before.data(), kBytes / 4));
    }
    REQUIRE(cudaStreamSynchronize(work.handle) == cudaSuccess);  // before memory goes that the last update writes
  }

  TEST_CASE("work in the default CUDA stream does not wait for a copy") {
    if (no_device()) return;
    constexpr int64_t kBytes = int64_t{64} << 20;
    DeviceMemory device(kBytes), other(4096);
    Slot slot(kBytes);
    const auto link = link_to_device();
    REQUIRE(link->use_host(slot.all()).ok());
    REQUIRE(cudaMemset(other.data, 1, 4096) == cudaSuccess);  // the first one may load what the runtime needs for it
    REQUIRE(cudaStreamSynchronize(nullptr) == cudaSuccess);
    std::vector<std::shared_ptr<const Event>> marks;
    for (int64_t piece = 0; piece < 8; ++piece) {
      REQUIRE(link->fetch({DevicePtr(device.data), kBytes}, slot.base).ok());
      marks.push_back(link->mark().value());
    }
    REQUIRE(cudaMemset(other.data, 1, 4096) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(nullptr) == cudaSuccess);
    CHECK_FALSE(link->has_arrived(*marks.back()).value());
    REQUIRE(link->settle().ok());
    CHECK(link->has_arrived(*marks.back()).value());
  }

  TEST_CASE("memory that cannot be pinned is copied to all the same, and stays whose it is") {
    if (no_device()) return;
    constexpr int64_t kBytes = int64_t{20} << 20;
    const std::vector<std::byte> state = noise(kBytes);
    DeviceMemory device(kBytes);
    REQUIRE(cudaMemcpy(device.data, state.data(), kBytes, cudaMemcpyHostToDevice) == cudaSuccess);
    Slot slot(kBytes);
    REQUIRE(cudaHostRegister(slot.base, kBytes, cudaHostRegisterDefault) == cudaSuccess);  // somebody else has
    {
      auto link = link_to_device();
      REQUIRE(link->use_host(slot.all()).ok());
      CHECK(cudaGetLastError() == cudaSuccess);  // the trainer's next look finds nothing
      StateCopier copier(std::move(link), 0);
      REQUIRE(copier.cover(only(device.data, 0, kBytes), 1).ok());
      std::atomic<uint64_t> sums = 0;
      REQUIRE(copier.start(slot.base, tells(sums)).ok());
      REQUIRE(copier.finish().ok());
      CHECK(std::memcmp(slot.base, state.data(), state.size()) == 0);
      CHECK(sums == word_sums(state.data(), kBytes / 4));
    }
    CHECK(slot.is_pinned());
    REQUIRE(cudaHostUnregister(slot.base) == cudaSuccess);
  }

  TEST_CASE("a link that goes while its copy is under way waits for what is on its way") {
    if (no_device()) return;
    constexpr int64_t kBytes = int64_t{64} << 20;
    DeviceMemory device(kBytes);
    REQUIRE(cudaMemset(device.data, 7, kBytes) == cudaSuccess);
    for (int round = 0; round < 3; ++round) {
      Slot slot(kBytes);
      {
        auto link = link_to_device();
        REQUIRE(link->use_host(slot.all()).ok());
        for (int64_t piece = 0; piece < 8; ++piece) {
          REQUIRE(link->fetch({DevicePtr(device.data + (piece << 20)), 1 << 20}, slot.base + (piece << 20)).ok());
        }
      }
      std::memset(slot.base, 0, kBytes);
      CHECK(std::memcmp(slot.base, slot.base + 1, kBytes - 1) == 0);
    }
  }
}
