#include "tools/run/agent/waits.h"

#include <doctest/doctest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/shm_world.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::tools;

TEST_SUITE("tools/run/waits") {
  TEST_CASE("a rank that stands still outside of any operation is found by what ranks of other hosts wait for") {
    const cairn::testing::TempDir dir("waits");
    auto world = comm::ShmWorld::create({.world_size = 2, .local_ranks = 1});
    REQUIRE_OK(world);
    std::vector<nlohmann::json> events;
    int64_t asked = 0;
    bool waits = true;
    RunWaits of(
        dir.path, "run", 0.4,
        {.say = [](const std::string&) {}, .record = [&](nlohmann::json event) { events.push_back(std::move(event)); }},
        {.ask = [&] { ++asked; },
         .put_in =
             [&](std::vector<agent::RankState>& ranks) {
               ranks.resize(2);
               ranks[1] = {.rank = 1, .view = {}, .state = 'S', .host = "h1"};
               ranks[1].view.pid = 7;
               ranks[1].view.inside = waits;
               ranks[1].view.awaits = 0;
               ranks[1].view.since_ms = 1000;
             },
         .ask_stacks = [](const std::vector<int64_t>&) {}});
    const auto look_until = [&](const auto& done) {
      for (int k = 0; k < 200 && !done(); ++k) {
        of.look(&world.value());
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      return done();
    };
    of.look(&world.value());
    CHECK(asked == 0);
    CHECK(look_until([&] { return !events.empty(); }));
    CHECK(asked > 0);
    CHECK(events[0].at("event") == "wait");
    CHECK(events[0].at("culprits") == std::vector<int64_t>{0});
    for (int k = 0; k < 5; ++k) of.look(&world.value());
    CHECK(events.size() == 1);  // the same wait
    REQUIRE(of.suspect().has_value());
    CHECK(of.suspect()->first == 0);
  }

  TEST_CASE("ranks that stand still while nobody waits for them are nobody's culprits") {
    const cairn::testing::TempDir dir("waits");
    auto world = comm::ShmWorld::create({.world_size = 2, .local_ranks = 1});
    REQUIRE_OK(world);
    int64_t events = 0;
    RunWaits of(dir.path, "run", 0.1,
                {.say = [](const std::string&) {}, .record = [&](const nlohmann::json&) { ++events; }},
                {.ask = [] {}, .put_in = [](std::vector<agent::RankState>&) {}, .ask_stacks = [](const auto&) {}});
    for (int k = 0; k < 20; ++k) {
      of.look(&world.value());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(events == 0);
  }
}
