#pragma once
// The memory of one rank's training: weights, gradients, optimizer state, activations, boundary buffers. What is used
// here is what `cairn plan` prints. Weights and the banks of saved optimizer state lie in the checkpoint hook's memory
// when it has some, the rest is allocated in one go.

#include <cstddef>
#include <span>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/data_parallel/data_parallel.h"
#include "runtime/device/buffer.h"
#include "runtime/optim/walk/state_walk.h"
#include "runtime/plan/plan.h"
#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::trainer {

/// What a rank saves (`primary`), or what it keeps of what others save, without memory: of each kind in the order of
/// StateKinds::all() all such pieces.
std::vector<StateTensor> kept_tensors(const Plan& plan, const RankPlan& rank, bool primary);

class TrainState {
 public:
  /// The blocks that allocate() takes.
  static std::vector<int64_t> blocks(const Plan& plan, const RankPlan& rank, const StateMemory& memory);
  /// Errors: kInternal when the hook's memory does not fit the rank.
  static Result<TrainState> allocate(const Plan& plan, const RankPlan& rank, const StateMemory& memory, Device device);

  const optim::Arrays& arrays() const { return arrays_; }
  const data_parallel::Memory& memory() const { return memory_; }
  DeviceBytes activations() { return activations_.all(); }
  DeviceBytes boundary() { return boundary_.all(); }
  int64_t allocated_bytes() const;  // without the hook's memory

  /// What is to be filled at the start: what the rank saves, in `bank`, in the order of kept_tensors(), and copies
  /// unless their peer copies are in sight.
  std::vector<StateTensor> tensors(const Plan& plan, const RankPlan& rank, int64_t bank) const;

  /// Orders the initial weights of the share, in bank 0, from counter-based normals keyed by (seed, tensor, global
  /// element), so that every layout starts from the same model. Moments start at zero, the average at the weights.
  void initialize(Stream& stream, const Plan& plan, const RankPlan& rank);

 private:
  Buffer weights_, gathered_, grads_, bank_, private_, work_, activations_, boundary_;
  optim::Arrays arrays_;
  data_parallel::Memory memory_;
};

}  // namespace cairn::trainer
