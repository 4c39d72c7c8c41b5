#pragma once
// Output for a person: durations, a curve in characters, lines that fit a terminal, one live line there and plain lines
// in a log.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cairn::telemetry {

/// "850 ms", "12.3 s", "4 min 05 s", "2 h 10 min".
std::string format_duration(double seconds);

/// A value at a step of training.
struct CurvePoint {
  int64_t step = 0;
  double value = 0;
};

/// The values over their steps, which ascend: `rows` lines with the extremes at the left, and below them an axis with
/// the first and the last step. No line is longer than `columns` (at least 40). Values that are not finite are left
/// out, and a column shows the mean of its values. Empty for fewer than two values.
std::string draw_curve(const std::vector<CurvePoint>& points, int64_t columns, int64_t rows, bool utf8);

/// Characters that a line of this terminal holds; of anything else COLUMNS, or `otherwise`.
int64_t terminal_columns(int fd, int64_t otherwise);

/// How many columns a text takes: UTF-8 characters, without escape sequences.
int64_t columns_of(std::string_view text);

/// Each line of the text as several of at most `columns`, broken at spaces. Further lines begin below the text of the
/// first: behind its last gap of two spaces in the first half, or its indentation and four more. A word longer than a
/// line stays complete.
std::string wrap_text(std::string_view text, int64_t columns);

/// A part of a line of progress. Where the line is too long the part with the greatest `leaves` is dropped first.
struct LinePart {
  std::string text;
  int leaves = 0;
};
std::string fit_line(std::vector<LinePart> parts, int64_t columns);

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
  /// On a terminal, the parts that it has room for. Elsewhere, where lines stay, all parts behind `stamp`, if `due`.
  void show(const std::vector<LinePart>& parts, const std::string& stamp, bool due);
  /// A line for good, above the live one.
  void say(const std::string& text);

 private:
  void write(std::string_view text) const;
  int fd_;
  bool terminal_;
  bool open_ = false;  // a live line stands without its newline
};

}  // namespace cairn::telemetry
