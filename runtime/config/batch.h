#pragma once
// The recipe's `batch`. runtime/config/recipe.h says how it is filled.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/span.h"

namespace cairn {

/// From a small batch to batch.samples in equal increments (runtime/plan/batch_schedule.h).
struct BatchRamp {
  int64_t from = 0;  // 0: no ramp
  int64_t by = 0;
  Span over;  // from the beginning of the run; the increments divide it evenly
};

/// From the first step at which so much has been trained on, other values; 0: as before.
struct BatchPhase {
  Span at;
  int64_t samples = 0, micro = 0;
  int64_t tokens = 0;
  double rope_theta = 0;
};

struct BatchConfig {
  int64_t samples = 0;  // global batch, sequences a step
  int64_t micro = 0;    // sequences a micro-batch on one data-parallel rank
  int64_t tokens = 0;   // of a sequence, a part of model.context into which samples are cut; 0: all
  BatchRamp ramp;
  std::vector<BatchPhase> phases;  // in the order of their beginnings
  bool uneven = false;             // samples need not divide: some replicas have none of the last round
  std::vector<std::string> skip;   // positions that no step takes, "A..B" (runtime/config/skipped_positions.h)
};

}  // namespace cairn
