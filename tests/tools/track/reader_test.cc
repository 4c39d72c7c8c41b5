#include "tools/track/reader.h"

#include <doctest/doctest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::tools;
using nlohmann::json;

namespace {

struct Files {
  Files() : dir("track") { metrics << R"({"run":"r","schema":1})" << std::endl; }
  void step(int64_t step, double loss) {
    metrics << json{{"step", step}, {"time", 100.0 + static_cast<double>(++lines)}, {"loss", loss}}.dump() << std::endl;
  }
  void resumed(int64_t step) { metrics << json{{"resumed_at", step}}.dump() << std::endl; }
  void event(const std::string& kind, double time) {
    events << json{{"event", kind}, {"time", time}}.dump() << std::endl;
  }

  cairn::testing::TempDir dir;
  int64_t lines = 0;
  std::ofstream metrics{dir / "metrics.jsonl"}, events{dir / "events.jsonl"};
};

/// All that there is, as step and loss.
std::vector<std::pair<int64_t, double>> rest_of(TrackReader& reader, int64_t most = 100) {
  std::vector<std::pair<int64_t, double>> out;
  for (;;) {
    const Result<TrackBatch> batch = reader.next(most);
    REQUIRE_OK(batch);
    reader.given(batch.value());
    if (batch.value().steps.empty()) return out;
    for (const TrackedStep& one : batch.value().steps) out.emplace_back(one.step, one.values.at(0).second);
  }
}

using Steps = std::vector<std::pair<int64_t, double>>;

}  // namespace

TEST_SUITE("tools/track/reader") {
  TEST_CASE("the reader gives the steps that count of a run that went back, in any batches") {
    Files files;
    for (const int64_t step : {1, 2, 3, 4}) files.step(step, 10.0 + static_cast<double>(step));
    files.resumed(2);
    for (const int64_t step : {3, 4, 5}) files.step(step, 20.0 + static_cast<double>(step));
    files.resumed(4);
    for (const int64_t step : {5, 6}) files.step(step, 30.0 + static_cast<double>(step));
    for (const int64_t most : {1, 2, 100}) {
      TrackReader reader(files.dir.path, {});
      CHECK(rest_of(reader, most) == Steps{{1, 11}, {2, 12}, {3, 23}, {4, 24}, {5, 35}, {6, 36}});
    }
  }

  TEST_CASE("a step that was given is not given again, also by a reader that begins where another stood") {
    Files files;
    for (const int64_t step : {1, 2, 3, 4}) files.step(step, 1);
    TrackReader reader(files.dir.path, {});
    CHECK(rest_of(reader).size() == 4);
    files.resumed(1);
    files.step(2, 2);
    files.step(3, 2);
    CHECK(rest_of(reader).empty());
    const Result<TrackPosition> kept = position_from_json(to_json(reader.position()));
    REQUIRE_OK(kept);
    TrackReader next(files.dir.path, kept.value());
    files.step(4, 2);
    files.step(5, 2);
    CHECK(rest_of(next) == Steps{{5, 2}});
    CHECK(rest_of(next).empty());
  }

  TEST_CASE("a line that is not complete waits, and a torn one is left out") {
    Files files;
    files.step(1, 1);
    files.metrics << "{\"step\":2,\"ti" << std::flush;
    TrackReader reader(files.dir.path, {});
    CHECK(rest_of(reader) == Steps{{1, 1}});
    files.metrics << std::endl;
    files.step(2, 3);
    CHECK(rest_of(reader) == Steps{{2, 3}});
  }

  TEST_CASE("events are counted up to the time of their step, where they change") {
    Files files;
    files.event("start", 100);
    files.event("saved", 101.5);
    files.event("saved", 101.7);
    files.event("end", 900);
    files.step(1, 1);
    files.step(2, 1);
    files.step(3, 1);
    TrackReader reader(files.dir.path, {});
    const Result<TrackBatch> batch = reader.next(100);
    REQUIRE_OK(batch);
    using Values = std::vector<std::pair<std::string, double>>;
    REQUIRE(batch.value().steps.size() == 3);
    CHECK(batch.value().steps[0].values == Values{{"loss", 1}, {"events/start", 1}});
    CHECK(batch.value().steps[1].values == Values{{"loss", 1}, {"events/saved", 2}});
    CHECK(batch.value().steps[2].values == Values{{"loss", 1}});
    CHECK(exit_code_of(files.dir.path) == 0);
    files.event("start", 901);
    CHECK_FALSE(exit_code_of(files.dir.path).has_value());
  }

  TEST_CASE("events behind the last step have the step behind it, and come again with the next one") {
    Files files;
    files.event("saved", 100.5);
    files.step(1, 1);
    TrackReader reader(files.dir.path, {});
    CHECK(rest_of(reader) == Steps{{1, 1}});
    CHECK(reader.late_events().values.empty());
    files.event("saved", 105);
    files.event("end", 104);
    files.events << "{\"event\":\"torn" << std::flush;
    using Values = std::vector<std::pair<std::string, double>>;
    for (int again = 0; again < 2; ++again) {
      const TrackedStep late = reader.late_events();
      CHECK(late.step == 2);
      CHECK(late.time == 105);
      CHECK(late.values == Values{{"events/end", 1}, {"events/saved", 2}});
    }
    files.lines = 10;
    files.step(2, 3);
    const Result<TrackBatch> batch = reader.next(1);
    REQUIRE_OK(batch);
    REQUIRE(batch.value().steps.size() == 1);
    CHECK(batch.value().steps[0].values == Values{{"loss", 3}, {"events/end", 1}, {"events/saved", 2}});
  }

  TEST_CASE("numbers of objects have both names; what is no finite number is left out") {
    Files files;
    files.metrics
        << R"({"step":1,"time":1.5,"loss":null,"source_loss":{"web":2.5,"code":null},"lr":0.5,"outlier":[[1,2,3]]})"
        << std::endl;
    TrackReader reader(files.dir.path, {});
    const Result<TrackBatch> batch = reader.next(1);
    REQUIRE_OK(batch);
    REQUIRE(batch.value().steps.size() == 1);
    CHECK(batch.value().steps[0].time == 1.5);
    CHECK(batch.value().steps[0].values ==
          std::vector<std::pair<std::string, double>>{{"lr", 0.5}, {"source_loss/web", 2.5}});
  }

  TEST_CASE("a file that is shorter than what was read begins anew, and no step comes twice") {
    Files files;
    for (int64_t step = 1; step <= 20; ++step) files.step(step, 1);
    TrackReader reader(files.dir.path, {});
    CHECK(rest_of(reader).size() == 20);
    std::ofstream(files.dir / "metrics.jsonl") << R"({"step":20,"time":1,"loss":5})"
                                               << "\n"
                                               << R"({"step":21,"time":1,"loss":6})"
                                               << "\n";
    CHECK(rest_of(reader) == Steps{{21, 6}});
    CHECK_FALSE(TrackReader(files.dir / "nowhere", {}).next(1).ok());
  }
}
