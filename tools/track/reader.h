#pragma once
// A reader of a run for trackers: the steps of metrics.jsonl, each once and ascending, with counts of the events before
// them. The files are the buffer: a reader holds a batch, and where it stands is a few numbers.
//
// A step that was done again (metrics.jsonl says "resumed_at") and has not been given yet is left out where the line of
// the run left it, and given where the line that counts has it. One that was given stays as it was: trackers cannot
// take it back. So after a roll back the next step given is the first beyond the one given last.

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::tools {

struct TrackedStep {
  int64_t step = 0;
  double time = 0;                                     // unix seconds
  std::vector<std::pair<std::string, double>> values;  // finite; "loss", "source_loss/web", "events/saved", ...
};

/// Where a tracker stands: all before it has been given.
struct TrackPosition {
  int64_t metrics_bytes = 0, events_bytes = 0;
  int64_t step = 0;                       // the last that was given
  std::map<std::string, int64_t> counts;  // events before it, by kind
};
nlohmann::json to_json(const TrackPosition& position);
/// Errors: kCorrupt naming what is missing.
Result<TrackPosition> position_from_json(const nlohmann::json& json);

struct TrackBatch {
  std::vector<TrackedStep> steps;  // none: there is nothing new
  TrackPosition behind;            // once the steps are with the service
};

class TrackReader {
 public:
  TrackReader(std::filesystem::path run, TrackPosition from);

  /// At most `most` steps. Errors: kIo; kInvalidInput where the folder has no metrics.jsonl.
  Result<TrackBatch> next(int64_t most);
  /// The events behind the position, as values "events/KIND" of the step behind the last one, at the time of the newest
  /// of them. The position stays: next() gives them with its first step.
  TrackedStep late_events() const;
  /// next() continues behind this batch.
  void given(const TrackBatch& batch) { at_ = batch.behind; }
  const TrackPosition& position() const { return at_; }

 private:
  Status look_for_marks(std::ifstream& in);
  bool superseded(int64_t offset, int64_t step) const;

  std::filesystem::path run_;
  TrackPosition at_;
  int64_t looked_bytes_ = 0;                        // metrics.jsonl was looked through up to here
  std::vector<std::pair<int64_t, int64_t>> marks_;  // offset of a "resumed_at", and its step
};

/// How the run ended, by the last end that no start follows; nullopt: it has not said so.
std::optional<int64_t> exit_code_of(const std::filesystem::path& run);

}  // namespace cairn::tools
