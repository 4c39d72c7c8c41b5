#include "tools/run/agent/helper.h"

#include <doctest/doctest.h>

#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::tools;

TEST_SUITE("tools/run/helper") {
  TEST_CASE("a helper that died starts again within a second once the run ends") {
    const cairn::testing::TempDir dir("helper");
    bool died = false;
    std::string not_started;
    Helper helper({.words = {"--no-run"},  // of this test program: it leaves with 0 at once
                   .log = dir / "helper.log",
                   .take = [](const nlohmann::json&) {},
                   .not_started = [&](const std::string& why) { not_started = why; },
                   .died = [&](const std::string&, const std::vector<std::string>&) { died = true; }});
    const auto begin = std::chrono::steady_clock::now();
    const auto passed = [&] {
      return std::chrono::steady_clock::now() - begin > std::chrono::seconds(60) ? Hurry::kTimeLimit : Hurry::kNone;
    };
    const auto until = [&](const std::function<bool()>& done) {
      const auto poll = [&](double) {
        helper.poll();
        return std::string(done() ? "" : "the helper");
      };
      return wait_at_end({}, passed, poll, [](const std::string&) {});
    };
    helper.start();
    REQUIRE_FALSE(until([&] { return died; }).late);
    CHECK(not_started.empty());
    helper.finish();  // without it the next start comes 5 seconds after the death
    const EndWait last = until([&] { return helper.finished(); });
    CHECK_FALSE(last.late);
    CHECK(last.seconds < 4);
  }
}
