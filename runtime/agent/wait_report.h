#pragma once
// Who keeps a run waiting. Ranks wait for ranks that wait for others; the culprit is at the end of that chain: a rank
// that is gone, stopped, or inside no operation at all. This file finds it and writes the report; where its facts come
// from is the caller's business. Pure.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/agent/stacks.h"
#include "runtime/comm/shm_world.h"
#include "runtime/core/result.h"

namespace cairn::agent {

/// A rank at one moment.
struct RankState {
  int64_t rank = 0;
  comm::RankView view;
  char state = '?';  // of its process: R, S, D, T (stopped), Z (ended), '?' (gone)
  std::string host;  // that it is on, where that is another one than the agent's; as its agent has told last
};

struct WaitFinding {
  std::vector<int64_t> culprits;  // the first is the first to look at; several when they wait for each other
  bool deadlock = false;          // they do
  std::string reason;             // "is stopped (state T)"
  std::vector<int64_t> chain;     // from the rank that has waited longest to the culprit
  int64_t waited_ms = 0;          // by that rank
};

/// Follows the waits. `ranks` is indexed by rank.
WaitFinding find_culprit(const std::vector<RankState>& ranks);

/// "rank 2 (pid 812) is stopped (state T), at step 12 (forward and backward)", and below who waits for it, equal
/// waits on one line. For a terminal.
std::string summary_text(const WaitFinding& finding, const std::vector<RankState>& ranks);

struct RankStacks {
  int64_t rank = 0;
  ProcessStacks stacks;
};

/// Ranks whose training threads stand at the same place.
struct StackGroup {
  std::vector<int64_t> ranks;
  std::vector<std::string> frames;  // innermost first
};

/// Fewest ranks first: those that stand where hardly anybody stands are the ones to look at. Ranks without stacks are
/// left out.
std::vector<StackGroup> group_stacks(const std::vector<RankStacks>& all);

nlohmann::json to_json(const RankStacks& stacks);
/// Errors: kCorrupt.
Result<RankStacks> rank_stacks_from_json(const nlohmann::json& json);

struct WaitReport {
  std::string title;    // "rank 2 keeps the run waiting", or why a generation ended
  std::string failure;  // what the supervisor blames; empty while nothing has failed
  WaitFinding finding;
  std::vector<RankState> ranks;
  std::vector<RankStacks> stacks;  // of those whose stacks were taken, on all hosts
  std::string time;                // of day, for people
  bool of_all = true;              // ranks; else what they wait for is not known here, and no finding is told
};

/// The file: culprit first, then groups of equal stacks, then every rank with where it is. Stacks of each rank only
/// where there are no more than a few; else of the culprits.
std::string to_text(const WaitReport& report);

}  // namespace cairn::agent
