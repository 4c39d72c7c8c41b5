#pragma once
// Which saves take longer than saves of this run do. Pure.

#include <cstdint>
#include <map>
#include <set>
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

}  // namespace cairn::tools
