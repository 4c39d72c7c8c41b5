#pragma once
// Continuing texts, several at a time.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/inference/sampling.h"
#include "runtime/inference/session.h"

namespace cairn::inference {

/// Why a text ended.
enum class Finish {
  kLength,  // max_tokens were made, or the context of a prompt with a shape is full
  kToken,   // one of stop_ids came; it is not passed on
  kCaller,  // on_token said so
};

struct GenerateOptions {
  int64_t max_tokens = 128;
  Sampling sampling;
  std::vector<int32_t> stop_ids;
  int64_t batch = 16;               // texts at a time
  std::vector<PromptShape> shapes;  // of the prompts; empty: all plain
};

/// Continues each of `prompts` (none empty). on_token(prompt, token) is called as tokens come; false ends that text.
/// When the context is full the older half of it is dropped and the rest is read again; a prompt with a shape cannot be
/// cut, so its text ends there. The tokens of a prompt depend
/// on its place among the prompts (which numbers its random draws), the seed and the weights, not on the other prompts.
/// Errors: kInvalidInput for an empty prompt, a token outside the vocabulary, or a shape that Session::start refuses or
/// whose prompt fills the context; kNoSpace.
Result<std::vector<Finish>> generate(Session& session, const std::vector<std::vector<int32_t>>& prompts,
                                     const GenerateOptions& options,
                                     const std::function<bool(size_t prompt, int32_t token)>& on_token);

}  // namespace cairn::inference
