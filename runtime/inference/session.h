#pragma once
// A whole model on one rank, forward only: for generation, evaluation and the converters' proofs. Whoever owns the
// weights (checkpoint, Hugging Face folder) fills weights() and calls weights_ready().

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/core/result.h"
#include "runtime/nn/stage_model.h"
#include "runtime/plan/plan.h"
#include "runtime/tensor/buffer.h"
#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::inference {

class Session {
 public:
  /// Model and precision are the recipe's; everything parallel in it is ignored. Errors: as make_plan; kNoSpace.
  static Result<std::unique_ptr<Session>> make(const Recipe& recipe);

  const Plan& plan() const { return plan_; }

  /// The float weights, a run for each piece of each logical tensor, all kWeight: to be filled.
  std::vector<trainer::StateTensor> weights();
  /// After filling: derives what the forward pass computes with.
  void weights_ready();

  /// Logits [n, vocab] of the first n = tokens.size() positions, 1 <= n <= context; valid until the next call.
  /// Errors: kInvalidInput for a token outside the vocabulary or a length out of range.
  Result<std::span<const float>> logits(std::span<const int32_t> tokens);

  /// Loss in nats of predicting tokens[1..] from tokens[..n-1], one for each; n - 1 <= context.
  Result<std::vector<float>> token_losses(std::span<const int32_t> tokens);

 private:
  Session(Plan plan, RankPlan rank) : plan_(std::move(plan)), rank_(std::move(rank)) {}
  Status forward(std::span<const int32_t> tokens, std::span<const int32_t> targets);

  Plan plan_;
  RankPlan rank_;
  Buffer weights_, master_, activations_;
  std::unique_ptr<comm::Engine> engine_;
  std::unique_ptr<comm::Comm> tp_;
  std::unique_ptr<nn::StageModel> model_;
  std::vector<int32_t> tokens_, targets_;
  std::vector<float> logits_;
};

struct Sampling {
  double temperature = 1.0;  // 0: greedy
  int64_t top_k = 0;         // 0: all
  double top_p = 1.0;
  uint64_t seed = 0;  // same seed, prompt and weights: same text
};

/// Index of the next token from one row of logits; `index` numbers the draw.
int32_t sample_token(std::span<const float> logits, const Sampling& sampling, int64_t index);

/// Continues `prompt` by `count` tokens; each is passed to `on_token` as it comes. When the context is full the oldest
/// tokens leave it. Errors: kInvalidInput for an empty prompt; those of logits().
Status generate(Session& session, std::vector<int32_t> prompt, int64_t count, const Sampling& sampling,
                const std::function<void(int32_t)>& on_token);

}  // namespace cairn::inference
