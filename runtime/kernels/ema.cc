#include "runtime/kernels/ema.h"

#include <algorithm>
#include <cstddef>
#include <mutex>

#include "runtime/core/word_sums.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

constexpr int64_t kBlock = 1024;  // what was written is summed while it is in the first-level cache

/// As a step towards the weight: exact where both are equal, and 1 - decay is rounded once.
RT_INLINE void ema_block_body(float rest, const float* weight, const float* from, float* to, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] + rest * (weight[i] - from[i]);
}
RT_CLONES(ema_block)

}  // namespace

void ema(double decay, const float* weight, const float* from, float* to, int64_t count, const BlockSums& sums) {
  const auto rest = static_cast<float>(1.0 - decay);
  uint64_t sum = 0;
  std::mutex mutex;
  parallel_elements(count, [&](int64_t begin, int64_t end) {
    uint64_t mine = 0;
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t n = std::min(kBlock, end - i);
      ema_block(rest, weight + i, from + i, to + i, n);
      if (!sums.sums.empty()) mine = add_word_sums(mine, word_sums(reinterpret_cast<const std::byte*>(to + i), n, i));
    }
    const std::lock_guard lock(mutex);  // once a thread
    sum = add_word_sums(sum, mine);
  });
  if (!sums.sums.empty()) sums.put(0, sum);
}

void ema_of_runs(double decay, std::span<const EmaRun> runs) {
  for (const EmaRun& run : runs) {
    if (run.clip && run.clip.address()->finite == 0) continue;
    ema(decay, run.weight.address(), run.from.address(), run.to.address(), run.count, run.sums);
  }
}

}  // namespace cairn::kernels
