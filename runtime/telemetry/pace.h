#pragma once
// How long a rank computes, without what it waits for others: what tells a slow host from those that wait for it.
// A thread that waits in an operation of communication counts the time; whoever measures takes the difference.

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>

namespace cairn::telemetry {

/// Nanoseconds that the calling thread has spent in operations of communication since it began.
inline thread_local int64_t waited_ns = 0;

/// Of kPaceSteps steps in a row, all ranks the same ones.
struct Pace {
  int64_t step = 0;  // the last of them, a multiple of kPaceSteps
  double ms = 0;     // that the rank computed in a step: mean without the kPaceOutliers longest
};
inline constexpr int64_t kPaceSteps = 20, kPaceOutliers = 2;

/// Gathers steps into paces.
class PaceMeter {
 public:
  /// The pace that this step completes, if it does: steps that a start has begun in the midst of are left out.
  std::optional<Pace> add(int64_t step, double compute_ms) {
    const auto at = static_cast<size_t>((step - 1) % kPaceSteps);
    if (at != count_) count_ = 0;
    if (at != count_) return std::nullopt;
    ms_[count_++] = compute_ms;
    if (count_ < ms_.size()) return std::nullopt;
    count_ = 0;
    std::array<double, kPaceSteps> sorted = ms_;
    std::sort(sorted.begin(), sorted.end());
    const auto counted = sorted.begin() + (kPaceSteps - kPaceOutliers);
    return Pace{step, std::accumulate(sorted.begin(), counted, 0.0) / static_cast<double>(counted - sorted.begin())};
  }

 private:
  std::array<double, kPaceSteps> ms_{};
  size_t count_ = 0;
};

}  // namespace cairn::telemetry
