// Several saves on their way to the disk at once: they may end in any order, and be cut off between any two of them.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <functional>
#include <new>
#include <stdexcept>
#include <utility>

#include "ckpt/format/names.h"
#include "ckpt/node.h"
#include "ckpt/position.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/run_labels.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/hook/fake_run.h"
#include "tests/ckpt/snapshot/write_snapshot.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

/// Saves of one step wait here for their commit; those of another fail in it.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  int64_t held_step = 1, failing_step = 0;
  std::function<void()> after_stat;       // of the folder or of a step, once
  std::function<void()> ahead_of_labels;  // before their file is made, once

  Status pass(const std::filesystem::path& to) {
    if (to.filename() == step_dir_name(failing_step)) return os_error(EIO, "rename, as the test wants it");
    std::unique_lock lock(mutex);
    if (to.filename() == step_dir_name(held_step)) changed.wait(lock, [&] { return open; });
    return {};
  }
  void let_pass() {
    {
      const std::lock_guard lock(mutex);
      open = true;
    }
    changed.notify_all();
  }
};

class GatedBackend final : public PosixBackend {
 public:
  explicit GatedBackend(Gate& gate) : gate_(gate) {}
  Result<FileStat> stat(const std::filesystem::path& path) override {
    Result<FileStat> out = PosixBackend::stat(path);
    const bool looks = path.filename() == "checkpoints" || path.parent_path().filename() == "checkpoints";
    if (looks && gate_.after_stat) std::exchange(gate_.after_stat, nullptr)();
    return out;
  }
  Result<std::unique_ptr<IoFile>> create(const std::filesystem::path& path, int64_t size_bytes) override {
    if (path.filename() == "labels.json.tmp" && gate_.ahead_of_labels) std::exchange(gate_.ahead_of_labels, nullptr)();
    return PosixBackend::create(path, size_bytes);
  }
  Status rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    RT_TRY(gate_.pass(to));
    return PosixBackend::rename(from, to);
  }

 private:
  Gate& gate_;
};

Plan saving_each_step(int64_t in_flight) {
  Plan plan = plan_of({2, 1, 1}, true);
  plan.recipe.checkpoint = {.save = {{.steps = 1}}, .snapshot_steps = 1, .direct_io = false, .in_flight = in_flight};
  return plan;
}

RunText run_text(const std::string& run_id) {
  return {.run_name = "fake", .run_id = run_id, .recipe_json = "{}", .recipe_hash = "r"};
}

/// An agent with two writers and the ranks of a run of two steps; the save of step 1 is held back.
struct TwoSaves {
  explicit TwoSaves(const std::filesystem::path& dir, int64_t failing_step = 0, int64_t keep_last = 0,
                    RunLabels* labels = nullptr) {
    gate.failing_step = failing_step;
    arena = std::make_unique<Arena>(Arena::create(arena_spec(plan, run_text(fresh_run_id())).value()).value());
    persister = std::make_unique<NodePersister>(
        *arena, [this] { return std::make_unique<GatedBackend>(gate); }, dir,
        PersistOptions{.retention = keep_last == 0 ? std::nullopt : std::optional(RetentionPolicy{keep_last}),
                       .in_flight = 2,
                       .labels = labels,
                       .on_event = [this](const PersistEvent& event) {
                         const std::lock_guard lock(mutex);
                         events.push_back(event);
                       }});
    RestoreDecider decider(plan, *arena, io, {dir});
    REQUIRE(decider.next_incarnation().ok());
  }
  ~TwoSaves() {
    gate.let_pass();
    persister.reset();
    ignore(arena->remove(), "end of the test");
  }
  /// Returns when the ranks have left, which wait for the save of step 2, and all that belongs to that save is done:
  /// its retention and its event come behind what the ranks wait for.
  LifeReport live_two_steps() {
    LifeReport report;
    REQUIRE(live(plan, *arena, {.steps = 2}, persister.get(), report).ok());
    persister->wait_told();
    return report;
  }
  std::vector<int64_t> told() {
    const std::lock_guard lock(mutex);
    std::vector<int64_t> steps;
    for (const PersistEvent& event : events) steps.push_back(event.step);
    return steps;
  }

  const Plan plan = saving_each_step(2);
  Gate gate;
  PosixBackend io;
  std::unique_ptr<Arena> arena;
  std::mutex mutex;
  std::vector<PersistEvent> events;
  std::unique_ptr<NodePersister> persister;
};

std::vector<int64_t> complete_steps(const std::filesystem::path& dir) {
  PosixBackend io;
  std::vector<int64_t> out;
  const Catalog catalog = list_checkpoints(io, dir).value();
  for (const CheckpointInfo& info : catalog.checkpoints) {
    if (!info.complete) continue;
    CHECK(verify_checkpoint(io, info.dir).value().whole());
    out.push_back(info.step);
  }
  return out;
}

/// A whole state, of one byte a shard but for the first ones, promised to be saved: two steps differ in one shard each
/// time.
void promise_little(const Arena& arena, int64_t slot, int64_t step) {
  for (int64_t rank = 0; rank < arena.world(); ++rank) {
    std::vector<std::vector<std::byte>> state;
    for (const arena::ShardExtent& shard : arena.shards(rank)) {
      const auto differs = std::ssize(state) < step - 1;
      state.emplace_back(shard.bytes, static_cast<std::byte>(differs ? std::ssize(state) + 1 : 0));
    }
    const std::vector<std::span<const std::byte>> boxes(state.begin(), state.end());
    REQUIRE(write_snapshot(arena, rank, slot, 1, step, encode_position(position_at(step)), boxes).ok());
  }
  arena.control().reserved[slot] = step;
}

}  // namespace

TEST_SUITE("ckpt/hook/in_flight") {
  TEST_CASE("a save does not wait for the one before, and the newest complete one is where a run goes on") {
    const TempDir dir;
    {
      TwoSaves run(dir.path);
      const LifeReport report = run.live_two_steps();
      CHECK(report.finished[0].ok());
      CHECK(run.told() == std::vector<int64_t>{2});  // step 1 is still on its way
      CHECK(complete_steps(dir.path) == std::vector<int64_t>{2});
      CHECK(run.arena->control().persisted_step == 2);
      run.gate.let_pass();
      CHECK(run.persister->flush().ok());
      CHECK(run.told() == std::vector<int64_t>{2, 1});
      CHECK(run.arena->control().persisted_step == 2);  // an older one that ends later changes nothing
      CHECK(complete_steps(dir.path) == std::vector<int64_t>{1, 2});
    }
    const Plan plan = saving_each_step(1);
    std::vector<std::string> notices;
    auto node = CheckpointNode::open(plan, {.checkpoints_dir = dir.path, .run = run_text(fresh_run_id())}, &notices);
    REQUIRE(node.ok());
    CHECK(node.value()->begin_incarnation().value().step == 2);
  }

  TEST_CASE("a save that ends late is judged by retention from the newest, and may go at once") {
    const TempDir dir;
    TwoSaves run(dir.path, 0, 1);
    run.live_two_steps();
    run.gate.let_pass();
    CHECK(run.persister->flush().ok());
    CHECK(run.told() == std::vector<int64_t>{2, 1});
    CHECK(run.events[1].removed == std::vector<int64_t>{1});
    CHECK(complete_steps(dir.path) == std::vector<int64_t>{2});
  }

  TEST_CASE("a run's saves write over what its retention removes, and leave none of it when it ends") {
    const TempDir dir;
    const Plan plan = saving_each_step(1);
    Arena arena = Arena::create(arena_spec(plan, run_text(fresh_run_id())).value()).value();
    PosixBackend io;
    int64_t files = 0;
    std::vector<std::string> seen;
    {
      NodePersister persister(
          arena, [] { return std::make_unique<PosixBackend>(); }, dir.path,
          PersistOptions{.retention = RetentionPolicy{1}, .on_event = [&](const PersistEvent& event) {
                           files += event.reused_files;
                           for (const std::string& name : list_names(io, dir.path).value().leftovers)
                             seen.push_back(name);
                         }});
      RestoreDecider decider(plan, arena, io, {dir.path});
      for (int64_t step = 1; step <= 6; ++step) {
        REQUIRE(decider.next_incarnation().ok());
        LifeReport report;
        REQUIRE(live(plan, arena, {.steps = step}, &persister, report).ok());
        CHECK(persister.flush().ok());
      }
    }
    CHECK(complete_steps(dir.path) == std::vector<int64_t>{6});
    CHECK(list_names(io, dir.path).value().leftovers.empty());
    if (files == 0) {
      MESSAGE("skipped: this file system's files are not written over");
      CHECK(seen.empty());
      return;
    }
    CHECK(files == 4 * std::ssize(arena.rank_of_file()));  // the saves of 3 to 6
    for (const std::string& name : seen) CHECK(name.starts_with(kSparePrefix));
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("killed with one save done and the one before it not: the done one counts, the other is cleared away") {
    const TempDir dir;
    const pid_t child = fork();
    if (child == 0) {
      TwoSaves run(dir.path);
      run.live_two_steps();
      ignore(run.arena->remove(), "the machine is gone too");
      kill(getpid(), SIGKILL);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
    REQUIRE(WTERMSIG(status) == SIGKILL);
    PosixBackend io;
    CHECK(list_checkpoints(io, dir.path).value().leftovers.size() == 1);
    const Plan plan = saving_each_step(2);
    std::vector<std::string> notices;
    auto node = CheckpointNode::open(plan, {.checkpoints_dir = dir.path, .run = run_text(fresh_run_id())}, &notices);
    REQUIRE(node.ok());
    CHECK(node.value()->begin_incarnation().value().step == 2);
    CHECK(complete_steps(dir.path) == std::vector<int64_t>{2});
    CHECK(list_checkpoints(io, dir.path).value().leftovers.empty());
  }

  TEST_CASE("the newest save fails while an older one succeeds: the ranks and whoever flushes are told of the newest") {
    const TempDir dir;
    TwoSaves run(dir.path, 2);
    const LifeReport report = run.live_two_steps();
    REQUIRE_FALSE(report.finished[0].ok());
    CHECK(report.finished[0].error().message.find("the checkpoint of step 2 could not be written") == 0);
    run.gate.let_pass();
    CHECK_FALSE(run.persister->flush().ok());  // tried again, in vain
    CHECK(complete_steps(dir.path) == std::vector<int64_t>{1});
    run.gate.failing_step = 0;
    CHECK(run.persister->flush().ok());
    CHECK(complete_steps(dir.path) == std::vector<int64_t>{1, 2});
  }

  TEST_CASE("a promised step that has changed in memory is told, and whoever flushes gets on with the one before") {
    const TempDir dir;
    TwoSaves run(dir.path, 2);
    run.live_two_steps();
    run.gate.let_pass();
    REQUIRE_FALSE(run.persister->flush().ok());  // step 2 is in memory alone
    const std::vector<SlotView> views = run.arena->views();
    const auto newest = newest_whole(views);
    REQUIRE(newest.has_value());
    REQUIRE(views[*newest].step == 2);
    run.arena->payload(0, *newest)[100] ^= std::byte{1};
    run.gate.failing_step = 0;
    run.arena->control().reserved[*newest] = 2;  // as an agent leaves it that dies before the save
    run.events.clear();
    CHECK(run.persister->flush().ok());
    REQUIRE(run.told() == std::vector<int64_t>{2});
    CHECK(run.events[0].status.error().message.find("has changed in memory") != std::string::npos);
    CHECK(complete_steps(dir.path) == std::vector<int64_t>{1});
    CHECK(run.arena->control().distrusted == 1);  // else the next life begins with it
  }

  TEST_CASE("a dead agent's promise that it had kept does not replace the step that newer ones refer to") {
    for (const bool decided : {false, true}) {
      const TempDir dir;
      const Plan plan = saving_each_step(2);
      PosixBackend io;
      std::vector<PersistEvent> events;
      const auto make_io = [] { return std::make_unique<PosixBackend>(); };
      const PersistOptions options{
          .incremental = true, .in_flight = 2, .on_event = [&](const PersistEvent& event) { events.push_back(event); }};
      Arena arena = Arena::create(arena_spec(plan, run_text(fresh_run_id())).value()).value();
      {
        NodePersister persister(arena, make_io, dir.path, options);
        arena.control().incarnation = 1;
        for (const int64_t step : {1, 2, 3}) {
          promise_little(arena, step - 1, step);
          REQUIRE(persister.flush().ok());
        }
      }
      REQUIRE(look_at_checkpoint(io, dir.path, 3).references == std::vector<int64_t>{1, 2});
      events.clear();
      NodePersister persister(arena, make_io, dir.path, options);
      if (decided) arena.control().incarnation = 2;
      arena.control().reserved[1] = 2;  // as who is killed behind the save, before he has taken it back
      CHECK(persister.flush().ok());
      CHECK(events.empty());
      CHECK(arena.control().reserved[1] == 0);
      CHECK(complete_steps(dir.path) == std::vector<int64_t>{1, 2, 3});
      ignore(arena.remove(), "end of the test");
    }
  }

  TEST_CASE("a run that went back to an older step refers to none of those that were passed over") {
    for (const bool back : {false, true}) {
      const TempDir dir;
      const Plan plan = saving_each_step(2);
      PosixBackend io;
      Arena arena = Arena::create(arena_spec(plan, run_text(fresh_run_id())).value()).value();
      {
        NodePersister persister(arena, [] { return std::make_unique<PosixBackend>(); }, dir.path,
                                {.incremental = true, .in_flight = 2});
        arena.control().incarnation = 1;
        for (const int64_t step : {1, 2, 3}) {
          promise_little(arena, step - 1, step);
          REQUIRE(persister.flush().ok());
        }
        persister.gone_on_from(back ? 2 : 3);  // step 3 was damaged on the disk and in memory
        promise_little(arena, 0, 4);
        REQUIRE(persister.flush().ok());
      }
      CHECK(look_at_checkpoint(io, dir.path, 4).references.empty() == back);
      ignore(arena.remove(), "end of the test");
    }
  }

  TEST_CASE("ranks that start anew beside a save do not make retention remove what it saved") {
    const TempDir dir;
    const Plan plan = saving_each_step(1);
    Arena arena = Arena::create(arena_spec(plan, run_text(fresh_run_id())).value()).value();
    arena.control().incarnation = 1;
    const MakeIo make_io = [] { return std::make_unique<PosixBackend>(); };
    {
      NodePersister persister(arena, make_io, dir.path, {});
      promise_little(arena, 0, 8);  // the run will go back behind it, as behind one whose bytes are damaged
      REQUIRE(persister.flush().ok());
    }
    std::vector<int64_t> removed;
    {
      NodePersister persister(arena, make_io, dir.path,
                              {.retention = RetentionPolicy{.keep_last = 1},
                               .check_owner = [&]() -> Status {
                                 // RestoreDecider::next_incarnation() out of memory, between the commit of step 3 and
                                 // its retention.
                                 if (std::filesystem::exists(dir.path / step_dir_name(3)))
                                   arena.control().persisted_step = 0;
                                 return {};
                               },
                               .on_event =
                                   [&](const PersistEvent& event) {
                                     removed.insert(removed.end(), event.removed.begin(), event.removed.end());
                                   }});
      persister.gone_on_from(1);
      arena.control().incarnation = 2;
      arena.control().persisted_step = 0;
      REQUIRE(arena.invalidate_slots().ok());
      promise_little(arena, 1, 2);
      REQUIRE(persister.flush().ok());
      promise_little(arena, 2, 3);
      REQUIRE(persister.flush().ok());
    }
    CHECK(removed == std::vector<int64_t>{2});
    CHECK(complete_steps(dir.path) == std::vector<int64_t>{3, 8});
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("a start that waits for a save of the life before heeds a stop, and says what it waited for") {
    class Held final : public PosixBackend {
     public:
      explicit Held(const std::atomic<bool>& held) : held_(held) {}
      Result<std::unique_ptr<IoFile>> create(const std::filesystem::path& path, int64_t bytes) override {
        while (held_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return PosixBackend::create(path, bytes);
      }

     private:
      const std::atomic<bool>& held_;
    };
    const TempDir dir;
    const Plan plan = saving_each_step(1);
    std::atomic<bool> held = false;
    Arena arena = Arena::create(arena_spec(plan, run_text(fresh_run_id())).value()).value();
    arena.control().incarnation = 1;
    {
      NodePersister persister(arena, [&] { return std::make_unique<Held>(held); }, dir.path, {});
      promise_little(arena, 0, 8);
      REQUIRE(persister.flush().ok());
      held = true;
      promise_little(arena, 1, 9);
      persister.notify();
      while (arena.control().reserved[1].load() != -9) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      PosixBackend io;
      RestoreDecider decider(plan, arena, io,
                             {.checkpoints_dir = dir.path, .from_step = 8, .stop = [] { return true; }});
      const auto choice = decider.next_incarnation();
      held = false;
      REQUIRE_FALSE(choice.ok());
      CHECK(choice.error().code == ErrorCode::kStopped);
      CHECK(choice.error().message == "asked to stop while step 9 was being written");
    }
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("what is promised is written when it is due, and once more where it was promised beside a try that fails") {
    const TempDir dir;
    const Plan plan = saving_each_step(1);
    Arena arena = Arena::create(arena_spec(plan, run_text(fresh_run_id())).value()).value();
    arena.control().incarnation = 1;
    std::atomic<int64_t> due = 0, fails = 2;
    std::vector<int64_t> begun;
    NodePersister* persister = nullptr;
    PersistOptions options;
    options.is_due = [&](int64_t step) { return step == due; };
    options.save_step = [&](IoBackend& io, const std::filesystem::path& into, Manifest skeleton,
                            std::span<const WriterPart> parts, const SaveOptions& how) -> Result<SaveReport> {
      begun.push_back(skeleton.step);
      if (skeleton.step == 3 && fails-- > 0) {
        if (fails == 1) persister->promise(1, 3);  // nobody promises it beside the second try
        return Error{ErrorCode::kUnavailable, "another host was lost"};
      }
      return save_checkpoint(io, into, std::move(skeleton), parts, how);
    };
    const auto until_free = [&](int64_t slot) {
      while (arena.control().reserved[slot] != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    {
      NodePersister owned(
          arena, [] { return std::make_unique<PosixBackend>(); }, dir.path, options);
      persister = &owned;
      promise_little(arena, 0, 2);
      promise_little(arena, 1, 3);
      owned.notify();
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      CHECK(begun.empty());
      due = 3;
      until_free(1);
      CHECK(begun == std::vector<int64_t>{3, 3});
      CHECK(arena.control().reserved[0] == 2);
      due = 2;
      until_free(0);
      due = 3;
      owned.promise(1, 3);
      until_free(1);
    }
    CHECK(begun == std::vector<int64_t>{3, 3, 2, 3});
    CHECK(complete_steps(dir.path) == std::vector<int64_t>{2, 3});
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("a save that throws fails with the words of the throw, and is not begun again") {
    const TempDir dir;
    const Plan plan = saving_each_step(1);
    Arena arena = Arena::create(arena_spec(plan, run_text(fresh_run_id())).value()).value();
    arena.control().incarnation = 1;
    std::atomic<int64_t> begun = 0;
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<PersistEvent> events;
    PersistOptions options;
    options.save_step = [&](IoBackend&, const std::filesystem::path&, Manifest, std::span<const WriterPart>,
                            const SaveOptions&) -> Result<SaveReport> {
      ++begun;
      throw std::runtime_error("no text can be made of it");
    };
    options.on_event = [&](const PersistEvent& event) {
      const std::lock_guard lock(mutex);
      events.push_back(event);
      changed.notify_all();
    };
    {
      NodePersister persister(
          arena, [] { return std::make_unique<PosixBackend>(); }, dir.path, options);
      promise_little(arena, 0, 2);
      persister.notify();
      std::unique_lock lock(mutex);
      REQUIRE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return !events.empty(); }));
      CHECK(events.front().step == 2);
      REQUIRE_FALSE(events.front().status.ok());
      CHECK(events.front().status.error().message == "saving step 2: no text can be made of it");
    }
    CHECK(arena.control().failed_step == 2);
    CHECK(arena.control().reserved[0] == 0);
    CHECK(begun == 1);
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("a save that runs out of memory leaves nothing on the disk, however often it is tried again") {
    class Short final : public PosixBackend {
     public:
      explicit Short(std::atomic<int>& failures) : failures_(failures) {}
      Result<std::unique_ptr<IoFile>> create(const std::filesystem::path& path, int64_t bytes) override {
        Result<std::unique_ptr<IoFile>> file = PosixBackend::create(path, bytes);
        if (failures_-- > 0) throw std::bad_alloc();
        return file;
      }

     private:
      std::atomic<int>& failures_;
    };
    const TempDir dir;
    const Plan plan = saving_each_step(1);
    Arena arena = Arena::create(arena_spec(plan, run_text(fresh_run_id())).value()).value();
    std::atomic<int> failures = 2;
    {
      NodePersister persister(arena, [&] { return std::make_unique<Short>(failures); }, dir.path, {});
      PosixBackend io;
      RestoreDecider decider(plan, arena, io, {dir.path});
      REQUIRE(decider.next_incarnation().ok());
      LifeReport report;
      REQUIRE(live(plan, arena, {.steps = 1}, &persister, report).ok());
      CHECK(failures < 0);
      CHECK(list_names(io, dir.path).value().leftovers.empty());
    }
    CHECK(complete_steps(dir.path) == std::vector<int64_t>{1});
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("a rank that leaves at once does not wait for a slow disk, and a promised save stays promised") {
    bool flushing = false;
    SUBCASE("beside training") {}
    SUBCASE("in the last save") { flushing = true; }
    const TempDir dir;
    const Plan plan = saving_each_step(1);
    Arena arena = Arena::create(arena_spec(plan, run_text(fresh_run_id())).value()).value();
    const MakeIo make_io = [] { return std::make_unique<PosixBackend>(); };
    SaveOptions slow;
    slow.max_bytes_per_s = 100;
    auto persister = std::make_unique<NodePersister>(arena, make_io, dir.path, PersistOptions{.save = slow});
    PosixBackend io;
    RestoreDecider decider(plan, arena, io, {dir.path});
    REQUIRE(decider.next_incarnation().ok());
    LifeReport report;
    REQUIRE(live(plan, arena, {.steps = 9, .die_at = 3, .snapshots_at_death = 2}, persister.get(), report).ok());
    const auto names = [&] { return list_names(io, dir.path).value(); };
    while (names().leftovers.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto begin = std::chrono::steady_clock::now();
    if (flushing) {  // and asks for it only while he waits for the last save
      int64_t asked = 0;
      const Status flushed = persister->flush([&] { return ++asked > 2; });
      REQUIRE_FALSE(flushed.ok());
      CHECK(flushed.error().code == ErrorCode::kStopped);
    } else {
      persister->give_up();
    }
    persister.reset();
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
    CHECK(names().leftovers.empty());
    CHECK(names().steps.empty());
    int64_t promised = 0;
    for (int64_t slot = 0; slot < arena.slots(); ++slot) promised += arena.control().reserved[slot] == 1;
    CHECK(promised == 1);
    NodePersister next(arena, make_io, dir.path, {});
    CHECK(next.flush().ok());
    CHECK(complete_steps(dir.path) == std::vector<int64_t>{1, 3});
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("nothing is saved in the place of a checkpoints folder that was moved or unmounted") {
    const TempDir dir;
    const std::filesystem::path there = dir.path / "run" / "checkpoints", away = dir.path / "moved";
    REQUIRE(std::filesystem::create_directories(there));
    TwoSaves run(there, 2);
    run.live_two_steps();
    run.gate.let_pass();
    REQUIRE_FALSE(run.persister->flush().ok());
    run.gate.failing_step = 0;
    std::filesystem::rename(dir.path / "run", away);
    const Status flushed = run.persister->flush();
    REQUIRE_FALSE(flushed.ok());
    CHECK(flushed.error().code == ErrorCode::kIo);
    CHECK(flushed.error().message.find("the folder is gone") != std::string::npos);
    CHECK_FALSE(std::filesystem::exists(dir.path / "run"));
    std::filesystem::rename(away, dir.path / "run");
    run.gate.after_stat = [&] { std::filesystem::rename(dir.path / "run", away); };  // in the middle of a save
    CHECK_FALSE(run.persister->flush().ok());
    CHECK_FALSE(std::filesystem::exists(dir.path / "run"));
    std::filesystem::rename(away, dir.path / "run");
    CHECK(run.persister->flush().ok());
    CHECK(complete_steps(there) == std::vector<int64_t>{1, 2});
  }

  TEST_CASE("nothing is saved into another folder of the checkpoints' name, as a mount point without its disk") {
    const TempDir dir;
    const std::filesystem::path there = dir.path / "run" / "checkpoints", away = dir.path / "disk";
    REQUIRE(std::filesystem::create_directories(there));
    TwoSaves run(there, 2);
    run.live_two_steps();
    run.gate.let_pass();
    REQUIRE_FALSE(run.persister->flush().ok());  // step 1 is there, step 2 is not
    run.gate.failing_step = 0;
    const auto goes = [&] {
      std::filesystem::rename(there, away);
      REQUIRE(std::filesystem::create_directory(there));
    };
    const auto comes_back = [&](const std::filesystem::path& from) {
      std::filesystem::remove_all(there);
      std::filesystem::rename(from, there);
    };
    goes();
    const Status flushed = run.persister->flush();
    REQUIRE_FALSE(flushed.ok());
    CHECK(flushed.error().code == ErrorCode::kIo);
    CHECK(flushed.error().message.find("the folder is gone; move or mount it where it was (another one is there: "
                                       "device ") != std::string::npos);
    CHECK(std::filesystem::is_empty(there));
    comes_back(away);
    CHECK(run.persister->check_folder().ok());
    run.gate.after_stat = [&] { goes(); };  // behind the first look
    CHECK_FALSE(run.persister->flush().ok());
    CHECK(std::filesystem::is_empty(there));
    // With other numbers, but with what was saved last: as a network disk that was mounted anew.
    std::filesystem::copy(away, dir.path / "anew", std::filesystem::copy_options::recursive);
    comes_back(dir.path / "anew");
    CHECK(run.persister->flush().ok());
    CHECK(complete_steps(there) == std::vector<int64_t>{1, 2});
    CHECK(complete_steps(away) == std::vector<int64_t>{1});
  }

  TEST_CASE("no labels are written into the mount point of a disk that went away") {
    const TempDir dir;
    const std::filesystem::path there = dir.path / "run" / "checkpoints", away = dir.path / "disk";
    REQUIRE(std::filesystem::create_directories(there));
    RunLabels labels({}, 2);
    TwoSaves run(there, 0, 1, &labels);
    run.gate.ahead_of_labels = [&] {
      std::filesystem::rename(there, away);
      REQUIRE(std::filesystem::create_directory(there));
    };
    run.gate.let_pass();
    run.live_two_steps();
    ignore(run.persister->flush(), "the disk is gone");
    REQUIRE_FALSE(run.gate.ahead_of_labels);
    CHECK(std::filesystem::is_empty(there));
    const std::lock_guard lock(run.mutex);
    const auto told = std::ranges::find_if(run.events, [](const PersistEvent& event) {
      return std::ranges::any_of(event.problems, [](const std::string& problem) {
        return problem.find("another one is there") != std::string::npos;
      });
    });
    REQUIRE(told != run.events.end());
    CHECK(told->removed.empty());
  }

  TEST_CASE("a folder that another agent takes, whenever it does, gets no step any more and loses none") {
    for (int64_t looks = 0; looks <= 5; ++looks) {
      CAPTURE(looks);
      const TempDir dir;
      const Plan plan = saving_each_step(1);
      Arena arena = Arena::create(arena_spec(plan, run_text(fresh_run_id())).value()).value();
      std::atomic<int64_t> ours = 1000;
      std::atomic<int64_t> told = 0;
      std::vector<PersistEvent> events;
      {
        NodePersister persister(
            arena, [] { return std::make_unique<PosixBackend>(); }, dir.path,
            PersistOptions{.retention = RetentionPolicy{1},
                           .check_owner = [&]() -> Status {
                             if (ours-- > 0) return {};
                             return Error{ErrorCode::kUnavailable, "another one has taken it"};
                           },
                           .before_save = [&](int64_t, std::span<const std::string>) { ++told; },
                           .on_event = [&](const PersistEvent& event) { events.push_back(event); }});
        PosixBackend io;
        RestoreDecider decider(plan, arena, io, {dir.path});
        for (const int64_t step : {1, 2}) {
          REQUIRE(decider.next_incarnation().ok());
          if (step == 2) ours = looks;
          LifeReport report;
          REQUIRE(live(plan, arena, {.steps = step}, &persister, report).ok());
          persister.wait_told();
          if (step == 2) CHECK(report.finished[0].ok() == (looks >= 4));
        }
        if (looks < 4) CHECK_FALSE(persister.check_folder().ok());
        persister.give_up();  // as who has lost it does: its spare files stay too
      }
      REQUIRE(events.size() == 2);
      // Refused before the news are told, before anything is written, in the new folder, before the commit; and then
      // what is whole is removed by its new owner alone.
      CHECK(told == (looks == 0 ? 1 : 2));
      const std::vector<int64_t> whole = complete_steps(dir.path);
      CHECK(whole == (looks < 4    ? std::vector<int64_t>{1}
                      : looks == 4 ? std::vector<int64_t>{1, 2}
                                   : std::vector<int64_t>{2}));
      PosixBackend io;
      for (const std::string& name : list_names(io, dir.path).value().leftovers) CHECK(name.starts_with(kSparePrefix));
      CHECK(events[1].status.ok() == (looks >= 4));
      if (looks < 4) {
        CHECK(events[1].status.error().code == ErrorCode::kUnavailable);
        CHECK(events[1].status.error().message == "step 2 was not saved: another one has taken it");
      }
      CHECK(events[1].problems ==
            (looks == 4 ? std::vector<std::string>{"another one has taken it"} : std::vector<std::string>{}));
      ignore(arena.remove(), "end of the test");
    }
  }

  TEST_CASE("without a save in flight the memory has one slot") {
    Plan plan = saving_each_step(1);
    plan.recipe.checkpoint.in_flight = 0;
    plan.recipe.checkpoint.snapshot_by = SnapshotBy::kCopy;
    CHECK(arena_spec(plan, run_text("r")).value().slots == 1);
  }

  TEST_CASE("each save in flight costs one bank and its headers") {
    const auto page_up = [](int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; };
    for (int64_t in_flight = 1; in_flight <= 6; ++in_flight) {
      const Plan plan = saving_each_step(in_flight);
      const ArenaSpec spec = arena_spec(plan, run_text("r")).value();
      CHECK(spec.slots == 2 + in_flight);
      ArenaSpec fewer = spec;
      --fewer.slots;
      int64_t bank = 0, payload = 0, padding = 0;
      for (const SlotLayout& rank : spec.ranks) {
        payload += rank.bytes;
        padding += kPageBytes * (1 + std::ssize(rank.shards));
        bank += page_up(rank.bytes) + page_up(static_cast<int64_t>(sizeof(arena::SlotHeader)) + kPositionCapacity +
                                              8 * std::ssize(rank.shards));
      }
      CHECK(Arena::total_bytes(spec) - Arena::total_bytes(fewer) == bank);
      CHECK(payload >= plan.checkpoint_bytes);  // what `cairn plan` multiplies by the banks
      CHECK(payload < plan.checkpoint_bytes + padding);
    }
  }
}
