// The executor's bubble and its overhead, with stages that compute nothing: each pass sleeps, so that eight ranks fit
// on two CPUs. Ranks are threads that exchange small messages.
//   pipeline_bubble [--tiny] [--pass-ms T] [--ranks P ...]      defaults: 50 ms, ranks 2 4 8
// Prints for each schedule the bubble as measured (1 - time of a rank's passes / time of the step) and by the formula
// (runtime/plan/schedule.h), and how far apart they are as a share of the formula's; then what an action costs when its
// pass takes no time. --tiny says nothing about speed.

#include <fmt/format.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string_view>
#include <thread>
#include <vector>

#include "runtime/comm/thread_world.h"
#include "runtime/core/clock.h"
#include "runtime/pipeline/executor.h"
#include "tests/runtime/pipeline/stand_in.h"

using namespace cairn;
using namespace cairn::pipeline;
using namespace cairn::pipeline::testing;

namespace {

constexpr int64_t kBoundaryBytes = 256;

void must(const Status& status) {
  if (status.ok()) return;
  fmt::print(stderr, "{}\n", status.error().message);
  std::_Exit(1);
}
template <typename T>
T must(Result<T> result) {
  if (!result.ok()) must(Status(std::move(result).error()));
  return std::move(result).value();
}

void sleep_for(int64_t ns) {
  if (ns == 0) return;
  timespec end{};
  ::clock_gettime(CLOCK_MONOTONIC, &end);
  end.tv_nsec += ns;
  end.tv_sec += end.tv_nsec / 1'000'000'000;
  end.tv_nsec %= 1'000'000'000;
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, nullptr) != 0) {
  }
}

/// Nanoseconds of each of `steps` steps after one that is not counted, from a barrier to the next.
std::vector<int64_t> step_times(const ScheduleShape& shape, int64_t pass_ns, int64_t steps) {
  comm::ThreadWorld world(shape.pp, {.deadline_ms = 60000});
  std::vector<int64_t> members(shape.pp);
  std::iota(members.begin(), members.end(), 0);
  std::vector<int32_t> numbers(shape.micro_batches);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::vector<MicroBatch> batches;
  for (const int32_t& number : numbers) batches.push_back({&number, &number});
  std::vector<int64_t> out;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    threads.emplace_back([&, rank] {
      ::prctl(PR_SET_TIMERSLACK, 1);  // of this thread's sleeps, in ns; 50 us unless set
      const auto engine = world.engine(rank);
      const auto activations = must(engine->group("pp", members)), gradients = must(engine->group("pp back", members)),
                 all = must(engine->group("all", members)), alone = must(engine->group("tp", {rank}));
      RankClock clock{.pass = [&](RankClock&, ActionKind kind,
                                  double) { sleep_for(kind == ActionKind::kBackward ? 2 * pass_ns : pass_ns); },
                      .records = false};
      std::vector<std::unique_ptr<StandIn>> models;
      std::vector<nn::StageModel*> chunks;
      for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
        models.push_back(std::make_unique<StandIn>(shape, rank, chunk, kBoundaryBytes, clock));
        chunks.push_back(models.back().get());
      }
      std::vector<std::byte> buffers(boundary_buffers(shape).total() * kBoundaryBytes);
      const std::unique_ptr<Stream> stream = make_cpu_stream();
      Executor executor(*stream, shape, cut_boundary(kBoundaryBytes, 1), chunks, *activations, *gradients, *alone,
                        {DevicePtr(buffers.data()), std::ssize(buffers)});
      const SystemClock wall;
      for (int64_t step = 0; step <= steps; ++step) {
        must(all->barrier("begin"));
        const int64_t begin = wall.now_ns();
        must(executor.train(batches, 1.0f));
        must(all->barrier("end"));
        if (rank == 0 && step > 0) out.push_back(wall.now_ns() - begin);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::ranges::sort(out);
  return out;
}

std::vector<ScheduleShape> schedules(int64_t pp) {
  const int64_t m = 2 * pp;
  std::vector<ScheduleShape> out = {
      {PipelineKind::kGpipe, pp, m}, {PipelineKind::k1F1B, pp, m}, {PipelineKind::kZbH1, pp, m}};
  if (pp == 1) return out;
  out.push_back({PipelineKind::kZbV, pp, m, 2});
  out.push_back({PipelineKind::kInterleaved, pp, m, 2});
  out.push_back({PipelineKind::kInterleaved, pp, m, 2, m});
  return out;
}

std::string name_of(const ScheduleShape& shape) {
  return schedule_name(shape.kind) + (shape.group > 0 ? fmt::format(" g{}", shape.group) : std::string());
}

void measure_bubble(const ScheduleShape& shape, int64_t pass_ns, int64_t steps) {
  const std::vector<int64_t> times = step_times(shape, pass_ns, steps);
  const auto busy = static_cast<double>(3 * shape.micro_batches * shape.chunks * pass_ns);
  const double measured = 1 - busy / static_cast<double>(times[times.size() / 2]), formula = bubble_fraction(shape);
  fmt::print("{:<16} {:>2} ranks  {:>2} micro-batches x {} chunks  bubble {:.4f}  formula {:.4f}  apart {:+.2f} %\n",
             name_of(shape), shape.pp, shape.micro_batches, shape.chunks, measured, formula,
             (measured / formula - 1) * 100);
}

void measure_overhead(ScheduleShape shape, int64_t steps) {
  shape.micro_batches = 64;
  if (shape.group > 0) shape.group = 2 * shape.pp;
  const std::vector<int64_t> times = step_times(shape, 0, steps);
  const auto actions = static_cast<double>(schedule_actions(shape, shape.pp - 1).size());
  const auto us = [&](int64_t ns) { return static_cast<double>(ns) / 1e3 / actions; };
  fmt::print("{:<16} {:>2} ranks  median {:.2f} us an action  ({:.2f} to {:.2f})\n", name_of(shape), shape.pp,
             us(times[times.size() / 2]), us(times.front()), us(times.back()));
}

int64_t number(std::string_view text) {
  int64_t out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error == std::errc() && end == text.data() + text.size() && out > 0) return out;
  fmt::print(stderr, "pipeline_bubble: a number above 0 was expected, got \"{}\"\n", text);
  std::_Exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  int64_t pass_ms = 50, steps = 3;
  std::vector<int64_t> ranks;
  bool tiny = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--tiny") {
      tiny = true;
    } else if (argument == "--pass-ms" && i + 1 < argc) {
      pass_ms = number(argv[++i]);
    } else if (argument == "--ranks") {
      while (i + 1 < argc && argv[i + 1][0] != '-') ranks.push_back(number(argv[++i]));
    } else {
      fmt::print(stderr, "pipeline_bubble [--tiny] [--pass-ms T] [--ranks P ...]\n");
      return 2;
    }
  }
  if (tiny) {
    pass_ms = 1;
    steps = 1;
    ranks = {2};
  }
  if (ranks.empty()) ranks = {2, 4, 8};
  fmt::print("{} CPUs, build {}, passes of {} ms, median of {} steps\n", std::thread::hardware_concurrency(),
             CAIRN_BUILD_TYPE, pass_ms, steps);
  for (const int64_t pp : ranks) {
    if (pp == 1) continue;  // has no bubble
    for (const ScheduleShape& shape : schedules(pp)) measure_bubble(shape, pass_ms * 1'000'000, steps);
  }
  fmt::print("what an action costs, passes of no time; ranks beyond the CPUs wait for each other's turn\n");
  for (const int64_t pp : {1, 2}) {
    for (const ScheduleShape& shape : schedules(pp)) measure_overhead(shape, tiny ? 3 : 101);
  }
  return 0;
}
