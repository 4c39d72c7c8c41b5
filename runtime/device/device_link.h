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
#include "runtime/device/stream.h"

namespace cairn {

/// Threads: one at a time, except fetch() where at_once().
class DeviceLink {
 public:
  virtual ~DeviceLink() = default;

  /// Host memory that pieces will go to and come from, again and again: it may be pinned. Once, before all else.
  virtual Status use_host(std::span<std::byte> host) = 0;

  /// What is fetched from now on is what the device's work up to here leaves.
  virtual Status follow_work() = 0;

  /// fetch() copies on the calling thread, and any may call it: the caller that waits for a piece may fetch it.
  virtual bool at_once() const = 0;

  /// Begins to bring bytes to the host, in the order of the calls. Their word_sums when they are there already, as
  /// always with at_once(), and nullopt while they are on their way.
  virtual Result<std::optional<uint64_t>> fetch(DeviceBytes device, std::byte* host) = 0;

  // --- of links that are not at_once()
  /// How many fetches may be on their way at a time.
  virtual int64_t depth() const { return 1; }
  /// How much of a copy of `copy_bytes` bytes is best ordered between two marks.
  virtual int64_t piece_bytes(int64_t copy_bytes) const;
  /// Behind all fetches so far, for streams of the device to follow; null: they have arrived.
  virtual Result<std::shared_ptr<const Event>> mark() { return std::shared_ptr<const Event>(); }
  /// Whether the device has come to a mark: what was fetched before it is on the host.
  virtual Result<bool> has_arrived(const Event& mark) = 0;
  /// For a mark to be come to, once those before are; 0: none.
  virtual int64_t deadline_ms() const { return 0; }

  /// The device shall take word_sums of these arrays of whole words, in each copy from the next on. False: it cannot.
  virtual Result<bool> sum_up(std::span<const DeviceBytes> /*arrays*/) { return false; }
  /// Orders the sums, before the fetches of a copy.
  virtual Status take_sums() { return {}; }
  /// The sums of the arrays, valid once a mark behind take_sums() has been come to.
  virtual std::span<const uint64_t> sums() const { return {}; }

  /// Brings a piece to the device; settle() waits until all such pieces are there.
  virtual Status store(std::span<const std::byte> host, DevicePtr<std::byte> device) = 0;
  virtual Status settle() = 0;

  /// What `write` leaves in host memory, an area for each of these runs, is on the device when it returns: in the very
  /// memory where the host reaches the device's, else in as much of the host's, which is stored and settled.
  using Write = std::function<Status(std::span<const std::span<std::byte>> areas)>;
  virtual Status fill(std::span<const DeviceBytes> device, const Write& write);
};

}  // namespace cairn
