#pragma once
// Says what a cut of the tables costs each rank, and chooses one. Pure arithmetic, any number of ranks.
//
// A rank's time is that of its memory (look-ups and updates) and of its link (bags, pooled rows, gradients), one after
// the other; a step takes as long as its slowest rank. The bytes are those that the model sends (a test holds them
// equal to what the communicator counts); the seconds compare cuts and predict no step time.

#include <cstdint>
#include <vector>

#include "runtime/config/dlrm.h"
#include "runtime/core/result.h"
#include "runtime/core/traffic.h"

namespace cairn::dlrm {

struct CutRequest {
  int64_t world = 1;
  int64_t global_samples = 1;  // of a step
  int64_t memory_bytes = 0;    // of a rank for tables and their sums of squares; 0: not bounded
  DlrmRule rule = DlrmRule::kSgd;
  double memory_bytes_per_s = 10e9;  // rows at random places
  double link_bytes_per_s = 5e9;     // of one rank, each way
};

struct RankCost {
  int64_t table_bytes = 0;  // with sums of squares
  double row_bytes = 0;     // read and written at look-ups and updates, a step
  double sent_bytes = 0;    // a step; what stays on the rank is in it
  double received_bytes = 0;
  double seconds = 0;
};

struct CutCost {
  std::vector<RankCost> ranks;
  double seconds = 0;  // of the slowest rank
  double mean_seconds = 0;
};

/// Errors: those of cut_tables().
Result<CutCost> cost_of(const DlrmConfig& config, const std::vector<TableCut>& cuts, const CutRequest& request);

/// Bytes that `rank` puts into the communication of one step, where each sample reads exactly `hot` rows of each table
/// and a number has `elem_bytes`. Errors: those of cut_tables().
Result<Traffic> step_traffic(const DlrmConfig& config, const std::vector<TableCut>& cuts, int64_t world, int64_t rank,
                             int64_t global_samples, int64_t elem_bytes);

/// The cut with the least cost_of().seconds among those that are tried: the smallest tables as copies, from none to
/// all; tables above a rank's mean cost, or a half or a quarter of it, cut by columns or by rows; the rest whole. The
/// most expensive part is placed first, each on the rank with the least so far and memory for it.
/// Errors: kNoSpace, with the numbers, where no tried cut fits the memory; kInvalidInput for a request without ranks or
/// samples.
Result<std::vector<TableCut>> plan_cuts(const DlrmConfig& config, const CutRequest& request);

}  // namespace cairn::dlrm
