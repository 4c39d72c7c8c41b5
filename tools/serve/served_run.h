#pragma once
// The steps of a run under the names of the Hub: `step-N`, `latest`, `best`, `good`, and a commit for each form in
// which a step is served.
//
// Threads: one at a time.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/retention/catalog.h"
#include "ckpt/store/io_backend.h"
#include "converters/weight_source.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"

namespace cairn::tools {

/// How weights are served. The name is behind the run's: "", ".bf16", ".ema".
struct ServedForm {
  std::string name;
  std::optional<DType> dtype;  // unset: what an export takes
  convert::WeightsOf weights = convert::WeightsOf::kTraining;
};

struct ServedRunOptions {
  std::string name;  // behind "runs/"
  std::filesystem::path checkpoints;
  bool with_bad = false;  // steps that are labelled bad
  int64_t max_shard_bytes = 0;
};

class ServedRun {
 public:
  explicit ServedRun(ServedRunOptions options) : options_(std::move(options)) {}

  const std::string& name() const { return options_.name; }
  const std::filesystem::path& checkpoints() const { return options_.checkpoints; }
  int64_t max_shard_bytes() const { return options_.max_shard_bytes; }

  /// Looks at the folder, at most once a second. Errors: those of list_checkpoints().
  Status look(ckpt::IoBackend& io);
  /// Whether the save of a step is labelled suspect now, by labels that are at most a second old.
  bool is_suspect(ckpt::IoBackend& io, int64_t step, int64_t created_unix_ms);
  /// Makes the next look() read the folder, since a step has gone.
  void doubt() { looked_ = {}; }
  /// Complete steps, ascending, as of the last look; without bad ones, unless those are served.
  const std::vector<ckpt::CheckpointInfo>& steps() const { return steps_; }

  /// The step of "latest" and "main", of "best" (the lowest validation loss, or loss where no step has one), or "good".
  const ckpt::CheckpointInfo* named(std::string_view name) const;
  /// The step of any revision: such a name, a number, "step-N", a commit of this form or 7 of its digits and more.
  /// Errors: kInvalidInput, with the reason.
  Result<const ckpt::CheckpointInfo*> find(std::string_view revision, const ServedForm& form) const;
  /// 40 hex digits: another save of the step, and another form of it, have another.
  std::string commit(const ckpt::CheckpointInfo& step, const ServedForm& form) const;

 private:
  ServedRunOptions options_;
  ckpt::CatalogCache cache_;
  std::vector<ckpt::CheckpointInfo> steps_;
  std::vector<int64_t> bad_;
  std::chrono::steady_clock::time_point looked_{};
  ckpt::Labels labels_;
  std::chrono::steady_clock::time_point labels_read_{};
};

/// Whether training moves the name to other steps.
bool is_moving_name(std::string_view revision);

}  // namespace cairn::tools
