#pragma once
// Guards: the agent acts on an alarm of a run's steps, or on a loss that is not finite, as watch.on_divergence and its
// like say. A roll back is decided once and written to RUN/rolling_back.json before anything else changes. The next
// start, in this process or in another one, carries it out: it goes back to the checkpoint, begins a segment whose
// batch.skip has the samples in trouble, and removes the file. A run that is killed before the file exists meets its
// trouble again; behind it, it goes back. RUN/lowering_lr.json is the same of a rate that is lowered. Tries are counted
// in lineage.jsonl, which no roll back takes back: they stay bounded.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/config/skipped_positions.h"
#include "runtime/config/watch.h"
#include "runtime/core/result.h"

namespace cairn::tools {

struct Trouble {
  enum class Kind { kDivergence, kDrop, kNotFinite, kMachine } kind = Kind::kDivergence;
  int64_t onset = 0, step = 0;  // its first step, or the first that may be; and the one that showed it
  std::string why;
};

/// From a trouble back to a checkpoint.
struct RollBack {
  int64_t to_step = 0;
  int64_t onset = 0, step = 0;   // of the trouble
  int64_t number = 1;            // of the tries at this place
  PositionRange skip = {0, -1};  // of the sample order, from to_step on; empty after an error of the machine
  std::string why;
  bool leaves_out() const { return skip.first <= skip.last; }
  bool operator==(const RollBack&) const = default;
};

/// A rate that is lowered from the next start on.
struct Lowering {
  double by = 1;
  int64_t over = 0, back = 0;   // steps, as LoweredRate
  int64_t onset = 0, step = 0;  // of the trouble; 0: a person has done it
  std::string why;
  bool operator==(const Lowering&) const = default;
};

nlohmann::json to_json(const Lowering& lowering);
/// Throws nlohmann::json::exception where a field is missing or of another type.
Lowering lowering_from(const nlohmann::json& fields);

nlohmann::json to_json(const RollBack& roll_back);
/// Throws nlohmann::json::exception where a field is missing or of another type.
RollBack roll_back_from(const nlohmann::json& fields);

struct GuardDecision {
  std::optional<GuardAction> action;  // none: a warning is all
  RollBack roll_back;                 // of that action
  std::string no_way_back;            // why roll_back was passed over; empty: it was not
  Lowering lowering;                  // of that action
  std::string not_lowered;            // why lower_lr was passed over; empty: it was not
};

/// The first action that can be done. `past` and `lowered`: roll backs and lowered rates of the run, those that it went
/// back behind too; those of a step less than `within` away from this one, before or behind it, are tries. `good`:
/// steps of good checkpoints, ascending. `begin_of`: the position of the sample order at which a step begins. Pure.
/// The n-th try at a place goes to the n-th newest good checkpoint before the onset, or to the oldest one, and skips
/// lead * 2^(n-1) steps before the onset and lead * (2^(n-1) - 1) behind the step that showed the trouble.
/// After an error of the machine each try goes to the newest one, and skips nothing.
/// Errors: those of `begin_of`.
Result<GuardDecision> decide(const WatchConfig& watch, const Trouble& trouble, std::span<const RollBack> past,
                             std::span<const int64_t> good, const std::function<Result<int64_t>(int64_t)>& begin_of,
                             std::span<const Lowering> lowered = {});

/// The same of a run as its folder has it.
Result<GuardDecision> decide_for(const std::filesystem::path& run, const WatchConfig& watch, const Trouble& trouble);

/// The newest good checkpoint before `step`; 0: none exists. Errors: those of reading the folder.
Result<int64_t> good_before(const std::filesystem::path& run, int64_t step);

/// The roll back that was decided and not carried out. Errors: kCorrupt for a damaged file, with what to do; those of
/// reading it.
Result<std::optional<RollBack>> pending_roll_back(const std::filesystem::path& run);
/// Durable when it returns.
Status write_pending(const std::filesystem::path& run, const RollBack& roll_back);
/// The same of a rate that is to be lowered.
Result<std::optional<Lowering>> pending_lowering(const std::filesystem::path& run);
Status write_pending(const std::filesystem::path& run, const Lowering& lowering);
/// Either has been carried out, or a person has named another step.
Status remove_pending(const std::filesystem::path& run);

}  // namespace cairn::tools
