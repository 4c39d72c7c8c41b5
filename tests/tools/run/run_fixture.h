#pragma once
// A run folder with what its agent is made of, without rank processes: steps are put into the arena by hand.

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ckpt/position.h"
#include "ckpt/snapshot/snapshot.h"
#include "dsl/dsl.h"
#include "tests/ckpt/plan/layouts.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"
#include "tools/run/agent/coordinator.h"
#include "tools/run/agent/narrator.h"

namespace cairn::tools::testing {

class HandClock final : public Clock {
 public:
  int64_t now_ns() const override { return ns_; }
  double unix_s() const override { return 1.7e9 + static_cast<double>(ns_) / 1e9; }
  void forward(double seconds) { ns_ += static_cast<int64_t>(seconds * 1e9); }

 private:
  int64_t ns_ = 1'000'000'000;
};

/// What a narrator says, by line.
class Console {
 public:
  Console() : fd_(memfd_create("console", MFD_CLOEXEC)) { REQUIRE(fd_); }
  int fd() const { return fd_.get(); }
  std::string text() const {
    std::string out(static_cast<size_t>(::lseek(fd_.get(), 0, SEEK_END)), '\0');
    REQUIRE(::pread(fd_.get(), out.data(), out.size(), 0) == std::ssize(out));
    return out;
  }
  bool has(const std::string& words) const { return text().find(words) != std::string::npos; }

 private:
  Fd fd_;
};

inline std::vector<nlohmann::json> lines_of(const std::filesystem::path& path) {
  std::vector<nlohmann::json> out;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) out.push_back(nlohmann::json::parse(line));
  return out;
}

/// Events of a kind.
inline std::vector<nlohmann::json> events_of(const std::filesystem::path& run, const std::string& kind) {
  std::vector<nlohmann::json> out = lines_of(run / "events.jsonl");
  std::erase_if(out, [&](const nlohmann::json& event) { return event.at("event") != kind; });
  return out;
}

inline Plan small_plan(int64_t ranks) {
  Plan plan = ckpt::testing::plan_of({1, 1, ranks}, true);
  plan.recipe.checkpoint.direct_io = false;
  plan.recipe.log.tensorboard = false;
  plan.end_step = plan.steps;
  return plan;
}

inline telemetry::StepMetrics metrics_at(int64_t step) {
  return {.step = step,
          .samples = step * 24,
          .tokens = step * 192,
          .loss = 4.0 - 0.1 * static_cast<double>(step),
          .grad_norm = 1,
          .lr = 1e-3,
          .tokens_per_s = 1000,
          .step_ms = 20,
          .checkpoint_lost_ms = 0.5};
}

/// As rank 0 sends it.
inline nlohmann::json step_event(int64_t step) {
  nlohmann::json event = telemetry::to_json(metrics_at(step));
  event["event"] = "step";
  return event;
}

/// The supervisor's part: what it was told, and what it answers.
class FakeControl final : public agent::RunControl {
 public:
  void note_progress() override { ++progress; }
  void wake() override { ++wakes; }
  void fail(agent::Failure failure) override { failures.push_back(std::move(failure)); }
  Status watch(int) override { return {}; }
  void forget(int) override {}
  void ask_stop() override { stop = true; }
  void abandon(Error error) override { lost = std::move(error); }
  std::optional<Error> abandoned() override { return lost; }
  bool stop_asked() override { return stop; }
  int leave_signal() override { return leave; }

  std::atomic<int64_t> progress{0}, wakes{0};
  bool stop = false;
  int leave = 0;
  std::optional<Error> lost;
  std::vector<agent::Failure> failures;
};

inline std::string fresh_name() {
  static int count = 0;
  return "run-test-" + std::to_string(::getpid()) + "-" + std::to_string(++count);
}

/// A run on this host with everything but ranks.
struct RunFixture {
  explicit RunFixture(Plan with, CoordinatorOptions options = {.requests = {.any_limit = false}})
      : plan(std::move(with)), dir("run"), folder(RunFolder::open(dir.path / "run", fresh_name()).value()) {
    start.request.recipe = plan.recipe;
    start.verdict.segment.recipe = start.verdict.segment.remaining = plan.recipe;
    start.verdict.segment.end_step = start.verdict.segment.steps = plan.steps;
    start.remaining.recipe = plan.recipe;
    start.remaining.canonical_json = dsl::encode_recipe(plan.recipe);
    start.remaining.hash_hex = dsl::recipe_hash(start.remaining.canonical_json);
    start.whole = start.remaining;
    narrator.emplace(plan, folder.path(), NarratorOptions{.console = console.fd()}, clock);
    coordinator.emplace(plan, folder, copies, start, *narrator, std::move(options), clock);
    coordinator->use(control);
  }
  ~RunFixture() {
    if (coordinator) coordinator->close();
  }

  /// As ranks do that train a step, each its part.
  void train(int64_t step, int64_t slot, bool persist) {
    const telemetry::StepMetrics metrics = metrics_at(step);
    ckpt::Arena& arena = coordinator->memory();
    const uint64_t generation = arena.control().incarnation.load();
    const trainer::TrainPosition position{.step = step,
                                          .samples = metrics.samples,
                                          .tokens = metrics.tokens,
                                          .past = plan.past,
                                          .sampler = R"({"epoch":0,"next":0})",
                                          .metrics = telemetry::to_json(metrics).dump()};
    for (int64_t rank = 0; rank < arena.world(); ++rank) {
      REQUIRE_OK(ckpt::SnapshotWriter(arena, rank)
                     .seal(slot, generation, step, ckpt::encode_position(position, ckpt::kPositionCapacity)));
    }
    coordinator->on_rank_event(0, step_event(step));
    if (!persist) return;
    arena.control().reserved[slot].store(step);
    coordinator->part_complete();
  }
  /// Looks now and then until it is so.
  bool wait_until(const std::function<bool()>& so) {
    for (int tries = 0; tries < 2000; ++tries) {
      coordinator->on_tick();
      if (so()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  std::vector<nlohmann::json> events(const std::string& kind) const { return events_of(folder.path(), kind); }

  Plan plan;
  HandClock clock;
  cairn::testing::TempDir dir;
  Console console;
  RunFolder folder;
  RunCopies copies{{}, folder};
  RunStart start;
  FakeControl control;
  std::optional<Narrator> narrator;
  std::optional<LocalCoordinator> coordinator;
};

}  // namespace cairn::tools::testing
