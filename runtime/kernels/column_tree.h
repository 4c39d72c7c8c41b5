#pragma once
// Sums over rows by a balanced tree of equal runs of them, column by column: a thread that owns columns takes all of
// their tree, so it costs no more meetings of the team than a sum in order.

#include <algorithm>
#include <bit>
#include <cstdint>

namespace cairn::kernels {

/// Runs that a sum is cut into, and memory for the sums under way: one of each level of the tree
/// (std::bit_width(count)). No memory: the sum is taken in order.
struct TreeParts {
  int64_t count = 1;  // a power of two
  float* sums = nullptr;
};

/// Adds to `into` [arrays, width] the columns [c, c + n) of the tree of what leaf(row, rows, sum) adds to zeros: sum
/// [arrays, width] from column c on, for runs of rows. Cuts into 2, 4, ... parts nest.
template <typename Leaf>
void add_column_tree(const TreeParts& parts, int64_t arrays, int64_t width, int64_t c, int64_t n, int64_t rows,
                     float* const* into, const Leaf& leaf) {
  const int64_t level = arrays * width;
  for (int64_t part = 0; part < parts.count; ++part) {
    float* sum = parts.sums + std::popcount(static_cast<uint64_t>(part)) * level + c;
    for (int64_t k = 0; k < arrays; ++k) std::fill_n(sum + k * width, n, 0.0f);
    const int64_t begin = part * rows / parts.count, end = (part + 1) * rows / parts.count;
    leaf(begin, end - begin, sum);
    for (int joins = std::countr_one(static_cast<uint64_t>(part)); joins > 0; --joins, sum -= level) {
      for (int64_t k = 0; k < arrays; ++k) {
        float* const left = sum - level + k * width;
        for (int64_t i = 0; i < n; ++i) left[i] += sum[k * width + i];
      }
    }
  }
  for (int64_t k = 0; k < arrays; ++k) {
    for (int64_t i = 0; i < n && into[k] != nullptr; ++i) into[k][c + i] += parts.sums[k * width + c + i];
  }
}

}  // namespace cairn::kernels
