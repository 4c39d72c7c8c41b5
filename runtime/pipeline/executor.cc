#include "runtime/pipeline/executor.h"

#include "runtime/core/check.h"

namespace cairn::pipeline {

Executor::Executor(nn::StageModel& model, comm::Comm& pp, std::span<std::byte> buffers)
    : model_(model),
      pp_(pp),
      first_(pp.rank() == 0),
      last_(pp.rank() == pp.size() - 1),
      bytes_(pp.size() > 1 ? model.boundary_bytes() : 0) {
  if (bytes_ == 0) return;
  RT_CHECK(static_cast<int64_t>(buffers.size()) >= 4 * bytes_, "{} bytes for 4 boundary tensors of {}", buffers.size(),
           bytes_);
  input_ = buffers.data();
  output_ = input_ + bytes_;
  doutput_ = output_ + bytes_;
  dinput_ = doutput_ + bytes_;
}

Status Executor::forward(int64_t slot, int64_t index, const MicroBatch& batch, const OnLosses& on_losses) {
  if (!first_) RT_TRY(pp_.recv(input_, bytes_, pp_.rank() - 1, "activations"));
  if (!last_) RT_TRY(pp_.wait_sends("activations sent"));  // the output buffer may still be leaving
  RT_TRY(model_.forward(slot, batch.tokens, batch.targets, first_ ? nullptr : input_, last_ ? nullptr : output_));
  if (!last_) return pp_.isend(output_, bytes_, pp_.rank() + 1, "activations");
  if (on_losses) on_losses(index, model_.token_losses(slot));
  return {};
}

Status Executor::backward(int64_t slot, const MicroBatch& batch, float loss_scale) {
  if (!last_) RT_TRY(pp_.recv(doutput_, bytes_, pp_.rank() + 1, "gradients"));
  if (!first_) RT_TRY(pp_.wait_sends("gradients sent"));
  RT_TRY(model_.backward(slot, batch.tokens, batch.targets, last_ ? nullptr : doutput_, first_ ? nullptr : dinput_,
                         loss_scale));
  if (!first_) RT_TRY(pp_.isend(dinput_, bytes_, pp_.rank() - 1, "gradients"));
  return {};
}

Status Executor::train(PipelineKind kind, std::span<const MicroBatch> batches, float loss_scale,
                       const OnLosses& on_losses) {
  const auto count = static_cast<int64_t>(batches.size());
  for (const Action& action : schedule_actions(kind, pp_.rank(), pp_.size(), count)) {
    const MicroBatch& batch = batches[action.micro_batch];
    if (action.kind == ActionKind::kForward) {
      RT_TRY(forward(action.slot, action.micro_batch, batch, on_losses));
    } else {
      RT_TRY(backward(action.slot, batch, loss_scale));
    }
  }
  return pp_.wait_sends("end of step");
}

Status Executor::evaluate(std::span<const MicroBatch> batches, const OnLosses& on_losses) {
  for (size_t k = 0; k < batches.size(); ++k) {
    RT_TRY(forward(0, static_cast<int64_t>(k), batches[k], on_losses));
  }
  return pp_.wait_sends("end of evaluation");
}

}  // namespace cairn::pipeline
