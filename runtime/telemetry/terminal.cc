#include "runtime/telemetry/terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "runtime/telemetry/step_axis.h"

namespace cairn::telemetry {

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds)) return "?";
  if (seconds < 1) return fmt::format("{:.0f} ms", seconds * 1000);
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
}

std::string draw_curve(const std::vector<CurvePoint>& points, int64_t columns, int64_t rows, bool utf8) {
  std::vector<CurvePoint> finite;
  for (const CurvePoint& point : points) {
    if (std::isfinite(point.value)) finite.push_back(point);
  }
  if (finite.size() < 2 || rows < 2) return {};
  const auto bounds = std::ranges::minmax(finite, {}, &CurvePoint::value);
  const auto margin =
      static_cast<int64_t>(std::max(axis_number(bounds.min.value).size(), axis_number(bounds.max.value).size()));
  const auto count = static_cast<int64_t>(finite.size());
  const int64_t width = std::min(std::max<int64_t>(columns, 40) - margin - 2, count);  // the margin, a space, the axis
  std::vector<double> column(static_cast<size_t>(width));
  for (int64_t c = 0; c < width; ++c) {
    const int64_t begin = c * count / width, end = std::max(begin + 1, (c + 1) * count / width);
    double sum = 0;
    for (int64_t k = begin; k < end; ++k) sum += finite[static_cast<size_t>(k)].value;
    column[static_cast<size_t>(c)] = std::clamp(sum / static_cast<double>(end - begin), -kDrawnBound, kDrawnBound);
  }
  const auto [low, high] = std::minmax_element(column.begin(), column.end());
  const double span = std::max(*high - *low, 1e-12);
  // Eighth blocks give each character row eight heights.
  static const char* const kBlocks[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::string out;
  for (int64_t row = rows - 1; row >= 0; --row) {
    const std::string label = row == rows - 1 ? axis_number(*high) : row == 0 ? axis_number(*low) : std::string();
    out += fmt::format("{:>{}} {}", label, margin, utf8 ? "│" : "|");
    for (const double value : column) {
      const double height = (value - *low) / span * (static_cast<double>(rows) - 0.125) + 0.125;
      const double part = std::clamp(height - static_cast<double>(row), 0.0, 1.0);
      if (utf8) {
        out += kBlocks[static_cast<int>(std::lround(part * 8))];
      } else {
        out += part <= 0.05 ? ' ' : part < 0.55 ? '.' : '#';
      }
    }
    out += '\n';
  }
  std::vector<int64_t> steps;
  for (int64_t c = 0; c < width; ++c) steps.push_back(finite[static_cast<size_t>(c * count / width)].step);
  return out + draw_step_axis(steps, finite.back().step, margin + 1, utf8);
}

int64_t terminal_columns(int fd, int64_t otherwise) {
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  const char* given = std::getenv("COLUMNS");
  const int64_t columns = given == nullptr ? 0 : std::strtol(given, nullptr, 10);
  return columns > 0 ? columns : otherwise;
}

int64_t columns_of(std::string_view text) {
  int64_t out = 0;
  for (size_t k = 0; k < text.size(); ++k) {
    if (text.substr(k, 2) == "\x1b[") {
      k = text.find('m', k);
      if (k == std::string_view::npos) break;
    } else if ((static_cast<unsigned char>(text[k]) & 0xC0) != 0x80) {
      ++out;
    }
  }
  return out;
}

namespace {

std::string wrap_line(std::string_view line, int64_t columns) {
  if (columns_of(line) <= columns) return std::string(line);
  const size_t text = std::min(line.find_first_not_of(' '), line.size());
  size_t hang = text + 4;
  for (size_t gap = line.find("  ", text); gap != std::string_view::npos; gap = line.find("  ", gap)) {
    gap = std::min(line.find_first_not_of(' ', gap), line.size());
    const auto at = static_cast<size_t>(columns_of(line.substr(0, gap)));
    if (gap < line.size() && at <= static_cast<size_t>(columns) / 2) hang = at;
  }
  std::string out, now(line.substr(0, text));
  for (size_t at = text; at < line.size();) {  // a word with the spaces before it
    const size_t word = std::min(line.find_first_not_of(' ', at), line.size());
    const size_t end = std::min(line.find(' ', word), line.size());
    if (word == line.size()) break;
    if (columns_of(now) + columns_of(line.substr(at, end - at)) > columns && at > text) {
      out += now + '\n';
      now = std::string(hang, ' ');
      at = word;
    }
    now += line.substr(at, end - at);
    at = end;
  }
  return out + now;
}

}  // namespace

std::string wrap_text(std::string_view text, int64_t columns) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    out += wrap_line(text.substr(at, end - at), columns);
    if (end < text.size()) out += '\n';
    at = end + 1;
  }
  return out;
}

std::string fit_line(std::vector<LinePart> parts, int64_t columns) {
  const auto joined = [&] {
    std::string out;
    for (const LinePart& part : parts) out += (out.empty() ? "" : "  ") + part.text;
    return out;
  };
  while (parts.size() > 1 && columns_of(joined()) > columns)
    parts.erase(std::ranges::max_element(parts, {}, &LinePart::leaves));
  std::string out = joined();
  if (columns_of(out) > columns) out.resize(static_cast<size_t>(columns));
  return out;
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    std::string lower(value);
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
    return lower.find("utf-8") != std::string::npos || lower.find("utf8") != std::string::npos;
  }
  return false;
}

ProgressLine::ProgressLine(int fd) : fd_(fd) {
  const char* term = std::getenv("TERM");
  terminal_ = ::isatty(fd) == 1 && !(term != nullptr && std::string_view(term) == "dumb");
}

ProgressLine::~ProgressLine() {
  if (open_) write("\n");
}

void ProgressLine::write(std::string_view text) const {
  while (!text.empty()) {
    const ssize_t n = ::write(fd_, text.data(), text.size());
    if (n <= 0) return;  // nobody reads any more: progress is no reason to fail
    text.remove_prefix(n);
  }
}

void ProgressLine::show(const std::vector<LinePart>& parts, const std::string& stamp, bool due) {
  if (terminal_) {
    write("\r\x1b[K" + fit_line(parts, terminal_columns(fd_, 100) - 1));
    open_ = true;
  } else if (due) {
    std::string line = stamp;
    for (const LinePart& part : parts) line += (line.empty() ? "" : "  ") + part.text;
    write(line + "\n");
  }
}

void ProgressLine::say(const std::string& text) {
  write((open_ ? "\r\x1b[K" : "") + (terminal_ ? wrap_text(text, terminal_columns(fd_, 100)) : text) + "\n");
  open_ = false;
}

}  // namespace cairn::telemetry
