#include "ckpt/snapshot/memory_room.h"

#include <doctest/doctest.h>

#include <fstream>

#include "tests/support/temp_dir.h"

using namespace cairn::ckpt;
namespace fs = std::filesystem;

namespace {

/// Files as /proc and /sys/fs/cgroup have them.
struct Machine {
  const cairn::testing::TempDir dir{"memory-room"};

  void write(const fs::path& path, const char* text) const {
    fs::create_directories((dir.path / path).parent_path());
    std::ofstream(dir.path / path) << text;
  }
  int64_t room(int64_t freed = 0) const { return available_memory(freed, dir.path / "proc", dir.path / "groups"); }
};

}  // namespace

TEST_SUITE("ckpt/snapshot/memory_room") {
  TEST_CASE_FIXTURE(Machine, "the least of what the machine and the control groups leave") {
    CHECK(room() == INT64_MAX);
    write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    1000 kB\nSwapFree: 24 kB\n");
    CHECK(room() == 1024 * 1024);
    write("proc/self/cgroup", "4:memory:/\n1:cpu:/\n0::/job/step\n");
    CHECK(room() == 1024 * 1024);
    write("groups/job/step/memory.max", "max\n");
    write("groups/job/step/memory.current", "5000\n");
    CHECK(room() == 1024 * 1024);
    write("groups/job/memory.max", "900000\n");
    write("groups/job/memory.current", "500000\n");
    CHECK(room() == 400'000);
    write("groups/job/memory.stat", "anon 100\ninactive_file 30000\nactive_file 20000\n");
    CHECK(room() == 450'000);
    CHECK(room(200'000) == 450'000);  // shared memory that counts in another group frees nothing in this one
    write("groups/job/memory.stat", "anon 100\ninactive_file 30000\nactive_file 20000\nshmem 60000\n");
    CHECK(room() == 450'000);
    CHECK(room(50'000) == 500'000);
    CHECK(room(200'000) == 510'000);
    write("groups/memory/memory.limit_in_bytes", "300000\n");
    write("groups/memory/memory.usage_in_bytes", "100000\n");
    write("groups/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 7000\n");
    CHECK(room() == 207'000);
    write("groups/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 7000\nshmem 9000\ntotal_shmem 2000\n");
    CHECK(room(5'000) == 209'000);
    write("groups/memory/memory.usage_in_bytes", "400000\n");
    CHECK(room() == 0);
  }

  TEST_CASE_FIXTURE(Machine,
                    "page cache that came after the sum of what is used was read leaves a group its whole limit") {
    write("proc/meminfo", "MemAvailable: 1000 kB\n");
    write("proc/self/cgroup", "4:memory:/a\n");
    write("groups/memory/a/memory.usage_in_bytes", "100000\n");
    write("groups/memory/a/memory.stat", "total_inactive_file 90000\ntotal_active_file 20000\n");
    write("groups/memory/a/memory.limit_in_bytes", "9223372036854771712\n");  // v1's word for no limit
    CHECK(room() == 1000 * 1024);
    write("groups/memory/a/memory.limit_in_bytes", "300000\n");
    CHECK(room() == 300'000);
  }
}
