#include "tools/report/evaluations.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/config/metric_name.h"
#include "runtime/json/json.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Kept {
  std::string task;
  int64_t step = 0;
  std::vector<std::pair<std::string, double>> numbers;
};

/// Reads a file of RUN/evals: its first line and its last; without a task: it is not whole.
Kept kept_in(const fs::path& file) {
  std::ifstream in(file);
  std::string first, line, last;
  std::getline(in, first);
  while (std::getline(in, line)) last = line;
  const json head = json_or_nothing(first), sum = json_field(json_or_nothing(last), "sum");
  if (!head.is_object() || !sum.is_object()) return {};
  Kept out{.task = json_string(head, "task"),
           .step = json_integer(json_field(head, "step"), 0, INT64_MAX).value_or(-1)};
  for (const auto& [name, value] : sum.items()) {
    if (value.is_number()) out.numbers.emplace_back(name, value.get<double>());
  }
  return out.step < 0 ? Kept{} : out;
}

class Gatherer {
 public:
  void add(const std::string& prefix, const std::string& task, int64_t step,
           const std::vector<std::pair<std::string, double>>& numbers) {
    for (const auto& [number, value] : numbers) {
      if (number == "n" || number == "tokens" || number.ends_with("_stderr")) continue;
      const std::string name = fmt::format("{}{}/{}", prefix, task, number);
      auto [at, is_new] = known_.emplace(name, out_.size());
      if (is_new) out_.push_back({.name = name, .points = {}, .first = firsts_.insert(prefix + task).second});
      out_[at->second].points.emplace_back(step, value);
    }
  }
  std::vector<TaskCurve> take() {
    for (TaskCurve& curve : out_) {
      std::ranges::stable_sort(curve.points, {}, [](const auto& point) { return point.first; });
      std::vector<std::pair<int64_t, double>> last_of_step;
      for (const auto& point : curve.points) {
        if (!last_of_step.empty() && last_of_step.back().first == point.first) last_of_step.pop_back();
        last_of_step.push_back(point);
      }
      curve.points = std::move(last_of_step);
    }
    return std::move(out_);
  }

 private:
  std::vector<TaskCurve> out_;
  std::map<std::string, size_t> known_;
  std::set<std::string> firsts_;
};

std::vector<std::pair<std::string, double>> own_first(std::vector<std::pair<std::string, double>> numbers) {
  std::ranges::stable_sort(numbers, {}, [](const auto& number) { return number_rank(number.first); });
  return numbers;
}

}  // namespace

std::vector<TaskCurve> task_curves(const std::vector<telemetry::StepMetrics>& steps, const fs::path& run) {
  Gatherer out;
  for (const telemetry::StepMetrics& step : steps) {
    for (const telemetry::TaskNumbers& task : step.tasks)
      out.add("eval/", task.task, step.step, own_first(task.numbers));
  }
  std::error_code error;
  std::vector<fs::path> folders;
  for (fs::directory_iterator entry(run / "evals", error), end; !error && entry != end; entry.increment(error)) {
    folders.push_back(entry->path());
  }
  std::ranges::sort(folders);
  std::map<std::string, fs::path> folder_of;  // of a task; a second one of its name has other items
  for (const fs::path& folder : folders) {
    std::vector<fs::path> files;
    error.clear();
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
      if (entry->path().extension() == ".jsonl") files.push_back(entry->path());
    }
    std::ranges::sort(files);
    for (const fs::path& file : files) {
      Kept kept = kept_in(file);
      if (kept.task.empty()) continue;
      const bool own = folder_of.emplace(kept.task, folder).first->second == folder;
      if (!own) kept.task += fmt::format(" ({})", folder.filename().string());
      out.add("evals/", kept.task, kept.step, own_first(std::move(kept.numbers)));
    }
  }
  return out.take();
}

std::string_view to_text(Trend trend) {
  return trend == Trend::kRising ? "rising" : trend == Trend::kFalling ? "falling" : "no trend";
}

Trend trend_of(const std::vector<double>& values) {
  const auto n = static_cast<double>(values.size());
  if (values.size() < 4) return Trend::kNone;  // fewer are never significant
  double sum = 0;
  std::map<double, double> ties;
  for (size_t i = 0; i < values.size(); ++i) {
    ++ties[values[i]];
    for (size_t j = i + 1; j < values.size(); ++j) sum += (values[j] > values[i]) - (values[j] < values[i]);
  }
  double variance = n * (n - 1) * (2 * n + 5);
  for (const auto& [value, count] : ties) variance -= count * (count - 1) * (2 * count + 5);
  if (variance <= 0) return Trend::kNone;
  const double z = (sum - (sum > 0) + (sum < 0)) / std::sqrt(variance / 18);
  constexpr double kOneOfTwenty = 1.959964;
  return z > kOneOfTwenty ? Trend::kRising : z < -kOneOfTwenty ? Trend::kFalling : Trend::kNone;
}

TaskSummary summary_of(const TaskCurve& curve) {
  TaskSummary out;
  constexpr std::string_view kOfCheckpoints = "evals/";
  const bool of_checkpoints = curve.name.starts_with(kOfCheckpoints);
  const bool lower = lower_is_better(
      of_checkpoints ? fmt::format("{}{}", MetricName::kTask, curve.name.substr(kOfCheckpoints.size())) : curve.name);
  std::vector<double> finite;
  for (const auto& [step, value] : curve.points) {
    if (!std::isfinite(value)) continue;
    finite.push_back(value);
    out.last = value;
    out.last_step = step;
    if (std::isnan(out.best) || (lower ? value < out.best : value > out.best)) {
      out.best = value;
      out.best_step = step;
    }
  }
  if (finite.size() > 1)
    out.change = finite.back() - finite[finite.size() - 1 - std::max<size_t>(1, finite.size() / 5)];
  out.trend = trend_of(finite);
  return out;
}

std::string spark(const TaskCurve& curve, size_t most) {
  static constexpr std::array<std::string_view, 8> kBars = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::vector<double> values;
  for (const auto& [step, value] : curve.points) {
    if (std::isfinite(value)) values.push_back(value);
  }
  if (values.size() > most) values.erase(values.begin(), values.end() - static_cast<std::ptrdiff_t>(most));
  std::string out;
  if (values.empty()) return out;
  const auto [least, greatest] = std::ranges::minmax(values);
  for (const double value : values) {
    const double part = greatest > least ? (value - least) / (greatest - least) : 0.5;
    out += kBars[static_cast<size_t>(std::lround(part * (kBars.size() - 1)))];
  }
  return out;
}

}  // namespace cairn::tools
