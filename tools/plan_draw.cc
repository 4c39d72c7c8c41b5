#include "tools/plan_draw.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace cairn::tools {
namespace {

constexpr PassTimes kTimes{1, 1, 1};  // each computes as many products: a whole backward takes two units

using Timeline = std::vector<std::vector<TimedAction>>;

double end_of(const Timeline& timeline) {
  double end = 0;
  for (const auto& rank : timeline) end = std::max(end, rank.back().end);
  return end;
}

std::string chunk_letter(const ScheduleShape& shape, int64_t chunk) {
  return shape.chunks > 1 ? std::string(1, static_cast<char>('a' + chunk % 26)) : "";
}

std::string bubble_text(const ScheduleShape& shape, const Timeline& timeline) {
  const auto busy = static_cast<double>(3 * shape.micro_batches * shape.chunks);
  const double end = end_of(timeline);
  return fmt::format("{} of {} units idle on every rank: {:.1f} %", end - busy, end, (1 - busy / end) * 100);
}

/// `3>` a forward, `<3` a whole backward or the half of the input, `3w` the half of the weights.
std::string cell_text(const Action& action, const std::string& name, int64_t columns) {
  switch (action.kind) {
    case ActionKind::kForward:
      return fmt::format("{:>{}}>", name, columns - 1);
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
      return fmt::format("<{:<{}}", name, columns - 1);
    case ActionKind::kBackwardWeight:
      return fmt::format("{:>{}}w", name, columns - 1);
  }
  return {};
}

const char* pass_text(ActionKind kind) {
  constexpr const char* kNames[] = {"forward", "backward", "backward of the input", "backward of the weights"};
  return kNames[static_cast<int>(kind)];
}

bool splits_backward(const Timeline& timeline) {
  return std::ranges::any_of(timeline, [](const auto& rank) {
    return std::ranges::any_of(
        rank, [](const TimedAction& timed) { return timed.action.kind == ActionKind::kBackwardWeight; });
  });
}

/// "#9fc6ee" of a hue in degrees, saturation and lightness: SVG 1.1 has no hsl().
std::string hex_color(double hue, double saturation, double lightness) {
  const double reach = saturation * std::min(lightness, 1 - lightness);
  const auto channel = [&](double shift) {
    const double at = std::fmod(shift + hue / 30, 12);
    return std::lround(255 * (lightness - reach * std::clamp(std::min(at - 3, 9 - at), -1.0, 1.0)));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", channel(0), channel(8), channel(4));
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

Result<std::string> draw_schedule(const ScheduleShape& shape, int64_t columns, const Palette& color) {
  RT_TRY_SET(const Timeline timeline, simulate_schedule(shape, kTimes));
  const auto digits = static_cast<int64_t>(std::to_string(shape.micro_batches - 1).size());
  const int64_t unit = digits + (shape.chunks > 1 ? 2 : 1);  // columns of a forward: number, letter, arrow
  const auto label = static_cast<int64_t>(std::to_string(shape.pp - 1).size()) + 6;  // "rank 3 "
  const auto whole = static_cast<int64_t>(std::lround(end_of(timeline))) * unit;
  const int64_t shown = std::max(unit * 3, std::min(whole, (columns - label) / unit * unit));
  std::string out;
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    out += fmt::format("{:<{}}", fmt::format("rank {}", rank), label);
    int64_t at = 0;
    for (const TimedAction& timed : timeline[rank]) {
      const int64_t begin = std::lround(timed.begin) * unit,
                    end = std::min<int64_t>(std::lround(timed.end) * unit, shown);
      if (begin >= shown) break;
      if (begin > at) out += fmt::format("{}{:.>{}}{}", color.dim, "", begin - at, color.reset);
      const ActionKind kind = timed.action.kind;
      const std::string name = fmt::format("{}{}", timed.action.micro_batch, chunk_letter(shape, timed.action.chunk));
      std::string cell = cell_text(timed.action, name, std::lround(timed.end - timed.begin) * unit);
      cell.resize(end - begin);
      out += fmt::format("{}{}{}",
                         kind == ActionKind::kForward          ? color.green
                         : kind == ActionKind::kBackwardWeight ? color.dim
                                                               : color.bold,
                         cell, color.reset);
      at = end;
    }
    if (at < shown) out += fmt::format("{}{:.>{}}{}", color.dim, "", shown - at, color.reset);
    out += "\n";
  }
  out += fmt::format("3> is a forward (1 unit), <3 a backward (2 units{}), dots are idle; {}\n",
                     splits_backward(timeline) ? ", or 1 for the input and later 1 for the weights, 3w" : "",
                     bubble_text(shape, timeline));
  if (shown < whole) {
    out += fmt::format("the first {} of {} units; --svg FILE draws all of it\n", shown / unit, whole / unit);
  }
  return out;
}

Result<std::string> schedule_svg(const ScheduleShape& shape, const std::string& title) {
  RT_TRY_SET(const Timeline timeline, simulate_schedule(shape, kTimes));
  constexpr double kUnit = 22, kRow = 24, kLeft = 64, kTop = 34;
  // Hues from blue to violet for forwards and from green to yellow for backwards, a step a chunk; the half of the
  // weights is pale.
  const auto fill = [&](const Action& action) {
    const bool forward = action.kind == ActionKind::kForward;
    const double step = 60.0 * static_cast<double>(action.chunk) / static_cast<double>(shape.chunks);
    const double lightness = forward ? 0.78 : action.kind == ActionKind::kBackwardWeight ? 0.88 : 0.72;
    return hex_color((forward ? 210 : 95) + (forward ? step : -step), forward ? 0.7 : 0.45, lightness);
  };
  const double width = kLeft + end_of(timeline) * kUnit + 10, height = kTop + static_cast<double>(shape.pp) * kRow + 30;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      "<text x=\"8\" y=\"20\" font-size=\"13\">{2}</text>\n",
      width, height, escaped(title));
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    const double y = kTop + static_cast<double>(rank) * kRow;
    out += fmt::format("<text x=\"8\" y=\"{:.0f}\">rank {}</text>\n", y + 15, rank);
    for (const TimedAction& timed : timeline[rank]) {
      const double x = kLeft + timed.begin * kUnit, wide = (timed.end - timed.begin) * kUnit;
      out += fmt::format(
          "<g><title>{} of micro-batch {}, stage {}</title><rect x=\"{:.1f}\" y=\"{:.0f}\" width=\"{:.1f}\" "
          "height=\"20\" fill=\"{}\" stroke=\"#666\" stroke-width=\"0.5\"/><text x=\"{:.1f}\" y=\"{:.0f}\" "
          "text-anchor=\"middle\">{}{}</text></g>\n",
          pass_text(timed.action.kind), timed.action.micro_batch, stage_at(shape, rank, timed.action.chunk), x, y, wide,
          fill(timed.action), x + wide / 2, y + 14, timed.action.micro_batch, chunk_letter(shape, timed.action.chunk));
    }
  }
  out +=
      fmt::format("<text x=\"{:.0f}\" y=\"{:.0f}\">forward 1 unit, backward 2{}; {}</text>\n</svg>\n", kLeft,
                  height - 10, splits_backward(timeline) ? ", or its halves 1 each" : "", bubble_text(shape, timeline));
  return out;
}

}  // namespace cairn::tools
