#pragma once
// The commands of a recipe that the agent runs when something happens (`hooks`). Each is a process group of its own
// with a deadline. A hook runs one command at a time, and the newest event that comes meanwhile waits. Neither ranks
// nor saves wait for any; the end of the run does, for the hook's own timeout at most.
//
// Threads: the agent's event loop.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/agent.h"
#include "runtime/config/checkpoint.h"
#include "tools/run/agent/callbacks.h"
#include "tools/run/agent/helper.h"

namespace cairn::tools {

/// The name in T.on of an event as events.jsonl has it; empty: no hook hears of it.
std::string_view hook_event_of(const nlohmann::json& event);
/// `{step}`, `{dir}` and `{run}` put in; other braces stay.
std::vector<std::string> hook_argv(const std::vector<std::string>& run, int64_t step, const std::string& dir,
                                   const std::string& run_folder);
/// "2 hooks of the recipe are not run: --hooks"
std::string hooks_not_run(size_t count);

class RunHooks {
 public:
  /// `keep`: checkpoint.keep, whose first T.best says what "best" is. `run`: the folder.
  RunHooks(const std::vector<Hook>& hooks, const std::vector<Keep>& keep, std::filesystem::path run);
  ~RunHooks();  // kills what is under way

  /// Reports to the agent of the segment under way from now on.
  void report_to(RunCallbacks callbacks) { callbacks_ = std::move(callbacks); }
  /// An event as it was recorded. `step`: the newest of the run, for events without a step.
  void hear(const nlohmann::json& event, int64_t step);
  /// Starts what waits, ends what takes too long, and reports what failed.
  void poll();
  /// The run's end: waits for commands under way and those that wait, each hook at most its timeout, until one of the
  /// signals (blocked in this thread) comes, or the time limit. Ends the rest.
  void finish(std::span<const int> stop_signals, const std::function<Hurry()>& hurry);

 private:
  struct Call;
  struct One;
  void start(One& one);
  void take_end(One& one);
  void leave(One& one);
  void failed(One& one, const Call& call, const std::string& how, const std::vector<std::string>& last_lines);
  void tell_best(int64_t step);

  std::filesystem::path run_;
  std::vector<Keep> keep_;
  RunCallbacks callbacks_;
  bool wants_best_ = false;
  std::vector<std::unique_ptr<One>> all_;
};

}  // namespace cairn::tools
