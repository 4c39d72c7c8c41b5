#pragma once
// What a person sees: durations, a loss curve in characters, one live line on a terminal and plain lines in a log.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cairn::telemetry {

/// "850 ms", "12.3 s", "4 min 05 s", "2 h 10 min".
std::string format_duration(double seconds);

/// y over index as `rows` lines of `columns` characters, an axis with the extremes at the left. Values are averaged per
/// column; non-finite ones are left out. Empty for fewer than two values.
std::string draw_curve(const std::vector<double>& values, int64_t columns, int64_t rows, bool utf8);

/// Whether the locale takes UTF-8 (LC_ALL, LC_CTYPE, LANG).
bool locale_is_utf8();

/// One line that is overwritten on a terminal; on anything else each line that is due is printed for good.
class ProgressLine {
 public:
  explicit ProgressLine(int fd);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  bool terminal() const { return terminal_; }
  /// `due`: worth a line of its own where lines stay.
  void show(const std::string& text, bool due);
  /// A line for good, above the live one.
  void say(const std::string& text);

 private:
  void write(std::string_view text) const;
  int fd_;
  bool terminal_;
  bool open_ = false;  // a live line stands without its newline
};

}  // namespace cairn::telemetry
