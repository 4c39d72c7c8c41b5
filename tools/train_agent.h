#pragma once
// The agent of a run on this machine, as the supervisor's client. It owns the shared memory, says what the ranks are
// and from where each generation of them resumes, has checkpoints persisted and copied, and writes what people read:
// progress, metrics.jsonl, events.jsonl, TensorBoard.
//
// Threads: the supervisor's loop. The persister's threads come in for metrics_ and to wake it.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ckpt/node.h"
#include "runtime/agent/supervisor.h"
#include "runtime/comm/shm_world.h"
#include "runtime/core/clock.h"
#include "runtime/plan/plan.h"
#include "runtime/telemetry/metrics.h"
#include "runtime/telemetry/tensorboard.h"
#include "runtime/telemetry/terminal.h"
#include "runtime/telemetry/trace.h"
#include "tools/run_callbacks.h"
#include "tools/run_copies.h"
#include "tools/run_folder.h"
#include "tools/run_requests.h"
#include "tools/run_start.h"
#include "tools/run_waits.h"

namespace cairn::tools {

/// A rank that is killed after a step, to see the run recover.
struct Kill {
  int64_t rank = 0, step = 0;
};

struct TrainAgentOptions {
  int64_t threads = 0;  // of a rank; 0: cores / ranks, at least 1
  std::vector<Kill> kills;
  std::string trace;                  // steps=A..B; empty: none
  double peak_tflops = 0;             // of a rank's device; 0: the calibration of this machine, if there is one
  bool fresh = false;                 // a run that has been trained is refused
  std::optional<int64_t> from_step;   // where the run goes on, whatever is newer
  bool init_on_command_line = false;  // what it says is for a new run: it is told when it counts for nothing
  RequestOptions requests;
};

/// Of one segment of a run: one recipe without stages, from one position on.
class TrainAgent final : public agent::SupervisorClient {
 public:
  /// All of them outlive the agent. `plan` is of the start's segment.
  TrainAgent(const Plan& plan, RunFolder& folder, RunCopies& copies, RunStart& start, TrainAgentOptions options);

  /// Before open(), whose threads wake it.
  void use(agent::Supervisor& supervisor) { supervisor_ = &supervisor; }
  Status open();
  /// Where the ranks would have to go on is not where this start was judged: the newest checkpoint turned out to be
  /// damaged, say. Another agent is to go on from here. Nothing has been written for this one.
  const std::optional<ckpt::StartState>& elsewhere() const { return elsewhere_; }
  /// The segment has ended, and another stage of the recipe follows.
  bool stage_follows() const { return stage_follows_; }
  Result<int> conclude(const agent::Outcome& outcome);
  /// How this start ended, for programs, once conclude() has said `code`: {"run", "why": "done" | "stopped" |
  /// "nothing_to_do" | "signal" | "failed" | an error's code, "message", "first_step", "step", "of", "samples",
  /// "tokens", "loss", "valid_loss", "checkpoint", "seconds"}; null where nothing is known.
  nlohmann::json summary(const Result<int>& code);
  /// After the run, in any way it ended: saves what only memory holds, and stops the persist thread, which wakes the
  /// supervisor and so must not outlive it.
  void close();

  Result<std::vector<agent::ChildSpec>> prepare_generation(int64_t generation) override;
  void on_generation_started(int64_t generation, const agent::Recovery* recovery) override;
  void on_event(int64_t rank, const nlohmann::json& event) override;
  void on_child_exit(int64_t rank, const agent::ExitStatus& status, bool killed) override;
  void on_failure(const agent::RestartInfo& info, bool restarting, double backoff_s) override;
  void on_stop_requested(int signal) override;
  void on_signal(int signal) override;
  void on_tick() override {
    take_persist_events();
    watch_requests();
    watch_stop();
    watch_memory();
    waits_.look(world_ ? &*world_ : nullptr);
    copies_.poll();
  }
  /// Ranks that have trained to their end stand still until the last checkpoint is on disk, within the hook's own
  /// deadline.
  bool on_hang(const std::vector<agent::Silence>&) override { return !save_under_way(); }
  std::optional<std::pair<int64_t, std::string>> suspect() override { return waits_.suspect(); }
  void on_failing(const agent::Failure& failure) override {
    report_path_ = world_ ? waits_.report_failure(failure, *world_) : std::filesystem::path();
  }
  void on_notice(const std::string& text) override { progress_.say(text); }
  uint64_t heartbeat(int64_t rank) override { return static_cast<uint64_t>(view_of(rank).finished_operations()); }
  std::string place(int64_t rank) override { return view_of(rank).description; }

 private:
  comm::RankView view_of(int64_t rank) const {
    const std::vector<comm::RankView> views = world_ ? world_->ranks() : std::vector<comm::RankView>{};
    return rank < static_cast<int64_t>(views.size()) ? views[rank] : comm::RankView{};
  }
  bool save_under_way() const {
    // Only what the persister has or can take: a promise that a hung rank has not completed is no save.
    const std::vector<ckpt::SlotView> views = node_->arena().views();
    return std::any_of(views.begin(), views.end(),
                       [](const ckpt::SlotView& slot) { return slot.reserved && slot.whole; });
  }
  RunCallbacks callbacks();
  void tell_written(const Status& written, bool& failed);
  void on_step(const telemetry::StepMetrics& metrics);
  void on_traced(const std::string& path);
  void finish_trace();
  Status check_owner();
  void watch_memory();
  void watch_stop();
  void watch_requests();
  bool stop_asked();
  std::filesystem::path trace_dir() const { return folder_.path() / "trace"; }
  void take_persist_events();
  void record(nlohmann::json event);
  Status check_place(const ckpt::RestoreChoice& choice);
  Status write_start();
  void tell_match(const ckpt::LoadMatch& match, const ckpt::RestoreChoice& choice);
  void tell_persisted(const ckpt::PersistEvent& event);
  void tell_flushed(const ckpt::PersistEvent& event);
  void flush();
  void leave();
  /// After a stop by a guard: which step is good, and the command that goes back to it.
  std::string way_back() const;

  const Plan& plan_;
  RunFolder& folder_;
  RunStart& start_;
  TrainAgentOptions options_;
  std::optional<ckpt::StartState> elsewhere_;
  telemetry::ProgressLine progress_;
  RunCopies& copies_;
  RunWaits waits_;
  RunRequests requests_;
  agent::Supervisor* supervisor_ = nullptr;
  std::unique_ptr<telemetry::MetricsWriter> metrics_;  // used by threads of node_
  std::unique_ptr<ckpt::CheckpointNode> node_;
  std::optional<comm::ShmWorld> world_;
  Fd memory_;                  // of the arena, for ranks
  int64_t stop_asked_ns_ = 0;  // 0: not asked, or the ranks have been waited for long enough
  bool told_nameless_ = false;
  std::optional<telemetry::TensorBoardWriter> tensorboard_;
  telemetry::LineFile events_;                                // events.jsonl
  bool metrics_failed_ = false, tensorboard_failed_ = false;  // the last write

  int64_t first_step_ = -1;  // before the first generation
  int64_t last_step_ = 0, last_progress_step_ = 0;
  double last_loss_ = 0, lost_ms_ = 0;
  telemetry::StepMetrics last_metrics_;  // of this start; step 0: none
  std::optional<double> last_valid_loss_;
  std::string last_failure_;      // of the ranks
  std::filesystem::path loaded_;  // the checkpoint that this start goes on from
  int64_t failed_at_ns_ = 0;      // of the failure that is being recovered from
  int64_t failed_at_step_ = 0;
  bool respawned_ = false;  // since then
  double started_s_ = SystemClock().unix_s();
  double peak_tflops_ = 0;  // of the whole world; 0: not known
  std::filesystem::path newest_checkpoint_;
  int64_t saved_step_ = -1;                    // of newest_checkpoint_, or an older one where the run went back
  std::filesystem::path report_path_;          // of the last failure
  std::vector<std::filesystem::path> traced_;  // files of ranks, until they are merged
  std::vector<telemetry::TraceSpan> saves_;    // for the trace
  int64_t told_step_ = -1;                     // the newest whose save was told
  Status last_persist_;                        // of that one
  int64_t failed_step_ = -1;                   // of the last save that failed
  size_t problems_ = 0;                        // of retention after the last save
  Status stopped_by_;                          // the first save that failed, with checkpoint.on_failure = "stop"
  bool concluded_ = false, stage_follows_ = false;
};

}  // namespace cairn::tools
