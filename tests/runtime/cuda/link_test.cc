// The link of snapshots to a CUDA device, on the double of the runtime that does work in any order which edges allow.
#include "runtime/cuda/cuda_link.h"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "ckpt/copy/state_copier.h"
#include "runtime/core/word_sums.h"
#include "runtime/cuda/arena.h"
#include "runtime/kernels/cuda/maps.h"
#include "runtime/kernels/cuda/state.h"
#include "tests/runtime/cuda/cuda_machine.h"

using namespace cairn;
using cairn::testing::CudaMachine;

namespace {

constexpr int64_t kPieces = 11, kPiece = 64;
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
  RT_TRY_SET(const auto link, make_cuda_link(machine.runtime.api(), 0, {.work = work->handle()}));
  RT_TRY(link->use_host(slot.all()));
  for (int64_t i = 0; i < kPieces * kPiece; ++i) slot.memory[i] = static_cast<float>(i);
  RT_TRY(link->store(slot.all(), state.at()));
  RT_TRY(link->settle());
  kernels::cuda::Queue queue{work->handle()};
  kernels::cuda::scale_floats(queue, state.at<float>().address(), 2, kPieces * kPiece);
  work->keep(queue.error, "launch");
  plant();
  RT_TRY(link->follow_work());
  std::vector<std::shared_ptr<const Event>> marks;
  for (int64_t at = 0; at < kPieces * kPiece; at += kPiece) {
    RT_TRY_SET(const auto sums, link->fetch({(state.at<float>() + at).as<std::byte>(), kPiece * 4},
                                            reinterpret_cast<std::byte*>(slot.memory + at)));
    CHECK_FALSE(sums.has_value());
    RT_TRY_SET(marks.emplace_back(), link->mark());
  }
  for (const auto& mark : marks) {
    for (bool there = false; !there;) {
      RT_TRY_SET(there, link->has_arrived(*mark));
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

/// State on the device and in a slot, and a copier between, with the kernels' sums where they are wanted.
struct Copied {
  explicit Copied(uint64_t seed, bool summed) : machine(seed) {
    context = machine.open();
    auto reserved = cuda::Arena::reserve(context, 2 * kBytes);
    REQUIRE_OK(reserved);
    arena = std::move(reserved).value();
    state = Buffer::allocate(context->device(), kBytes).value();
    room = Buffer::allocate(context->device(), sum_room_bytes(1, kBytes)).value();
    work = cuda::CudaStream::make(context, {.deadline_ms = 20000});
    CudaLinkOptions options{.work = work->handle(), .deadline_ms = 20000};
    if (summed) {
      options.sum_runs = &kernels::cuda::sum_runs;
      options.room = [this] { return room.all(); };
    }
    auto link = make_cuda_link(machine.runtime.api(), 0, options);
    REQUIRE_OK(link);
    REQUIRE(link.value()->use_host(slot.all()).ok());
    copier = std::make_unique<ckpt::StateCopier>(std::move(link).value(), 0);
    const Status covered =
        copier->cover(std::vector<std::vector<ckpt::CopyArray>>{{{state.at<std::byte>(), 0, kBytes, 0}}}, 1);
    REQUIRE_OK(covered);
    for (int64_t i = 0; i < kPieces * kPiece; ++i) first[static_cast<size_t>(i)] = static_cast<float>(i + 1);
    work->copy(state.at<float>().address(), first.data(), kBytes, cuda::kToDevice);
  }
  /// An update: doubles the state, behind the copy under way.
  void update() {
    const DeviceBytes all = state.all();
    copier->order_after_copy(*work, {&all, 1});
    kernels::cuda::Queue queue{work->handle()};
    kernels::cuda::scale_floats(queue, state.at<float>().address(), 2, kPieces * kPiece);
    work->keep(queue.error, "launch");
  }
  Status start() {
    return copier->start(slot.all().data(), [this](std::span<const uint64_t> got) {
      sums.push_back(got[0]);
      return Status();
    });
  }
  uint64_t expected() const { return word_sums(reinterpret_cast<const std::byte*>(first.data()), kPieces * kPiece); }

  CudaMachine machine;
  std::vector<float> first = std::vector<float>(kPieces * kPiece);
  std::vector<uint64_t> sums;
  Pages slot;
  std::shared_ptr<cuda::Context> context;
  std::unique_ptr<cuda::Arena> arena;
  Buffer state, room;
  std::unique_ptr<cuda::CudaStream> work;
  std::unique_ptr<ckpt::StateCopier> copier;
};

}  // namespace

TEST_SUITE("runtime/cuda/link") {
  TEST_CASE("an update beside a slow copy is ordered at once, comes behind it, and the sums are the device's") {
    for (const bool summed : {true, false}) {
      for (uint64_t seed = 0; seed < 16; ++seed) {
        CAPTURE(summed);
        CAPTURE(seed);
        Copied run(seed, summed);
        std::atomic<bool> open = false;
        run.machine.cuda.gate_copies([&](const void*) { return open.load(); });
        REQUIRE(run.work->settle().ok());
        run.machine.cuda.take_counts();
        simt::StreamDouble::take_own_waits();
        REQUIRE(run.start().ok());
        run.update();
        CHECK(simt::StreamDouble::take_own_waits() == 0);
        CHECK(run.sums.empty());
        CHECK(run.machine.cuda.take_counts().launches == (summed ? 3 : 1));
        open = true;
        REQUIRE(run.copier->finish().ok());
        REQUIRE(run.work->settle().ok());
        CHECK(run.sums == std::vector<uint64_t>{run.expected()});
        CHECK(std::ranges::equal(std::span(run.slot.memory, kPieces * kPiece), run.first));
        CHECK(run.machine.cuda.misuses().empty());
      }
    }
  }

  TEST_CASE("an update whose order behind the copy is dropped spoils it under some seed") {
    int wrong = 0;
    for (uint64_t seed = 0; seed < 16; ++seed) {
      Copied run(seed, true);
      REQUIRE(run.work->settle().ok());
      run.machine.runtime.drop_edge(1);  // after the copy's behind the work
      REQUIRE(run.start().ok());
      run.update();
      REQUIRE(run.copier->finish().ok());
      REQUIRE(run.work->settle().ok());
      wrong += run.sums != std::vector<uint64_t>{run.expected()} ||
                       !std::ranges::equal(std::span(run.slot.memory, kPieces * kPiece), run.first)
                   ? 1
                   : 0;
    }
    CHECK(wrong > 0);
  }

  TEST_CASE("a copier that goes while copies are on their way waits for the device, and publishes nothing") {
    Copied run(4, true);
    const std::thread::id owner = std::this_thread::get_id();
    run.machine.cuda.gate_copies([owner](const void*) { return std::this_thread::get_id() == owner; });
    REQUIRE(run.start().ok());
    run.update();  // the copy is ordered
    run.copier.reset();
    CHECK(run.sums.empty());
    CHECK(run.machine.cuda.misuses().empty());
  }

  TEST_CASE("sums of more arrays than memory was planned for are refused, with the numbers") {
    Copied run(4, true);
    std::vector<ckpt::CopyArray> arrays;
    for (int64_t k = 0; k < kPieces; ++k)
      arrays.push_back({run.state.at<std::byte>() + k * kPiece * 4, k * kPiece * 4, kPiece * 4, k});
    const Status refused = run.copier->cover(std::vector<std::vector<ckpt::CopyArray>>{arrays}, kPieces);
    REQUIRE_FALSE(refused.ok());
    CHECK_MESSAGE(refused.error().message.find("sums of 11 arrays") != std::string::npos, refused.error().message);
  }

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
