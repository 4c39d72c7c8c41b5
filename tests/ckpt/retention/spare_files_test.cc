// Files of removed checkpoints that the next save writes over.
#include "ckpt/retention/spare_files.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <thread>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/store/uring_backend.h"
#include "runtime/core/unique_handle.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
using cairn::testing::TempDir;
namespace fs = std::filesystem;

namespace {

const fs::path kDir = "/ck";
constexpr int64_t kPlenty = int64_t{1} << 30;

WriterId writer(int64_t sequence) { return {"test", 1, 1, sequence}; }

SaveOptions over(SpareFiles& spares, int64_t sequence) {
  SaveOptions options = small_options();
  options.spares = &spares;
  options.writer = writer(sequence);
  return options;
}

/// All but the newest goes; what `spares` has room for, there.
std::vector<std::string> spare_folders(IoBackend& io, const fs::path& dir) {
  std::vector<std::string> names = list_names(io, dir).value().leftovers;
  std::erase_if(names, [](const std::string& name) { return !name.starts_with(kSparePrefix); });
  return names;
}

/// The kernel's worker that made a file durable for a ring may hold it for seconds after the ring has said so, and a
/// held file is not written over.
void wait_until_let_go(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0 || ::fcntl(fd, F_SETSIG, SIGURG) != 0) return;  // in memory
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (::fcntl(fd, F_SETLEASE, F_WRLCK) != 0 && errno == EAGAIN && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ::fcntl(fd, F_SETLEASE, F_UNLCK);
  ::close(fd);
}

void retire(IoBackend& io, const fs::path& dir, SpareFiles& spares, int64_t sequence) {
  const RetentionReport report = apply_retention(io, dir, {1, {}}, writer(sequence), nullptr, &spares).value();
  CHECK(report.problems.empty());
  for (const std::string& folder : spare_folders(io, dir)) {
    for (const DirEntry& entry : io.list(dir / folder).value()) wait_until_let_go(dir / folder / entry.name);
  }
}

/// A file system that gives files to be written over, as ext4 and xfs do.
bool gives_files(IoBackend& io, const fs::path& dir) {
  REQUIRE(write_file(io, dir / "probe", "a").ok());
  const Result<std::unique_ptr<IoFile>> file = io.reopen(dir / "probe", 1);
  REQUIRE(io.remove_file(dir / "probe").ok());
  if (!file.ok()) MESSAGE("skipped: " << file.error().message);
  return file.ok();
}

/// Files of a checkpoint, and what is in them.
std::map<std::string, std::string> contents(IoBackend& io, const fs::path& step) {
  std::map<std::string, std::string> out;
  for (const DirEntry& entry : io.list(step).value())
    out[entry.name] = read_file(io, step / entry.name, kPlenty).value();
  return out;
}

}  // namespace

TEST_SUITE("ckpt/retention/spare_files") {
  TEST_CASE("a save over spare files makes the same bytes as one into new ones, whether they were larger or smaller") {
    const std::vector<TensorSpec> large = {{"a", "weight", DType::kF32, {300, 71}, 2},
                                           {"b", "weight", DType::kBf16, {33}, 1}};
    const std::vector<TensorSpec> many = [] {
      std::vector<TensorSpec> specs;
      for (int64_t i = 0; i < 40; ++i)
        specs.push_back({fmt::format("t{}", i), "weight", DType::kF32, {i * i + 1, 7}, 1});
      return specs;
    }();
    const TempDir real("spares");
    MemoryBackend memory;
    REQUIRE(memory.make_dir(kDir).ok());
    const std::unique_ptr<IoBackend> uring = make_best_backend();
    for (IoBackend* io : {static_cast<IoBackend*>(&memory), uring.get()}) {
      const fs::path dir = io == &memory ? kDir : real.path;
      CAPTURE(io->name());
      if (!gives_files(*io, dir)) continue;
      const std::vector<TensorSpec> small = small_specs();
      int64_t step = 10, sequence = 0;
      for (const auto* before : {&large, &many, &small}) {
        for (const auto* after : {&large, &many, &small}) {
          for (const int64_t files : {1, 3}) {
            SpareFiles spares;
            spares.limit(kPlenty);
            REQUIRE(save(*io, dir, make_state(step, 1, 2, *before), over(spares, sequence++)).ok());
            step += 10;
            REQUIRE(save(*io, dir, make_state(step, 2, 2, small), over(spares, sequence++)).ok());
            retire(*io, dir, spares, sequence++);
            REQUIRE(spares.bytes() > 0);
            step += 10;
            const TestState state = make_state(step, 3, files, *after);
            const Result<SaveReport> saved = save(*io, dir, state, over(spares, sequence++));
            REQUIRE(saved.ok());
            CHECK(saved.value().reused_files == files);  // the state before this one was removed too
            CHECK(compare(*io, saved.value().dir, state) == "");
            MemoryBackend fresh;
            SaveOptions options = small_options();
            const Result<SaveReport> anew = save(fresh, kDir, state, options);
            REQUIRE(anew.ok());
            CHECK(contents(*io, saved.value().dir) == contents(fresh, anew.value().dir));
            spares.clear(*io);
            CHECK(spare_folders(*io, dir).empty());
            step += 10;
          }
        }
      }
    }
  }

  TEST_CASE("spare files open as no checkpoint, stay within the limit, and go when used or cleared") {
    MemoryBackend disk;
    SpareFiles spares;
    int64_t sequence = 0;
    const auto state = [](int64_t step) { return make_state(step, static_cast<uint64_t>(step)); };
    for (const int64_t step : {10, 20}) REQUIRE(save(disk, kDir, state(step), over(spares, sequence++)).ok());
    const int64_t file_bytes = disk.stat(kDir / "step-00000010" / shard_file_name(0, 2)).value().size_bytes;
    retire(disk, kDir, spares, sequence++);  // no limit was said
    CHECK(spares.bytes() == 0);
    CHECK(spare_folders(disk, kDir).empty());

    spares.limit(file_bytes + 100);
    REQUIRE(save(disk, kDir, state(30), over(spares, sequence++)).ok());
    retire(disk, kDir, spares, sequence++);
    CHECK(spares.bytes() == file_bytes);
    REQUIRE(spare_folders(disk, kDir).size() == 1);
    const fs::path folder = kDir / spare_folders(disk, kDir)[0];
    const std::vector<DirEntry> entries = disk.list(folder).value();
    REQUIRE(entries.size() == 1);
    const std::vector<std::byte>& bytes = disk.bytes_of(folder / entries[0].name);
    CHECK(std::all_of(bytes.begin(), bytes.begin() + kIoAlign, [](std::byte b) { return b == std::byte{0}; }));
    CHECK(list_checkpoints(disk, kDir).value().checkpoints.size() == 1);

    retire(disk, kDir, spares, sequence++);  // full: nothing more is taken
    const SaveReport used = save(disk, kDir, state(40), over(spares, sequence++)).value();
    CHECK(used.reused_files == 1);
    CHECK(spares.bytes() == 0);
    CHECK(spare_folders(disk, kDir).empty());

    spares.limit(kPlenty);
    retire(disk, kDir, spares, sequence++);
    CHECK(spares.bytes() > file_bytes);
    spares.limit(file_bytes);  // saves have become smaller
    REQUIRE(save(disk, kDir, state(50), small_options()).ok());
    retire(disk, kDir, spares, sequence++);
    CHECK(spares.bytes() <= file_bytes);
    CHECK(spares.bytes() > 0);
    spares.limit(kPlenty);
    REQUIRE(save(disk, kDir, state(60), small_options()).ok());
    retire(disk, kDir, spares, sequence++);
    CHECK(spares.bytes() > file_bytes);
    CHECK(spares.clear(disk));
    CHECK(spares.bytes() == 0);
    CHECK(spare_folders(disk, kDir).empty());
    CHECK_FALSE(spares.clear(disk));
    CHECK(compare(disk, kDir / "step-00000060", state(60)) == "");
  }

  TEST_CASE("a file that another holds becomes no spare file: open, mapped, of two names, behind a link") {
    const TempDir dir("spares-held");
    const std::unique_ptr<IoBackend> io = make_best_backend();
    if (!gives_files(*io, dir.path)) return;
    enum class Held { kNot, kOpen, kMapped, kTwoNames, kFileBehindLink, kStepBehindLink };
    int64_t step = 10;
    for (const Held held :
         {Held::kNot, Held::kOpen, Held::kMapped, Held::kTwoNames, Held::kFileBehindLink, Held::kStepBehindLink}) {
      CAPTURE(static_cast<int>(held));
      const fs::path checkpoints = dir / std::to_string(step), away = dir / ("away" + std::to_string(step));
      SpareFiles spares;
      spares.limit(kPlenty);
      const TestState state = make_state(step, 1, 1);
      REQUIRE(save(*io, checkpoints, state, over(spares, 1)).ok());
      const fs::path there = checkpoints / step_dir_name(step), file = there / shard_file_name(0, 1);
      const std::string before = read_file(*io, file, kPlenty).value();
      Fd fd;
      void* mapped = MAP_FAILED;
      if (held == Held::kOpen || held == Held::kMapped) {
        fd = Fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
        REQUIRE(fd);
      }
      if (held == Held::kMapped) {
        mapped = ::mmap(nullptr, before.size(), PROT_READ, MAP_SHARED, fd.get(), 0);
        REQUIRE(mapped != MAP_FAILED);
        fd.reset();
      }
      if (held == Held::kTwoNames) fs::create_hard_link(file, away);
      if (held == Held::kFileBehindLink) {
        fs::rename(file, away);
        fs::create_symlink(away, file);
      }
      if (held == Held::kStepBehindLink) {
        fs::rename(there, away);
        fs::create_directory_symlink(away, there);
      }
      REQUIRE(save(*io, checkpoints, make_state(step + 1, 2, 1), over(spares, 2)).ok());
      retire(*io, checkpoints, spares, 3);
      CHECK_FALSE(fs::exists(there));
      CHECK((spares.bytes() > 0) == (held == Held::kNot));
      const SaveReport saved = save(*io, checkpoints, make_state(step + 2, 3, 1), over(spares, 4)).value();
      CHECK(saved.reused_files == (held == Held::kNot ? 1 : 0));
      if (fd) {
        std::string now(before.size(), 0);
        REQUIRE(::pread(fd.get(), now.data(), now.size(), 0) == std::ssize(now));
        CHECK(now == before);
      }
      if (mapped != MAP_FAILED) {
        CHECK(std::memcmp(mapped, before.data(), before.size()) == 0);
        ::munmap(mapped, before.size());
      }
      if (held == Held::kTwoNames || held == Held::kFileBehindLink)
        CHECK(read_file(*io, away, kPlenty).value() == before);
      if (held == Held::kStepBehindLink) CHECK(read_file(*io, away / shard_file_name(0, 1), kPlenty).value() == before);
      CHECK(spare_folders(*io, checkpoints).empty());
      step += 10;
    }
  }

  TEST_CASE("a name that a spare file has been given meanwhile keeps what it names") {
    const TempDir dir("spares-linked");
    const std::unique_ptr<IoBackend> io = make_best_backend();
    if (!gives_files(*io, dir.path)) return;
    const fs::path checkpoints = dir / "ck";
    SpareFiles spares;
    spares.limit(kPlenty);
    for (const int64_t step : {10, 20})
      REQUIRE(save(*io, checkpoints, make_state(step, 1, 1), over(spares, step)).ok());
    retire(*io, checkpoints, spares, 21);
    const fs::path spare = checkpoints / spare_folders(*io, checkpoints)[0] / shard_file_name(0, 1);
    fs::create_hard_link(spare, dir / "copied");  // cp -al of the whole folder
    const std::string before = read_file(*io, dir / "copied", kPlenty).value();
    const SaveReport saved = save(*io, checkpoints, make_state(30, 3, 1), over(spares, 30)).value();
    CHECK(saved.reused_files == 0);
    CHECK(read_file(*io, dir / "copied", kPlenty).value() == before);
    CHECK(compare(*io, saved.dir, make_state(30, 3, 1)) == "");
  }

  TEST_CASE("a file that shares blocks with a copy of it is not written over: that would take new ones") {
    const TempDir dir("spares-shared");
    const std::unique_ptr<IoBackend> io = make_best_backend();
    if (!gives_files(*io, dir.path)) return;
    const fs::path checkpoints = dir / "ck";
    SpareFiles spares;
    spares.limit(kPlenty);
    for (const int64_t step : {10, 20})
      REQUIRE(save(*io, checkpoints, make_state(step, 1, 1), over(spares, step)).ok());
    {
      const fs::path file = checkpoints / step_dir_name(10) / shard_file_name(0, 1);
      const Fd from(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
      const Fd to(::open((dir / "copy").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
      if (::ioctl(to.get(), FICLONE, from.get()) != 0) {
        MESSAGE("skipped: no copies that share blocks here (ext4)");
        return;
      }
    }
    retire(*io, checkpoints, spares, 21);
    CHECK(spares.bytes() == 0);
  }

  TEST_CASE("a disk on which only the spare files leave no room is not full") {
    const auto large = [](int64_t step, int64_t files = 1) {
      return make_state(step, static_cast<uint64_t>(step), files, {{"a", "weight", DType::kF32, {4000, 1024}, files}});
    };
    MemoryBackend disk(int64_t{38} << 20);  // two of 16.4 MB, and the megabytes that a save wants to see free
    SpareFiles spares;
    spares.limit(kPlenty);
    REQUIRE(save(disk, kDir, large(10), over(spares, 1)).ok());
    REQUIRE(save(disk, kDir, large(20), over(spares, 2)).ok());
    retire(disk, kDir, spares, 3);
    REQUIRE(write_file(disk, "/others", std::string(2'000'000, 'x')).ok());
    CHECK(save(disk, kDir, large(30), small_options()).error().code == ErrorCode::kNoSpace);
    CHECK(save(disk, kDir, large(30), over(spares, 4)).value().reused_files == 1);
    retire(disk, kDir, spares, 5);
    // Two files: the spare one is cut for the first.
    CHECK(save(disk, kDir, large(40, 2), over(spares, 6)).value().reused_files == 1);
    retire(disk, kDir, spares, 7);
    CHECK(save(disk, kDir, large(50), over(spares, 8)).value().reused_files == 1);
    retire(disk, kDir, spares, 9);
    // One file, twice as large as either spare one: neither can grow beside the other, and both go.
    const SaveReport anew = save(disk, kDir, large(60), over(spares, 10)).value();
    CHECK(anew.reused_files == 0);
    CHECK(compare(disk, anew.dir, large(60)) == "");
  }

  TEST_CASE("a full disk costs no save while spare files hold more than it needs") {
    MemoryBackend disk(int64_t{24} << 20);
    const auto state = [](int64_t step, int64_t rows) {
      return make_state(step, static_cast<uint64_t>(step), 1, {{"a", "weight", DType::kF32, {rows, 1024}, 1}});
    };
    SpareFiles spares;
    spares.limit(kPlenty);
    for (const int64_t step : {10, 20, 30}) REQUIRE(save(disk, kDir, state(step, 1000), over(spares, step)).ok());
    retire(disk, kDir, spares, 31);
    REQUIRE(spares.bytes() > 8'000'000);
    REQUIRE(write_file(disk, "/others", std::string(static_cast<size_t>(disk.free_bytes(kDir).value()), 'x')).ok());
    CHECK(save(disk, kDir, state(40, 10), over(spares, 40)).ok());
    // And where the disk fills up in the middle, the next save has the room of all of them.
    for (const int64_t step : {50, 60}) REQUIRE(save(disk, kDir, state(step, 500), over(spares, step)).ok());
    retire(disk, kDir, spares, 61);
    REQUIRE(spares.bytes() > 0);
    FaultPlan plan = FaultPlan::fail_from(0, ENOSPC);
    plan.only = IoOp::kMakeDir;
    FaultBackend full(disk, plan);
    CHECK(save(full, kDir, state(70, 10), over(spares, 70)).error().code == ErrorCode::kNoSpace);
    CHECK(spares.bytes() == 0);
    CHECK(spare_folders(disk, kDir).empty());
    CHECK(save(disk, kDir, state(70, 10), over(spares, 71)).ok());
  }

  TEST_CASE("a save that is refused for want of room leaves none to spare files") {
    MemoryBackend disk(int64_t{24} << 20);
    const auto state = [](int64_t step, int64_t rows) {
      return make_state(step, static_cast<uint64_t>(step), 1, {{"a", "weight", DType::kF32, {rows, 1024}, 1}});
    };
    SpareFiles spares;
    spares.limit(kPlenty);
    for (const int64_t step : {10, 20}) REQUIRE(save(disk, kDir, state(step, 1000), over(spares, step)).ok());
    retire(disk, kDir, spares, 21);
    const int64_t spare = spares.bytes();
    REQUIRE(spare > 4'000'000);
    const int64_t free = disk.free_bytes(kDir).value() - 3'000'000;
    REQUIRE(write_file(disk, "/others", std::string(static_cast<size_t>(free), 'x')).ok());
    const auto refused = save(disk, kDir, state(30, 4000), over(spares, 30));
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kNoSpace);
    CHECK(spares.bytes() == 0);
    CHECK(spare_folders(disk, kDir).empty());
    const std::string told = fmt::format("{} bytes free", disk.free_bytes(kDir).value());
    CHECK_MESSAGE(refused.error().message.find(told) != std::string::npos, refused.error().message);
  }

  TEST_CASE("each file of a save takes the one of its size") {
    MemoryBackend disk;
    SpareFiles spares;
    spares.limit(kPlenty);
    const auto state = [](int64_t step) {
      return make_state(step, static_cast<uint64_t>(step), 3,
                        {{"a", "weight", DType::kF32, {100, 511}, 1},
                         {"b", "weight", DType::kF32, {300, 511}, 1},
                         {"c", "weight", DType::kF32, {900, 511}, 1}});
    };
    for (const int64_t step : {10, 20}) REQUIRE(save(disk, kDir, state(step), over(spares, step)).ok());
    const auto nodes = [&](int64_t step) {  // of the files, in order
      std::vector<const std::byte*> out;
      for (int64_t i = 0; i < 3; ++i)
        out.push_back(disk.bytes_of(kDir / step_dir_name(step) / shard_file_name(i, 3)).data());
      return out;
    };
    const std::vector<const std::byte*> before = nodes(10);
    retire(disk, kDir, spares, 21);
    REQUIRE(save(disk, kDir, state(30), over(spares, 30)).ok());
    CHECK(nodes(30) == before);
  }

  TEST_CASE("a reader inside a removed step's folder finds its files gone, not zeroed") {
    const TempDir dir("spares-inside");
    const std::unique_ptr<IoBackend> io = make_best_backend();
    if (!gives_files(*io, dir.path)) return;
    SpareFiles spares;
    spares.limit(kPlenty);
    for (const int64_t step : {10, 20}) REQUIRE(save(*io, dir / "ck", make_state(step, 1), over(spares, step)).ok());
    const Fd inside(::open((dir / "ck" / step_dir_name(10)).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    REQUIRE(inside);
    retire(*io, dir / "ck", spares, 21);
    REQUIRE(spares.bytes() > 0);
    CHECK(::openat(inside.get(), shard_file_name(0, 2).c_str(), O_RDONLY | O_CLOEXEC) == -1);
  }

  TEST_CASE("a file that is written over has the rights of a new one, or is not") {
    const TempDir dir("spares-rights");
    const std::unique_ptr<IoBackend> io = make_best_backend();
    if (!gives_files(*io, dir.path)) return;
    const auto mode_of = [](const fs::path& path) {
      struct stat st {};
      REQUIRE(::stat(path.c_str(), &st) == 0);
      return st.st_mode & 07777;
    };
    int64_t step = 10;
    for (const mode_t before : {0666, 0600, 0644, 04644}) {
      for (const mode_t mask : {mode_t{002}, mode_t{022}, mode_t{077}}) {
        SpareFiles spares;
        spares.limit(kPlenty);
        const fs::path checkpoints = dir / std::to_string(step);
        REQUIRE(save(*io, checkpoints, make_state(1, 1, 1), over(spares, 1)).ok());
        REQUIRE(::chmod((checkpoints / step_dir_name(1) / shard_file_name(0, 1)).c_str(), before) == 0);
        REQUIRE(save(*io, checkpoints, make_state(2, 1, 1), over(spares, 2)).ok());
        retire(*io, checkpoints, spares, 3);
        const mode_t old_mask = ::umask(mask);
        const SaveReport saved = save(*io, checkpoints, make_state(3, 1, 1), over(spares, 4)).value();
        ::umask(old_mask);
        CHECK(saved.reused_files == 1);
        CHECK(mode_of(saved.dir / shard_file_name(0, 1)) == mode_of(saved.dir / kManifestName));
        ++step;
      }
    }
    {
      SpareFiles spares;
      spares.limit(kPlenty);
      const fs::path checkpoints = dir / "noted";
      REQUIRE(save(*io, checkpoints, make_state(1, 1, 1), over(spares, 1)).ok());
      const fs::path file = checkpoints / step_dir_name(1) / shard_file_name(0, 1);
      if (::setxattr(file.c_str(), "user.checked", "yes", 3, 0) == 0) {
        REQUIRE(save(*io, checkpoints, make_state(2, 1, 1), over(spares, 2)).ok());
        retire(*io, checkpoints, spares, 3);
        CHECK(spares.bytes() == 0);
      }
    }
    if (::geteuid() != 0) return;
    SpareFiles spares;
    spares.limit(kPlenty);
    const fs::path checkpoints = dir / "of-another";
    for (const int64_t one : {1, 2}) REQUIRE(save(*io, checkpoints, make_state(one, 1, 1), over(spares, one)).ok());
    retire(*io, checkpoints, spares, 3);
    REQUIRE(spares.bytes() > 0);
    const fs::path spare = checkpoints / spare_folders(*io, checkpoints)[0] / shard_file_name(0, 1);
    REQUIRE(::chown(spare.c_str(), 1234, 1234) == 0);
    CHECK(save(*io, checkpoints, make_state(4, 1, 1), over(spares, 4)).value().reused_files == 0);
  }

  TEST_CASE("a disk that fails at any call of taking in and writing over: told or not, no step is harmed") {
    int64_t saved = 0, failed = 0;
    for (const int os_errno : {ENOSPC, EIO}) {
      for (const bool from_then_on : {false, true}) {
        bool fired = true;
        for (int64_t n = 0; fired; ++n) {
          CAPTURE(n);
          CAPTURE(from_then_on);
          MemoryBackend disk;
          SpareFiles spares;
          spares.limit(kPlenty);
          for (const int64_t step : {10, 20}) REQUIRE(save(disk, kDir, make_state(step, 1), over(spares, step)).ok());
          FaultPlan plan = FaultPlan::fail_call(n, os_errno);
          plan.from_then_on = from_then_on;
          FaultBackend io(disk, plan);
          const auto retired = apply_retention(io, kDir, {1, {}}, writer(21), nullptr, &spares);
          CHECK((retired.ok() || retired.error().os_errno == os_errno));
          const Result<SaveReport> report = save(io, kDir, make_state(30, 3), over(spares, 30));
          fired = io.fired();
          ++(report.ok() ? saved : failed);
          if (report.ok()) REQUIRE(compare(disk, kDir / "step-00000030", make_state(30, 3)) == "");
          REQUIRE(compare(disk, kDir / "step-00000020", make_state(20, 1)) == "");
          for (const CheckpointInfo& info : list_checkpoints(disk, kDir).value().checkpoints)
            REQUIRE_MESSAGE(info.complete, info.problem);
          spares.clear(disk);
          REQUIRE(clean_leftovers(disk, kDir, [](const WriterId&) { return false; }).ok());
          REQUIRE(list_names(disk, kDir).value().leftovers.empty());
          REQUIRE(save(disk, kDir, make_state(40, 4), over(spares, 40)).ok());
        }
      }
    }
    MESSAGE(saved << " saves, " << failed << " told to have failed");
    CHECK(saved > 20);
    CHECK(failed > 20);
  }

  TEST_CASE("spare files are cleared away, whoever's they are, and never put back as a step") {
    MemoryBackend disk;
    SpareFiles spares;
    spares.limit(kPlenty);
    for (const int64_t step : {10, 20}) REQUIRE(save(disk, kDir, make_state(step, 1), over(spares, step)).ok());
    retire(disk, kDir, spares, 21);
    REQUIRE(write_file(disk, kDir / step_dir_name(20) / kReferencesName, step_dir_name(10) + "\n").ok());
    const CleanReport cleaned = clean_leftovers(disk, kDir, [](const WriterId&) { return true; }).value();
    CHECK(cleaned.put_back.empty());
    CHECK(cleaned.left.empty());
    CHECK(cleaned.removed.size() == 1);
    CHECK(list_names(disk, kDir).value().steps == std::vector<int64_t>{20});
    // Whoever still believes in them finds out.
    const SaveReport saved = save(disk, kDir, make_state(30, 3), over(spares, 30)).value();
    CHECK(saved.reused_files == 0);
  }
}
