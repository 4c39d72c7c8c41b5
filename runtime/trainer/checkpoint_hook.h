#pragma once
// The seam between training and checkpoints: the trainer calls it, ckpt/ implements it, tests record it.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/shape.h"
#include "runtime/device/copy_gate.h"
#include "runtime/device/pager.h"
#include "runtime/device/peer_copy.h"
#include "runtime/device/pointer.h"
#include "runtime/optim/loss_scale.h"
#include "runtime/plan/batch_schedule.h"
#include "runtime/plan/state_kinds.h"
#include "runtime/trainer/guard_state.h"
#include "runtime/trainer/patience.h"

namespace cairn::trainer {

using cairn::StateKind;

/// One contiguous run of training state in the memory of this rank's device: float elements of a box of what is kept of
/// a logical tensor. Averages are of primary pieces alone.
struct StateTensor {
  StateKind kind = StateKind::kWeight;
  int64_t tensor = 0;  // index into Plan::tensors
  Box box;             // of StateKinds::shape_of()
  DevicePtr<std::byte> data;
  int64_t bytes = 0;
  bool primary = true;  // to be saved by this rank; else a copy of what another saves
  /// Of what is to be saved, in restore(): when an update overwrites it (optim::overwrite_turns()). Tensors of one turn
  /// go together, block by block.
  int64_t turn = 0;
};

/// Where training stands after `step` completed optimizer steps. The same on every rank.
struct TrainPosition {
  int64_t step = 0;
  int64_t samples = 0, tokens = 0;
  double lr = 0, loss = 0;
  optim::LossScale loss_scale;
  GuardState guards;
  PatienceState patience;
  RunPast past;         // of the plan that trained this step
  uint64_t seed = 0;    // of all counter-based random numbers: initialisation, order
  std::string sampler;  // data::SamplerState as JSON
  std::string metrics;  // telemetry::StepMetrics of this step as JSON, times left out: a kill may come before
                        // they are told, and all ranks hold the same text
};

/// What happens at the end of a step; decided once, on the rank that decides (Environment::decides), and broadcast.
struct StepOrder {
  bool stop = false;       // leave after this step
  bool snapshot = false;   // this step is to be restorable: its bank is published and not written by the next update
  bool persist = false;    // and written to disk
  bool replicate = false;  // and copied to another host
  bool left_out = false;   // a snapshot was due and is not taken; only the rank that decides knows
  int64_t slot = 0;        // of a hook that copies, which chose it: where to. Below 2^32
};

/// Memory of the hook that outlives this process, for what training cannot do without. The device works in it: of a CPU
/// that is memory of the host.
struct StateMemory {
  /// Of each bank, where each of the saved tensors lies, at multiples of 64 bytes. Empty, or with a gate: the trainer
  /// takes one bank of its own, which goes before these as bank 0.
  std::vector<std::vector<DevicePtr<std::byte>>> banks;
  DevicePtr<std::byte> weights;  // those that forward and backward read; null: the trainer allocates them
  Pager* pager = nullptr;        // when the banks lie on a disk
  /// Of a hook that copies what is saved beside training: no update overwrites what it still reads. `banks` may hold a
  /// snapshot then that the first update can read where it lies; none writes it.
  CopyGate* gate = nullptr;
  /// Of all copies, in parts. Then nobody fills these: an update finds their first state there. Null: the hook sees no
  /// other rank's memory, and restore() fills them. The same on every rank.
  std::optional<std::vector<PeerCopy>> peer_copies;
};

/// What restore() has found.
struct Restored {
  TrainPosition position;
  int64_t bank = 0;            // holds the saved tensors of that position
  bool weights_ready = false;  // StateMemory::weights are those of that position. The same on every rank
};

/// Two kinds of hook. With banks, an update that has written one leaves nothing to copy. With copies, for state that no
/// other process can read or that dies with its process, the trainer's one bank is updated in place. snapshot() then
/// begins a copy that runs beside the next forward and backward; the next update comes, piece by piece, behind what it
/// overwrites (StateMemory::gate). At a restart the first update reads the copy, if this process can, and writes the
/// trainer's bank.
///
/// Life of a step under a hook: next_bank on the rank that decides, after forward and backward -> begin_update on every
/// rank -> the update, which reads the last step's bank and writes that one, private state and weights -> decide on
/// world rank 0 -> snapshot on every rank, if so decided. A collective of all ranks lies between snapshot and the next
/// begin_update: when a bank is written, the one before is complete on all ranks. The weights may still arrive from
/// other ranks during the next forward; weights_whole says when they are there, before the next begin_update.
class CheckpointHook {
 public:
  virtual ~CheckpointHook() = default;

  /// Before all else, on every rank: memory for `saved`, the primary tensors (their `data` is not yet known) in the
  /// order of TrainState::tensors(), and for `weight_bytes` of weights. It lives as long as the hook. `copies`: the
  /// tensors that this rank keeps in memory of its own and others save.
  virtual Result<StateMemory> memory(std::span<const StateTensor> saved, std::span<const StateTensor> copies,
                                     int64_t weight_bytes) {
    static_cast<void>(saved);
    static_cast<void>(copies);
    static_cast<void>(weight_bytes);
    return StateMemory{};
  }

  /// Called before the first step, on every rank. Fills all of `state` from the newest complete snapshot or checkpoint
  /// and returns the position; saved tensors lie in bank 0. nullopt: a fresh run, and memory is left alone. A snapshot
  /// in the hook's memory stays where it is, in the bank that the answer names. All ranks get the same answer, except
  /// for their own memory.
  virtual Result<std::optional<Restored>> restore(std::span<const StateTensor> state) = 0;

  /// On the rank that decides only, before the update of a step whose predecessor is in bank `current`: the bank to
  /// write, which is `current` (in place) unless that one is to stay. May wait until one is free.
  virtual Result<int64_t> next_bank(int64_t current) { return current; }

  /// Every rank: from now on the bank and the weights are of no use until the snapshot. A few stores.
  virtual Status begin_update(int64_t bank, int64_t step) {
    static_cast<void>(bank);
    static_cast<void>(step);
    return {};
  }

  /// On the rank that decides only, after step `position.step`; `last` when no step follows.
  virtual Result<StepOrder> decide(const TrainPosition& position, bool last) = 0;

  /// Every rank, after the update of `step`: the weights are those of that step. From any thread, beside the others.
  virtual Status weights_whole(int64_t step) {
    static_cast<void>(step);
    return {};
  }

  /// Every rank, when the order says so: publishes the bank that the update wrote, or begins to copy it. `state` lies
  /// in that bank, where the update's work is done unless there is a gate; `sums` are the word_sums of its saved
  /// tensors, of no meaning with a gate.
  virtual Status snapshot(const StepOrder& order, const TrainPosition& position, int64_t bank,
                          std::span<const StateTensor> state, std::span<const uint64_t> sums) = 0;

  /// Every rank, after it has agreed with the others that the state of `step` is ruined: its weights are not finite, or
  /// give a loss that is not. It is not to be saved, nor gone on with. Before any rank leaves with the error.
  virtual void condemn(int64_t step) { static_cast<void>(step); }

  /// Every rank, once, after the last step: returns when everything that was promised is on disk.
  virtual Status finish() = 0;

  /// Every rank, once, after finish() or whatever error: the memory that the trainer has let the hook read goes.
  virtual void release() {}
};

}  // namespace cairn::trainer
