#pragma once
// Which samples of a step have a loss unlike those of their source. Each is compared with the last kWindow samples of
// its source before the step, once there are kLeast; outliers are among those too, so that a source that has changed is
// a new level after half a window. Pure: the same for any layout of ranks. It begins anew with each process.

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace cairn::telemetry {

struct SampleLoss {
  int64_t position = 0;
  int32_t source = 0;
  double loss = 0;  // nats a token that counts
};

struct OutlierSample {
  int64_t position = 0;
  double loss = 0;
  double z = 0;  // robust deviations above the samples before
  bool operator==(const OutlierSample&) const = default;
};

class SampleWatch {
 public:
  static constexpr int64_t kWindow = 1024, kLeast = 256;
  static constexpr double kLimit = 6, kFloor = 0.02;  // deviations; the least deviation, in nats
  static constexpr int64_t kNamed = 4;                // of a step, upwards and downwards each

  explicit SampleWatch(int64_t sources) : windows_(static_cast<size_t>(sources)) {}

  /// The samples of the next step. Returns those furthest from their level, highest first; loss and z are rounded as a
  /// line of metrics.jsonl has them.
  std::vector<OutlierSample> add(std::span<const SampleLoss> step);

 private:
  std::vector<std::deque<float>> windows_;  // by source
};

}  // namespace cairn::telemetry
