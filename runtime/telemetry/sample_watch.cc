#include "runtime/telemetry/sample_watch.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "runtime/core/robust_level.h"

namespace cairn::telemetry {

std::vector<OutlierSample> SampleWatch::add(std::span<const SampleLoss> step) {
  std::vector<std::optional<RobustLevel>> levels(windows_.size());
  for (size_t s = 0; s < windows_.size(); ++s) {
    const bool drawn =
        std::ranges::any_of(step, [&](const SampleLoss& one) { return one.source == static_cast<int32_t>(s); });
    if (!drawn || std::ssize(windows_[s]) < kLeast) continue;
    levels[s] = RobustLevel::of({windows_[s].begin(), windows_[s].end()}, kFloor);
  }
  std::vector<OutlierSample> found;
  for (const SampleLoss& one : step) {
    const auto s = static_cast<size_t>(one.source);
    const auto loss = static_cast<float>(one.loss);
    if (!std::isfinite(loss)) continue;
    if (levels[s]) {
      const double z = levels[s]->deviations(loss);
      if (std::fabs(z) > kLimit)
        found.push_back({one.position, std::round(one.loss * 1e4) / 1e4, std::round(z * 10) / 10});
    }
    windows_[s].push_back(loss);
    if (std::ssize(windows_[s]) > kWindow) windows_[s].pop_front();
  }
  std::ranges::stable_sort(found, [](const OutlierSample& a, const OutlierSample& b) { return a.z > b.z; });
  const auto down = std::ranges::find_if(found, [](const OutlierSample& one) { return one.z < 0; });
  const auto up = std::min<int64_t>(kNamed, down - found.begin());
  const auto kept_down = std::min<int64_t>(kNamed, found.end() - down);
  std::vector<OutlierSample> out(found.begin(), found.begin() + up);
  out.insert(out.end(), found.end() - kept_down, found.end());
  return out;
}

}  // namespace cairn::telemetry
