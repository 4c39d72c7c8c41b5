#pragma once
// How the ranks of a run on CUDA communicate: --comm, the devices that the machine shows, and whether NCCL is there.
// The agent chooses once, for all ranks of the start.

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "runtime/config/numbers.h"
#include "runtime/core/result.h"

namespace CLI {
class App;
}

namespace cairn::tools {

/// kRegistered: by NCCL, which has ranks' memory registered. kStaged: through the host's memory (runtime/cuda/staged).
enum class CommWish { kAuto, kNccl, kRegistered, kStaged };

/// --comm; kAuto where it is not given.
void add_comm_option(CLI::App& command, CommWish& wish);

struct CommQuestion {
  CommWish wish = CommWish::kAuto;
  DeviceChoice device = DeviceChoice::kCpu;  // where the ranks compute
  int64_t ranks = 1, world = 1;              // of this host; of the run
  Sums sums = Sums::kRanked;
};

/// What came of it.
struct CommChoice {
  bool nccl = false, registered = false;
  std::string text;  // for people; empty where there is nothing to choose: ranks on the CPU, a rank alone
  /// For the ranks, beside what the person has set, which wins.
  std::vector<std::pair<std::string, std::string>> environment;
  /// Of the run's record: {"engine", "version", "path", "sums", "registered", "environment"}, the variables as ranks
  /// have them. null as `text`.
  nlohmann::json record;

  /// For `cairn _rank --comm`, and by which hosts compare it.
  std::string word() const { return registered ? "registered" : nccl ? "nccl" : "staged"; }
};

/// NCCL where each rank of the host has a device of its own and NCCL can be opened; opens no device. Errors, with exit
/// code 2: NCCL was asked for, by the flag or for its sums, and cannot be, saying what is missing and what to do.
Result<CommChoice> choose_comm(const CommQuestion& question);

}  // namespace cairn::tools
