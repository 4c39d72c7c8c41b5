#pragma once
// The trackers of a run (log.trackers), from the agent's side: a process for each (`cairn track --tracker N`), which
// reads the run's files. Nothing waits for one but the end of the run.
//
// Threads: the agent's event loop.

#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/config/agent.h"
#include "tools/run/agent/callbacks.h"
#include "tools/run/agent/helper.h"

namespace cairn::tools {

class RunTrackers {
 public:
  RunTrackers(std::vector<Tracker> trackers, std::filesystem::path run);
  ~RunTrackers();  // kills what is under way: the next start continues

  /// Reports to the agent of the segment under way from now on.
  void report_to(RunCallbacks callbacks) { callbacks_ = std::move(callbacks); }
  /// Starts the processes, unless they run since an earlier segment.
  void start();
  void poll();
  /// The run's end: waits until every step is sent, each tracker at most its `finish`, or until one of the signals
  /// (blocked in this thread) comes, or the time limit.
  void finish(std::span<const int> stop_signals, const std::function<Hurry()>& hurry);

 private:
  struct Child;

  std::vector<Tracker> trackers_;
  std::filesystem::path run_;
  RunCallbacks callbacks_;
  std::vector<std::unique_ptr<Child>> children_;
};

}  // namespace cairn::tools
