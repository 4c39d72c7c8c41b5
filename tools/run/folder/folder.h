#pragma once
// The folder of one run:
//   recipe.resolved.json  recipe/ (the sources)  run.json (id, name, folder)  world (ranks of the last start)
//   metrics.jsonl events.jsonl  tensorboard/ logs/rank-N.log       checkpoints/step-NNNNNNNN/       run.lock (held by
//   the agent)

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "ckpt/store/held_folder.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"
#include "tools/run/folder/owner_file.h"

namespace cairn::dsl {
struct LoadedRecipe;
}

namespace cairn::tools {

/// A run's lock while it lives.
struct RunLock {
  Fd fd;                           // of run.lock, with flock
  std::optional<OwnerFile> owner;  // where the file system has none
};

class RunFolder {
 public:
  /// Takes the lock of a folder that is there, and changes no byte of it: a start that is refused leaves all as it was.
  /// Errors: kUnavailable when another agent holds it, naming it; the system's where it cannot be written.
  /// `takes_over`: by a newer epoch of the run (runtime/cluster/epoch_store.h): whoever holds the lock has lost the run
  /// by that, and is told so by check_held(), should it still live.
  static Result<RunFolder> hold(const std::filesystem::path& path, const std::string& name, bool takes_over = false);
  /// Makes what is missing and writes down whose the run is now. Errors: as hold().
  Status claim();
  /// Both.
  static Result<RunFolder> open(const std::filesystem::path& path, const std::string& name);

  const std::filesystem::path& path() const { return path_; }
  const std::string& id() const { return id_; }  // empty before claim() where the folder has none
  /// The folder that this one was copied from since, and that is still there: this one has an id of its own from now
  /// on. Else empty.
  const std::string& copied_from() const { return copied_from_; }
  /// Doubts about the place: its disk seems not to be mounted, its file system has no locks. Else empty.
  const std::string& doubt() const { return doubt_; }
  /// A copy's new id is written down, once nothing refuses it any more: the original may go, and this be that run.
  Status settle();
  /// The run that this folder goes on with is that of a lost one: its id is taken over.
  Status take_id(const std::string& id);
  std::filesystem::path checkpoints() const { return path_ / "checkpoints"; }
  std::filesystem::path recipe() const { return path_ / "recipe.resolved.json"; }

  /// recipe.resolved.json and the texts it was made from; what was announced before counts no more. True when it
  /// replaced a different recipe.
  Result<bool> write_recipe(const dsl::LoadedRecipe& loaded);
  /// A recipe that comes with a new save of `step`, durable before that: whoever is killed between the two has the next
  /// one who opens the folder put it in its place.
  Status announce_recipe(int64_t step, const std::string& canonical_json);
  /// An announced recipe whose step has come takes its place, another one is forgotten. Where that cannot be told now
  /// it waits for the next one who opens the folder.
  Status settle_recipe();

  /// That run.lock still holds what open() has written there. Where a lock is local to a machine, or its lease has
  /// ended, another agent may have taken the run; and who removes it means this one to be dead. From any thread.
  /// Errors: kUnavailable, naming who has the run; kIo where that cannot be told, as when the folder was moved away.
  Status check_held() const;

  /// Removes what open() has made, as far as nothing was put into it.
  void remove_made() const;

 private:
  Status lock(bool takes_over);
  Status read_id();
  Status make();
  Status forget_announced();

  std::filesystem::path path_;
  std::string id_, name_, copied_from_, doubt_;
  std::string written_at_;  // where run.json says it lies; empty: an older build's, or none is there
  RunLock lock_;
  bool takes_over_ = false;
  std::string lock_line_;                    // what run.lock holds while the run is this one's
  std::optional<ckpt::HeldFolder> held_;     // path_
  std::vector<std::filesystem::path> made_;  // in that order
};

/// logs/rank-N.log
std::filesystem::path log_of_rank(const std::filesystem::path& run, int64_t rank);

/// Who has a run folder: the line of its run.lock.
struct RunHolder {
  std::string host, since;  // empty: an older build's, which tells its pid alone
  std::string pid;
  std::string boot;   // this_boot() there; empty: an older build's
  int64_t start = 0;  // of the process, as ProcessStat has it
  /// "pid 12 on host, since 2026-01-01 10:00:00"
  std::string describe() const;
};
/// The line that this process writes as holder. No two are equal.
std::string holder_line();
RunHolder holder_in(const std::string& line);
/// This boot of this machine with the namespaces that give a process its number and its start time; empty: unknown.
std::string this_boot();
/// The cairn that holds the run now; nullopt: none, or there is no such folder. Looks only: takes no lock that a start
/// could meet, except for a moment where the kernel does not tell (run.lock was taken by another host).
std::optional<RunHolder> holder_of_run(const std::filesystem::path& run);

/// RunFolder::id() of a folder that nobody has opened; empty where it has none that can be read.
std::string run_id_of(const std::filesystem::path& run);

/// The recipe that the run goes on with: recipe.resolved.json, or the one that came with a step whose writer was killed
/// right behind its commit. Errors: also where it cannot be told whether that is so.
Result<std::string> recipe_of_run(const std::filesystem::path& run);

/// Refuses a run whose events list saved steps of which none is there any more. It must not begin anew where their disk
/// is not mounted, nor resume from memory, whose saves would lie below the mount point.
Status check_nothing_lost(const std::filesystem::path& run);

/// The lock of the run whose checkpoints these are, for whoever removes steps or brings some: no training goes on from
/// the folder, or applies its retention to it, meanwhile. A folder of another name, or outside any run, has none.
/// Errors: kUnavailable when another process holds it, naming it.
Result<RunLock> lock_run_of(const std::filesystem::path& checkpoints);

/// Text into a file that appears whole or not at all.
Status write_text_file(const std::filesystem::path& path, const std::string& text);
/// The same where nobody may wait for the disk: whole or not at all as long as the machine runs.
Status write_unsynced_text_file(const std::filesystem::path& path, const std::string& text);
Result<std::string> read_text_file(const std::filesystem::path& path);

/// What lies there; a path that is not there is not_found. Errors: the system's, where it cannot tell: a folder that
/// may not be entered, links in a circle, a name that is too long.
Result<std::filesystem::file_type> type_of(const std::filesystem::path& path);

/// The checkpoint a person means: a step folder, a checkpoints folder, or a run folder (then its newest complete one).
Result<std::filesystem::path> resolve_checkpoint(const std::filesystem::path& path);

/// Whether nothing has this name. False where that cannot be known.
bool is_gone(const std::filesystem::path& step);

/// That a checkpoint which was there is gone, as the retention of a run at work removes them, or is being replaced
/// where names cannot be exchanged. kUnavailable.
Error removed_meanwhile(const std::filesystem::path& step);

/// What came of `work` on checkpoints that were found before: that one of them was removed meanwhile, where it failed
/// for that. Any error may be its sign: no such file, a manifest that ends early, fewer files than it says.
template <typename Outcome>
Outcome unless_removed(const std::vector<std::filesystem::path>& steps, Outcome done) {
  if (done.ok()) return done;
  for (const std::filesystem::path& step : steps) {
    if (is_gone(step)) return removed_meanwhile(step);
  }
  return done;
}

/// Whether the step's folder lies in the run's checkpoints, by whatever paths the two are called.
bool is_step_of(const std::filesystem::path& step, const std::filesystem::path& run);

}  // namespace cairn::tools
