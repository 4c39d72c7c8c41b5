#pragma once
// Keeps a place up to date with a checkpoints folder, by policy: which checkpoints go there, and which stay there.
//
// All that it knows it reads from the folder and the place each time, so it can be killed at any moment and started
// anew. A checkpoint that is being copied is held by hard links in `pin_dir` (same file system): local retention may
// remove it meanwhile, its bytes stay until the copy is complete. Where links are refused it may vanish under the copy;
// that is noticed, and the next one is taken.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ckpt/mirror/copy.h"
#include "ckpt/mirror/place.h"
#include "ckpt/retention/labels.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct MirrorPolicy {
  int64_t every_steps = 0;  // one checkpoint of each window of so many steps goes; 0: all
  int64_t keep_last = 0;    // newest ones that stay; 0: all
  int64_t keep_every = 0;   // the oldest of each window of so many steps stays for ever; 0: none does
};

/// The step to copy next: the newest that is due, is not there, and would stay there. `last_one`: the run is at its
/// end, and its newest checkpoint goes in any case. Only steps of_this_line() count. Both lists ascending. Pure.
std::optional<int64_t> next_due(const std::vector<int64_t>& local, const std::vector<int64_t>& placed,
                                const MirrorPolicy& policy, bool last_one, const Labels& labels = {});

/// Of the steps there those up to the newest one here. Later ones are from before the run went back to an older step;
/// what it saves now has lower numbers for a while, and they must not pass for its newest. Both ascending. Pure.
std::vector<int64_t> of_this_line(const std::vector<int64_t>& placed, const std::vector<int64_t>& local);

/// Which of the complete steps there (ascending) retention takes away. Bad ones do not count, and go; the newest good
/// one and the oldest new one behind it stay, as they do here (ckpt/retention/policy.h). Pure.
std::vector<int64_t> steps_to_remove(const std::vector<int64_t>& placed, const MirrorPolicy& policy,
                                     const Labels& labels = {});

/// The labels that a place has beside its steps; none where it has none that hold.
Result<Labels> placed_labels(Place& place);
/// Puts there what `labels` say of `steps`, and forgets other steps, where that changes something.
Status place_labels(Place& place, const Labels& labels, const std::vector<int64_t>& steps);

struct MirrorReport {
  CopyReport copy;
  std::vector<int64_t> removed;       // from the place: by retention, or with what they referred to
  std::vector<std::string> problems;  // of retention; tried again after the next copy
};

class Mirror {
 public:
  Mirror(Place& place, IoBackend& io, std::filesystem::path checkpoints_dir, std::filesystem::path pin_dir,
         MirrorPolicy policy, CopyOptions options);

  /// Copies one checkpoint, if one is due, and applies retention there. nullopt: nothing to do.
  /// Errors: those of copy_checkpoint. After kCorrupt (damaged here, or there for good) that checkpoint is not tried
  /// again.
  Result<std::optional<MirrorReport>> copy_next(bool last_one);

  /// The step of the last copy_next, also when that failed; 0 before it chose one.
  int64_t step() const { return step_; }
  /// What was found at the place and cleaned there, each once.
  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }

 private:
  Result<std::filesystem::path> pin(int64_t step);
  Result<bool> link_step(int64_t step);
  Status unpin();
  Result<std::optional<int64_t>> pinned();
  Result<std::vector<int64_t>> steps_to_retire(int64_t copied, const std::vector<int64_t>& local);
  /// What is known here of the steps here, and there of those there; of the same save as merge_labels says.
  Result<Labels> all_labels();

  Status placed_labels_;  // an error: they are damaged, and stay as they are
  Status local_labels_;   // an error: they cannot be read, so that no step there is removed by them
  Place& place_;
  IoBackend& io_;
  std::filesystem::path dir_, pin_dir_;
  MirrorPolicy policy_;
  CopyOptions options_;
  int64_t step_ = 0;
  bool tidied_ = false, older_line_told_ = false;
  std::map<std::pair<int64_t, int64_t>, bool> same_;  // (step, created) -> is what the place has
  std::set<std::pair<int64_t, int64_t>> damaged_;     // (step, created), here
  std::vector<std::string> notices_;
};

}  // namespace cairn::ckpt
