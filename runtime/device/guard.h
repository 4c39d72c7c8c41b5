#pragma once
// Proves that no code of the host reads or writes a device's memory: with the guard on, pages of the CPU that stand for
// it can be touched while something runs on the device (a kernel, communication, a copy), and at no other time; who
// does is killed by SIGSEGV at that place. For tests; off, it costs a look at a flag.

#include <atomic>
#include <cstddef>
#include <span>
#include <utility>

namespace cairn {

namespace guard {
extern std::atomic<bool> on;
void open();
void close();
/// Pages from now on that stand for a device's memory, and no longer. Whole pages of 4 KiB.
void add(std::span<std::byte> pages);
void remove(std::span<std::byte> pages);
}  // namespace guard

/// From now on, for memory that is allocated from now on. Before any is.
void guard_device_memory();

/// While one lives, on any thread, work runs on the device.
class DeviceAccess {
 public:
  DeviceAccess() : opened_(guard::on.load(std::memory_order_relaxed)) {
    if (opened_) guard::open();
  }
  ~DeviceAccess() {
    if (opened_) guard::close();
  }
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;

 private:
  const bool opened_;
};

/// Memory that another owns, for the device alone while this lives. Whole pages of 4 KiB.
class GuardedPages {
 public:
  GuardedPages() = default;
  explicit GuardedPages(std::span<std::byte> pages) {
    if (pages.empty() || !guard::on.load(std::memory_order_relaxed)) return;
    guard::add(pages);
    pages_ = pages;
  }
  GuardedPages(GuardedPages&& other) noexcept : pages_(std::exchange(other.pages_, {})) {}
  GuardedPages& operator=(GuardedPages&& other) noexcept {
    std::swap(pages_, other.pages_);
    return *this;
  }
  GuardedPages(const GuardedPages&) = delete;
  GuardedPages& operator=(const GuardedPages&) = delete;
  ~GuardedPages() {
    if (!pages_.empty()) guard::remove(pages_);
  }

 private:
  std::span<std::byte> pages_;
};

}  // namespace cairn
