#pragma once
// Steps of a run that are trained again beside it, from its own checkpoints, to be compared bit for bit. For people
// who doubt a machine, a build or a result. Nothing of the run is changed.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"
#include "tools/run/folder/lineage.h"

namespace cairn::tools {

/// How the ranks of a run were laid out, from a start of theirs on.
struct RankLayout {
  int64_t from = 0;  // the step behind which it begins
  int64_t world = 0;
  std::string mesh, isa;  // isa: empty on a device
  bool same(const RankLayout& other) const { return world == other.world && mesh == other.mesh && isa == other.isa; }
};

/// The layouts of the steps that count. `events`: of events.jsonl, in order of time; a start that went back replaces
/// what it went back behind.
std::vector<RankLayout> rank_layouts(std::span<const nlohmann::json> events);

/// Steps from + 1 to `to`, which one recipe and one layout trained.
struct AuditLeg {
  int64_t from = 0, to = 0;
  LineageEntry segment;
  RankLayout layout;
  bool from_saved = false;  // the run has a checkpoint of `from`; else 0, or where the leg before ended
  bool to_saved = false;
};

/// The legs from the newest checkpoint before step `first`, or from the run's beginning, to step `last`. Each ends
/// where the run has a checkpoint, where its recipe or its layout changes, or at `last`. `saved`: steps, ascending.
/// Pure. Errors: kInvalidInput where there is nothing to begin from, or the lineage does not say how a step was
/// trained.
Result<std::vector<AuditLeg>> audit_legs(int64_t first, int64_t last, std::span<const int64_t> saved,
                                         std::span<const LineageEntry> segments, std::span<const RankLayout> layouts);

/// A leg and what differs in it.
struct AuditedLeg {
  AuditLeg leg;
  struct Difference {
    int64_t step = 0;
    std::string field;
    double in_run = 0, here = 0;
  };
  int64_t steps = 0;                // compared: those that metrics.jsonl has
  int64_t differing = 0;            // of these
  std::optional<Difference> first;  // of the first that differs
  std::optional<int64_t> tensors;   // of the checkpoint at its end that differ; none: there is none to compare with
  int64_t tensors_in_all = 0;
  bool equal() const { return !first && tensors.value_or(0) == 0; }
};

struct AuditOptions {
  int64_t first = 0, last = 0;          // steps
  std::vector<std::string> sets;        // more --set of the training
  std::vector<std::string> train_more;  // more options of `cairn train`
  std::string program = "/proc/self/exe";
  std::function<void(const AuditLeg&)> begins;
  std::function<void(const AuditedLeg&)> told;
};

/// The scratch folder of one audit, which no other one takes while this lives. A file in it says that it is an audit's.
class AuditScratch {
 public:
  /// Makes it, or takes one that an audit has left, and empties it. `run`: of which steps are trained again. Errors:
  /// kInvalidInput for a folder with anything else in it, the run itself, its checkpoints or what lies around them;
  /// kUnavailable while another audit has it.
  static Result<AuditScratch> take(const std::filesystem::path& path, const std::filesystem::path& run);

  const std::filesystem::path& path() const { return path_; }
  /// Removes all but the file that says whose it is, and what a killed training there has left in shared memory.
  Status empty() const;
  /// Removes the folder too.
  Status remove();

 private:
  std::filesystem::path path_;
  Fd lock_;
};

/// Trains the legs by `cairn train` in `scratch`, one after the other. A leg whose end is not the run's does not spoil
/// the next one, which begins at the run's own checkpoint. Errors: those of audit_legs; kInvalidInput where the run has
/// no record of these steps, its data are no longer those, an option of `sets` changes what is trained, or another
/// layout gives other bits by the recipe's `deterministic`; those of a training that fails, with the end of its log.
Result<std::vector<AuditedLeg>> audit(const std::filesystem::path& run, const AuditScratch& scratch,
                                      const AuditOptions& options);

}  // namespace cairn::tools
