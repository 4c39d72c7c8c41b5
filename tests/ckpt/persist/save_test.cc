#include "ckpt/persist/save.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "ckpt/format/checksum.h"
#include "ckpt/persist/priority.h"
#include "ckpt/persist/unfinished.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/replace.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

std::map<std::string, std::string> files_of(IoBackend& io, const fs::path& dir) {
  std::map<std::string, std::string> out;
  const std::vector<DirEntry> entries = io.list(dir).value();
  for (const DirEntry& entry : entries) out[entry.name] = read_file(io, dir / entry.name, int64_t{1} << 30).value();
  return out;
}

}  // namespace

TEST_SUITE("ckpt/persist/save") {
  TEST_CASE("a saved checkpoint reads back, with the same bytes in every file on every backend") {
    std::vector<TensorSpec> large = small_specs();  // and shards that are written from where they lie
    large.push_back({"large", "weight", DType::kF32, {1000, 333}, 3});
    large.push_back({"bytes", "weight", DType::kU8, {100'001}, 2});
    large.push_back({"huge", "weight", DType::kU8, {2'600'003}, 2});
    for (int i = 0; i < 40; ++i)
      large.push_back({"t" + std::to_string(i), "weight", DType::kU8, {70'000 + 997 * i}, 1});
    std::vector<TensorSpec> many;  // whose requests have more pieces than one may have
    for (int i = 0; i < 400; ++i) many.push_back({"t" + std::to_string(i), "weight", DType::kU8, {16'384 + 37 * i}, 1});
    for (const auto& [specs, chunk_bytes] :
         {std::pair{small_specs(), 4096}, {large, 4096}, {large, 4 << 20}, {many, 4 << 20}}) {
      const TestState state = make_state(12, 1, 2, specs);
      SaveOptions options = small_options();
      options.chunk_bytes = chunk_bytes;
      MemoryBackend memory;
      const Result<SaveReport> saved = save(memory, "/ck", state, options);
      REQUIRE_OK(saved);
      CHECK(saved.value().dir == fs::path("/ck/step-00000012"));
      CHECK(compare(memory, "/ck/step-00000012", state) == "");
      const auto expected = files_of(memory, "/ck/step-00000012");
      CHECK(expected.size() == 4);  // manifest, shard table, two HDF5 files

      std::vector<std::unique_ptr<IoBackend>> backends;
      backends.push_back(std::make_unique<PosixBackend>());
      for (const bool direct : {true, false}) {
        Result<std::unique_ptr<IoBackend>> uring = make_uring_backend({.depth = 4, .direct = direct});
        if (uring.ok()) backends.push_back(std::move(uring).value());
      }
      for (const auto& io : backends) {
        CAPTURE(io->name());
        const cairn::testing::TempDir dir("save-" + std::string(io->name()));
        for (const bool huge_pages : {false, true}) {  // only a hint about the memory
          options.huge_pages = huge_pages;
          REQUIRE(save(*io, dir.path / "ck", state, options).ok());
          CHECK(compare(*io, dir.path / "ck" / "step-00000012", state) == "");
          CHECK((files_of(*io, dir.path / "ck" / "step-00000012") == expected));
        }
      }
    }
  }

  TEST_CASE("a step that is there is refused, or replaced when that is allowed") {
    MemoryBackend disk;
    const TestState first = make_state(12, 1), second = make_state(12, 2);
    REQUIRE(save(disk, "/ck", first).ok());
    SaveOptions options = small_options();
    options.replace_existing = false;
    const Result<SaveReport> refused = save(disk, "/ck", second, options);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kInvalidInput);
    CHECK(refused.error().message.find("step 12 is there already") != std::string::npos);
    CHECK(compare(disk, "/ck/step-00000012", first) == "");
    const Result<SaveReport> replaced = save(disk, "/ck", second);
    REQUIRE_OK(replaced);
    CHECK(replaced.value().replaced);
    CHECK(compare(disk, "/ck/step-00000012", second) == "");
    CHECK(list_checkpoints(disk, "/ck").value().leftovers.empty());

    const cairn::testing::TempDir dir("save-replace");  // and on a real file system
    const std::unique_ptr<IoBackend> io = make_best_backend();
    REQUIRE(save(*io, dir.path, first).ok());
    REQUIRE(save(*io, dir.path, second).ok());
    CHECK(compare(*io, dir.path / "step-00000012", second) == "");
    CHECK(io->list(dir.path).value().size() == 1);
  }

  TEST_CASE("where a file system cannot exchange two names, a run's save replaces a step all the same") {
    const TestState first = make_state(12, 1), second = make_state(12, 2);
    MemoryBackend disk;
    REQUIRE(save(disk, "/ck", first).ok());
    FaultBackend io(
        disk, {.action = FaultPlan::Action::kFail, .from_then_on = true, .os_errno = EINVAL, .only = IoOp::kExchange});
    SaveOptions options = small_options();
    options.must_exchange = true;  // as archiving does, whose source is the step itself
    const Result<SaveReport> refused = save(io, "/ck", second, options);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnsupported);
    CHECK(compare(disk, "/ck/step-00000012", first) == "");
    CHECK(list_checkpoints(disk, "/ck").value().leftovers.empty());
    options.must_exchange = false;
    for (int64_t n = 0;; ++n) {  // the second rename fails: what was there stays
      const std::unique_ptr<MemoryBackend> copy = disk.clone();
      FaultBackend plain(
          *copy,
          {.action = FaultPlan::Action::kFail, .from_then_on = true, .os_errno = EINVAL, .only = IoOp::kExchange});
      FaultBackend once(plain, {.action = FaultPlan::Action::kFail, .call = n, .only = IoOp::kRename});
      const Result<SaveReport> saved = save(once, "/ck", second, options);
      CHECK(saved.ok() != once.fired());
      CHECK(compare(*copy, "/ck/step-00000012", saved.ok() ? second : first) == "");
      CHECK(list_checkpoints(*copy, "/ck").value().leftovers.empty());
      if (saved.ok()) CHECK(saved.value().replaced);
      if (!once.fired()) break;
    }
  }

  TEST_CASE("a replacement that is cut off between its two renames is told, and ended by whoever comes next") {
    const TestState first = make_state(12, 1), second = make_state(12, 2);
    MemoryBackend disk;
    REQUIRE(save(disk, "/ck", make_state(10, 1)).ok());
    REQUIRE(save(disk, "/ck", first).ok());
    FaultBackend plain(
        disk, {.action = FaultPlan::Action::kFail, .from_then_on = true, .os_errno = EINVAL, .only = IoOp::kExchange});
    FaultBackend away(plain,  // the server, between the two and when the first is to be undone
                      {.action = FaultPlan::Action::kFail, .call = 1, .from_then_on = true, .only = IoOp::kRename});
    const Result<SaveReport> saved = save(away, "/ck", second);
    REQUIRE_FALSE(saved.ok());
    CHECK(saved.error().message.find("cut off while it replaced /ck/step-00000012") != std::string::npos);
    CHECK(list_names(disk, "/ck").value().steps == std::vector<int64_t>{10, 12});
    const CheckpointInfo info = look_at_checkpoint(disk, "/ck", 12);
    CHECK_FALSE(info.complete);
    CHECK(info.unread);
    const Result<CheckpointInfo> newest = newest_complete(disk, "/ck");
    REQUIRE_FALSE(newest.ok());  // not step 10
    CHECK(newest.error().code == ErrorCode::kUnavailable);
    CHECK(newest.error().message.find("is taking the place of another save of this step") != std::string::npos);

    const auto restarted = disk.clone();
    const CleanReport cleaned = clean_leftovers(*restarted, "/ck", [](const WriterId&) { return false; }).value();
    CHECK(cleaned.put_back.size() == 1);
    CHECK(compare(*restarted, "/ck/step-00000012", second) == "");
    CHECK(restarted->list("/ck").value().size() == 2);
    const auto on_another_host = disk.clone();  // whose leftovers stay
    CHECK(clean_leftovers(*on_another_host, "/ck", [](const WriterId&) { return true; }).ok());
    CHECK(newest_complete(*on_another_host, "/ck").value().step == 12);
    const auto going_on = disk.clone();
    SaveOptions options = small_options();
    options.writer->sequence = 7;
    REQUIRE(save(*going_on, "/ck", make_state(14, 3), options).ok());
    CHECK(apply_retention(*going_on, "/ck", {3, {}}, this_writer()).ok());
    CHECK(compare(*going_on, "/ck/step-00000012", second) == "");
    const auto torn = disk.clone();  // somebody else has removed a part of the new one
    const std::string made = list_names(*torn, "/ck").value().cut_off.at(0).made;
    REQUIRE(torn->remove_file(fs::path("/ck") / made / kManifestName).ok());
    CHECK(clean_leftovers(*torn, "/ck", [](const WriterId&) { return false; }).ok());
    CHECK(compare(*torn, "/ck/step-00000012", first) == "");
  }

  TEST_CASE("a save overtaken between the two renames of a replacement has replaced the step all the same") {
    class Overtaken final : public PosixBackend {
     public:
      Status exchange(const fs::path&, const fs::path&) override { return Error{ErrorCode::kUnsupported, "no"}; }
      Status rename(const fs::path& from, const fs::path& to) override {
        RT_TRY(PosixBackend::rename(from, to));
        if (!to.filename().string().starts_with(kTrashPrefix)) return {};
        PosixBackend other;
        RT_TRY(finish_replacements(other, to.parent_path(), list_names(other, to.parent_path()).value()));
        return {};
      }
    } io;
    const cairn::testing::TempDir dir("save-overtaken");
    REQUIRE(save(io, dir.path, make_state(12, 1)).ok());
    const TestState second = make_state(12, 2);
    const Result<SaveReport> saved = save(io, dir.path, second);
    REQUIRE_OK(saved);
    CHECK(saved.value().replaced);
    CHECK(compare(io, dir.path / "step-00000012", second) == "");
    CHECK(io.list(dir.path).value().size() == 1);
  }

  TEST_CASE("a replacing save that is killed, cleared away by a resharding, then power loss: one of the two is whole") {
    const TestState first = make_state(12, 1), second = make_state(12, 2);
    SaveOptions replacing = small_options();
    replacing.replace_existing = true;
    for (int64_t n = 0;; ++n) {
      MemoryBackend disk;
      REQUIRE(save(disk, "/ck", first).ok());
      FaultBackend killed(disk, FaultPlan::stop_at_call(n));
      const Result<SaveReport> saved = save(killed, "/ck", second, replacing);
      std::vector<std::string> cleaned;
      REQUIRE(find_unfinished(
                  disk, "/ck", 12, 1, [](const WriterId&) { return false; }, &cleaned)
                  .ok());
      for (const uint64_t seed : {0, 1, 2, 3}) {
        const auto after = disk.clone();
        after->power_cycle(seed);
        const std::string old_one = compare(*after, "/ck/step-00000012", first);
        CHECK((old_one.empty() || compare(*after, "/ck/step-00000012", second).empty()));
      }
      if (!killed.fired()) break;
    }
  }

  TEST_CASE("a step that lies elsewhere, under a symbolic link, reads; replacing and removing leave what is there") {
    const cairn::testing::TempDir dir("save-link");
    PosixBackend io;
    const TestState first = make_state(1, 1), other = make_state(1, 2);
    const fs::path step = dir.path / "ck" / "step-00000001";
    REQUIRE(save(io, dir.path / "ck", first).ok());
    fs::rename(step, dir.path / "far");
    fs::create_directory_symlink("../far", step);
    REQUIRE(newest_complete(io, dir.path / "ck").value().step == 1);
    CHECK(compare(io, step, first) == "");
    SaveOptions replacing = small_options();
    replacing.replace_existing = true;
    REQUIRE(save(io, dir.path / "ck", other, replacing).ok());
    CHECK(compare(io, step, other) == "");
    CHECK(compare(io, dir.path / "far", first) == "");
    fs::remove_all(step);
    fs::create_directory_symlink("../far", step);
    REQUIRE(remove_checkpoint(io, dir.path / "ck", 1, {"test", 1, 1, 1}).ok());
    CHECK_FALSE(fs::exists(step));
    CHECK(compare(io, dir.path / "far", first) == "");
  }

  TEST_CASE("a step that was there and is removed while it is saved again is saved") {
    const cairn::testing::TempDir dir("save-removed");
    const std::unique_ptr<IoBackend> io = make_best_backend();
    const TestState first = make_state(12, 1), second = make_state(12, 2);
    REQUIRE(save(*io, dir.path, first).ok());
    std::thread retention([&] {  // of another save: takes its time to come, and no longer than this save takes
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      std::filesystem::remove_all(dir.path / "step-00000012");
    });
    SaveOptions options = small_options();
    options.max_bytes_per_s = 200'000;  // 40 kB and more take 0.2 s
    const Result<SaveReport> saved = save(*io, dir.path, second, options);
    retention.join();
    REQUIRE_OK(saved);
    CHECK_FALSE(saved.value().replaced);
    CHECK(compare(*io, dir.path / "step-00000012", second) == "");
    CHECK(io->list(dir.path).value().size() == 1);
  }

  TEST_CASE("a step that another process puts there while it is saved stays, and the save is refused") {
    const cairn::testing::TempDir dir("save-race");
    PosixBackend io;
    const TestState theirs = make_state(12, 1), ours = make_state(12, 2);
    struct Racing final : PosixBackend {
      std::function<void()> before;
      Status rename(const fs::path& from, const fs::path& to) override {
        if (before) std::exchange(before, nullptr)();
        return PosixBackend::rename(from, to);
      }
    } racing;
    REQUIRE_OK(save(io, dir.path / "other", theirs));
    racing.before = [&] { fs::rename(dir.path / "other/step-00000012", dir.path / "step-00000012"); };
    SaveOptions options = small_options();
    options.replace_existing = false;
    const Result<SaveReport> saved = save(racing, dir.path, ours, options);
    REQUIRE_FALSE(saved.ok());
    CHECK(saved.error().code == ErrorCode::kInvalidInput);
    CHECK_MESSAGE(saved.error().message.find("step 12 was put there meanwhile") != std::string::npos,
                  saved.error().message);
    CHECK(compare(io, dir.path / "step-00000012", theirs) == "");
    CHECK(list_checkpoints(io, dir.path).value().leftovers.empty());
  }

  TEST_CASE("parts that do not fit the tensors are refused before anything is written") {
    MemoryBackend disk;
    const auto refused = [&](const TestState& state, const std::string& words, SaveOptions options = small_options()) {
      const Result<SaveReport> saved = save(disk, "/ck", state, options);
      REQUIRE_FALSE(saved.ok());
      CHECK(saved.error().code == ErrorCode::kInvalidInput);
      CHECK_MESSAGE(saved.error().message.find(words) != std::string::npos, saved.error().message);
      CHECK(is_not_found(disk.stat("/ck").error()));
    };
    TestState state = make_state(12, 1);
    state.parts[0].shards.pop_back();
    refused(state, "do not tile");
    state = make_state(12, 1);
    state.parts[1].file_name = state.parts[0].file_name;
    refused(state, "there twice");
    state = make_state(12, 1);
    state.parts[1].file_name = "../escape.h5";
    refused(state, "$.files[1].name");
    state = make_state(12, 1);
    state.parts[0].shards[0].bytes -= 4;
    refused(state, "shard 0: bytes: found 1148, expected 1152");
    state = make_state(12, 1);
    state.parts[0].shards[0].hashes = {1, 2, 3, 4, 5};
    refused(state, "comes with 5 hashes");
    state = make_state(12, 1);
    state.skeleton.tensors[0].name = "a/b";
    refused(state, "$.tensors[0].name");
    SaveOptions options = small_options();
    options.chunk_bytes = 5000;
    refused(make_state(12, 1), "chunk_bytes", options);
    options.chunk_bytes = 0;
    refused(make_state(12, 1), "chunks of 0", options);
  }

  TEST_CASE("a writer with nothing to write still makes its file, and a state may be empty") {
    MemoryBackend disk;
    TestState state = make_state(12, 1);
    state.parts.push_back({"shard-00009-of-00010.h5", {}});
    const Result<SaveReport> saved = save(disk, "/ck", state);
    REQUIRE_OK(saved);
    CHECK(compare(disk, "/ck/step-00000012", state) == "");
    CHECK(verify_checkpoint(disk, "/ck/step-00000012").value().whole());
    state = make_state(13, 1, 0, {});
    REQUIRE(save(disk, "/ck", state).ok());
    CHECK(newest_complete(disk, "/ck").value().step == 13);
  }

  TEST_CASE("a full disk is noticed before writing") {
    MemoryBackend disk(1 << 20);
    const Result<SaveReport> saved = save(disk, "/ck", make_state(12, 1));
    REQUIRE_FALSE(saved.ok());
    CHECK(saved.error().code == ErrorCode::kNoSpace);
    CHECK(disk.list("/ck").value().empty());
  }

  TEST_CASE("hashes that come with the data are used, and a wrong one is found when reading") {
    MemoryBackend disk;
    TestState state = make_state(12, 1);
    for (WriterPart& part : state.parts) {
      for (ShardData& shard : part.shards) {
        for (int64_t at = 0; at < shard.bytes; at += 4096) {
          const int64_t n = std::min<int64_t>(4096, shard.bytes - at);
          shard.hashes.push_back(hash_bytes(std::span(shard.data + at, static_cast<size_t>(n))));
        }
      }
    }
    const Result<SaveReport> saved = save(disk, "/ck", state);
    REQUIRE(saved.ok());
    CHECK(compare(disk, "/ck/step-00000012", state) == "");
    state.parts[0].shards[1].hashes[0] ^= 1;
    REQUIRE(save(disk, "/ck", state).ok());
    CHECK(compare(disk, "/ck/step-00000012", state).find("checksum") != std::string::npos);
  }

  TEST_CASE("a save can be cancelled and throttled") {
    MemoryBackend disk;
    const TestState state = make_state(12, 1);
    std::atomic<bool> cancel{true};
    SaveOptions options = small_options();
    options.cancel = &cancel;
    const Result<SaveReport> cancelled = save(disk, "/ck", state, options);
    REQUIRE_FALSE(cancelled.ok());
    CHECK(cancelled.error().code == ErrorCode::kStopped);
    CHECK(disk.list("/ck").value().empty());
    cancel = false;
    options.max_bytes_per_s = 200'000;  // 40 kB and more take 0.2 s
    const auto start = std::chrono::steady_clock::now();
    REQUIRE(save(disk, "/ck", state, options).ok());
    CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > 0.1);
  }

  TEST_CASE("a thread that writes beside a training has low priority for CPU and disk, the others keep theirs") {
    const auto io_priority = [] { return ::syscall(SYS_ioprio_get, 1, 0); };  // of the calling thread
    const int nice_before = ::getpriority(PRIO_PROCESS, 0);
    const auto io_before = io_priority();
    int nice = 0;
    decltype(io_priority()) its_io = 0;
    std::thread([&] {
      lower_thread_priority(kLeastNice);
      nice = ::getpriority(PRIO_PROCESS, 0);
      its_io = io_priority();
    }).join();
    CHECK(nice == 19);
    if (its_io != (2 << 13 | 7)) MESSAGE("this system refuses I/O priorities");
    CHECK(::getpriority(PRIO_PROCESS, 0) == nice_before);
    CHECK(io_priority() == io_before);
  }

  TEST_CASE("the newest complete save wins of several in flight into one folder, whichever ends last") {
    // A slow older step beside a fast newer one, on a real disk, each with a backend of its own as it must.
    const cairn::testing::TempDir dir("save-flight");
    std::atomic<bool> newer_done{false};
    TestState older = make_state(10, 1);
    for (WriterPart& part : older.parts) {
      for (ShardData& shard : part.shards) {
        const std::byte* bytes = std::exchange(shard.data, nullptr);
        shard.fill = [bytes, &newer_done](int64_t offset, std::span<std::byte> target) -> Status {
          while (!newer_done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          std::memcpy(target.data(), bytes + offset, target.size());
          return {};
        };
      }
    }
    Status older_saved;
    std::thread slow([&] {
      const std::unique_ptr<IoBackend> io = make_best_backend();
      SaveOptions options = small_options();
      options.writer->sequence = 2;
      if (Result<SaveReport> saved = save(*io, dir.path, older, options); !saved.ok()) older_saved = saved.error();
    });
    const std::unique_ptr<IoBackend> io = make_best_backend();
    const TestState newer = make_state(20, 2);
    const bool saved = save(*io, dir.path, newer).ok();
    const Result<CheckpointInfo> first = newest_complete(*io, dir.path);
    newer_done = true;
    slow.join();
    REQUIRE(saved);
    REQUIRE(first.ok());
    CHECK(first.value().step == 20);
    REQUIRE_OK(older_saved);
    CHECK(newest_complete(*io, dir.path).value().step == 20);
    CHECK(compare(*io, dir.path / "step-00000020", newer) == "");
    CHECK(compare(*io, dir.path / "step-00000010", make_state(10, 1)) == "");
    CHECK(list_checkpoints(*io, dir.path).value().leftovers.empty());
  }

  TEST_CASE("two saves in two threads do not disturb each other") {
    // HDF5 is not thread safe; its calls are serialised inside.
    MemoryBackend disks[2];
    std::string problems[2];
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        for (int64_t step = 1; step <= 10 && problems[t].empty(); ++step) {
          const TestState state = make_state(step, static_cast<uint64_t>(step + 100 * t));
          const Result<SaveReport> saved = save(disks[t], "/ck", state);
          problems[t] = saved.ok() ? compare(disks[t], saved.value().dir, state) : saved.error().message;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(problems[0] == "");
    CHECK(problems[1] == "");
  }

  TEST_CASE("a shard of 10000 chunks, whose hashes are too many for an object header, and 600 tensors") {
    MemoryBackend disk;
    std::vector<TensorSpec> specs = {{"big", "weight", DType::kF32, {10'000, 1024}, 1}};
    for (int i = 0; i < 600; ++i) specs.push_back({"t" + std::to_string(i), "weight", DType::kBf16, {i + 1, 3}, 1});
    const TestState state = make_state(12, 1, 1, specs);
    const Result<SaveReport> saved = save(disk, "/ck", state);
    REQUIRE_OK(saved);
    CHECK(compare(disk, "/ck/step-00000012", state) == "");
    const VerifyReport report = verify_checkpoint(disk, "/ck/step-00000012").value();
    for (const Damage& damage : report.damages) MESSAGE(damage.message);
    CHECK(report.whole());
    MESSAGE("metadata: " << saved.value().file_bytes - saved.value().payload_bytes << " bytes for 601 shards");
  }

  TEST_CASE("weights that are not finite end the save, in whatever form, and what was there stays") {
    for (const Codec codec : {Codec::kRaw, Codec::kShuffleZstd}) {
      for (const bool large : {false, true}) {
        CAPTURE(large);
        MemoryBackend disk;
        const std::vector<TensorSpec> specs{{"a", "weight", DType::kF32, {large ? 300'000 : 40}, 1},
                                            {"a", "exp_avg", DType::kF32, {40}, 1}};
        TestState state = make_state(5, 1, 1, specs);
        for (auto& box : state.boxes) {
          for (size_t i = 3; i < box.size(); i += 4) box[i] = std::byte{0x3c};
        }
        SaveOptions options = small_options();
        options.codec = codec;
        state.parts[0].shards[0].finite = true;
        REQUIRE(save(disk, "/ck", state, options).ok());
        const float nan = std::numeric_limits<float>::quiet_NaN();
        std::memcpy(state.boxes[1].data() + 8, &nan, 4);  // of moments: not asked for
        CHECK(save(disk, "/ck", state, options).ok());
        std::memcpy(state.boxes[0].data() + state.boxes[0].size() - 4, &nan, 4);
        const Result<SaveReport> refused = save(disk, "/ck", state, options);
        REQUIRE_FALSE(refused.ok());
        CHECK(refused.error().code == ErrorCode::kGuard);
        CHECK(refused.error().message.find("weight a ") != std::string::npos);
        CHECK(refused.error().message.find("1 of its ") != std::string::npos);
        CHECK(CheckpointReader::open(disk, fs::path("/ck") / step_dir_name(5), {}).ok());
      }
    }
  }
}
