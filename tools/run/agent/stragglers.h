#pragma once
// Which ranks compute longer than those that do the same work, and so hold up all. Every rank tells of its time in
// blocks of steps (runtime/telemetry/pace.h); compared are ranks of one pipeline stage. A rank is slow in a block where
// it took more than kSlow times the median of its stage; it is a straggler where that was so in three quarters of the
// blocks of a window. Means and not medians: a CPU limit stops some steps for long, and others not at all. Pure.

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "runtime/agent/host_load.h"
#include "runtime/telemetry/pace.h"

namespace cairn::tools {

class Stragglers {
 public:
  static constexpr double kSlow = 1.3;
  static constexpr double kWindowS = 3;  // at least: less is noise of a busy machine

  /// `stage`: of each rank. A stage of one rank has nobody to be compared with.
  explicit Stragglers(std::vector<int64_t> stage) : stage_(std::move(stage)) {}

  /// Other ranks: what was told before is nothing to them. Who was a straggler is none any more.
  void clear();
  void add(int64_t rank, const telemetry::Pace& pace, const agent::HostLoad& load);

  struct News {
    int64_t rank = 0;
    bool over = false;     // it is no straggler any more
    double ratio = 1;      // of its time to its stage's median, over the window
    int64_t step = 0;      // of the window's end
    agent::HostLoad load;  // of the window
  };
  /// Now and then; `now_s` of any clock that goes on. Who has become a straggler, or is none any more, since the call
  /// before; and again whose cause shows now, or a weightier one.
  std::vector<News> judge(double now_s);

  struct Slowest {
    int64_t rank = 0;
    double ratio = 1;  // of its time to its stage's median
  };
  /// The rank that is slower than its stage, kSlow times at least, by most: in the window that is open, or where no
  /// block of that has come, in the one before.
  std::optional<Slowest> slowest() const;

 private:
  struct Rank {
    int64_t blocks = 0, slow = 0;  // of the window
    double ratio = 0;              // sum over its blocks
    double before = 1;             // ratio of the window before
    bool straggles = false;
    agent::SlowCause told = agent::SlowCause::kUnknown;
    agent::HostLoad load;  // sums of the window, and its last values
    int64_t loads = 0;
  };
  static agent::HostLoad take_load(Rank& rank);
  void close(int64_t step, const std::map<int64_t, telemetry::Pace>& block);

  std::vector<int64_t> stage_;
  std::map<int64_t, std::map<int64_t, telemetry::Pace>> open_;  // blocks by their last step, in them ranks
  std::map<int64_t, Rank> ranks_;
  double window_s_ = -1;  // when it began; < 0: no block has come
  int64_t step_ = 0;      // of the newest block
};

}  // namespace cairn::tools
