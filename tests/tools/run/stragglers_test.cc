// Who computes longer than the others, and why.
#include "tools/run/agent/stragglers.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/temp_dir.h"
#include "tests/support/write_text.h"

using namespace cairn;
using namespace cairn::tools;
using cairn::testing::TempDir;
using cairn::testing::write_text;

namespace {

/// All ranks tell of blocks `first` to `last`, in which each takes what `ms` says.
template <typename Ms>
void tell(Stragglers& all, int64_t ranks, int64_t first, int64_t last, const Ms& ms) {
  for (int64_t block = first; block <= last; ++block) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const double took = ms(rank, block);
      all.add(rank, {block * telemetry::kPaceSteps, took}, {.throttled = rank == 2 ? 0.5 : 0});
    }
  }
}

}  // namespace

TEST_SUITE("tools/run/stragglers") {
  TEST_CASE("a rank that takes longer than the others of its stage is told of once, and again when it is over") {
    Stragglers all({0, 0, 0, 0});
    CHECK(all.judge(0).empty());
    const auto slow = [](int64_t rank, int64_t) { return rank == 2 ? 16.0 : 10.0 + static_cast<double>(rank) / 10; };
    CHECK_FALSE(all.slowest());
    tell(all, 4, 1, 4, slow);
    CHECK(all.judge(1).empty());  // too short a time
    REQUIRE(all.slowest());
    CHECK(all.slowest()->rank == 2);
    CHECK(all.slowest()->ratio == doctest::Approx(16 / 10.1).epsilon(0.02));
    const auto news = all.judge(5);
    REQUIRE(news.size() == 1);
    CHECK(news[0].rank == 2);
    CHECK_FALSE(news[0].over);
    CHECK(news[0].ratio == doctest::Approx(16 / 10.1).epsilon(0.02));
    CHECK(news[0].step == 80);
    CHECK(news[0].load.throttled == 0.5);
    REQUIRE(all.slowest());  // of the window before
    CHECK(all.slowest()->rank == 2);
    tell(all, 4, 5, 8, slow);
    CHECK(all.judge(10).empty());
    CHECK(all.judge(20).empty());  // no block has come
    tell(all, 4, 9, 12, [](int64_t, int64_t) { return 10.0; });
    const auto over = all.judge(30);
    REQUIRE(over.size() == 1);
    CHECK(over[0].over);
    CHECK(over[0].rank == 2);
    CHECK_FALSE(all.slowest());
  }

  TEST_CASE("a cause that shows later, or a weightier one, is told once more, of the mean over the window") {
    Stragglers all({0, 0});
    CHECK(all.judge(0).empty());
    double now = 0;
    const auto window = [&](const agent::HostLoad& first, const agent::HostLoad& second) {
      const int64_t step = static_cast<int64_t>(now) * 100 + 20;
      for (const int64_t rank : {0, 1}) {
        all.add(rank, {step, rank == 1 ? 20.0 : 10.0}, rank == 1 ? first : agent::HostLoad{});
        all.add(rank, {step + 20, rank == 1 ? 20.0 : 10.0}, rank == 1 ? second : agent::HostLoad{});
      }
      return all.judge(now += 4);
    };
    REQUIRE(window({}, {}).size() == 1);
    CHECK(window({}, {}).empty());
    REQUIRE(window({.delayed = 0.4}, {.delayed = 0.4}).size() == 1);
    CHECK(window({.delayed = 0.9}, {.delayed = 0.9}).empty());
    const auto told = window({.throttled = 0}, {.throttled = 0.6});
    REQUIRE(told.size() == 1);
    CHECK_FALSE(told[0].over);
    CHECK(told[0].load.throttled == doctest::Approx(0.3));
    CHECK(window({.delayed = 0.9}, {.delayed = 0.9}).empty());
  }

  TEST_CASE("noise, other work of another stage, and a single rank are no stragglers") {
    Stragglers noisy({0, 0, 0, 0});
    CHECK(noisy.judge(0).empty());
    tell(noisy, 4, 1, 8, [](int64_t rank, int64_t block) { return rank == block % 4 ? 20.0 : 10.0; });
    CHECK(noisy.judge(5).empty());
    Stragglers stages({0, 0, 1, 1});
    CHECK(stages.judge(0).empty());
    tell(stages, 4, 1, 8, [](int64_t rank, int64_t) { return rank >= 2 ? 30.0 : 10.0; });
    CHECK(stages.judge(5).empty());
    Stragglers alone({0, 1});
    CHECK(alone.judge(0).empty());
    tell(alone, 2, 1, 8, [](int64_t rank, int64_t) { return rank == 1 ? 30.0 : 10.0; });
    CHECK(alone.judge(5).empty());
  }

  TEST_CASE("of two ranks the slower one, of two hosts of two all ranks of the slower host") {
    Stragglers two({0, 0});
    CHECK(two.judge(0).empty());
    tell(two, 2, 1, 4, [](int64_t rank, int64_t) { return rank == 0 ? 30.0 : 10.0; });
    REQUIRE(two.judge(5).size() == 1);
    Stragglers four({0, 0, 0, 0});
    CHECK(four.judge(0).empty());
    tell(four, 4, 1, 4, [](int64_t rank, int64_t) { return rank >= 2 ? 30.0 : 10.0; });
    const auto news = four.judge(5);
    REQUIRE(news.size() == 2);
    CHECK(news[0].rank == 2);
    CHECK(news[1].rank == 3);
  }

  TEST_CASE("ranks that are not there, and blocks that some rank never tells of, are borne") {
    Stragglers all({0, 0});
    all.add(7, {20, 1}, {});
    all.add(-1, {20, 1}, {});
    for (int64_t block = 1; block < 2000; ++block) all.add(0, {block * 20, 1}, {});
    CHECK(all.judge(0).empty());
    CHECK(all.judge(10).empty());
    tell(all, 2, 3000, 3004, [](int64_t rank, int64_t) { return rank == 1 ? 3.0 : 1.0; });
    CHECK(all.judge(20).size() == 1);
    all.clear();
    CHECK(all.judge(30).empty());
  }

  TEST_CASE("steps make a block at the same places on all ranks, wherever a start begins") {
    telemetry::PaceMeter meter;
    for (int64_t step = 5; step <= 20; ++step) CHECK_FALSE(meter.add(step, 1).has_value());
    for (int64_t step = 21; step < 40; ++step) CHECK_FALSE(meter.add(step, static_cast<double>(step)).has_value());
    const auto pace = meter.add(40, 40);
    REQUIRE(pace.has_value());
    CHECK(pace->step == 40);
    CHECK(pace->ms == 29.5);  // of 21 to 38
  }

  TEST_CASE("the cause: a CPU limit, a slow clock, other work, or nothing that is to be seen") {
    using agent::SlowCause;
    CHECK(agent::cause_of({.throttled = 0.6, .delayed = 0.5}) == SlowCause::kThrottled);
    CHECK(agent::cause_of({.delayed = 0.5, .mhz = 1200, .full_mhz = 3000}) == SlowCause::kClock);
    CHECK(agent::cause_of({.delayed = 0.5, .mhz = 2900, .full_mhz = 3000}) == SlowCause::kLoad);
    CHECK(agent::cause_of({}) == SlowCause::kUnknown);
    CHECK(std::string(agent::slow_cause_name(SlowCause::kThrottled)) == "throttled");
    CHECK(agent::cause_text({.throttled = 0.58}) == "a CPU limit stopped its cgroup for 58% of the time");
    const agent::HostLoad load{.throttled = 0.25, .delayed = 0.5, .runnable = 3.5, .cores = 8, .mhz = 1, .full_mhz = 2};
    const agent::HostLoad read = agent::host_load_from_json(to_json(load));
    CHECK(read.throttled == 0.25);
    CHECK(read.cores == 8);
    CHECK(read.full_mhz == 2);
    CHECK(agent::host_load_from_json(nlohmann::json("x")).cores == 0);
    CHECK(agent::host_load_from_json({{"cores", -1e300}, {"delayed", "x"}}).cores == 0);
  }

  TEST_CASE("a host's load is measured from one look to the next") {
    const TempDir dir("load");
    write_text(dir.path / "self", "0::/\n");
    write_text(dir.path / "cg/cpu.stat", "throttled_usec 1000000\n");
    write_text(dir.path / "proc/loadavg", "2.50 1.00 1.00 1/100 5\n");
    write_text(dir.path / "proc/9/task/9/schedstat", "5 1000000000 1\n");
    write_text(dir.path / "proc/9/task/10/schedstat", "5 0 1\n");
    write_text(dir.path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "1000000\n");
    write_text(dir.path / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "3000000\n");
    agent::HostLoadMeter meter(Cgroup(dir.path / "cg", dir.path / "self"), dir.path / "proc", dir.path / "sys");
    CHECK(meter.measure(9, 1'000'000'000).throttled == 0);  // since when is not known
    write_text(dir.path / "cg/cpu.stat", "throttled_usec 2000000\n");
    write_text(dir.path / "proc/9/task/9/schedstat", "5 1400000000 1\n");
    write_text(dir.path / "proc/9/task/11/schedstat", "5 9000000000 1\n");  // a thread that is new
    const agent::HostLoad load = meter.measure(9, 3'000'000'000);
    CHECK(load.throttled == doctest::Approx(0.5));
    CHECK(load.delayed == doctest::Approx(0.2));
    CHECK(load.runnable == 2.5);
    CHECK(load.mhz == 1000);
    CHECK(load.full_mhz == 3000);
    CHECK(meter.measure(4711, 4'000'000'000).delayed == 0);
  }
}
