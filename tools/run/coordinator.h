#pragma once
// Who decides for a run: from where each generation of ranks resumes, what becomes of a save, when it stops and how it
// ends. Agents (agent.h) start and watch the ranks of their host, ask here, and tell what happens there.
//
// LocalCoordinator is that of a run on one host, where the agent and it are one process. One of several hosts would ask
// a leader; the agent does not see the difference.
//
// Threads: the supervisor's loop.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "ckpt/foreign.h"
#include "ckpt/node.h"
#include "ckpt/restore.h"
#include "ckpt/start_state.h"
#include "runtime/agent/supervisor.h"
#include "runtime/core/clock.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"
#include "runtime/telemetry/metrics.h"
#include "tools/run/copies.h"
#include "tools/run/folder.h"
#include "tools/run/narrator.h"
#include "tools/run/requests.h"
#include "tools/run/start.h"

namespace cairn::tools {

class Coordinator {
 public:
  virtual ~Coordinator() = default;

  // --- agreeing: called while no rank of this host runs
  /// What the ranks of this generation resume from, on all hosts the same; it has been told.
  virtual Result<ckpt::RestoreChoice> next_generation(int64_t generation) = 0;
  /// Where this host's ranks find it, and save into.
  virtual ckpt::Arena& memory() = 0;

  // --- committing
  /// A rank of this host has completed its part of a step that is to be saved.
  virtual void part_complete() = 0;
  /// Whether something is being saved: ranks that wait for that do not hang.
  virtual bool save_under_way() = 0;

  // --- stopping
  /// The first stop signal, here or on another host: ranks save at the next step boundary and leave.
  virtual void stop(int signal) = 0;
  /// A signal asks for a save.
  virtual void ask_save(const std::string& by) = 0;
  /// How this start ends, once no rank runs: its exit code, told.
  virtual Result<int> conclude(const agent::Outcome& outcome) = 0;
  /// After the run, in any way it ended: saves what only memory holds. Nothing else may be called then.
  virtual void close() = 0;

  // --- what happens
  virtual void on_step(const telemetry::StepMetrics& metrics) = 0;
  virtual void on_rank_exit(const agent::ExitStatus& status) = 0;
  virtual void on_tick() = 0;
};

struct CoordinatorOptions {
  bool fresh = false;                // a run that has been trained is refused
  std::optional<int64_t> from_step;  // where the run goes on, whatever is newer
  ckpt::OpenForeign open_foreign;    // of the recipe's init, when that may be no checkpoint
  RequestOptions requests;
};

/// Of one segment of a run on this host: one recipe without stages, from one position on.
class LocalCoordinator final : public Coordinator {
 public:
  /// All of them outlive it. `plan` is of the start's segment.
  LocalCoordinator(const Plan& plan, RunFolder& folder, RunCopies& copies, RunStart& start, Narrator& narrator,
                   CoordinatorOptions options, const Clock& clock);

  /// Before open(), whose threads wake it.
  void use(agent::RunControl& control) { control_ = &control; }
  /// Takes the memory of the run, or makes it. Errors: whatever refuses the start.
  Status open();

  /// Where the ranks would have to resume is not where this start was judged: the newest checkpoint turned out to be
  /// damaged, say. Another one is to go on from here. Nothing has been written for this one.
  const std::optional<ckpt::StartState>& elsewhere() const { return elsewhere_; }
  /// The segment has ended, and another stage of the recipe follows.
  bool stage_follows() const { return stage_follows_; }
  /// Narrator::summary() of this start, once conclude() has said `code`.
  nlohmann::json summary(const Result<int>& code) {
    return narrator_.summary(code, control_->stop_asked(), newest_checkpoint_);
  }

  Result<ckpt::RestoreChoice> next_generation(int64_t generation) override;
  ckpt::Arena& memory() override { return node_->arena(); }
  void part_complete() override { node_->notify(); }
  bool save_under_way() override;
  void stop(int signal) override;
  void ask_save(const std::string& by) override { requests_.ask_save(*node_, by); }
  Result<int> conclude(const agent::Outcome& outcome) override;
  void close() override;
  void on_step(const telemetry::StepMetrics& metrics) override;
  void on_rank_exit(const agent::ExitStatus& status) override;
  void on_tick() override;

 private:
  Status check_owner();
  bool stop_asked();
  Status check_place(const ckpt::RestoreChoice& choice);
  Status write_start();
  void take_save_events();
  void take_saved(const ckpt::PersistEvent& event);
  void take_not_saved(const ckpt::PersistEvent& event, bool newest, bool overtaken);
  void take_flushed(const ckpt::PersistEvent& event);
  void watch_stop();
  void watch_memory();
  void flush();
  void leave();
  Result<int> conclude_failed(const agent::Outcome& outcome);
  /// After a stop by a guard: which step is good, and the command that goes back to it.
  std::string way_back() const;

  const Plan& plan_;
  RunFolder& folder_;
  RunCopies& copies_;
  RunStart& start_;
  Narrator& narrator_;
  CoordinatorOptions options_;
  const Clock& clock_;
  RunRequests requests_;
  agent::RunControl* control_ = nullptr;
  std::unique_ptr<ckpt::CheckpointNode> node_;
  std::optional<ckpt::StartState> elsewhere_;

  int64_t stop_asked_ns_ = 0;  // 0: not asked, or the ranks have been waited for long enough
  bool told_nameless_ = false;
  int64_t last_step_ = 0, last_progress_step_ = 0;
  std::filesystem::path newest_checkpoint_;
  int64_t saved_step_ = -1;   // of newest_checkpoint_, or an older one where the run went back
  int64_t told_step_ = -1;    // the newest whose save was told
  Status last_save_;          // of that one
  int64_t failed_step_ = -1;  // of the last save that failed
  size_t problems_ = 0;       // of retention after the last save
  Status stopped_by_;         // the first save that failed, with checkpoint.on_failure = "stop"
  bool concluded_ = false, stage_follows_ = false;
};

}  // namespace cairn::tools
