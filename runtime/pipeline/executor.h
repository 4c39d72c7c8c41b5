#pragma once
// Runs a schedule on one rank: receives and sends boundary tensors, calls the forward and backward of its chunks.
// Owns no memory: the four boundary buffers come from the caller (Plan::boundary_buffers_bytes says how much). Sends
// are asynchronous; a buffer is reused only after its last send left.
//
// Activations and gradients travel in two groups of the same ranks: with several chunks a rank both can go from one
// rank to the same other one, and each keeps its own order.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/core/result.h"
#include "runtime/nn/stage_model.h"
#include "runtime/plan/schedule.h"

namespace cairn::pipeline {

/// Inputs of one micro-batch, [micro * S] each; only the first stage reads tokens, only the last one targets.
struct MicroBatch {
  const int32_t* tokens = nullptr;
  const int32_t* targets = nullptr;
  std::span<const uint64_t> dropout_keys;  // one a sample, or empty: nothing is dropped
};

/// Called on the last stage after each forward with the token losses [T] of that micro-batch.
using OnLosses = std::function<void(int64_t micro_batch, std::span<const float> losses)>;

class Executor {
 public:
  /// `chunks`: the models of this rank's chunks, in order. `activations`, `gradients`: this rank's pipeline group,
  /// twice. `buffers` holds 4 * boundary_bytes() of a model, or is empty when there is one rank in the pipeline.
  Executor(const ScheduleShape& shape, std::vector<nn::StageModel*> chunks, comm::Comm& activations,
           comm::Comm& gradients, std::span<std::byte> buffers);

  /// Forward and backward of all micro-batches; adds to the models' gradients.
  Status train(std::span<const MicroBatch> batches, float loss_scale, const OnLosses& on_losses);

  /// Forward only, in slot 0 of each chunk.
  Status evaluate(std::span<const MicroBatch> batches, const OnLosses& on_losses);

 private:
  Status forward(const Action& action, const MicroBatch& batch, const OnLosses& on_losses);
  Status backward(const Action& action, const MicroBatch& batch, float loss_scale);
  bool first(const Action& action) const { return rank_ == 0 && action.chunk == 0; }
  bool last(const Action& action) const { return rank_ == shape_.pp - 1 && action.chunk == shape_.chunks - 1; }

  ScheduleShape shape_;
  std::vector<nn::StageModel*> chunks_;
  comm::Comm& activations_;
  comm::Comm& gradients_;
  int64_t rank_, before_, after_;  // of the pipeline: this rank, that of the stage before, of the stage after
  int64_t bytes_;
  std::vector<Action> train_actions_, forward_actions_;
  std::byte *input_ = nullptr, *output_ = nullptr, *doutput_ = nullptr, *dinput_ = nullptr;
};

}  // namespace cairn::pipeline
