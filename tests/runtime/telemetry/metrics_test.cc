#include "runtime/telemetry/metrics.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "runtime/config/metric_name.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
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

  TEST_CASE("results of tasks and an early end are read as they were written") {
    StepMetrics out{
        .step = 7,
        .tasks = {{"facts+shuffle", {{"acc", 0.25}, {"acc_stderr", 0.1}, {"n", 4}}}, {"wiki", {{"loss", NAN}}}},
        .tasks_left_out = true,
        .tasks_ms = 12.5,
        .ended_early = EarlyEnd{"eval/wiki/loss", 2.5, 5, 3}};
    const auto back = step_metrics_from_json(to_json(out));
    REQUIRE_OK(back);
    REQUIRE(back.value().tasks.size() == 2);
    CHECK(back.value().tasks[0].task == "facts+shuffle");
    CHECK(back.value().tasks[0].numbers == out.tasks[0].numbers);
    CHECK(back.value().tasks[1].numbers.empty());  // null
    CHECK(back.value().tasks_left_out);
    CHECK(back.value().tasks_ms == 12.5);
    REQUIRE(back.value().ended_early);
    CHECK(back.value().ended_early->metric == "eval/wiki/loss");
    CHECK(back.value().ended_early->best_step == 5);
    CHECK(back.value().ended_early->evaluations == 3);
  }

  TEST_CASE("numbers of a step have names, by which they are found") {
    const StepMetrics step{.step = 7,
                           .loss = 3,
                           .valid_loss = 2.5,
                           .valid_source_loss = {{"web/en", 2}},
                           .tasks = {{"arc/easy", {{"acc", 0.25}, {"acc_stderr", 0.1}, {"n", 4}}}}};
    const std::vector<std::pair<std::string, double>> all = {
        {"loss", 3}, {"valid_loss", 2.5}, {"valid_source_loss/web/en", 2}, {"eval/arc/easy/acc", 0.25}};
    CHECK(named_values(step) == all);
    for (const auto& [name, value] : all) CHECK(value_of(step, name) == value);
    for (const char* none : {"eval/arc/easy/acc_norm", "eval/arc/acc", "valid_source_loss/web", "speed"})
      CHECK_FALSE(value_of(step, none).has_value());
    CHECK_FALSE(value_of(StepMetrics{}, "valid_loss").has_value());
    for (const char* wrong :
         {"", "accuracy", "eval/arc", "eval//acc", "eval/arc/", "valid_source_loss/", "eval/a,b/acc"}) {
      CAPTURE(wrong);
      CHECK_FALSE(parse_metric(wrong).ok());
    }
    CHECK(lower_is_better("loss"));
    CHECK(lower_is_better("valid_source_loss/acc"));
    CHECK(lower_is_better("eval/wiki/bits_per_byte"));
    CHECK_FALSE(lower_is_better("eval/arc/acc"));
    CHECK_FALSE(lower_is_better("eval/loss/margin"));
  }

  TEST_CASE("an audit and a comparison of replicas that err in one step are two errors") {
    StepMetrics step{.step = 9};
    CHECK(machine_errors(step).empty());
    step.again = ComputedAgain{.found = ComputedAgain::Found::kTransient, .audit = true, .ranks = {1}, .since = 4};
    step.replicas = ReplicaCheck{.ranks = {2, 3}, .tied = true, .since = 6};
    const auto errors = machine_errors(step);
    REQUIRE(errors.size() == 2);
    CHECK(errors[0].kind == "replica");
    CHECK(errors[0].ranks == std::vector<int64_t>{2, 3});
    CHECK(errors[1].kind == "transient");
    CHECK(errors[1].since == 4);
    step.again->audit = false;  // an outlier that was computed again
    CHECK(machine_errors(step).size() == 1);
  }
}
