#include "runtime/core/cgroup.h"

#include <doctest/doctest.h>
#include <sched.h>

#include <algorithm>
#include <string>

#include "tests/support/temp_dir.h"
#include "tests/support/write_text.h"

using namespace cairn;
using cairn::testing::TempDir;
using cairn::testing::write_text;

TEST_SUITE("runtime/core/cgroup") {
  TEST_CASE("a cgroup is read by version 2, by version 1, and at the root of a container's mount") {
    const TempDir dir("cgroup");
    write_text(dir.path / "self2", "0::/a/b\n");
    write_text(dir.path / "v2/a/b/memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 9\n");
    write_text(dir.path / "v2/a/b/memory.peak", "1000\n");
    write_text(dir.path / "v2/a/b/memory.max", "max\n");
    write_text(dir.path / "v2/a/b/cpu.stat", "usage_usec 5\nnr_throttled 2\nthrottled_usec 77\n");
    const Cgroup two(dir.path / "v2", dir.path / "self2");
    CHECK(two.oom_kills() == 3);
    CHECK(two.memory_peak_bytes() == 1000);
    CHECK(two.memory_limit_bytes() == -1);
    CHECK(two.throttled_us() == 77);

    write_text(dir.path / "self1", "7:cpu,cpuacct:/c\n4:memory:/m\n0::/\n");
    write_text(dir.path / "v1/memory/m/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n");
    write_text(dir.path / "v1/memory/m/memory.max_usage_in_bytes", "2000\n");
    write_text(dir.path / "v1/memory/m/memory.limit_in_bytes", "4096\n");
    write_text(dir.path / "v1/cpu/c/cpu.stat", "nr_periods 1\nthrottled_time 9000\n");
    const Cgroup one(dir.path / "v1", dir.path / "self1");
    CHECK(one.oom_kills() == 5);
    CHECK(one.memory_peak_bytes() == 2000);
    CHECK(one.memory_limit_bytes() == 4096);
    CHECK(one.throttled_us() == 9);

    write_text(dir.path / "v2/memory.events", "oom_kill 8\n");
    write_text(dir.path / "self3", "0::/docker/of-the-host\n");
    CHECK(Cgroup(dir.path / "v2", dir.path / "self3").oom_kills() == 8);
    CHECK_FALSE(Cgroup(dir.path / "none", dir.path / "none").oom_kills().has_value());
    CHECK_FALSE(Cgroup(dir.path / "none", dir.path / "none").throttled_us().has_value());
  }

  TEST_CASE("the least limit of processor time counts, of this group and of those above it") {
    const TempDir dir("cgroup-cpu");
    const auto two = [&](const std::string& self) {
      write_text(dir / "self", "0::" + self + "\n");
      return Cgroup(dir / "v2", dir / "self").cpu_limit();
    };
    write_text(dir / "v2/pods/pod/cpu.max", "400000 100000\n");
    write_text(dir / "v2/pods/pod/box/cpu.max", "max 100000\n");
    write_text(dir / "v2/pods/wide/cpu.max", "max 100000\n");
    CHECK(two("/pods/pod/box") == 4.0);
    CHECK(two("/pods/pod") == 4.0);
    CHECK_FALSE(two("/pods/wide").has_value());
    CHECK_FALSE(two("/").has_value());
    write_text(dir / "v2/pods/pod/box/cpu.max", "50000 100000\n");
    CHECK(two("/pods/pod/box") == 0.5);
    write_text(dir / "v2/cpu.max", "25000 100000\n");  // the mount's root is a container's own group
    CHECK(two("/pods/pod/box") == 0.25);
    CHECK(two("/docker/of-the-host") == 0.25);
    CHECK(two("/docker/of-the-host/pods/pod/box") == 0.25);
    CHECK(two("/../beside") == 0.25);
    write_text(dir / "v2/cpu.max", "words\n");
    CHECK(two("/docker/of-the-host/pods/pod") == 4.0);

    const auto one = [&](const char* top, const std::string& line) {
      write_text(dir / "self", line + "\n");
      return Cgroup(dir / top, dir / "self").cpu_limit();
    };
    write_text(dir / "v1/cpu/a/cpu.cfs_quota_us", "150000\n");
    write_text(dir / "v1/cpu/a/cpu.cfs_period_us", "100000\n");
    write_text(dir / "v1/cpu/a/b/cpu.cfs_quota_us", "-1\n");
    write_text(dir / "v1/cpu/a/b/cpu.cfs_period_us", "100000\n");
    CHECK(one("v1", "7:cpu,cpuacct:/a/b") == 1.5);
    CHECK_FALSE(one("v1", "7:memory:/a/b").has_value());
    write_text(dir / "v1b/cpu,cpuacct/cpu.cfs_quota_us", "300000\n");
    write_text(dir / "v1b/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    CHECK(one("v1b", "7:cpu,cpuacct:/docker/abc") == 3.0);
  }

  TEST_CASE("threads are bounded by the limit, rounded up, and never by less than one") {
    const TempDir dir("cgroup-threads");
    write_text(dir / "self", "0::/a\n");
    const auto cpus = [&](const std::string& max) {
      write_text(dir / "v2/a/cpu.max", max + "\n");
      return usable_cpus(Cgroup(dir / "v2", dir / "self"));
    };
    cpu_set_t set;
    REQUIRE(::sched_getaffinity(0, sizeof set, &set) == 0);
    const int64_t cores = CPU_COUNT(&set);
    CHECK(cpus("max 100000") == cores);
    CHECK(cpus("100000000 100000") == cores);
    CHECK(cpus("1000 100000") == 1);
    CHECK(cpus("100000 100000") == 1);
    CHECK(cpus("110000 100000") == std::min<int64_t>(cores, 2));
  }
}
