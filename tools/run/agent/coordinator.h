#pragma once
// Who decides for a run: from where each generation of ranks resumes, what becomes of a save, when it stops and how it
// ends. Agents (agent.h) start and watch the ranks of their host, ask here, and tell what happens there.
//
// LocalCoordinator is that of a run on one host, where the agent and it are one process. One of several hosts would ask
// a leader; the agent does not see the difference.
//
// Threads: the supervisor's loop.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ckpt/foreign.h"
#include "ckpt/node.h"
#include "ckpt/restore.h"
#include "ckpt/start_state.h"
#include "runtime/agent/first_error.h"
#include "runtime/agent/supervisor.h"
#include "runtime/agent/wait_report.h"
#include "runtime/core/clock.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"
#include "runtime/hosts/generation.h"
#include "runtime/kernels/isa.h"
#include "runtime/plan/plan.h"
#include "runtime/telemetry/metrics.h"
#include "tools/run/agent/copies.h"
#include "tools/run/agent/hooks.h"
#include "tools/run/agent/narrator.h"
#include "tools/run/agent/overdue.h"
#include "tools/run/agent/requests.h"
#include "tools/run/agent/step_pace.h"
#include "tools/run/agent/stragglers.h"
#include "tools/run/agent/trackers.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/start.h"
#include "tools/run/hosts/host_record.h"
#include "tools/run/hosts/host_wire.h"
#include "tools/run/hosts/replicas.h"
#include "tools/run/hosts/run_board.h"

namespace cairn::tools {

class Fleet;         // fleet.h
struct CheckReport;  // check_leader.h

/// This host among those of its run.
struct HostPlace {
  int64_t hosts = 1;
  std::string address;                         // of this one, as the others reach it
  int64_t decides = 0;                         // rank that decides about checkpoints: the lowest of the host that leads
  kernels::GemmIsa isa = kernels::gemm_isa();  // that all ranks use
};

/// What the agent of a host does for whoever decides, where the run has several.
struct AgentHooks {
  /// Takes what ranks of other hosts have published, for those of this one (comm::RendezvousHub::put).
  std::function<void(const std::string& key, const std::string& value)> put;
  std::function<std::vector<agent::RankState>()> states;  // of all ranks that it knows of
  std::function<void(int64_t rank)> kill;                 // a rank of this host, to see the run recover
  /// Reads the stacks of this host's ranks; they come later, from the loop.
  std::function<void(std::function<void(std::vector<agent::RankStacks>)> to)> read_stacks;
  std::function<void(std::vector<agent::RankStacks>)> take_stacks;  // of another host's, for the report
};

/// A rank that ends so, by a signal or by a code that tells of one, may have written where it should not: its memory is
/// looked at before it is used again.
bool lies_behind_a_wild_write(const agent::ExitStatus& status);

class Coordinator {
 public:
  virtual ~Coordinator() = default;

  // --- agreeing: called while no rank of this host runs
  /// What the ranks of this generation resume from, on all hosts the same; it has been told.
  virtual Result<ckpt::RestoreChoice> next_generation(int64_t generation) = 0;
  /// Where this host's ranks find it, and save into.
  virtual ckpt::Arena& memory() = 0;
  /// Where they put copies of what another host's ranks save (HookOptions::ward), to inherit; none: they make no
  /// copies.
  virtual Result<Fd> ward() { return Fd(); }
  virtual HostPlace place() const { return {}; }

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
  /// "ready", "step", "traced", "kernels_timed": what a rank has sent, of this host or of another one.
  virtual void on_rank_event(int64_t rank, const nlohmann::json& event) = 0;
  virtual void on_rank_exit(const agent::ExitStatus& status) = 0;
  /// The generation has failed, here or elsewhere; its ranks still run.
  virtual void on_failing(const agent::Failure& /*failure*/) {}
  // As those of agent::SupervisorClient.
  virtual void on_rank_error(const agent::Failure& /*error*/) {}
  virtual void settle(agent::Failure& /*failure*/) {}
  virtual agent::Restart restart_of(const agent::Failure& failure) {
    return agent::restart_here(failure.failure_class);
  }
  virtual int64_t extra_grace_ms() { return 0; }
  virtual void on_tick() = 0;

  // --- other hosts
  /// Readable when something has come of them; -1: there are none.
  virtual int news_fd() const { return -1; }
  virtual void on_readable() {}
  /// All ranks of this host have ended with 0: those of the others, too.
  virtual bool all_finished() { return true; }
  virtual void use(AgentHooks /*hooks*/) {}
  /// Ranks meet: what those of this host publish goes to the others, and theirs to AgentHooks::put.
  virtual void publish(const std::string& /*key*/, const std::string& /*value*/) {}
  /// Whether this host's agent finds out who keeps ranks waiting: for all hosts, of whose ranks it may ask.
  virtual bool watches_waits() const { return true; }
  virtual void ask_where_ranks_are() {}
  virtual void ask_stacks(const std::vector<int64_t>& /*first*/) {}
  virtual void put_in(std::vector<agent::RankState>& /*ranks*/) {}
  /// A rank of another host is to be killed, to see the run recover.
  virtual void kill(int64_t /*rank*/) {}
};

struct CoordinatorOptions {
  bool fresh = false;                // a run that has been trained is refused
  std::optional<int64_t> from_step;  // where the run goes on, whatever is newer
  ckpt::OpenForeign open_foreign;    // of the recipe's init, when that may be no checkpoint
  RequestOptions requests;
  RunHooks* hooks = nullptr;                  // null: none is run
  RunTrackers* trackers = nullptr;            // null: there are none
  Fleet* fleet = nullptr;                     // the other hosts, which this one leads; null: there are none
  HostSegment segment;                        // for them
  bool check_hosts = false;                   // before the first ranks start
  std::optional<agent::Failure> lost_leader;  // this host has taken its lead: recorded once
  std::shared_ptr<RunBoard> board;            // null: nothing is shown
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
  /// The run goes on with so many hosts instead (Fleet::resize). nullopt: it does not change.
  const std::optional<int64_t>& resizes() const { return resizes_; }
  /// A guard takes the run back (pending_roll_back()), and it continues from there.
  bool rolls_back() const { return rolls_back_; }
  /// A guard lowers the rate (pending_lowering()), and the run continues from where it stands.
  bool begins_anew() const { return begins_anew_; }
  /// The segment has ended, and another stage of the recipe follows.
  bool stage_follows() const { return stage_follows_; }
  /// Narrator::summary() of this start, once conclude() has said `code`.
  nlohmann::json summary(const Result<int>& code) {
    return narrator_.summary(code, control_->stop_asked(), newest_checkpoint_);
  }

  Result<ckpt::RestoreChoice> next_generation(int64_t generation) override;
  ckpt::Arena& memory() override { return node_->arena(); }
  Result<Fd> ward() override;
  void part_complete() override { node_->notify(); }
  bool save_under_way() override;
  void stop(int signal) override;
  void ask_save(const std::string& by) override { requests_.ask_save(*node_, by); }
  Result<int> conclude(const agent::Outcome& outcome) override;
  void close() override;
  HostPlace place() const override;
  void publish(const std::string& key, const std::string& value) override;
  void use(AgentHooks hooks) override { hooks_ = std::move(hooks); }
  void ask_where_ranks_are() override;
  void ask_stacks(const std::vector<int64_t>& first) override;
  void put_in(std::vector<agent::RankState>& ranks) override;
  void on_rank_event(int64_t rank, const nlohmann::json& event) override;
  void on_rank_exit(const agent::ExitStatus& status) override;
  void on_failing(const agent::Failure& failure) override;
  void on_rank_error(const agent::Failure& error) override;
  void settle(agent::Failure& failure) override;
  agent::Restart restart_of(const agent::Failure& failure) override;
  int64_t extra_grace_ms() override;
  void on_tick() override;
  int news_fd() const override;
  void on_readable() override;
  bool all_finished() override;
  void kill(int64_t rank) override;
  /// After close(): this start's memory holds what no checkpoint has, and stays.
  bool memory_stays() const { return memory_stays_; }
  Hurry hurry() const { return requests_.out_of_time() ? Hurry::kTimeLimit : Hurry::kNone; }

 private:
  void on_step(const telemetry::StepMetrics& metrics);
  void guard(const ckpt::StepAlarm& alarm);
  /// Decides by the recipe and reports it; a roll back is written down. None: a warning was all.
  std::optional<GuardAction> act_on(const Trouble& trouble);
  bool lower_lr(const Lowering& lowering);
  /// An audit or a comparison of replicas has found an error: watch.on_sdc.
  void guard_machine(int64_t step, const telemetry::MachineError& error);
  /// The names of these ranks' hosts, in their order.
  std::vector<std::string> hosts_of(const std::vector<int64_t>& ranks) const;
  void join_hosts(ckpt::NodeOptions& options);
  Result<ckpt::RestoreChoice> begin_on_all_hosts();
  Status save_on_all_hosts(const ckpt::WholeSlot& slot);
  std::optional<ckpt::PersistEvent> flush_memory(hosts::generation::Wants wants, Status* outcome = nullptr);
  void tell_epoch();
  std::string check_dtype() const;
  Status take_check(const CheckReport& report);
  Status exclude(int64_t place, const std::string& reason, agent::FailureClass which);
  Status save_memory_of_all();
  Status attach_replicas(const ckpt::RunText& run);
  Replicas* replicas() const;  // null: this host keeps none
  void tell_copies();
  void warn_of_copies();
  void ask_clocks();
  void watch_size();
  void save_before_resize();
  Status check_owner();
  bool owns_run();
  bool stop_asked();
  Status check_place(const ckpt::RestoreChoice& choice);
  Status write_start();
  void note_progress();
  void take_pace(int64_t rank, const nlohmann::json& event);
  void tell_stragglers();
  void tell_pace(const telemetry::StepMetrics& metrics);
  void tell_lost_spare(const std::string& host, const std::string& why);
  std::string name_of_rank(int64_t rank) const;
  void take_save_events();
  void take_saved(const ckpt::PersistEvent& event);
  void take_not_saved(const ckpt::PersistEvent& event, bool newest, bool overtaken);
  void take_flushed(const ckpt::PersistEvent& event);
  void watch_stop();
  void watch_memory();
  void tell_overdue_saves();
  void tell_failed_saves(bool at_end);
  void flush();
  void leave();
  Result<int> conclude_failed(const agent::Outcome& outcome);
  Result<int> conclude_unfinished();
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
  AgentHooks hooks_;
  agent::RunControl* control_ = nullptr;
  std::unique_ptr<ckpt::CheckpointNode> node_;
  std::optional<ckpt::StartState> elsewhere_;
  std::optional<int64_t> resizes_, grows_;  // grows_: once this is saved
  agent::FirstError errors_;                // of the generation, on all hosts
  HostRecord record_;
  Stragglers stragglers_;
  StepPace pace_;
  OverdueSaves overdue_;
  FailedSaves failed_saves_;

  int64_t clocks_asked_ns_ = 0;
  std::atomic<int64_t> unsure_until_ns_ = 0;  // owns_run() asks no store before
  int64_t stop_asked_ns_ = 0;                 // 0: not asked, or the ranks have been waited for long enough
  bool told_nameless_ = false, told_copies_ = false;
  int64_t last_step_ = 0, last_progress_step_ = 0;
  std::filesystem::path newest_checkpoint_;
  int64_t saved_step_ = -1;  // of newest_checkpoint_, or an older one where the run went back
  int64_t told_step_ = -1;   // the newest whose save was told
  int64_t told_epoch_ = 0;
  Status last_save_;          // of that one
  int64_t failed_step_ = -1;  // of the last save that failed
  size_t problems_ = 0;       // of retention after the last save
  Status stopped_by_;         // a save that failed, with checkpoint.on_failure = "stop", or a guard
  bool goes_back_ = false;    // a guard has decided so, and the ranks have been asked to leave
  bool rolls_back_ = false;
  bool lowers_ = false;  // a guard has decided to lower the rate, and the ranks have been asked to leave
  bool begins_anew_ = false;
  bool ended_early_ = false;  // watch.early_stop has ended the run at the last step that was reported
  bool concluded_ = false, stage_follows_ = false;
  bool memory_stays_ = false;  // known when it is closed
};

}  // namespace cairn::tools
