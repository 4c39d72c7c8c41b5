#pragma once
// Norms of whole tensors, which lie on several ranks: LAMB and Adafactor scale each tensor's step by them. The host
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
  /// All zero, of the plan's tensors. `by_batches`: those of batches will be asked for, in place of those of blocks.
  explicit NormsOfTensors(const StateWalk& walk, bool by_batches = false);

  /// Where a kernel adds those of a block: of what this rank saves, so that each element counts once.
  kernels::TensorNorms of(const StateBlock& block);
  /// Where a kernel leaves those of each block of a batch, TensorNorms::kWords; of a private one they do not count.
  std::span<double> of(std::span<const StateBlock> batch);
  /// Settles the stream. The same bits on all ranks, for every way of cutting tensors.
  Result<std::vector<TensorSquares>> add_over_world(comm::Comm& world);

 private:
  Stream& stream_;
  HostNumbers<double> words_;     // of tensors, from block to block
  HostNumbers<double> blocks_;    // of blocks of batches
  std::vector<int64_t> tensors_;  // of those blocks; -1: private
};

}  // namespace cairn::optim
