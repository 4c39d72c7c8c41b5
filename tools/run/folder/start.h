#pragma once
// The start of a run, in two halves. examine() looks at folder, memory, recipe and data, and changes nothing.
// begin_segment() writes down the result, once the agent has read the state that the run resumes from.

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ckpt/start_state.h"
#include "dsl/dsl.h"
#include "runtime/core/result.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/guard.h"
#include "tools/run/folder/lineage.h"
#include "tools/run/folder/start_verdict.h"

namespace cairn::tools {

struct StartOptions {
  const dsl::LoadedRecipe& loaded;  // whole, with its stages
  InitConfig init;                  // effective: of one checkpoint, or empty
  bool init_is_foreign = false;     // it is of weights that are no checkpoint
  int64_t world = 0;
  std::vector<std::string> accept;
  bool verify = false;                       // a checkpoint counts when every byte of it holds
  bool named_step = false;                   // a person has named the step that the run goes back to, or:
  std::optional<RollBack> roll_back;         // a guard
  std::optional<Lowering> lowering;          // the rate is lowered from here on
  std::optional<Lowering> lowering_by_hand;  // beside that of a guard: refused, unless a start before has done it
};

struct RunStart {
  StartRequest request;
  StartVerdict verdict;
  Lineage lineage;
  dsl::LoadedRecipe whole;      // as it was given
  dsl::LoadedRecipe remaining;  // from this segment on: what checkpoints keep
  std::string segment_json, segment_hash;
  std::map<std::string, SourceContent> data;  // the training parts, as they are now
  text::TokenizerHashes tokenizer;
  bool goes_back = false;  // StartOptions::named_step
  std::optional<RollBack> rolls_back;
  std::optional<Lowering> lowers;  // StartOptions::lowering, where no start before has done it
  bool asked_to_lower = false;     // whether there was one
  std::vector<int64_t> held;  // steps that the new rules of retention would remove and the old ones keep: they stay
  std::optional<LineageEntry> begins;  // the line that this start adds, where it begins a segment or goes back

  /// The checkpoint of this run that it goes on from; empty: none, or memory.
  std::string checkpoint() const {
    const bool of_run = !request.init && verdict.state.source == ckpt::StartState::Source::kDisk;
    return of_run ? verdict.state.place : std::string();
  }
  /// Of the last line of lineage once this start has begun.
  std::string lineage_head() const { return begins ? begins->hash : lineage.head(); }
  /// The step behind which losses and norms may be of another level: the latest change of data, batch, model or
  /// objective. A change of the optimizer is none: a rate that is too high must be seen.
  int64_t level_after() const;
  /// The step behind which outliers are a trouble of their own: the latest at which the rate was lowered.
  int64_t trouble_after() const;
};

/// Where the state of a run may lie; `id`: of the run, empty where it has none yet.
ckpt::StartLook start_look(const std::filesystem::path& run, const std::string& id, const Recipe& recipe);

/// Errors: those of reading; a recipe that may not go on is in the verdict.
Result<RunStart> examine_start(const RunFolder& folder, const StartOptions& options);
/// The same for a state that is known.
Result<RunStart> examine_state(const RunFolder& folder, const StartOptions& options, ckpt::StartState state);

/// Writes RunStart::begins, and the segment's recipe.
Status begin_segment(const RunFolder& folder, RunStart& start);

/// Without --accept checkpoint.keep, RunStart::held stay from now on; with it, nothing is held any more.
Status hold_kept_steps(const RunFolder& folder, const RunStart& start);

/// The file with the recipe of the segment, for the ranks.
std::filesystem::path segment_recipe(const RunFolder& folder, const RunStart& start);

}  // namespace cairn::tools
