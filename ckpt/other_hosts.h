#pragma once
// The other hosts of a run, as the one that decides for all of them sees them. Each host has the memory of its own
// ranks: what a run resumes from is whole on all of them, or lies on disk.
//
// Threads: that of the agent's loop.

#include <cstdint>
#include <vector>

#include "ckpt/snapshot/slot_rule.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

class Arena;           // snapshot/arena.h
struct RestoreChoice;  // restore.h

/// What the memory of a host holds, or that of several hosts in common.
struct HostMemory {
  uint64_t incarnation = 0;      // the latest life of ranks that has been there
  std::vector<WholeSlot> whole;  // ascending
  bool operator==(const HostMemory&) const = default;
};

/// What both have: the slots that are whole with the same step of the same incarnation.
HostMemory common_memory(const HostMemory& a, const HostMemory& b);

class OtherHosts {
 public:
  virtual ~OtherHosts() = default;

  /// What all of them hold; no rank runs on any. Waits for hosts that are away. Errors: kStopped, kUnavailable: it has
  /// waited in vain.
  virtual Result<HostMemory> memory() = 0;
  /// Tells them what their ranks resume from, and they begin to carry it out. `memory`: of this host.
  virtual void carry_out(const RestoreChoice& choice, const Arena& memory) = 0;
  /// Waits until all have. Errors: what one of them says, with its name; kPeerLost: it went away, and memory() waits
  /// for it.
  virtual Status carried_out() = 0;
  /// Each promises to save its part of what is whole in this slot.
  virtual void save(const WholeSlot& slot) = 0;
};

}  // namespace cairn::ckpt
