#include "runtime/pipeline/executor.h"

#include <utility>

#include "runtime/core/check.h"
#include "runtime/telemetry/trace.h"

namespace cairn::pipeline {

using telemetry::Phase;
using telemetry::PhaseScope;

namespace {

/// Whether the rank has the last stage.
bool has_losses(const ScheduleShape& shape, int64_t rank) {
  return stage_at(shape, rank, shape.chunks - 1) + 1 == shape.pp * shape.chunks;
}

}  // namespace

Executor::Executor(Stream& stream, const ScheduleShape& shape, const BoundaryTensor& tensor,
                   std::vector<nn::StageModel*> chunks, comm::Comm& activations, comm::Comm& gradients, comm::Comm& tp,
                   DeviceBytes buffers)
    : stream_(stream),
      shape_(shape),
      chunks_(std::move(chunks)),
      activations_(activations),
      gradients_(gradients),
      tp_(tp),
      tensor_(tensor),
      train_actions_(schedule_actions(shape, activations.rank())),
      forward_actions_(forward_actions(shape, activations.rank())),
      inputs_{.comm = activations},
      doutputs_{.comm = gradients},
      losses_(stream, has_losses(shape, activations.rank()) ? shape.micro_batches * chunks_.back()->loss_rows() : 0) {
  const int64_t rank = activations.rank();
  RT_CHECK(activations.size() == shape.pp && gradients.size() == shape.pp && gradients.rank() == rank,
           "groups of {} and {} ranks for a pipeline of {}", activations.size(), gradients.size(), shape.pp);
  RT_CHECK(static_cast<int64_t>(chunks_.size()) == shape.chunks, "{} models for {} chunks", chunks_.size(),
           shape.chunks);
  const BoundaryBuffers wanted = shape.pp > 1 ? boundary_buffers(shape) : BoundaryBuffers{};
  for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
    const int64_t stage = stage_at(shape, rank, chunk);
    places_.push_back({.before = stage > 0 ? place_of(shape, stage - 1).rank : -1,
                       .after = stage + 1 < shape.pp * shape.chunks ? place_of(shape, stage + 1).rank : -1,
                       .ring = static_cast<size_t>(wanted.rings > 1 ? chunk : 0)});
  }
  if (shape.pp == 1) return;
  for (const nn::StageModel* model : chunks_) {
    RT_CHECK(model->boundary_bytes() == tensor.bytes, "a model's boundary tensor of {} bytes, the plan's of {}",
             model->boundary_bytes(), tensor.bytes);
  }
  RT_CHECK(tensor.parts == 1 || tensor.parts == tp.size(), "{} parts for {} ranks", tensor.parts, tp.size());
  const int64_t bytes = tensor.room_bytes();
  RT_CHECK(buffers.size >= wanted.total() * bytes, "{} bytes for {} boundary tensors of {}", buffers.size,
           wanted.total(), bytes);
  DevicePtr<std::byte> at = buffers.first;
  const auto take = [&](int64_t count) { return std::exchange(at, at + count * bytes); };
  inputs_.buffers[0] = take(1);
  doutputs_.buffers[0] = take(1);
  for (int64_t ring = 0; ring < wanted.rings; ++ring) {
    activation_rings_.push_back({take(wanted.activations), wanted.activations});
    gradient_rings_.push_back({take(wanted.gradients), wanted.gradients});
  }
  if (buffers.size < (wanted.total() + kEarlyBuffers) * bytes) return;
  for (Incoming* const from : {&inputs_, &doutputs_}) {
    from->early = dynamic_cast<comm::EarlyReceiver*>(&from->comm);
    from->buffers[1] = take(1);
  }
}

Result<DevicePtr<std::byte>> Executor::room(Ring& ring, comm::Comm& comm, int64_t destination, std::string_view what) {
  RT_TRY(comm.wait_sends_to(destination, ring.count - 1, what));
  return ring.begin + std::exchange(ring.next, (ring.next + 1) % ring.count) * tensor_.room_bytes();
}

Status Executor::send(comm::Comm& comm, DevicePtr<std::byte> tensor, int64_t destination, std::string_view what) {
  const bool to_itself = destination == comm.rank();
  const int64_t bytes = tensor_.sent_bytes(to_itself);
  const int64_t at = tensor_.cut(to_itself) ? tp_.rank() * bytes : 0;
  return comm.isend(tensor + at, bytes, destination, what);
}

Result<DevicePtr<std::byte>> Executor::receive(Incoming& from, int64_t source, std::string_view what) {
  const DevicePtr<std::byte> tensor = from.buffers[from.next];
  if (from.early != nullptr) from.next = 1 - from.next;
  const bool from_itself = source == from.comm.rank(), cut = tensor_.cut(from_itself);
  const int64_t bytes = tensor_.sent_bytes(from_itself);
  const DevicePtr<std::byte> part = tensor + (cut ? tp_.rank() * bytes : 0);
  RT_TRY(std::exchange(from.under_way, false) ? from.early->take_early(source, what)
                                              : from.comm.recv(part, bytes, source, what));
  if (cut) RT_TRY(tp_.all_gather(part, tensor, bytes, what));
  return tensor;
}

Status Executor::receive_ahead(const Action* next) {
  if (next == nullptr || next->kind == ActionKind::kBackwardWeight) return {};
  const bool forward = next->kind == ActionKind::kForward;
  Incoming& from = forward ? inputs_ : doutputs_;
  const Place& place = places_[next->chunk];
  const int64_t source = forward ? place.before : place.after;
  if (from.early == nullptr || source < 0 || source == from.comm.rank()) return {};
  const int64_t bytes = tensor_.sent_bytes(false), at = tensor_.cut(false) ? tp_.rank() * bytes : 0;
  RT_TRY(from.early->receive_early(from.buffers[from.next] + at, bytes, source, forward ? "activations" : "gradients"));
  from.under_way = true;
  return {};
}

Status Executor::forward(const Action& action, const MicroBatch& batch, bool trains, const Action* next) {
  nn::StageModel& model = *chunks_[action.chunk];
  const Place& place = places_[action.chunk];
  const bool is_first = place.before < 0, is_last = place.after < 0;
  const PhaseScope scope(Phase::kForward, {.micro_batch = action.micro_batch, .chunk = action.chunk});
  DevicePtr<std::byte> input, output;
  {
    const PhaseScope waiting(Phase::kPipeline);
    if (!is_first) {
      RT_TRY_SET(input, receive(inputs_, place.before, "activations"));
    }
    RT_TRY(receive_ahead(next));
    if (!is_last) {
      RT_TRY_SET(output, room(activation_rings_[place.ring], activations_, place.after, "room for activations"));
    }
  }
  model.set_dropout_keys(action.slot, batch.dropout_keys);
  model.set_sequences(action.slot, batch.rows);
  RT_TRY(model.forward(action.slot, batch.tokens, batch.targets, input, output));
  if (!is_last) return send(activations_, output, place.after, "activations");
  if (!trains) take_losses(action);
  return {};
}

void Executor::take_losses(const Action& action) {
  const nn::StageModel& model = *chunks_[action.chunk];
  model.token_losses(action.slot, losses_.room(action.micro_batch * model.loss_rows(), model.loss_rows()));
}

void Executor::tell_losses(const OnLosses& on_losses, const OnLosses& on_further) const {
  if (losses_.size() == 0) return;
  const auto all = static_cast<size_t>(losses_.size() / shape_.micro_batches);
  const auto rows = static_cast<size_t>(chunks_.back()->rows());
  for (int64_t k = 0; k < shape_.micro_batches; ++k) {
    const std::span<const float> losses = losses_.read().subspan(static_cast<size_t>(k) * all, all);
    if (on_losses) on_losses(k, losses.first(rows));
    if (on_further && all > rows) on_further(k, losses.subspan(rows));
  }
}

Status Executor::backward(const Action& action, const MicroBatch& batch, float loss_scale, const Action* next) {
  nn::StageModel& model = *chunks_[action.chunk];
  const Place& place = places_[action.chunk];
  const PhaseScope scope(Phase::kBackward, {.micro_batch = action.micro_batch, .chunk = action.chunk});
  if (action.kind == ActionKind::kBackwardWeight) {
    RT_TRY(receive_ahead(next));
    return model.backward_weight(action.slot, action.late);
  }
  const bool is_first = place.before < 0, is_last = place.after < 0;
  DevicePtr<std::byte> doutput, dinput;
  {
    const PhaseScope waiting(Phase::kPipeline);
    if (!is_last) {
      RT_TRY_SET(doutput, receive(doutputs_, place.after, "gradients"));
    }
    RT_TRY(receive_ahead(next));
    if (!is_first) {
      RT_TRY_SET(dinput, room(gradient_rings_[place.ring], gradients_, place.before, "room for gradients"));
    }
  }
  if (action.kind == ActionKind::kBackward) {
    RT_TRY(model.backward(action.slot, batch.tokens, batch.targets, doutput, dinput, loss_scale));
  } else {
    RT_TRY(model.backward_input(action.slot, action.late, batch.tokens, batch.targets, doutput, dinput, loss_scale));
  }
  if (is_last) {
    take_losses(action);
    if (ruined_) model.note_ruined_losses(action.slot, !std::exchange(noted_, true), ruined_);
  }
  if (!is_first) RT_TRY(send(gradients_, dinput, place.before, "gradients"));
  return {};
}

Status Executor::train(std::span<const MicroBatch> batches, float loss_scale) {
  RT_CHECK(static_cast<int64_t>(batches.size()) == shape_.micro_batches, "{} micro-batches for a schedule of {}",
           batches.size(), shape_.micro_batches);
  for (nn::StageModel* const chunk : chunks_) chunk->leave_losses(true);
  noted_ = false;
  for (size_t i = 0; i < train_actions_.size(); ++i) {
    const Action& action = train_actions_[i];
    const Action* const next = i + 1 < train_actions_.size() ? &action + 1 : nullptr;
    const MicroBatch& batch = batches[action.micro_batch];
    if (action.kind == ActionKind::kForward) {
      RT_TRY(forward(action, batch, true, next));
    } else {
      RT_TRY(backward(action, batch, loss_scale, next));
    }
  }
  const PhaseScope waiting(Phase::kPipeline);
  RT_TRY(activations_.wait_sends("end of step"));
  return gradients_.wait_sends("end of step");
}

Status Executor::evaluate(std::span<const MicroBatch> batches, const OnLosses& on_losses) {
  RT_CHECK(static_cast<int64_t>(batches.size()) == shape_.micro_batches, "{} micro-batches for a schedule of {}",
           batches.size(), shape_.micro_batches);
  for (nn::StageModel* const chunk : chunks_) chunk->leave_losses(false);
  for (size_t i = 0; i < forward_actions_.size(); ++i) {
    const Action& action = forward_actions_[i];
    const Action* const next = i + 1 < forward_actions_.size() ? &action + 1 : nullptr;
    RT_TRY(forward(action, batches[action.micro_batch], false, next));
  }
  RT_TRY(activations_.wait_sends("end of evaluation"));
  RT_TRY(stream_.settle());
  tell_losses(on_losses);
  return {};
}

}  // namespace cairn::pipeline
