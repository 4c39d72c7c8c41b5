// Saves and stops that the agent asks for while ranks train, step by step under the test's hand.
#include <doctest/doctest.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>

#include "ckpt/hook.h"
#include "ckpt/persister.h"
#include "ckpt/restore.h"
#include "ckpt/retention/catalog.h"
#include "tests/ckpt/hook/fake_run.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

/// A disk that keeps saves waiting before they get their name, or refuses them.
struct Disk {
  std::mutex mutex;
  std::condition_variable changed;
  bool held = false;
  std::atomic<int> refuses{0};  // errno
  std::atomic<bool> at_create{false};

  void hold(bool on) {
    {
      const std::lock_guard lock(mutex);
      held = on;
    }
    changed.notify_all();
  }
};

class DiskBackend final : public PosixBackend {
 public:
  explicit DiskBackend(Disk& disk) : disk_(disk) {}
  Result<std::unique_ptr<IoFile>> create(const std::filesystem::path& path, int64_t size_bytes) override {
    if (disk_.refuses != 0 && disk_.at_create) return os_error(disk_.refuses, path.string());
    return PosixBackend::create(path, size_bytes);
  }
  Status rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    if (disk_.refuses != 0 && !disk_.at_create) return os_error(disk_.refuses, to.string());
    std::unique_lock lock(disk_.mutex);
    disk_.changed.wait(lock, [&] { return !disk_.held; });
    return PosixBackend::rename(from, to);
  }

 private:
  Disk& disk_;
};

struct Kind {
  int64_t snapshot_steps = 0, in_flight = 1;
  SnapshotBy by = SnapshotBy::kBanks;
};

Plan plan_without_saves(const Kind& kind, std::vector<Every> save = {}) {
  Plan plan = plan_of({1, 1, 1}, true);
  plan.recipe.checkpoint = {
      .save = std::move(save), .snapshot_steps = kind.snapshot_steps, .direct_io = false, .in_flight = kind.in_flight};
  plan.recipe.checkpoint.snapshot_by = kind.by;
  return plan;
}

/// An agent, and its one rank, which makes a step when it is told to.
struct Run {
  Run(const std::filesystem::path& dir, Kind kind, std::vector<Every> save = {})
      : plan(plan_without_saves(kind, std::move(save))), dir(dir) {
    const RunText run{.run_name = "fake", .run_id = fresh_run_id(), .recipe_json = "{}", .recipe_hash = "r"};
    arena = std::make_unique<Arena>(Arena::create(arena_spec(plan, run).value()).value());
    persister = std::make_unique<NodePersister>(
        *arena, [this] { return std::make_unique<DiskBackend>(disk); }, dir,
        PersistOptions{.in_flight = kind.in_flight, .on_event = [this](const PersistEvent& event) {
                         const std::lock_guard lock(mutex);
                         events.push_back(event);
                       }});
    decider = std::make_unique<RestoreDecider>(plan, *arena, io, RestoreRequest{dir});
    start();
  }
  ~Run() {
    disk.hold(false);
    if (hook) hook->release();
    hook.reset();
    persister.reset();
    ignore(arena->remove(), "end of the test");
  }

  void start() {
    if (hook) hook->release();
    hook.reset();
    persister->ranks_gone();
    REQUIRE(decider->next_incarnation().ok());
    hook = SharedMemoryHook::make(plan, 0, *arena, clock, {.finish_deadline_s = 20}).value();
    const trainer::StateMemory memory = FakeState::memory_of(*hook, plan, 0).value();
    state = std::make_unique<FakeState>(plan, 0, memory);
    const auto found = hook->restore(state->tensors());
    REQUIRE_OK(found);
    step = found.value() ? found.value()->position.step : 0;
    bank = found.value() ? found.value()->bank : 0;
  }
  /// `killed`: before it has published.
  trainer::StepOrder make_step(bool killed = false) {
    ++step;
    bank = hook->next_bank(bank).value();
    REQUIRE(hook->begin_update(bank, step).ok());
    state->advance_to(step, bank);
    const trainer::StepOrder order = hook->decide(position_at(step), false).value();
    if (killed) return order;
    REQUIRE(hook->weights_whole(step).ok());
    if (order.snapshot)
      REQUIRE(hook->snapshot(order, position_at(step), bank, state->tensors(bank), state->sums(bank)).ok());
    return order;
  }
  std::vector<PersistEvent> await(size_t count) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (;;) {
      {
        const std::lock_guard lock(mutex);
        if (events.size() >= count) return events;
      }
      REQUIRE(std::chrono::steady_clock::now() < until);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  /// The reservation goes behind the event.
  void await_free() {
    for (int64_t slot = 0; slot < arena->slots(); ++slot) {
      while (arena->control().reserved[slot] != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  const Plan plan;
  const std::filesystem::path dir;
  const SystemClock clock;
  Disk disk;
  PosixBackend io;
  std::unique_ptr<Arena> arena;
  std::mutex mutex;
  std::vector<PersistEvent> events;
  std::unique_ptr<NodePersister> persister;
  std::unique_ptr<RestoreDecider> decider;
  std::unique_ptr<SharedMemoryHook> hook;
  std::unique_ptr<FakeState> state;
  int64_t step = 0, bank = 0;
};

const Kind kKinds[] = {{.snapshot_steps = 0},
                       {.snapshot_steps = 1},
                       {.snapshot_steps = 3, .in_flight = 2},
                       {.snapshot_steps = 0, .by = SnapshotBy::kCopy},
                       {.snapshot_steps = 1, .by = SnapshotBy::kCopy}};

}  // namespace

TEST_SUITE("ckpt/hook/asked") {
  TEST_CASE("a save that is asked for is of the next boundary, and of that alone") {
    for (const Kind& kind : kKinds) {
      CAPTURE(kind.snapshot_steps);
      CAPTURE(static_cast<int>(kind.by));
      const TempDir dir;
      Run run(dir.path, kind);
      CHECK_FALSE(run.make_step().persist);
      CHECK(run.persister->ask_save() == 1);
      const trainer::StepOrder order = run.make_step();
      CHECK(order.persist);
      CHECK_FALSE(order.stop);
      // A state that is being copied may be written only where its gate lets an update do so, which this one does not
      // ask.
      for (int i = 0; i < 3 && kind.by == SnapshotBy::kBanks; ++i) CHECK_FALSE(run.make_step().persist);
      run.hook->release();  // a copy ends
      const std::vector<PersistEvent> events = run.await(1);
      REQUIRE(events.size() == 1);
      CHECK_MESSAGE(events[0].status.ok(), (events[0].status.ok() ? "" : events[0].status.error().message));
      CHECK(events[0].step == 2);
      CHECK(events[0].asked == 1);
      CHECK(newest_complete(run.io, dir.path).value().step == 2);
    }
  }

  TEST_CASE("requests while a requested save is being written are one more save, however many") {
    for (const int64_t in_flight : {1, 2}) {
      CAPTURE(in_flight);
      const TempDir dir;
      Run run(dir.path, {.snapshot_steps = 1, .in_flight = in_flight});
      run.disk.hold(true);
      run.persister->ask_save();
      CHECK(run.make_step().persist);
      for (int i = 0; i < 3; ++i) {
        run.persister->ask_save();
        CHECK_FALSE(run.make_step().persist);
      }
      run.disk.hold(false);
      CHECK(run.await(1)[0].asked == 1);
      run.await_free();
      CHECK(run.make_step().persist);
      for (int i = 0; i < 3; ++i) CHECK_FALSE(run.make_step().persist);
      const std::vector<PersistEvent> events = run.await(2);
      CHECK(events[1].step == 5);
      CHECK(events[1].asked == 4);
      run.await_free();
      CHECK_FALSE(run.make_step().persist);
    }
  }

  TEST_CASE("a save of the recipe's own answers too, and other saves answer nothing") {
    const TempDir dir;
    Run run(dir.path, {.snapshot_steps = 1}, {{.steps = 2}});
    run.make_step();
    run.persister->ask_save();
    CHECK(run.make_step().persist);
    run.await(1);
    run.await_free();
    CHECK_FALSE(run.make_step().persist);
    CHECK(run.make_step().persist);
    const std::vector<PersistEvent> events = run.await(2);
    CHECK(events[0].asked == 1);
    CHECK(events[1].asked == 0);
  }

  TEST_CASE("ranks that are killed before they could keep it are asked again") {
    const TempDir dir;
    Run run(dir.path, {.snapshot_steps = 1});
    run.make_step();
    run.persister->ask_save();
    CHECK(run.make_step(true).persist);
    run.start();
    CHECK(run.step == 1);
    CHECK(run.make_step().persist);
    CHECK_FALSE(run.make_step().persist);
    const std::vector<PersistEvent> events = run.await(1);
    CHECK(events[0].step == 2);
    CHECK(events[0].asked >= 1);
  }

  TEST_CASE("a stop at a step saves that step, one that has passed the next, and one taken back none") {
    const TempDir dir;
    Run run(dir.path, {.snapshot_steps = 0});
    arena::Control& control = run.arena->control();
    control.stop_at_step = 3;
    CHECK_FALSE(run.make_step().stop);
    CHECK_FALSE(run.make_step().persist);
    const trainer::StepOrder order = run.make_step();
    CHECK(order.stop);
    CHECK(order.persist);
    CHECK(run.await(1)[0].step == 3);
    run.await_free();
    control.stop_at_step = 0;
    CHECK_FALSE(run.make_step().stop);
    control.stop_at_step = 2;
    CHECK(run.make_step().stop);
  }

  TEST_CASE("a stop at the next save waits for one that is due or asked for") {
    const TempDir dir;
    Run run(dir.path, {.snapshot_steps = 1}, {{.steps = 4}});
    run.arena->control().stop_at_save = 1;
    for (int i = 0; i < 3; ++i) CHECK_FALSE(run.make_step().stop);
    CHECK(run.make_step().stop);
    run.await(1);
    run.await_free();
    CHECK_FALSE(run.make_step().stop);
    run.persister->ask_save();
    CHECK(run.make_step().stop);
    CHECK(run.await(2)[1].step == 6);
  }

  TEST_CASE("whatever the system refuses a save with, the run ends as one whose disk failed") {
    for (const bool at_create : {true, false}) {
      for (const int os_errno : {EACCES, EPERM, EROFS, EIO, ENOTDIR, EISDIR, ELOOP, ENOENT, ENOSPC, EDQUOT}) {
        CAPTURE(at_create);
        CAPTURE(strerror(os_errno));
        const TempDir dir;
        Run run(dir.path, {.snapshot_steps = 1});
        run.disk.at_create = at_create;
        run.disk.refuses = os_errno;
        run.persister->ask_save();
        CHECK(run.make_step().persist);
        const Status finished = run.hook->finish();  // what the rank leaves with
        REQUIRE_FALSE(finished.ok());
        CHECK(finished.error().exit_code() == 74);
        const PersistEvent event = run.await(1)[0];
        CHECK(event.asked == 1);
        REQUIRE_FALSE(event.status.ok());
        CHECK(event.status.error().exit_code() == 74);
        CHECK((event.status.error().code == ErrorCode::kNoSpace) == (os_errno == ENOSPC || os_errno == EDQUOT));
        CHECK(event.status.error().message.find(strerror(os_errno)) != std::string::npos);
        run.await_free();
        const Status flushed = run.persister->flush({});  // the agent's last try
        REQUIRE_FALSE(flushed.ok());
        CHECK(flushed.error().exit_code() == 74);
        run.disk.refuses = 0;
        CHECK(run.persister->flush({}).ok());
        CHECK(newest_complete(run.io, dir.path).value().step == 1);
      }
    }
  }
}
