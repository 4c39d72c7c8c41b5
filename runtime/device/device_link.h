#pragma once
// Moves pieces between a device's memory and host memory, as a snapshot or a restart needs it. Host memory counts as a
// device too. ckpt/copy drives it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "runtime/core/result.h"
#include "runtime/device/device.h"
#include "runtime/device/pointer.h"

namespace cairn {

/// Threads: one at a time, but for fetch() where at_once().
class DeviceLink {
 public:
  virtual ~DeviceLink() = default;

  /// Host memory that pieces will go to and come from, again and again: it may be pinned. Once, before all else.
  virtual Status use_host(std::span<std::byte> host) = 0;

  /// What is fetched from now on is what the device's work up to here leaves.
  virtual Status follow_work() = 0;

  /// fetch() copies on the calling thread, and any may call it: who waits for a piece may fetch it.
  virtual bool at_once() const = 0;

  /// How many pieces are best on their way at a time.
  virtual int64_t depth() const = 0;

  /// Begins to bring a piece to the host. Its word_sums when it is there already, as always with at_once(), and
  /// nullopt while it is on its way.
  virtual Result<std::optional<uint64_t>> fetch(DeviceBytes device, std::byte* host) = 0;

  /// Waits for the oldest piece that is on its way: it is on the host, and the device may overwrite it.
  virtual Status arrive() = 0;

  /// Whether arrive() would return at once; false where nobody knows. A piece is on its way.
  virtual Result<bool> has_arrived() { return false; }

  /// Brings a piece to the device; settle() waits until all such pieces are there.
  virtual Status store(std::span<const std::byte> host, DevicePtr<std::byte> device) = 0;
  virtual Status settle() = 0;

  /// What `write` leaves in host memory, an area for each of these runs, is on the device when it returns: in the very
  /// memory where the host reaches the device's, else in as much of the host's, which is stored and settled.
  using Write = std::function<Status(std::span<const std::span<std::byte>> areas)>;
  virtual Status fill(std::span<const DeviceBytes> device, const Write& write);
};

}  // namespace cairn
