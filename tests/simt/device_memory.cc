#include "tests/simt/device_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "runtime/core/check.h"
#include "tests/simt/hooks.h"

extern "C" [[gnu::weak]] int __asan_address_is_poisoned(void const volatile* at);

namespace cairn::simt {
namespace {

constexpr int64_t kAlign = 256, kGap = 4096, kRange = int64_t{16} << 30;

std::mutex mutex;
char* range = nullptr;
int64_t used = 0;
std::map<const void*, int64_t> live;  // begin -> bytes
bool is_open = true;

void* alloc(int64_t bytes, bool shared, int64_t align) {
  RT_CHECK(bytes >= 0, "{} bytes of device memory", bytes);
  char* out = nullptr;
  {
    const std::lock_guard lock(mutex);
    RT_CHECK(is_open, "memory is allocated with the door closed");
    if (__asan_address_is_poisoned != nullptr) {
      void* made = nullptr;  // exactly so long: the heap marks its ends
      RT_CHECK(posix_memalign(&made, static_cast<size_t>(align), static_cast<size_t>(std::max<int64_t>(bytes, 1))) == 0,
               "{} bytes", bytes);
      out = static_cast<char*>(made);
    } else {
      if (range == nullptr) {
        void* const made =
            mmap(nullptr, kRange, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        RT_CHECK(made != MAP_FAILED, "no {} bytes of addresses", kRange);
        madvise(made, kRange, MADV_HUGEPAGE);  // the door is a hundred times as fast to open and close
        range = static_cast<char*>(made);
      }
      if (live.empty()) used = 0;
      const int64_t begin = used + kGap + align % kAlign;
      out = range + begin;
      used = (begin + bytes + kAlign - 1) / kAlign * kAlign;
      RT_CHECK(used + kGap <= kRange, "more than {} bytes of device memory", kRange);
    }
    live[out] = bytes;
  }
  std::memset(out, 0xff, static_cast<size_t>(bytes));
  if (watch_memory != nullptr) watch_memory(out, bytes, shared);
  return out;
}

}  // namespace

void* device_alloc(int64_t bytes) { return alloc(bytes, false, kAlign); }
void* shared_alloc(int64_t bytes, int64_t align) { return alloc(bytes, true, align); }

void device_free(void* memory) {
  if (memory == nullptr) return;
  if (forget_memory != nullptr) forget_memory(memory);
  const std::lock_guard lock(mutex);
  RT_CHECK(live.erase(memory) == 1, "freed what was not allocated");
  if (__asan_address_is_poisoned != nullptr) std::free(memory);
}

void open_to_host(bool open) {
  const std::lock_guard lock(mutex);
  is_open = open;
  if (range != nullptr) {
    RT_CHECK(mprotect(range, kRange, open ? PROT_READ | PROT_WRITE : PROT_NONE) == 0, "mprotect");
  }
}

bool is_device_memory(const void* at) { return range != nullptr && at >= range && at < range + kRange; }

}  // namespace cairn::simt
