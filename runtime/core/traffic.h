#pragma once
// What a rank puts into communication: counted by the communicators (runtime/comm), predicted by the plan
// (runtime/plan/communication.h), and equal.

#include <cstdint>
#include <string>

namespace cairn {

/// Of one kind of operation. Bytes are the whole data of an all_reduce, all chunks of a reduce_scatter's input, the own
/// chunk of an all_gather, the data of a broadcast at its root (0 elsewhere), each message sent, and all that goes into
/// an all_to_all, the part for this rank itself too.
struct Volume {
  int64_t bytes = 0, calls = 0;
  void add(int64_t more) { bytes += more, ++calls; }
  bool operator==(const Volume&) const = default;
};

struct Traffic {
  Volume all_reduce, reduce_scatter, all_gather, broadcast, send, all_to_all;
  bool operator==(const Traffic&) const = default;
};

/// Of one group of a rank. A group of one moves nothing and is not told.
struct GroupTraffic {
  std::string group;  // as named in plan/communication.h: "tp", "dp", ...
  int64_t size = 0;   // ranks
  Traffic traffic;
  bool operator==(const GroupTraffic&) const = default;
};

}  // namespace cairn
