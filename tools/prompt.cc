#include "tools/prompt.h"

#include <fmt/format.h>

#include <string_view>

namespace cairn::tools {
namespace {

constexpr std::string_view kGap = "[MASK]", kEnd = "[gMASK]";

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

Status append(const LoadedModel& model, std::string_view text, std::vector<int32_t>* ids) {
  return model.tokenizer->encode(text, ids);
}

/// Without text: the id that starts a document.
Status start_if_empty(const LoadedModel& model, std::vector<int32_t>* ids) {
  if (!ids->empty()) return {};
  if (model.tokenizer->eod() < 0) return invalid("is empty, and the tokenizer has no id that starts a document");
  ids->push_back(model.tokenizer->eod());
  return {};
}

Status infill(const LoadedModel& model, std::string_view text, Prompt* out) {
  const InfillTokens& tokens = model.infill;
  if (text.ends_with(kEnd)) text.remove_suffix(kEnd.size());
  if (text.find(kEnd) != text.npos) return invalid("[gMASK] stands for what follows a text: nothing may follow it");
  const size_t gap = text.find(kGap);
  if (gap == text.npos) {
    RT_TRY(append(model, text, &out->tokens));
    out->tokens.push_back(tokens.gmask);
  } else {
    const std::string_view rest = text.substr(gap + kGap.size());
    if (rest.find(kGap) != rest.npos) return invalid("has two [MASK]: one gap is filled at a time");
    if (tokens.mask < 0) return invalid("has a [MASK], and no id is known for it: say --mask-token");
    RT_TRY(append(model, text.substr(0, gap), &out->tokens));
    out->shape.gap = std::ssize(out->tokens);
    out->tokens.push_back(tokens.mask);
    RT_TRY(append(model, rest, &out->tokens));
  }
  out->shape.prefix = std::ssize(out->tokens);
  out->tokens.push_back(tokens.start);
  return {};
}

Status encode(const LoadedModel& model, const std::string& text, Prompt* out) {
  if (model.recipe.model.mask == Mask::kPrefix && model.infill.gmask >= 0 && model.infill.start >= 0) {
    return infill(model, text, out);
  }
  RT_TRY(append(model, text, &out->tokens));
  RT_TRY(start_if_empty(model, &out->tokens));
  if (model.recipe.model.mask == Mask::kPrefix) out->shape.prefix = std::ssize(out->tokens);
  return {};
}

}  // namespace

Result<Prompt> encode_prompt(const LoadedModel& model, const std::string& text, bool raw) {
  Prompt out;
  if (!raw) out.tokens = model.before;
  RT_TRY(encode(model, text, &out).with("--prompt"));
  return out;
}

}  // namespace cairn::tools
