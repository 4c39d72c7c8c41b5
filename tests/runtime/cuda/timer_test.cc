// Times of a CUDA stream's ops, on the double of its runtime, where a piece of work takes a microsecond.
#include "runtime/cuda/timer.h"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "runtime/cuda/arena.h"
#include "runtime/device/buffer.h"
#include "tests/runtime/cuda/cuda_machine.h"

using namespace cairn;
using namespace cairn::cuda;
using cairn::testing::CudaMachine;

namespace {

constexpr int kRefused = 719;  // cudaErrorLaunchFailure

struct Timed {
  static Result<std::unique_ptr<Timed>> start(CudaMachine& machine) {
    auto out = std::make_unique<Timed>();
    RT_TRY_SET(std::shared_ptr<Context> context, Context::open(machine.runtime.api(), 0));
    RT_TRY_SET(out->arena, Arena::reserve(context, 512));
    RT_TRY_SET(out->memory, Buffer::allocate(context->device(), 256));
    out->stream = CudaStream::make(context);
    out->clock = std::make_unique<OpClock>(*out->stream);
    return out;
  }
  ~Timed() {
    if (stream != nullptr) ignore(stream->settle(), "the end");
  }

  void work(int pieces) {
    for (int i = 0; i < pieces; ++i) stream->set(memory.at<float>().address(), i, 256);
  }
  void op(std::string_view name, int pieces) {
    clock->begin(name, OpDims());
    work(pieces);
    clock->end();
  }
  /// One settle, in the middle, as a training step has it.
  Status step() {
    clock->begin_step();
    work(1);
    op("forward", 5);
    work(2);
    RT_TRY(stream->settle());
    op("update", 7);
    clock->end_step();
    return {};
  }
  Result<OpTimes> train(int steps) {
    for (int i = 0; i < steps; ++i) RT_TRY(step());
    RT_TRY(stream->settle());
    RT_TRY_SET(OpTimes times, clock->times());
    RT_TRY(stream->settle());
    return times;
  }

  std::unique_ptr<Arena> arena;
  Buffer memory;
  std::unique_ptr<CudaStream> stream;
  std::unique_ptr<OpClock> clock;  // before the stream goes
};

bool are_right(const OpTimes& times, int64_t steps) {
  const auto is = [](double ms, int64_t pieces) { return std::abs(ms - static_cast<double>(pieces) * 1e-3) < 1e-6; };
  return times.steps == steps && times.ops.size() == 2 && times.ops[0].name == "update" &&
         is(times.ops[0].ms, 7 * steps) && times.ops[1].name == "forward" && is(times.ops[1].ms, 5 * steps) &&
         is(times.gaps_ms, 3 * steps);
}

}  // namespace

TEST_SUITE("runtime/cuda/timer") {
  TEST_CASE("a stream's ops have the device's times, in whatever order the device works") {
    for (uint64_t seed = 0; seed < 6; ++seed) {
      CAPTURE(seed);
      CudaMachine machine(seed);
      {
        auto timed = Timed::start(machine);
        REQUIRE_OK(timed);
        const auto times = timed.value()->train(5);
        REQUIRE_OK(times);
        CHECK(are_right(times.value(), 3));
      }
      CHECK(machine.cuda.left().empty());
      CHECK(machine.cuda.misuses().empty());
    }
  }

  TEST_CASE("events are used again: more steps make no more of them") {
    CudaMachine machine(2);
    auto timed = Timed::start(machine);
    REQUIRE_OK(timed);
    const auto take = [&](int steps) {
      for (int i = 0; i < steps; ++i) {
        const Status done = timed.value()->step();
        REQUIRE_OK(done);
      }
    };
    take(3);
    const std::vector<std::string> left = machine.cuda.left();
    take(20);
    CHECK(machine.cuda.left() == left);
  }

  TEST_CASE("a call that the runtime refuses while ops are timed is the stream's error, and leaves nothing behind") {
    bool refused = true;
    int64_t told = 0;
    for (int64_t calls = 0; refused; ++calls) {
      CAPTURE(calls);
      CudaMachine machine(3);
      {
        auto timed = Timed::start(machine);
        REQUIRE_OK(timed);
        machine.cuda.refuse_call(calls, kRefused, false);
        const auto times = timed.value()->train(4);
        refused = machine.cuda.refuse_no_more();
        if (times.ok()) {
          CHECK(are_right(times.value(), 2));
        } else {
          ++told;
          CHECK(refused);
          CHECK(times.error().message.find("cudaErrorOfDouble") != std::string::npos);
        }
      }
      CHECK(machine.cuda.left().empty());
      CHECK(machine.runtime.api().last_error() == 0);
      if (calls > 2000) FAIL("no end");
    }
    CHECK(told > 60);
  }
}
