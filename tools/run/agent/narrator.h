#pragma once
// The one voice of a run: what people and programs read of it. Console, metrics.jsonl, events.jsonl, TensorBoard, the
// trace. It decides nothing; on several hosts there is one, beside whoever decides.
//
// Threads: the supervisor's loop, but for complete(), which the persister's call too.

#include <unistd.h>

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ckpt/persister.h"
#include "ckpt/restore.h"
#include "ckpt/retention/labels.h"
#include "runtime/agent/supervisor.h"
#include "runtime/core/clock.h"
#include "runtime/core/result.h"
#include "runtime/kernels/isa.h"
#include "runtime/plan/plan.h"
#include "runtime/telemetry/metrics.h"
#include "runtime/telemetry/tensorboard.h"
#include "runtime/telemetry/terminal.h"
#include "runtime/telemetry/trace.h"
#include "tools/run/agent/callbacks.h"

namespace cairn::tools {

/// How far a start of the run has come, in all its segments.
struct RunProgress {
  int64_t first_step = -1;  // before the first generation; -1: none has begun
  int64_t last_step = 0;
  double lost_ms = 0;  // to checkpoints
  double started_unix_s = 0;
  telemetry::StepMetrics last;  // the last step's; step 0: none
  std::optional<double> valid_loss;
};

struct NarratorOptions {
  double peak_tflops = 0;             // of the whole world; 0: not known
  bool traced = false;                // ranks draw steps: their files are merged, with the saves
  bool time_kernels = false;          // ranks time their ops
  bool init_on_command_line = false;  // what it says is for a new run: it is told when it counts for nothing
  nlohmann::json communication;       // of ranks on CUDA, for the record of each start; null: nothing to tell
  nlohmann::json attention;           // the same
  PastPoint run_end;                  // of the run with its stages ahead; step 0: of the plan
  std::optional<RunProgress> before;  // of this start's segments before the plan's
  int console = STDOUT_FILENO;
  /// Gets each event once it is recorded, and evaluations, which are lines of metrics.jsonl. `step`: the newest.
  std::function<void(const nlohmann::json& event, int64_t step)> heard;
};

class Narrator {
 public:
  /// `plan` and `clock` outlive it. `run`: the folder. Until something is opened it tells on the console alone.
  Narrator(const Plan& plan, std::filesystem::path run, NarratorOptions options,
           const Clock& clock = Narrator::system_clock());

  /// Asked before anything is written: whether the run is this process's yet. Without it all is written.
  void write_while(std::function<bool()> owns) { owns_ = std::move(owns); }
  /// Before the run's memory is opened, which may save at once.
  Status open_metrics(const std::string& run_id);
  /// Once nothing refuses the start any more.
  Status open_events();
  /// For parts of the agent that have something to tell.
  RunCallbacks callbacks();

  void say(const std::string& text) { console_.say(text); }
  void warn(const std::string& text) { console_.say("warning: " + text); }
  /// To events.jsonl, with the time.
  void record(nlohmann::json event);

  /// Any thread, before a checkpoint of `step`: the lines up to that step are on disk (MetricsWriter::complete).
  void complete(int64_t step, std::span<const std::string> news);

  /// A generation of ranks resumes from `choice`. Errors: those of the files, for the first generation; later a full
  /// disk is told, for it is no reason to end a run that memory holds.
  Status begins(int64_t generation, const ckpt::RestoreChoice& choice, kernels::GemmIsa isa = kernels::gemm_isa());
  /// Ranks of a new generation are there.
  void respawned(const agent::Recovery& recovery);
  /// What a step has to tell: returned complete, as it was written.
  telemetry::StepMetrics step(const telemetry::StepMetrics& reported);
  void saved(const ckpt::PersistEvent& event);
  /// A warning with the command that shows the samples, those with a recorded loss where the steps have some, and an
  /// event.
  void alarm(const ckpt::StepAlarm& alarm);
  /// An outlier was computed again: events `recomputed`, `transient`.
  void computed_again(const telemetry::StepMetrics& metrics);
  /// An audit or a comparison of replicas has found an error of the machine: event `sdc`. `hosts`: of its ranks, in
  /// their order; empty: they are not known.
  void machine_erred(int64_t step, const telemetry::MachineError& error, const std::vector<std::string>& hosts);
  /// A step's update was left out.
  void skipped(const telemetry::StepMetrics& metrics);
  /// watch.early_stop ends the run at `step`.
  void ended_early(int64_t step, const telemetry::EarlyEnd& end);
  /// failure_record() of the last failure, with whether ranks started again; null: there was none.
  const nlohmann::json& last_failure() const { return failure_; }
  /// A rank is about to be killed to see the run recover.
  void kills(int64_t rank, int64_t pid, int64_t step);
  /// `report`: where each rank was; empty: none could be written.
  void failed(const agent::RestartInfo& info, bool restarting, double backoff_s, const std::filesystem::path& report);
  /// This host has taken the lead of one that is lost: failed() for the record, and no recovery is timed.
  void lost_leader(const agent::RestartInfo& info);
  /// What ranks of before have drawn is forgotten; they and the next write below trace_dir(), which is there then.
  Status begin_trace();
  /// A rank has drawn its part of the trace; those of all are merged.
  void drew(telemetry::TracePart part);
  bool is_traced() const { return options_.traced; }
  /// The same of fewer ranks, when some died before they could write theirs.
  void finish_trace();
  std::filesystem::path trace_dir() const { return run_ / "trace"; }
  /// Removes what earlier ranks have written in kernel_times_dir(), and makes that folder.
  Status begin_kernel_times();
  /// A rank has written its file.
  void timed_kernels(int64_t rank);
  /// Rank 0's table, where it has written its file.
  void tell_kernel_times();
  std::filesystem::path kernel_times_dir() const { return run_ / "kernel_times"; }

  /// Products have algorithms that were timed now.
  void tuned(const std::string& text);
  /// Their choices.
  std::filesystem::path tuning_file() const { return run_ / "tuning.json"; }

  const RunProgress& progress() const { return progress_; }
  /// Steps of the run, its stages ahead counted.
  int64_t run_steps() const { return options_.run_end.step; }
  /// "done: 60 steps in 4.1 s, loss 2.3, ...", or "done: 300 steps, 147 of them by this start in 12 s, ..."
  void done(const std::filesystem::path& newest_checkpoint);
  /// How this start ended, for programs: {"run", "why": "done" | "stopped" | "nothing_to_do" | "signal" | "failed" | an
  /// error's code, "class" (failure_class.h; of "failed"), "message", "first_step", "step", "of", "samples", "tokens",
  /// "loss", "valid_loss", "checkpoint", "seconds"}, with time_kernels also "kernel_times", rank 0's file; null where
  /// nothing is known. `stop_asked`: somebody wanted it to stop.
  nlohmann::json summary(const Result<int>& code, bool stop_asked,
                         const std::filesystem::path& newest_checkpoint) const;

 private:
  static const Clock& system_clock();
  void tell_written(const Status& written, bool& failed);
  void tell_match(const ckpt::LoadMatch& match, const ckpt::RestoreChoice& choice);
  double first_seen_of(const agent::Failure& failure) const;
  void tell_recovered(const telemetry::StepMetrics& metrics);
  bool is_due(int64_t step) const;
  bool may_write() const { return !owns_ || owns_(); }
  void show(const telemetry::StepMetrics& metrics);

  const Plan& plan_;
  std::filesystem::path run_;
  NarratorOptions options_;
  const Clock& clock_;
  std::function<bool()> owns_;  // of write_while()
  telemetry::ProgressLine console_;
  std::unique_ptr<telemetry::MetricsWriter> metrics_;
  telemetry::LineFile events_;
  bool events_opened_ = false;
  std::optional<telemetry::TensorBoardWriter> tensorboard_;
  bool metrics_failed_ = false, tensorboard_failed_ = false;  // the last write

  RunProgress progress_;
  int64_t started_ns_ = 0, lined_ns_ = 0;  // of this start; of the last line of a step that was due
  std::optional<PastPoint> began_;         // of the plan's segment, at its first generation
  double began_unix_s_ = 0;
  std::deque<int64_t> outlier_steps_;  // of the latest steps, those with samples in `outliers`
  std::string last_failure_;           // of the ranks
  nlohmann::json failure_;
  std::filesystem::path loaded_;  // the checkpoint that this start resumed from
  int64_t failed_at_ns_ = 0;      // of the failure that is being recovered from
  int64_t failed_at_step_ = 0;
  bool respawned_ = false;                   // since then
  std::vector<telemetry::TracePart> drew_;   // files of ranks, until they are merged
  std::vector<telemetry::TraceSpan> saves_;  // for the trace
  std::filesystem::path kernel_times_;       // rank 0's; empty: it has written none
};

}  // namespace cairn::tools
