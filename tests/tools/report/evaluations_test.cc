// Numbers of tasks over the steps: those of the run itself, and those that `cairn eval` has kept.
#include "tools/report/evaluations.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>

#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::tools;

namespace {

telemetry::StepMetrics step_of(int64_t step, double acc) {
  return {.step = step, .tasks = {{"facts", {{"acc_norm", 0.1}, {"acc", acc}, {"acc_stderr", 0.1}, {"n", 24}}}}};
}

void keep(const std::filesystem::path& file, int64_t step, double loss, bool whole = true) {
  std::filesystem::create_directories(file.parent_path());
  std::ofstream out(file);
  out << "{\"task\":\"wiki\",\"step\":" << step << "}\n{\"id\":\"1\",\"logprob\":-3}\n";
  if (whole) out << "{\"sum\":{\"n\":1,\"tokens\":9,\"loss\":" << loss << "}}\n";
}

TaskCurve curve(std::string name, const std::vector<double>& values) {
  TaskCurve out{.name = std::move(name)};
  for (const double value : values) out.points.emplace_back(100 * (1 + std::ssize(out.points)), value);
  return out;
}

}  // namespace

TEST_SUITE("tools/report/evaluations") {
  TEST_CASE("metrics and kept results become curves; what is not whole is passed over") {
    const testing::TempDir dir("evaluations");
    const std::filesystem::path run(dir / "run");
    keep(run / "evals/wiki-11/step-00000200-aa.jsonl", 200, 2.5);
    keep(run / "evals/wiki-11/step-00000100-bb.jsonl", 100, 3);
    keep(run / "evals/wiki-11/step-00000300-cc.jsonl", 300, 1, false);
    keep(run / "evals/wiki-22/step-00000100-bb.jsonl", 100, 7);  // other items
    std::ofstream(run / "evals/wiki-22/step-00000200-bb.jsonl") << "torn";
    const std::vector<TaskCurve> curves = task_curves({step_of(50, 0.25), step_of(100, 0.5)}, run);
    REQUIRE(curves.size() == 4);
    CHECK(curves[0].name == "eval/facts/acc");
    CHECK(curves[0].first);
    CHECK(curves[0].points == std::vector<std::pair<int64_t, double>>{{50, 0.25}, {100, 0.5}});
    CHECK(curves[1].name == "eval/facts/acc_norm");
    CHECK_FALSE(curves[1].first);
    CHECK(curves[2].name == "evals/wiki/loss");
    CHECK(curves[2].points == std::vector<std::pair<int64_t, double>>{{100, 3}, {200, 2.5}});
    CHECK(curves[3].name == "evals/wiki (wiki-22)/loss");
    CHECK(task_curves({}, dir / "nothing").empty());
  }

  TEST_CASE("the best is the lowest loss and the highest accuracy") {
    const TaskSummary loss = summary_of(curve("evals/wiki/loss", {3, 2, 2.5, NAN}));
    CHECK(loss.best == 2);
    CHECK(loss.best_step == 200);
    CHECK(loss.last == 2.5);
    CHECK(loss.last_step == 300);
    CHECK(loss.change == 0.5);
    const TaskSummary acc = summary_of(curve("eval/facts/acc", {0.2, 0.4, 0.3}));
    CHECK(acc.best == 0.4);
    CHECK(std::isnan(summary_of(curve("eval/facts/acc", {})).best));
  }

  TEST_CASE("a trend is one that chance does not make") {
    CHECK(trend_of({1, 2, 3}) == Trend::kNone);
    CHECK(trend_of({1, 2, 3, 4, 5}) == Trend::kRising);
    CHECK(trend_of({5, 4, 3, 2, 1}) == Trend::kFalling);
    CHECK(trend_of({2, 2, 2, 2, 2, 2}) == Trend::kNone);
    CHECK(trend_of({1, 3, 2, 4, 1, 3, 2, 4}) == Trend::kNone);
    // About one of twenty draws looks like a trend.
    std::mt19937 random(3);
    int64_t found = 0;
    for (int64_t k = 0; k < 2000; ++k) {
      std::vector<double> values(20);
      for (double& value : values) value = static_cast<double>(random());
      found += trend_of(values) == Trend::kNone ? 0 : 1;
    }
    CHECK(found > 50);
    CHECK(found < 130);
  }

  TEST_CASE("a spark line goes from the least to the greatest of the newest") {
    CHECK(spark(curve("eval/facts/acc", {9, 0, 0.5, 1}), 3) == "▁▅█");
    CHECK(spark(curve("eval/facts/acc", {2, 2}), 9) == "▅▅");
    CHECK(spark(curve("eval/facts/acc", {}), 9).empty());
  }
}
