#pragma once
// Runs a schedule on one rank: receives and sends boundary tensors, calls the forward and backward of its chunks.
// Owns no memory: the boundary buffers come from the caller (Plan::boundary_buffers_bytes says how much). Sends are
// asynchronous, from a ring of buffers for each destination; a buffer is filled again only after its last send left.
// Where two neighbouring stages are chunks of one rank (the tip of a V), it sends to itself. On a device the message of
// the next action is received while the action before computes (runtime/comm/early_receiver.h), into a second buffer.
//
// What the tp ranks of a stage hold alike each sends in part, and the parts are gathered over tp where they arrive
// (runtime/plan/boundary.h): in place, in the buffers that are there anyway.
//
// Activations and gradients travel in two groups of the same ranks: with several chunks a rank both can go from one
// rank to the same other one, and each keeps its own order.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/comm/early_receiver.h"
#include "runtime/core/result.h"
#include "runtime/device/host_numbers.h"
#include "runtime/device/stream.h"
#include "runtime/nn/stage_model.h"
#include "runtime/plan/boundary.h"
#include "runtime/plan/schedule.h"

namespace cairn::pipeline {

/// Inputs of one micro-batch, [micro * S] each; only the first stage reads tokens, only the last one targets.
struct MicroBatch {
  const int32_t* tokens = nullptr;
  const int32_t* targets = nullptr;
  std::span<const uint64_t> dropout_keys;  // one a sample, or empty: nothing is dropped
  nn::SequenceRows rows;                   // every stage reads them
};

/// Called on the last stage with the token losses [T] of each micro-batch, once the stream is settled behind all
/// passes.
using OnLosses = std::function<void(int64_t micro_batch, std::span<const float> losses)>;

class Executor {
 public:
  /// `chunks`: the models of this rank's chunks, in order. `activations`, `gradients`: this rank's pipeline group,
  /// twice; `tp`: the ranks of its stages. `buffers` holds boundary_buffers(shape).total() times tensor.room_bytes(),
  /// or is empty when there is one rank in the pipeline. With kEarlyBuffers more receives are ordered ahead, where the
  /// groups can.
  Executor(Stream& stream, const ScheduleShape& shape, const BoundaryTensor& tensor,
           std::vector<nn::StageModel*> chunks, comm::Comm& activations, comm::Comm& gradients, comm::Comm& tp,
           DeviceBytes buffers);

  /// Forward and backward of all micro-batches; adds to the models' gradients. The losses are there when the stream is
  /// settled: tell_losses(). `on_further` is told those of the modules that predict further tokens, [modules, T], where
  /// the model has any.
  Status train(std::span<const MicroBatch> batches, float loss_scale);
  /// [1]: train() leaves 1 there where a loss is not finite, else 0; for work of the device that is ordered behind it.
  /// Null, as at first: nowhere. On a rank without the last stage nothing is left.
  void note_ruined_losses(DevicePtr<double> found) { ruined_ = found; }
  void tell_losses(const OnLosses& on_losses, const OnLosses& on_further = {}) const;

  /// Forward only, in slot 0 of each chunk. Settles the stream and tells the losses.
  Status evaluate(std::span<const MicroBatch> batches, const OnLosses& on_losses);

 private:
  /// Buffers that sends to one destination leave from, in turn.
  struct Ring {
    DevicePtr<std::byte> begin;
    int64_t count = 0, next = 0;
  };
  /// A chunk's neighbours, and where its sends leave from. A rank of -1: there is no such stage.
  struct Place {
    int64_t before = -1, after = -1;  // pipeline ranks of the stages before and after
    size_t ring = 0;                  // of both directions
  };

  /// Where messages of one direction come in.
  struct Incoming {
    comm::Comm& comm;
    comm::EarlyReceiver* early = nullptr;  // null: nothing comes ahead
    DevicePtr<std::byte> buffers[2];       // with `early` both in turn, else the first
    size_t next = 0;                       // where the next message goes
    bool under_way = false;                // it was asked for
  };

  Status forward(const Action& action, const MicroBatch& batch, bool trains, const Action* next);
  /// Orders a micro-batch's losses to the host, from the last stage.
  void take_losses(const Action& action);
  Status backward(const Action& action, const MicroBatch& batch, float loss_scale, const Action* next);
  /// The ring's next buffer, once the last send from it has left.
  Result<DevicePtr<std::byte>> room(Ring& ring, comm::Comm& comm, int64_t destination, std::string_view what);
  /// This rank's part of `tensor`, or all of it.
  Status send(comm::Comm& comm, DevicePtr<std::byte> tensor, int64_t destination, std::string_view what);
  /// The next tensor of a direction, all of it.
  Result<DevicePtr<std::byte>> receive(Incoming& from, int64_t source, std::string_view what);
  /// The message that an action waits for comes in from now on, where that can be; null: the last one runs.
  Status receive_ahead(const Action* next);

  Stream& stream_;
  ScheduleShape shape_;
  std::vector<nn::StageModel*> chunks_;
  comm::Comm& activations_;
  comm::Comm& gradients_;
  comm::Comm& tp_;
  const BoundaryTensor tensor_;
  std::vector<Place> places_;
  std::vector<Action> train_actions_, forward_actions_;
  Incoming inputs_, doutputs_;
  std::vector<Ring> activation_rings_, gradient_rings_;  // sent from
  DevicePtr<double> ruined_;
  bool noted_ = false;         // of this train(): a micro-batch has
  HostNumbers<float> losses_;  // of each micro-batch as token_losses() gives them, on the last stage
};

}  // namespace cairn::pipeline
