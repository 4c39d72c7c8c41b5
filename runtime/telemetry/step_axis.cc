#include "runtime/telemetry/step_axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

namespace cairn::telemetry {
namespace {

/// The least of 1, 2, 5, 10, 20, 50, ... that is at least `value`.
int64_t round_interval(double value) {
  int64_t unit = 1;
  while (unit < INT64_MAX / 100) {
    for (const int64_t times : {1, 2, 5}) {
      if (static_cast<double>(unit * times) >= value) return unit * times;
    }
    unit *= 10;
  }
  return unit;
}

}  // namespace

std::string axis_number(double value) {
  return std::abs(value) < 1e6 ? fmt::format("{:7.3f}", value) : fmt::format("{:7.1e}", value);
}

std::string draw_step_axis(const std::vector<int64_t>& steps, int64_t last, int64_t margin, bool utf8) {
  const auto width = std::ssize(steps);
  const std::string first = fmt::format("step {}", steps.front()), end = fmt::format("{}", last);
  std::string labels = first;
  labels.resize(static_cast<size_t>(std::max<int64_t>(width - std::ssize(end), std::ssize(first) + 1)), ' ');
  labels += end;
  std::vector<bool> ticks(static_cast<size_t>(width));
  const int64_t apart = std::max<int64_t>(12, 2 * std::ssize(end));  // columns from one label to the next
  const double span = static_cast<double>(last) - static_cast<double>(steps.front());
  const int64_t interval = round_interval(span * static_cast<double>(apart) / static_cast<double>(width));
  for (int64_t c = 1; c < width; ++c) {
    const int64_t step = steps[static_cast<size_t>(c)] / interval * interval;  // the round one in or before the column
    if (step <= steps[static_cast<size_t>(c - 1)] || step <= 0) continue;
    const std::string label = fmt::format("{}", step);
    const int64_t from = c - std::ssize(label) / 2, to = from + std::ssize(label);
    if (from < 1 || to + 1 > std::ssize(labels)) continue;
    const std::string_view room = std::string_view(labels).substr(static_cast<size_t>(from - 1), label.size() + 2);
    if (room.find_first_not_of(' ') != std::string_view::npos) continue;
    labels.replace(static_cast<size_t>(from), label.size(), label);
    ticks[static_cast<size_t>(c)] = true;
  }
  std::string out = std::string(static_cast<size_t>(margin), ' ') + (utf8 ? "└" : "+");
  for (const bool tick : ticks) out += tick ? (utf8 ? "┬" : "+") : (utf8 ? "─" : "-");
  return out + fmt::format("\n{:{}}{}\n", "", margin + 1, labels);
}

}  // namespace cairn::telemetry
