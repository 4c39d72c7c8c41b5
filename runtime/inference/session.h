#pragma once
// A whole model on one rank, forward only: for generation, evaluation and the converters' proofs. Whoever owns the
// weights (checkpoint, Hugging Face folder) fills weights() and calls weights_ready().
//
// Two ways through the same blocks (runtime/nn): logits() and token_losses() compute all positions of a text at once;
// start() and next() keep keys and values, so that a token costs one row. Both give the same logits up to rounding.

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/core/result.h"
#include "runtime/device/buffer.h"
#include "runtime/device/machine.h"
#include "runtime/nn/stage_model.h"
#include "runtime/plan/plan.h"
#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::inference {

/// What the tokens of a prompt see and where they stand, in a model whose mask is a prefix (runtime/data/objective.h).
/// As it stands here: each sees what is before it, and stands where it is.
struct PromptShape {
  int64_t prefix = 0;  // the first so many tokens see each other
  int64_t gap =
      -1;  // what follows them, what is made too, stands at this position: that of the [MASK] it is for; -1: off
  bool plain() const { return prefix == 0 && gap < 0; }
};

class Session {
 public:
  /// Model and precision are the recipe's; everything parallel in it is ignored. `machine`: where it computes, for this
  /// session alone, which it outlives; null: the CPU. Errors: as make_plan; kNoSpace; kUnsupported for a model whose
  /// tokens all see each other.
  static Result<std::unique_ptr<Session>> make(const Recipe& recipe, Machine* machine = nullptr);
  /// That make() would have.
  static Result<Plan> plan_of(const Recipe& recipe);

  const Plan& plan() const { return plan_; }

  /// The float weights in the host's memory, a run for each piece of each logical tensor, all kWeight: to be filled.
  std::vector<trainer::StateTensor> weights();
  /// After filling: derives what the forward pass computes with; the floats are gone unless they are that. Errors:
  /// those of the device.
  Status weights_ready();

  /// Logits [n, vocab] of the first n = tokens.size() positions, 1 <= n <= context; valid until the next call.
  /// Errors: kInvalidInput for a token outside the vocabulary, a length out of range or a shape that is not of the
  /// tokens or of the model.
  Result<std::span<const float>> logits(std::span<const int32_t> tokens, const PromptShape& shape = {});

  /// Loss in nats of predicting targets[r] behind tokens[..r], one for each of n <= context; without meaning where the
  /// target is kNoTarget. `rows`: positions and starts [n] as training has them (runtime/data/objective.h), or empty.
  Result<std::vector<float>> token_losses(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                                          const nn::SequenceRows& rows = {});
  /// The same of predicting tokens[1..] from tokens[..n-1].
  Result<std::vector<float>> token_losses(std::span<const int32_t> tokens);

  /// Makes room for the keys and values of `sequences` texts of up to `capacity` <= context tokens. What was there is
  /// gone. Turned keys stay as they are, so positions_for(capacity) decides the angles of all these texts. Errors:
  /// kInvalidInput, kNoSpace.
  Status make_cache(int64_t sequences, int64_t capacity);

  /// Sequence `sequence` begins anew with `tokens`, 1 <= n <= capacity. Returns the logits [vocab] of the last one;
  /// valid until the next call. The bits do not depend on what the other sequences hold. With a prefix all tokens go
  /// through the blocks in one pass. Errors: as logits().
  Result<std::span<const float>> start(int64_t sequence, std::span<const int32_t> tokens,
                                       const PromptShape& shape = {});

  /// Sequence `sequence` keeps its first `kept` tokens and continues with `tokens`, kept + n <= capacity. Returns
  /// logits [n, vocab], a row behind each of `tokens`; valid until the next call. Neither what followed the kept tokens
  /// before nor the other sequences change a bit. Errors: as logits(); kInvalidInput for a sequence with a shape.
  Result<std::span<const float>> resume(int64_t sequence, int64_t kept, std::span<const int32_t> tokens);

  /// One more token for each sequence; a token of -1 leaves its sequence alone. Returns logits [sequences, vocab], rows
  /// of sequences left alone mean nothing; valid until the next call. Errors: kInvalidInput when one is full.
  Result<std::span<const float>> next(std::span<const int32_t> tokens);

  /// The length that rotary angles of a text of up to `tokens` tokens are computed for. Texts of different ones never
  /// share a cache. Dynamic scaling: the text's own length beyond the original context. longrope: the original context
  /// or the whole one. Else the context, for every text.
  int64_t positions_for(int64_t tokens) const;

  int64_t length(int64_t sequence) const { return lengths_[sequence]; }
  int64_t capacity() const { return cache_.capacity; }

 private:
  /// The blocks laid out for passes of one size, on the same weights.
  struct Pass {
    Plan plan;
    RankPlan rank;
    Buffer activations;
    std::unique_ptr<nn::StageModel> model;
  };
  Session(Plan plan, RankPlan rank, Machine* machine)
      : plan_(std::move(plan)),
        rank_(std::move(rank)),
        machine_(machine),
        own_stream_(machine == nullptr ? make_cpu_stream() : nullptr),
        stream_(machine == nullptr ? own_stream_.get() : &machine->stream()) {}
  Device device() const { return stream_->device(); }
  Result<nn::StageModel*> pass(int64_t samples, int64_t pass_tokens, int64_t positions);
  Status check_tokens(std::span<const int32_t> tokens, int64_t most) const;
  Status check_shape(std::span<const int32_t> tokens, const PromptShape& shape) const;
  Status forward(std::span<const int32_t> tokens, std::span<const int32_t> targets, const PromptShape& shape,
                 const nn::SequenceRows& parted = {});
  enum class Rows { kLast, kEach };  // whose logits are wanted
  Status feed(int64_t sequence, std::span<const int32_t> tokens, Rows wanted = Rows::kLast);
  Status feed_shaped(int64_t sequence, std::span<const int32_t> tokens, const PromptShape& shape);

  Plan plan_;
  RankPlan rank_;
  Machine* const machine_;
  const std::unique_ptr<Stream> own_stream_;
  Stream* const stream_;
  Buffer weights_, master_, keys_, values_;
  std::unique_ptr<comm::Engine> engine_;
  std::unique_ptr<comm::Comm> tp_;
  nn::StageModel* text_pass_ = nullptr;                             // of the latest forward()
  std::map<std::array<int64_t, 3>, std::unique_ptr<Pass>> passes_;  // by samples, tokens of each, and positions
  nn::KvCache cache_;
  std::vector<int64_t> lengths_;  // tokens of each sequence in the cache
  std::vector<int64_t> gaps_;     // PromptShape::gap of each
  std::vector<int32_t> tokens_, targets_;
  std::vector<float> logits_;
};

}  // namespace cairn::inference
