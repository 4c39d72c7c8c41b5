#pragma once
// Work on a device, in the order in which it is asked for. A CPU's does each piece before it returns, so there all that
// is ordered is done, and settle() has nothing to wait for.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "runtime/core/result.h"
#include "runtime/device/device.h"
#include "runtime/device/pointer.h"

namespace cairn {

class OpClock;
class StreamTimer;

/// A place in a stream's work.
class Event {
 public:
  virtual ~Event() = default;
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual Device device() const = 0;
  /// Another one of the same device, for work beside this one's.
  virtual std::unique_ptr<Stream> beside() const = 0;

  /// Behind all that it has been asked for so far; null where that is done.
  virtual std::shared_ptr<const Event> mark() { return nullptr; }
  /// What it is asked for from now on comes behind the event, of any stream of the device; null: behind nothing.
  virtual void follow(const std::shared_ptr<const Event>& /*event*/) {}

  /// Numbers of the host for work that is ordered from now on. `host` stays as it is until that work is done. They lie
  /// at `room`, which may be null where the device reads the host's memory.
  template <typename T>
  DevicePtr<const T> give(std::span<const T> host, DevicePtr<T> room = nullptr) {
    return give_bytes(std::as_bytes(host), room).template as<const T>();
  }

  /// Memory of the host in which copies of the stream end while the host goes on: zeros, in whole pages of its own, and
  /// pinned where the device copies by itself. Who cannot pin it says so once; copies to it then wait.
  virtual std::shared_ptr<std::byte> host_memory(int64_t bytes) const;

  /// Takes moments of this stream's work; the stream outlives it. Where work is done when a call returns, they are the
  /// host's.
  virtual std::unique_ptr<StreamTimer> make_timer();
  /// Has its ops timed, or with null no longer (runtime/device/op_clock.h).
  void use_clock(OpClock* clock) { clock_ = clock; }
  OpClock* clock() const { return clock_; }

  /// Until all work that is ordered is done: what it has copied to the host may be read
  /// (runtime/device/host_numbers.h). Errors: kTimeout past the
  /// deadline that the stream was made with; those of the device.
  Status settle() {
    RT_TRY(wait());
    ++settled_;
    return {};
  }
  /// The same of the work before `place`, a mark() of this stream since the last settle: what is ordered behind it
  /// continues, and nothing of it may be read. Null: all work.
  Status settle_at(const std::shared_ptr<const Event>& place) {
    if (place == nullptr) return settle();
    RT_TRY(wait_at(*place));
    ++settled_;
    return {};
  }
  /// How often it has been.
  int64_t settled() const { return settled_; }

 private:
  virtual Status wait() = 0;
  virtual Status wait_at(const Event& /*place*/) { return wait(); }
  virtual DevicePtr<const void> give_bytes(std::span<const std::byte> host, DevicePtr<void> room) = 0;

  int64_t settled_ = 0;
  OpClock* clock_ = nullptr;
};

/// One for each thread that works.
std::unique_ptr<Stream> make_cpu_stream();

}  // namespace cairn
