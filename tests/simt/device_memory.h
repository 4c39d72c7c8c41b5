#pragma once
// Memory that kernels may use: NaN at first, with room between two allocations, in one range of addresses that the
// watch knows. Under AddressSanitizer each is a block of its heap instead, whose ends are poisoned.

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <vector>

namespace cairn::simt {

/// At a multiple of 256 bytes, as a device's allocator gives it.
void* device_alloc(int64_t bytes);
void device_free(void* memory);
/// Shared memory of blocks, for the executor: at a multiple of `align`, 16 to 256, and of no more, so that who needs
/// more is found out. AddressSanitizer's heap may give more.
void* shared_alloc(int64_t bytes, int64_t align);
/// Whether host code may read and write all of it: at first, yes. Where it may not, doing so is a SIGSEGV. Nothing
/// under AddressSanitizer, whose heap the memory is of.
void open_to_host(bool open);

/// Whether it lies where device_alloc() takes its memory from.
bool is_device_memory(const void* at);

/// An array on the device, which host code of tests may read and write between launches.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count)
      : data_(static_cast<T*>(device_alloc(count * static_cast<int64_t>(sizeof(T))))), count_(count) {}
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(static_cast<int64_t>(values.size())) {
    if (count_ > 0) std::memcpy(static_cast<void*>(data_), values.data(), values.size() * sizeof(T));
  }
  ~DeviceArray() { device_free(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  int64_t size() const { return count_; }
  std::vector<T> values() const { return {data_, data_ + count_}; }

 private:
  T* data_;
  int64_t count_;
};

}  // namespace cairn::simt
