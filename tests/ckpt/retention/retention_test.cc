#include "ckpt/retention/retention.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ckpt/retention/catalog.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "tests/ckpt/persist/test_state.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

const fs::path kDir = "/ck";
const WriterId kWriter{"test", 1, 1, 9};

std::vector<TensorSpec> one_tensor() { return {{"a", "weight", DType::kF32, {30}, 1}}; }

void add_step(IoBackend& io, int64_t step) {
  REQUIRE(save(io, kDir, make_state(step, static_cast<uint64_t>(step), 1, one_tensor())).ok());
}

std::vector<int64_t> complete_steps(IoBackend& io) {
  std::vector<int64_t> steps;
  const Catalog catalog = list_checkpoints(io, kDir).value();
  for (const CheckpointInfo& info : catalog.checkpoints) {
    if (info.complete) steps.push_back(info.step);
  }
  return steps;
}

void damage(MemoryBackend& disk, int64_t step) {
  disk.bytes_of(kDir / step_dir_name(step) / "manifest.json")[200] ^= std::byte{1};
}

}  // namespace

TEST_SUITE("ckpt/retention/catalog") {
  TEST_CASE("an empty or missing folder is an empty catalog") {
    MemoryBackend disk;
    CHECK(list_checkpoints(disk, kDir).value().checkpoints.empty());
    CHECK(newest_complete(disk, kDir).error().code == ErrorCode::kInvalidInput);
  }

  TEST_CASE("complete, damaged, unfinished and foreign entries are told apart") {
    MemoryBackend disk;
    for (const int64_t step : {10, 20, 30, 40}) add_step(disk, step);
    damage(disk, 40);
    disk.bytes_of(kDir / "step-00000030" / shard_file_name(0, 1)).pop_back();
    REQUIRE(disk.make_dir(kDir / ".tmp-step-00000050.h.1.2.3").ok());
    REQUIRE(disk.make_dir(kDir / ".trash-step-00000005.h.1.2.3").ok());
    REQUIRE(disk.make_dir(kDir / "step-60").ok());
    REQUIRE(write_file(disk, kDir / "step-00000070", "a file").ok());
    const Catalog catalog = list_checkpoints(disk, kDir).value();
    REQUIRE(catalog.checkpoints.size() == 4);
    CHECK(complete_steps(disk) == std::vector<int64_t>{10, 20});
    CHECK(catalog.checkpoints[2].problem.find("the manifest has") != std::string::npos);
    CHECK(catalog.checkpoints[3].problem.find("manifest.json") != std::string::npos);
    CHECK(catalog.checkpoints[1].created_unix_ms == 1'700'000'000'020);
    CHECK(catalog.checkpoints[1].size_bytes > 1000);
    CHECK(catalog.leftovers.size() == 2);
    CHECK(catalog.unknown == std::vector<std::string>{"step-00000070", "step-60"});
    CHECK(newest_complete(disk, kDir).value().step == 20);
    damage(disk, 10);
    damage(disk, 20);
    const std::string message = newest_complete(disk, kDir).error().message;
    for (const char* step : {"step 10", "step 20", "step 30", "step 40"})
      CHECK_MESSAGE(message.find(step) != std::string::npos, message);
  }

  TEST_CASE("a directory under another step's name is not complete") {
    MemoryBackend disk;
    add_step(disk, 10);
    REQUIRE(disk.rename(kDir / "step-00000010", kDir / "step-00000011").ok());
    CHECK(complete_steps(disk).empty());
  }
}

TEST_SUITE("ckpt/retention/retention") {
  TEST_CASE("the last n complete ones stay, whatever is damaged, and steps that are asked for") {
    MemoryBackend disk;
    for (int64_t step = 10; step <= 70; step += 10) add_step(disk, step);
    damage(disk, 20);  // older than all that stay: goes
    damage(disk, 50);  // in between: stays, it does not count
    damage(disk, 70);  // newest of all, damaged: stays, is never the one that counts
    const RetentionReport report = apply_retention(disk, kDir, {2, {10}}, kWriter).value();
    CHECK(report.problems.empty());
    CHECK(report.removed == std::vector<int64_t>{20, 30});
    CHECK(complete_steps(disk) == std::vector<int64_t>{10, 40, 60});
    CHECK(list_checkpoints(disk, kDir).value().checkpoints.size() == 5);
    CHECK(apply_retention(disk, kDir, {0, {}}, kWriter).error().code == ErrorCode::kInvalidInput);
    CHECK(apply_retention(disk, kDir, {1, {}}, kWriter).value().removed == std::vector<int64_t>{10, 40, 50});
    CHECK(complete_steps(disk) == std::vector<int64_t>{60});
    damage(disk, 60);
    CHECK(apply_retention(disk, kDir, {1, {}}, kWriter).value().removed.empty());
  }

  TEST_CASE("a removal killed at any call, then power loss: the kept ones are whole, the others whole or not there") {
    MemoryBackend start;
    for (int64_t step = 10; step <= 40; step += 10) add_step(start, step);
    bool fired = true;
    int64_t calls = 0;
    for (int64_t n = 0; fired; ++n) {
      const auto disk = start.clone();
      FaultBackend io(*disk, FaultPlan::stop_at_call(n));
      const Result<RetentionReport> report = apply_retention(io, kDir, {2, {}}, kWriter);
      fired = io.fired();
      calls = n;
      for (uint64_t seed = 0; seed < 16; ++seed) {
        const auto after = disk->clone();
        after->power_cycle(seed);
        CAPTURE(n);
        CAPTURE(seed);
        const Catalog catalog = list_checkpoints(*after, kDir).value();
        int64_t kept = 0;
        for (const CheckpointInfo& info : catalog.checkpoints) {
          REQUIRE_MESSAGE(info.complete, info.problem);
          REQUIRE(compare(*after, info.dir, make_state(info.step, static_cast<uint64_t>(info.step), 1, one_tensor())) ==
                  "");
          kept += info.step >= 30;
        }
        REQUIRE(kept == 2);
        // What is left is cleaned at the next start.
        const CleanReport cleaned = clean_leftovers(*after, kDir, [](const WriterId&) { return false; }).value();
        REQUIRE(cleaned.left.empty());
        REQUIRE(list_checkpoints(*after, kDir).value().leftovers.empty());
      }
    }
    CHECK(calls > 10);
  }

  TEST_CASE("a newer checkpoint whose name is not durable yet does not cost the older one") {
    // The save's last fsync failed, so a power loss may take the new name back; retention must not have removed the
    // old.
    MemoryBackend start;
    add_step(start, 10);
    FaultPlan plan = FaultPlan::fail_call(1, 5);
    plan.only = IoOp::kSyncDir;  // 0 is the new directory's, 1 its parent's
    FaultBackend io(start, plan);
    const Result<SaveReport> saved = save(io, kDir, make_state(20, 20, 1, one_tensor()));
    REQUIRE_FALSE(saved.ok());
    CHECK(saved.error().message.find("visible") != std::string::npos);
    CHECK(complete_steps(start) == std::vector<int64_t>{10, 20});
    bool fired = true;
    for (int64_t n = 0; fired; ++n) {
      const auto disk = start.clone();
      FaultBackend stopping(*disk, FaultPlan::stop_at_call(n));
      const auto report = apply_retention(stopping, kDir, {1, {}}, kWriter);
      fired = stopping.fired();
      for (uint64_t seed = 0; seed < 16; ++seed) {
        const auto after = disk->clone();
        after->power_cycle(seed);
        REQUIRE_FALSE(complete_steps(*after).empty());
      }
    }
  }

  TEST_CASE("leftovers go only when their writer is gone") {
    MemoryBackend disk;
    add_step(disk, 10);
    const WriterId me = this_writer();
    const pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    ::waitpid(child, nullptr, 0);
    WriterId dead = me, reused = me, elsewhere = me;
    dead.pid = child;
    reused.start += 1;
    elsewhere.host = "another-host";
    for (const WriterId& writer : {me, dead, reused, elsewhere}) {
      const fs::path dir = kDir / work_dir_name(kTmpPrefix, 20, writer);
      REQUIRE(disk.make_dir(dir).ok());
      REQUIRE(write_file(disk, dir / "half.h5", "x").ok());
    }
    REQUIRE(disk.make_dir(kDir / ".tmp-something").ok());
    const CleanReport report = clean_leftovers(disk, kDir).value();
    CHECK(report.removed.size() == 2);
    CHECK(report.left.size() == 3);
    CHECK(disk.stat(kDir / work_dir_name(kTmpPrefix, 20, me)).ok());
    CHECK(disk.stat(kDir / work_dir_name(kTmpPrefix, 20, elsewhere)).ok());
    CHECK_FALSE(disk.stat(kDir / work_dir_name(kTmpPrefix, 20, dead)).ok());
    CHECK_FALSE(disk.stat(kDir / work_dir_name(kTmpPrefix, 20, reused)).ok());
    CHECK(complete_steps(disk) == std::vector<int64_t>{10});
  }
}
