#pragma once
// The files of a run as `cairn report` shows them: metrics.jsonl, events.jsonl, lineage.jsonl, labels.json.

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <ios>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ckpt/retention/labels.h"
#include "runtime/core/result.h"
#include "runtime/telemetry/metrics.h"
#include "tools/report/evaluations.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/goodput.h"
#include "tools/run/folder/lineage.h"
#include "tools/run/folder/troubles.h"

namespace cairn::tools {

/// Lines that have come to the end of a file since the last look; a last one that is not complete waits.
class NewLines {
 public:
  explicit NewLines(std::filesystem::path path) : path_(std::move(path)) {}
  std::vector<nlohmann::json> take();

 private:
  std::filesystem::path path_;
  std::streamoff at_ = 0;
};

/// The median of the finite values; NaN without any.
double median(std::vector<double> values);

/// One start of ranks: by an agent (generation 0), or again by the same one after a failure.
struct Start {
  double time = 0;
  int64_t generation = 0, step = 0, world = 0;
  std::string source;  // "memory", "disk" or "fresh"
  std::string mesh;    // empty: an older build's, which does not say it
  std::string by;      // "pid 12 on host"
  bool ended = false;  // an agent's: it said so itself
  int64_t exit_code = 0;
  double end_time = 0;
};

struct Layout {
  std::string mesh;
  int64_t first_step = 0, last_step = 0;
  std::vector<double> tokens_per_s;
};

/// A restart of the ranks; in seconds.
struct Recovery {
  double whole = 0;                         // from the failure to the first new step
  double stop = NAN, load = NAN, step = 0;  // the ranks were gone; there was state for new ones; the step itself
  double start() const;
  std::string text() const;
};

struct Save {
  int64_t step = 0;
  double seconds = NAN, pause_s = 0;  // training stood still for it
};

/// An event at its place among the steps. One without a step of its own is at the last step before its time.
struct Mark {
  enum class Kind { kRestart, kFailure, kBack, kAlarm, kChange, kSave, kNote } kind = Kind::kNote;
  double time = 0;
  int64_t step = 0;
  std::string event, text;
};
std::string_view to_text(Mark::Kind kind);

/// The files of a run, joined.
struct History {
  std::vector<telemetry::StepMetrics> steps;
  std::vector<telemetry::StepMetrics> superseded;  // steps that were done again, in the order in which they were left
  std::vector<Start> starts;
  std::vector<Recovery> recoveries;
  std::vector<Save> saves;
  std::vector<Mark> marks;
  std::vector<Layout> layouts;     // in the order of their use
  std::optional<Goodput> goodput;  // none before the first step
  Troubles troubles;
  std::optional<RunHolder> holder;  // the process at work
  std::vector<LineageEntry> lineage;
  std::vector<TaskCurve> tasks;
  ckpt::Labels labels;
  std::vector<std::string> unreadable;  // why lineage or labels are missing here

  const Start* last_agent() const;
  /// The step at which an agent that has said no end was last heard of, before the start at `next` (or the end).
  int64_t last_step_before(size_t next) const;
  std::vector<double> save_seconds() const;
};

/// Errors: those of a missing metrics.jsonl, or of a damaged line in it. A damaged lineage or label file is no error.
Result<History> read_history(const std::filesystem::path& run);

/// Each start of the run, what it resumed from, and how it ended.
std::vector<std::string> life_lines(const History& history);
std::string state_text(const History& history, const std::filesystem::path& run);
std::vector<std::string> advice_of(const History& history);
/// A line for people of one event; empty for those that only programs want.
std::string event_text(const nlohmann::json& event);

}  // namespace cairn::tools
