#pragma once
// A run is a list of segments: the recipe, and from the beginning of each of its stages on that recipe with changes.
//
// In Lua a stage is a layer like :with. Stored it is its beginning and what it changes: an object from key path of the
// canonical JSON to value, lists whole, only what differs from the recipe before. One key stands there without a
// difference: "optimizer.lr_from" in a stage that sets the schedule anew, even to the same one. So the schedule of a
// segment with lr_from = "stage" counts from the latest stage whose changes have that key, or from the start.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/config/mistake.h"
#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "runtime/plan/batch_schedule.h"

namespace cairn::dsl {

constexpr size_t kMaxStages = 1000;  // each is resolved and checked as a recipe of its own

/// Whether a stage may change the field at a written path, as compare_recipes names it.
bool may_change_in_stage(const std::string& path);

/// The recipe without its stages, then the recipe from each stage on, without stages.
/// Errors: kInvalidInput naming the stage and the field: unknown, ill-typed, or one that a stage may not change.
Result<std::vector<Recipe>> recipe_segments(const Recipe& recipe);

/// RecipeStage::changes of a stage that leads from one recipe to the other. `sets_schedule`: the stage sets the
/// schedule anew (see above).
std::string stage_changes(const Recipe& before, const Recipe& after, bool sets_schedule);

/// Whether the stage sets the schedule anew: its changes have "optimizer.lr_from".
bool schedule_set(const RecipeStage& stage);

/// The first step of a stage, as far as the recipe alone says.
struct StageBeginning {
  double step = 0, samples = 0;  // trained before it
  bool before_last = false;      // `at` lies before the beginning of the stage in front of it
};

/// Of each stage; nothing behind a batch that grows by ramps or phases. `segments`: of recipe_segments.
std::vector<std::optional<StageBeginning>> stage_beginnings(const Recipe& recipe, const std::vector<Recipe>& segments);

/// The past with which a run of this recipe alone reaches each of its segments: what a start finds at that position
/// (tools/run/folder/start_verdict.h). So a recipe is checked as it will be planned.
class PastWalk {
 public:
  explicit PastWalk(Recipe first, const RunPast& past = {})
      : before_(std::move(first)), entered_(past), past_(past), at_(past.origin()) {}
  /// Of `segment`, which begins at `stage`, the next one; nothing where steps cannot be counted, for mistakes.
  std::optional<RunPast> enter(const RecipeStage& stage, const Recipe& segment);

 private:
  Recipe before_;
  RunPast entered_;  // of the segment before
  RunPast past_;     // of the position
  PastPoint at_;
  bool known_ = true;
};

/// Steps begin.step + 1 to end.step of a run, which one recipe trains.
struct RunSegment {
  size_t stages = 0;  // of the recipe that begin at its first step or before
  Recipe recipe;      // without stages
  RunPast past;
  PastPoint begin, end;
};

/// The segments that remain of a run behind `step`, up to its last step; `recipe` trains from there, `past` is its own,
/// and its stages are ahead. A segment that a stage cuts short may have no step.
/// Errors: kInvalidInput naming a stage that does not decode, or whose beginning cannot be counted.
Result<std::vector<RunSegment>> segments_ahead(const Recipe& recipe, const RunPast& past = {}, int64_t step = 0);

/// The first stage that does not begin behind the one before it: its index, and what is wrong.
std::optional<std::pair<size_t, Mistake>> stage_out_of_order(const Recipe& recipe, const std::vector<Recipe>& segments);

}  // namespace cairn::dsl
