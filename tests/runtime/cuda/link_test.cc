// The link of snapshots to a CUDA device, on the double of the runtime that does work in any order which edges allow.
#include "runtime/cuda/cuda_link.h"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <functional>
#include <vector>

#include "runtime/cuda/arena.h"
#include "runtime/kernels/cuda/maps.h"
#include "tests/runtime/cuda/cuda_machine.h"

using namespace cairn;
using cairn::testing::CudaMachine;

namespace {

constexpr int64_t kPieces = 11, kPiece = 64;  // more pieces than are on their way at a time
constexpr int64_t kBytes = kPieces * kPiece * static_cast<int64_t>(sizeof(float));
constexpr int kRefused = 719;

struct Pages {
  Pages() {
    memory = static_cast<float*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    REQUIRE(memory != MAP_FAILED);
  }
  ~Pages() { munmap(memory, kBytes); }
  std::span<std::byte> all() { return std::as_writable_bytes(std::span(memory, kPieces * kPiece)); }
  float* memory;
};

/// State goes to the device, is doubled there by work of a stream, and is fetched piece by piece behind it.
Status doubled(CudaMachine& machine, Pages& slot, const std::function<void()>& plant) {
  RT_TRY_SET(auto context, cuda::Context::open(machine.runtime.api(), 0));
  RT_TRY_SET(const auto arena, cuda::Arena::reserve(context, kBytes));
  RT_TRY_SET(Buffer state, Buffer::allocate(context->device(), kBytes));
  const auto work = cuda::CudaStream::make(context);
  RT_TRY(work->settle());
  RT_TRY_SET(const auto link, make_cuda_link(machine.runtime.api(), 0, work->handle()));
  RT_TRY(link->use_host(slot.all()));
  for (int64_t i = 0; i < kPieces * kPiece; ++i) slot.memory[i] = static_cast<float>(i);
  RT_TRY(link->store(slot.all(), state.at()));
  RT_TRY(link->settle());
  kernels::cuda::Queue queue{work->handle()};
  kernels::cuda::scale_floats(queue, state.at<float>().address(), 2, kPieces * kPiece);
  work->keep(queue.error, "launch");
  plant();
  RT_TRY(link->follow_work());
  int64_t begun = 0, arrived = 0;
  while (arrived < kPieces) {
    if (begun < kPieces && begun - arrived < link->depth()) {
      const int64_t at = begun++ * kPiece;
      RT_TRY_SET(const auto sums, link->fetch({(state.at<float>() + at).as<std::byte>(), kPiece * 4},
                                              reinterpret_cast<std::byte*>(slot.memory + at)));
      CHECK_FALSE(sums.has_value());
    } else {
      RT_TRY(link->arrive());
      ++arrived;
    }
  }
  return work->settle();
}

bool is_doubled(const Pages& slot) {
  for (int64_t i = 0; i < kPieces * kPiece; ++i) {
    if (slot.memory[i] != 2 * static_cast<float>(i)) return false;
  }
  return true;
}

}  // namespace

TEST_SUITE("runtime/cuda/link") {
  TEST_CASE("what is fetched is what the stream's work left, and shows under some seed where it does not follow it") {
    int wrong = 0;
    for (uint64_t seed = 0; seed < 16; ++seed) {
      CAPTURE(seed);
      for (const bool dropped : {false, true}) {
        CudaMachine machine(seed);
        Pages slot;
        const Status done = doubled(machine, slot, [&] {
          if (dropped) machine.runtime.drop_edge(0);
        });
        REQUIRE_OK(done);
        if (dropped) {
          wrong += !is_doubled(slot);
        } else {
          CHECK(is_doubled(slot));
        }
        CHECK(machine.cuda.misuses().empty());
        CHECK(machine.cuda.left().empty());
      }
    }
    CHECK(wrong > 0);
  }

  TEST_CASE("each call that is refused is told, or changes nothing") {
    for (const bool from_then_on : {false, true}) {
      bool refused = true;
      int64_t told = 0;
      for (int64_t calls = 0; refused; ++calls) {
        CAPTURE(from_then_on);
        CAPTURE(calls);
        CudaMachine machine(2);
        Pages slot;
        machine.cuda.refuse_call(calls, kRefused, from_then_on);
        const Status done = doubled(machine, slot, [] {});
        refused = machine.cuda.refuse_no_more();
        if (done.ok()) {
          CHECK(is_doubled(slot));
        } else {
          ++told;
          CHECK(refused);
          CHECK(done.error().message.find("cudaErrorOfDouble") != std::string::npos);
        }
        CHECK(machine.cuda.misuses().empty());
        CHECK(machine.cuda.left().empty());
      }
      CHECK(told > 40);
    }
  }
}
