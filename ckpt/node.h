#pragma once
// The agent's side of checkpointing on one node in one object: snapshot memory (run_memory.h), the decision what ranks
// restore (restore.h), persisting and retention (persister.h), and a last save when ranks are gone.
//
// Threads: called from the agent's event loop; the persister has a thread of its own.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ckpt/host_memory.h"
#include "ckpt/persister.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/restore.h"
#include "ckpt/run_labels.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"

namespace cairn::ckpt {

struct NodeOptions {
  std::filesystem::path checkpoints_dir;
  RunText run;
  std::optional<std::filesystem::path> init_from;  // checkpoint to start from when the run has none of its own
  OpenForeign open_foreign;                        // when that may be no checkpoint
  std::optional<int64_t> from_step;                // of the run: where it goes on, later steps are abandoned
  int64_t level_after = 0;                         // WatchRules::level_after
  int64_t trouble_after = 0;                       // of StepJudge
  bool resume = true;                              // false: refuse a folder that already holds checkpoints
  std::function<Status()> check_owner;             // PersistOptions::check_owner
  std::function<bool()> stop;                      // asked while a checkpoint is being loaded: true ends that, kStopped
  std::function<bool()> leave;                     // asked while whoever opens or flushes waits for a save: gives it up
  BeforeSave before_save;                          // may be empty
  std::function<void()> on_persisted;              // wakes the agent; called from the persist thread
  // Of one of several hosts.
  std::optional<RankRange> ranks;            // that run here; none: all
  SaveStep save_step;                        // PersistOptions::save_step
  std::function<bool(int64_t)> is_due;       // PersistOptions::is_due
  std::shared_ptr<PreparedMemory> prepared;  // open_run_memory()
  /// Another one does: its agent alone removes what is old, writes labels, and looks for space.
  bool follows = false;
};

/// Whether the disk holds what the rules of retention leave lying there at once; looks only, before anything is made or
/// started. `notices` (may be null) gets the warning where checkpoint.space = "warn". Errors: kNoSpace, saying what is
/// missing; those of reading the folder, which need not be there.
Status look_for_space(const Plan& plan, IoBackend& io, const std::filesystem::path& checkpoints_dir,
                      std::vector<std::string>* notices);

class CheckpointNode {
 public:
  /// Cleans what dead saves left, takes over or saves the memory of a dead agent of this run, else makes new memory.
  /// `notices` receives sentences for the person. Errors: kNoSpace saying how much shared memory is missing, and those
  /// of reading the folder.
  static Result<std::unique_ptr<CheckpointNode>> open(const Plan& plan, NodeOptions options,
                                                      std::vector<std::string>* notices);
  ~CheckpointNode();  // stops the thread; removes the arena unless keep_memory()

  Arena& arena() { return arena_; }

  /// Called while no rank runs. Drops promises that no rank will keep and picks the newest complete state: at the first
  /// start the higher step of memory and disk (memory when equal), later memory first. Then writes the decision that
  /// all ranks will read. A write in progress continues; it is waited for only when memory must be emptied.
  Result<RestoreChoice> begin_incarnation();
  /// The same in steps, on the host that decides for others. RestoreDecider has those of these names.
  Result<RestoreChoice> look(const HostMemory& others);
  Status carry_out(RestoreChoice& choice) { return decider_->carry_out(choice); }
  Status give_up(const RestoreChoice& choice, const Error& why) { return decider_->give_up(choice, why); }
  Status begin(RestoreChoice& choice);

  /// Drops promises that no rank will keep. No rank runs.
  void ranks_gone() { persister_->ranks_gone(); }
  /// The contents of this host's memory of its ranks, none of which runs.
  HostMemory memory();
  /// On a host that follows (RestoreDecider::follow).
  Status follow(RestoreChoice choice, std::span<const uint64_t> starts);
  /// Promises to save what is whole in this slot; false: it is not, any more.
  bool promise(const WholeSlot& slot);
  /// Saves it on this host, with the parts of all others, which have promised it already.
  Status save(const WholeSlot& slot);
  /// The newest step that this host and the `others` have in memory, where the disk does not have it. Saves that are
  /// under way have ended by then.
  Result<std::optional<WholeSlot>> unsaved(const HostMemory& others);

  /// Where training stands by that decision; the beginning for a fresh start and for foreign weights.
  Result<trainer::TrainPosition> decided_position() const;

  /// A rank died of a signal that a wild write may lie behind (SIGSEGV, SIGBUS, SIGABRT, ...): before memory is used
  /// again, every byte of it is checked.
  void distrust_memory() { arena_.control().distrusted.store(1, std::memory_order_release); }

  /// Ranks save at the next step boundary and leave.
  void request_stop();
  /// The same at the first boundary not before `step` (from 1), at the next one where a save is due, or no more.
  void stop_at_step(int64_t step);
  void stop_at_save();
  void take_back_stop();

  /// Ranks save at the next step boundary and go on (NodePersister::ask_save); PersistEvent::asked tells of it.
  uint64_t ask_save() { return persister_->ask_save(); }

  /// A step is done, as its rank has told: what the labels of saves are made of.
  void note_step(const telemetry::StepMetrics& metrics);
  /// The alarms they raise (RunLabels::take_alarms).
  std::vector<StepAlarm> take_alarms() { return labels_.take_alarms(); }
  /// No rank runs any more, and the guard has stopped the run (76): what was saved in the trouble before is bad.
  Status condemn_from_onset() {
    return labels_.condemn_from_onset(*io_, options_.checkpoints_dir, [this] { return persister_->check_folder(); });
  }
  /// With from_step: the later steps that the first begin_incarnation() has moved to RUN/abandoned.
  const std::vector<int64_t>& abandoned() const { return abandoned_; }

  /// Of the persister: for a stop whose boundary is long in coming.
  std::optional<int64_t> promise_newest() { return persister_->promise_newest(); }

  /// A rank says its slot is complete: look now.
  void notify();
  std::vector<PersistEvent> take_events();

  /// When no rank runs any more: ends what is promised, and saves the newest whole snapshot if the disk does not have
  /// it. The save of the newest step; nullopt when there was none, or a newer one is on disk already. `save`: how it is
  /// saved; empty: for this host only.
  std::optional<PersistEvent> flush(const std::function<Status()>& save = {});

  /// The arena outlives this object: the next start of the run takes it over.
  void keep_memory(bool keep = true) { keep_memory_ = keep; }
  bool keeps_memory() const { return keep_memory_; }

 private:
  CheckpointNode(const Plan& plan, NodeOptions options, Arena arena);
  Status open_labels();
  Status note(const RestoreChoice& choice);

  const Plan& plan_;
  NodeOptions options_;
  Arena arena_;
  bool keep_memory_ = false;
  RunLabels labels_;
  std::vector<int64_t> abandoned_;
  std::unique_ptr<IoBackend> io_;  // of the event loop
  BufferStore buffers_;            // what a load has touched serves the saves
  std::unique_ptr<RestoreDecider> decider_;
  std::mutex mutex_;
  std::vector<PersistEvent> events_;
  std::unique_ptr<NodePersister> persister_;  // last: its thread uses what is above
};

}  // namespace cairn::ckpt
