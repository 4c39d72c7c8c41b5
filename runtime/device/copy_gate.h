#pragma once
// Memory that is copied beside the work that will change it, as training state during a snapshot. Work that is about to
// overwrite a part is ordered behind the reading of that part. ckpt/copy implements it.

#include <cstdint>
#include <span>

#include "runtime/device/pointer.h"
#include "runtime/device/stream.h"

namespace cairn {

/// Calls of order_after_copy() of an update whose work is ordered, at most: CopyGate::block_bytes() sees to it. With
/// what rules and averages do in one launch an update beside a copy is at most 64.
inline constexpr int64_t kMostGateCalls = 48;

class CopyGate {
 public:
  virtual ~CopyGate() = default;

  /// How much of each array is best overwritten at once now: more would wait for more. All of it where no copy is under
  /// way, if the device copies by itself.
  virtual int64_t block_bytes() const = 0;

  /// What the stream is asked for from now on comes behind the reading of these bytes by the copy under way, if there
  /// is one. A device's stream follows an event: the call waits for nothing but the order of the copy itself. For a
  /// stream that does its work at once the call waits until they are read. Never fails: a copy that has failed needs
  /// nothing any more, and the next snapshot reports it.
  virtual void order_after_copy(Stream& stream, std::span<const DeviceBytes> areas) = 0;

  /// How long all calls of order_after_copy() have waited. It leaves out what a device's stream waits.
  virtual int64_t waited_ns() const = 0;
};

}  // namespace cairn
