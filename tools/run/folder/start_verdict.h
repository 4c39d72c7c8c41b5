#pragma once
// What a start of a run will do, judged before it changes a byte: from where it resumes, by which of the recipe's
// segments, and whether the recipe may differ from the one that trained the state (dsl/change_rules.h). The same
// verdict serves `train`, `resume`, --dry-run and `check --run`.
//
// The position decides. A run is a list of segments, each with a recipe. A run that resumes with another recipe begins
// a segment at its position; what is left of the run is counted from there.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ckpt/start_state.h"
#include "dsl/change_rules.h"
#include "dsl/stages.h"
#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "runtime/plan/batch_schedule.h"
#include "runtime/text/tokenizer.h"

namespace cairn::tools {

/// A field that differs from the recipe which trained the state.
struct FieldVerdict {
  std::string field, before, after;  // as a recipe writes them
  dsl::ChangeClass change = dsl::ChangeClass::kExact;
  std::string says;       // the rule, or the remedy
  bool accepted = false;  // kAccept: by the command line, or by the start that began this segment

  bool refused() const {
    return change == dsl::ChangeClass::kRefused || (change == dsl::ChangeClass::kAccept && !accepted);
  }
  /// "batch.samples 8 -> 16: from this position on"
  std::string text() const;
  nlohmann::json json() const;  // {"field", "before", "after", "class", "rule"}
};

/// A segment of a recipe with stages, at a position.
struct Segment {
  Recipe recipe;      // what trains: without stages
  Recipe remaining;   // the same, with the stages ahead: what checkpoints keep
  int64_t index = 0;  // of Recipe::stages, from 1; 0: before the first
  RunPast past;
  int64_t steps = 0;                    // of the run, by this segment's stop
  int64_t end_step = 0;                 // where the segment ends
  bool stage_follows = false;           // there another stage of the recipe begins, and the run goes on
  int64_t run_steps = 0;                // of the run, its stages ahead counted
  bool ended_early = false;             // watch.early_stop has ended it at the position
  std::vector<dsl::RunSegment> course;  // what remains of the run from the position on, this segment first
};

/// The segment in which `position` goes on. `before`: the recipe that trained it, with the stages that were ahead of it
/// then; null where that is not known.
/// Errors: kInvalidInput, of stages that do not decode.
Result<Segment> segment_at(const Recipe& whole, const trainer::TrainPosition& position, const Recipe* before);

struct StartRequest {
  Recipe recipe;  // whole, with its stages
  int64_t world = 0;
  std::string run;                    // the folder, for messages
  std::vector<std::string> accept;    // fields of --accept
  std::vector<std::string> accepted;  // fields that the segment under way was begun with, where it is of this recipe
  text::TokenizerHashes tokenizer_before, tokenizer_now;
  bool init = false;          // the state is another run's, which this one begins with
  bool weights_only = false;  // and of it the weights alone
};

struct StartVerdict {
  ckpt::StartState state;
  Segment segment;
  std::vector<FieldVerdict> changes;  // in the schema's order
  std::vector<std::string> notes;     // for the person, besides
  double lr_next = 0;                 // of the first step; state.position.lr is that of the last
  bool finished = false;              // nothing is left to train
  bool edited = false;                // the recipe is another one than the state's, not only in another stage of it

  bool changed() const;  // in any field of another class than exact
  /// kInvalidInput naming every field that is refused, with its remedy; also for a finished run whose recipe differs.
  Status check(const StartRequest& request) const;
  /// "resumes from step 318 (shared memory, tp 2 pp 1 dp 1 -> tp 1 pp 2 dp 1); lr 2.0e-4 -> 2.6e-4; 282 steps remain"
  std::string describe(int64_t world) const;
  /// What a start will do, a line each: checkpoints that it passes over, from where it goes on, and by which changes.
  std::vector<std::string> lines(int64_t world) const;
  /// {"step", "source", "place", "samples", "tokens", "lr", "lr_next", "steps", "stage", "passed_over", "changes"}
  nlohmann::json json() const;
};

/// Refuses a name that no field has. Errors: kInvalidInput, with the nearest.
Status check_accepted_names(const std::vector<std::string>& accept, const Recipe& recipe);

/// Errors: those of opening the data, and of a state that contradicts itself. A refused change is no error here:
/// StartVerdict::check.
Result<StartVerdict> judge_start(const StartRequest& request, ckpt::StartState state);

}  // namespace cairn::tools
