#pragma once
// Which saves take longer than saves of this run do, and which lines failed saves have. Pure.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace cairn::tools {

class OverdueSaves {
 public:
  struct News {
    int64_t step = 0;
    double seconds = 0;  // that it has been under way
    bool operator==(const News&) const = default;
  };
  /// `under_way`: the steps that are to be saved and whole in memory. A save is news after a minute, or after three
  /// times as long as the longest has taken, and again each time that it has taken twice as long.
  std::vector<News> look(const std::set<int64_t>& under_way, double now_s);
  /// A save has ended on disk.
  void took(double seconds);

 private:
  struct Save {
    double since_s = 0, next_s = 0;
  };
  double patience_s_ = 60;
  std::map<int64_t, Save> saves_;  // by step
};

/// Saves that fail, as each one on a full disk does: a line a minute at most, with how many it stands for.
class FailedSaves {
 public:
  /// Returns the line to print now; nothing: this failure is counted.
  std::optional<std::string> failed(int64_t step, std::string text, double now_s);
  /// Returns the line about the counted ones, a minute after the last line, or at the end.
  std::optional<std::string> due(double now_s, bool at_end = false);

 private:
  std::optional<double> line_s_;  // of the last line
  int64_t counted_ = 0, first_ = 0, last_ = 0;
  std::string text_;  // of the last one
};

}  // namespace cairn::tools
