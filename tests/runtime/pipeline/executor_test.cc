// The executor on ranks that are threads, with stages that compute nothing and let simulated time go by: messages carry
// the clock, so what each rank does when is exact and does not depend on the machine.

#include "runtime/pipeline/executor.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <thread>

#include "runtime/comm/thread_world.h"
#include "tests/runtime/pipeline/stand_in.h"

using namespace cairn;
using namespace cairn::pipeline;
using namespace cairn::pipeline::testing;

namespace {

struct Ran {
  std::vector<std::string> failures;  // of each rank; "" is none
  std::vector<std::vector<TimedAction>> timeline;
  std::vector<int64_t> losses;  // micro-batches in the order the last stage told them
};

/// One step, or one evaluation, of the schedule.
Ran run(const ScheduleShape& shape, const PassTimes& times, int64_t boundary_bytes, bool train) {
  comm::ShmWorldConfig config;
  config.world_size = shape.pp;
  config.channel_bytes = 4096;  // boundary tensors are larger: a send is under way until its receiver takes it
  comm::ThreadWorld world(config, {.deadline_ms = 20000});
  std::vector<int64_t> members(shape.pp);
  std::iota(members.begin(), members.end(), 0);
  std::vector<int32_t> numbers(shape.micro_batches);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::vector<MicroBatch> batches;
  for (const int32_t& number : numbers) batches.push_back({&number, &number});

  Ran out{.failures = std::vector<std::string>(shape.pp), .timeline = std::vector<std::vector<TimedAction>>(shape.pp)};
  const auto body = [&](int64_t rank) -> Status {
    const auto engine = world.engine(rank);
    RT_TRY_SET(const auto activations, engine->group("pp", members));
    RT_TRY_SET(const auto gradients, engine->group("pp back", members));
    RankClock clock{.pass = [&](RankClock& c, ActionKind kind, double ready) {
      c.now = std::max(c.now, ready) + (kind == ActionKind::kForward         ? times.forward
                                        : kind == ActionKind::kBackwardInput ? times.backward_input
                                        : kind == ActionKind::kBackwardWeight
                                            ? times.backward_weight
                                            : times.backward_input + times.backward_weight);
    }};
    std::vector<std::unique_ptr<StandIn>> models;
    std::vector<nn::StageModel*> chunks;
    for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      models.push_back(std::make_unique<StandIn>(shape, rank, chunk, boundary_bytes, clock));
      chunks.push_back(models.back().get());
    }
    std::vector<std::byte> buffers(boundary_buffers(shape).total() * boundary_bytes);
    const std::unique_ptr<Stream> stream = make_cpu_stream();
    Executor executor(*stream, shape, chunks, *activations, *gradients,
                      {DevicePtr(buffers.data()), std::ssize(buffers)});
    const auto on_losses = [&](int64_t micro_batch, std::span<const float> losses) {
      RT_CHECK(losses[0] == static_cast<float>(micro_batch));
      out.losses.push_back(micro_batch);  // one rank has the last stage
    };
    if (train) {
      RT_TRY(executor.train(batches, 1.0f));
      RT_CHECK(stream->settled() == 0);  // the step's one wait is the caller's
      RT_TRY(stream->settle());
      executor.tell_losses(on_losses);
    } else {
      RT_TRY(executor.evaluate(batches, on_losses));
    }
    out.timeline[rank] = std::move(clock.timeline);
    return activations->barrier("end");
  };
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    threads.emplace_back([&, rank] {
      const Status status = body(rank);
      if (!status.ok()) out.failures[rank] = status.error().message;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return out;
}

std::vector<ScheduleShape> shapes() {
  std::vector<ScheduleShape> out;
  for (const int64_t pp : {2, 3, 8}) {
    for (const int64_t m : pp < 8 ? std::vector<int64_t>{1, 2 * pp + 1} : std::vector<int64_t>{9}) {
      out.push_back({PipelineKind::kGpipe, pp, m});
      out.push_back({PipelineKind::k1F1B, pp, m});
      out.push_back({PipelineKind::kZbH1, pp, m});
      out.push_back({PipelineKind::kZbV, pp, m, 2});
    }
    out.push_back({PipelineKind::kInterleaved, pp, pp < 8 ? 3 * pp : pp, 2});
    if (pp == 8) continue;
    out.push_back({PipelineKind::kInterleaved, pp, 2 * pp + 1, 2, pp + 1});  // a short last group of pp
    out.push_back({PipelineKind::kInterleaved, pp, 2 * pp, 3, 2 * pp});
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/pipeline/executor") {
  TEST_CASE("every rank does each action exactly when the simulation says, whatever the passes take") {
    for (const ScheduleShape& shape : shapes()) {
      REQUIRE(find_mistakes(shape).empty());
      for (const PassTimes& times : {PassTimes{1, 1, 1}, PassTimes{2, 3, 1}}) {
        CAPTURE(schedule_name(shape.kind));
        CAPTURE(shape.pp);
        CAPTURE(shape.micro_batches);
        CAPTURE(shape.group);
        const Ran ran = run(shape, times, 6000, true);
        for (const std::string& failure : ran.failures) CHECK(failure == "");
        const auto wanted = simulate_schedule(shape, times).value();
        for (int64_t rank = 0; rank < shape.pp; ++rank) {
          REQUIRE(ran.timeline[rank].size() == wanted[rank].size());
          for (size_t k = 0; k < wanted[rank].size(); ++k) {
            REQUIRE(ran.timeline[rank][k].action == wanted[rank][k].action);
            REQUIRE(ran.timeline[rank][k].begin == wanted[rank][k].begin);
            REQUIRE(ran.timeline[rank][k].end == wanted[rank][k].end);
          }
        }
        CHECK(std::ssize(ran.losses) == shape.micro_batches);
        CHECK(std::ranges::is_sorted(ran.losses));
      }
    }
  }

  TEST_CASE("evaluation runs each forward once and tells every loss in order") {
    for (const ScheduleShape& shape : shapes()) {
      CAPTURE(schedule_name(shape.kind));
      CAPTURE(shape.pp);
      CAPTURE(shape.micro_batches);
      const Ran ran = run(shape, {}, 6000, false);
      for (const std::string& failure : ran.failures) CHECK(failure == "");
      std::vector<int64_t> all(shape.micro_batches);
      std::iota(all.begin(), all.end(), 0);
      CHECK(ran.losses == all);
      for (const auto& rank : ran.timeline) CHECK(std::ssize(rank) == shape.micro_batches * shape.chunks);
    }
  }

  TEST_CASE("a pipeline of one rank needs no buffers and sends nothing") {
    const Ran ran = run({PipelineKind::kZbH1, 1, 4}, {}, 64, true);
    CHECK(ran.failures[0] == "");
    CHECK(ran.timeline[0].size() == 8);
    CHECK(ran.timeline[0].back().end == 12);
  }
}
