#pragma once
// The contents of the memory of the hosts of a run. Each host has the memory of its own ranks, so a run resumes from
// what is whole on all of them, or from the disk.

#include <cstdint>
#include <vector>

#include "ckpt/snapshot/slot_rule.h"

namespace cairn::ckpt {

/// What the memory of a host holds, or that of several hosts in common.
struct HostMemory {
  uint64_t incarnation = 0;      // the latest life of ranks that has been there
  std::vector<WholeSlot> whole;  // ascending
  bool operator==(const HostMemory&) const = default;
};

/// What both have: the slots that are whole with the same step of the same incarnation.
HostMemory common_memory(const HostMemory& a, const HostMemory& b);

}  // namespace cairn::ckpt
