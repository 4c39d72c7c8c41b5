#pragma once
// Log-likelihoods of texts under a model. One request is one text of its own: its numbers depend on the weights and its
// token ids, and on nothing else. No batch, no order of requests, no number of threads changes a bit.
//
// The ids are made as lm-evaluation-harness 0.4.13 makes them (lm_eval/api/model.py, models/huggingface.py), so that
// numbers compare. Threads: one at a time.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/inference/session.h"
#include "runtime/text/tokenizer.h"

namespace cairn::evaluation {

/// A continuation to be scored behind its context, as ids.
struct Encoded {
  std::vector<int32_t> context;       // at least one
  std::vector<int32_t> continuation;  // at least one
};

/// How a model's texts become ids.
struct TextIds {
  const text::Tokenizer* tokenizer = nullptr;
  std::vector<int32_t> before;  // the model wants these before a text
  int32_t begin = -1;           // stands for an empty context; -1: the model has no such token
};

/// Whitespace at the end of `context` moves to the continuation. Both are encoded in one piece; the continuation has
/// the ids behind as many as the context has by itself. An empty context is the begin token. Errors: kInvalidInput for
/// text that cannot be encoded, a continuation that adds no token, an empty context where no begin token is known.
Result<Encoded> encode_pair(const TextIds& ids, std::string_view context, std::string_view continuation);

/// The ids of a context, the model's own before it.
Result<std::vector<int32_t>> encode_context(const TextIds& ids, std::string_view context);

struct Score {
  double logprob = 0;        // nats, the sum over the continuation's tokens
  double first_logprob = 0;  // of its first token
  int64_t tokens = 0;        // of the continuation
  /// Where all tokens' probabilities are known: 1 + the number of tokens that are likelier than its first one; and
  /// whether each token is the likeliest at its place, the lowest id among equals.
  std::optional<int64_t> first_rank;
  std::optional<bool> greedy;
};

/// The texts of a set, or a sentence: every token predicted once.
struct Rolling {
  double logprob = 0;  // nats
  int64_t tokens = 0;
};

/// A part of a text that is predicted in one pass: tokens [scored, end), from the input [first, end - 1).
struct RollingWindow {
  int64_t first = 0, scored = 0, end = 0;
};
/// Each of `size` tokens but the first is predicted once, in windows of `context` that do not overlap but for the last
/// one, which reaches back.
std::vector<RollingWindow> rolling_windows(int64_t size, int64_t context);

class Scorer {
 public:
  explicit Scorer(inference::Session& session) : session_(session) {}

  /// Checks that this model predicts next tokens. Errors: kUnsupported.
  Status check() const;

  /// The last context + 1 ids of the model count. A context that successive calls share is read once. Errors:
  /// kInvalidInput for a continuation that is longer than the model's context, or an id outside its vocabulary.
  Result<Score> score(const Encoded& request);

  /// Natural logarithms of the probabilities [vocab] of the token behind `context`; valid until the next call.
  Result<std::span<const double>> next_logprobs(std::span<const int32_t> context);

  /// Each of `ids` is predicted once, the first from `begin`, in rolling_windows() of the model's context. Errors: as
  /// score().
  Result<Rolling> rolling(int32_t begin, std::span<const int32_t> ids);

  /// Greedy: the ids behind the last (context - most) ids of `context`, up to the first that is in `ends`, or until
  /// `most` are made or `wants_more` says no. Errors: kInvalidInput where `most` fills the model's context.
  Result<std::vector<int32_t>> generate(std::span<const int32_t> context, int64_t most, std::span<const int32_t> ends,
                                        const std::function<bool(std::span<const int32_t>)>& wants_more);

 private:
  /// Logits [n, vocab] behind each of `rest`, which follow `prefix`.
  Result<std::span<const float>> logits_behind(std::span<const int32_t> prefix, std::span<const int32_t> rest);
  int64_t context() const { return session_.plan().recipe.model.context; }
  int64_t vocab() const { return session_.plan().recipe.model.vocab; }

  inference::Session& session_;
  std::vector<int32_t> prefix_;  // ids at the beginning of the cache's sequence that were read by themselves
  bool cached_ = false;          // the session has a cache, and it is this one's
  std::vector<double> logprobs_;
};

}  // namespace cairn::evaluation
