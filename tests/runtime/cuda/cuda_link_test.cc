// The link to a CUDA device, alone and under the copier. Where there is no device these say so and check what can be
// checked without; runtime/cuda/double runs them against a double of the runtime.
#include "runtime/cuda/cuda_link.h"

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "ckpt/copy/state_copier.h"
#include "runtime/core/random.h"
#include "runtime/core/word_sums.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

bool no_device() {
  if (cuda_devices() > 0) return false;
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

std::vector<std::byte> noise(int64_t bytes) {
  std::vector<std::byte> out(static_cast<size_t>(bytes));
  for (size_t i = 0; i + 8 <= out.size(); i += 8) {
    const uint64_t word = mix64(i);
    std::memcpy(&out[i], &word, 8);
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/cuda") {
  TEST_CASE("a device that is not there is refused in words") {
    const auto link = make_cuda_link(4096);
    REQUIRE_FALSE(link.ok());
    CHECK(link.error().code == ErrorCode::kUnavailable);
    MESSAGE(link.error().message);
  }

  TEST_CASE("state goes to the device and comes back bit for bit, with its sums") {
    if (no_device()) return;
    constexpr int64_t kBytes = (int64_t{37} << 20) + 12;
    const std::vector<std::byte> state = noise(kBytes);
    DeviceMemory device(kBytes);
    Slot slot(kBytes + 4096), from(kBytes);
    std::vector<std::byte> there(kBytes);
    std::memcpy(from.base, state.data(), state.size());
    auto link = make_cuda_link(0);
    REQUIRE_MESSAGE(link.ok(), (link.ok() ? "" : link.error().message));
    REQUIRE(link.value()->use_host(slot.all()).ok());
    REQUIRE(link.value()->store(from.all(), device.data).ok());
    REQUIRE(link.value()->settle().ok());
    // On a stream that waits for no other, and at once.
    REQUIRE(cudaMemcpy(there.data(), device.data, kBytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(std::memcmp(there.data(), state.data(), state.size()) == 0);
    StateCopier copier(std::move(link).value(), 0);
    copier.cover(parts_of(std::vector<std::vector<CopyArray>>{{{device.data, 64, kBytes, 0}}}), 1);
    for (int round = 0; round < 3; ++round) {
      std::memset(slot.base, 0, static_cast<size_t>(slot.bytes));
      uint64_t told = 0;
      REQUIRE(copier
                  .start(slot.base,
                         [&](std::span<const uint64_t> sums) {
                           told = sums[0];
                           return Status();
                         })
                  .ok());
      std::span<std::byte> area(device.data, static_cast<size_t>(kBytes));
      copier.wait({&area, 1});
      REQUIRE(cudaMemset(device.data, 0, 4096) == cudaSuccess);  // read already
      REQUIRE(copier.finish().ok());
      CHECK(std::memcmp(slot.base + 64, state.data(), state.size()) == 0);
      CHECK(told == word_sums(state.data(), kBytes / 4));
      REQUIRE(cudaMemcpy(device.data, state.data(), 4096, cudaMemcpyHostToDevice) == cudaSuccess);
    }
  }

  TEST_CASE("a copy follows the work that was ordered before it") {
    if (no_device()) return;
    constexpr int64_t kBytes = int64_t{64} << 20;
    DeviceMemory device(kBytes);
    Slot slot(kBytes);
    cudaStream_t work = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&work, cudaStreamNonBlocking) == cudaSuccess);
    auto link = make_cuda_link(0, work);
    REQUIRE(link.ok());
    REQUIRE(link.value()->use_host(slot.all()).ok());
    StateCopier copier(std::move(link).value(), 0);
    copier.cover(parts_of(std::vector<std::vector<CopyArray>>{{{device.data, 0, kBytes, 0}}}), 1);
    for (int value = 1; value < 20; ++value) {
      for (int again = 0; again < 16; ++again) cudaMemsetAsync(device.data, 0xee, kBytes, work);
      REQUIRE(cudaMemsetAsync(device.data, value, kBytes, work) == cudaSuccess);
      REQUIRE(copier.start(slot.base, [](std::span<const uint64_t>) { return Status(); }).ok());
      REQUIRE(copier.finish().ok());
      CHECK(slot.base[0] == static_cast<std::byte>(value));
      CHECK(slot.base[kBytes - 1] == static_cast<std::byte>(value));
      CHECK(std::memcmp(slot.base, slot.base + 1, kBytes - 1) == 0);
    }
    cudaStreamDestroy(work);
  }
}
