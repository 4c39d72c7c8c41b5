#pragma once
// Where a run continues from. The agent alone decides, before any rank of an incarnation starts, and writes the
// decision into the snapshot arena. Ranks only carry it out, so they cannot disagree.
//
// Order of preference:
//   0. the step of the run that a person named (`from_step`), from disk, once
//   1. the newest complete snapshot in memory that verifies, or the newest checkpoint of the run that verifies:
//      whichever has the higher step, memory when equal (stale memory, without which the run has continued elsewhere,
//      has been removed: run_memory.h)
//   2. a checkpoint that a person named (`from`), of any layout, when the run has no state of its own
//   3. a fresh start, only when the run has no checkpoint at all: damaged ones that are all unusable are an error
// A damaged checkpoint, and one that is labelled bad, is named in the choice's warnings, and the next older one is
// taken.
//
// Memory is believed by its marks and headers when ranks were stopped or killed: no copy is made and no byte is read,
// so that a restart takes as long at any size. After a rank died in a way that may have scribbled over memory
// (Control::distrusted) every byte is checked against its word sums first.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ckpt/foreign.h"
#include "ckpt/host_memory.h"
#include "ckpt/persist/read.h"
#include "ckpt/plan/partial.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/snapshot.h"
#include "ckpt/store/io_backend.h"
#include "ckpt/store/read_again.h"
#include "runtime/core/result.h"
#include "runtime/device/device_link.h"
#include "runtime/plan/plan.h"
#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::ckpt {

struct RestoreChoice {
  uint64_t incarnation = 0;  // of the ranks it is for
  arena::Source source = arena::Source::kFresh;
  int64_t step = 0;
  int64_t slot = 0;                   // kMemory
  uint64_t slot_incarnation = 0;      // kMemory: of the ranks that left it
  bool weights_ready = false;         // kMemory: the weights need not be made from the masters
  std::filesystem::path dir;          // kDisk
  int64_t created_unix_ms = 0;        // kDisk, of the run's own folder
  std::vector<uint64_t> starts;       // kDisk, of the run's own folder: CheckpointInfo::starts
  std::vector<std::string> metrics;   // kMemory: TrainPosition::metrics of the latest steps up to this one, in order
  std::optional<LoadMatch> match;     // kDisk, from what a person named: what is taken of it
  bool foreign = false;               // kDisk: it is no checkpoint, and ranks read it themselves
  ReadStats read;                     // kDisk, a checkpoint: bytes wanted of it and bytes read
  std::vector<std::string> warnings;  // what was passed over, and why
  /// Nothing else is chosen yet: this snapshot, which is whole on all hosts, has to be saved first. Ranks keep state
  /// that ranks of another host save, so they resume from it by way of the disk, which all can read.
  std::optional<WholeSlot> save_first;
  double seconds = 0;
};

struct RestoreRequest {
  std::filesystem::path checkpoints_dir;
  std::optional<std::filesystem::path> from;  // a checkpoint's directory; taken as Plan::recipe.init says
  OpenForeign open_foreign;                   // of `from`; may be empty: it is a checkpoint
  std::optional<int64_t> from_step;           // of checkpoints_dir: the first choice, whatever is newer
  BufferStore* buffers = nullptr;             // memory that payload passes through, kept; null: made for each load
  /// That checkpoints_dir is the folder that is meant: asked before what lies there, or not, decides. May be empty.
  std::function<Status()> check_folder;
  std::function<bool()> stop;  // asked while this waits; may be empty
  /// What a disk fails is read again after each of these, before it counts as damaged.
  std::vector<std::chrono::milliseconds> read_again{std::begin(kReadAgain), std::end(kReadAgain)};
};

/// That a checkpoint of the run, complete by its catalog, is of this plan's model with its training state; reads its
/// manifest alone. Errors: kInvalidInput for another model, those of reading.
Status check_resumable(IoBackend& io, const Plan& plan, const std::filesystem::path& dir);

/// What a run begins with of what a person named (Plan::recipe.init says how); reads manifest or headers alone.
struct InitMatch {
  LoadMatch match;
  bool foreign = false;    // no checkpoint
  int64_t step = 0;        // that the run begins at
  int64_t saved_step = 0;  // of the checkpoint
};
/// Errors: kInvalidInput listing each tensor that does not fit, those of reading.
Result<InitMatch> match_init(IoBackend& io, const Plan& plan, const std::filesystem::path& from,
                             const OpenForeign& open_foreign);

/// Agent. One for the life of the process: remembers what turned out unusable. Threads: one.
class RestoreDecider {
 public:
  RestoreDecider(const Plan& plan, Arena& arena, IoBackend& io, RestoreRequest request);

  /// Begins a new incarnation and decides for it: look() and carry_out() until a choice holds, and begin(). For one
  /// host. Errors: those of the three.
  Result<RestoreChoice> next_incarnation();

  /// Chooses the state that a new incarnation resumes from. No rank may be alive. `others`: what the memory of all
  /// other hosts holds, which carry out the same choice; null: there are none. Errors: kInvalidInput when the
  /// checkpoint is not of this model, kCorrupt when checkpoints exist and none is usable; both list what was found.
  Result<RestoreChoice> look(const HostMemory* others = nullptr);
  /// Empties what the choice leaves behind, and reads what is to be read.
  Status carry_out(RestoreChoice& choice);
  /// The choice could not be carried out, here or on another host. Errors: `why`, unless the next look() chooses
  /// another one.
  Status give_up(const RestoreChoice& choice, const Error& why);
  /// All hosts have carried it out: the decision is made.
  void begin(RestoreChoice& choice);

  /// On a host that follows: carries out what the leader has chosen, and makes it the decision. Errors: kCorrupt where
  /// the slot's bytes do not hold; those of reading.
  Status follow(RestoreChoice choice, std::span<const uint64_t> starts);

 private:
  Result<RestoreChoice> choose(const HostMemory* others);
  Result<std::optional<CommonSnapshot>> newest_in_memory(const HostMemory* others, RestoreChoice& choice,
                                                         std::vector<int64_t>& damaged);
  /// Of the steps above this one.
  Result<std::optional<RestoreChoice>> newest_on_disk(std::vector<std::string>& warnings, int64_t above);
  /// RestoreRequest::from_step.
  Result<RestoreChoice> named_step(int64_t step);
  /// From now on, until another save has its place. False: it was already.
  bool pass_over(const RestoreChoice& choice, std::string_view why);
  template <typename Read>
  auto until_it_stays(const Read& read);
  Result<bool> fill_slot(RestoreChoice& choice);
  void publish(const RestoreChoice& choice, bool in_memory);

  const Plan& plan_;
  Arena& arena_;
  IoBackend& io_;
  RestoreRequest request_;
  std::map<std::pair<int64_t, int64_t>, std::string> refused_;  // step, time of creation -> why
  bool first_ = true;
  bool in_memory_ = false;                       // carry_out() has ended with the state in a slot
  std::chrono::steady_clock::time_point since_;  // of the first look()
  std::optional<bool> copies_cross_hosts_;       // known once it was asked for
};

/// Once `choice` is carried out, of the memory of the host that decides: the steps that it still promises to save, and
/// the starts that led there (Arena::starts).
std::set<int64_t> promised_after(const Arena& arena, const RestoreChoice& choice);
std::vector<uint64_t> starts_after(const Arena& arena, const RestoreChoice& choice);

/// Whether a rank keeps state that a rank of another host saves, where each host has as many ranks as the one of
/// `arena`: their memory alone does not bring it back.
Result<bool> copies_cross_hosts(const Plan& plan, const Arena& arena);

/// The newest checkpoint cannot be read now, which shows no damage.
Error unreadable_now(Error error, const std::filesystem::path& dir);
Error unreadable_now(const CheckpointInfo& info);
/// There are checkpoints, and these are the reasons for which none is taken. kCorrupt; kInvalidInput where all of them
/// are labelled bad: nothing is damaged.
Error none_usable(const std::filesystem::path& checkpoints_dir, std::span<const std::string> why, bool all_bad);

/// Rank: carries out the decision for the arena's present incarnation. A snapshot in memory, which a checkpoint is too
/// by then, stays in its bank; what a rank reads itself are foreign weights: they fill every byte of `state`, whose
/// saved tensors lie in bank 0; `link` reaches it. Where this host does not have all banks, it also fills what of
/// `state` others save: from their banks here, or from the checkpoint that was read. Errors: those of reading,
/// kInternal without a decision, kUnsupported for state that lies in the memory of another host alone.
Result<std::optional<trainer::Restored>> carry_out_decision(const Plan& plan, const Arena& arena,
                                                            std::span<const trainer::StateTensor> state,
                                                            DeviceLink& link, const OpenForeign& open_foreign = {});

/// Where each slot of an arena, which may be of another layout, has the bytes of `state`, which lies nowhere yet: parts
/// that tile it. Errors: kUnsupported for what a rank of another host saves.
Result<std::vector<PeerCopy>> peer_copies_in(const Plan& plan, const Arena& arena,
                                             std::span<const trainer::StateTensor> state);

}  // namespace cairn::ckpt
