#pragma once
// The agent's writer of checkpoints: what is promised goes from snapshot memory to disk, in background threads with low
// CPU and I/O priority (ckpt/persist/priority.h), hashing as they write.
// A state with ruined weights never becomes a checkpoint: ranks say which step has them (Control::ruined_step), and the
// weights are looked at while they are written.
//
// There are as many threads as saves may be in flight. Each looks at the arena itself (every 20 ms, and at once on
// notify()): a lost notice loses nothing. A slot is written when it is reserved and whole on all ranks, the oldest step
// first; its bytes are compared with the word sums of the update on the way to the disk, so damage in memory never
// becomes a checkpoint. Failures are reported and training goes on; the next save tries again. Saves may end in any
// order: what the rules of retention keep is judged from the newest that is complete, so that an older one which ends
// late may go at once. A save is refused where the path leads to another folder than at the beginning (held_folder.h),
// and where the folder is another agent's by now (PersistOptions::check_owner).

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ckpt/persist/buffer.h"
#include "ckpt/persist/save.h"
#include "ckpt/retention/policy.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

class RunLabels;  // run_labels.h

struct PersistEvent {
  int64_t step = 0;
  Status status;  // what the system refused is kNoSpace or kIo: a save is no place to be told of a wrong path
  std::filesystem::path dir;          // when ok
  int64_t bytes = 0;                  // payload
  int64_t reused_files = 0;           // written over those of removed checkpoints (spare_files.h)
  double seconds = 0;                 // from the start of the write to the committed name
  double snapshot_ms = 0;             // training stood still for it on the slowest rank
  uint64_t asked = 0;                 // it answers the calls of ask_save() up to the one that returned this; 0: none
  std::vector<int64_t> removed;       // by retention
  std::vector<std::string> problems;  // of retention, which tries again after the next save
};

/// Before a step is written to disk: TrainPosition::metrics of the latest steps up to that one, in order, which only
/// memory may hold yet. On a thread of the persister's.
using BeforeSave = std::function<void(int64_t step, std::span<const std::string> news)>;

/// Writes `parts`, the files of the ranks whose slots this arena has, and returns once the step is committed: whatever
/// the other hosts have to do for that. The manifest of the report may lack the other hosts' files. On a thread of the
/// persister's.
using SaveStep =
    std::function<Result<SaveReport>(IoBackend& io, const std::filesystem::path& checkpoints_dir, Manifest skeleton,
                                     std::span<const WriterPart> parts, const SaveOptions& options)>;

struct PersistOptions {
  std::optional<RetentionPolicy> retention;  // applied after each save; none: all stay
  SaveOptions save;                          // chunk_bytes is the arena's
  bool incremental = false;                  // what has not changed since the last save of this persister refers to it
  int64_t in_flight = 1;                     // saves being written at once, at most; each has up to save.fill_bytes
  BufferStore* buffers = nullptr;            // memory that payload passes through, shared with who reads; null: its own
  bool low_priority = true;
  SaveStep save_step;  // where the arena has some ranks of the world, not all; empty: save_checkpoint
  /// Whether the time of a promised step has come, where another host says which is next: a thread that waited for that
  /// within save_step would be missing for the one that is. Asked again and again; may be empty: at once.
  std::function<bool(int64_t step)> is_due;
  /// That the folder is still this agent's to write to: asked before a save begins, before its commit, and before
  /// retention removes anything. An error refuses that. On threads of the persister's; may be empty.
  std::function<Status()> check_owner;
  BeforeSave before_save;                             // may be empty
  std::string lineage;                                // RunText::lineage
  RunLabels* labels = nullptr;                        // labels of what is saved; null: none are kept
  std::filesystem::path forensics;                    // where a state with ruined weights goes; empty: nowhere
  std::function<void(const PersistEvent&)> on_event;  // on a thread of the persister's, one at a time; may be empty
};

using MakeIo = std::function<std::unique_ptr<IoBackend>()>;

class NodePersister {
 public:
  /// `arena` outlives the persister. `make_io` is asked here, once for each thread.
  NodePersister(Arena& arena, const MakeIo& make_io, std::filesystem::path checkpoints_dir, PersistOptions options);
  ~NodePersister();  // finishes writes that have begun (give_up()); promises that have not begun are dropped: call
                     // flush()

  /// From a rank's message that its part of a snapshot to be persisted is complete.
  void notify();

  /// All ranks of this incarnation are dead and reaped: promises that no rank will complete are dropped. To be called
  /// before RestoreDecider::next_incarnation().
  void ranks_gone();

  /// RestoreDecider::next_incarnation() has chosen this step. Of a later one, which was passed over, the next save
  /// takes no tensors that have not changed.
  void gone_on_from(int64_t step);

  /// That the folder of the checkpoints is the one that there was when this was made, or one that has what was saved
  /// last, as where it was mounted anew. What lies there, or not, says nothing of the run else. And that it is still
  /// this agent's. Errors: kIo; those of check_owner.
  Status check_folder();

  /// Beside the ranks, which may be long in coming to the boundary where they would save: promises the newest whole
  /// snapshot, and returns its step. nullopt: it is on disk, or on its way there. No update writes it until it is done.
  std::optional<int64_t> promise_newest();

  /// Beside no rank: the step that is whole in this slot is to be saved. A write of it that is under way and fails is
  /// tried again.
  void promise(int64_t slot, int64_t step);

  /// A step may have proved a save: labels are written soon, by a thread of the persister's.
  void settle_labels();

  /// Ranks save at the next step boundary and go on. Several before that boundary, or while such a save is being
  /// written, are one more. The number of this call, from 1.
  uint64_t ask_save();

  /// Returns once on_event has been called for every save that Control::persisted_step already tells of.
  void wait_told();

  /// Whoever leaves at once: a save that is being written ends at its next chunk, and stays promised.
  void give_up();

  /// For when no rank will run again. Writes promised steps and then, if newer than the newest on disk, the newest
  /// snapshot whose every byte holds and whose weights are not ruined. Returns the error of that snapshot's write. Asks
  /// `leave` all the while; when that says yes, it ends with give_up() and kStopped.
  /// `promised_alone`: the newest snapshot is not written unless it is promised, as where other hosts have a say.
  Status flush(const std::function<bool()>& leave = {}, bool promised_alone = false);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cairn::ckpt
