#pragma once
// Splitting a kernel's work over OpenMP threads.
//
// Ranks often run one thread each on a crowded machine, so small work stays on the caller's thread: waking a sleeping
// team costs tens of microseconds.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace cairn::kernels {

/// Elements (touched once each) below which a second thread does not pay.
constexpr int64_t kMinParallelElems = 64 * 1024;

/// Calls body(begin, end) on disjoint ranges that cover [0, count), one per thread; inner bounds are multiples of
/// `align`. `elems_per_item` is the work of one item in elements touched.
template <typename Body>
void parallel_ranges(int64_t count, int64_t align, int64_t elems_per_item, const Body& body) {
  if (count <= 0) return;
#if defined(__SANITIZE_THREAD__)
  body(int64_t{0}, count);  // ThreadSanitizer cannot see libgomp's barriers and would call every join a race
  return;
#endif
  if (count <= align || count * elems_per_item < kMinParallelElems || omp_get_max_threads() == 1 || omp_in_parallel()) {
    body(int64_t{0}, count);
    return;
  }
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads();
    const int64_t share = (count + threads - 1) / threads;
    const int64_t step = (share + align - 1) / align * align;
    const int64_t begin = std::min(count, omp_get_thread_num() * step);
    const int64_t end = std::min(count, begin + step);
    if (begin < end) body(begin, end);
  }
}

/// Calls body(task) for each task in [0, count), on up to `threads` threads; each takes the next one when it is done
/// with one, so that a thread without a core delays nobody by more than a task. Tasks must not depend on who runs them.
template <typename Body>
void parallel_tasks(int64_t count, int64_t threads, const Body& body) {
#if defined(__SANITIZE_THREAD__)
  threads = 1;
#endif
  threads = std::min(threads, count);
  if (threads <= 1) {
    for (int64_t task = 0; task < count; ++task) body(task);
    return;
  }
  std::atomic<int64_t> next = 0;
#pragma omp parallel num_threads(static_cast <int>(threads))
  for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(task);
}

/// For element-wise maps: bounds fall on whole cache lines of either dtype.
template <typename Body>
void parallel_elements(int64_t count, const Body& body) {
  parallel_ranges(count, 1024, 1, body);
}

}  // namespace cairn::kernels
