// What a run's events say of what went wrong.
#include "tools/run/folder/troubles.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/temp_dir.h"

using namespace cairn::tools;
using cairn::testing::TempDir;
using nlohmann::json;

namespace {

Troubles of(const std::vector<json>& events) {
  const TempDir dir("troubles");
  std::ofstream out(dir.path / "events.jsonl");
  double time = 100;
  for (json event : events) {
    if (event.is_object() && !event.contains("time")) event["time"] = time += 10;
    out << event.dump() << "\n";
  }
  out << "{\"torn" << std::flush;
  return troubles_of(dir.path);
}

bool has(const std::vector<std::string>& lines, const std::string& words) {
  return std::ranges::any_of(lines, [&](const std::string& line) { return line.find(words) != std::string::npos; });
}

}  // namespace

TEST_SUITE("tools/run/troubles") {
  TEST_CASE("failures are counted by class and host, and say what to change") {
    const Troubles troubles = of({{{"event", "failure"}, {"class", "crash"}, {"host", "h1"}},
                                  {{"event", "failure"}, {"class", "out_of_memory"}, {"host", "h2"}},
                                  {{"event", "failure"}, {"class", "out_of_memory"}, {"host", "h2"}},
                                  {{"event", "failure"}, {"message", "an older build's"}},
                                  {{"event", "excluded"}, {"host", "h2"}, {"reason", "out of memory"}},
                                  json(3),
                                  {{"event", "failure"}, {"class", 3}, {"host", {1}}}});
    const auto lines = trouble_lines(troubles);
    REQUIRE(lines.size() == 2);
    CHECK(lines[0].first == "failures");
    CHECK(lines[0].second == "5: out of memory on h2 (2), not classified (2), a crash on h1");
    CHECK(lines[1] == std::pair<std::string, std::string>("excluded", "h2: out of memory"));
    CHECK(has(trouble_advice(troubles), "memory ran out on h2: raise its limit"));
    CHECK_FALSE(has(trouble_advice(troubles), "h1"));
    CHECK(to_json(troubles).at("failures")[0].at("times") == 2);
  }

  TEST_CASE("the time of a straggler goes from its word to its end, its ranks' end, or what was heard last") {
    const json slow = {{"event", "straggler"}, {"host", "h2"}, {"ratio", 1.6}, {"why", "a CPU limit"}};
    json worse = slow;
    worse["ratio"] = 2.0;
    const Troubles troubles = of({slow,                                                         // 110
                                  {{"event", "straggler_over"}, {"host", "h2"}},                // 120: 10 s
                                  worse,                                                        // 130
                                  {{"event", "failure"}, {"class", "killed"}, {"host", "h0"}},  // 140: 10 s
                                  {{"event", "start"}},                                         // 150
                                  slow,                                                         // 160
                                  {{"event", "saved"}}});                                       // 170: 10 s
    REQUIRE(troubles.stragglers.size() == 1);
    CHECK(troubles.stragglers[0].seconds == doctest::Approx(30));
    CHECK(troubles.stragglers[0].times == 3);
    CHECK(troubles.stragglers[0].ratio == 2.0);
    CHECK(trouble_lines(troubles)[1].second.starts_with("h2: up to 2.0 x the time of the others, for 30"));
  }

  TEST_CASE("a run without trouble has nothing to tell") {
    CHECK(trouble_lines(of({{{"event", "start"}}})).empty());
    CHECK(trouble_advice(of({})).empty());
    CHECK(trouble_lines(troubles_of("/nowhere")).empty());
  }
}
