// A host's measurements: a process each, which is gone when it is stopped or nobody wants it any more.
#include "tools/run/check/host_checker.h"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <chrono>
#include <fstream>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::tools;
using cairn::testing::TempDir;
using hosts::Measured;

namespace {

/// A program that measures for half a minute.
std::string slow_program(const TempDir& dir) {
  const std::string path = dir.path / "slow";
  std::ofstream(path) << "#!/bin/sh\nexec sleep 30\n";
  REQUIRE(::chmod(path.c_str(), 0755) == 0);
  return path;
}

}  // namespace

TEST_SUITE("tools/run/host_checker") {
  TEST_CASE("a checker that is told to stop and is dropped at once ends, and its process with it") {
    const TempDir dir;
    const std::string program = slow_program(dir);
    for (int k = 0; k < 30; ++k) {
      auto ended = std::async(std::launch::async, [&] {
        HostChecker checker({.tell = [](const Measured&) {}, .publish = [](const hosts::PutMeasured&) {}}, program);
        checker.start({.round = k});
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        checker.stop();
      });
      REQUIRE_MESSAGE(ended.wait_for(std::chrono::seconds(20)) == std::future_status::ready, "hangs in round ", k);
    }
  }

  TEST_CASE("what is stopped, and what takes longer than its limit, is told as ended") {
    const TempDir dir;
    std::promise<Measured> first, second;
    HostChecker checker({.tell = [&](Measured what) { (what.round == 1 ? first : second).set_value(std::move(what)); },
                         .publish = [](const hosts::PutMeasured&) {}},
                        slow_program(dir));
    checker.start({.round = 1});
    checker.stop();
    CHECK(std::get<Measured::Ended>(first.get_future().get().what).failed.empty());
    checker.start({.round = 2, .limit_s = 0.05});
    CHECK(std::get<Measured::Ended>(second.get_future().get().what).failed.empty());
  }

  TEST_CASE("a checker passes on the results of its process with their round, and reports lines that are none") {
    const TempDir dir;
    const std::string path = dir.path / "talks";
    std::ofstream(path) << R"(#!/bin/sh
test "$1 $2" = '_measure --order' || exit 1
test "$3" = '{"address":"a","dtype":"fp32","folder":"/f","kernel_level":2,"limit_s":20.0,"round":7,"self":1}' || exit 2
printf '%s\n' '{"event":"reach","host":2,"failed":""}' 'no JSON' '{"event":"reach","host":2}' > "/proc/self/fd/$CAIRN_EVENT_FD"
)";
    REQUIRE(::chmod(path.c_str(), 0755) == 0);
    std::vector<Measured> all;
    std::promise<void> ended;
    HostChecker checker({.tell =
                             [&](Measured what) {
                               all.push_back(std::move(what));
                               if (std::holds_alternative<Measured::Ended>(all.back().what)) ended.set_value();
                             },
                         .publish = [](const hosts::PutMeasured&) {}},
                        path);
    checker.start({7, 1, "a", 2, "fp32", "/f", 20});
    ended.get_future().wait();
    REQUIRE(all.size() == 3);
    for (const Measured& one : all) CHECK(one.round == 7);
    CHECK(std::get<Measured::Reach>(all[0].what).host == 2);
    CHECK(std::get<Measured::Failed>(all[1].what).message == "`measured`: no field `failed`");
    CHECK(std::get<Measured::Ended>(all[2].what).failed.empty());
  }
}
