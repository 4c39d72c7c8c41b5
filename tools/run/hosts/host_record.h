#pragma once
// What the hosts of a run have cost it, and what follows for the next failure: the remedy of its class, where there may
// be another host to take the place. A rank that fails in the same way behind the same step each time is the program's
// fault or its data's: another host would do the same, and so none leaves for it. Pure.

#include <cstdint>
#include <vector>

#include "runtime/agent/supervisor.h"

namespace cairn::tools {

inline constexpr int64_t kHostTries = 3;          // so many failures of a host's ranks
inline constexpr double kHostTriesWithinS = 600;  // within so long, without progress, and it counts as bad

class HostRecord {
 public:
  /// A failure of a rank of `host` (its index), behind this step of the run. `spare`: another host can take its place.
  agent::Restart judge(int64_t host, const agent::Failure& failure, int64_t step, double now_s, bool spare);
  /// The run got somewhere: what was before counts no more.
  void progress() { failures_.clear(); }
  /// Why judge() has said kElsewhere, in words: "3 failures of its ranks in 10 min, the last: a crash".
  const std::string& reason() const { return reason_; }

 private:
  struct One {
    int64_t host = 0, step = 0;
    agent::FailureClass which = agent::FailureClass::kError;
    double at_s = 0;
  };
  std::vector<One> failures_;
  std::vector<agent::FailureClass> moved_;  // classes that have had their one move
  std::string reason_;
};

}  // namespace cairn::tools
