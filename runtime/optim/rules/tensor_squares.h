#pragma once
// Norms of whole tensors, which lie on several ranks: Adafactor scales each tensor's step by them. The host
// waits for the device to have its part of them, and gives each block the factor of its tensor.

#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/core/result.h"
#include "runtime/device/host_numbers.h"
#include "runtime/optim/walk/state_walk.h"

namespace cairn::optim {

/// Sums of squares of a tensor's weights and of its step's elements.
struct TensorSquares {
  double weight = 0, step = 0;
};

class NormsOfTensors {
 public:
  /// All zero, of the plan's tensors.
  explicit NormsOfTensors(const StateWalk& walk);

  /// Where a kernel adds those of a block: of what this rank saves, so that each element counts once.
  kernels::TensorNorms of(const StateBlock& block);
  /// Settles the stream. The same bits on all ranks, for every way of cutting tensors.
  Result<std::vector<TensorSquares>> add_over_world(comm::Comm& world);

 private:
  Stream& stream_;
  HostNumbers<double> words_;  // of tensors, from block to block
};

}  // namespace cairn::optim
