#pragma once
// State that a rank keeps of what another saves, where that one has it in memory both see. After a restart a rank's
// first update reads it there, so nothing is copied before training goes on. That memory is the host's, so only a
// device that works in the host's memory has peer copies.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cairn {

/// A part of a copy, and where in the banks of the rank that saves it the same lies.
struct PeerCopy {
  int64_t copy = 0;               // index into what the rank keeps of others, in the order of trainer::kept_tensors()
  int64_t offset = 0, bytes = 0;  // of its memory
  std::vector<std::byte*> banks;  // none of them is written
};

}  // namespace cairn
