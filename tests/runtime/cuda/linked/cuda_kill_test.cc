// A process that copies a device's memory into shared memory, killed by SIGKILL while copies are on their way: what is
// marked whole is whole, and nothing comes once the process is gone. The killed one is this program again, since a
// process that has used a device cannot be forked.
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ckpt/copy/state_copier.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/snapshot.h"
#include "runtime/cuda/cuda_link.h"
#include "runtime/cuda/linked/linked_api.h"
#include "tests/support/copy_gate.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

constexpr const char* kVariable = "CAIRN_TEST_CUDA_ARENA";  // the descriptor, for the process that is to be killed
constexpr int kNoDevice = 77;
constexpr int64_t kShards = 4, kShardBytes = (int64_t{16} << 20) + 4;

std::byte value_of(int64_t step) { return static_cast<std::byte>(step % 250 + 1); }

/// Steps without end, each an update in place behind the copy of the one before.
void train(int fd) {
  if (cuda_devices(cuda::linked_api()) == 0) _exit(kNoDevice);
  const Arena arena = Arena::attach_fd(fd).value();
  std::byte* state = nullptr;
  cudaStream_t work = nullptr;
  RT_CHECK(cudaMalloc(reinterpret_cast<void**>(&state), kShards * kShardBytes) == cudaSuccess);
  RT_CHECK(cudaStreamCreateWithFlags(&work, cudaStreamNonBlocking) == cudaSuccess);
  std::unique_ptr<DeviceLink> link = make_cuda_link(cuda::linked_api(), 0, {.work = work}).value();
  for (int64_t slot = 0; slot < arena.slots(); ++slot) RT_CHECK(link->use_host(arena.payload(0, slot)).ok());
  StateCopier copier(std::move(link), 0);
  std::vector<std::vector<CopyArray>> groups;
  for (int64_t k = 0; k < kShards; ++k)
    groups.push_back({{DevicePtr(state + k * kShardBytes), arena.shards(0)[k].offset, kShardBytes, k}});
  RT_CHECK(copier.cover(groups, kShards).ok());
  SnapshotWriter writer(arena, 0);
  for (int64_t step = 1;; ++step) {
    for (int64_t k = 0; k < kShards; ++k) {
      const std::span<std::byte> area(state + k * kShardBytes, kShardBytes);
      cairn::testing::wait_for(copier, area);
      RT_CHECK(cudaMemsetAsync(area.data(), std::to_integer<int>(value_of(step)), area.size(), work) == cudaSuccess);
    }
    RT_CHECK(copier.finish().ok());
    writer.begin(step % 2, 1, step);
    RT_CHECK(copier
                 .start(arena.payload(0, step % 2).data(),
                        [&writer, step](std::span<const uint64_t> sums) {
                          return writer.publish(step % 2, 1, step, "", sums, 0);
                        })
                 .ok());
  }
}

bool all_are(std::span<const std::byte> bytes, std::byte value) {
  return bytes[0] == value && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}

}  // namespace

TEST_SUITE("runtime/cuda") {
  TEST_CASE("the process to be killed") {
    if (const char* const fd = std::getenv(kVariable); fd != nullptr) train(std::atoi(fd));
  }

  TEST_CASE("killed while copies are on their way: what is whole is whole, and nothing comes after the death") {
    std::mt19937 random(20);
    int64_t torn = 0;
    for (int life = 0; life < 12; ++life) {
      CAPTURE(life);
      ArenaSpec spec{.run_id = "cuda-kill", .recipe_hash = "none", .directory = "none", .slots = 2};
      spec.backing = ArenaBacking::kMemfd;
      SlotLayout layout;
      for (int64_t k = 0; k < kShards; ++k) {
        layout.shards.push_back({0, k, {}, layout.bytes, kShardBytes});
        layout.bytes += (kShardBytes + kPageBytes - 1) / kPageBytes * kPageBytes;
      }
      spec.ranks = {layout};
      const Arena arena = Arena::create(spec).value();
      const int fd = fcntl(arena.fd(), F_DUPFD, 3);  // one that exec leaves open
      REQUIRE(fd >= 0);
      setenv(kVariable, std::to_string(fd).c_str(), 1);
      std::string program = "/proc/self/exe", only = "--test-case=the process to be killed";
      char* const argv[] = {program.data(), only.data(), nullptr};
      pid_t child = 0;
      REQUIRE(posix_spawn(&child, program.c_str(), nullptr, nullptr, argv, environ) == 0);
      unsetenv(kVariable);
      close(fd);
      int status = 0;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (arena.mark(0, 0).phase != SlotPhase::kWhole) {  // until the second step is complete
        if (waitpid(child, &status, WNOHANG) == child) {
          REQUIRE(WIFEXITED(status));
          REQUIRE(WEXITSTATUS(status) == kNoDevice);
          MESSAGE("skipped: this machine has no CUDA device");
          return;
        }
        REQUIRE(std::chrono::steady_clock::now() < deadline);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000));
      kill(child, SIGKILL);
      REQUIRE(waitpid(child, &status, 0) == child);
      REQUIRE(WIFSIGNALED(status));
      int64_t whole = 0;
      for (int64_t slot = 0; slot < 2; ++slot) {
        if (arena.mark(0, slot).phase == SlotPhase::kWhole) {
          ++whole;
          const Result<RankSnapshot> seen = read_slot(arena, 0, slot, Check::kEveryByte);
          REQUIRE_OK(seen);
          for (const auto& shard : arena.shards(0)) {
            const auto bytes = arena.payload(0, slot).subspan(shard.offset, shard.bytes);
            CHECK(all_are(bytes, value_of(seen.value().step)));
          }
        } else {  // the next incarnation may write it at once
          ++torn;
          const auto payload = arena.payload(0, slot);
          std::memset(payload.data(), 0, payload.size());
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          CHECK(all_are(payload, std::byte{0}));
        }
      }
      CHECK(whole >= 1);
    }
    CHECK(torn > 0);
  }
}
