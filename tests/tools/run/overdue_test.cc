#include "tools/run/overdue.h"

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
}
