#pragma once
// Norms of whole tensors, which lie on several ranks: LAMB and Adafactor scale each tensor's step by them.

#include <span>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/core/exact_sum.h"
#include "runtime/core/result.h"

namespace cairn::optim {

/// Sums of squares of a tensor's weights and of its step's elements.
struct TensorSquares {
  double weight = 0, step = 0;
};

/// `parts`: of each tensor the sums of this rank, one after another weight and step. The same bits on all ranks, for
/// every way of cutting tensors.
Result<std::vector<TensorSquares>> add_over_world(std::span<const ExactSum> parts, comm::Comm& world);

/// The same of kernels::LambNorms or AdafactorNorms.
template <typename Norms>
Result<std::vector<TensorSquares>> add_over_world(const std::vector<Norms>& parts, comm::Comm& world) {
  std::vector<ExactSum> sums;
  for (const Norms& part : parts) sums.insert(sums.end(), {part.weight, part.step});
  return add_over_world(std::span<const ExactSum>(sums), world);
}

}  // namespace cairn::optim
