#include "tools/run/folder/audit.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

using namespace cairn;
using namespace cairn::tools;
using nlohmann::json;

namespace {

LineageEntry segment(int64_t n, const std::string& cause, int64_t step) {
  LineageEntry out;
  out.n = n;
  out.cause = cause;
  out.at.step = step;
  return out;
}

json start(int64_t step, int64_t world, const std::string& mesh, const std::string& isa = "avx2") {
  return {{"event", "start"}, {"step", step}, {"world", world}, {"mesh", mesh}, {"isa", isa}};
}

}  // namespace

TEST_SUITE("tools/run/audit") {
  TEST_CASE("a start that went back replaces the layouts behind it, and one in the same layout adds none") {
    const std::vector<json> events{start(0, 2, "dp 2"),  {{"event", "saved"}, {"step", 10}},
                                   start(10, 2, "dp 2"), start(20, 4, "dp 4"),
                                   start(30, 1, "dp 1"), start(20, 2, "tp 2")};
    const std::vector<RankLayout> layouts = rank_layouts(events);
    REQUIRE(layouts.size() == 2);
    CHECK((layouts[0].from == 0 && layouts[0].mesh == "dp 2"));
    CHECK((layouts[1].from == 20 && layouts[1].mesh == "tp 2" && layouts[1].world == 2));
    const std::vector<json> isas{start(0, 2, "dp 2"), start(5, 2, "dp 2", "avx512")};
    CHECK(rank_layouts(isas).size() == 2);
  }

  TEST_CASE("legs begin at the newest checkpoint before the first step and end wherever one cause of bits does") {
    const std::vector<int64_t> saved{10, 20, 40};
    const std::vector<LineageEntry> segments{segment(1, "start", 0), segment(2, "recipe", 25)};
    const std::vector<RankLayout> layouts{{.from = 0, .world = 2, .mesh = "dp 2"},
                                          {.from = 30, .world = 4, .mesh = "dp 4"}};
    const std::vector<AuditLeg> legs = audit_legs(12, 45, saved, segments, layouts).value();
    REQUIRE(legs.size() == 5);
    const int64_t from[] = {10, 20, 25, 30, 40}, to[] = {20, 25, 30, 40, 45}, of[] = {1, 1, 2, 2, 2};
    const int64_t world[] = {2, 2, 2, 4, 4};
    const bool from_saved[] = {true, true, false, false, true}, to_saved[] = {true, false, false, true, false};
    for (size_t k = 0; k < 5; ++k) {
      CAPTURE(k);
      CHECK((legs[k].from == from[k] && legs[k].to == to[k]));
      CHECK((legs[k].segment.n == of[k] && legs[k].layout.world == world[k]));
      CHECK((legs[k].from_saved == from_saved[k] && legs[k].to_saved == to_saved[k]));
    }
    CHECK(audit_legs(11, 20, saved, segments, layouts).value().front().from == 10);
    CHECK(audit_legs(10, 20, saved, segments, layouts).value().front().from == 0);  // step 10 is trained again
  }

  TEST_CASE("steps before the first checkpoint are trained again from the beginning where the run had one of its own") {
    const std::vector<int64_t> saved{20};
    const std::vector<RankLayout> layouts{{.from = 0, .world = 1, .mesh = "dp 1"}};
    const std::vector<LineageEntry> own{segment(1, "start", 0)}, imported{segment(1, "init_from", 0)},
        brought{segment(1, "start", 100)};
    const std::vector<AuditLeg> legs = audit_legs(3, 5, saved, own, layouts).value();
    REQUIRE(legs.size() == 1);
    CHECK((legs[0].from == 0 && legs[0].to == 5 && legs[0].from_saved));
    for (const auto& segments : {imported, brought}) {
      const auto legs_of = audit_legs(3, 5, saved, segments, layouts);
      REQUIRE(!legs_of.ok());
      CHECK(legs_of.error().message.find("no checkpoint before step 3 is left") != std::string::npos);
      CHECK(legs_of.error().message.find("of step 20") != std::string::npos);
    }
    // A rate that was low from the beginning, of weights of its own and of others.
    std::vector<LineageEntry> low{segment(1, "lower_lr", 0)};
    CHECK(audit_legs(3, 5, saved, low, layouts).ok());
    low[0].from = "elsewhere";
    CHECK(!audit_legs(3, 5, saved, low, layouts).ok());
    const auto untold = audit_legs(3, 5, saved, own, {});
    REQUIRE(!untold.ok());
    CHECK(untold.error().message.find("events.jsonl") != std::string::npos);
  }
}
