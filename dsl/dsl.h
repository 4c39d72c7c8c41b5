#pragma once
// The recipe language: one Lua file in, one resolved Recipe out, or every mistake in it at once. A cluster file, which
// says where a run runs, is written in the same language.
//
// A recipe is read once, by one process; ranks, run folders and checkpoints get its canonical JSON and that text's
// hash. The file runs in a sandbox (no files but `require` and `T.read_json` below the recipe's own folders, no clock,
// no random, bounded time and memory). One schema (dsl/schema.cc) gives the constructors, the checks, the help, the
// editor types, the reference page and the JSON. Threads: every function here is independent of all others.

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/config/cluster.h"
#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "runtime/plan/batch_schedule.h"

namespace cairn::dsl {

struct LoadOptions {
  std::vector<std::string> sets;        // "optimizer.peak_lr=5e-5", "mesh.tp-"
  std::vector<std::string> params;      // "peak=2e-4": only what T.params declares
  std::vector<std::string> with_files;  // Lua files that return a plain table, merged left to right
  int64_t world = 0;                    // ranks; 0: unknown, checks that need it are skipped
  /// Samples of a pass over the data, for T.epochs; the recipe has data, model.vocab and model.context so far. Empty:
  /// T.epochs is refused.
  std::function<Result<int64_t>(const Recipe& recipe)> epoch_samples;
};

/// One mistake. `message` reads on its own after "file:line: ".
struct Diagnostic {
  std::string file;  // as a person would open it; "--set mesh.tp=3" for a mistake on the command line
  int line = 0;      // 0: no line
  std::string path;  // "optimizer.weight_deacy"; empty when it is about the file
  std::string code;  // unknown_field, wrong_type, out_of_range, not_one_of, missing, cross_field, limit_time, ...
  std::string message;
  std::string detail;    // a second line: where the numbers come from
  std::string suggest;   // the nearest name or value, empty when nothing is near
  std::string accepted;  // what would have been accepted
  std::string source;    // the text of the line
};

/// {"file", "line", "path", "code", "message", "detail", "suggest", "accepted"}, empty ones left out.
nlohmann::json to_json(const Diagnostic& diagnostic);

/// All of them as a person reads them, ending with "6 errors. Nothing was started.\n".
std::string to_text(const std::vector<Diagnostic>& diagnostics);

/// Where the value of one field came from.
struct Origin {
  std::string path;    // "optimizer.peak_lr"; elements of a list as "optimizer.lr[1]"
  std::string value;   // as it would be written in a recipe
  std::string set_by;  // "default", "derived", "recipe", "--with", "--set"
  std::string file;    // empty for default and derived
  int line = 0;
};

struct LoadedRecipe {
  Recipe recipe;
  std::string canonical_json;
  std::string hash_hex;                                      // recipe_hash(canonical_json)
  std::vector<std::pair<std::string, std::string>> sources;  // every file that was read: name, text; the main one first
  std::vector<Origin> origins;                               // every field, in the schema's order
};

/// A recipe, or all mistakes sorted by file and line (never both, never neither).
struct LoadResult {
  LoadedRecipe loaded;
  std::vector<Diagnostic> diagnostics;
  bool ok() const { return diagnostics.empty(); }
};

/// Reads, merges, resolves and checks a recipe. Never throws, never runs longer than about a second of its own.
/// Who wins: default < recipe < :with < --with < --set.
LoadResult load_recipe(const std::string& path, const LoadOptions& options = {});

/// A cluster file, or all mistakes in it: never both, never neither.
struct ClusterResult {
  ClusterConfig cluster;
  std::vector<std::pair<std::string, std::string>> sources;  // every file that was read: name, text; the main one first
  std::vector<Diagnostic> diagnostics;
  bool ok() const { return diagnostics.empty(); }
};

/// Reads and checks a cluster file, which returns T.slurm, T.kubernetes or T.hosts: where a run runs, in the language
/// and with the bounds of recipes. Never throws.
ClusterResult load_cluster(const std::string& path);

/// Checks across fields and against `world` (0: unknown) for a recipe that was not read from Lua, as resume needs.
/// `past`: of a checkpoint's recipe, which is what was left of a run there.
std::vector<Diagnostic> check_recipe(const Recipe& recipe, int64_t world, const RunPast& past = {});

/// Canonical JSON: every field, defaults included, sorted keys, no spaces, shortest numbers that read back equal.
std::string encode_recipe(const Recipe& recipe);

/// Strict: an unknown, missing or ill-typed field is kInvalidInput that names its path.
Result<Recipe> decode_recipe(std::string_view json);

/// XXH3-128 of the text, 32 hex digits (the canonical big-endian form that `xxh128sum` prints).
std::string recipe_hash(std::string_view json);

/// Value, type, unit, default, who set it and where, and the doc line, of one field or of a block's fields.
Result<std::string> explain_text(const LoadedRecipe& loaded, std::string_view field);

/// Type, default, range, what it is for. `field`: "optimizer.lr", a block ("mesh"), a constructor ("T.cosine"), or
/// empty for the overview. Errors: kInvalidInput naming the nearest fields.
Result<std::string> help_text(std::string_view field);

std::string reference_markdown();        // docs/recipe.md
std::string cluster_markdown();          // docs/cluster-file.md
std::string editor_types();              // a LuaLS file of ---@class
std::vector<std::string> field_paths();  // for shell completion, in the schema's order
std::vector<std::string> constructor_names();

}  // namespace cairn::dsl
