#pragma once
// Sums over rows, column by column: blocks of whole rows, which threads take side by side, are added up in order, and
// equal runs of rows by a balanced tree. What is cut where follows from the number of rows alone.

#include <algorithm>
#include <cstdint>

#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/scratch.h"

namespace cairn::kernels {

/// Runs that a sum is cut into, and memory for sums under way, one of each level of the tree (std::bit_width(count)),
/// for callers that make the tree themselves (nn/tree_sum.h). No memory: one run, whatever `count` says.
struct TreeParts {
  int64_t count = 1;  // a power of two
  DevicePtr<float> sums;
};
inline void add_dims(OpDims& to, const TreeParts& of) {
  if (of.sums) to.add(of.count);
}

/// Blocks of rows that each of the parts is cut into.
constexpr int64_t sum_blocks(int64_t rows, int64_t parts) {
  constexpr int64_t kBlockRows = 128, kMostBlocks = 16;
  return std::clamp<int64_t>(rows / parts / kBlockRows, 1, kMostBlocks);
}

/// Of add_sums_over_rows().
constexpr ScratchElems sums_over_rows_scratch(int64_t parts, int64_t arrays, int64_t width, int64_t rows) {
  return {.own = parts * sum_blocks(rows, parts) * arrays * width};
}

/// into[k] [width] += the tree of what leaf(row, rows, sum) adds to zeros: sum [arrays, width], for runs of rows. Cuts
/// into 2, 4, ... parts nest. An array whose `into` is null is nobody's.
template <typename Leaf>
void add_sums_over_rows(const TreeParts& tree, int64_t arrays, int64_t width, int64_t rows, float* const* into,
                        const Leaf& leaf) {
  const int64_t parts = !tree.sums ? 1 : tree.count;
  const int64_t blocks = sum_blocks(rows, parts);
  const int64_t elems = arrays * width, all = parts * blocks;
  const Scratch scratch(all * elems);
  float* const sums = scratch.floats();
  parallel_ranges(all, 1, rows / all * elems, [&](int64_t block, int64_t end) {
    for (; block < end; ++block) {
      std::fill_n(sums + block * elems, elems, 0.0f);
      const int64_t first = block * rows / all;
      leaf(first, (block + 1) * rows / all - first, sums + block * elems);
    }
  });
  const auto join = [=](int64_t to, int64_t from, int64_t c, int64_t end) {
    for (; c < end; ++c) sums[to * elems + c] += sums[from * elems + c];
  };
  parallel_ranges(elems, 64, all, [&](int64_t c, int64_t end) {
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t block = 1; block < blocks; ++block) join(part * blocks, part * blocks + block, c, end);
    }
    for (int64_t step = 1; step < parts; step *= 2) {
      for (int64_t part = 0; part < parts; part += 2 * step) join(part * blocks, (part + step) * blocks, c, end);
    }
  });
  for (int64_t k = 0; k < arrays; ++k) {
    for (int64_t c = 0; c < width && into[k] != nullptr; ++c) into[k][c] += sums[k * width + c];
  }
}

}  // namespace cairn::kernels
