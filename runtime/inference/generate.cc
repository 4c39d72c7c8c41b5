#include "runtime/inference/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

namespace cairn::inference {
namespace {

/// The texts that are worked on together: sequences of the session's cache.
class Batch {
 public:
  /// `chosen`: places among the prompts.
  Batch(Session& session, const GenerateOptions& options, const std::function<bool(size_t, int32_t)>& on_token,
        const std::vector<std::vector<int32_t>>& prompts, std::span<const size_t> chosen)
      : session_(session), options_(options), on_token_(on_token) {
    for (const size_t k : chosen) {
      texts_.push_back(
          {.prompt = k, .tokens = prompts[k], .shape = options.shapes.empty() ? PromptShape{} : options.shapes.at(k)});
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
    size_t prompt = 0;
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
    const int32_t token = sample_token(logits, options_.sampling, text.made, static_cast<int64_t>(text.prompt));
    if (std::find(options_.stop_ids.begin(), options_.stop_ids.end(), token) != options_.stop_ids.end()) {
      text.finish = Finish::kToken;
      return;
    }
    text.tokens.push_back(token);
    ++text.made;
    if (!on_token_(text.prompt, token)) {
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
  std::vector<Text> texts_;
};

}  // namespace

Result<std::vector<Finish>> generate(Session& session, const std::vector<std::vector<int32_t>>& prompts,
                                     const GenerateOptions& options,
                                     const std::function<bool(size_t, int32_t)>& on_token) {
  const int64_t context = session.plan().recipe.model.context;
  // Texts share a cache only if their positions turn alike: a text never depends on its neighbours.
  std::map<int64_t, std::vector<size_t>> alike;
  const auto room_of = [&](size_t k) { return std::min(context, std::ssize(prompts[k]) + options.max_tokens); };
  for (size_t k = 0; k < prompts.size(); ++k) {
    if (prompts[k].empty()) {
      return Error{ErrorCode::kInvalidInput, fmt::format("prompt {} has no tokens", k + 1)};
    }
    if (!options.shapes.empty() && !options.shapes.at(k).plain() && std::ssize(prompts[k]) > context) {
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("prompt {} has {} tokens; the context holds {}, and this model reads a prompt as a whole", k + 1,
                      prompts[k].size(), context)};
    }
    alike[session.positions_for(room_of(k))].push_back(k);
  }
  std::vector<Finish> out(prompts.size());
  const auto at_a_time = static_cast<size_t>(std::max<int64_t>(1, options.batch));
  for (const auto& [positions, group] : alike) {
    for (size_t first = 0; first < group.size(); first += at_a_time) {
      const std::span<const size_t> chosen = std::span(group).subspan(first, std::min(at_a_time, group.size() - first));
      int64_t capacity = 1;
      for (const size_t k : chosen) capacity = std::max(capacity, room_of(k));
      RT_TRY(session.make_cache(std::ssize(chosen), capacity));
      Batch batch(session, options, on_token, prompts, chosen);
      RT_TRY(batch.run());
      for (size_t s = 0; s < chosen.size(); ++s) out[chosen[s]] = batch.finish(s);
    }
  }
  return out;
}

}  // namespace cairn::inference
