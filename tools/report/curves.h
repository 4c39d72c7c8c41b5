#pragma once
// The curves of a run in a bounded number of bytes, for `cairn report --json` and the page that shows the same.
//
// Values are cut into buckets of `each` steps. A bucket keeps its least, its greatest and its mean, so that a picture
// of at most as many columns as buckets loses no extreme. Where all values fit into the bytes, a bucket is one step.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <vector>

#include "tools/report/history.h"

namespace cairn::tools {

struct Reduced {
  int64_t each = 1;                           // values a bucket; the last one may have fewer
  std::vector<double> mean, least, greatest;  // of the finite values; NaN: there is none
  std::vector<int64_t> not_finite;            // indices of infinities and, where `nan_counts`, of NaN
};

/// Pure. `nan_counts`: a NaN is a value that went wrong, and not one that is missing.
Reduced reduce(std::span<const double> values, int64_t each, bool nan_counts);

/// The number with six significant digits: what the curves are written with.
double rounded(double value);

/// {"axes": [{"each", "step", "tokens", "seconds"}], "series": {NAME: {"axis", "mean", "least", "greatest",
/// "not_finite"}}, "abandoned": [{"axis", "mean", ...}], "left_out"}. About `bytes` of text.
/// An axis has the first step of each bucket, the tokens and the seconds since the first step. Without "least" a
/// bucket is one step, or its extremes were left out (split_ms). "abandoned": losses of steps that were done again.
nlohmann::json curves_of(const History& history, int64_t bytes);

}  // namespace cairn::tools
