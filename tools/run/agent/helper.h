#pragma once
// Processes that the agent keeps beside the training, and its one wait for them at the end of the run. A Helper is this
// program, works until the run ends, and is started again when it dies. Neither ranks nor saves wait for it.
//
// Threads: the agent's event loop.

#include <chrono>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/agent/child_process.h"
#include "runtime/agent/event_pipe.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::tools {

/// It is given a pipe, --control-fd N: 'w' means news, 'f' finish the work and leave with 0; its end: leave.
class Helper {
 public:
  struct Options {
    std::vector<std::string> words;  // behind the program's name
    std::filesystem::path log;
    std::function<void(const nlohmann::json& event)> take;  // what it reports
    /// It cannot be started, and is tried again; once in a row.
    std::function<void(const std::string& why)> not_started;
    /// It died, and is started again: how ("exited with code 1") and its last words. Once in a row.
    std::function<void(const std::string& how, const std::vector<std::string>& last_lines)> died;
  };
  explicit Helper(Options options);
  ~Helper();  // kills it
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;

  void start();
  void news() { send('w'); }
  /// Takes what it reports, and starts it again once it is time.
  void poll();
  /// It has done something: a death counts as the first from here on.
  void worked();
  /// The work should end. A death from here on is followed by another start within a second.
  void finish();
  bool finished() const { return finished_; }

 private:
  void send(char c);
  void restart_in(double seconds);
  void take_events();

  Options options_;
  std::optional<agent::ChildProcess> process_;
  agent::LineSplitter lines_;
  Fd control_;
  std::chrono::steady_clock::time_point restart_at_;
  double restart_s_;
  bool finishing_ = false, finished_ = false, told_ = false;
};

/// The other end of --control-fd, in the helper's process.
class HelperControl {
 public:
  /// Errors: the system's.
  static Result<HelperControl> take(int fd);
  bool finishing() const { return finishing_; }
  /// Waits until something is said, at most `seconds`. `only_finish`: news are no reason to return. Where the agent is
  /// gone the process ends.
  void wait(double seconds, bool only_finish);

 private:
  explicit HelperControl(int fd) : fd_(fd) {}
  bool drain();

  int fd_;
  bool finishing_ = false;
};

/// Why the end of a run waits for nothing more. kSignal: a stop signal that the supervisor has taken.
enum class Hurry { kNone, kTimeLimit, kSignal };

/// How a wait at the end of the run ended.
struct EndWait {
  bool interrupted = false, late = false;  // by a signal; at the time limit
  double seconds = 0;

  /// "stopped by a signal after 3.2 s"
  std::string text() const;
};

/// Waits until poll(seconds waited), called 20 times a second, returns nothing to wait for; or until one of the signals
/// (blocked in this thread) comes, or there is a hurry.
EndWait wait_at_end(std::span<const int> stop_signals, const std::function<Hurry()>& hurry,
                    const std::function<std::string(double seconds)>& poll,
                    const std::function<void(const std::string& text)>& say);

}  // namespace cairn::tools
