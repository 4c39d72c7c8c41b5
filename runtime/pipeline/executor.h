#pragma once
// Runs a schedule on one rank: receives and sends boundary tensors, calls the stage's forward and backward.
// Owns no memory: the four boundary buffers come from the caller (pipeline_buffer_bytes of runtime/plan/activations.h
// says how much). Sends are asynchronous; a buffer is reused only after its last send left.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/core/result.h"
#include "runtime/nn/stage_model.h"
#include "runtime/pipeline/schedule.h"

namespace cairn::pipeline {

/// Inputs of one micro-batch, [micro * S] each; only the first stage reads tokens, only the last one targets.
struct MicroBatch {
  const int32_t* tokens = nullptr;
  const int32_t* targets = nullptr;
};

/// Called on the last stage after each forward with the token losses [T] of that micro-batch.
using OnLosses = std::function<void(int64_t micro_batch, std::span<const float> losses)>;

class Executor {
 public:
  /// `pp` is this rank's pipeline group; group rank = stage. `buffers` holds 4 * model.boundary_bytes(), or is empty
  /// when there is one stage.
  Executor(nn::StageModel& model, comm::Comm& pp, std::span<std::byte> buffers);

  /// Forward and backward of all micro-batches; adds to the model's gradients.
  Status train(PipelineKind kind, std::span<const MicroBatch> batches, float loss_scale, const OnLosses& on_losses);

  /// Forward only, micro-batch after micro-batch in slot 0.
  Status evaluate(std::span<const MicroBatch> batches, const OnLosses& on_losses);

 private:
  Status forward(int64_t slot, int64_t index, const MicroBatch& batch, const OnLosses& on_losses);
  Status backward(int64_t slot, const MicroBatch& batch, float loss_scale);

  nn::StageModel& model_;
  comm::Comm& pp_;
  bool first_, last_;
  int64_t bytes_;
  std::byte *input_ = nullptr, *output_ = nullptr, *doutput_ = nullptr, *dinput_ = nullptr;
};

}  // namespace cairn::pipeline
