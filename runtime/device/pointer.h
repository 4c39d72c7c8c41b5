#pragma once
// Addresses in a device's memory. They can be moved about and compared; nothing reads or writes through one but what
// runs on the device: kernels and copies (runtime/kernels), communication (runtime/comm), the links of snapshots. The
// test `device_seam` keeps address() out of all other folders.

#include <compare>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace cairn {

template <typename T>
class DevicePtr {
 public:
  constexpr DevicePtr() = default;
  constexpr DevicePtr(std::nullptr_t) {}  // NOLINT(google-explicit-constructor)
  constexpr explicit DevicePtr(T* address) : address_(address) {}
  /// As pointers convert: to const, and to void.
  template <typename U>
  requires(std::is_convertible_v<U*, T*> && !std::is_same_v<U, T>) constexpr DevicePtr(DevicePtr<U> other)
      : address_(other.address()) {}  // NOLINT(google-explicit-constructor)

  /// For who runs on the device.
  constexpr T* address() const { return address_; }
  /// The same place as elements of another type.
  template <typename U>
  constexpr DevicePtr<U> as() const {
    return DevicePtr<U>(
        static_cast<U*>(static_cast<std::conditional_t<std::is_const_v<T>, const void*, void*>>(address_)));
  }

  bool aligned_to(int64_t bytes) const {
    return reinterpret_cast<uintptr_t>(address_) % static_cast<uintptr_t>(bytes) == 0;
  }

  constexpr explicit operator bool() const { return address_ != nullptr; }
  friend constexpr bool operator==(DevicePtr, DevicePtr) = default;
  friend constexpr auto operator<=>(DevicePtr, DevicePtr) = default;

  constexpr DevicePtr& operator+=(int64_t elems) { return *this = *this + elems; }
  constexpr DevicePtr& operator-=(int64_t elems) { return *this = *this - elems; }
  friend constexpr DevicePtr operator+(DevicePtr p, int64_t elems) { return DevicePtr(p.address_ + elems); }
  friend constexpr DevicePtr operator-(DevicePtr p, int64_t elems) { return DevicePtr(p.address_ - elems); }
  friend constexpr int64_t operator-(DevicePtr a, DevicePtr b) { return a.address_ - b.address_; }

 private:
  T* address_ = nullptr;
};

/// A run of a device's memory.
struct DeviceBytes {
  DevicePtr<std::byte> first;
  int64_t size = 0;

  DeviceBytes first_bytes(int64_t count) const { return {first, count}; }
};

/// For kernels and engines, which are written for addresses.
template <typename T>
constexpr T* address_of(DevicePtr<T> p) {
  return p.address();
}

}  // namespace cairn
