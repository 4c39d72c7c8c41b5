#pragma once
// One pipeline stage (a chunk of a rank, runtime/plan/schedule.h) of the decoder on one rank: explicit forward and
// backward, every tensor-parallel collective visible at its place. Owns no memory: weights, gradients and activations
// are ranges the caller allocated from the plan.
//
// Legend: B samples of a micro-batch, S tokens a sample, T = B * S rows, H width, V vocabulary rows of this rank. Which
// token a row stands for: StageDims::held.
// Rows at a stage boundary and in the residual stream: R = T, or T / tp with sequence parallel (rank r holds rows [r *
// R, (r + 1) * R) of the flat token order).
//
// Left to the caller after the last micro-batch (with deterministic = "layout" after each): 1. a sum over tp of the
// gradients with LocalTensor::sum_over_tp, of which each tp rank has its own rows or heads; 2. a sum over
// Mesh::embedding_group() of the two parts of the gradient of a table that the first and the last stage read. All other
// gradients are complete for this micro-batch.

#include <cstdint>
#include <memory>
#include <span>

#include "runtime/comm/rank_groups.h"
#include "runtime/core/result.h"
#include "runtime/device/stream.h"
#include "runtime/nn/kv_cache.h"
#include "runtime/nn/sequence_rows.h"
#include "runtime/plan/plan.h"

namespace cairn::nn {

enum class Pass {
  kForward,
  kBackwardInput,  // the first half of a split backward; kBackward is the second one
  kBackward,
};

/// Is told when parameters come into use and go out of it, on the thread that runs the stage: who gathers weights and
/// reduces gradients beside the computation listens. `layer` is a TensorSpec::layer; with the head goes a table
/// of embeddings that it reads and the rank holds once.
class UseListener {
 public:
  virtual ~UseListener() = default;
  /// Weights must be there when it returns, in backward also the memory of gradients.
  virtual Status begin_use(int64_t layer, Pass pass) = 0;
  /// After kBackward the gradients of this micro-batch are complete.
  virtual Status end_use(int64_t layer, Pass pass) = 0;
  /// Parameter::unwritten of the rank's tensors, or nothing: then all memory of gradients holds numbers to add to.
  virtual std::span<uint8_t> unwritten() { return {}; }
};

class StageModel {
 public:
  /// `chunk` of the rank, whose work is ordered on `stream`. weights: in the compute dtype, tensors at their
  /// LocalTensor::weight_at; grads: float, at their grad_at, or null for a model that only runs forward; activations:
  /// as long as stage_buffers_bytes() of runtime/plan/activations.h. All outlive the model, and so does the listener,
  /// which may be null.
  static Result<std::unique_ptr<StageModel>> make(Stream& stream, const Plan& plan, const RankPlan& rank, int64_t chunk,
                                                  const comm::RankGroups& groups, DevicePtr<const void> weights,
                                                  DevicePtr<float> grads, DeviceBytes activations,
                                                  UseListener* listener = nullptr);
  virtual ~StageModel() = default;

  /// Keys of the dropout masks of the micro-batch that goes into `slot` next, one a sample (runtime/kernels/dropout.h);
  /// its backward draws the same masks. Empty, as at first: nothing is dropped.
  virtual void set_dropout_keys(int64_t slot, std::span<const uint64_t> keys) = 0;

  /// Where the rows of the micro-batch that goes into `slot` next stand and what they see; copied. Empty, as at first:
  /// the plain order.
  virtual void set_sequences(int64_t slot, const SequenceRows& rows) = 0;

  /// Forward of one micro-batch into activation slot `slot` in [0, in_flight).
  /// tokens, targets [T] of the host, which stay until the stream is settled (kNoTarget where no loss counts): needed
  /// on the first / last stage, may be null elsewhere; model.mtp needs tokens on the last too. input [R, H] null on the
  /// first stage, output [R, H] null on the last. Both in the compute dtype.
  virtual Status forward(int64_t slot, const int32_t* tokens, const int32_t* targets, DevicePtr<const void> input,
                         DevicePtr<void> output) = 0;

  /// Backward of the micro-batch in `slot`; adds to grads. Every token's loss has weight `loss_scale` (1 / tokens of
  /// the global batch). doutput null on the last stage, dinput null on the first. tokens as in forward.
  virtual Status backward(int64_t slot, const int32_t* tokens, const int32_t* targets, DevicePtr<const void> doutput,
                          DevicePtr<void> dinput, float loss_scale) = 0;

  /// The same in two halves, for chunks with Chunk::late > 0: first the gradient of the stage's input, and those of the
  /// embedding, the head and the norms; then, any number of other passes later, those of the blocks' projections.
  /// `late` in [0, Chunk::late) keeps between them what the second needs; `slot` stays in use until then. The sums are
  /// the same bit for bit.
  virtual Status backward_input(int64_t slot, int64_t late, const int32_t* tokens, const int32_t* targets,
                                DevicePtr<const void> doutput, DevicePtr<void> dinput, float loss_scale) = 0;
  virtual Status backward_weight(int64_t slot, int64_t late) = 0;

  /// With `by_backward` each forward from now on is followed by a backward, which may leave the losses in place of
  /// forward. False at first.
  virtual void leave_losses(bool by_backward) = 0;
  /// Last stage, after forward(slot), or backward where that leaves them: the loss of each token [T] in nats, and
  /// behind them [T] of each module that predicts a further token, 0 where there is none; to be read when the stream is
  /// settled. Every tp rank has all.
  virtual void token_losses(int64_t slot, std::span<float> losses) const = 0;
  /// found [1] becomes 1 where one of these losses is not finite; else 0 if `first`, and stays as it is if not.
  virtual void note_ruined_losses(int64_t slot, bool first, DevicePtr<double> found) const = 0;

  /// Last stage, tp 1: logits [T, vocab] of the last forward, as float. For evaluation, generation, converters' proofs.
  virtual Status logits(int64_t slot, std::span<float> out) = 0;

  /// Generation, for a model of one stage made without gradients with tp 1: the rows run through the blocks, and their
  /// keys and values go into the cache; then the logits of rows [first, first + count), out [count, vocab]. tokens [T].
  virtual Status forward_cached(const int32_t* tokens, const CachedRows& rows) = 0;
  virtual Status cached_logits(int64_t first, int64_t count, std::span<float> out) = 0;

  /// From now on forward raises `scores` [layers, heads] of the whole model to this rank's attention scores.
  virtual void note_max_scores(DevicePtr<float> /*scores*/) {}

  virtual int64_t rows() const = 0;            // T
  virtual int64_t loss_rows() const = 0;       // what token_losses() gives
  virtual int64_t boundary_bytes() const = 0;  // of one boundary tensor: [R, H], behind it choices [X] where counted
};

}  // namespace cairn::nn
