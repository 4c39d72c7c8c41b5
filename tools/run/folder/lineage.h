#pragma once
// lineage.jsonl of a run: a line for each segment that it was trained by, and for each time it went back. A segment's
// recipe lies in recipes/HASH.json. It is for people and for replaying a run (`cairn lineage`); a start reads of it
// only what was accepted for the segment under way. A lost file costs that, and no training.

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "runtime/data/token_file.h"
#include "runtime/plan/batch_schedule.h"
#include "runtime/text/tokenizer.h"
#include "tools/run/folder/guard.h"

namespace cairn::tools {

/// The training part of a data source, as a segment found it.
struct SourceContent {
  std::string content;  // hash of its tokens, hex
  int64_t tokens = 0;
  bool operator==(const SourceContent&) const = default;
};

/// Identity of a training part, all of it. Errors: those of reading it.
Result<SourceContent> content_of(const data::TokenSource& train);

struct LineageEntry {
  int64_t n = 0;      // from 1
  std::string prev;   // hash of the line before; empty for the first
  double time = 0;    // unix seconds
  std::string cause;  // start, recipe, data, stage, back_to, roll_back, lower_lr, init_from
  PastPoint at;       // after so many steps
  int64_t updates = 0;
  std::string recipe;                                // hash of the segment's recipe, without stages
  nlohmann::json changes = nlohmann::json::array();  // {"field", "before", "after", "class", "rule"}
  std::vector<std::string> accepted;                 // fields of --accept that it needed
  std::map<std::string, SourceContent> data;
  text::TokenizerHashes tokenizer;
  bool lr_begins = false;             // a schedule with optimizer.lr_from = "stage" begins here
  std::string from;                   // init_from: of which checkpoint
  std::optional<RollBack> roll_back;  // of that cause
  std::optional<Lowering> lowering;   // of cause lower_lr: from this step on
  std::string hash;                   // of this line; not stored in it
};

/// The line of lineage.jsonl, without its end.
std::string line_of(const LineageEntry& entry);

class Lineage {
 public:
  /// What is there; nothing where there is no file. A line that does not read ends it: `problem` says so, with its
  /// place and what to do. Errors: those of reading the file.
  static Result<Lineage> read(const std::filesystem::path& run);

  const std::vector<LineageEntry>& entries() const { return entries_; }
  const std::string& problem() const { return problem_; }
  /// Hash of the last line; empty without one.
  std::string head() const { return entries_.empty() ? std::string() : entries_.back().hash; }
  /// The segments that lead to the newest, by position: what the run went back behind is left out.
  std::vector<LineageEntry> segments() const;

  /// Roll backs at or before the newest entry: the run leaves their samples out.
  std::vector<RollBack> roll_backs() const;

  /// Lowered rates that are at or before the newest entry.
  std::vector<LoweredRate> lowered_rates() const;
  /// Their entries.
  std::vector<LineageEntry> lowerings() const;

  /// The entry as the next line: with n, prev, time and hash.
  LineageEntry next(LineageEntry entry) const;
  /// What next() has made. Durable when it returns, the recipe first. A file that `problem` is of is copied to
  /// lineage.damaged-N.jsonl before, for its lines are not in the new one.
  Status append(LineageEntry entry, const std::string& recipe_json);

 private:
  std::filesystem::path run_;
  Status keep_damaged() const;

  std::string text_;  // of the lines that read
  std::vector<LineageEntry> entries_;
  std::string problem_;
};

/// The recipe of a segment, without stages. Errors: those of reading and decoding its file, which they name.
Result<Recipe> recipe_of_segment(const std::filesystem::path& run, const LineageEntry& segment);

/// One recipe that does the whole run again from its beginning: a stage for each later segment, each source cut to the
/// tokens that it had. Errors: kCorrupt where a line does not read; kInvalidInput where no recipe can say it: the run
/// began elsewhere, or a segment was begun with --accept, which is named.
Result<Recipe> replay_recipe(const std::filesystem::path& run, const Lineage& lineage);

}  // namespace cairn::tools
