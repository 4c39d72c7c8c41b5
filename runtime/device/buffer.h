#pragma once
// A block of memory on a device, and the count of bytes that live blocks take.
//
// CPU memory of at least 2 MiB is mapped on huge page bounds and advised to be huge pages. A released block is kept
// for the next request of its size and never given back to the kernel: a fresh page costs a fault and a zeroing, which
// in a training step is noise of milliseconds. Threads: all functions may be called from any.

#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/core/check.h"
#include "runtime/core/result.h"
#include "runtime/device/device.h"
#include "runtime/device/pointer.h"

namespace cairn {

/// Where blocks on a device come from that is no CPU: runtime/cuda/arena.h.
class DeviceHeap {
 public:
  virtual ~DeviceHeap() = default;
  /// Zeros, at a multiple of 64 bytes. Errors: kNoSpace.
  virtual Result<std::byte*> take(int64_t bytes) = 0;
  virtual void give_back(std::byte* block, int64_t bytes) = 0;
};
/// Blocks of that device are of this memory from now on; null: of none. It outlives them.
void serve_heap(Device device, DeviceHeap* memory);

/// Move-only owner of one block. Aligned to 64 bytes; zero when handed out.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  /// Errors: kNoSpace when the device has no memory, naming the bytes asked for and those in use; kUnsupported for one
  /// whose memory nobody serves. 0 bytes give an empty buffer.
  static Result<Buffer> allocate(Device device, int64_t size_bytes);

  /// From now on the block is of the device alone (runtime/device/guard.h).
  Buffer for_device_alone() &&;

  Device device() const { return device_; }
  int64_t size_bytes() const { return size_bytes_; }
  /// For the host, on a CPU alone.
  std::byte* data() { return host_data(); }
  const std::byte* data() const { return host_data(); }

  /// The block where work on the device finds it.
  template <typename T = std::byte>
  DevicePtr<T> at() {
    return DevicePtr<std::byte>(data_).as<T>();
  }
  DeviceBytes all() { return {at(), size_bytes_}; }

  /// The block as elements of T: size_bytes() / sizeof(T) of them.
  template <typename T>
  std::span<T> as() {
    return {reinterpret_cast<T*>(host_data()), static_cast<size_t>(size_bytes_) / sizeof(T)};
  }

 private:
  void release();
  std::byte* host_data() const {
    RT_CHECK(device_.kind == DeviceKind::kCpu, "memory of {} is of no use to the host", device_name(device_));
    return data_;
  }

  Device device_;
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
  bool guarded_ = false;
};

/// Bytes asked for by the live buffers of a device (without rounding): what a plan predicts.
int64_t allocated_bytes(Device device);

}  // namespace cairn
