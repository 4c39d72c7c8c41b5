// The snapshot memory: its life, kills at any instant, and damage.
#include "ckpt/snapshot/arena.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>

#include "ckpt/format/checksum.h"
#include "ckpt/snapshot/snapshot.h"
#include "runtime/core/random.h"
#include "tests/ckpt/snapshot/write_snapshot.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

std::string run_id(const char* what) { return fmt::format("snapshot-test-{}-{}", what, ::getpid()); }

ArenaSpec small_spec(const std::string& id, ArenaBacking backing = ArenaBacking::kMemfd) {
  ArenaSpec spec{.run_id = id, .recipe_hash = "hash", .layout_hash = 77};
  for (const int64_t scale : {int64_t{1}, int64_t{2}}) {
    SlotLayout layout;
    for (const int64_t bytes : {int64_t{200}, 70000 * scale, int64_t{64}}) {
      const int64_t offset = (layout.bytes + 4095) / 4096 * 4096;
      layout.shards.push_back({0, 0, {}, offset, bytes});
      layout.bytes = offset + bytes;
    }
    layout.bytes = (layout.bytes + 4095) / 4096 * 4096;
    spec.ranks.push_back(layout);
  }
  spec.directory = "what lies here";
  spec.chunk_bytes = 16 << 10;
  spec.backing = backing;
  return spec;
}

std::vector<std::byte> content(int64_t rank, int64_t shard, int64_t step, int64_t bytes) {
  std::vector<std::byte> out(bytes);
  const uint64_t key = mix64(static_cast<uint64_t>(step * 1000 + rank * 10 + shard));
  for (int64_t i = 0; i < bytes; i += 8) {
    const uint64_t word = key + static_cast<uint64_t>(i);
    std::memcpy(out.data() + i, &word, std::min<int64_t>(8, bytes - i));
  }
  return out;
}

Status write_step(const Arena& arena, int64_t rank, int64_t slot, uint64_t incarnation, int64_t step) {
  std::vector<std::vector<std::byte>> memory;
  for (const arena::ShardExtent& extent : arena.shards(rank))
    memory.push_back(content(rank, std::ssize(memory), step, extent.bytes));
  const std::vector<std::span<const std::byte>> sources(memory.begin(), memory.end());
  return ckpt::testing::write_snapshot(arena, rank, slot, incarnation, step, fmt::format("position {}", step), sources);
}

/// Whether the snapshot's bytes are those of its step, on all ranks.
bool holds(const Arena& arena, const CommonSnapshot& snapshot) {
  if (snapshot.position != fmt::format("position {}", snapshot.step)) return false;
  for (int64_t rank = 0; rank < arena.world(); ++rank) {
    int64_t shard = 0;
    for (const arena::ShardExtent& extent : arena.shards(rank)) {
      const auto expected = content(rank, shard++, snapshot.step, extent.bytes);
      if (std::memcmp(arena.payload(rank, snapshot.slot).data() + extent.offset, expected.data(), expected.size()) != 0)
        return false;
    }
  }
  return true;
}

/// Runs `body` in a child and waits; its exit status.
int in_child(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool exists(const std::string& name) { return ::access(name.c_str(), F_OK) == 0; }

/// The segment's bytes in a segment of their own, of another length when asked.
Fd copy_of(std::span<const std::byte> bytes, int64_t length = -1) {
  Fd fd(memfd_create("copy", MFD_CLOEXEC));
  REQUIRE(ftruncate(fd.get(), length < 0 ? static_cast<int64_t>(bytes.size()) : length) == 0);
  const auto size = static_cast<size_t>(length < 0 ? bytes.size() : std::min<int64_t>(length, std::ssize(bytes)));
  REQUIRE(::pwrite(fd.get(), bytes.data(), size, 0) == static_cast<ssize_t>(size));
  return fd;
}

std::vector<std::byte> bytes_of(const Arena& arena) {
  std::vector<std::byte> out(arena.bytes());
  REQUIRE(::pread(arena.fd(), out.data(), out.size(), 0) == std::ssize(out));
  return out;
}

/// The header's own checksum, made good again after a change.
void rehash(std::vector<std::byte>& bytes) {
  auto* header = reinterpret_cast<arena::StaticHeader*>(bytes.data());
  if (header->static_bytes < static_cast<int64_t>(sizeof(arena::StaticHeader)) ||
      header->static_bytes > std::ssize(bytes))
    return;
  std::vector<std::byte> part(bytes.begin(), bytes.begin() + header->static_bytes);
  std::memset(part.data(), 0, 8);
  std::memset(part.data() + offsetof(arena::StaticHeader, static_hash), 0, 8);
  header->static_hash = hash_bytes(part);
}

}  // namespace

TEST_SUITE("ckpt/snapshot/arena") {
  TEST_CASE("an arena written by one process is read by another, by name and by descriptor") {
    Result<Arena> made = Arena::create(small_spec(run_id("share"), ArenaBacking::kNamed));
    REQUIRE_OK(made);
    Arena& arena = made.value();
    CHECK(arena.bytes() == Arena::total_bytes(small_spec(run_id("share"))));
    CHECK(exists(arena.name()));
    CHECK_FALSE(newest_verified(arena, Check::kEveryByte).has_value());
    CHECK(in_child([&] {
            const Result<Arena> mine = Arena::attach(arena.name());
            if (!mine.ok() || mine.value().directory() != "what lies here" || mine.value().layout_hash() != 77)
              return 1;
            if (mine.value().run_id() != arena.run_id()) return 2;
            return write_step(mine.value(), 0, 1, 3, 9).ok() ? 0 : 3;
          }) == 0);
    CHECK_FALSE(newest_verified(arena, Check::kEveryByte).has_value());  // rank 1 has not written
    const Result<Arena> second = Arena::attach_fd(arena.fd());
    REQUIRE(second.ok());
    REQUIRE(write_step(second.value(), 1, 1, 3, 9).ok());
    const auto found = newest_verified(arena, Check::kEveryByte);
    REQUIRE(found.has_value());
    CHECK((found->slot == 1 && found->incarnation == 3 && found->step == 9));
    CHECK(holds(arena, *found));

    const Result<Arena> twice = Arena::create(small_spec(run_id("share"), ArenaBacking::kNamed));
    CHECK_FALSE(twice.ok());
    const std::string name = arena.name();
    CHECK(arena.remove().ok());
    CHECK_FALSE(exists(name));
    const Result<Arena> gone = Arena::attach(name);
    REQUIRE_FALSE(gone.ok());
    CHECK(gone.error().code == ErrorCode::kUnavailable);
    CHECK(newest_verified(arena, Check::kEveryByte).has_value());  // who has it mapped keeps it
  }

  TEST_CASE("a segment is taken over or removed when its agent is dead, and only then") {
    const std::string dead_run = run_id("dead"), other_run = run_id("other"), live_run = run_id("live");
    const auto leave_behind = [](const std::string& id) {
      return in_child([&] {
        const Result<Arena> made = Arena::create(small_spec(id, ArenaBacking::kNamed));
        if (!made.ok()) return 1;
        for (const int64_t rank : {0, 1}) {
          if (!write_step(made.value(), rank, 0, 1, 5).ok()) return 2;
        }
        arena::Control& control = made.value().control();  // requests that are not the next agent's
        control.stop = control.stop_at_save = 1;
        control.stop_at_step = 7;
        control.saves_asked = 5;
        return 0;
      });
    };
    REQUIRE(leave_behind(dead_run) == 0);
    REQUIRE(leave_behind(other_run) == 0);
    Result<Arena> live = Arena::create(small_spec(live_run, ArenaBacking::kNamed));
    REQUIRE(live.ok());

    // From another process, the live one's agent is alive and holds the lock.
    CHECK(in_child([&] {
            const auto taken = Arena::adopt(live_run);
            return taken.ok() && !taken.value().has_value() ? 0 : 1;
          }) == 0);
    Result<std::optional<Arena>> taken = Arena::adopt(dead_run);
    REQUIRE_OK(taken);
    REQUIRE(taken.value().has_value());
    const arena::Control& control = taken.value()->control();
    CHECK(control.stop == 0);
    CHECK(control.stop_at_save == 0);
    CHECK(control.stop_at_step == 0);
    CHECK(control.saves_asked == control.saves_answered);
    const auto found = newest_verified(*taken.value(), Check::kEveryByte);
    REQUIRE(found.has_value());
    CHECK(found->step == 5);
    CHECK(holds(*taken.value(), *found));

    // Others' tests may leave some too.
    const auto find = [](const std::string& id) -> std::optional<StaleArena> {
      for (StaleArena& stale : stale_arenas()) {
        if (stale.run_id == id) return std::move(stale);
      }
      return std::nullopt;
    };
    CHECK_FALSE(find(live_run).has_value());  // this process lives
    CHECK_FALSE(find(dead_run).has_value());  // and has taken this one over
    const auto other = find(other_run);
    REQUIRE(other.has_value());
    CHECK(other->unsaved_step == 5);
    CHECK(other->bytes >= Arena::total_bytes(small_spec(other_run, ArenaBacking::kNamed)));
    {
      Result<Arena> theirs = Arena::attach(other->name);
      REQUIRE(theirs.ok());
      theirs.value().control().persisted_step.store(5);
    }
    CHECK(find(other_run).value().unsaved_step == 0);
    Result<std::optional<Arena>> theirs = Arena::adopt(other_run);
    REQUIRE((theirs.ok() && theirs.value().has_value()));
    CHECK_FALSE(remove_stale_arena(*other));  // somebody was faster
    CHECK(exists(theirs.value()->name()));
    CHECK(theirs.value()->remove().ok());
    CHECK(exists(live.value().name()));
    CHECK(exists(taken.value()->name()));
    CHECK(live.value().remove().ok());
    CHECK(taken.value()->remove().ok());
  }

  TEST_CASE("a segment whose agent lives where its process cannot be seen is nobody's to list, take over or remove") {
    const std::string id = run_id("elsewhere");
    Result<Arena> live = Arena::create(small_spec(id, ArenaBacking::kNamed));
    REQUIRE(live.ok());
    for (const int64_t rank : {0, 1}) REQUIRE(write_step(live.value(), rank, 0, 1, 5).ok());
    // As an agent in another pid namespace, a container with the same /dev/shm: no process here has its number.
    const std::string name = live.value().name(), seen = name.substr(0, name.rfind('-')) + "-1";
    REQUIRE(::rename(name.c_str(), seen.c_str()) == 0);
    const auto listed = [&] {
      const std::vector<StaleArena> stale = stale_arenas();
      return std::any_of(stale.begin(), stale.end(), [&](const StaleArena& one) { return one.run_id == id; });
    };
    CHECK_FALSE(listed());
    CHECK_FALSE(remove_stale_arena({.name = seen}));
    const auto taken = Arena::adopt(id);
    CHECK((taken.ok() && !taken.value().has_value()));
    live = Arena::create(small_spec(id, ArenaBacking::kMemfd));  // it dies
    CHECK(listed());
    CHECK(remove_stale_arena({.name = seen}));
  }

  TEST_CASE("a segment in a folder on a disk: shared, taken over and removed there, and never after another start") {
    const cairn::testing::TempDir dir("arena");
    const std::string folder = dir.path, id = run_id("disk");
    const auto spec_of = [&](const std::string& run) {
      ArenaSpec spec = small_spec(run, ArenaBacking::kNamed);
      spec.folder = folder;
      return spec;
    };
    const auto leave_behind = [&](const std::string& run) {
      return in_child([&] {
        const Result<Arena> made = Arena::create(spec_of(run));
        if (!made.ok() || !made.value().name().starts_with(folder + "/cairn-")) return 1;
        const Result<Arena> other = Arena::attach(made.value().name());
        if (!other.ok() || other.value().on_disk() != made.value().on_disk()) return 2;
        for (const int64_t rank : {0, 1}) {
          if (!write_step(other.value(), rank, 0, 1, 5).ok()) return 3;
        }
        return 0;
      });
    };
    REQUIRE(leave_behind(id) == 0);
    CHECK_FALSE(Arena::adopt(id).value().has_value());  // not in shared memory
    {
      Result<std::optional<Arena>> taken = Arena::adopt(id, folder);
      REQUIRE_OK(taken);
      REQUIRE(taken.value().has_value());
      const auto found = newest_verified(*taken.value(), Check::kEveryByte);
      REQUIRE(found.has_value());
      CHECK(holds(*taken.value(), *found));
      // As if the machine had been started since: nobody knows what the disk has of it.
      std::vector<std::byte> bytes = bytes_of(*taken.value());
      reinterpret_cast<arena::StaticHeader*>(bytes.data())->boot_id[0] ^= 1;
      rehash(bytes);
      const Fd other = copy_of(bytes);
      const Result<Arena> old = Arena::attach_fd(other.get());
      REQUIRE_FALSE(old.ok());
      CHECK(old.error().message.find("before this machine's last start") != std::string::npos);
      CHECK(old.error().code == ErrorCode::kCorrupt);
      CHECK(taken.value()->remove().ok());
    }
    REQUIRE(leave_behind(id) == 0);
    const std::vector<StaleArena> stale = stale_arenas(folder);
    REQUIRE(stale.size() == 1);
    CHECK(stale[0].run_id == id);
    {  // another machine's is neither taken over nor rubbish
      const Fd file(::open(stale[0].name.c_str(), O_RDWR | O_CLOEXEC));
      std::vector<std::byte> bytes(static_cast<size_t>(std::filesystem::file_size(stale[0].name)));
      REQUIRE(::pread(file.get(), bytes.data(), bytes.size(), 0) == std::ssize(bytes));
      const std::vector<std::byte> ours = bytes;
      auto& header = *reinterpret_cast<arena::StaticHeader*>(bytes.data());
      header.boot_id[0] ^= 1;
      header.machine_id[0] ^= 1;
      rehash(bytes);
      REQUIRE(::pwrite(file.get(), bytes.data(), bytes.size(), 0) == std::ssize(bytes));
      CHECK_FALSE(Arena::adopt(id, folder).value().has_value());
      REQUIRE(stale_arenas(folder).size() == 1);
      CHECK(stale_arenas(folder)[0].unread.find("of another machine") != std::string::npos);
      REQUIRE(::pwrite(file.get(), ours.data(), ours.size(), 0) == std::ssize(ours));
    }
    CHECK(remove_stale_arena(stale[0]));
    CHECK_FALSE(remove_stale_arena(stale[0]));
    CHECK(::rmdir(folder.c_str()) == 0);  // nothing is left
    const Result<Arena> nowhere = Arena::create(spec_of(id));
    REQUIRE_FALSE(nowhere.ok());
    CHECK(nowhere.error().code == ErrorCode::kInvalidInput);
    CHECK(nowhere.error().message.find(folder) != std::string::npos);
  }

  TEST_CASE("memory is no rubbish where it cannot be told from which start of the machine it is") {
    const std::string id = run_id("boot");
    REQUIRE(in_child([&] {
              const Result<Arena> made = Arena::create(small_spec(id, ArenaBacking::kNamed));
              if (!made.ok()) return 1;
              for (const int64_t rank : {0, 1}) {
                if (!write_step(made.value(), rank, 0, 1, 5).ok()) return 2;
              }
              return 0;
            }) == 0);
    const int found = in_child([&] {
      if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
          ::mount("/dev/null", "/proc/sys/kernel/random/boot_id", nullptr, MS_BIND, nullptr) != 0)
        return 64;
      const std::vector<StaleArena> stale = stale_arenas();
      const auto left = std::find_if(stale.begin(), stale.end(), [&](const StaleArena& one) {
        return one.unread.find("boot_id cannot be read") != std::string::npos;
      });
      if (left == stale.end()) return 1;  // it would be removed
      const Result<std::optional<Arena>> taken = Arena::adopt(id);
      return taken.ok() ? 2 : 0;  // and passed over
    });
    Result<std::optional<Arena>> taken = Arena::adopt(id);
    REQUIRE(taken.ok());
    REQUIRE(taken.value().has_value());
    CHECK(taken.value()->remove().ok());
    if (found == 64) {
      MESSAGE("skipped: this process may not mount");
      return;
    }
    CHECK(found == 0);
  }

  TEST_CASE("an arena of another build is neither removed as stale nor silently passed over") {
    const std::string id = run_id("newer");
    const int done = in_child([&] {
      Result<Arena> made = Arena::create(small_spec(id, ArenaBacking::kNamed));
      if (!made.ok()) return 1;
      for (const int64_t rank : {0, 1}) {
        if (!write_step(made.value(), rank, 0, 1, 5).ok()) return 2;
      }
      Fd fd(::open(made.value().name().c_str(), O_RDWR));
      const uint32_t newer = arena::kVersion + 1;
      return ::pwrite(fd.get(), &newer, sizeof(newer), offsetof(arena::StaticHeader, version)) == sizeof(newer) ? 0 : 3;
    });
    REQUIRE(done == 0);
    const Result<std::optional<Arena>> taken = Arena::adopt(id);
    REQUIRE_FALSE(taken.ok());
    CHECK(taken.error().code == ErrorCode::kUnsupported);
    CHECK_MESSAGE(taken.error().message.find("another build") != std::string::npos, taken.error().message);
    int64_t found = 0;
    for (const StaleArena& stale : stale_arenas()) {
      if (taken.error().message.find(stale.name) == std::string::npos) continue;
      ++found;
      CHECK_FALSE(stale.unread.empty());
      CHECK(remove_stale_arena(stale));
    }
    CHECK(found == 1);
  }

  TEST_CASE("an arena on a disk of another build waits for that build, unless the machine was started since") {
    const cairn::testing::TempDir dir("arena-newer");
    ArenaSpec spec = small_spec(run_id("old"), ArenaBacking::kNamed);
    spec.folder = dir.path;
    // 0: left, 1: something failed, 2: the folder lies in memory.
    const int done = in_child([&] {
      const Result<Arena> made = Arena::create(spec);
      if (!made.ok()) return 1;
      if (!made.value().on_disk()) return 2;
      const uint32_t newer = arena::kVersion + 1;
      const auto at = offsetof(arena::StaticHeader, version);
      return ::pwrite(made.value().fd(), &newer, sizeof(newer), at) == sizeof(newer) ? 0 : 1;
    });
    if (done == 2) {
      MESSAGE("skipped: the build tree lies in memory");
      return;
    }
    REQUIRE(done == 0);
    const Result<std::optional<Arena>> refused = Arena::adopt(spec.run_id, spec.folder);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnsupported);
    REQUIRE(stale_arenas(spec.folder).size() == 1);
    const std::string name = stale_arenas(spec.folder)[0].name;
    const timespec long_ago[2] = {{1'000'000'000, 0}, {1'000'000'000, 0}};
    REQUIRE(::utimensat(AT_FDCWD, name.c_str(), long_ago, 0) == 0);
    const Result<std::optional<Arena>> passed = Arena::adopt(spec.run_id, spec.folder);
    REQUIRE_OK(passed);
    CHECK_FALSE(passed.value().has_value());
    const Result<Arena> old = Arena::attach(name);
    REQUIRE_FALSE(old.ok());
    CHECK(old.error().code == ErrorCode::kCorrupt);
    CHECK(old.error().message.find("before this machine's last start") != std::string::npos);
  }

  TEST_CASE("huge pages are claimed where the mount gives them, and nowhere else") {
    const cairn::testing::TempDir dir("arena-huge");
    std::string force;
    std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/shmem_enabled"), force);
    const bool decided = force.find("[deny]") != std::string::npos || force.find("[force]") != std::string::npos;
    for (const char* options : {"size=64m", "size=64m,huge=never", "size=64m,huge=advise", "size=64m,huge=always"}) {
      CAPTURE(options);
      // 1: claimed, 2: some are there, 64: this process may not mount, 32: something else failed.
      const int found = in_child([&] {
        if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
            ::mount("tmpfs", dir.path.c_str(), "tmpfs", 0, options) != 0)
          return 64;
        ArenaSpec spec = small_spec(run_id("huge"), ArenaBacking::kNamed);
        spec.folder = dir.path.string();
        for (SlotLayout& layout : spec.ranks) {
          layout.shards[2] = {0, 0, {}, layout.bytes, 4 << 20};
          layout.bytes += 4 << 20;
        }
        const Result<Arena> arena = Arena::create(spec);
        if (!arena.ok()) return 32;
        int64_t pages = 0;
        std::ifstream smaps("/proc/self/smaps");
        for (std::string line; std::getline(smaps, line);) {
          if (line.starts_with("ShmemPmdMapped:")) pages += std::stoll(line.substr(15));
        }
        return (arena.value().huge_pages() ? 1 : 0) + (pages > 0 ? 2 : 0);
      });
      if (found == 64) {
        MESSAGE("skipped: this process may not mount");
        return;
      }
      CHECK(found != 32);
      CHECK(found != 2);
      if (!decided) CHECK((found & 1) == (std::string_view(options).find("huge=a") != std::string_view::npos ? 1 : 0));
    }
  }

  TEST_CASE("a spec that does not fit, and memory that is not there, are refused in words") {
    ArenaSpec spec = small_spec(run_id("bad"), ArenaBacking::kNamed);
    const auto refused = [](const ArenaSpec& bad, ErrorCode code, const char* words) {
      const Result<Arena> made = Arena::create(bad);
      REQUIRE_FALSE(made.ok());
      CHECK(made.error().code == code);
      CHECK_MESSAGE(made.error().message.find(words) != std::string::npos, made.error().message);
    };
    ArenaSpec bad = spec;
    bad.slots = 0;
    refused(bad, ErrorCode::kInvalidInput, "slots");
    bad = spec;
    bad.chunk_bytes = 1000;
    refused(bad, ErrorCode::kInvalidInput, "chunks");
    bad = spec;
    bad.chunk_bytes = int64_t{1} << 40;
    refused(bad, ErrorCode::kInvalidInput, "chunks");
    bad = spec;
    bad.ranks[1].shards[1].offset = 100;
    refused(bad, ErrorCode::kInvalidInput, "overlap");
    bad = spec;
    bad.ranks.clear();
    refused(bad, ErrorCode::kInvalidInput, "0 ranks");
    bad = spec;
    bad.run_id.assign(200, 'x');
    refused(bad, ErrorCode::kInvalidInput, "longer");
    bad = spec;
    bad.ranks[0].bytes = int64_t{1} << 50;  // a petabyte
    refused(bad, ErrorCode::kNoSpace, "are missing");
    bad.backing = ArenaBacking::kMemfd;
    refused(bad, ErrorCode::kNoSpace, "are missing");
    for (const StaleArena& stale : stale_arenas())  // nothing was begun
      CHECK(stale.name.find(hash_to_hex(hash_bytes(spec.run_id))) == std::string::npos);
    CHECK_FALSE(Arena::has_room(bad).ok());
    CHECK(Arena::has_room(bad, int64_t{1} << 60).ok());
  }

  // Goes on past 200 kills until enough of them fell inside a copy: how often they do depends on the machine.
  TEST_CASE("ranks killed at 200 random instants never lose the newest whole snapshot") {
    Result<Arena> made = Arena::create(small_spec(run_id("kill")));
    REQUIRE(made.ok());
    Arena& arena = made.value();
    int64_t last_step = 0, half_written = 0, advanced = 0;
    for (uint64_t kill = 0; kill < 200 || (kill < 5000 && (half_written <= 20 || advanced <= 20)); ++kill) {
      const uint64_t incarnation = kill + 1;
      const pid_t child = fork();
      if (child == 0) {
        for (int64_t step = last_step + 1;; ++step) {
          // One process plays both ranks, so that all have published a step when the next one's update begins.
          const std::vector<SlotView> views = arena.views();
          const auto slot = choose_slot(views, newest_whole(views).value_or(-1));
          for (const int64_t rank : {0, 1}) ignore(write_step(arena, rank, *slot, incarnation, step), "killed soon");
        }
      }
      ::usleep(static_cast<useconds_t>(mix64(kill) % 4000));
      ::kill(child, SIGKILL);
      int status = 0;
      waitpid(child, &status, 0);
      for (const int64_t slot : {0, 1, 2}) {
        for (const int64_t rank : {0, 1}) half_written += arena.mark(rank, slot).phase == SlotPhase::kWriting ? 1 : 0;
      }
      CAPTURE(kill);
      std::vector<std::string> problems;
      const auto found = newest_verified(arena, Check::kEveryByte, &problems);
      REQUIRE(problems.empty());  // what says it is whole is whole
      if (last_step > 0) REQUIRE(found.has_value());
      if (!found) continue;
      REQUIRE(found->step >= last_step);
      REQUIRE(holds(arena, *found));
      advanced += found->step > last_step ? 1 : 0;
      last_step = found->step;
    }
    MESSAGE("step " << last_step << " reached; " << advanced << " lives got further, " << half_written
                    << " slots were found half written");
    CHECK(advanced > 20);
    CHECK(half_written > 20);
  }

  TEST_CASE("damage in slots is noticed, and the snapshot before is found instead") {
    Result<Arena> made = Arena::create(small_spec(run_id("damage")));
    REQUIRE(made.ok());
    const Arena& arena = made.value();
    for (const int64_t rank : {0, 1}) {
      REQUIRE(write_step(arena, rank, 0, 1, 5).ok());
      REQUIRE(write_step(arena, rank, 1, 1, 6).ok());
    }
    const std::vector<std::byte> good = bytes_of(arena);
    int64_t fell_back = 0;
    for (uint64_t n = 0; n < 400; ++n) {
      const int64_t rank = static_cast<int64_t>(mix64(n) % 2);
      // Header, position, checksums and payload of slot 1, as bytes.
      std::byte* begin = reinterpret_cast<std::byte*>(&arena.slot_header(rank, 1));
      const auto sums = arena.sum_area(rank, 1);
      const int64_t head = reinterpret_cast<std::byte*>(sums.data() + sums.size()) - begin;
      const auto payload = arena.payload(rank, 1);
      const uint64_t where = mix64(n + 1000);
      std::byte* victim = n % 4 == 0   ? begin + where % sizeof(arena::SlotHeader)
                          : n % 4 == 1 ? begin + where % static_cast<uint64_t>(head)
                                       : payload.data() + where % payload.size();
      const std::byte before = *victim;
      *victim ^= static_cast<std::byte>(1u << (mix64(n + 5000) % 8));
      const auto found = newest_verified(arena, Check::kEveryByte);
      if (found) {
        REQUIRE(holds(arena, *found));
        fell_back += found->slot == 0 ? 1 : 0;
      }
      REQUIRE(found.has_value());  // slot 0 is untouched
      for (const int64_t slot : {0, 1})
        static_cast<void>(read_common(arena, slot, Check::kEveryByte));  // any answer will do
      *victim = before;
    }
    CHECK(fell_back > 150);  // the other bytes were padding
    CHECK(bytes_of(arena) == good);
  }

  TEST_CASE("damaged segments of any kind attach with an error or not at all, and never crash") {
    Result<Arena> made = Arena::create(small_spec(run_id("fuzz")));
    REQUIRE(made.ok());
    for (const int64_t rank : {0, 1}) REQUIRE(write_step(made.value(), rank, 0, 1, 5).ok());
    const std::vector<std::byte> good = bytes_of(made.value());
    const int64_t static_bytes = reinterpret_cast<const arena::StaticHeader*>(good.data())->static_bytes;
    const auto look = [](const Fd& fd) {
      const Result<Arena> arena = Arena::attach_fd(fd.get());
      if (!arena.ok()) {
        CHECK((arena.error().code == ErrorCode::kCorrupt ||
               arena.error().message.find("another build's") != std::string::npos));
        return false;
      }
      static_cast<void>(newest_verified(arena.value(), Check::kEveryByte));
      for (int64_t slot = 0; slot < arena.value().slots(); ++slot)
        static_cast<void>(read_common(arena.value(), slot, Check::kEveryByte));
      return true;
    };
    REQUIRE(look(copy_of(good)));
    for (uint64_t n = 0; n < 60; ++n) CHECK_FALSE(look(copy_of(good, static_cast<int64_t>(mix64(n) % good.size()))));
    // Words that say something: entries of ranks have room for more slots than there are.
    std::vector<uint64_t> words;
    for (uint64_t word = 0; word < static_cast<uint64_t>(static_bytes) / 8; ++word) {
      const uint64_t entry = word * 8 - sizeof(arena::StaticHeader), in_entry = entry % sizeof(arena::RankEntry);
      const bool of_rank = word * 8 >= sizeof(arena::StaticHeader) && entry < 2 * sizeof(arena::RankEntry);
      const uint64_t slot = in_entry < offsetof(arena::RankEntry, payload_offset)
                                ? in_entry - offsetof(arena::RankEntry, header_offset)
                                : in_entry - offsetof(arena::RankEntry, payload_offset);
      const bool of_slot = of_rank && in_entry >= offsetof(arena::RankEntry, header_offset);
      if (!of_slot || slot / 8 < static_cast<uint64_t>(made.value().slots())) words.push_back(word);
    }
    int64_t refused = 0, accepted = 0;
    for (uint64_t n = 0; n < 300; ++n) {
      std::vector<std::byte> bytes = good;
      // A field of the header or the tables takes a value meant to hurt, and the checksum agrees.
      const uint64_t at = words[n < words.size() ? n : mix64(n) % words.size()];
      constexpr int64_t kValues[] = {0, -1, INT64_MAX, INT64_MIN, 1, int64_t{1} << 40, 4097, -4096};
      int64_t value = kValues[mix64(n + 7) % std::size(kValues)];
      if (n % 3 == 0) {
        std::memcpy(&value, good.data() + at * 8, 8);
        value ^= int64_t{1} << (mix64(n + 9) % 63);
      }
      std::memcpy(bytes.data() + at * 8, &value, 8);
      rehash(bytes);
      (look(copy_of(bytes)) ? accepted : refused) += 1;
    }
    CHECK(refused > 100);
    CHECK(accepted > 0);  // a run id is free text
  }

  TEST_CASE("an arena of some ranks has their slots alone, and describes those of the world") {
    ArenaSpec spec = small_spec(run_id("part"), ArenaBacking::kNamed);
    const auto world = static_cast<int64_t>(spec.ranks.size());
    REQUIRE(world == 2);
    const int64_t all_bytes = Arena::total_bytes(spec);
    spec.here = RankRange{1, 2};
    CHECK(Arena::total_bytes(spec) < all_bytes);
    Arena made = Arena::create(spec).value();
    const Arena arena = Arena::attach(made.name()).value();
    CHECK(arena.world() == world);
    CHECK(arena.ranks() == RankRange{1, 2});
    CHECK_FALSE(arena.has_world());
    CHECK(arena.shards(0).size() == spec.ranks[0].shards.size());
    CHECK(arena.rank_of_file() == Arena::create(small_spec(run_id("whole"))).value().rank_of_file());

    REQUIRE(write_step(arena, 1, 0, 1, 5).ok());
    CHECK(arena.views()[0].whole);
    CHECK(arena.views()[0].step == 5);
    const std::optional<CommonSnapshot> newest = newest_verified(arena, Check::kEveryByte);
    REQUIRE(newest.has_value());
    CHECK(newest->ranks.size() == 1);
    // A bank that is another host's is never read for one that is empty: the process ends.
    const auto dies = [](const std::function<void()>& body) {
      return in_child([&] {
               ::close(STDERR_FILENO);
               ::signal(SIGABRT, SIG_DFL);  // doctest would tell of it
               body();
               return 7;
             }) != 7;
    };
    CHECK(dies([&] { static_cast<void>(arena.payload(0, 0)); }));
    CHECK(dies([&] { static_cast<void>(arena.weights(0)); }));
    CHECK(dies([&] { static_cast<void>(arena.mark(0, 0)); }));
    CHECK_FALSE(dies([&] { static_cast<void>(arena.payload(1, 0)); }));
    made.invalidate_slot(0);
    CHECK_FALSE(arena.views()[0].whole);

    const auto refused = [&](const std::function<void(arena::RankEntry*, arena::StaticHeader&)>& damage) {
      std::vector<std::byte> bytes = bytes_of(made);
      auto& header = *reinterpret_cast<arena::StaticHeader*>(bytes.data());
      damage(reinterpret_cast<arena::RankEntry*>(bytes.data() + sizeof(arena::StaticHeader)), header);
      rehash(bytes);
      const Fd fd = copy_of(bytes);
      return !Arena::attach_fd(fd.get()).ok();
    };
    CHECK_FALSE(refused([](arena::RankEntry*, arena::StaticHeader&) {}));
    CHECK(refused([](arena::RankEntry*, arena::StaticHeader& header) { header.version = arena::kVersion; }));
    CHECK(refused([](arena::RankEntry* ranks, arena::StaticHeader&) { ranks[0].payload_offset[0] = kPageBytes; }));
    CHECK(refused([](arena::RankEntry* ranks, arena::StaticHeader&) { ranks[0].payload_bytes = 8; }));
    CHECK(refused([](arena::RankEntry* ranks, arena::StaticHeader&) { ranks[1].header_offset[0] = 0; }));
    ignore(made.remove(), "end of the test");

    spec.here = RankRange{1, 3};
    CHECK(Arena::create(spec).error().code == ErrorCode::kInvalidInput);
    spec.here = RankRange{1, 1};
    CHECK(Arena::create(spec).error().code == ErrorCode::kInvalidInput);
  }
}
