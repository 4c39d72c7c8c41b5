#include "runtime/telemetry/terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace cairn::telemetry {

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds)) return "?";
  if (seconds < 1) return fmt::format("{:.0f} ms", seconds * 1000);
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
}

std::string draw_curve(const std::vector<double>& values, int64_t columns, int64_t rows, bool utf8) {
  std::vector<double> finite;
  for (const double value : values) {
    if (std::isfinite(value)) finite.push_back(value);
  }
  if (finite.size() < 2 || columns < 2 || rows < 2) return {};
  columns = std::min<int64_t>(columns, static_cast<int64_t>(finite.size()));
  std::vector<double> column(columns);
  for (int64_t c = 0; c < columns; ++c) {
    const auto n = static_cast<int64_t>(finite.size());
    const int64_t begin = c * n / columns, end = std::max(begin + 1, (c + 1) * n / columns);
    double sum = 0;
    for (int64_t k = begin; k < end; ++k) sum += finite[k];
    column[c] = sum / static_cast<double>(end - begin);
  }
  const auto [low, high] = std::minmax_element(column.begin(), column.end());
  const double span = std::max(*high - *low, 1e-12);
  // Eighth blocks give each character row eight heights.
  static const char* const kBlocks[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::string out;
  for (int64_t row = rows - 1; row >= 0; --row) {
    const std::string label = row == rows - 1 ? fmt::format("{:7.3f} ", *high)
                              : row == 0      ? fmt::format("{:7.3f} ", *low)
                                              : std::string(8, ' ');
    out += label + (utf8 ? "│" : "|");
    for (int64_t c = 0; c < columns; ++c) {
      const double height = (column[c] - *low) / span * (static_cast<double>(rows) - 0.125) + 0.125;
      const double part = std::clamp(height - static_cast<double>(row), 0.0, 1.0);
      if (utf8) {
        out += kBlocks[static_cast<int>(std::lround(part * 8))];
      } else {
        out += part <= 0.05 ? ' ' : part < 0.55 ? '.' : '#';
      }
    }
    out += '\n';
  }
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

void ProgressLine::show(const std::string& text, bool due) {
  if (!terminal_) {
    if (due) write(text + "\n");
    return;
  }
  winsize size{};
  const size_t width = ::ioctl(fd_, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 100;
  write("\r\x1b[K" + text.substr(0, width - 1));
  open_ = true;
}

void ProgressLine::say(const std::string& text) {
  write((open_ ? "\r\x1b[K" : "") + text + "\n");
  open_ = false;
}

}  // namespace cairn::telemetry
