// A disk that loses power, fills up or fails at any call of a whole history: saves, a save that replaces one,
// retention, clearing away, resharding. And which sync it would miss.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <map>
#include <memory>

#include "ckpt/persist/save.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"
#include "ckpt/retention/spare_files.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

const fs::path kDir = "/run/checkpoints";
constexpr int64_t kKeep = 2;

// One shard of 42600 bytes, written from where it lies in several chunks, and a small one.
TestState state_at(int64_t step, uint64_t seed) {
  return make_state(step, seed, 1,
                    {{"a", "weight", DType::kF32, {150, 71}, 1}, {"b", "weight", DType::kBf16, {33}, 1}});
}

WriterId writer(int64_t sequence) { return {"test", 1, 1, sequence}; }

SaveOptions options(int64_t sequence) {
  SaveOptions options = small_options();
  options.chunk_bytes = 16 << 10;
  options.writer = writer(sequence);
  return options;
}

/// What a run does to its folder, one thing after the other, and what it may believe afterwards.
struct History {
  std::map<int64_t, std::vector<TestState>> states;  // by step: all that were ever to be saved under it
  std::map<int64_t, size_t> acknowledged;            // step -> which of these at least (a later one replaced it)
  int64_t keep = kKeep;
  std::shared_ptr<SpareFiles> spares;  // of the process that plays; null: it has none
  bool all_ok = true;
  std::string refused;  // an error that is none of a disk's
  int64_t reused = 0;   // spare files that saves have written over

  void note(const Status& status) {
    if (status.ok()) return;
    all_ok = false;
    const ErrorCode code = status.error().code;
    if (code != ErrorCode::kIo && code != ErrorCode::kNoSpace && code != ErrorCode::kStopped)
      refused = status.error().message;
  }

  void save_step(IoBackend& io, int64_t step, uint64_t seed, int64_t sequence) {
    std::vector<TestState>& of_step = states[step];
    of_step.push_back(state_at(step, seed));
    SaveOptions with = options(sequence);
    with.spares = spares.get();
    const Result<SaveReport> saved = save(io, kDir, of_step.back(), with);
    if (saved.ok()) {
      reused += saved.value().reused_files;
      acknowledged[step] = of_step.size() - 1;
    } else {
      note(Status(saved.error()));
    }
  }

  void retain(IoBackend& io, int64_t sequence) {
    const Result<RetentionReport> kept = apply_retention(io, kDir, {keep, {}}, writer(sequence), nullptr, spares.get());
    if (!kept.ok()) {
      note(Status(kept.error()));
    } else if (!kept.value().problems.empty()) {
      all_ok = false;
    }
  }

  void clean(IoBackend& io) {
    const Result<CleanReport> cleaned = clean_leftovers(io, kDir, [](const WriterId&) { return false; });
    if (!cleaned.ok()) note(Status(cleaned.error()));
  }
};

/// The bytes of the file of a save that nobody disturbed.
const std::vector<std::byte>& file_of(const TestState& state) {
  static std::map<std::pair<int64_t, std::vector<std::byte>>, std::vector<std::byte>> files;
  std::vector<std::byte>& bytes = files[{state.skeleton.step, state.tensors[0]}];
  if (bytes.empty()) {
    MemoryBackend disk;
    const SaveReport saved = save(disk, kDir, state, options(0)).value();
    bytes = disk.bytes_of(saved.dir / state.parts[0].file_name);
  }
  return bytes;
}

/// A file that opens as HDF5 has a superblock, which is written when all behind the first page is durable.
std::string opens_too_early(MemoryBackend& disk, const History& history, const Catalog& catalog) {
  for (const std::string& name : catalog.leftovers) {
    const std::optional<WorkDir> work = parse_work_dir_name(name);
    if (!work) continue;
    for (const DirEntry& entry : disk.list(kDir / name).value()) {
      const std::vector<std::byte>& bytes = disk.bytes_of(kDir / name / entry.name);
      if (!entry.name.ends_with(".h5") || bytes.size() < 4096 || bytes[0] != std::byte{0x89}) continue;
      // A spare file that a save has taken may have its old name too, since names are durable one by one.
      const bool spare = name.starts_with(kSparePrefix);
      bool right = false;
      for (const auto& [step, states] : history.states) {
        if (!spare && step != work->step) continue;
        for (const TestState& state : states) {
          const std::vector<std::byte>& whole = file_of(state);
          right |= bytes.size() >= whole.size() && std::equal(whole.begin() + 4096, whole.end(), bytes.begin() + 4096);
        }
      }
      if (!right) return fmt::format("{}/{} opens as HDF5, and its bytes are not all there", name, entry.name);
    }
  }
  return {};
}

/// Empty, or which promise is broken. `cut_off`: counts steps that have no name for the moment, and are told so; else
/// that is a broken promise.
std::string broken_promise(MemoryBackend& io, const History& history, int64_t* cut_off = nullptr) {
  if (!history.refused.empty()) return history.refused;
  const Result<Catalog> catalog = list_checkpoints(io, kDir);
  if (!catalog.ok()) return history.acknowledged.empty() ? "" : catalog.error().message;
  if (std::string early = opens_too_early(io, history, catalog.value()); !early.empty()) return early;
  std::map<int64_t, size_t> found;
  for (const CheckpointInfo& info : catalog.value().checkpoints) {
    if (cut_off != nullptr && info.unread && info.os_errno == EAGAIN) {
      ++*cut_off;
      const Result<CheckpointInfo> newest = newest_complete(io, kDir);
      const bool taken = newest.ok() && newest.value().step < info.step;
      if (taken) return fmt::format("step {} is passed over, {} is taken", info.step, newest.value().step);
      found[info.step] = history.states.at(info.step).size();
      continue;
    }
    if (!info.complete) return fmt::format("step {} has its name and is not whole: {}", info.step, info.problem);
    const auto states = history.states.find(info.step);
    if (states == history.states.end()) return fmt::format("step {} was never saved", info.step);
    std::string problem;
    size_t which = states->second.size();
    while (which-- > 0) {
      problem = compare(io, info.dir, states->second[which]);
      if (problem.empty()) break;
    }
    if (!problem.empty()) return fmt::format("step {} holds what was never saved: {}", info.step, problem);
    found[info.step] = which;
  }
  // The newest that were acknowledged may not be missing, nor be older than the one that replaced them. (A save that
  // only failed to sync its name is there too, and counts for retention, which syncs the names before it removes.)
  int64_t checked = 0;
  for (auto it = history.acknowledged.rbegin(); it != history.acknowledged.rend() && checked < history.keep;
       ++it, ++checked) {
    const auto there = found.find(it->first);
    if (std::distance(found.upper_bound(it->first), found.end()) >= history.keep) continue;
    if (there == found.end()) return fmt::format("step {} was acknowledged and is gone", it->first);
    if (there->second < it->second) return fmt::format("step {} was replaced, and the old one is back", it->first);
  }
  return {};
}

using Play = std::function<void(IoBackend& io, History& history)>;

/// 10, 20, 30 with retention behind each; 30 anew; a leftover cleared away; 40.
void long_play(IoBackend& io, History& history) {
  int64_t sequence = 0;
  for (const int64_t step : {10, 20, 30}) {
    history.save_step(io, step, static_cast<uint64_t>(step), sequence++);
    history.retain(io, sequence++);
  }
  history.save_step(io, 30, 31, sequence++);
  history.clean(io);
  history.save_step(io, 40, 40, sequence++);
  history.retain(io, sequence++);
}

/// The same where saves write over what retention has removed.
void spare_play(IoBackend& io, History& history) {
  history.spares = std::make_shared<SpareFiles>();
  history.spares->limit(1 << 20);
  long_play(io, history);
  history.spares = nullptr;  // it ends with its process
}

struct Cuts {
  int64_t calls = 0, cuts = 0, broken = 0;
  std::string first;
};

/// Stops `play` at each of its calls, with `seeds` power losses each. `before` has happened and is durable.
Cuts cut_everywhere(const MemoryBackend& start, const History& before, const Play& play, uint64_t seeds,
                    const FaultPlan& skip = {}) {
  Cuts cuts;
  bool fired = true;
  for (int64_t n = 0; fired; ++n) {
    const auto disk = start.clone();
    FaultBackend skipping(*disk, skip);
    FaultBackend io(skipping, FaultPlan::stop_at_call(n, static_cast<uint64_t>(n)));
    History history = before;
    play(io, history);
    fired = io.fired();
    if (!fired) cuts.calls = n;
    for (uint64_t seed = 0; seed < seeds; ++seed) {
      const auto after = disk->clone();
      after->power_cycle(seed < 2 ? seed : seed + static_cast<uint64_t>(n) * 1000);
      ++cuts.cuts;
      std::string problem = broken_promise(*after, history);
      if (problem.empty() && seed < 2) {  // and the next start goes on: clear away, save, retain
        History next = history;
        next.refused.clear();
        next.clean(*after);
        next.save_step(*after, 50, 50, 100);
        next.retain(*after, 101);
        if (next.acknowledged.count(50) == 0) problem = "the next save failed";
        if (problem.empty()) problem = broken_promise(*after, next);
        if (problem.empty() && !list_checkpoints(*after, kDir).value().leftovers.empty()) problem = "leftovers stay";
      }
      if (problem.empty()) continue;
      if (cuts.broken++ == 0) cuts.first = fmt::format("call {}, seed {}: {}", n, seed, problem);
    }
  }
  return cuts;
}

}  // namespace

TEST_SUITE("crash/power") {
  TEST_CASE("power lost at any call of a history of saves, replacing and retention loses nothing acknowledged") {
    const MemoryBackend empty;
    const Cuts cuts = cut_everywhere(empty, {}, long_play, 12);
    MESSAGE(cuts.calls << " calls, " << cuts.cuts << " power cuts, " << cuts.broken << " broken promises");
    CHECK_MESSAGE(cuts.broken == 0, cuts.first);
    CHECK(cuts.cuts >= 1000);
  }

  TEST_CASE("power lost at any call loses nothing acknowledged where saves write over files of removed checkpoints") {
    const MemoryBackend empty;
    const auto whole = empty.clone();
    History undisturbed;
    spare_play(*whole, undisturbed);
    CHECK(undisturbed.reused == 1);  // 10's file by the new 30
    const Cuts cuts = cut_everywhere(empty, {}, spare_play, 12);
    MESSAGE(cuts.calls << " calls, " << cuts.cuts << " power cuts, " << cuts.broken << " broken promises");
    CHECK_MESSAGE(cuts.broken == 0, cuts.first);
  }

  TEST_CASE("power lost or a kill at any call loses nothing acknowledged where two names cannot be exchanged") {
    const FaultPlan no_exchange{FaultPlan::Action::kFail, 0, true, EINVAL, IoOp::kExchange, 0};
    int64_t cut_off = 0, cuts = 0;
    bool fired = true;
    for (int64_t n = 0; fired; ++n) {
      const MemoryBackend empty;
      const auto disk = empty.clone();
      FaultBackend plain(*disk, no_exchange);
      FaultBackend io(plain, FaultPlan::stop_at_call(n, static_cast<uint64_t>(n)));
      History history;
      long_play(io, history);
      fired = io.fired();
      for (uint64_t seed = 0; seed < 12; ++seed) {
        CAPTURE(n);
        CAPTURE(seed);
        const auto after = disk->clone();
        after->power_cycle(seed < 2 ? seed : seed + static_cast<uint64_t>(n) * 1000);
        ++cuts;
        REQUIRE(broken_promise(*after, history, &cut_off) == "");
        const auto saving = after->clone();  // a run that goes on ends it as well, and readers are told meanwhile
        history.retain(*saving, 100);
        REQUIRE(broken_promise(*saving, history) == "");
        FaultBackend start(*after, no_exchange);
        history.clean(start);
        REQUIRE(broken_promise(*after, history) == "");
        History next = history;
        next.save_step(start, 50, 50, 101);
        REQUIRE(next.acknowledged.count(50) == 1);
        REQUIRE(broken_promise(*after, next) == "");
        REQUIRE(list_checkpoints(*after, kDir).value().leftovers.empty());
      }
    }
    MESSAGE(cuts << " power cuts, " << cut_off << " between the two renames");
    CHECK(cut_off > 0);
  }

  TEST_CASE("ENOSPC, EIO and short writes at any call of the history: once, or from then on") {
    int64_t faults = 0, failed = 0;
    using Plan = FaultPlan (*)(int64_t, int);
    const auto sweep = [&](Plan plan, int os_errno, const Play& play) {
      bool fired = true;
      for (int64_t n = 0; fired; ++n) {
        CAPTURE(n);
        CAPTURE(os_errno);
        MemoryBackend disk;
        FaultBackend io(disk, plan(n, os_errno));
        History history;
        play(io, history);
        fired = io.fired();
        ++faults;
        failed += !history.all_ok;
        REQUIRE(broken_promise(disk, history) == "");
        // The disk works again: the next start clears away, saves and retains.
        history.clean(disk);
        history.save_step(disk, 50, 50, 100);
        REQUIRE(history.acknowledged.count(50) == 1);
        REQUIRE(broken_promise(disk, history) == "");
        // And what a failed call left behind is as durable as what was acknowledged.
        disk.power_cycle(static_cast<uint64_t>(n));
        REQUIRE(broken_promise(disk, history) == "");
      }
    };
    for (const Plan plan : {Plan(FaultPlan::fail_call), Plan(FaultPlan::fail_from), Plan(FaultPlan::short_write)}) {
      for (const int os_errno : {ENOSPC, EIO}) {
        sweep(plan, os_errno, long_play);
        sweep(plan, os_errno, spare_play);
      }
    }
    MESSAGE(faults << " faults, " << failed << " histories with an error in them");
    CHECK(failed > 500);
  }

  TEST_CASE("a disk too small for the history: some saves fail, none that was acknowledged is lost") {
    int64_t some = 0;
    // A save asks for its payload and 1 MiB a file, beforehand; less than that is refused without writing.
    for (int64_t capacity = 1 << 20; capacity < (5 << 19); capacity += 12 << 10) {
      CAPTURE(capacity);
      MemoryBackend disk(capacity);
      History history;
      long_play(disk, history);
      REQUIRE(broken_promise(disk, history) == "");
      some += !history.all_ok && !history.acknowledged.empty();
      disk.power_cycle(static_cast<uint64_t>(capacity >> 12));
      REQUIRE(broken_promise(disk, history) == "");
    }
    MESSAGE(some << " disks held a part of the history");
    CHECK(some > 0);
  }

  TEST_CASE("the sweep bites: with a sync taken out it goes red, one by one") {
    // What is durable before: 10 and 20.
    MemoryBackend start;
    History before;
    before.save_step(start, 10, 10, 90);
    before.save_step(start, 20, 20, 91);
    start.power_cycle(0);
    REQUIRE(broken_promise(start, before) == "");
    MemoryBackend single;
    History one;
    one.keep = 1;
    one.save_step(single, 20, 20, 91);
    single.power_cycle(0);
    struct Part {
      const char* name;
      const MemoryBackend& start;
      const History& before;
      Play play;
    };
    const Part parts[] = {
        {"a save", start, before, [](IoBackend& io, History& h) { h.save_step(io, 30, 30, 0); }},
        {"a save that replaces", start, before, [](IoBackend& io, History& h) { h.save_step(io, 20, 21, 0); }},
        {"retention", start, before,
         [](IoBackend& io, History& h) {
           h.keep = 1;
           h.retain(io, 0);
         }},
        {"a save over a removed one's file", start, before,
         [](IoBackend& io, History& h) {
           h.keep = 1;
           h.spares = std::make_shared<SpareFiles>();
           h.spares->limit(1 << 20);
           h.retain(io, 0);
           h.save_step(io, 30, 30, 1);
           h.spares = nullptr;
         }},
        {"retention after a save whose last sync failed", single, one,
         [](IoBackend& io, History& h) {
           FaultBackend last(io, {FaultPlan::Action::kFail, 1, true, EIO, IoOp::kSyncDir, 0});
           h.save_step(last, 30, 30, 0);
           h.retain(io, 1);
         }},
        {"clearing away after a save whose last sync failed", start, before,
         [](IoBackend& io, History& h) {
           FaultBackend last(io, {FaultPlan::Action::kFail, 1, true, EIO, IoOp::kSyncDir, 0});
           h.save_step(last, 20, 21, 0);
           h.clean(io);
         }},
    };
    int64_t red = 0;
    std::string table, pale;
    // Red somewhere is asked of each sync of the code; the same one may be without need elsewhere: the sync that begins
    // a retention matters when the one that should have ended the save before has failed.
    const std::string_view second_line =
        "retention: directory sync 1\n"
        "a save over a removed one's file: directory sync 1\n";
    for (const Part& part : parts) {
      for (const IoOp op : {IoOp::kSync, IoOp::kSyncDir}) {
        for (int64_t call = 0;; ++call) {
          const FaultPlan skip{FaultPlan::Action::kSkip, call, false, EIO, op, 0};
          const auto disk = part.start.clone();
          FaultBackend probe(*disk, skip);
          History history = part.before;
          part.play(probe, history);
          if (!probe.fired()) break;  // it has no more of them
          const Cuts cuts = cut_everywhere(part.start, part.before, part.play, 24, skip);
          const char* const what = op == IoOp::kSync ? "fsync" : "directory sync";
          table += fmt::format("\n{}: without {} {}: {} of {} power cuts break a promise", part.name, what, call + 1,
                               cuts.broken, cuts.cuts);
          red += cuts.broken > 0;
          if (cuts.broken == 0) pale += fmt::format("{}: {} {}\n", part.name, what, call + 1);
        }
      }
      // Untouched it is green.
      const Cuts whole = cut_everywhere(part.start, part.before, part.play, 24);
      CHECK_MESSAGE(whole.broken == 0, part.name << ": " << whole.first);
    }
    MESSAGE(table);
    CHECK(red >= 8);
    CHECK(pale == second_line);
  }
}
