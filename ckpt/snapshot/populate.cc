#include "ckpt/snapshot/populate.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <vector>

#include "runtime/core/cgroup.h"

namespace cairn::ckpt {
namespace {

constexpr int kPopulateWrite = 23;             // MADV_POPULATE_WRITE, Linux 5.14; older headers do not have it
constexpr int64_t kPart = int64_t{64} << 20;   // a multiple of a huge page
constexpr int64_t kEach = int64_t{256} << 20;  // bytes that are worth a thread
constexpr int64_t kMostThreads = 16;

}  // namespace

int populate(void* base, int64_t bytes) {
  std::atomic<int64_t> next{0};
  std::atomic<int> failed{0};
  const auto make = [&] {
    while (failed.load(std::memory_order_relaxed) == 0) {
      const int64_t at = next.fetch_add(kPart, std::memory_order_relaxed);
      if (at >= bytes) return;
      if (::madvise(static_cast<std::byte*>(base) + at, std::min(kPart, bytes - at), kPopulateWrite) == 0) continue;
      int none = 0;
      failed.compare_exchange_strong(none, errno);
    }
  };
  const int64_t cores = usable_cpus();
  std::vector<std::thread> others;
  for (int64_t k = 1; k < std::min({cores, kMostThreads, bytes / kEach}); ++k) others.emplace_back(make);
  make();
  for (std::thread& other : others) other.join();
  return failed.load();
}

}  // namespace cairn::ckpt
