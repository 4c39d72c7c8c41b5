#pragma once
// The rank's side of checkpoints. Training updates its state in the banks of the agent's arena, so a snapshot is a few
// words in a header. The agent writes what goes to disk.
//
// Life of a snapshot: 1. next_bank() on the rank that decides picks the bank of the update by the slot rule
// (snapshot/slot_rule.h). 2. begin_update() on every rank marks it, and the update writes it. 3. decide() on that rank
// says whether the step is to be restorable (every step unless the recipe says otherwise) and persisted; then it
// reserves the bank. 4. snapshot() publishes it. 5. The agent's NodePersister (persister.h) sees a reserved bank that
// is complete on all ranks, writes it, frees it.
//
// With checkpoint.snapshot_by = "copy" the state is the trainer's, and the arena's banks hold copies of it (copy/).
// decide() picks the slot, and snapshot() begins to copy into it; the thread that copies the last part publishes it.
// Where the link copies at once (host memory) the copy before is done by then: the update between has waited for it. A
// device copies for itself, as long as it takes. A snapshot that is due while the copy before is under way on any rank
// of this host is left out, except one that a save, another host or the end of the run needs: that one waits. So a step
// beside snapshots waits for nothing on the host. (A rank of another host that still copies makes snapshot() wait
// there: the rank that decides sees its own host's slots.) When every slot is on its way to the disk, the snapshot is
// left out too. After a restart the first update reads the slot and writes the trainer's memory; only what a link alone
// can reach is copied back.
//
// On several hosts each has an arena of its own ranks. A rank of the host that leads decides for all, since that host's
// agent asks for saves and stops in its own arena; on each other host its lowest rank reserves the bank there. No rank
// sees the banks of all, so state that is kept for others is the trainer's (StateMemory::peer_copies), and restore()
// fills it. Where that is all that another host saves, ranks put it in memory of their agent's at each snapshot, in the
// same slot (HookOptions::ward). No mark is needed for it: a rank begins the next update after all have published
// (slot_rule.h (3)), so the slot before stays whole in all memories until then.
//
// With three banks or more (checkpoint.in_flight and two) no call waits for the disk. Training spares all banks but
// two: if that many are reserved, a due save is put off to the next step at which one is free, and saves that step's
// state. Saves in flight may end in any order; a run resumes from the newest complete one. With two banks next_bank()
// waits while the other one is being written, at most kLongestWaitS. Then the update goes in place, and until the save
// is done a killed rank goes back to the step that is being saved.
//
// Threads: one hook per rank, used by one thread.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/copy/state_copier.h"
#include "ckpt/foreign.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/disk_pager.h"
#include "runtime/core/clock.h"
#include "runtime/core/result.h"
#include "runtime/device/guard.h"
#include "runtime/plan/plan.h"
#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::ckpt {

/// For a bank to be free; at most half of the recipe's restart.deadline. Longer, other ranks would take a rank that
/// waits for the disk for a dead one.
inline constexpr double kLongestWaitS = 10;

struct HookOptions {
  int64_t decides = 0;  // world rank; the lowest of its host
  /// A snapshot that is to be persisted is complete on this rank. Only a hint for the agent that there is work: the
  /// arena is the truth, and the persister also looks by itself. May be empty; any thread of the hook's.
  std::function<void(int64_t step)> on_snapshot;
  OpenForeign open_foreign;         // for runs that begin with weights that are no checkpoint; may be empty
  double finish_deadline_s = 1800;  // for the last checkpoint to reach the disk
  /// To where copied state lies; empty: it is in host memory.
  std::function<std::unique_ptr<DeviceLink>()> make_link;
  /// Memory for what another host's ranks save, of which those of this host keep all (plan/free_copies.h): with slots
  /// of the same numbers. Each rank puts in it at each snapshot what the rank in its place there saves. Null: none.
  std::shared_ptr<const Arena> ward;
};

struct SnapshotStats {
  int64_t snapshots = 0, persists = 0;
  int64_t put_off = 0;   // saves that were due and came later
  int64_t in_place = 0;  // updates that gave up waiting for a bank
  int64_t left_out = 0;  // snapshots that were due, of copied state: the copy before was under way, or no slot was free
  double last_ms = 0;    // training stood still on this rank
};

class SharedMemoryHook final : public trainer::CheckpointHook {
 public:
  /// `plan`, `arena` and `clock` outlive the hook. Errors: kInvalidInput when the arena is not of this plan's layout.
  static Result<std::unique_ptr<SharedMemoryHook>> make(const Plan& plan, int64_t rank, const Arena& arena,
                                                        const Clock& clock, HookOptions options = {});

  /// The same for a rank process, which owns its attachment and knows from its agent which incarnation it is of;
  /// restore() says what does not fit.
  SharedMemoryHook(const Plan& plan, int64_t rank, Arena arena, uint64_t incarnation, HookOptions options);

  Result<trainer::StateMemory> memory(std::span<const trainer::StateTensor> saved,
                                      std::span<const trainer::StateTensor> copies, int64_t weight_bytes) override;
  Result<std::optional<trainer::Restored>> restore(std::span<const trainer::StateTensor> state) override;
  Result<int64_t> next_bank(int64_t current) override;
  Status begin_update(int64_t bank, int64_t step) override;
  Status weights_whole(int64_t step) override;
  Result<trainer::StepOrder> decide(const trainer::TrainPosition& position, bool last) override;
  Status snapshot(const trainer::StepOrder& order, const trainer::TrainPosition& position, int64_t bank,
                  std::span<const trainer::StateTensor> state, std::span<const uint64_t> sums) override;
  void condemn(int64_t step) override;
  Status finish() override;
  void release() override;

  const SnapshotStats& stats() const { return stats_; }

 private:
  SharedMemoryHook(const Plan& plan, int64_t rank, std::optional<Arena> owned, const Arena* borrowed,
                   uint64_t incarnation, const Clock& clock, HookOptions options);
  Status check_layout() const;
  bool save_is_due(int64_t step) const;
  bool save_is_asked() const;
  double longest_wait_s() const;  // the other ranks wait for this one no longer than restart.deadline
  bool may_reserve() const;
  bool replicates() const;
  bool may_replicate() const;
  bool copies() const { return plan_.recipe.checkpoint.snapshot_by == SnapshotBy::kCopy; }
  /// Copied state: what is saved of `state`, in the order in which an update overwrites it.
  std::vector<std::vector<CopyArray>> arrays_to_copy(std::span<const trainer::StateTensor> state) const;
  /// Where the banks of this host have what this rank keeps for others; none: they are not all here. The same answer on
  /// every rank of the world.
  Result<std::optional<std::vector<PeerCopy>>> peer_copies(std::span<const trainer::StateTensor> kept_for_others) const;
  /// The state that lies in a slot, into memory of the trainer which only the link can reach.
  Status load(int64_t slot, std::span<const trainer::StateTensor> state);
  /// The slot of the next copy, or none; `waits`: for the copy before to be whole; `must`: for a slot to be free.
  Result<std::optional<int64_t>> slot_for_copy(bool must, bool waits);
  /// Once, when the second snapshot begins.
  void say_what_copies_cost(int64_t step);
  Status agent_lives() const;
  Status find_kept(std::span<const trainer::StateTensor> state);
  Status keep_copy(int64_t slot, int64_t step, std::string_view position, std::span<const trainer::StateTensor> state);
  void tell(const trainer::StepOrder& order, int64_t step) const;

  const Plan& plan_;
  int64_t rank_;
  std::optional<Arena> owned_;
  const Arena& arena_;
  const Clock& clock_;
  HookOptions options_;
  uint64_t incarnation_ = 0;
  SlotLayout layout_;
  std::unique_ptr<DiskPager> pager_;         // of banks on a disk
  std::vector<GuardedPages> guarded_;        // banks and weights, in which the device works
  bool attached_ = false;                    // memory() was asked: the trainer's banks are the arena's
  bool starts_in_slot_ = false;              // copied state: the first update reads the snapshot where it lies
  int64_t published_bank_ = -1;              // of the newest snapshot; the next update or copy must not write it
  int64_t begun_bank_ = -1;                  // that the last update wrote, or the last copy
  int64_t pause_ns_ = 0;                     // of the step under way
  bool save_pending_ = false;                // due, and put off
  bool replica_pending_ = false;             // the same of a copy to another host
  int64_t promised_step_ = 0;                // newest step that is to be on disk
  int64_t copied_step_ = 0, copied_ns_ = 0;  // of the first copy: its step, and when it was decided on
  std::atomic<int64_t> copy_ns_ = 0;         // that the last complete copy took
  bool cost_said_ = false;
  SnapshotStats stats_;
  std::vector<int64_t> kept_;            // of HookOptions::ward: by shard, which of the rank's state it is
  std::unique_ptr<StateCopier> copier_;  // of copied state; last: its thread publishes
};

}  // namespace cairn::ckpt
