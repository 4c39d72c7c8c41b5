#pragma once
// What is asked of a run while it trains, from the agent's side: files in its folder and the time limit
// (runtime/agent/requests.h), and the signals that ask for a save. Tells ranks through the node, and the person.
//
// Threads: the agent's event loop, except for stop_now().

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ckpt/node.h"
#include "runtime/agent/requests.h"
#include "runtime/core/result.h"
#include "tools/run/agent/callbacks.h"

namespace cairn::tools {

/// As given on the command line.
struct RequestArgs {
  std::string time_limit, on_usr = "save";
  int exit_when_unfinished = 0;  // 0: as ever
  int64_t stop_at = 0;           // step; 0: none
};

struct RequestOptions {
  std::optional<double> time_limit_s;  // from the start of this process
  bool any_limit = true;               // false: `--time-limit none`
  bool stop_on_usr = false;
  int exit_when_unfinished = 0;
  int64_t stop_at = 0;  // save and stop once this step is done; 0: no such wish

  std::vector<int> stop_signals() const;  // SIGHUP is none where it is ignored (nohup)
  std::vector<int> told_signals() const;
};
/// Errors: kInvalidInput naming the option.
Result<RequestOptions> request_options(const RequestArgs& args);

/// First of all in a process that will be an agent: what asks for a save or a report ends nothing before there is
/// somebody to take it. It waits until then.
void hold_requests(int argc, char** argv);

/// "SIGUSR1"
std::string signal_name(int signal);

class RunRequests {
 public:
  RunRequests(std::filesystem::path run, RequestOptions options, RunCallbacks callbacks);

  /// Says which limit holds, which counts from here on. `checkpoint_bytes`: for a guess at what a save takes, until one
  /// has been seen.
  void set_limit(int64_t checkpoint_bytes);
  /// Once the start is not refused any more and its events are open: from here on what lies in the folder counts.
  void open();

  /// Any thread, also while a checkpoint is being loaded: whether a file or the limit asks for a stop at once. Looks at
  /// the folder each second, however often it is called.
  bool stop_now();
  /// Who asked for it: "RUN/stop", "--time-limit"; empty: nobody did. `why`: to be said behind that, may stay empty.
  std::string stop_by(std::string* why);
  /// What else was asked since the last call goes to the ranks. `last_step`: that they have told of.
  void pass_on(ckpt::CheckpointNode& node, int64_t last_step);
  /// A signal asks for a save.
  void ask_save(ckpt::CheckpointNode& node, const std::string& by);

  void step_took(double seconds);
  /// Before the event is recorded: whoever sees it there finds RUN/save gone.
  void save_ended(const ckpt::PersistEvent& event);
  /// No rank runs any more. `left`: they have reached their end, or where a stop was asked for. `on_disk`: the newest
  /// step is.
  void ended(bool left, bool on_disk);

  /// Whether RUN/stop or --stop-at asks for one later.
  bool stop_planned() const { return planned_; }
  /// The same, and that ranks which have left behind `step` have done so for it.
  bool stop_due(int64_t step) const { return planned_ && planned_step_ <= step; }
  bool out_of_time() const;
  const RequestOptions& options() const { return options_; }

 private:
  void look();  // with mutex_ held
  void plan_stop(ckpt::CheckpointNode& node, int64_t step, const std::string& by, int64_t last_step);

  std::filesystem::path run_;
  RequestOptions options_;
  RunCallbacks callbacks_;
  std::optional<agent::TimeLimit> limit_;
  bool planned_ = false, option_planned_ = false;  // option: of --stop-at
  int64_t planned_step_ = 0;                       // 0: at the next save
  uint64_t asked_ = 0;                             // number of the last save that was asked for
  uint64_t save_number_ = 0;                       // of that of RUN/save; 0: none is under way

  std::mutex mutex_;  // guards what follows
  bool opened_ = false;
  agent::RequestFiles files_;
  agent::Pace pace_;
  std::vector<agent::RequestFiles::News> news_;  // that pass_on() has not had yet
  std::string stop_by_, stop_text_;
};

}  // namespace cairn::tools
