#include "runtime/core/word_sums.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(CAIRN_SANITIZED)
#define CORE_FAST __attribute__((optimize("O3"), target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CORE_FAST
#endif

namespace cairn {

CORE_FAST uint64_t word_sums(const std::byte* data, int64_t count, int64_t first) {
  uint32_t low = 0, high = 0;
  auto index = static_cast<uint32_t>(first);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t word = 0;
    __builtin_memcpy(&word, data + i * 4, 4);
    low += word;
    high += word * (index + static_cast<uint32_t>(i));
  }
  return static_cast<uint64_t>(high) << 32 | low;
}

}  // namespace cairn
