#pragma once
// Two checkpoints, tensor by tensor, whatever their layouts; streamed.

#include <cstdint>
#include <string>
#include <vector>

#include "ckpt/persist/read.h"
#include "ckpt/tensors/box_stream.h"
#include "ckpt/tensors/stats.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct TensorDiff {
  enum class What { kEqual, kDiffers, kOtherShape, kOnlyLeft, kOnlyRight } what = What::kEqual;
  int64_t left = -1, right = -1;  // index into each manifest's tensors; -1: not there
  int64_t elements = 0;
  int64_t differing = 0;    // elements whose bits differ; with other dtypes: whose values differ
  int64_t nans = 0;         // of these, a NaN on either side: they are in no maximum below
  long double max_abs = 0;  // |a - b|: exact of integers, and of doubles it may be beyond what a double holds
  double max_rel = 0;       // that over the larger of |a| and |b|
  int64_t max_abs_at = -1;  // row-major index of the element with max_abs
};

struct DiffOptions {
  StreamOptions stream;           // for each side
  std::vector<std::string> only;  // names or "kind/name", * and ? as in a shell; empty: all
  StreamProgress progress;
};

/// In the order of the left side's tensors, then what only the right side has. Errors: those of reading.
Result<std::vector<TensorDiff>> diff_tensors(CheckpointReader& left, CheckpointReader& right,
                                             const DiffOptions& options = {});

/// Whether "name" or "kind/name" matches one of the patterns; none match everything.
bool matches(const TensorEntry& tensor, const std::vector<std::string>& patterns);

}  // namespace cairn::ckpt
