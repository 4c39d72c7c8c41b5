#pragma once
// The second places of a run (checkpoint.copy_to), from the agent's side: brings a checkpoint back from one when the
// run folder has none (a lost node), and keeps one copying process a place (`cairn _copy`) beside the training. The
// processes look at the folder and the place themselves; a crash of one costs a restart of it and nothing else. Neither
// the ranks nor the saves ever wait for them; only the end of the run does, for a time that the recipe gives.
//
// Threads: the agent's event loop.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "ckpt/mirror/place.h"
#include "runtime/config/checkpoint.h"
#include "runtime/core/result.h"
#include "tools/run/agent/callbacks.h"
#include "tools/run/agent/helper.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {

/// Where a run's steps lie below what the recipe names: the run folder's own name is added.
std::string place_of_run(const CopyTo& to, const std::filesystem::path& run);
ckpt::PlaceOptions place_options(const CopyTo& to, const std::filesystem::path& run);

/// Which run a place belongs to; "" when it says nothing yet.
Result<std::string> place_owner(ckpt::Place& place);
/// What lies at the Nth place, from 0, of a run.
struct PlaceContents {
  std::string owner;  // as place_owner()
  std::vector<ckpt::PlacedStep> steps;
};
/// Errors: those of asking it; kUnavailable when it is a folder, was this run's and nothing is there any more.
Result<PlaceContents> look_at_place(ckpt::Place& place, const std::filesystem::path& run, int64_t index);
/// Why a run without a checkpoint is not begun while one of its places cannot be asked.
Error not_known_there(Error why, const ckpt::Place& place, const std::filesystem::path& run);
/// The file in which a run keeps that it has made its Nth place, from 0, its own.
std::filesystem::path claim_of(const std::filesystem::path& run, int64_t index);
/// Makes a place this run's and notes that in `claim`. Errors: kInvalidInput when it is another's; kUnavailable when it
/// is a folder, was this run's and nothing is there any more: it is not mounted, or was moved.
Status claim_place(ckpt::Place& place, const std::filesystem::path& claim, const std::string& run_id,
                   const std::string& run_name);

class RunCopies {
 public:
  /// Tells on stdout at first; what is to be recorded before start() is recorded then.
  RunCopies(std::vector<CopyTo> places, RunFolder& folder);
  ~RunCopies();  // kills what is under way: the next start goes on

  /// Before the run's memory is opened. When the folder has no complete checkpoint and a place has one of this run's
  /// name, the newest that is whole is brought here and the folder takes over that run's id: true. `fresh`: looks for
  /// none. Errors: kUnavailable when a place cannot be asked and the folder has nothing to begin with; kInvalidInput
  /// when a place belongs to another run.
  Result<bool> prepare(bool fresh);

  /// Who tells of them from now on: the agent of the segment under way.
  void report_to(RunCallbacks callbacks) { callbacks_ = std::move(callbacks); }
  /// Starts the processes, unless they run since an earlier segment. Their failure to start is told, not returned.
  void start();
  /// A checkpoint has been saved: look now.
  void saved();
  /// Takes what they report, and starts again what died.
  void poll();
  /// The run's end: waits until everything due is copied, at most the recipe's time, or until one of the signals
  /// (blocked in this thread) comes, or the time limit. `beside` is called meanwhile.
  void finish(std::span<const int> stop_signals, const std::function<Hurry()>& hurry,
              const std::function<void()>& beside);

 private:
  struct Child;
  void release_holds();
  Helper::Options helper_of(Child& child, size_t index);
  void tell(Child& child, const nlohmann::json& event);
  void record(nlohmann::json event);

  std::vector<CopyTo> places_;
  RunFolder& folder_;
  RunCallbacks callbacks_;
  bool started_ = false;
  std::vector<nlohmann::json> early_;  // events from before there was a file for them
  std::vector<std::unique_ptr<Child>> children_;
};

}  // namespace cairn::tools
