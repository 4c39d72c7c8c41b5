#include "ckpt/node.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <fstream>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <set>
#include <thread>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/run_memory.h"
#include "ckpt/snapshot/snapshot.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/verify/verify.h"
#include "runtime/core/process.h"
#include "tests/ckpt/hook/fake_run.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

Plan saving(const Layout& layout, CheckpointConfig config) {
  Plan plan = plan_of(layout, true);
  config.direct_io = false;
  plan.recipe.checkpoint = std::move(config);
  return plan;
}

NodeOptions options_for(const std::string& run_id, const std::filesystem::path& dir) {
  return {.checkpoints_dir = dir / "checkpoints",
          .run = {.run_name = "fake", .run_id = run_id, .recipe_json = "{}", .recipe_hash = "r"}};
}

/// An agent with its ranks in a process of its own, which gets SIGKILL after `die_at`'s snapshot.
void run_and_kill(const Plan& plan, const NodeOptions& options, const Life& life) {
  const pid_t child = fork();
  if (child == 0) {
    std::vector<std::string> notices;
    auto node = CheckpointNode::open(plan, options, &notices);
    RT_CHECK(node.ok(), "{}", node.error().message);
    RT_CHECK(node.value()->begin_incarnation().ok());
    LifeReport report;
    RT_CHECK(live(plan, node.value()->arena(), life, nullptr, report).ok());
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  REQUIRE(WTERMSIG(status) == SIGKILL);
}

int in_child(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// A run that ends at `step`, in a process of its own.
void run_until(const Plan& plan, const NodeOptions& options, int64_t step) {
  REQUIRE(in_child([&] {
            std::vector<std::string> notices;
            auto node = CheckpointNode::open(plan, options, &notices);
            LifeReport report;
            return node.ok() && node.value()->begin_incarnation().ok() &&
                           live(plan, node.value()->arena(), {.steps = step}, nullptr, report).ok()
                       ? 0
                       : 1;
          }) == 0);
}

std::vector<std::filesystem::path> memory_of(const std::string& run_id) {
  std::vector<std::filesystem::path> out;
  for (const auto& item : std::filesystem::directory_iterator(kSharedMemory)) {
    if (!item.path().filename().string().starts_with("cairn-")) continue;
    if (const auto arena = Arena::attach(item.path().string()); arena.ok() && arena.value().run_id() == run_id)
      out.push_back(item.path());
  }
  return out;
}

/// A run whose agent dies with step 9 in memory and 5 on disk, and that goes on from there without that memory, as on
/// another machine, to step 7. Gives the memory's name, and moves it to `kept`.
std::filesystem::path leave_memory_behind(const Plan& plan, const NodeOptions& options, std::filesystem::path& kept) {
  run_until(plan, options, 5);
  run_and_kill(plan, options, {.steps = 20, .die_at = 9, .snapshots_at_death = 2});
  const std::vector<std::filesystem::path> memory = memory_of(options.run.run_id);
  REQUIRE(memory.size() == 1);
  kept = memory[0].parent_path() / ("elsewhere-" + options.run.run_id);
  std::filesystem::rename(memory[0], kept);
  run_until(plan, options, 7);
  return memory[0];
}

void flip_last_shard(const std::filesystem::path& checkpoint) {
  PosixBackend io;
  const Manifest manifest = read_manifest(io, checkpoint).value();
  const ShardEntry& shard = manifest.shards.back();
  std::fstream file(checkpoint / manifest.files[shard.file].name, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(shard.offset);
  const char byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(shard.offset);
  file.put(byte);
}

}  // namespace

TEST_SUITE("ckpt/node") {
  TEST_CASE("an agent killed with everything loses nothing: the next one goes on from its memory") {
    const TempDir dir;
    const Plan plan = saving({2, 1, 2}, {.snapshot_steps = 1});
    const NodeOptions options = options_for(fresh_run_id(), dir.path);
    run_and_kill(plan, options, {.steps = 20, .die_at = 7, .snapshots_at_death = 4});
    std::vector<std::string> notices;
    auto opened = CheckpointNode::open(plan, options, &notices);
    REQUIRE_OK(opened);
    CheckpointNode& node = *opened.value();
    const RestoreChoice choice = node.begin_incarnation().value();
    CHECK(choice.source == arena::Source::kMemory);
    CHECK(choice.step == 7);
    CHECK(choice.incarnation == 2);
    LifeReport report;
    REQUIRE(live(plan, node.arena(), {.steps = 9}, nullptr, report).ok());
    CHECK(report.restored.value().step == 7);
    CHECK(report.finished[0].ok());
    CHECK(node.arena().control().persisted_step == 9);
    std::vector<PersistEvent> told;  // the step is on disk a moment before that is told
    for (int tries = 0; told.empty() && tries < 1000; ++tries) {
      told = node.take_events();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    REQUIRE(told.size() == 1);
    CHECK_FALSE(node.flush().has_value());
  }

  TEST_CASE("memory of another layout is written to disk first, and the new layout starts from there") {
    const TempDir dir;
    const std::string run_id = fresh_run_id();
    run_and_kill(saving({2, 2, 1}, {.snapshot_steps = 1}), options_for(run_id, dir.path),
                 {.steps = 20, .die_at = 5, .snapshots_at_death = 4});
    const Plan plan = saving({1, 1, 3}, {.snapshot_steps = 1});
    std::vector<std::string> notices, told;
    NodeOptions options = options_for(run_id, dir.path);
    options.before_save = [&](int64_t step, std::span<const std::string> news) {
      CHECK_FALSE(std::filesystem::exists(options.checkpoints_dir / step_dir_name(step)));
      told.insert(told.end(), news.begin(), news.end());
    };
    auto opened = CheckpointNode::open(plan, options, &notices);
    REQUIRE_OK(opened);
    // What the dead agent may not have told is told before the memory that holds it goes.
    const auto news = [](int64_t step) { return position_at(step).metrics; };
    CHECK(told == std::vector<std::string>{news(1), news(2), news(3), news(4), news(5)});
    told.clear();
    const RestoreChoice choice = opened.value()->begin_incarnation().value();
    CHECK(choice.source == arena::Source::kDisk);
    CHECK(choice.step == 5);
    LifeReport report;
    REQUIRE(
        live(plan, opened.value()->arena(), {.steps = 20, .die_at = 8, .snapshots_at_death = 3}, nullptr, report).ok());
    CHECK(report.restored.value().step == 5);
    const auto flushed = opened.value()->flush();  // the ranks are gone: step 8 is only in memory
    REQUIRE(flushed.has_value());
    CHECK(flushed->step == 8);
    CHECK(flushed->status.ok());
    CHECK(told == std::vector<std::string>{news(6), news(7), news(8)});
    CHECK_FALSE(opened.value()->flush().has_value());
  }

  TEST_CASE("a step that its ranks have found ruined is neither saved nor gone on with, whenever the agent dies") {
    for (const bool other_layout : {false, true}) {
      for (const bool saved : {false, true}) {  // on disk already
        CAPTURE(other_layout);
        CAPTURE(saved);
        const TempDir dir;
        const std::string run_id = fresh_run_id();
        const NodeOptions options = options_for(run_id, dir.path);
        CheckpointConfig config{.snapshot_steps = 1};
        const Plan plan = saving({2, 2, 1}, config);
        run_until(plan, options, 5);
        run_and_kill(plan, options, {.steps = 20, .die_at = 9, .snapshots_at_death = 4});
        const std::vector<std::filesystem::path> memory = memory_of(run_id);
        REQUIRE(memory.size() == 1);
        if (saved) {  // as if its save had ended just before
          PosixBackend io;
          REQUIRE(in_child([&] {
                    std::vector<std::string> notices;
                    const Plan other = saving({1, 1, 3}, config);
                    NodeOptions apart = options;
                    auto node = CheckpointNode::open(other, apart, &notices);  // writes step 9, and goes
                    return node.ok() ? 0 : 1;
                  }) == 0);
          REQUIRE(find_step(io, options.checkpoints_dir, 9).ok());
          run_and_kill(plan, options, {.steps = 20, .die_at = 10, .snapshots_at_death = 4});
        }
        const int64_t ruined = saved ? 10 : 9;
        {
          const std::vector<std::filesystem::path> left = memory_of(run_id);
          REQUIRE(left.size() == 1);
          const Arena arena = Arena::attach(left[0].string()).value();
          arena.control().ruined_step.store(ruined);  // what ranks do before they leave (CheckpointHook::condemn)
        }
        const Plan next = saving(other_layout ? Layout{1, 1, 3} : Layout{2, 2, 1}, config);
        std::vector<std::string> notices;
        auto opened = CheckpointNode::open(next, options, &notices);
        REQUIRE_OK(opened);
        const RestoreChoice choice = opened.value()->begin_incarnation().value();
        CHECK(choice.step < ruined);
        CHECK(choice.step >= (saved ? 9 : 5));
        CHECK_FALSE(std::filesystem::exists(options.checkpoints_dir / step_dir_name(ruined)));
        const auto flushed = opened.value()->flush();
        CHECK((!flushed || flushed->step < ruined));
        CHECK_FALSE(std::filesystem::exists(options.checkpoints_dir / step_dir_name(ruined)));
      }
    }
  }

  TEST_CASE(
      "weights that are not finite become no checkpoint, the state before them does, and they are not gone on with") {
    const TempDir dir;
    const std::string run_id = fresh_run_id();
    const NodeOptions options = options_for(run_id, dir.path);
    const Plan plan = saving({2, 2, 1}, {.snapshot_steps = 1});
    run_and_kill(plan, options, {.steps = 20, .die_at = 9, .snapshots_at_death = 4});
    const std::vector<std::filesystem::path> memory = memory_of(run_id);
    REQUIRE(memory.size() == 1);
    {
      const Arena arena = Arena::attach(memory[0].string()).value();
      const std::vector<SlotView> views = arena.views();
      const int64_t slot = newest_whole(views).value();
      REQUIRE(views[slot].step == 9);
      // A value of the first weight, and its checksum as the update that ruined it would have left it.
      auto* const values = reinterpret_cast<float*>(arena.payload(0, slot).data() + arena.shards(0)[0].offset);
      const std::vector<uint64_t> sums = read_slot(arena, 0, slot, Check::kHeaders).value().sums;
      values[1] = std::numeric_limits<float>::quiet_NaN();
      const uint64_t sum = word_sums(reinterpret_cast<std::byte*>(values), arena.shards(0)[0].bytes / 4);
      std::vector<uint64_t> changed = sums;
      changed[0] = sum;
      const RankSnapshot head = read_slot(arena, 0, slot, Check::kHeaders).value();
      SnapshotWriter writer(arena, 0);
      writer.begin(slot, head.incarnation, head.step);
      REQUIRE(writer.publish(slot, head.incarnation, head.step, head.position, changed, 0).ok());
    }
    std::vector<std::string> notices;
    const Plan other = saving({1, 1, 3}, {.snapshot_steps = 1});  // writes what memory holds at its start
    auto opened = CheckpointNode::open(other, options, &notices);
    REQUIRE_OK(opened);
    CHECK_FALSE(std::filesystem::exists(options.checkpoints_dir / step_dir_name(9)));
    const RestoreChoice choice = opened.value()->begin_incarnation().value();
    CHECK(choice.step == 8);
    CHECK(std::ranges::any_of(notices,
                              [](const std::string& line) { return line.find("is ruined") != std::string::npos; }));
  }

  TEST_CASE("memory of another layout is written again where what the dead agent had written does not hold any more") {
    const TempDir dir;
    const std::string run_id = fresh_run_id();
    const NodeOptions options = options_for(run_id, dir.path);
    // Memory of a folder of its own: nobody misses what is saved, so any run that starts beside may remove it.
    const auto apart = [&dir](Plan plan) {
      plan.recipe.optimizer.offload = dir.path;
      return plan;
    };
    run_and_kill(apart(saving({2, 1, 1}, {.save = {{.steps = 3}}, .snapshot_steps = 1})), options, {.steps = 6});
    PosixBackend io;
    const auto newest = newest_complete(io, options.checkpoints_dir).value();
    REQUIRE(newest.step == 6);
    flip_last_shard(newest.dir);
    const Plan plan = apart(saving({1, 1, 1}, {}));
    std::vector<std::string> notices;
    auto opened = CheckpointNode::open(plan, options, &notices);
    REQUIRE_OK(opened);
    const auto choice = opened.value()->begin_incarnation();
    REQUIRE_OK(choice);
    CHECK(choice.value().step == 6);
    CHECK(choice.value().warnings.empty());
  }

  TEST_CASE("memory that the run has gone on without, at another machine, stands in for nothing that was saved there") {
    const Plan plan = saving({2, 1, 1}, {.snapshot_steps = 1});
    enum { kSame, kAnotherLayout, kDamaged };
    for (const int now : {kSame, kAnotherLayout, kDamaged}) {
      CAPTURE(now);
      const TempDir dir;
      const std::string run_id = fresh_run_id();
      const NodeOptions options = options_for(run_id, dir.path);
      std::filesystem::path elsewhere;
      const std::filesystem::path memory = leave_memory_behind(plan, options, elsewhere);
      std::filesystem::rename(elsewhere, memory);
      if (now == kDamaged) flip_last_shard(options.checkpoints_dir / step_dir_name(7));
      const Plan& next = now == kAnotherLayout ? saving({1, 1, 1}, {.snapshot_steps = 1}) : plan;
      std::vector<std::string> notices;
      auto opened = CheckpointNode::open(next, options, &notices);
      REQUIRE_OK(opened);
      const auto choice = opened.value()->begin_incarnation();
      REQUIRE_OK(choice);
      CHECK(choice.value().step == (now == kDamaged ? 9 : 7));
      CHECK(std::ranges::count_if(notices, [](const std::string& notice) {
              return notice.find("held step 9 of this run: the run has continued without it") != std::string::npos;
            }) == (now == kDamaged ? 0 : 1));
      CHECK_FALSE(std::filesystem::exists(options.checkpoints_dir / step_dir_name(9)));
    }
  }

  TEST_CASE("stale memory stands in for nothing that was saved, also where a stop or a failing disk comes between") {
    const Plan plan = saving({2, 1, 1}, {.snapshot_steps = 1});
    const TempDir dir;
    const std::string run_id = fresh_run_id();
    const NodeOptions options = options_for(run_id, dir.path);
    std::filesystem::path elsewhere;
    const std::filesystem::path memory = leave_memory_behind(plan, options, elsewhere);
    enum { kRefused, kOldLine, kNew, kUndisturbed };
    for (const bool fails : {false, true}) {
      int64_t refused = 0;
      for (int64_t n = 0;; ++n) {
        for (const std::filesystem::path& left : memory_of(run_id)) std::filesystem::remove(left);
        std::filesystem::copy(elsewhere, memory);
        const int got = in_child([&] {
          PosixBackend real;
          const auto make_io = [&]() -> std::unique_ptr<IoBackend> {
            if (!fails) return std::make_unique<PosixBackend>();
            return std::make_unique<FaultBackend>(real, FaultPlan::fail_call(n, EIO));
          };
          int64_t asked = 0;
          const auto stop = [&] { return !fails && asked++ >= n; };
          const auto opened = open_run_memory(plan, options.run, options.checkpoints_dir, make_io, nullptr, {}, stop);
          if (!opened.ok()) return int{kRefused};
          if (newest_whole(opened.value().views()).has_value()) return int{kOldLine};
          return int{asked > n ? kNew : kUndisturbed};
        });
        CAPTURE(n);
        CAPTURE(fails);
        REQUIRE(got >= kRefused);
        CHECK(got != kOldLine);
        if (got == kRefused) ++refused;
        if (n == 60 || (!fails && got == kUndisturbed)) break;
      }
      CHECK(refused > 0);
    }
    for (const std::filesystem::path& left : memory_of(run_id)) std::filesystem::remove(left);
    std::filesystem::remove(elsewhere);
  }

  TEST_CASE("an agent that starts again and again without a save keeps its memory") {
    const TempDir dir;
    const Plan plan = saving({1, 1, 1}, {.snapshot_steps = 1});
    const NodeOptions options = options_for(fresh_run_id(), dir.path);
    run_until(plan, options, 2);
    run_and_kill(plan, options, {.steps = 200, .die_at = 4, .snapshots_at_death = 1});
    for (int64_t k = 0; k < 2 * arena::kStartsKept; ++k) {
      REQUIRE(in_child([&] {
                std::vector<std::string> notices;
                auto node = CheckpointNode::open(plan, options, &notices);
                const bool kept = node.ok() && newest_whole(node.value()->arena().views()).has_value();
                if (kept) kill(getpid(), SIGKILL);
                return 1;
              }) == -1);
    }
    std::vector<std::string> notices;
    auto opened = CheckpointNode::open(plan, options, &notices);
    REQUIRE_OK(opened);
    CHECK(opened.value()->begin_incarnation().value().step == 4);
  }

  TEST_CASE("memory that goes on from what another machine saved is gone on with, however often agents die") {
    const TempDir dir;
    const Plan plan = saving({2, 1, 1}, {.snapshot_steps = 1});
    const std::string run_id = fresh_run_id();
    const NodeOptions options = options_for(run_id, dir.path);
    run_until(plan, options, 5);
    for (const int64_t step : {7, 8, 9})
      run_and_kill(plan, options, {.steps = 20, .die_at = step, .snapshots_at_death = 2});
    std::vector<std::string> notices;
    auto opened = CheckpointNode::open(plan, options, &notices);
    REQUIRE_OK(opened);
    CHECK(opened.value()->begin_incarnation().value().step == 9);
    PosixBackend io;
    const auto starts = [&] { return newest_complete(io, options.checkpoints_dir).value().starts; };
    CHECK(starts().size() == 1);
    LifeReport report;
    REQUIRE(live(plan, opened.value()->arena(), {.steps = 10}, nullptr, report).ok());
    CHECK(starts().size() == 2);  // those that saved nothing are forgotten
  }

  TEST_CASE("memory that cannot be written to disk is kept, and the error says where it is") {
    const TempDir dir;
    const std::string run_id = fresh_run_id();
    run_and_kill(saving({2, 1, 1}, {.snapshot_steps = 1}), options_for(run_id, dir.path),
                 {.steps = 20, .die_at = 3, .snapshots_at_death = 2});
    Plan plan = saving({1, 1, 2}, {});
    plan.recipe.checkpoint.space = SpaceCheck::kWarn;  // or it would end before it looks at the memory
    NodeOptions blocked = options_for(run_id, dir.path);
    std::filesystem::remove_all(blocked.checkpoints_dir);
    std::filesystem::create_symlink("/proc/self/fdinfo", blocked.checkpoints_dir);  // a folder nobody can write to
    std::vector<std::string> notices;
    const auto refused = CheckpointNode::open(plan, blocked, &notices);
    CHECK_FALSE(refused.ok());
    std::filesystem::remove(blocked.checkpoints_dir);
    int64_t kept = 0;  // under this process's name, until it ends
    for (const auto& item : std::filesystem::directory_iterator("/dev/shm")) {
      const std::string name = item.path().filename().string();
      const std::string mine = "-" + std::to_string(getpid()) + "-" + std::to_string(this_process().start);
      if (name.starts_with("cairn-") && name.ends_with(mine)) {
        auto arena = Arena::attach("/dev/shm/" + name);
        REQUIRE(arena.ok());
        CHECK(newest_whole(arena.value().views()).has_value());
        CHECK(arena.value().remove().ok());
        ++kept;
      }
    }
    CHECK(kept == 1);
  }

  TEST_CASE("where memory cannot be used and the folder is away, ranks are not begun anew") {
    const TempDir dir;
    const Plan plan = saving({2, 1, 1}, {.save = {{.steps = 1}}, .snapshot_steps = 1});
    const NodeOptions options = options_for(fresh_run_id(), dir.path);
    std::vector<std::string> notices;
    auto opened = CheckpointNode::open(plan, options, &notices);
    REQUIRE_OK(opened);
    CheckpointNode& node = *opened.value();
    REQUIRE(node.begin_incarnation().ok());
    LifeReport report;
    REQUIRE(live(plan, node.arena(), {.steps = 3}, nullptr, report).ok());
    for (int64_t slot = 0; slot < node.arena().slots(); ++slot)  // a wild write, and then a signal
      for (std::byte& byte : node.arena().payload(0, slot)) byte ^= std::byte{0x55};
    node.distrust_memory();
    std::filesystem::rename(options.checkpoints_dir, dir.path / "disk");
    REQUIRE(std::filesystem::create_directory(options.checkpoints_dir));
    const Result<RestoreChoice> refused = node.begin_incarnation();
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kIo);
    CHECK(refused.error().message.find("the folder is gone") != std::string::npos);
    std::filesystem::remove(options.checkpoints_dir);
    std::filesystem::rename(dir.path / "disk", options.checkpoints_dir);
    // And a save that could not end its replacement of a step: the server was away.
    const WriterId writer = this_writer();
    const std::filesystem::path step = options.checkpoints_dir / step_dir_name(3);
    std::filesystem::copy(step, options.checkpoints_dir / work_dir_name(kTrashPrefix, 3, writer));
    std::filesystem::rename(step, options.checkpoints_dir / work_dir_name(kTmpPrefix, 3, writer));
    const Result<RestoreChoice> back = node.begin_incarnation();
    REQUIRE_OK(back);
    CHECK(back.value().source == arena::Source::kDisk);
    CHECK(back.value().step == 3);
  }

  TEST_CASE("an older save that ends last, well or not, is no news of the newest step") {
    for (const bool fails : {false, true}) {
      CAPTURE(fails);
      const TempDir dir;
      const Plan plan = saving({2, 1, 1}, {.save = {{.steps = 1}}, .snapshot_steps = 1, .in_flight = 2});
      std::promise<void> let_pass;
      NodeOptions options = options_for(fresh_run_id(), dir.path);
      options.before_save = [passes = let_pass.get_future().share()](int64_t step, std::span<const std::string>) {
        if (step == 1) passes.wait();
      };
      std::vector<std::string> notices;
      auto opened = CheckpointNode::open(plan, options, &notices);
      REQUIRE_OK(opened);
      CheckpointNode& node = *opened.value();
      REQUIRE(node.begin_incarnation().ok());
      LifeReport report;
      REQUIRE(live(plan, node.arena(), {.steps = 2}, nullptr, report).ok());
      CHECK(report.finished[0].ok());  // which has waited for step 2
      while (node.take_events().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const std::vector<SlotView> views = node.arena().views();
      for (int64_t slot = 0; slot < node.arena().slots() && fails; ++slot) {
        if (views[slot].whole && views[slot].step == 1) node.arena().payload(0, slot)[100] ^= std::byte{1};
      }
      std::thread late([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        let_pass.set_value();
      });
      CHECK_FALSE(node.flush().has_value());
      late.join();
      const std::vector<PersistEvent> events = node.take_events();
      REQUIRE(events.size() == 1);
      CHECK(events[0].step == 1);
      CHECK(events[0].status.ok() == !fails);
      const std::string memory = node.arena().name();
      REQUIRE(std::filesystem::exists(memory));
      opened.value().reset();
      CHECK_FALSE(std::filesystem::exists(memory));
    }
  }

  TEST_CASE("the newest step in memory is saved while its ranks are on their way to the next boundary") {
    const TempDir dir;
    const Plan plan = saving({2, 1, 1}, {.snapshot_steps = 1});
    std::vector<std::string> notices;
    auto opened = CheckpointNode::open(plan, options_for(fresh_run_id(), dir.path), &notices);
    REQUIRE_OK(opened);
    CheckpointNode& node = *opened.value();
    REQUIRE(node.begin_incarnation().ok());
    CHECK_FALSE(node.promise_newest().has_value());  // there is none
    LifeReport report;
    REQUIRE(live(plan, node.arena(), {.steps = 9, .die_at = 3, .snapshots_at_death = 1}, nullptr, report).ok());
    REQUIRE(node.promise_newest() == 2);  // of step 3 one rank's part is missing
    CHECK_FALSE(node.promise_newest().has_value());
    std::vector<PersistEvent> events;
    while (events.empty()) events = node.take_events();
    CHECK(events[0].step == 2);
    CHECK(events[0].status.ok());
    CHECK_FALSE(node.promise_newest().has_value());
    PosixBackend io;
    CHECK(newest_complete(io, dir.path / "checkpoints").value().step == 2);
  }

  TEST_CASE("saves that are promised beside training, at any moment, are of one step each") {
    for (const int64_t in_flight : {1, 2}) {
      CAPTURE(in_flight);
      const TempDir dir;
      const Plan plan = saving({2, 1, 1}, {.snapshot_steps = 1, .in_flight = in_flight});
      std::vector<std::string> notices;
      auto opened = CheckpointNode::open(plan, options_for(fresh_run_id(), dir.path), &notices);
      REQUIRE_OK(opened);
      CheckpointNode& node = *opened.value();
      REQUIRE(node.begin_incarnation().ok());
      std::atomic<bool> done = false;
      std::set<int64_t> promised;
      std::thread agent([&] {
        while (!done) {
          if (const auto step = node.promise_newest()) promised.insert(*step);
        }
      });
      LifeReport report;
      const Status lived = live(plan, node.arena(), {.steps = 100}, nullptr, report);
      done = true;
      agent.join();
      REQUIRE_OK(lived);
      CHECK(report.finished[0].ok());
      CHECK_FALSE(node.flush().has_value());
      CHECK(promised.size() > 2);
      promised.insert(100);
      std::set<int64_t> saved;
      for (const PersistEvent& event : node.take_events()) {
        CHECK_MESSAGE(event.status.ok(), event.step);
        saved.insert(event.step);
      }
      CHECK(saved == promised);
      CHECK(node.arena().control().distrusted == 0);
      PosixBackend io;
      for (const int64_t step : promised)
        CHECK(verify_checkpoint(io, dir.path / "checkpoints" / step_dir_name(step)).value().whole());
    }
  }

  TEST_CASE("a load ends at any read where somebody asks for it, and the next start loads the same") {
    const TempDir dir;
    const Plan plan = saving({2, 1, 1}, {});
    std::vector<std::string> notices;
    {
      auto node = CheckpointNode::open(plan, options_for(fresh_run_id(), dir.path), &notices).value();
      REQUIRE(node->begin_incarnation().ok());
      LifeReport report;
      REQUIRE(live(plan, node->arena(), {.steps = 2}, nullptr, report).ok());
    }
    int64_t ended = 0, in_reads = 0;
    for (bool done = false; !done; ended += done ? 0 : 1) {
      CAPTURE(ended);
      NodeOptions options = options_for(fresh_run_id(), dir.path);
      options.stop = [left = std::make_shared<int64_t>(ended)] { return (*left)-- <= 0; };
      const auto opened = CheckpointNode::open(plan, options, &notices);
      if (!opened.ok()) {
        REQUIRE(opened.error().code == ErrorCode::kStopped);
        continue;
      }
      const Result<RestoreChoice> choice = opened.value()->begin_incarnation();
      done = choice.ok();
      if (done) {
        CHECK(choice.value().step == 2);
        continue;
      }
      CHECK(choice.error().message.find("asked to stop") != std::string::npos);
      in_reads += choice.error().message.find(".h5: asked to stop") != std::string::npos ? 1 : 0;
      CHECK_FALSE(newest_whole(opened.value()->arena().views()).has_value());
    }
    CHECK(ended > 5);
    CHECK(in_reads > 0);
    PosixBackend io;
    CHECK(list_names(io, dir.path / "checkpoints").value().steps == std::vector<int64_t>{2});
  }

  TEST_CASE("a start that is not waited for leaves the memory of a dead agent to the next one") {
    const TempDir dir;
    const std::string run_id = fresh_run_id();
    run_and_kill(saving({2, 1, 1}, {.snapshot_steps = 1}), options_for(run_id, dir.path),
                 {.steps = 20, .die_at = 3, .snapshots_at_death = 2});
    const Plan plan = saving({1, 1, 2}, {});  // another layout: the memory has to be written first
    CHECK(in_child([&] {
            NodeOptions options = options_for(run_id, dir.path);
            options.leave = [] { return true; };
            std::vector<std::string> unheard;
            const auto left = CheckpointNode::open(plan, options, &unheard);
            return !left.ok() && left.error().code == ErrorCode::kStopped ? 0 : 1;
          }) == 0);
    PosixBackend io;
    CHECK(list_names(io, dir.path / "checkpoints").value().steps.empty());
    CHECK(list_names(io, dir.path / "checkpoints").value().leftovers.empty());
    std::vector<std::string> notices;
    const auto opened = CheckpointNode::open(plan, options_for(run_id, dir.path), &notices);
    REQUIRE_OK(opened);
    CHECK(opened.value()->begin_incarnation().value().step == 3);
  }

  TEST_CASE("a folder with checkpoints is refused when a fresh start is asked for") {
    const TempDir dir;
    const Plan plan = saving({1, 1, 1}, {});
    std::vector<std::string> notices;
    {
      auto node = CheckpointNode::open(plan, options_for(fresh_run_id(), dir.path), &notices).value();
      REQUIRE(node->begin_incarnation().ok());
      LifeReport report;
      REQUIRE(live(plan, node->arena(), {.steps = 2}, nullptr, report).ok());
    }
    NodeOptions options = options_for(fresh_run_id(), dir.path);
    options.resume = false;
    const auto refused = CheckpointNode::open(plan, options, &notices);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message.find("already holds checkpoints up to step 2") != std::string::npos);
    options.resume = true;
    CHECK(CheckpointNode::open(plan, options, &notices).value()->begin_incarnation().value().step == 2);
  }

  TEST_CASE("a fresh start is refused while memory holds steps of the run, and they stay there") {
    const TempDir dir;
    const Plan plan = saving({2, 1, 1}, {.snapshot_steps = 1});
    NodeOptions options = options_for(fresh_run_id(), dir.path);
    run_and_kill(plan, options, {.steps = 20, .die_at = 3, .snapshots_at_death = 2});
    options.resume = false;
    std::vector<std::string> notices;
    CHECK(in_child([&] {
            const auto refused = CheckpointNode::open(plan, options, &notices);
            return !refused.ok() && refused.error().message.find("still holds step 3") != std::string::npos ? 0 : 1;
          }) == 0);
    const TempDir elsewhere;  // another run begins and ends meanwhile
    CHECK(in_child([&] {
            return CheckpointNode::open(plan, options_for(fresh_run_id(), elsewhere.path), &notices).ok() ? 0 : 1;
          }) == 0);
    options.resume = true;
    const auto opened = CheckpointNode::open(plan, options, &notices);
    REQUIRE(opened.ok());
    const RestoreChoice choice = opened.value()->begin_incarnation().value();
    CHECK(choice.source == arena::Source::kMemory);
    CHECK(choice.step == 3);
  }
}
