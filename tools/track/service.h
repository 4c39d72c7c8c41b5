#pragma once
// One service that trackers send to. The loop (tracker.h) reads, sends and remembers; a service knows its wire.
//
// A service keeps in `note` what outlives its process: the loop writes it to disk with the position. After a failure of send(), or a death, the same steps come again: a service finds out itself which of them
// have arrived.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "tools/track/reader.h"

namespace cairn::tools {

/// A run, as services see it.
struct TrackedRun {
  std::filesystem::path folder;
  std::string id, name;
  nlohmann::json recipe;  // canonical; null where the folder has none
};

class TrackService {
 public:
  virtual ~TrackService() = default;
  /// For people: "MLflow at http://...".
  virtual std::string describe() const = 0;
  /// Before the first send(), again after each failure. Errors: kUnavailable and kTimeout: later perhaps; others: a
  /// person has to look.
  virtual Status open(const TrackedRun& run, nlohmann::json& note) = 0;
  /// All of the steps, or an error. Ascending, behind those of before.
  virtual Status send(std::span<const TrackedStep> steps, nlohmann::json& note) = 0;
  /// The run has ended.
  virtual Status finish(int64_t exit_code, nlohmann::json& note) = 0;
  virtual int64_t most_steps() const { return 1000; }  // of one send()
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
