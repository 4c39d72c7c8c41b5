#include "runtime/pipeline/executor.h"

#include "runtime/core/check.h"
#include "runtime/telemetry/trace.h"

namespace cairn::pipeline {

using telemetry::Phase;
using telemetry::PhaseScope;

Executor::Executor(const ScheduleShape& shape, std::vector<nn::StageModel*> chunks, comm::Comm& activations,
                   comm::Comm& gradients, std::span<std::byte> buffers)
    : shape_(shape),
      chunks_(std::move(chunks)),
      activations_(activations),
      gradients_(gradients),
      rank_(activations.rank()),
      before_((rank_ + shape.pp - 1) % shape.pp),
      after_((rank_ + 1) % shape.pp),
      bytes_(shape.pp > 1 ? chunks_.front()->boundary_bytes() : 0),
      train_actions_(schedule_actions(shape, rank_)),
      forward_actions_(forward_actions(shape)) {
  RT_CHECK(activations.size() == shape.pp && gradients.size() == shape.pp && gradients.rank() == rank_,
           "groups of {} and {} ranks for a pipeline of {}", activations.size(), gradients.size(), shape.pp);
  RT_CHECK(static_cast<int64_t>(chunks_.size()) == shape.chunks, "{} models for {} chunks", chunks_.size(),
           shape.chunks);
  if (bytes_ == 0) return;
  RT_CHECK(static_cast<int64_t>(buffers.size()) >= 4 * bytes_, "{} bytes for 4 boundary tensors of {}", buffers.size(),
           bytes_);
  input_ = buffers.data();
  output_ = input_ + bytes_;
  doutput_ = output_ + bytes_;
  dinput_ = doutput_ + bytes_;
}

Status Executor::forward(const Action& action, const MicroBatch& batch, const OnLosses& on_losses) {
  nn::StageModel& model = *chunks_[action.chunk];
  const bool is_first = first(action), is_last = last(action);
  const PhaseScope scope(Phase::kForward, {.micro_batch = action.micro_batch, .chunk = action.chunk});
  {
    const PhaseScope waiting(Phase::kPipeline);
    if (!is_first) RT_TRY(activations_.recv(input_, bytes_, before_, "activations"));
    if (!is_last) RT_TRY(activations_.wait_sends("activations sent"));  // the output buffer may still be leaving
  }
  model.set_dropout_keys(action.slot, batch.dropout_keys);
  RT_TRY(model.forward(action.slot, batch.tokens, batch.targets, is_first ? nullptr : input_,
                       is_last ? nullptr : output_));
  if (!is_last) return activations_.isend(output_, bytes_, after_, "activations");
  if (on_losses) on_losses(action.micro_batch, model.token_losses(action.slot));
  return {};
}

Status Executor::backward(const Action& action, const MicroBatch& batch, float loss_scale) {
  const bool is_first = first(action), is_last = last(action);
  const PhaseScope scope(Phase::kBackward, {.micro_batch = action.micro_batch, .chunk = action.chunk});
  {
    const PhaseScope waiting(Phase::kPipeline);
    if (!is_last) RT_TRY(gradients_.recv(doutput_, bytes_, after_, "gradients"));
    if (!is_first) RT_TRY(gradients_.wait_sends("gradients sent"));
  }
  RT_TRY(chunks_[action.chunk]->backward(action.slot, batch.tokens, batch.targets, is_last ? nullptr : doutput_,
                                         is_first ? nullptr : dinput_, loss_scale));
  if (!is_first) RT_TRY(gradients_.isend(dinput_, bytes_, before_, "gradients"));
  return {};
}

Status Executor::train(std::span<const MicroBatch> batches, float loss_scale, const OnLosses& on_losses) {
  RT_CHECK(static_cast<int64_t>(batches.size()) == shape_.micro_batches, "{} micro-batches for a schedule of {}",
           batches.size(), shape_.micro_batches);
  for (const Action& action : train_actions_) {
    const MicroBatch& batch = batches[action.micro_batch];
    if (action.kind == ActionKind::kForward) {
      RT_TRY(forward(action, batch, on_losses));
    } else {
      RT_TRY(backward(action, batch, loss_scale));
    }
  }
  const PhaseScope waiting(Phase::kPipeline);
  RT_TRY(activations_.wait_sends("end of step"));
  return gradients_.wait_sends("end of step");
}

Status Executor::evaluate(std::span<const MicroBatch> batches, const OnLosses& on_losses) {
  RT_CHECK(static_cast<int64_t>(batches.size()) == shape_.micro_batches, "{} micro-batches for a schedule of {}",
           batches.size(), shape_.micro_batches);
  for (const Action& action : forward_actions_) RT_TRY(forward(action, batches[action.micro_batch], on_losses));
  return activations_.wait_sends("end of evaluation");
}

}  // namespace cairn::pipeline
