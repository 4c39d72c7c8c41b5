#include "ckpt/snapshot/prepared_memory.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "ckpt/snapshot/arena.h"
#include "tests/ckpt/plan/layouts.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

struct stat stat_of(int fd) {
  struct stat out {};
  REQUIRE(::fstat(fd, &out) == 0);
  return out;
}

/// Of this size, with a name: others may use the folder meanwhile.
int64_t files_of(int64_t bytes) {
  int64_t out = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kSharedMemory)) {
    std::error_code gone;
    out += entry.file_size(gone) == static_cast<uintmax_t>(bytes) && !gone ? 1 : 0;
  }
  return out;
}

ArenaSpec spec_of(const std::string& run_id) {
  const Plan plan = ckpt::testing::plan_of({1, 1, 2}, true);
  return {.run_id = run_id, .recipe_hash = "r", .ranks = slot_layouts(plan)};
}

std::shared_ptr<PreparedMemory> prepared(int64_t bytes, const std::function<bool()>& stop = {}) {
  auto made = PreparedMemory::make(kSharedMemory, bytes, false, stop);
  REQUIRE_OK(made);
  return std::make_shared<PreparedMemory>(std::move(made).value());
}

}  // namespace

TEST_SUITE("ckpt/snapshot/prepared_memory") {
  TEST_CASE("an arena is made of the memory that is ready, whether that is larger or smaller") {
    const std::string run_id = "prepared-" + std::to_string(::getpid());
    const int64_t needed = Arena::total_bytes(spec_of(run_id));
    for (const int64_t bytes : {needed, needed + (3 << 20), needed / 8192 * 4096}) {
      CAPTURE(bytes);
      ArenaSpec spec = spec_of(run_id);
      spec.prepared = prepared(bytes);
      CHECK(files_of(bytes) == 0);  // it has no name
      CHECK(spec.prepared->bytes() == bytes);
      const std::string probe = std::string(kSharedMemory) + "/" + run_id + "-probe";
      ino_t node = 0;
      {
        auto other = prepared(bytes);  // as the same would look with a name
        const Fd fd = other->take(probe);
        REQUIRE(fd);
        node = stat_of(fd.get()).st_ino;
        CHECK(stat_of(fd.get()).st_blocks * 512 >= bytes);
        CHECK(other->bytes() == 0);
        CHECK_FALSE(other->take(probe + "-again"));
        std::filesystem::remove(probe);
      }
      auto arena = Arena::create(spec);
      REQUIRE_OK(arena);
      CHECK(spec.prepared->bytes() == 0);
      CHECK(arena.value().bytes() == needed);
      const struct stat of = stat_of(arena.value().fd());
      CHECK(of.st_size == needed);
      CHECK(of.st_blocks * 512 >= needed);
      CHECK(of.st_nlink == 1);
      CHECK(of.st_ino != node);
      for (const SlotView& view : arena.value().views()) CHECK_FALSE(view.whole);
      CHECK(Arena::attach(arena.value().name()).ok());
      REQUIRE_OK(arena.value().remove());
      CHECK(files_of(needed) == 0);
    }
  }

  TEST_CASE("what is not wanted any more is stopped, and a folder on a disk is refused") {
    int64_t asked = 0;
    const auto stopped = PreparedMemory::make(kSharedMemory, int64_t{1} << 30, false, [&] { return ++asked > 1; });
    REQUIRE_FALSE(stopped.ok());
    CHECK(stopped.error().code == ErrorCode::kStopped);
    CHECK(asked == 2);
  }
}
