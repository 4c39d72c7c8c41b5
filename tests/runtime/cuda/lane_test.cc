// The lane of communication (runtime/comm/lane.h) over streams of a CUDA device, where events order what on a CPU the
// calls do: on the double of the runtime.
#include "runtime/comm/lane.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <span>
#include <vector>

#include "runtime/cuda/arena.h"
#include "runtime/device/host_numbers.h"
#include "runtime/kernels/cuda/maps.h"
#include "tests/runtime/cuda/cuda_machine.h"

using namespace cairn;
using cairn::testing::CudaMachine;

namespace {

constexpr int64_t kCount = 64;
constexpr int64_t kBytes = kCount * 4;
constexpr int kRounds = 3;

void scale(Stream& stream, Buffer& x, float factor) {
  cuda::CudaStream& on = cuda::cuda_stream(stream);
  kernels::cuda::Queue queue{on.handle()};
  kernels::cuda::scale_floats(queue, x.at<float>().address(), factor, kCount);
  on.keep(queue.error, "launch");
}
void add(Stream& stream, Buffer& x, float what, Buffer& from) {
  cuda::CudaStream& on = cuda::cuda_stream(stream);
  kernels::cuda::Queue queue{on.handle()};
  kernels::cuda::add_scaled<float>(queue, x.at<float>().address(), what, from.at<float>().address(),
                                   x.at<float>().address(), kCount);
  on.keep(queue.error, "launch");
}

/// x = (x + 1) * 10 in each round: the sum is the rank's, the product the lane's.
Result<float> rounds(CudaMachine& machine, bool threaded, int64_t dropped, int64_t* edges = nullptr) {
  RT_TRY_SET(auto context, cuda::Context::open(machine.runtime.api(), 0));
  RT_TRY_SET(const auto arena, cuda::Arena::reserve(context, 1024));
  RT_TRY_SET(Buffer x, Buffer::allocate(context->device(), kBytes));
  RT_TRY_SET(Buffer one, Buffer::allocate(context->device(), kBytes));
  const auto compute = cuda::CudaStream::make(context);
  const auto given = compute->host_memory(kBytes);
  const std::span<float> ones(reinterpret_cast<float*>(given.get()), kCount);
  std::fill(ones.begin(), ones.end(), 1.0f);
  compute->give(std::span<const float>(ones), one.at<float>());
  HostNumbers<float> numbers(*compute, kCount);
  {
    comm::Lane lane(*compute, threaded);
    const int64_t before = machine.runtime.edges();
    machine.runtime.drop_edge(dropped);
    for (int round = 0; round < kRounds; ++round) {
      add(*compute, x, 1, one);
      const auto ticket = lane.submit([&] {
        scale(lane.stream(), x, 10);
        return Status();
      });
      RT_TRY(lane.wait(ticket));
    }
    compute->copy(numbers.room().data(), x.at<float>().address(), kBytes, cuda::kToHost);
    RT_TRY(compute->settle());
    if (edges != nullptr) *edges = machine.runtime.edges() - before;
    RT_TRY(lane.stream().settle());
  }
  return numbers.read()[kCount - 1];
}

}  // namespace

TEST_SUITE("runtime/cuda/lane") {
  TEST_CASE("jobs come behind what was ordered before them, and before what waits for them") {
    for (const bool threaded : {false, true}) {
      for (uint64_t seed = 0; seed < 16; ++seed) {
        CAPTURE(threaded);
        CAPTURE(seed);
        CudaMachine machine(seed);
        const auto done = rounds(machine, threaded, -1);
        REQUIRE_OK(done);
        CHECK(done.value() == 1110);
        CHECK(machine.cuda.misuses().empty());
        CHECK(machine.cuda.left().empty());
      }
    }
  }

  TEST_CASE("each of the lane's edges that is dropped shows under some seed") {
    int64_t edges = 0;
    {
      CudaMachine machine(0);
      REQUIRE(rounds(machine, false, -1, &edges).ok());
    }
    CHECK(edges == 2 * kRounds);
    for (int64_t dropped = 0; dropped < edges; ++dropped) {
      CAPTURE(dropped);
      int wrong = 0;
      for (uint64_t seed = 0; seed < 16; ++seed) {
        CudaMachine machine(seed);
        const auto done = rounds(machine, false, dropped);
        REQUIRE_OK(done);
        wrong += done.value() != 1110;
      }
      CHECK(wrong > 0);
    }
  }
}
