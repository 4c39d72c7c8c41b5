#pragma once
// Memory of a device for what the other ranks send a rank to be summed, where ranks communicate from device to device
// (runtime/cuda/nccl): the plan says how much (runtime/trainer/sum_rooms.h), the machine has it from the start.

#include <cstdint>

namespace cairn {

struct SumRooms {
  int64_t own_bytes = 0;     // of what the rank's own stream orders; a larger operation goes in parts
  int64_t beside_bytes = 0;  // and of what its lane does

  constexpr int64_t total_bytes() const { return own_bytes + beside_bytes; }
};

}  // namespace cairn
