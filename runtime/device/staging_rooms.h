#pragma once
// Pinned memory of the host through which a rank's communication goes where a device's arrays are staged
// (runtime/cuda/staged): the plan says how much (runtime/trainer/staging_rooms.h), the engine takes it at the start.

#include <cstdint>

namespace cairn {

struct StagingRooms {
  int64_t own_bytes = 0;                    // of the largest operation that the rank's own stream orders
  int64_t lane_bytes = 0;                   // of the largest one of its lane
  int64_t messages = 0, message_bytes = 0;  // to other pipeline stages, that may be under way at a time

  static constexpr int64_t kPage = 4096;  // each of them is pages of its own
  static constexpr int64_t pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
  /// With the words that the device waits for, one for each of the two streams.
  constexpr int64_t total_bytes() const {
    return pages(own_bytes) + pages(lane_bytes) + messages * pages(message_bytes) + 2 * kPage;
  }
};

}  // namespace cairn
