#pragma once
// A group of a device's ranks that can have a message come in before it is needed, while the rank computes. An engine
// of the host's memory has no use for it: there a message lies in the channel once it is sent.

#include <cstdint>
#include <string_view>

#include "runtime/core/result.h"
#include "runtime/device/pointer.h"

namespace cairn::comm {

class EarlyReceiver {
 public:
  virtual ~EarlyReceiver() = default;
  /// Orders the receive of the next message of `src`, another member, behind all that the rank's stream was asked for
  /// before; later work does not wait. `data` lies on the device and stays untouched until
  /// take_early(). Receives of a source, early or not, are in the order of its sends.
  virtual Status receive_early(DevicePtr<void> data, int64_t bytes, int64_t src, std::string_view what) = 0;
  /// Later work of the rank's stream comes behind the oldest early message of `src` that was not taken.
  virtual Status take_early(int64_t src, std::string_view what) = 0;
};

}  // namespace cairn::comm
