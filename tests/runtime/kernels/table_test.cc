// A call through a table marks its begin and end on the clock of its stream.
#include "runtime/kernels/table.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "runtime/kernels/ops.h"
#include "runtime/kernels/state_ops.h"

using namespace cairn;

namespace {

struct WithoutSizes {
  int64_t rows = 0;
};
static_assert(!kernels::CanBeTimed<WithoutSizes>);
static_assert(kernels::CanBeTimed<kernels::NormRows>);
static_assert(kernels::CanBeTimed<kernels::Rows<float>>);
static_assert(kernels::CanBeTimed<std::span<const kernels::AdamRun>>);
static_assert(kernels::CanBeTimed<DevicePtr<float>> && kernels::CanBeTimed<bool>);

/// Steps until one counts, of which `body` orders the ops.
template <typename Body>
OpTimes times_of(Stream& stream, const Body& body) {
  OpClock clock(stream);
  for (int64_t step = 0; step <= OpClock::kWarmUpSteps; ++step) {
    clock.begin_step();
    body();
    clock.end_step();
  }
  REQUIRE(stream.settle().ok());
  auto out = clock.times();
  REQUIRE(out.ok());
  std::ranges::sort(out.value().ops, {}, &OpTime::name);
  return std::move(out).value();
}

}  // namespace

TEST_SUITE("runtime/kernels/table") {
  TEST_CASE("a call has its op's name, the sizes of its arguments and what is fused into it") {
    const std::unique_ptr<Stream> stream = make_cpu_stream();
    const auto on = kernels::exec_on<float>(*stream);
    const auto state = kernels::state_exec_on(*stream);
    std::vector<float> x(64, 1.0f), y(64), bias(4, 2.0f);
    const DevicePtr<float> at(x.data()), to(y.data());
    kernels::AdamRun run;
    run.grad = at;
    run.from = run.to = {to, to + 16, to + 32, nullptr};
    kernels::Clip clip;
    run.args.clip = DevicePtr<const kernels::Clip>(&clip);
    run.count = 8;
    const std::vector<kernels::AdamRun> runs(2, run);
    const OpTimes times = times_of(*stream, [&] {
      on.add(at, at, to, 24);
      on.scale(to, 0.5f, 16);
      on.matmul({.m = 2,
                 .n = 4,
                 .k = 8,
                 .a = at,
                 .lda = 8,
                 .b = at,
                 .ldb = 8,
                 .trans_b = true,
                 .c = to,
                 .ldc = 4,
                 .bias = DevicePtr<float>(bias.data())});
      state.adamw_of_runs(runs);
    });
    REQUIRE(times.ops.size() == 4);
    CHECK(times.ops[0].name == "adamw_of_runs");
    CHECK(times.ops[0].sizes == std::vector<int64_t>{2, 16});
    CHECK(times.ops[1].name == "add");
    CHECK(times.ops[1].sizes == std::vector<int64_t>{24});
    CHECK(times.ops[2].name == "matmul");
    CHECK(times.ops[2].sizes == std::vector<int64_t>{2, 4, 8});
    CHECK(times.ops[2].words == std::vector<std::string>{"bt", "bias"});
    CHECK(times.ops[3].name == "scale");
    CHECK(times.ops[3].sizes == std::vector<int64_t>{16});
    for (const OpTime& op : times.ops) CHECK(op.calls == 1);
    CHECK(y[0] == 10.0f);  // the call was made: 8 products and the bias
  }
}
