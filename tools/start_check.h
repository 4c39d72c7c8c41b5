#pragma once
// What a start would find, asked before anything is written: `cairn check`, `train --dry-run` and the start itself call
// the same function, so that nothing which a start refuses passes the other two. It opens what a start opens, counts
// what it will need, and makes, locks and changes nothing.

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "ckpt/snapshot/arena.h"
#include "runtime/config/checkpoint.h"
#include "runtime/config/data.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"
#include "tools/planner/course.h"

namespace cairn::dsl {
struct LoadedRecipe;
}

namespace cairn::tools {

struct StartFinding {
  std::string field;    // of the recipe: "data.sources[1]"; empty: the machine's, or the run folder's
  std::string message;  // what was found, what is expected, what to do
  ErrorCode code = ErrorCode::kInvalidInput;
  int os_errno = 0;
  bool start_says_it = false;  // a warning that the start itself gives too, when it comes to that
};

/// What a run reads of one data source.
struct SourceFacts {
  std::string name, path;
  double weight = 1;    // its share of the samples drawn; all add up to 1
  std::string problem;  // why its files could not be opened; what follows is 0 then
  int64_t train_tokens = 0, valid_tokens = 0;
  int64_t train_windows = 0, valid_windows = 0;  // of model.context + 1 tokens, one token shared
  double samples = 0;                            // that the whole run draws of it, in all its stages
  int64_t valid_samples = 0;                     // of it in the validation batches
  double scanned = 0;                            // the share of its ids that was looked at
  int64_t largest_id = -1;                       // of those
  double epochs() const { return train_windows > 0 ? samples / static_cast<double>(train_windows) : 0; }
};

/// The name of a source: the recipe's, or that of its file.
std::string source_name(const DataSource& source);

struct DataFacts {
  std::vector<SourceFacts> sources;
  int64_t valid_batches = 0;  // of each evaluation; 0: none
};

struct StartReport {
  std::vector<StartFinding> problems;  // each would be refused
  std::vector<StartFinding> warnings;
  std::vector<std::string> facts;
  DataFacts data;
  bool ok() const { return problems.empty(); }
};

constexpr double kScanSeconds = 10;  // of a check, for all ids: some tens of GB that are in memory

struct StartQuestion {
  const dsl::LoadedRecipe& loaded;
  const Plan& plan;           // of the segment that begins
  const Course& course;       // what remains of the run, from that segment on
  std::string sampler;        // the position's (TrainPosition::sampler); empty: nothing is drawn yet
  InitConfig init;            // what the command line says of it
  std::filesystem::path run;  // the run folder; it need not be there
  bool ask_run = true;        // false: whether it may be taken, and what it holds, is not asked; room still is
  bool held = false;          // this process has the run's lock
  bool fresh = false;         // --fresh
  /// The checkpoint that the start was found to go on from; empty: none, or memory. Not given: it is looked for.
  std::optional<std::string> goes_on_from = {};
  double scan_seconds = kScanSeconds;  // looking at ids ends after so long; 0: they are not looked at
  /// Of the run's ranks those that this host starts, where it has several hosts.
  std::optional<ckpt::RankRange> ranks = {};
  bool nccl = false;        // ranks on CUDA communicate from device to device
  bool registered = false;  // in memory that NCCL has registered
  bool cudnn = false;       // and have attention by cuDNN
};

/// All of it, never only the first problem. Reads headers and manifests, and tokens in bulk for scan_seconds at most.
StartReport check_start(const StartQuestion& question);

/// The memory part alone: whether this host has room for its ranks. For hosts that do not lead, which ask nothing else.
StartReport check_host_memory(const StartQuestion& question);

/// Only the data part: windows, epochs and, with `scan_seconds`, ids. `plan`: of the first segment of the course.
/// `report` gets problems and warnings.
DataFacts check_data(const Plan& plan, const Course& course, const std::string& sampler, double scan_seconds,
                     StartReport& report);

/// For people: "recipes/mine.lua:12: data.sources[0]: message" a line each, problems before warnings, then facts.
/// Ends with "2 problems. Nothing was started.\n" where there are any.
std::string start_text(const StartReport& report, const dsl::LoadedRecipe& loaded);
/// {"ok", "diagnostics": [{"path", "file", "line", "code", "message"}], "warnings": [...], "facts", "data"}
nlohmann::json start_json(const StartReport& report, const dsl::LoadedRecipe& loaded);
nlohmann::json data_json(const DataFacts& data);

/// One line a source: "  text   4.7M tokens, 36.9K windows to train on: 1,200 samples, 0.03 epochs; ...".
std::vector<std::string> data_lines(const DataFacts& data);

/// A run folder whose checkpoints lie beside `checkpoints` instead of in it, as `ckpt fetch` into a new folder or a
/// copy by hand leaves them, is refused: it would be begun anew beside them.
Status check_steps_lie_below(const std::filesystem::path& run);

}  // namespace cairn::tools
