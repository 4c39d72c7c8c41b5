// A host's measurements: a process each, which is gone when it is stopped or nobody wants it any more.
#include "tools/run/host_checker.h"

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
using nlohmann::json;

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
        HostChecker checker({.tell = [](const json&) {}, .publish = [](int64_t, const auto&, const auto&) {}}, program);
        checker.start({{"round", k}});
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        checker.stop();
      });
      REQUIRE_MESSAGE(ended.wait_for(std::chrono::seconds(20)) == std::future_status::ready, "hangs in round ", k);
    }
  }

  TEST_CASE("what is stopped, and what takes longer than its limit, is told as ended") {
    const TempDir dir;
    std::promise<json> first, second;
    HostChecker checker({.tell =
                             [&](json event) {
                               if (event["round"] == 1)
                                 first.set_value(std::move(event));
                               else
                                 second.set_value(std::move(event));
                             },
                         .publish = [](int64_t, const auto&, const auto&) {}},
                        slow_program(dir));
    checker.start({{"round", 1}});
    checker.stop();
    CHECK(first.get_future().get() == json{{"event", "ended"}, {"round", 1}, {"failed", ""}});
    checker.start({{"round", 2}, {"limit_s", 0.05}});
    CHECK(second.get_future().get() == json{{"event", "ended"}, {"round", 2}, {"failed", ""}});
  }
}
