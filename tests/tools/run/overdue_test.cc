#include "tools/run/agent/overdue.h"

#include <doctest/doctest.h>

using namespace cairn::tools;

TEST_SUITE("tools/run/overdue") {
  TEST_CASE("a save is overdue by the measure of those before it, and ends with its step") {
    OverdueSaves saves;
    using News = OverdueSaves::News;
    CHECK(saves.look({10}, 0).empty());
    CHECK(saves.look({10, 20}, 59).empty());
    CHECK(saves.look({10, 20}, 60) == std::vector<News>{{10, 60}});
    CHECK(saves.look({10, 20}, 118).empty());
    CHECK(saves.look({10, 20}, 120) == std::vector<News>{{10, 120}, {20, 61}});
    CHECK(saves.look({20}, 121).empty());
    CHECK(saves.look({10}, 122).empty());  // another try
    saves.took(100);
    CHECK(saves.look({}, 130).empty());
    CHECK(saves.look({30}, 200).empty());
    CHECK(saves.look({30}, 499).empty());
    CHECK(saves.look({30}, 500) == std::vector<News>{{30, 300}});
  }

  TEST_CASE("saves that fail have a line a minute, which counts them") {
    FailedSaves saves;
    CHECK_FALSE(saves.due(0, true));
    CHECK(saves.failed(1, "step 1", 5) == "step 1");
    CHECK_FALSE(saves.failed(2, "step 2", 6));
    CHECK_FALSE(saves.due(64));
    CHECK(saves.due(65) == "step 2");
    CHECK_FALSE(saves.due(200, true));
    CHECK(saves.failed(3, "step 3", 200) == "step 3");
    for (int64_t step = 4; step < 9; ++step) CHECK_FALSE(saves.failed(step, "step " + std::to_string(step), 201));
    CHECK(saves.failed(9, "step 9", 260) == "6 more saves failed, of steps 4 to 9; the last: step 9");
    CHECK_FALSE(saves.failed(10, "step 10", 261));
    CHECK(saves.due(262, true) == "step 10");
  }
}
