#include "tools/report/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/core/units.h"
#include "runtime/telemetry/step_axis.h"
#include "tools/run/folder/text.h"

namespace cairn::tools {
namespace {

constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

char letter_of(size_t run) { return kLetters[run % kLetters.size()]; }

/// The end of a long name, which differs where the beginnings are one folder's.
std::string name_within(const std::string& name, int64_t columns) {
  std::string text = printable(name);
  while (telemetry::columns_of(text) > columns) text.erase(0, 1);
  while (!text.empty() && (static_cast<unsigned char>(text[0]) & 0xC0) == 0x80) text.erase(0, 1);
  return text;
}

std::string padded(const std::string& text, int64_t columns) {
  return text + std::string(static_cast<size_t>(std::max<int64_t>(0, columns - telemetry::columns_of(text))), ' ');
}

/// In at most 7 columns.
std::string cell(double value) {
  if (!std::isfinite(value)) return "-";
  const double size = std::abs(value);
  return size < 999   ? fmt::format("{:.3f}", value)
         : size < 1e6 ? fmt::format("{:.0f}", value)
                      : fmt::format("{:.0e}", value);
}

}  // namespace

ComparedRun compared_run(const History& history, std::string name) {
  ComparedRun out{.name = std::move(name),
                  .alive = history.holder.has_value(),
                  .summary = summary_of(history),
                  .saves = std::ssize(history.saves),
                  .starts = std::ssize(history.starts)};
  if (history.goodput) out.goodput = history.goodput->share(history.goodput->kept);
  for (const telemetry::StepMetrics& step : history.steps) out.loss.push_back({step.step, step.loss});
  return out;
}

std::string draw_losses(const std::vector<ComparedRun>& runs, int64_t columns, int64_t rows, bool utf8) {
  int64_t first = INT64_MAX, last = INT64_MIN;
  for (const ComparedRun& run : runs) {
    for (const telemetry::CurvePoint& point : run.loss) {
      if (!std::isfinite(point.value)) continue;
      first = std::min(first, point.step);
      last = std::max(last, point.step);
    }
  }
  if (first >= last || rows < 2) return {};
  const int64_t width = std::max<int64_t>(columns, 40) - 9;
  const double scale = static_cast<double>(width - 1) / (static_cast<double>(last) - static_cast<double>(first));
  std::vector<std::vector<double>> means;
  double low = INFINITY, high = -INFINITY;
  for (const ComparedRun& run : runs) {
    std::vector<double> sum(static_cast<size_t>(width)), count(static_cast<size_t>(width));
    for (const telemetry::CurvePoint& point : run.loss) {
      if (!std::isfinite(point.value)) continue;
      const auto column = static_cast<size_t>((static_cast<double>(point.step) - static_cast<double>(first)) * scale);
      sum[column] += point.value;
      count[column] += 1;
    }
    for (size_t c = 0; c < sum.size(); ++c) {
      sum[c] = count[c] > 0 ? std::clamp(sum[c] / count[c], -telemetry::kDrawnBound, telemetry::kDrawnBound) : NAN;
      if (!std::isfinite(sum[c])) continue;
      low = std::min(low, sum[c]);
      high = std::max(high, sum[c]);
    }
    means.push_back(std::move(sum));
  }
  std::vector<std::string> grid(static_cast<size_t>(rows), std::string(static_cast<size_t>(width), ' '));
  for (size_t run = 0; run < means.size(); ++run) {
    for (size_t c = 0; c < means[run].size(); ++c) {
      if (!std::isfinite(means[run][c])) continue;
      const double height = (means[run][c] - low) / std::max(high - low, 1e-12);
      char& at = grid[static_cast<size_t>(std::lround(height * static_cast<double>(rows - 1)))][c];
      at = at == ' ' || at == letter_of(run) ? letter_of(run) : '*';
    }
  }
  std::string out;
  for (int64_t row = rows - 1; row >= 0; --row) {
    const std::string label = row == rows - 1 ? cell(high) : row == 0 ? cell(low) : "";
    out += fmt::format("{:>7} {}{}\n", label, utf8 ? "│" : "|", grid[static_cast<size_t>(row)]);
  }
  std::vector<int64_t> steps;
  for (int64_t c = 0; c < width; ++c) steps.push_back(first + std::llround(std::ceil(static_cast<double>(c) / scale)));
  return out + telemetry::draw_step_axis(steps, last, 8, utf8);
}

std::string compare_text(const std::vector<ComparedRun>& runs, int64_t columns, bool utf8) {
  std::string out = draw_losses(runs, columns, 12, utf8);
  if (!out.empty()) out += "\n";
  const int64_t most = std::max<int64_t>(columns, 60) - 60;
  int64_t width = 3;
  for (const ComparedRun& run : runs)
    width = std::max(width, std::min(most, telemetry::columns_of(name_within(run.name, most))));
  out += fmt::format("  {}  {:>9} {:>7} {:>7} {:>7} {:>6} {:>6} {:>6}\n", padded("run", width), "step", "loss", "valid",
                     "best", "tok/s", "good", "starts");
  for (size_t k = 0; k < runs.size(); ++k) {
    const ComparedRun& run = runs[k];
    const Summary& is = run.summary;
    out += fmt::format("{} {}  {:>9} {:>7} {:>7} {:>7} {:>6} {:>6} {:>6}{}\n", letter_of(k),
                       padded(name_within(run.name, width), width), is.step, cell(is.last_loss), cell(is.valid_loss),
                       cell(is.best_valid_loss), std::isfinite(is.tokens_per_s) ? format_count(is.tokens_per_s) : "-",
                       std::isfinite(run.goodput) ? fmt::format("{:.0f}%", 100 * run.goodput) : "-", run.starts,
                       run.alive ? " +" : "");
  }
  out += "  best: of the evaluations; tok/s: the median; good: goodput; +: at work\n";
  return out;
}

}  // namespace cairn::tools
