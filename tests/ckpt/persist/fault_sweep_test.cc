// A save that is killed, or that meets a failing disk, at any of its I/O calls leaves the old checkpoint or the new
// one.
#include <doctest/doctest.h>

#include <cerrno>

#include <fmt/format.h>

#include "ckpt/persist/save.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"
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

// Shards of 42600 bytes, which are written from where they lie in several chunks, and a small one.
std::vector<TensorSpec> tiny_specs() {
  return {{"a", "weight", DType::kF32, {300, 71}, 2}, {"b", "weight", DType::kBf16, {33}, 1}};
}

SaveOptions chunked() {
  SaveOptions options = small_options();
  options.chunk_bytes = 16 << 10;
  return options;
}

struct Sweep {
  int64_t calls = 0;   // I/O calls that a save makes
  int64_t broken = 0;  // outcomes that were neither the old nor the new checkpoint, whole
  int64_t kept_old = 0, got_new = 0;
  std::string first_broken;
};

// Saves `fresh` over a disk that holds `old`, stopping at each call in turn, with 16 power losses each. `skip`
// leaves out calls that a save must make: the sweep must notice.
Sweep sweep_stops(const TestState& old_state, const TestState& fresh, const FaultPlan& skip = {}) {
  MemoryBackend start;
  REQUIRE(save(start, kDir, old_state).ok());
  Sweep sweep;
  bool fired = true;
  for (int64_t n = 0; fired; ++n) {
    const auto disk = start.clone();
    FaultBackend skipping(*disk, skip);
    FaultBackend io(skipping, FaultPlan::stop_at_call(n, static_cast<uint64_t>(n)));
    const Result<SaveReport> saved = save(io, kDir, fresh, chunked());
    fired = io.fired();
    if (!fired) sweep.calls = n;
    for (uint64_t seed = 0; seed < 16; ++seed) {
      const auto after = disk->clone();
      after->power_cycle(seed);
      const Result<CheckpointInfo> found = newest_complete(*after, kDir);
      std::string problem;
      if (!found.ok()) {
        problem = found.error().message;
      } else {
        const std::string is_new = compare(*after, found.value().dir, fresh);
        if (is_new.empty()) {
          ++sweep.got_new;
        } else if (saved.ok()) {
          problem = "reported as saved, but: " + is_new;
        } else {
          problem = compare(*after, found.value().dir, old_state);
          if (problem.empty()) ++sweep.kept_old;
        }
      }
      if (problem.empty()) continue;
      if (sweep.broken++ == 0) sweep.first_broken = fmt::format("call {}, seed {}: {}", n, seed, problem);
    }
  }
  return sweep;
}

}  // namespace

TEST_SUITE("ckpt/persist/fault_sweep") {
  TEST_CASE("a save cut off at any I/O call leaves the old checkpoint or the new one") {
    const Sweep sweep = sweep_stops(make_state(10, 1, 2, tiny_specs()), make_state(20, 2, 2, tiny_specs()));
    MESSAGE(sweep.calls << " calls, " << sweep.kept_old << " times the old one, " << sweep.got_new << " the new one");
    CHECK_MESSAGE(sweep.broken == 0, sweep.first_broken);
    CHECK(sweep.calls > 20);
    CHECK(sweep.kept_old > 100);
    CHECK(sweep.got_new >= 16);
  }

  TEST_CASE("a save cut off while it replaces a step of its number leaves one of the two") {
    const Sweep sweep = sweep_stops(make_state(10, 1, 2, tiny_specs()), make_state(10, 2, 2, tiny_specs()));
    CHECK_MESSAGE(sweep.broken == 0, sweep.first_broken);
    CHECK(sweep.kept_old > 100);
    CHECK(sweep.got_new >= 16);
  }

  TEST_CASE("the sweep bites: it goes red when a kind of sync is left out") {
    const TestState old_state = make_state(10, 1, 1, tiny_specs()), fresh = make_state(20, 2, 1, tiny_specs());
    const auto broken_without = [&](IoOp op, int64_t call) {
      return sweep_stops(old_state, fresh, {FaultPlan::Action::kSkip, call, call < 0, EIO, op, 0}).broken > 0;
    };
    CHECK(broken_without(IoOp::kSync, -1));
    CHECK(broken_without(IoOp::kSyncDir, -1));
    // One by one: the file's last fsync, the manifest's, the new directory's, its parent's. (The fsync before the
    // superblock keeps a file from opening too early; the commit does not hang on it.)
    CHECK_FALSE(broken_without(IoOp::kSync, 0));
    CHECK(broken_without(IoOp::kSync, 1));
    CHECK(broken_without(IoOp::kSync, 2));
    CHECK(broken_without(IoOp::kSyncDir, 0));
    CHECK(broken_without(IoOp::kSyncDir, 1));
  }

  TEST_CASE("a disk that fails at any call: the error is told, the old checkpoint lives, nothing is left behind") {
    const TestState old_state = make_state(10, 1, 2, tiny_specs()), fresh = make_state(20, 2, 2, tiny_specs());
    MemoryBackend start;
    REQUIRE(save(start, kDir, old_state).ok());
    using Plan = FaultPlan (*)(int64_t, int);
    for (const Plan plan : {Plan(FaultPlan::fail_call), Plan(FaultPlan::fail_from), Plan(FaultPlan::short_write)}) {
      for (const int os_errno : {ENOSPC, EIO}) {
        bool fired = true;
        int64_t failures = 0;
        for (int64_t n = 0; fired; ++n) {
          CAPTURE(n);
          CAPTURE(os_errno);
          const auto disk = start.clone();
          FaultBackend io(*disk, plan(n, os_errno));
          const Result<SaveReport> saved = save(io, kDir, fresh);
          fired = io.fired();
          const Result<CheckpointInfo> found = newest_complete(*disk, kDir);
          REQUIRE(found.ok());
          if (saved.ok()) {
            REQUIRE(compare(*disk, found.value().dir, fresh) == "");
          } else {
            ++failures;
            REQUIRE((saved.error().code == ErrorCode::kNoSpace || saved.error().code == ErrorCode::kIo));
            const TestState& expected = found.value().step == 20 ? fresh : old_state;
            REQUIRE(compare(*disk, found.value().dir, expected) == "");
            if (plan == Plan(FaultPlan::fail_call) && found.value().step == 10)
              REQUIRE(list_checkpoints(*disk, kDir).value().leftovers.empty());
          }
          // And the next save, on a disk that works again, succeeds.
          REQUIRE(save(*disk, kDir, fresh,
                       [] {
                         SaveOptions options = small_options();
                         options.writer->sequence = 2;
                         return options;
                       }())
                      .ok());
          REQUIRE(compare(*disk, kDir / "step-00000020", fresh) == "");
        }
        CHECK(failures > 20);
      }
    }
  }

  TEST_CASE("a bit flipped on its way to the disk, in any write, is found by verify") {
    const TestState state = make_state(20, 2, 2, tiny_specs());
    bool fired = true;
    int64_t writes = 0;
    for (int64_t n = 0; fired; ++n) {
      for (uint64_t seed = 0; seed < 4; ++seed) {
        MemoryBackend disk;
        FaultBackend io(disk, {FaultPlan::Action::kFlipBit, n, false, EIO, IoOp::kWrite, seed});
        REQUIRE(save(io, kDir, state).ok());
        fired = io.fired();
        if (!fired) break;
        const Result<VerifyReport> report = verify_checkpoint(disk, kDir / "step-00000020");
        REQUIRE(report.ok());
        CAPTURE(n);
        // The first page is written whole, but the file may end inside the last page written: bits behind it are gone.
        if (report.value().whole()) CHECK(compare(disk, kDir / "step-00000020", state) == "");
        writes += !report.value().whole();
      }
    }
    CHECK(writes > 10);
  }

  TEST_CASE("a read that fails or lies while loading is an error, at every call") {
    const TestState state = make_state(20, 2, 2, tiny_specs());
    MemoryBackend disk;
    REQUIRE(save(disk, kDir, state).ok());
    for (const FaultPlan::Action action : {FaultPlan::Action::kFail, FaultPlan::Action::kFlipBit}) {
      bool fired = true;
      for (int64_t n = 0; fired; ++n) {
        FaultPlan plan{action, n, false, EIO, std::nullopt, static_cast<uint64_t>(n)};
        if (action == FaultPlan::Action::kFlipBit) plan.only = IoOp::kRead;
        FaultBackend io(disk, plan);
        const std::string result = compare(io, kDir / "step-00000020", state);
        fired = io.fired();
        CAPTURE(n);
        // A bit may flip in a page's bytes around the wanted ones; then all that was asked for is right.
        if (action == FaultPlan::Action::kFail && fired) REQUIRE(result != "");
        REQUIRE(result.find("differs") == std::string::npos);
      }
    }
  }
}
