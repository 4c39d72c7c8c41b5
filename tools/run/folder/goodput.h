#pragma once
// Where the time of a run went, from what it left behind: metrics.jsonl and events.jsonl. For people who pay for it.

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::tools {

/// Seconds, and how often. They add up to `wall`, which is from the first start to the last that was heard of the run,
/// without the time in which it was meant to stand still: from an end with exit code 0 to the next start.
struct Goodput {
  double wall = 0;
  double kept = 0;         // steps that count, without what follows
  double checkpoints = 0;  // training stood still for snapshots
  double again = 0;        // steps that were done again, or are to be
  double starts = 0;       // from an agent's start to its first step
  double recoveries = 0;   // from a failure to the first new step
  double down = 0;         // from the last that was heard of a run that died, or ended with an error, to the next start
  double rest = 0;         // between steps
  int64_t steps_again = 0, agents = 0, failures = 0, deaths = 0;
  int64_t from_memory = 0, from_disk = 0;  // what starts after a failure or a death went on from

  double share(double seconds) const { return wall > 0 ? seconds / wall : 0; }
};

/// `now`: unix seconds of a run that somebody has, else 0. Errors: kUnavailable before the first step.
Result<Goodput> goodput_of(const std::filesystem::path& run, double now);

/// "93.1% of 2h 13m: 2.1% steps done again (31), ..."; what is below a tenth of a per cent is left out.
std::string goodput_text(const Goodput& goodput);
nlohmann::json to_json(const Goodput& goodput);

/// What would have saved more than a hundredth of the time. `save_seconds` and `pause_seconds`: what one save takes,
/// and what training loses to it.
std::vector<std::string> advice(const Goodput& goodput, double save_seconds, double pause_seconds);

}  // namespace cairn::tools
