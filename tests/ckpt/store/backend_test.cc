// One conformance suite over every IoBackend.
#include "ckpt/store/io_backend.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <thread>

#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/stoppable_backend.h"
#include "ckpt/store/uring_backend.h"
#include "runtime/core/random.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
namespace fs = std::filesystem;

namespace {

std::vector<std::byte> noise(size_t bytes, uint64_t seed) {
  std::vector<std::byte> out(bytes);
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(mix64(seed * 1'000'003 + i / 8) >> (i % 8 * 8));
  return out;
}

// Runs the case on each backend this machine has, in an empty folder.
void on_each(const std::function<void(IoBackend&, const fs::path&)>& body) {
  const auto run = [&](const char* name, IoBackend& io, const fs::path& dir) {
    CAPTURE(name);
    body(io, dir);
  };
  MemoryBackend memory, inner;
  FaultBackend fault(inner, {});
  PosixBackend posix;
  REQUIRE(memory.make_dir("/d").ok());
  REQUIRE(inner.make_dir("/d").ok());
  run("memory", memory, "/d");
  run("fault, with nothing to do", fault, "/d");
  run("stoppable, not stopped", *make_stoppable(std::make_unique<PosixBackend>(), [] { return false; }),
      cairn::testing::TempDir("store-stoppable").path);
  run("posix", posix, cairn::testing::TempDir("store-posix").path);
  for (const bool direct : {true, false}) {
    const cairn::testing::TempDir dir("store-uring");
    Result<std::unique_ptr<IoBackend>> uring =
        make_uring_backend({.request_bytes = 64 << 10, .depth = 4, .direct = direct});
    if (!uring.ok()) {
      MESSAGE("skipped: " << uring.error().message);
      return;
    }
    run(direct ? "uring direct" : "uring buffered", *uring.value(), dir.path);
  }
}

}  // namespace

TEST_SUITE("ckpt/store/backend") {
  TEST_CASE("once it is stopped nothing is made, opened, read or written, and what tidies up goes on") {
    const cairn::testing::TempDir dir("store-stopped");
    bool stopped = false;
    const std::unique_ptr<IoBackend> io = make_stoppable(std::make_unique<PosixBackend>(), [&] { return stopped; });
    REQUIRE(io->make_dir(dir.path / "a").ok());
    REQUIRE(write_file(*io, dir.path / "a" / "x", "one").ok());
    const std::unique_ptr<IoFile> file = io->open(dir.path / "a" / "x").value();
    const std::unique_ptr<IoFile> made = io->create(dir.path / "a" / "y", 4).value();
    stopped = true;
    std::vector<std::byte> bytes(3);
    CHECK(file->read(0, bytes).error().code == ErrorCode::kStopped);
    CHECK(made->write(0, bytes).error().code == ErrorCode::kStopped);
    CHECK(io->open(dir.path / "a" / "x").error().code == ErrorCode::kStopped);
    CHECK(io->reopen(dir.path / "a" / "x", 3).error().code == ErrorCode::kStopped);
    CHECK(io->create(dir.path / "a" / "z", 1).error().message == (dir.path / "a" / "z").string() + ": asked to stop");
    CHECK(made->close().ok());
    CHECK(io->rename(dir.path / "a", dir.path / "b").ok());
    CHECK(io->list(dir.path / "b").value().size() == 2);
    CHECK(remove_tree(*io, dir.path / "b").ok());
  }

  TEST_CASE("names: make, list, rename, exchange, remove") {
    on_each([](IoBackend& io, const fs::path& dir) {
      REQUIRE(io.make_dir(dir / "a").ok());
      CHECK(io.make_dir(dir / "a").error().os_errno == EEXIST);
      REQUIRE(write_file(io, dir / "a" / "x", "one").ok());
      CHECK(io.create(dir / "a" / "x", 0).error().os_errno == EEXIST);
      CHECK(is_not_found(io.open(dir / "nothing").error()));
      CHECK(is_not_found(io.stat(dir / "nothing").error()));
      CHECK(is_not_found(io.list(dir / "nothing").error()));
      CHECK_FALSE(io.open(dir / "a").ok());
      CHECK_FALSE(io.remove_dir(dir / "a").ok());
      REQUIRE(make_dirs(io, dir / "b" / "c" / "d").ok());
      REQUIRE(write_file(io, dir / "b" / "y", "two!").ok());
      CHECK_FALSE(io.rename(dir / "a", dir / "b").ok());  // not empty
      REQUIRE(io.exchange(dir / "a", dir / "b").ok());
      CHECK(read_file(io, dir / "b" / "x", 100).value() == "one");
      CHECK(read_file(io, dir / "a" / "y", 100).value() == "two!");
      CHECK(read_file(io, dir / "a" / "y", 3).error().code == ErrorCode::kInvalidInput);
      REQUIRE(io.rename(dir / "b", dir / "z").ok());
      const std::vector<DirEntry> entries = io.list(dir).value();
      REQUIRE(entries.size() == 2);
      CHECK(entries[0].name == "a");
      CHECK(entries[1].name == "z");
      CHECK(entries[1].is_dir);
      CHECK(io.stat(dir / "z" / "x").value().size_bytes == 3);
      CHECK(io.sync_dir(dir).ok());
      CHECK(io.free_bytes(dir).value() > 0);
      struct statvfs untold {};
      REQUIRE(::statvfs("/proc", &untold) == 0);
      REQUIRE(untold.f_blocks == 0);                        // as of a file system that does not tell: a save is to try
      const Result<int64_t> free = io.free_bytes("/proc");  // not there on a disk in memory
      CHECK((!free.ok() || free.value() > int64_t{1} << 50));
      CHECK(remove_tree(io, dir / "a").ok());
      CHECK(remove_tree(io, dir / "a").ok());
      CHECK(is_not_found(io.stat(dir / "a").error()));
      CHECK(make_dirs(io, dir / "z" / "x").error().code == ErrorCode::kInvalidInput);
    });
  }

  TEST_CASE("a symbolic link to a folder counts as one, and removing it leaves what it leads to") {
    const cairn::testing::TempDir dir("store-links");
    PosixBackend io;
    REQUIRE(io.make_dir(dir.path / "far").ok());
    REQUIRE(write_file(io, dir.path / "far" / "x", "one").ok());
    REQUIRE(io.make_dir(dir.path / "near").ok());
    fs::create_directory_symlink(dir.path / "far", dir.path / "near" / "step");
    fs::create_symlink("nowhere", dir.path / "near" / "dangling");
    CHECK(make_dirs(io, dir.path / "near" / "step" / "new").ok());
    for (const char* below : {"", "below"}) {  // a disk that is away is no folder
      const Status made = make_dirs(io, dir.path / "near" / "dangling" / below);
      REQUIRE_FALSE(made.ok());
      CHECK(made.error().message.find("is a link to nothing") != std::string::npos);
    }
    REQUIRE(io.remove_dir(dir.path / "far" / "new").ok());
    const auto entries = io.list(dir.path / "near").value();
    REQUIRE(entries.size() == 2);
    CHECK_FALSE(entries[0].is_dir);
    CHECK(entries[1].is_dir);
    CHECK(io.stat(dir.path / "near" / "step").value().is_link);
    CHECK_FALSE(io.stat(dir.path / "far").value().is_link);
    REQUIRE(remove_tree(io, dir.path / "near" / "step").ok());
    CHECK(fs::symlink_status(dir.path / "near" / "step").type() == fs::file_type::not_found);
    fs::create_directory_symlink(dir.path / "far", dir.path / "near" / "again");
    REQUIRE(remove_tree(io, dir.path / "near").ok());
    CHECK(read_file(io, dir.path / "far" / "x", 10).value() == "one");
  }

  TEST_CASE("a FIFO in a file's place is refused, not waited for") {
    const cairn::testing::TempDir dir("store-fifo");
    PosixBackend io;
    REQUIRE(::mkfifo((dir.path / "f").c_str(), 0600) == 0);
    const Result<std::string> read = read_file(io, dir.path / "f", 10);
    REQUIRE_FALSE(read.ok());
    CHECK(read.error().message.find("is no regular file") != std::string::npos);
  }

  TEST_CASE("files are read as blocking ones, and one that a file server has a lease on is waited for") {
    on_each([](IoBackend& io, const fs::path& dir) {
      REQUIRE(write_file(io, dir / "f", "one").ok());
      if (!fs::exists(dir / "f")) return;  // in memory
      const auto file = io.open(dir / "f");
      REQUIRE(file.ok());
      int found = 0;
      for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
        std::error_code gone;
        if (fs::read_symlink(entry.path(), gone) != dir / "f") continue;
        ++found;
        CHECK((::fcntl(std::stoi(entry.path().filename()), F_GETFL) & O_NONBLOCK) == 0);
      }
      CHECK(found > 0);
    });

    const cairn::testing::TempDir dir("store-lease");
    PosixBackend io;
    REQUIRE(write_file(io, dir / "f", "one").ok());
    int ready[2];
    REQUIRE(::pipe(ready) == 0);
    const pid_t server = ::fork();
    if (server == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      static int held;
      held = ::open((dir / "f").c_str(), O_RDWR);
      struct sigaction action {};
      action.sa_handler = [](int) { ::fcntl(held, F_SETLEASE, F_UNLCK); };
      ::sigaction(SIGIO, &action, nullptr);
      const char leased = ::fcntl(held, F_SETLEASE, F_WRLCK) == 0 ? 'y' : 'n';  // some file systems have none
      if (::write(ready[1], &leased, 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    char leased = 0;
    REQUIRE(::read(ready[0], &leased, 1) == 1);
    if (leased == 'y') {
      CHECK(read_file(io, dir / "f", 10).ok());
    } else {
      MESSAGE("skipped: no leases here");
    }
    ::kill(server, SIGKILL);
    ::waitpid(server, nullptr, 0);
    ::close(ready[0]);
    ::close(ready[1]);
  }

  TEST_CASE("contents: any offset, length and memory alignment") {
    on_each([](IoBackend& io, const fs::path& dir) {
      std::vector<std::byte> model(900'000);
      const auto source = noise(model.size() + 8192, 3);
      auto made = io.create(dir / "f", static_cast<int64_t>(model.size()));
      REQUIRE_OK(made);
      IoFile& file = *made.value();
      CHECK(file.size().value() == 900'000);
      uint64_t seed = 1;
      const auto draw = [&](uint64_t n) { return mix64(seed++) % n; };
      for (int round = 0; round < 60; ++round) {
        const bool aligned = round % 3 == 0;
        size_t offset = draw(model.size()), bytes = draw(200'000), from = draw(8192);
        if (aligned) offset = offset / 4096 * 4096, bytes = bytes / 4096 * 4096;
        bytes = std::min(bytes, model.size() - offset);
        REQUIRE(
            file.submit_write(static_cast<int64_t>(offset), source.data() + from, static_cast<int64_t>(bytes)).ok());
        REQUIRE(file.finish().ok());  // ranges may overlap the next ones
        std::memcpy(model.data() + offset, source.data() + from, bytes);
      }
      REQUIRE(file.sync().ok());
      const Result<IoTicket> synced = file.submit_sync();
      REQUIRE(synced.ok());
      REQUIRE(file.wait(synced.value()).ok());
      REQUIRE(file.close().ok());
      auto opened = io.open(dir / "f");
      REQUIRE(opened.ok());
      std::vector<std::byte> all(model.size());
      REQUIRE(opened.value()->read(0, all).ok());
      CHECK((all == model));
      // Many at once, waited for out of order.
      std::vector<std::vector<std::byte>> parts;
      std::vector<std::pair<size_t, IoTicket>> flights;
      for (int i = 0; i < 40; ++i) {
        const size_t offset = draw(model.size() - 70'000);
        parts.emplace_back(draw(70'000));
        const auto ticket = opened.value()->submit_read(static_cast<int64_t>(offset), parts.back().data(),
                                                        static_cast<int64_t>(parts.back().size()));
        REQUIRE(ticket.ok());
        flights.emplace_back(offset, ticket.value());
      }
      for (size_t i = flights.size(); i-- > 0;) {
        REQUIRE(opened.value()->wait(flights[i].second).ok());
        CHECK(std::memcmp(parts[i].data(), model.data() + flights[i].first, parts[i].size()) == 0);
      }
      CHECK(opened.value()->finish().ok());
    });
  }

  TEST_CASE("a read beyond the end says where the file ends") {
    on_each([](IoBackend& io, const fs::path& dir) {
      REQUIRE(write_file(io, dir / "f", std::string(5000, 'x')).ok());
      auto file = io.open(dir / "f").value();
      std::vector<std::byte> bytes(8192);
      for (const auto& [offset, count] : {std::pair{0, 8192}, {4096, 4096}, {4999, 2}, {5000, 1}, {8192, 4096}}) {
        CAPTURE(offset);
        const Status read = file->read(offset, std::span(bytes).first(static_cast<size_t>(count)));
        REQUIRE_FALSE(read.ok());
        CHECK(read.error().code == ErrorCode::kCorrupt);
      }
      CHECK(file->read(4999, std::span(bytes).first(1)).ok());
      CHECK(file->finish().ok());
    });
  }

  TEST_CASE("new space is zero, and truncation cuts it") {
    on_each([](IoBackend& io, const fs::path& dir) {
      auto file = io.create(dir / "f", 20'000).value();
      const auto bytes = noise(4096, 1);
      REQUIRE(file->write(8192, bytes).ok());
      REQUIRE(file->truncate(10'001).ok());
      REQUIRE(file->sync().ok());
      REQUIRE(file->close().ok());
      const std::string text = read_file(io, dir / "f", 1 << 20).value();
      REQUIRE(text.size() == 10'001);
      CHECK(text.substr(0, 8192) == std::string(8192, '\0'));
      CHECK(std::memcmp(text.data() + 8192, bytes.data(), 1809) == 0);
    });
  }

  TEST_CASE("a file that is written over keeps what is not written, whether it grows or is cut") {
    on_each([](IoBackend& io, const fs::path& dir) {
      const std::vector<std::byte> old = noise(100'000, 1), fresh = noise(8192, 2);
      for (const int64_t size : {int64_t{100'000}, int64_t{40'000}, int64_t{300'000}}) {
        CAPTURE(size);
        const fs::path path = dir / std::to_string(size);
        {
          const std::unique_ptr<IoFile> file = io.create(path, 100'000).value();
          REQUIRE(file->write(0, old).ok());
        }
        Result<std::unique_ptr<IoFile>> again = io.reopen(path, size);
        if (!again.ok()) {
          CHECK(again.error().code == ErrorCode::kUnsupported);
          MESSAGE("skipped: " << again.error().message);
          return;
        }
        CHECK(again.value()->size().value() == size);
        REQUIRE(again.value()->write(16384, fresh).ok());
        REQUIRE(again.value()->sync().ok());
        REQUIRE(again.value()->close().ok());
        std::vector<std::byte> expected = old;
        expected.resize(static_cast<size_t>(size));
        std::copy(fresh.begin(), fresh.end(), expected.begin() + 16384);
        std::vector<std::byte> found(expected.size());
        REQUIRE(io.open(path).value()->read(0, found).ok());
        CHECK(found == expected);
      }
      CHECK_FALSE(io.reopen(dir / "nothing", 1).ok());
      CHECK_FALSE(io.reopen(dir, 1).ok());
    });
  }

  TEST_CASE("space that is not there is noticed when reserving it") {
    const cairn::testing::TempDir dir("store-full");
    PosixBackend posix;
    const auto made = posix.create(dir.path / "huge", int64_t{1} << 50);
    REQUIRE_FALSE(made.ok());
    CHECK((made.error().code == ErrorCode::kNoSpace || made.error().os_errno == EFBIG));
    CHECK(is_not_found(posix.stat(dir.path / "huge").error()));
    MemoryBackend small(100'000);
    CHECK(small.create("/f", 100'001).error().code == ErrorCode::kNoSpace);
    CHECK(small.free_bytes("/").value() == 100'000);
  }
}

TEST_SUITE("ckpt/store/uring") {
  TEST_CASE("an I/O backend serves one thread after the other") {
    Result<std::unique_ptr<IoBackend>> made = make_uring_backend({.request_bytes = 64 << 10, .depth = 4});
    if (!made.ok()) {
      MESSAGE("skipped: " << made.error().message);
      return;
    }
    IoBackend& io = *made.value();
    const cairn::testing::TempDir dir("store-threads");
    const size_t bytes = 1 << 20;
    struct Freer {
      void operator()(std::byte* p) const { std::free(p); }
    };
    const std::unique_ptr<std::byte, Freer> memory(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)));
    const std::span<std::byte> arena(memory.get(), bytes);
    const auto data = noise(bytes, 5);
    std::memcpy(arena.data(), data.data(), bytes);
    const auto round_trip = [&](const std::string& name) {
      auto file = io.create(dir.path / name, static_cast<int64_t>(bytes)).value();
      REQUIRE(file->submit_write(0, arena.data(), static_cast<int64_t>(bytes)).ok());
      REQUIRE(file->sync().ok());
      REQUIRE(file->close().ok());
      std::memset(arena.data(), 0, bytes);
      REQUIRE(io.open(dir.path / name).value()->read(0, arena).ok());
      CHECK(std::memcmp(arena.data(), data.data(), bytes) == 0);
    };
    round_trip("a");
    for (const char* name : {"b", "b2", "b3"}) std::thread([&] { round_trip(name); }).join();  // ids come again
    round_trip("c");
  }

  TEST_CASE("more requests than the disk is told of at once: of two files, waited for in any order, short of nothing") {
    Result<std::unique_ptr<IoBackend>> made = make_uring_backend(
        {.request_bytes = 8 << 10, .depth = 16, .in_flight_bytes = 40 << 10, .told_bytes = 24 << 10});
    if (!made.ok()) {
      MESSAGE("skipped: " << made.error().message);
      return;
    }
    IoBackend& io = *made.value();
    const cairn::testing::TempDir dir("store-waiting");
    const auto data = noise(1 << 20, 11);
    std::unique_ptr<IoFile> files[2] = {io.create(dir.path / "a", 1 << 20).value(),
                                        io.create(dir.path / "b", 1 << 20).value()};
    std::vector<std::pair<int, IoTicket>> tickets;
    for (int64_t at = 0, bytes = 0; at < 1 << 20; at += bytes) {
      bytes = std::min<int64_t>((1 << 20) - at, 4096 * (1 + at % 5) + (at % 3 == 0 ? 4096 : 100));
      for (int f = 0; f < 2; ++f) tickets.emplace_back(f, files[f]->submit_write(at, data.data() + at, bytes).value());
    }
    for (auto it = tickets.rbegin(); it != tickets.rend(); ++it) REQUIRE(files[it->first]->wait(it->second).ok());
    const IoTicket synced = files[0]->submit_sync().value();
    REQUIRE(files[0]->wait(synced).ok());
    for (const char* name : {"a", "b"}) {
      std::vector<std::byte> back(1 << 20);
      auto file = io.open(dir.path / name).value();
      for (int64_t at = 0; at < 1 << 20; at += 16 << 10)
        REQUIRE(file->submit_read(at, back.data() + at, 16 << 10).ok());
      REQUIRE(file->finish().ok());
      CHECK(std::memcmp(back.data(), data.data(), back.size()) == 0);
    }
    auto beyond = io.open(dir.path / "a").value();  // an error among those that wait does not hold up the rest
    std::vector<std::byte> back(128 << 10);
    const IoTicket bad = beyond->submit_read((1 << 20) - (64 << 10), back.data(), 128 << 10).value();
    const IoTicket good = beyond->submit_read(0, back.data(), 8 << 10).value();
    CHECK(beyond->wait(good).ok());
    CHECK(beyond->wait(bad).error().code == ErrorCode::kCorrupt);
  }

  TEST_CASE("options out of range are refused, and a file dropped in flight waits for its requests") {
    CHECK(make_uring_backend({.request_bytes = 1000}).error().code == ErrorCode::kInvalidInput);
    CHECK(make_uring_backend({.depth = 0}).error().code == ErrorCode::kInvalidInput);
    const std::unique_ptr<IoBackend> io = make_best_backend();
    const cairn::testing::TempDir dir("store-drop");
    const auto data = noise(1 << 20, 9);
    {
      auto file = io->create(dir.path / "f", 1 << 20).value();
      REQUIRE(file->submit_write(0, data.data(), 1 << 20).ok());
    }
    const std::string text = read_file(*io, dir.path / "f", 1 << 21).value();
    CHECK(std::memcmp(text.data(), data.data(), data.size()) == 0);
  }
}

TEST_SUITE("ckpt/store/memory") {
  TEST_CASE("a power loss keeps synced writes; unsynced ones may be lost, kept or torn") {
    MemoryBackend disk;
    REQUIRE(write_file(disk, "/old", std::string(16384, 'o')).ok());
    REQUIRE(disk.sync_dir("/").ok());
    REQUIRE(write_file(disk, "/new", "n").ok());  // its name is not synced
    {
      // The name is durable, the new contents are not. Files open for writing come from create alone.
      auto torn = disk.create("/torn", 16384).value();
      REQUIRE(torn->sync().ok());
      REQUIRE(disk.sync_dir("/").ok());
      REQUIRE(disk.remove_file("/new").ok());
      REQUIRE(disk.sync_dir("/").ok());
      REQUIRE(write_file(disk, "/new", "n").ok());
      REQUIRE(torn->write(0, noise(16384, 4)).ok());
    }
    REQUIRE(disk.rename("/old", "/renamed").ok());
    bool saw_torn = false, saw_old_name = false, saw_new_name = false, saw_neither = false;
    const auto data = noise(16384, 4);
    for (uint64_t seed = 0; seed < 64; ++seed) {
      const auto after = disk.clone();
      after->power_cycle(seed);
      const bool old_name = after->stat("/old").ok(), new_name = after->stat("/renamed").ok();
      CHECK(old_name != new_name);  // a rename is atomic
      saw_old_name |= old_name;
      saw_new_name |= new_name;
      CHECK(read_file(*after, old_name ? "/old" : "/renamed", 1 << 20).value() == std::string(16384, 'o'));
      saw_neither |= !after->stat("/new").ok();
      const std::string text = read_file(*after, "/torn", 1 << 20).value();
      REQUIRE(text.size() == 16384);
      const bool all_new = std::memcmp(text.data(), data.data(), 16384) == 0;
      const bool all_old = text == std::string(16384, '\0');
      if (seed == 0) CHECK((all_old && old_name && saw_neither));
      if (seed == 1) CHECK((all_new && new_name && after->stat("/new").ok()));
      saw_torn |= !all_new && !all_old;
    }
    CHECK(saw_torn);
    CHECK(saw_old_name);
    CHECK(saw_new_name);
    CHECK(saw_neither);
  }
}

TEST_SUITE("ckpt/store/fault") {
  TEST_CASE("each kind of fault does what it says, once or from then on") {
    const auto run = [](FaultPlan plan, const std::function<void(FaultBackend&, MemoryBackend&)>& body) {
      MemoryBackend disk;
      FaultBackend io(disk, plan);
      body(io, disk);
    };
    run(FaultPlan::fail_call(1, ENOSPC), [](FaultBackend& io, MemoryBackend&) {
      CHECK(io.make_dir("/a").ok());
      CHECK(io.make_dir("/b").error().code == ErrorCode::kNoSpace);
      CHECK(io.make_dir("/c").ok());
      CHECK(io.fired());
      CHECK(io.calls() == 3);
    });
    run(FaultPlan::fail_from(1, EIO), [](FaultBackend& io, MemoryBackend&) {
      CHECK(io.make_dir("/a").ok());
      CHECK(io.make_dir("/b").error().code == ErrorCode::kIo);
      CHECK_FALSE(io.make_dir("/c").ok());
    });
    run(FaultPlan::short_write(1, ENOSPC), [](FaultBackend& io, MemoryBackend& disk) {
      auto file = io.create("/f", 0).value();
      CHECK(file->write(0, noise(100, 1)).error().code == ErrorCode::kNoSpace);
      CHECK(disk.stat("/f").value().size_bytes == 50);
    });
    run(FaultPlan::stop_at_call(1), [](FaultBackend& io, MemoryBackend& disk) {
      CHECK(io.make_dir("/a").ok());
      CHECK(io.make_dir("/b").error().code == ErrorCode::kStopped);
      CHECK(io.remove_dir("/a").error().code == ErrorCode::kStopped);
      CHECK(disk.stat("/a").ok());
    });
    FaultPlan flip{FaultPlan::Action::kFlipBit, 0, false, EIO, IoOp::kWrite, 3};
    run(flip, [](FaultBackend& io, MemoryBackend& disk) {
      REQUIRE(write_file(io, "/f", std::string(100, '\0')).ok());
      int ones = 0;
      for (const std::byte b : disk.bytes_of("/f")) ones += std::popcount(static_cast<unsigned>(b));
      CHECK(ones == 1);
    });
    run(FaultPlan::skip_all(IoOp::kSync), [](FaultBackend& io, MemoryBackend& disk) {
      REQUIRE(write_file(io, "/f", "abc").ok());
      REQUIRE(io.sync_dir("/").ok());
      disk.power_cycle(0);
      CHECK(read_file(disk, "/f", 10).value().empty());
    });
  }
}
