#pragma once
// A gradient that is a sum over rows or heads, by a tree of parts that is the same in every layout: ranks of tensor and
// context parallelism hold subtrees of it (Plan::sum_parts(), Plan::token_parts()).

#include <algorithm>
#include <bit>
#include <cstdint>

#include "runtime/kernels/elementwise.h"

namespace cairn::nn {

/// Parts of this rank and memory for the sums under way, tree_sum_elems() of the largest gradient. No memory: the ranks
/// add as they cut.
struct TreeParts {
  int64_t count = 1;  // a power of two
  float* sums = nullptr;
};

/// parts.sums [elems] = the tree of what add(part, sums) adds to zeros [elems], for each part. Returns it.
template <typename Add>
const float* tree_sum(const TreeParts& parts, int64_t elems, const Add& add) {
  for (int64_t part = 0; part < parts.count; ++part) {
    float* sum = parts.sums + std::popcount(static_cast<uint64_t>(part)) * elems;
    std::fill_n(sum, elems, 0.0f);
    add(part, sum);
    for (int joins = std::countr_one(static_cast<uint64_t>(part)); joins > 0; --joins, sum -= elems) {
      kernels::add_to(sum - elems, sum, elems);
    }
  }
  return parts.sums;
}

/// The same for rows [0, rows): add(row, count, sums) of runs of them. Cuts into 2, 4, ... parts nest.
template <typename Add>
const float* tree_rows(const TreeParts& parts, int64_t elems, int64_t rows, const Add& add) {
  return tree_sum(parts, elems, [&](int64_t part, float* sums) {
    const int64_t begin = part * rows / parts.count, end = (part + 1) * rows / parts.count;
    if (begin < end) add(begin, end - begin, sums);
  });
}

/// into [elems] += that, or all rows at once where the ranks add as they cut.
template <typename Add>
void sum_rows(const TreeParts& parts, float* into, int64_t elems, int64_t rows, const Add& add) {
  if (parts.sums == nullptr) return add(int64_t{0}, rows, into);
  kernels::add_to(into, tree_rows(parts, elems, rows, add), elems);
}

/// sums [0, elems) become the tree of `count` sums of so many, one after another.
inline void join_sums(float* sums, int64_t count, int64_t elems) {
  for (int64_t step = 1; step < count; step *= 2) {
    for (int64_t part = 0; part < count; part += 2 * step) {
      kernels::add_to(sums + part * elems, sums + (part + step) * elems, elems);
    }
  }
}

}  // namespace cairn::nn
