#include "runtime/device/guard.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "runtime/core/check.h"

namespace cairn {
namespace guard {

std::atomic<bool> on = false;

namespace {

struct Guarded {
  std::mutex mutex;
  int64_t inside = 0;  // threads that run something on the device
  std::vector<std::span<std::byte>> pages;
};

/// Never destroyed, as the memory that it guards may outlive any order of destruction.
Guarded& guarded() {
  static Guarded& instance = *new Guarded;
  return instance;
}

void protect(std::span<std::byte> pages, int protection) {
  RT_CHECK(::mprotect(pages.data(), pages.size(), protection) == 0, "mprotect of {} bytes", pages.size());
}

}  // namespace

void open() {
  Guarded& g = guarded();
  const std::lock_guard lock(g.mutex);
  if (g.inside++ > 0) return;
  for (const auto pages : g.pages) protect(pages, PROT_READ | PROT_WRITE);
}

void close() {
  Guarded& g = guarded();
  const std::lock_guard lock(g.mutex);
  if (--g.inside > 0) return;
  for (const auto pages : g.pages) protect(pages, PROT_NONE);
}

void add(std::span<std::byte> pages) {
  Guarded& g = guarded();
  const std::lock_guard lock(g.mutex);
  g.pages.push_back(pages);
  if (g.inside == 0) protect(pages, PROT_NONE);
}

void remove(std::span<std::byte> pages) {
  Guarded& g = guarded();
  const std::lock_guard lock(g.mutex);
  std::erase_if(g.pages, [&](const auto& one) { return one.data() == pages.data(); });
  protect(pages, PROT_READ | PROT_WRITE);
}

}  // namespace guard

void guard_device_memory() { guard::on = true; }

}  // namespace cairn
