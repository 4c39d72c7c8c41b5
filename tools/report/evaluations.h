#pragma once
// Results of a run's tasks over its steps: those that it asked itself (metrics.jsonl), and those that `cairn eval` has
// computed over its checkpoints (RUN/evals).

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "runtime/telemetry/metrics.h"

namespace cairn::tools {

/// One number of one task.
struct TaskCurve {
  std::string name;                                // "eval/facts/acc"; of checkpoints "evals/facts/acc"
  std::vector<std::pair<int64_t, double>> points;  // by step, ascending
  bool first = false;                              // the task's own number, before others of it
};

/// Files that are not whole or not readable are passed over.
std::vector<TaskCurve> task_curves(const std::vector<telemetry::StepMetrics>& steps, const std::filesystem::path& run);

enum class Trend { kNone, kRising, kFalling };
std::string_view to_text(Trend trend);

struct TaskSummary {
  double last = NAN, best = NAN;  // of finite values
  int64_t last_step = 0, best_step = 0;
  double change = NAN;         // over the last fifth of the evaluations
  Trend trend = Trend::kNone;  // of all of them, by Mann and Kendall's test at 5 %
};
TaskSummary summary_of(const TaskCurve& curve);

/// Mann and Kendall: whether values become larger or smaller with time, more than chance would have it in one of 20.
Trend trend_of(const std::vector<double>& values);

/// A column for each of the last `most` values, from the least to the greatest.
std::string spark(const TaskCurve& curve, size_t most);

}  // namespace cairn::tools
