#pragma once
// The level of a series, which outliers hardly move: its median and its median absolute deviation.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cairn {

struct RobustLevel {
  double median = 0;
  double spread =
      0;  // 1.4826 times the median absolute deviation, as a normal distribution's deviation; at least floor

  /// `values` has at least one. The median is the element of rank floor(n / 2).
  static RobustLevel of(std::vector<float> values, double floor) {
    const float median = middle(values);
    for (float& value : values) value = std::fabs(value - median);
    return {static_cast<double>(median), std::max(1.4826 * static_cast<double>(middle(values)), floor)};
  }
  /// How many deviations `x` lies above the level.
  double deviations(float x) const { return (static_cast<double>(x) - median) / spread; }

 private:
  static float middle(std::vector<float>& values) {
    const auto at = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), at, values.end());
    return *at;
  }
};

}  // namespace cairn
