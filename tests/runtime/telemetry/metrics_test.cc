#include "runtime/telemetry/metrics.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/telemetry/terminal.h"

using namespace cairn::telemetry;

TEST_SUITE("runtime/telemetry/metrics") {
  TEST_CASE("a resumed run goes on in the same file, and the later line of a step counts") {
    const auto path = std::filesystem::temp_directory_path() / fmt::format("cairn-metrics-{}.jsonl", ::getpid());
    std::filesystem::remove(path);
    {
      auto writer = MetricsWriter::open(path, "a", 0).value();
      for (int64_t step = 1; step <= 5; ++step)
        CHECK(writer.write({.step = step, .loss = 10.0 - static_cast<double>(step)}).ok());
    }
    std::ofstream(path, std::ios::app) << "{\"step\":6,\"lo";  // torn by a kill
    {
      auto writer = MetricsWriter::open(path, "a", 3).value();
      CHECK(writer.write({.step = 4, .source_loss = {{"x", 1.5}}, .valid_loss = 2.5}).ok());
    }
    const auto steps = read_metrics(path).value();
    REQUIRE(steps.size() == 4);
    CHECK(steps[2].loss == 7.0);
    CHECK(steps[3].step == 4);
    CHECK(steps[3].valid_loss == 2.5);
    CHECK(steps[3].source_loss[0].second == 1.5);
    std::filesystem::remove(path);
  }

  TEST_CASE("a number that is not finite is null, and wrong records name their field") {
    CHECK(to_json({.loss = NAN})["loss"].is_null());
    CHECK(std::isnan(step_metrics_from_json(to_json({.loss = INFINITY})).value().loss));
    auto record = to_json({});
    record["lr"] = "fast";
    CHECK(step_metrics_from_json(record).error().message == "metrics field \"lr\" is missing or no number");
    record = to_json({});
    record["step"] = 1.5;
    CHECK_FALSE(step_metrics_from_json(record).ok());
  }

  TEST_CASE("durations and curves") {
    CHECK(format_duration(0.85) == "850 ms");
    CHECK(format_duration(65.2) == "1 min 05 s");
    CHECK(format_duration(7800) == "2 h 10 min");
    CHECK(draw_curve({1.0}, 10, 3, false).empty());
    const std::string curve = draw_curve({3, 2, 1}, 10, 3, false);
    CHECK(curve ==
          "  3.000 |#  \n"
          "        |## \n"
          "  1.000 |##.\n");
  }
}
