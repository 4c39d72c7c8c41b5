#include "tools/run/folder/goodput.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::tools;

namespace {

/// The two files of a run.
class Folder {
 public:
  Folder() {
    metrics_ << "{\"schema\":1,\"run\":\"r\"}\n";
    metrics_.flush();
  }
  /// Steps of a second each, the last of which ended then.
  void steps(int64_t first, int64_t last, double ended, double pause_ms = 0) {
    for (int64_t step = first; step <= last; ++step) {
      metrics_ << fmt::format("{{\"step\":{},\"time\":{},\"step_ms\":1000,\"checkpoint_lost_ms\":{}}}\n", step,
                              ended - static_cast<double>(last - step), step == last ? pause_ms : 0);
    }
    metrics_.flush();
  }
  void resumed(int64_t at) { metrics_ << fmt::format("{{\"resumed_at\":{}}}\n", at) << std::flush; }
  void torn() { metrics_ << "{\"step\":9" << std::flush; }
  void event(double time, nlohmann::json event) {
    event["time"] = time;
    events_ << event.dump() << "\n" << std::flush;
  }
  void start(double time, int64_t generation, const char* source) {
    event(time, {{"event", "start"}, {"generation", generation}, {"source", source}});
  }
  Goodput read(double now = 0) const { return goodput_of(dir_.path, now).value(); }
  const std::filesystem::path& path() const { return dir_.path; }

 private:
  const cairn::testing::TempDir dir_;
  std::ofstream metrics_{dir_.path / "metrics.jsonl"}, events_{dir_.path / "events.jsonl"};
};

double sum(const Goodput& g) { return g.kept + g.checkpoints + g.again + g.starts + g.recoveries + g.down + g.rest; }

}  // namespace

TEST_SUITE("tools/run/goodput") {
  TEST_CASE("each second of a run with a failure, a killed agent and a planned pause is counted once") {
    Folder run;
    run.start(100, 0, "fresh");
    run.steps(1, 10, 112, 200);
    run.event(112.5, {{"event", "failure"}, {"rank", 1}});
    run.start(113, 1, "disk");
    run.resumed(8);
    run.steps(9, 20, 126);
    run.start(136, 0, "memory");  // the agent before said nothing more
    run.steps(21, 30, 147);
    run.event(147, {{"event", "end"}, {"exit_code", 0}});
    run.start(1000, 0, "disk");
    run.steps(31, 31, 1003);
    run.event(1003, {{"event", "end"}, {"exit_code", 0}});

    const Goodput g = run.read();
    CHECK(g.wall == doctest::Approx(50));
    CHECK(g.kept == doctest::Approx(31));  // step 10 with its pause is one of the two done again
    CHECK(g.checkpoints == doctest::Approx(0));
    CHECK(g.again == doctest::Approx(2));
    CHECK(g.steps_again == 2);
    CHECK(g.starts == doctest::Approx(2 + 1 + 2));
    CHECK(g.recoveries == doctest::Approx(1.5));
    CHECK(g.down == doctest::Approx(10));
    CHECK(g.rest == doctest::Approx(0.5));
    CHECK(sum(g) == doctest::Approx(g.wall));
    CHECK(g.agents == 3);
    CHECK(g.failures == 1);
    CHECK(g.deaths == 1);
    CHECK(g.from_memory == 1);
    CHECK(g.from_disk == 1);
    CHECK(
        goodput_text(g) ==
        "62.0% of 50.0 s: down 20.0%, starts 10.0% (3), steps done again 4.0% (2), recoveries 3.0% (1), between steps "
        "1.0%");

    const std::vector<std::string> told = advice(g, 3, 0.1);
    REQUIRE(told.size() == 2);
    // sqrt(2 * 0.1 s * 25 s) is below what a save takes.
    CHECK(told[0].find("a save every 3.6 s") != std::string::npos);
    CHECK(told[1].find("10.0 s went by between a death of the agent and the next start (1)") != std::string::npos);
  }

  TEST_CASE("a run without trouble has no advice; pauses are told apart; one that somebody has lasts until now") {
    Folder run;
    run.start(100, 0, "fresh");
    run.steps(1, 100, 200, 500);
    run.torn();
    const Goodput g = run.read(210);
    CHECK(g.wall == doctest::Approx(110));
    CHECK(g.kept == doctest::Approx(99.5));
    CHECK(g.checkpoints == doctest::Approx(0.5));
    CHECK(g.rest == doctest::Approx(10));
    CHECK(sum(g) == doctest::Approx(g.wall));
    CHECK(advice(g, 1, 0.5).empty());
  }

  TEST_CASE("a failure that no step has followed, and an end with an error") {
    Folder run;
    run.start(100, 0, "fresh");
    run.steps(1, 10, 110);
    run.event(111, {{"event", "failure"}, {"rank", 0}});
    run.start(112, 1, "memory");
    run.event(115, {{"event", "failure"}, {"rank", 0}});
    run.start(116, 2, "memory");
    run.resumed(10);
    run.steps(11, 12, 120);
    run.event(121, {{"event", "end"}, {"exit_code", 69}});
    run.start(141, 0, "disk");
    run.steps(13, 14, 145);
    const Goodput g = run.read();
    CHECK(g.recoveries == doctest::Approx((112 - 111) + (116 - 112) + (118 - 116)));
    CHECK(g.failures == 2);
    CHECK(g.deaths == 0);
    CHECK(g.down == doctest::Approx(20));
    CHECK(g.again == doctest::Approx(0));
    CHECK(sum(g) == doctest::Approx(g.wall));
  }

  TEST_CASE("a folder without a step is said to be one") {
    const Folder run;
    const auto got = goodput_of(run.path(), 0);
    REQUIRE(!got.ok());
    CHECK(got.error().message.find("no step has been told yet") != std::string::npos);
  }
}
