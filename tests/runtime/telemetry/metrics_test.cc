#include "runtime/telemetry/metrics.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/support/temp_dir.h"

using namespace cairn::telemetry;

TEST_SUITE("runtime/telemetry/metrics") {
  TEST_CASE("a resumed run goes on in the same file, and the later line of a step counts") {
    const cairn::testing::TempDir dir("metrics");
    const auto path = dir / "metrics.jsonl";
    {
      const auto writer = MetricsWriter::open(path, "a").value();
      CHECK(writer->resumed(0).ok());
      for (int64_t step = 1; step <= 5; ++step)
        CHECK(writer->write({.step = step, .loss = 10.0 - static_cast<double>(step)}).ok());
    }
    std::ofstream(path, std::ios::app) << "{\"step\":6,\"lo";  // torn by a kill
    {
      const auto writer = MetricsWriter::open(path, "a").value();
      CHECK(writer->resumed(3).ok());
      CHECK(
          writer->write({.step = 4, .source_loss = {{"x", 1.5}}, .valid_loss = 2.5, .valid_source_loss = {{"x", 2.25}}})
              .ok());
    }
    const auto steps = read_metrics(path).value();
    REQUIRE(steps.size() == 4);
    CHECK(steps[2].loss == 7.0);
    CHECK(steps[3].step == 4);
    CHECK(steps[3].valid_loss == 2.5);
    CHECK(steps[3].source_loss[0].second == 1.5);
    CHECK(steps[3].valid_source_loss == std::vector<std::pair<std::string, double>>{{"x", 2.25}});
    CHECK(steps[2].valid_source_loss.empty());
    std::vector<std::pair<int64_t, double>> superseded;
    for (const StepMetrics& step : read_told_steps(path).value().superseded)
      superseded.emplace_back(step.step, step.loss);
    CHECK(superseded == std::vector<std::pair<int64_t, double>>{{4, 6.0}, {5, 5.0}});
  }

  TEST_CASE("a line that did not fit on the disk takes none behind it along") {
    const cairn::testing::TempDir dir("metrics");
    const auto path = dir / "metrics.jsonl";
    const auto writer = MetricsWriter::open(path, "a").value();
    CHECK(writer->resumed(0).ok());
    CHECK(writer->write({.step = 1}).ok());
    const auto fits = [&](uint64_t bytes) {  // in any file of this process
      const auto before = ::signal(SIGXFSZ, SIG_IGN);
      rlimit old{};
      REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
      const rlimit limit{std::filesystem::file_size(path) + bytes, old.rlim_max};
      REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
      const cairn::Status written = writer->write({.step = 2});
      REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
      ::signal(SIGXFSZ, before);
      if (!written.ok()) CHECK(written.error().os_errno == EFBIG);  // and no full disk
      return written.ok();
    };
    CHECK_FALSE(fits(20));
    CHECK_FALSE(fits(1));
    CHECK_FALSE(fits(5));
    CHECK(writer->write({.step = 3}).ok());
    std::ofstream(path, std::ios::app) << "{\"step\":9,\"lo";  // and one by a kill
    CHECK(MetricsWriter::open(path, "a").value()->write({.step = 4}).ok());
    std::vector<int64_t> steps;
    for (const StepMetrics& metrics : read_metrics(path).value()) steps.push_back(metrics.step);
    CHECK(steps == std::vector<int64_t>{1, 3, 4});
  }

  TEST_CASE("a step that nobody has told is told from its news, and one that somebody is about to tell is waited for") {
    const cairn::testing::TempDir dir("metrics");
    const auto path = dir / "metrics.jsonl";
    const auto news = [](int64_t step) {  // a report of step 4 was too long to be kept
      std::vector<std::string> out;
      for (int64_t s = 1; s <= step; ++s) out.push_back(s == 4 ? "" : to_json({.step = s, .loss = -1}).dump());
      return out;
    };
    const auto losses = [&] {
      std::vector<std::pair<int64_t, double>> out;
      for (const StepMetrics& m : read_metrics(path).value()) out.emplace_back(m.step, m.loss);
      return out;
    };
    using Losses = std::vector<std::pair<int64_t, double>>;
    {
      const auto writer = MetricsWriter::open(path, "a").value();
      CHECK(writer->resumed(0).ok());
      CHECK(writer->write({.step = 1, .loss = 1}).ok());
      CHECK(writer->complete(3, news(3)).ok());
      CHECK(losses() == Losses{{1, 1}, {2, -1}, {3, -1}});
      std::thread teller([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        for (int64_t step = 4; step <= 6; ++step) CHECK(writer->write({.step = step, .loss = 1}).ok());
      });
      CHECK(writer->complete(6, news(6)).ok());
      teller.join();
      CHECK(losses() == Losses{{1, 1}, {2, -1}, {3, -1}, {4, 1}, {5, 1}, {6, 1}});
    }
    const auto writer = MetricsWriter::open(path, "a").value();  // by the next agent, which finds step 8 in memory
    CHECK(writer->catch_up(news(8)).ok());
    CHECK(writer->resumed(8).ok());
    CHECK(losses() == Losses{{1, 1}, {2, -1}, {3, -1}, {4, 1}, {5, 1}, {6, 1}, {7, -1}, {8, -1}});
    CHECK(writer->resumed(2).ok());  // back
    CHECK(writer->complete(3, news(3)).ok());
    CHECK(losses() == Losses{{1, 1}, {2, -1}, {3, -1}});
  }

  TEST_CASE("a number that is not finite is null, and wrong records name their field") {
    CHECK(to_json({.loss = NAN})["loss"].is_null());
    CHECK(std::isnan(step_metrics_from_json(to_json({.loss = INFINITY})).value().loss));
    CHECK(step_metrics_from_json(to_json({.snapshot_left_out = true})).value().snapshot_left_out);
    auto record = to_json({});
    CHECK_FALSE(record.contains("snapshot_left_out"));
    record["lr"] = "fast";
    CHECK(step_metrics_from_json(record).error().message == "metrics field \"lr\" is missing or no number");
    record = to_json({});
    record["step"] = 1.5;
    CHECK_FALSE(step_metrics_from_json(record).ok());
  }
}
