#pragma once
// Memory that is a window on a disk, as banks with optimizer.offload. The user of it says which bytes it will want and
// which it is done with; the pager moves them beside the work. Only where work is done at once: a CPU's. ckpt/snapshot
// implements it.

#include <cstdint>
#include <span>

#include "runtime/device/pointer.h"

namespace cairn {

class Pager {
 public:
  virtual ~Pager() = default;

  /// How much of an array is best moved at once.
  virtual int64_t block_bytes() const = 0;

  /// Begins to bring these bytes into memory. A hint: who touches them before they are there waits for the disk.
  virtual void fetch(std::span<const DeviceBytes> areas) = 0;

  /// These bytes are done with, and were written if `written`: begins to put them on the disk and to give
  /// their memory back. Waits while too many are on their way, so that memory stays bounded.
  virtual void release(std::span<const DeviceBytes> areas, bool written) = 0;
};

}  // namespace cairn
