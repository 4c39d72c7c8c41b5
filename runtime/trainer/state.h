#pragma once
// The memory of one rank's training, allocated from the plan in one go: weights, gradients, optimizer arrays,
// activations, boundary buffers. What is allocated here is what `cairn plan` prints.

#include <cstddef>
#include <span>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/optim/sharded_optimizer.h"
#include "runtime/plan/plan.h"
#include "runtime/tensor/buffer.h"
#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::trainer {

class TrainState {
 public:
  static Result<TrainState> allocate(const Plan& plan, const RankPlan& rank);

  optim::Arrays arrays() const { return arrays_; }
  std::span<std::byte> activations();
  std::span<std::byte> boundary();
  int64_t allocated_bytes() const;

  /// The share's pieces as saveable runs: weight, first moment, second moment of each.
  std::vector<StateTensor> tensors(const RankPlan& rank) const;

  /// Initial weights of the share from counter-based normals keyed by (seed, tensor, global element), so that every
  /// layout starts from the same model. Moments start at zero.
  void initialize(const Plan& plan, const RankPlan& rank);

 private:
  float* weight_at(const StatePiece& piece) const;

  Buffer weights_, grads_, optimizer_, activations_, boundary_;
  optim::Arrays arrays_;
};

}  // namespace cairn::trainer
