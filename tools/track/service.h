#pragma once
// One service that trackers send to. The loop (tracker.h) reads, sends and remembers; a service knows its wire.
//
// A service keeps in `note`, an object, what outlives its process: the loop writes it to disk with the position. After
// a failure of send(), or a death, the same steps come again: a service finds out itself which of them have arrived.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/config/agent.h"
#include "runtime/core/result.h"
#include "tools/track/reader.h"

namespace cairn::tools {

/// A run, as services see it.
struct TrackedRun {
  std::filesystem::path folder;
  std::string id, name;
  nlohmann::json recipe;  // canonical; null where the folder has none
};

/// The end of a run.
struct TrackedEnd {
  int64_t exit_code = 0;
  TrackedStep late;  // counts of the events behind the last step, under the next one; no values: none
};

class TrackService {
 public:
  virtual ~TrackService() = default;
  /// For people: "MLflow at http://...".
  virtual std::string describe() const = 0;
  /// Before the first send(), again after each failure. Errors: kUnavailable and kTimeout: later perhaps; kCorrupt:
  /// what `note` names is no longer its own, and all comes again from the first step on; others: a person has to look.
  virtual Status open(const TrackedRun& run, nlohmann::json& note) = 0;
  /// All of the steps, or an error. Ascending, behind those of before. A step that the service refuses for good counts
  /// as sent, with a warning.
  virtual Status send(std::span<const TrackedStep> steps, nlohmann::json& note) = 0;
  /// The run has ended. If it continues, the events in `end` come again with its next step.
  virtual Status finish(const TrackedEnd& end, nlohmann::json& note) = 0;
  virtual int64_t most_steps() const { return 1000; }  // of one send()

  /// Texts that a person should read although the work continues.
  std::vector<std::string> take_warnings() { return std::exchange(warnings_, {}); }

 protected:
  /// `warning`: what the service has refused for good. Only the first is kept: the next batches are like it.
  void refused(const std::string& warning);

 private:
  std::vector<std::string> warnings_;
  bool warned_ = false;
};

// Errors of all of them: kInvalidInput: what the tracker was given.
Result<std::unique_ptr<TrackService>> open_mlflow(const Tracker& tracker);
Result<std::unique_ptr<TrackService>> open_otlp(const Tracker& tracker);
Result<std::unique_ptr<TrackService>> open_prometheus(const Tracker& tracker);
Result<std::unique_ptr<TrackService>> open_wandb(const Tracker& tracker);
Result<std::unique_ptr<TrackService>> open_service(const Tracker& tracker);

/// "wandb", "mlflow", "prometheus", "otlp"
std::string tracker_kind(const Tracker& tracker);

}  // namespace cairn::tools
