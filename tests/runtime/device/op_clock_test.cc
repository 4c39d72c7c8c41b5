#include "runtime/device/op_clock.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

using namespace cairn;

namespace {

class HandClock final : public Clock {
 public:
  int64_t now_ns() const override { return now_ns_; }
  double unix_s() const override { return 0; }
  void pass_ms(double ms) { now_ns_ += static_cast<int64_t>(ms * 1e6); }

 private:
  int64_t now_ns_ = 1'000'000'000;
};

OpDims sizes(std::initializer_list<int64_t> of, std::string_view word = {}) {
  OpDims out;
  for (const int64_t size : of) out.add(size);
  if (!word.empty()) out.say(word);
  return out;
}

struct Timed {
  HandClock clock;
  std::unique_ptr<Stream> stream = make_cpu_stream();
  OpClock ops{*stream, std::make_unique<HostTimer>(clock)};

  void op(std::string_view name, const OpDims& dims, double ms) {
    ops.begin(name, dims);
    clock.pass_ms(ms);
    ops.end();
  }
  /// Gaps of 1 + 2 + 4 ms around two ops.
  void step(double first_ms, double second_ms) {
    ops.begin_step();
    clock.pass_ms(1);
    op("add", sizes({8}), first_ms);
    clock.pass_ms(2);
    op("matmul", sizes({2, 3, 4}, "bias"), second_ms);
    clock.pass_ms(4);
    ops.end_step();
  }
  OpTimes times() {
    REQUIRE(stream->settle().ok());
    auto out = ops.times();
    REQUIRE(out.ok());
    return std::move(out).value();
  }
};

}  // namespace

TEST_SUITE("runtime/device/op_clock") {
  TEST_CASE("ops and gaps of the steps behind the first two add up to these steps") {
    Timed timed;
    timed.step(100, 200);
    timed.step(300, 400);
    timed.clock.pass_ms(1000);  // between steps
    timed.step(5, 10);
    CHECK(timed.stream->settle().ok());
    timed.clock.pass_ms(1000);
    timed.step(7, 20);
    const OpTimes times = timed.times();
    CHECK(times.steps == 2);
    CHECK(times.left_out == 2);
    REQUIRE(times.ops.size() == 2);
    CHECK(times.ops[0].name == "matmul");  // the longest first
    CHECK(times.ops[0].sizes == std::vector<int64_t>{2, 3, 4});
    CHECK(times.ops[0].words == std::vector<std::string>{"bias"});
    CHECK(times.ops[0].calls == 2);
    CHECK(times.ops[0].ms == doctest::Approx(30));
    CHECK(times.ops[1].name == "add");
    CHECK(times.ops[1].calls == 2);
    CHECK(times.ops[1].ms == doctest::Approx(12));
    CHECK(times.gaps_ms == doctest::Approx(14));
    CHECK(times.steps_ms() == doctest::Approx(56));
  }

  TEST_CASE("calls of an op with other sizes or words are kept apart") {
    Timed timed;
    for (int step = 0; step < 3; ++step) {
      timed.ops.begin_step();
      timed.op("matmul", sizes({2, 3}), 1);
      timed.op("matmul", sizes({2, 3}), 2);
      timed.op("matmul", sizes({3, 2}), 4);
      timed.op("matmul", sizes({2, 3}, "bias"), 8);
      timed.op("matmul", sizes({2, 3, 0}), 16);
      timed.ops.end_step();
    }
    const OpTimes times = timed.times();
    std::vector<double> ms;
    for (const OpTime& op : times.ops) ms.push_back(op.ms);
    REQUIRE(ms.size() == 4);
    for (size_t i = 0; i < 4; ++i) CHECK(ms[i] == doctest::Approx(std::vector<double>{16, 8, 4, 3}[i]));
    CHECK(times.ops[3].calls == 2);
    CHECK(times.gaps_ms == doctest::Approx(0));
  }

  TEST_CASE("an op inside another one is a part of it, and what runs between steps is not timed") {
    Timed timed;
    for (int step = 0; step < 4; ++step) {
      timed.op("evaluate", sizes({1}), 50);
      timed.ops.begin_step();
      timed.ops.begin("outer", sizes({1}));
      timed.clock.pass_ms(1);
      timed.op("inner", sizes({2}), 2);
      timed.clock.pass_ms(4);
      timed.ops.end();
      timed.ops.end_step();
    }
    const OpTimes times = timed.times();
    REQUIRE(times.ops.size() == 1);
    CHECK(times.ops[0].name == "outer");
    CHECK(times.ops[0].calls == 2);
    CHECK(times.ops[0].ms == doctest::Approx(14));
    CHECK(times.steps_ms() == doctest::Approx(14));
  }

  TEST_CASE("a clock that saw only the first two steps, or none, has no times") {
    Timed none;
    CHECK(none.times().steps == 0);
    CHECK(none.times().left_out == 0);
    Timed two;
    two.step(1, 1);
    two.step(1, 1);
    const OpTimes times = two.times();
    CHECK(times.steps == 0);
    CHECK(times.left_out == 2);
    CHECK(times.ops.empty());
    CHECK(times.steps_ms() == 0);
  }

  TEST_CASE("ops whose sizes always change take no more memory from a number of kinds on, and keep their time") {
    Timed timed;
    constexpr int64_t kKinds = 3000;
    for (int64_t step = 0; step < 3; ++step) {
      timed.ops.begin_step();
      for (int64_t i = 0; i < kKinds; ++i) timed.op("copy", sizes({i + kKinds * step}), 1);
      timed.ops.end_step();
    }
    const OpTimes times = timed.times();
    CHECK(times.ops.size() <= OpClock::kMostKinds + 1);
    int64_t calls = 0;
    for (const OpTime& op : times.ops) calls += op.calls;
    CHECK(calls == kKinds);
    CHECK(times.steps_ms() == doctest::Approx(static_cast<double>(kKinds)));
  }

  TEST_CASE("a stream has a clock for as long as the clock lives") {
    const std::unique_ptr<Stream> stream = make_cpu_stream();
    CHECK(stream->clock() == nullptr);
    {
      const OpClock clock(*stream);
      CHECK(stream->clock() == &clock);
      CHECK(stream->beside()->clock() == nullptr);
    }
    CHECK(stream->clock() == nullptr);
  }
}
