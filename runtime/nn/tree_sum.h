#pragma once
// A gradient that is a sum over rows or heads, by a tree of parts that is the same in every layout: ranks of tensor and
// context parallelism hold subtrees of it (Plan::sum_parts(), Plan::token_parts()).

#include <bit>
#include <cstdint>

#include "runtime/kernels/ops.h"

namespace cairn::nn {

using kernels::TreeParts;

/// parts.sums [elems] = the tree of what add(part, sums) adds to zeros [elems], for each part. Returns it.
template <typename Real, typename Add>
DevicePtr<const float> tree_sum(const kernels::Exec<Real>& on, const TreeParts& parts, int64_t elems, const Add& add) {
  for (int64_t part = 0; part < parts.count; ++part) {
    DevicePtr<float> sum = parts.sums + std::popcount(static_cast<uint64_t>(part)) * elems;
    on.clear_floats(sum, elems);
    add(part, sum);
    for (int joins = std::countr_one(static_cast<uint64_t>(part)); joins > 0; --joins, sum -= elems) {
      on.add_to(sum - elems, sum, elems);
    }
  }
  return parts.sums;
}

/// sums [0, elems) become the tree of `count` sums of so many, one after another.
template <typename Real>
void join_sums(const kernels::Exec<Real>& on, DevicePtr<float> sums, int64_t count, int64_t elems) {
  for (int64_t step = 1; step < count; step *= 2) {
    for (int64_t part = 0; part < count; part += 2 * step) {
      on.add_to(sums + part * elems, sums + (part + step) * elems, elems);
    }
  }
}

}  // namespace cairn::nn
