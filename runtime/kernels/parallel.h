#pragma once
// Splitting a kernel's work over the threads of the caller's team.
//
// Ranks often run one thread each on a crowded machine, so small work stays on the caller's thread: waking a sleeping
// team costs tens of microseconds.

#include <algorithm>
#include <cstdint>

#include "runtime/kernels/team.h"

namespace cairn::kernels {

/// Elements (touched once each) below which a second thread does not pay.
constexpr int64_t kMinParallelElems = 64 * 1024;

/// Rounds of pieces, one a thread, that become smaller: the last ones end together, and a thread that loses its core
/// leaves the others its work.
constexpr int kMostRounds = 5;

/// Calls body(task) for each task in [0, count), on the team unless `alone`. Who runs a task must make no difference.
template <typename Body>
void parallel_tasks(int64_t count, bool alone, const Body& body) {
  if (alone) {
    for (int64_t task = 0; task < count; ++task) body(task);
    return;
  }
  run_on_team(
      count, [](const void* context, int64_t task) { (*static_cast<const Body*>(context))(task); }, &body);
}

/// Calls body(begin, end) on disjoint ranges that cover [0, count); inner bounds are multiples of `align`.
/// `elems_per_item` is the work of one item in elements touched.
template <typename Body>
void parallel_ranges(int64_t count, int64_t align, int64_t elems_per_item, const Body& body) {
  if (count <= 0) return;
  const int64_t threads = team_threads();
  if (count <= align || count * elems_per_item < kMinParallelElems || threads == 1) {
    body(int64_t{0}, count);
    return;
  }
  // Each round takes half of what is left, the last all of it: long runs of memory first, ends close together.
  const int64_t units = (count + align - 1) / align;
  int rounds = 1;
  while (rounds < kMostRounds && count * elems_per_item >= (kMinParallelElems * threads) << rounds) ++rounds;
  const auto begin_of = [&](int64_t task) {
    const int64_t round = std::min<int64_t>(task / threads, rounds - 1), in_round = task - round * threads;
    const int64_t whole = threads << rounds, left = whole >> round;  // of the units, in such fractions
    const int64_t size = round + 1 < rounds ? left / 2 : left;
    return std::min(count, units * (whole - left + in_round * size / threads) / whole * align);
  };
  parallel_tasks(rounds * threads, false, [&](int64_t task) {
    const int64_t begin = begin_of(task), end = begin_of(task + 1);
    if (begin < end) body(begin, end);
  });
}

/// For element-wise maps: bounds fall on whole cache lines of either dtype.
template <typename Body>
void parallel_elements(int64_t count, const Body& body) {
  parallel_ranges(count, 1024, 1, body);
}

}  // namespace cairn::kernels
