#pragma once
// What a run knows of its checkpoints beyond their bytes: labels, the file that holds them, and the rules that give
// them. docs/operations/checkpoints.md, "Good checkpoints stay", says what they mean to a person.
//
//   new      saved; fewer than `proof` clean steps have followed
//   good     `proof` clean steps have followed; or it ends its run, and the `proof` steps before it were clean. An
//            outlier whose update was left out is passed over: it is no clean step, and does the weights no harm
//   suspect  a step within `proof` of it, before or behind, was an outlier upwards of loss or gradient norm, and its
//            update was made, or its loss was above the ceiling; or an audit of a step behind it has found an error of
//            the machine, and none before it has been clean since
//   bad      its weights or what they give are not finite: no start takes it, no rule of retention counts it
//
// `labels.json` lies beside the steps and is no part of the format of a checkpoint. A label is of one save of a step:
// it names the time of creation in that save's manifest, and says nothing of another save of the same step. A missing
// file is harmless: StepJudge makes the labels again from metrics.jsonl. A damaged one, or one of a newer schema, is
// refused and stays as it is: it may hold labels by hand, and the only word that a step is bad or held.

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"
#include "runtime/telemetry/step_level.h"

namespace cairn::ckpt {

enum class Label { kNew, kGood, kSuspect, kBad };

std::string_view to_text(Label label);
std::optional<Label> parse_label(std::string_view text);

struct LabelEntry {
  Label label = Label::kNew;
  std::string why;            // for people
  int64_t proved_to = 0;      // the last step that counted for it; 0: none
  double time = 0;            // unix seconds of the last change
  std::string by;             // "watch", "guard", or "hand": a person's word, which no rule changes
  int64_t saved_unix_ms = 0;  // time of creation of the save that it is of
  std::string held;           // why no rule of retention removes it; empty: one may
  bool operator==(const LabelEntry&) const = default;
};
using Labels = std::map<int64_t, LabelEntry>;  // by step

inline constexpr std::string_view kLabelsName = "labels.json";

/// The file's text, and back. Errors: kCorrupt naming the field, with what to do.
std::string encode_labels(const Labels& labels);
Result<Labels> decode_labels(std::string_view text);

/// Those of a checkpoints folder; none where the file is missing. Errors: kCorrupt, naming the file, where it does not
/// hold; those of reading it.
Result<Labels> read_labels(IoBackend& io, const std::filesystem::path& checkpoints_dir);
/// The labels for a start: a file that cannot be read just now counts as missing, a damaged one is refused.
Result<Labels> labels_for_start(IoBackend& io, const std::filesystem::path& checkpoints_dir);
/// Replaces the file, atomically; durable when it returns. `check_folder` is asked before the new file takes effect:
/// whether the folder is still the one that is meant. Where it is not, nothing stays in the other one.
Status write_labels(IoBackend& io, const std::filesystem::path& checkpoints_dir, const Labels& labels,
                    const std::function<Status()>& check_folder = {});

/// The entry that is of this save; null: there is none.
const LabelEntry* entry_of(const Labels& labels, int64_t step, int64_t saved_unix_ms);
/// `theirs` into `ours`, entry by entry. Of the same save the word of a person wins, then that with the later time; of
/// two saves of a step the later one's.
void merge_labels(const Labels& theirs, Labels& ours);

using telemetry::loss_ceiling;
using telemetry::StepNumbers;
using telemetry::WatchRules;

/// A step, or several, of which a person should know.
struct StepAlarm {
  enum class Kind {
    kOutlier,     // one step, upwards or downwards
    kDivergence,  // kTroubleSteps outliers upwards among kTroubleOf steps
    kDrop,        // kTroubleSteps of kTroubleOf losses are outliers downwards, as on data that repeat
    kLevelShift,  // half a window of outliers: later steps are compared with these
  } kind = Kind::kOutlier;
  int64_t step = 0;
  int64_t onset = 0;   // the first of the outliers; `step` of one
  std::string why;     // as "loss 7.31, 9.4 deviations above the steps before"
  bool again = false;  // the run has made the step before, and people know of it
  bool operator==(const StepAlarm&) const = default;
};
inline constexpr int64_t kTroubleSteps = 4, kTroubleOf = 8;
std::string_view to_text(StepAlarm::Kind kind);

/// Judges steps one by one, and saved steps by those around them. A value is compared with the median and the median
/// absolute deviation of the last `window` values that were no outliers; half a window is enough. When half a window of
/// outliers comes in a row the level has moved, and the window begins anew. Pure.
class StepJudge {
 public:
  /// `trouble_after`: outliers up to that step are of a trouble that a guard has met, and count for no alarm.
  explicit StepJudge(WatchRules rules, int64_t trouble_after = 0) : rules_(rules), trouble_after_(trouble_after) {}

  /// The next step. One that is not above the last one means that the run has gone back to the step before it.
  /// Returns its alarm: in a trouble that lasts the first three outliers and every tenth have one, a divergence and a
  /// drop once. A trouble is over behind kTroubleOf steps without an outlier.
  std::optional<StepAlarm> add(const StepNumbers& numbers);
  /// The loss of the last step's batch after its update, where no step follows to show it.
  void set_end_loss(int64_t step, double loss);
  /// The steps behind `step` are of a line that was left. A trouble that began before it is still under way, and its
  /// alarms have been raised.
  void go_back(int64_t step);
  /// At a start: the alarms of a trouble under way are raised again.
  void raise_again() { outliers_in_trouble_ = 0, divergence_raised_ = drop_raised_ = false; }
  int64_t last() const { return rows_.empty() ? last_ : rows_.back().step; }

  struct Verdict {
    Label label = Label::kNew;
    std::string why;
    int64_t proved_to = 0;
    bool by_audit = false;  // suspect, whatever it was before
  };
  /// Of a saved step. `run_steps`: where the run ends. nullopt: the steps around it are not known (any more).
  std::optional<Verdict> judge(int64_t step, int64_t run_steps) const;

  /// The first of the outliers upwards among the last `of` steps that did or showed harm, which a stop ends with: the
  /// update was made, or the loss was above the ceiling. nullopt: there is none. With `above` its loss was above the
  /// ceiling, so that the weights before it were ruined already.
  struct Onset {
    int64_t step = 0;
    bool above = false;
  };
  std::optional<Onset> onset(int64_t of = 8) const;

 private:
  struct Row : telemetry::StepVerdict {
    int64_t step = 0;
    bool skipped = false;      // its update was left out
    int64_t suspect_from = 0;  // StepNumbers::suspect_from
    bool stays = false;        // StepNumbers::stays
    bool raised_divergence = false, raised_drop = false;
    bool outlier_in_row() const { return upward || !loss_counts; }
    /// It ruined the weights, or found them ruined: then its loss is above the ceiling.
    bool harmful() const { return upward && (!skipped || above); }
    /// It had no token to guess, so no loss.
    bool without_loss() const { return skipped && !loss_counts && !outlier(); }
    /// It neither did harm nor proves anything.
    bool passed_over() const { return skipped && (outlier() || !loss_counts) && !harmful(); }
  };
  Row judge_row(const StepNumbers& numbers) const;
  std::vector<float> window_of(bool of_loss) const;
  std::optional<StepAlarm> alarm();
  /// What the steps kept say of a trouble under way.
  void recount();

  WatchRules rules_;
  int64_t trouble_after_;
  std::deque<Row> rows_;  // of the latest steps, ascending
  int64_t last_ = 0;      // where rows_ is empty
  int64_t outliers_in_row_ = 0;
  int64_t outliers_in_trouble_ = 0;  // in the trouble under way, with an alarm or without
  bool divergence_raised_ = false, drop_raised_ = false;
  int64_t level_from_ = 0;                              // values of steps before it are of another level
  std::optional<std::pair<int64_t, std::string>> end_;  // outlier after that step's update; empty text: clean
};

/// Labels of saves as the judge has them now: what is new or suspect is judged again; good, bad, and a person's word
/// stay, but for a good one that an audit makes suspect. `saves`: complete steps and their times of creation; entries
/// of other saves go, but for those of `unknown` steps, which are there and cannot be read just now, or are damaged.
/// Returns whether anything changed.
bool judge_saves(const StepJudge& judge, const std::vector<std::pair<int64_t, int64_t>>& saves, int64_t run_steps,
                 double now, Labels& labels, const std::vector<int64_t>& unknown = {});

}  // namespace cairn::ckpt
