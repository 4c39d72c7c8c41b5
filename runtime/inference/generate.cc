#include "runtime/inference/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

namespace cairn::inference {
namespace {

/// The texts that are worked on together: sequences of the session's cache.
class Batch {
 public:
  Batch(Session& session, const GenerateOptions& options, const std::function<bool(size_t, int32_t)>& on_token,
        std::span<const std::vector<int32_t>> prompts, size_t first)
      : session_(session), options_(options), on_token_(on_token), first_(first) {
    for (const std::vector<int32_t>& prompt : prompts) {
      const size_t k = first + texts_.size();
      texts_.push_back({.tokens = prompt, .shape = options.shapes.empty() ? PromptShape{} : options.shapes.at(k)});
    }
  }

  Status run() {
    for (size_t s = 0; s < texts_.size(); ++s) {
      RT_TRY(restart(s, texts_[s].tokens.size()));
    }
    while (std::any_of(texts_.begin(), texts_.end(), [](const Text& text) { return !text.finish; })) RT_TRY(step());
    return {};
  }

  Finish finish(size_t s) const { return *texts_[s].finish; }

 private:
  struct Text {
    std::vector<int32_t> tokens;
    PromptShape shape;
    int64_t made = 0;
    std::optional<Finish> finish;
  };

  /// Reads the last `count` tokens, or as many as the context holds, into the cache, and takes the token after them.
  Status restart(size_t s, size_t count) {
    Text& text = texts_[s];
    const size_t seen = std::min(count, static_cast<size_t>(session_.capacity()));
    RT_TRY_SET(const std::span<const float> logits,
               session_.start(static_cast<int64_t>(s), std::span<const int32_t>(text.tokens).last(seen), text.shape));
    take(s, logits);
    return {};
  }

  void take(size_t s, std::span<const float> logits) {
    Text& text = texts_[s];
    const int32_t token = sample_token(logits, options_.sampling, text.made, static_cast<int64_t>(first_ + s));
    if (std::find(options_.stop_ids.begin(), options_.stop_ids.end(), token) != options_.stop_ids.end()) {
      text.finish = Finish::kToken;
      return;
    }
    text.tokens.push_back(token);
    ++text.made;
    if (!on_token_(first_ + s, token)) {
      text.finish = Finish::kCaller;
    } else if (text.made >= options_.max_tokens) {
      text.finish = Finish::kLength;
    }
  }

  Status step() {
    std::vector<int32_t> tokens(texts_.size(), -1);
    std::vector<size_t> full;
    bool any = false;
    for (size_t s = 0; s < texts_.size(); ++s) {
      if (texts_[s].finish) continue;
      if (session_.length(static_cast<int64_t>(s)) >= session_.capacity()) {
        if (texts_[s].shape.plain()) {
          full.push_back(s);
        } else {
          texts_[s].finish = Finish::kLength;
        }
      } else {
        tokens[s] = texts_[s].tokens.back();
        any = true;
      }
    }
    if (any) {
      RT_TRY_SET(const std::span<const float> logits, session_.next(tokens));
      const size_t vocab = logits.size() / texts_.size();
      for (size_t s = 0; s < texts_.size(); ++s) {
        if (tokens[s] >= 0) take(s, logits.subspan(s * vocab, vocab));
      }
    }
    for (const size_t s : full) RT_TRY(restart(s, static_cast<size_t>(std::max<int64_t>(1, session_.capacity() / 2))));
    return {};
  }

  Session& session_;
  const GenerateOptions& options_;
  const std::function<bool(size_t, int32_t)>& on_token_;
  size_t first_;
  std::vector<Text> texts_;
};

}  // namespace

Result<std::vector<Finish>> generate(Session& session, const std::vector<std::vector<int32_t>>& prompts,
                                     const GenerateOptions& options,
                                     const std::function<bool(size_t, int32_t)>& on_token) {
  const int64_t context = session.plan().recipe.model.context;
  size_t longest = 0;
  for (size_t k = 0; k < prompts.size(); ++k) {
    if (prompts[k].empty()) {
      return Error{ErrorCode::kInvalidInput, fmt::format("prompt {} has no tokens", k + 1)};
    }
    longest = std::max(longest, prompts[k].size());
    if (!options.shapes.empty() && !options.shapes.at(k).plain() && std::ssize(prompts[k]) > context) {
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("prompt {} has {} tokens; the context holds {}, and this model reads a prompt as a whole", k + 1,
                      prompts[k].size(), context)};
    }
  }
  const int64_t capacity = std::min(context, static_cast<int64_t>(longest) + options.max_tokens);
  std::vector<Finish> out;
  const auto at_a_time = static_cast<size_t>(std::max<int64_t>(1, options.batch));
  for (size_t first = 0; first < prompts.size(); first += at_a_time) {
    const size_t count = std::min(at_a_time, prompts.size() - first);
    RT_TRY(session.make_cache(static_cast<int64_t>(count), capacity));
    Batch batch(session, options, on_token, std::span(prompts).subspan(first, count), first);
    RT_TRY(batch.run());
    for (size_t s = 0; s < count; ++s) out.push_back(batch.finish(s));
  }
  return out;
}

}  // namespace cairn::inference
