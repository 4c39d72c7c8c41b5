#pragma once
// From the text of a prompt to what a model is given: ids, and for a model whose mask is a prefix how much of them see
// each other and what is to be filled.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/inference/session.h"
#include "tools/model_source.h"

namespace cairn::tools {

struct Prompt {
  std::vector<int32_t> tokens;
  inference::PromptShape shape;
};

/// `raw`: without what the tokenizer puts before a text.
///
///   causal mask           the text's ids
///   prefix mask           the text's ids, which see each other
///   and infilling tokens  "a [MASK] b" is a, the mask token, b, the start token: what is made fills the gap;
///                         "a" and "a [gMASK]" are a, the gmask token, the start token: what is made follows a
/// Errors: kInvalidInput for a text that cannot be encoded, for two gaps, and for a gap in a model without a token for
/// it; what cannot be encoded is told by its byte in `text`.
Result<Prompt> encode_prompt(const LoadedModel& model, const std::string& text, bool raw);

}  // namespace cairn::tools
