#include "runtime/data/token_scan.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "runtime/core/cgroup.h"
#include "runtime/data/order.h"

namespace cairn::data {
namespace {

constexpr int64_t kBlockTokens = 1 << 20;
constexpr uint64_t kOrderKey = 0x7363616e;  // any: only the order of looking depends on it

}  // namespace

Result<ScanReport> scan_tokens(const TokenSource& source, int64_t count, const ScanOptions& options) {
  RT_CHECK(count >= 0 && count <= source.token_count(), "{} of {} tokens", count, source.token_count());
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  const int64_t limit = options.vocab > 0 ? options.vocab : int64_t{std::numeric_limits<int32_t>::max()} + 1;
  const int64_t blocks = (count + kBlockTokens - 1) / kBlockTokens;
  ScanReport report{.of = count};
  std::optional<Error> failed;
  int64_t first_bad = -1;  // block
  std::mutex mutex;        // of the three
  std::atomic<int64_t> next = 0;
  std::atomic<bool> stop = false;
  const auto work = [&] {
    for (int64_t turn = next++; turn < blocks && !stop; turn = next++) {
      if (options.seconds > 0 && turn > 0 &&
          std::chrono::duration<double>(Clock::now() - begin).count() > options.seconds) {
        return;
      }
      const int64_t block = options.seconds <= 0 ? turn
                            : turn == 0          ? blocks - 1
                                                 : permute(blocks - 1, kOrderKey, turn - 1);
      const int64_t at = block * kBlockTokens, n = std::min(kBlockTokens, count - at);
      const Result<IdRange> ids = source.id_range(at, n, limit);
      const std::lock_guard lock(mutex);
      if (!ids.ok()) {
        failed = ids.error();
        stop = true;
        return;
      }
      report.tokens += n;
      report.ids.add(ids.value());
      if (ids.value().outside > 0 && (first_bad < 0 || block < first_bad)) first_bad = block;
    }
  };
  const int64_t cores = usable_cpus();
  const int64_t threads = std::min(options.threads > 0 ? options.threads : cores, blocks);
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  if (failed) return *failed;
  if (first_bad < 0) return report;
  const int64_t at = first_bad * kBlockTokens;
  std::vector<int32_t> tokens(static_cast<size_t>(std::min(kBlockTokens, count - at)));
  report.bad = source.read(at, static_cast<int64_t>(tokens.size()), tokens.data());
  return report;
}

}  // namespace cairn::data
