#pragma once
// The rank's side of checkpoints: copies state into the snapshot arena and asks the agent for what is on disk.
//
// Life of a snapshot: decide() on world rank 0 picks the slot by the slot rule (snapshot/slot_rule.h) and, when it is
// to be persisted, reserves it in the arena; the trainer broadcasts the order; snapshot() on every rank copies, hashes
// and publishes; the agent's NodePersister (persister.h) sees the slot whole on all ranks, writes it, frees it.
//
// decide() does not wait for the disk (the last step and a stop may wait milliseconds for a slot's mark). When both
// slots are taken, a due save is put off to the next step; the last step and a stop take back a save that the agent has
// not begun (the newer state replaces it), so they always find a slot.
//
// Threads: one hook per rank, used by one thread.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ckpt/plan/save_plan.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/clock.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"
#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::ckpt {

/// What a rank tells its agent after each snapshot. Only a hint that there is work: the arena is the truth.
struct SnapshotNotice {
  int64_t rank = 0, step = 0, slot = 0;
  bool persist = false;
  double ms = 0;  // training stood still on this rank
};

struct HookOptions {
  std::function<Status(const SnapshotNotice&)> notify;  // may be empty: the persister also looks by itself
  double finish_deadline_s = 1800;                      // for the last checkpoint to reach the disk
};

struct SnapshotStats {
  int64_t snapshots = 0, persists = 0;
  int64_t put_off = 0;  // steps at which a snapshot was due and no slot was free
  double last_ms = 0, total_ms = 0;
};

class SharedMemoryHook final : public trainer::CheckpointHook {
 public:
  /// `plan`, `arena`, `io` and `clock` outlive the hook; `io` is this rank's own. Errors: kInvalidInput when the arena
  /// is not of this plan's layout.
  static Result<std::unique_ptr<SharedMemoryHook>> make(const Plan& plan, int64_t rank, const Arena& arena,
                                                        IoBackend& io, const Clock& clock, HookOptions options = {});

  /// The same for a rank process, which owns its attachment and knows from its agent which incarnation it is of;
  /// restore() says what does not fit. `on_snapshot`: a snapshot that is to be persisted is complete on this rank.
  SharedMemoryHook(const Plan& plan, int64_t rank, Arena arena, uint64_t incarnation, IoBackend& io,
                   std::function<void(int64_t step)> on_snapshot);

  Result<std::optional<trainer::TrainPosition>> restore(std::span<const trainer::StateTensor> state) override;
  Result<trainer::StepOrder> decide(const trainer::TrainPosition& position, bool last) override;
  Status snapshot(const trainer::StepOrder& order, const trainer::TrainPosition& position,
                  std::span<const trainer::StateTensor> state) override;
  Status finish() override;

  const SnapshotStats& stats() const { return stats_; }

 private:
  SharedMemoryHook(const Plan& plan, int64_t rank, const Arena& arena, IoBackend& io, const Clock& clock,
                   HookOptions options);
  Status check_layout() const;
  bool save_is_due(int64_t step) const;
  std::optional<int64_t> free_slot(bool take_back);
  Status match(std::span<const trainer::StateTensor> state);

  const Plan& plan_;
  int64_t rank_;
  std::optional<Arena> owned_;
  const Arena& arena_;
  IoBackend& io_;
  const Clock& clock_;
  HookOptions options_;
  uint64_t incarnation_ = 0;
  SlotLayout layout_;
  std::vector<int64_t> source_;  // index into the trainer's state of each shard of the layout
  const trainer::StateTensor* matched_ = nullptr;
  int64_t matched_size_ = 0;
  int64_t saved_ns_ = 0;       // when the last save was ordered
  bool save_pending_ = false;  // due, and put off
  int64_t promised_step_ = 0;  // newest step that is to be on disk
  SnapshotStats stats_;
};

}  // namespace cairn::ckpt
