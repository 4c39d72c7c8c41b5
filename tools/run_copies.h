#pragma once
// The second places of a run (checkpoint.copy_to), from the agent's side: brings a checkpoint back from one when the
// run folder has none (a lost node), and keeps one copying process a place (`cairn _copy`) beside the training. The
// processes look at the folder and the place themselves; a crash of one costs a restart of it and nothing else. Neither
// the ranks nor the saves ever wait for them; only the end of the run does, for a time that the recipe gives.
//
// Threads: the agent's event loop.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ckpt/mirror/place.h"
#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "tools/run_callbacks.h"
#include "tools/run_folder.h"

namespace cairn::tools {

/// Where a run's steps lie below what the recipe names: the run folder's own name is added.
std::string place_of_run(const CopyTo& to, const std::filesystem::path& run);
ckpt::PlaceOptions place_options(const CopyTo& to, const std::filesystem::path& run);

/// Which run a place belongs to; "" when it says nothing yet.
Result<std::string> place_owner(ckpt::Place& place);
/// The file in which a run keeps that it has made its Nth place, from 0, its own.
std::filesystem::path claim_of(const std::filesystem::path& run, int64_t index);
/// Makes a place this run's and notes that in `claim`. Errors: kInvalidInput when it is another's; kUnavailable when it
/// is a folder, was this run's and nothing is there any more: it is not mounted, or was moved.
Status claim_place(ckpt::Place& place, const std::filesystem::path& claim, const std::string& run_id,
                   const std::string& run_name);

class RunCopies {
 public:
  /// What is to be recorded before start() is recorded then.
  RunCopies(std::vector<CopyTo> places, RunFolder& folder, RunCallbacks callbacks);
  ~RunCopies();  // kills what is under way: the next start goes on

  /// Before the run's memory is opened. When the folder has no complete checkpoint and a place has one of this run's
  /// name, the newest that is whole is brought here and the folder takes over that run's id. `fresh`: looks for none.
  /// Errors: kUnavailable when a place cannot be asked and the folder has nothing to begin with; kInvalidInput when a
  /// place belongs to another run.
  Status prepare(bool fresh);

  /// Starts the processes. Their failure to start is told, not returned.
  void start();
  /// A checkpoint has been saved: look now.
  void saved();
  /// Takes what they report, and starts again what died.
  void poll();
  /// The run's end: waits until everything due is copied, at most the recipe's time, or until a stop signal (blocked in
  /// this thread) comes.
  void finish();

 private:
  struct Child;
  void release_holds();
  void launch(Child& child);
  void take_events(Child& child);
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
