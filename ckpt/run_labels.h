#pragma once
// The agent's judge of a run's checkpoints: it is told the steps, and keeps checkpoints/labels.json.
//
// Threads: any may call.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/labels.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"
#include "runtime/telemetry/metrics.h"

namespace cairn::ckpt {

/// Where labels.json is missing or damaged beside a run's metrics.jsonl: what that says, of the complete steps there.
/// Empty without it. Where the run ends is not known by default: its last save is new then.
Labels labels_from_metrics(IoBackend& io, const std::filesystem::path& checkpoints_dir, const WatchRules& rules = {},
                           int64_t run_steps = std::numeric_limits<int64_t>::max());

/// The same into a catalog, where the folder has no labels.json that holds. Nothing is written; what a file would hold
/// is returned, or nothing where there is one.
Labels label_from_metrics(IoBackend& io, const std::filesystem::path& checkpoints_dir, Catalog& catalog);

class RunLabels {
 public:
  /// `trouble_after`: of StepJudge.
  RunLabels(const WatchRules& rules, int64_t run_steps, int64_t trouble_after = 0)
      : judge_(rules, trouble_after), proof_(rules.proof), run_steps_(run_steps) {}

  /// At a start: the steps that metrics.jsonl has.
  void seed(std::span<const telemetry::StepMetrics> steps);
  /// A step is done. In any order, and more than once; a gap is waited for until the next settle().
  void note(const telemetry::StepMetrics& metrics);
  /// The alarms of the steps since the last call and since seed().
  std::vector<StepAlarm> take_alarms();
  /// The same of what memory holds of steps: TrainPosition::metrics.
  void note(std::span<const std::string> news);
  /// The run goes on after `step`: what it had behind that is of another line.
  void go_back(int64_t step);
  /// A guard or a person has left the line behind `step`: the steps to come are new ones, and so are their alarms.
  void leave_line(int64_t step);

  /// Judges all that is saved, and writes what has changed. Before retention removes anything. Errors: those of the
  /// disk and of `check_folder` (write_labels()); nothing may be removed then.
  Status settle(IoBackend& io, const std::filesystem::path& checkpoints_dir, CatalogCache* cache = nullptr,
                const std::function<Status()>& check_folder = {});
  /// Whether `step`, the last one, may prove a save: settle() then.
  bool may_prove(int64_t step) const;

  /// A state was dropped, for its weights are ruined.
  void note_ruined() { ruined_ = true; }
  /// The guard has stopped the run after the last step: what was saved at or behind the onset of its trouble is bad.
  /// Nothing where no state was ruined: then the batch did it.
  Status condemn_from_onset(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                            const std::function<Status()>& check_folder = {});

 private:
  void drain(bool all);

  mutable std::mutex mutex_;
  bool starts_ = true;  // until the first go_back(): ranks that start again later are in the trouble that was raised
  StepJudge judge_;
  int64_t proof_, run_steps_;
  std::map<int64_t, telemetry::StepMetrics> early_;  // behind a gap
  std::atomic<bool> ruined_{false};
  std::vector<StepAlarm> alarms_;
  int64_t seen_to_ = 0;            // the highest step that was judged for alarms
  std::vector<int64_t> unproved_;  // saves that were new when they were judged last
};

/// Agent, while no rank runs: the step in memory whose weights the ranks have found ruined (Control::ruined_step) is
/// dropped from memory, and a save of it that is on disk is labelled bad. Returns the step, or 0. Errors: of labelling,
/// those of `check_folder` (write_labels()) too; it stays marked then.
Result<int64_t> drop_ruined(Arena& arena, IoBackend& io, const std::filesystem::path& checkpoints_dir,
                            const std::function<Status()>& check_folder = {});

}  // namespace cairn::ckpt
