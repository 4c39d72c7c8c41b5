#pragma once
// Steps of a training run on the doubles of CUDA, counted: the trainer that `cairn _rank` runs, with its hook and
// machine, its kernels' tables and the link that copies snapshots. With Backing::kNone nothing is computed and no
// memory is taken, so models of any size are counted at once.

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "runtime/plan/plan.h"
#include "tests/runtime/cuda/steps/counted_tables.h"
#include "tests/simt/stream_double.h"

namespace cairn::testing {

/// The counts of one step, from its data to the next step's.
struct StepCount {
  int64_t launches = 0;  // kernels, products, fills of memory
  int64_t update = 0;    // those of the optimizer's update
  int64_t bytes = 0;     // op_bytes.h
  int64_t waits = 0;     // of the training thread: for the device, or standing still for a snapshot's copies
  int64_t waits_before_update = -1;        // of those, before the update's first launch; -1: none was launched
  int64_t collectives = 0;                 // over the device's memory, which are no launches of this rank's
  std::map<std::string, int64_t> kernels;  // launches by kernel; "(product)", "(fill)"
  OpNotes ops;
};

struct CountedSteps {
  std::vector<StepCount> steps;  // from the first one on
  /// All that the streams were asked for since the first step's data, where the steps were to be kept.
  std::vector<simt::Ordered> ordered;
  std::vector<std::string> misuses;  // of the doubles
};

enum class Wanted { kCounts, kOrdered };

/// The first `steps` steps of rank 0 of a run; several ranks need a recorder (mute_engine.h). A recorder lets
/// copies of snapshots arrive when the step after the next one begins, or when training stands still for them. One at a
/// time.
CountedSteps count_steps(const Plan& plan, int64_t steps, simt::Backing backing, Wanted wanted = Wanted::kCounts);

}  // namespace cairn::testing
