// A step that several processes write, each its own ranks' files, and one commits.
#include "ckpt/persist/commit.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ckpt/persist/layout.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

const fs::path kDir = "/ck";
const WriterId kLeader{"leader", 1, 1, 1};

std::map<std::string, std::string> files_of(IoBackend& io, const fs::path& dir) {
  std::map<std::string, std::string> out;
  const std::vector<DirEntry> entries = io.list(dir).value();
  for (const DirEntry& entry : entries) out[entry.name] = read_file(io, dir / entry.name, int64_t{1} << 30).value();
  return out;
}

fs::path work_of(const fs::path& dir, const TestState& state) {
  return dir / work_dir_name(kTmpPrefix, state.skeleton.step, kLeader);
}

/// Ranks [first, first + count) of a state with a file for each.
std::span<const WriterPart> ranks(const TestState& state, size_t first, size_t count) {
  return std::span(state.parts).subspan(first, count);
}

/// What the leader and both hosts of two ranks each do for a step, in turn.
Result<CommitReport> save_by_two(IoBackend& io, const fs::path& dir, const TestState& state,
                                 const WriteOptions& options = small_options()) {
  RT_TRY(make_dirs(io, dir));
  RT_TRY_SET(const bool replaces, check_existing(io, dir, state.skeleton.step, {}));
  WorkFolder work(io, work_of(dir, state), state.skeleton.step);
  RT_TRY(io.make_dir(work.path()));
  std::vector<PartSet> sets;
  for (const size_t first : {0, 2}) {
    Result<PartSet> written = write_parts(io, work.path(), state.skeleton, ranks(state, first, 2), options);
    if (!written.ok()) return work.abandon(std::move(written).error());
    sets.push_back(std::move(written).value());
  }
  return commit_step(io, work, state.skeleton, sets, replaces);
}

}  // namespace

TEST_SUITE("ckpt/persist/commit") {
  TEST_CASE("parts that two calls write and one commits are byte for byte the checkpoint of one call") {
    for (const Codec codec : {Codec::kRaw, Codec::kShuffleZstd}) {
      CAPTURE(codec_name(codec));
      std::vector<TensorSpec> specs = small_specs();
      specs.push_back({"large", "weight", DType::kF32, {1000, 333}, 4});
      const TestState state = make_state(12, 1, 4, specs);
      SaveOptions options = small_options();
      options.codec = codec;
      MemoryBackend one, two;
      REQUIRE_OK(save(one, kDir, state, options));
      const Result<CommitReport> saved = save_by_two(two, kDir, state, options);
      REQUIRE_OK(saved);
      CHECK(saved.value().dir == kDir / "step-00000012");
      CHECK_FALSE(saved.value().replaced);
      CHECK((files_of(two, saved.value().dir) == files_of(one, kDir / "step-00000012")));
      CHECK(files_of(two, saved.value().dir).size() == 6);
      CHECK(two.list(kDir).value().size() == 1);
      CHECK(compare(two, saved.value().dir, state) == "");

      const cairn::testing::TempDir dir("commit");
      PosixBackend io;
      const Result<CommitReport> on_disk = save_by_two(io, dir.path / "ck", state, options);
      REQUIRE_OK(on_disk);
      CHECK((files_of(io, on_disk.value().dir) == files_of(one, kDir / "step-00000012")));
    }
  }

  TEST_CASE("what a set says of its files is what is in them") {
    const TestState state = make_state(12, 1, 4);
    MemoryBackend disk;
    REQUIRE(make_dirs(disk, work_of(kDir, state)).ok());
    SaveCache cache;
    WriteOptions options = small_options();
    options.cache = &cache;
    const Result<PartSet> set = write_parts(disk, work_of(kDir, state), state.skeleton, ranks(state, 2, 2), options);
    REQUIRE_OK(set);
    CHECK(set.value().step == 12);
    REQUIRE(set.value().files.size() == 2);
    CHECK(set.value().files[0].name == shard_file_name(2, 4));
    int64_t bytes = 0;
    for (const FileEntry& file : set.value().files) {
      CHECK(disk.stat(work_of(kDir, state) / file.name).value().size_bytes == file.size_bytes);
      bytes += file.size_bytes;
    }
    CHECK(set.value().stats.file_bytes == bytes);
    const std::vector<WriterPart>& parts = state.parts;
    CHECK(set.value().shards.size() == parts[2].shards.size() + parts[3].shards.size());
    CHECK(files_of(disk, work_of(kDir, state)).size() == 2);  // and no manifest
    // Its own skeleton stays the caller's, with the files of other ranks or none.
    CHECK(state.skeleton.shards.empty());
  }

  TEST_CASE("a part that is missing, there twice or of another step is refused, and nothing is left of the step") {
    const TestState old_state = make_state(10, 1, 4), state = make_state(12, 2, 4), next = make_state(14, 3, 4);
    MemoryBackend disk;
    REQUIRE(save(disk, kDir, old_state).ok());
    const auto refused = [&](const std::vector<size_t>& firsts, const std::string& words, bool of_next = false) {
      CAPTURE(words);
      WorkFolder work(disk, work_of(kDir, state), 12);
      REQUIRE(disk.make_dir(work.path()).ok());
      std::vector<PartSet> sets;
      for (const size_t first : {0, 2}) {
        Result<PartSet> written =
            write_parts(disk, work.path(), state.skeleton, ranks(state, first, 2), small_options());
        REQUIRE_OK(written);
        for (const size_t wanted : firsts) {
          if (wanted == first) sets.push_back(written.value());
        }
      }
      if (of_next) sets[1].step = next.skeleton.step;
      const Result<CommitReport> committed = commit_step(disk, work, state.skeleton, sets, false);
      REQUIRE_FALSE(committed.ok());
      CHECK(committed.error().code == ErrorCode::kInvalidInput);
      CHECK_MESSAGE(committed.error().message.find(words) != std::string::npos, committed.error().message);
      CHECK(committed.error().message.find("step 12 was not saved") != std::string::npos);
      CHECK(disk.list(kDir).value().size() == 1);
      CHECK(newest_complete(disk, kDir).value().step == 10);
    };
    refused({0}, "do not tile its shape");
    refused({2}, "do not tile its shape");
    refused({}, "do not tile its shape");
    refused({0, 2, 2}, "is there twice");
    refused({0, 2}, "files of step 14 are no part of step 12", true);
    CHECK(save_by_two(disk, kDir, state).ok());
  }

  TEST_CASE("a crash between the parts and the commit leaves nothing that looks complete") {
    const TestState old_state = make_state(10, 1, 4), state = make_state(12, 2, 4);
    for (const size_t hosts : {1, 2}) {
      for (uint64_t seed = 0; seed < 16; ++seed) {
        CAPTURE(hosts);
        CAPTURE(seed);
        MemoryBackend disk;
        REQUIRE(save(disk, kDir, old_state).ok());
        REQUIRE(disk.make_dir(work_of(kDir, state)).ok());
        for (size_t host = 0; host < hosts; ++host)
          REQUIRE_OK(
              write_parts(disk, work_of(kDir, state), state.skeleton, ranks(state, 2 * host, 2), small_options()));
        disk.power_cycle(seed);
        CHECK(newest_complete(disk, kDir).value().step == 10);
        CHECK(list_names(disk, kDir).value().steps == std::vector<int64_t>{10});
        CHECK_FALSE(disk.stat(work_of(kDir, state) / kManifestName).ok());
        REQUIRE_OK(clean_leftovers(disk, kDir, [](const WriterId&) { return false; }));
        CHECK(disk.list(kDir).value().size() == 1);
        CHECK(save_by_two(disk, kDir, state).ok());
      }
    }
  }

  TEST_CASE("a step of two hosts cut off at any I/O call leaves the old checkpoint or the new one") {
    const std::vector<TensorSpec> specs = {{"a", "weight", DType::kF32, {60, 71}, 4}};
    for (const int64_t new_step : {10, 20}) {  // also in the place of one of its number
      const TestState old_state = make_state(10, 1, 4, specs), fresh = make_state(new_step, 2, 4, specs);
      MemoryBackend start;
      REQUIRE(save(start, kDir, old_state).ok());
      bool fired = true;
      int64_t kept_old = 0, got_new = 0;
      for (int64_t n = 0; fired; ++n) {
        const auto disk = start.clone();
        FaultBackend io(*disk, FaultPlan::stop_at_call(n, static_cast<uint64_t>(n)));
        const Result<CommitReport> saved = save_by_two(io, kDir, fresh);
        fired = io.fired();
        for (uint64_t seed = 0; seed < 8; ++seed) {
          CAPTURE(n);
          CAPTURE(seed);
          const auto after = disk->clone();
          after->power_cycle(seed);
          const Result<CheckpointInfo> found = newest_complete(*after, kDir);
          REQUIRE_OK(found);
          const bool is_new = compare(*after, found.value().dir, fresh).empty();
          REQUIRE((is_new || (!saved.ok() && compare(*after, found.value().dir, old_state).empty())));
          ++(is_new ? got_new : kept_old);
        }
      }
      CHECK(kept_old > 100);
      CHECK(got_new >= 8);
    }
  }

  TEST_CASE("a part that is not of the step's tensors is refused before it is written") {
    TestState state = make_state(12, 1, 4);
    MemoryBackend disk;
    REQUIRE(make_dirs(disk, work_of(kDir, state)).ok());
    const auto refused = [&](const std::string& words) {
      const Result<PartSet> set =
          write_parts(disk, work_of(kDir, state), state.skeleton, ranks(state, 0, 2), small_options());
      REQUIRE_FALSE(set.ok());
      CHECK(set.error().code == ErrorCode::kInvalidInput);
      CHECK_MESSAGE(set.error().message.find(words) != std::string::npos, set.error().message);
      CHECK(disk.list(work_of(kDir, state)).value().empty());
    };
    const TestState good = state;
    state.parts[0].shards[0].tensor = 99;
    refused("state to save");
    state.parts = good.parts;
    state.parts[0].shards[0].hi[0] = 1000;
    refused("state to save");
    state.parts = good.parts;
    state.parts[1].shards[0].data = nullptr;
    refused("has no bytes");
    state.parts = good.parts;
    state.parts[1].file_name = state.parts[0].file_name;
    refused("is there twice");
  }

  TEST_CASE("checksums of a part stand for as many bytes as in a save of the whole step") {
    // Rows of 64 KiB, and so many that in the whole step each gets fewer checksums than it would in a half.
    Manifest skeleton;
    skeleton.step = 1;
    const int64_t rows = int64_t{1} << 20, columns = 16 << 10;
    skeleton.tensors.push_back({"t", "weight", DType::kF32, {rows, columns}});
    std::vector<WriterPart> parts;
    const std::byte nothing{};
    for (int64_t f = 0; f < 2; ++f) {
      WriterPart part{shard_file_name(f, 2), {}};
      part.shards.push_back({.tensor = 0,
                             .lo = {rows / 2 * f, 0},
                             .hi = {rows / 2 * (f + 1), columns},
                             .data = &nothing,
                             .bytes = rows / 2 * columns * 4});
      parts.push_back(std::move(part));
    }
    WriteOptions options;
    PartSet whole, half, told;
    REQUIRE_OK(plan_parts(skeleton, parts, options, whole));
    REQUIRE_OK(plan_parts(skeleton, std::span(parts).first(1), options, half));
    CHECK(half.shards[0].chunk_bytes < whole.shards[0].chunk_bytes);
    options.checksum_bytes = checksum_bytes_of(skeleton, parts, options.chunk_bytes);
    REQUIRE_OK(plan_parts(skeleton, std::span(parts).first(1), options, told));
    CHECK(told.shards[0].chunk_bytes == whole.shards[0].chunk_bytes);
  }
}
