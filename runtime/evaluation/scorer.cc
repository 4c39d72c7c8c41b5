#include "runtime/evaluation/scorer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/evaluation/python_text.h"
#include "runtime/inference/generate.h"

namespace cairn::evaluation {
namespace {

constexpr int64_t kCacheStep = 256;  // tokens; room comes in multiples of this

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// log(sum(exp(logits))), in double: 1e-15 of it, whatever the vocabulary.
double log_sum(std::span<const float> logits) {
  const float most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - most);
  return most + std::log(sum);
}

Status encode(const TextIds& ids, std::string_view text, std::vector<int32_t>* out) {
  // A text that spells the begin token itself gets no other before it.
  bool spelled = false;
  if (ids.begin >= 0 && !ids.before.empty()) {
    RT_TRY_SET(const std::string begin, ids.tokenizer->decode(std::span(&ids.begin, 1)));
    spelled = !begin.empty() && text.starts_with(begin);
  }
  if (!spelled) *out = ids.before;
  return ids.tokenizer->encode(text, out);
}

Status check_continuation(const Encoded& pair, std::string_view text) {
  if (!pair.continuation.empty()) return {};
  return invalid(fmt::format("the continuation \"{}\" adds no token to its context", text));
}

}  // namespace

Result<std::vector<int32_t>> encode_context(const TextIds& ids, std::string_view context) {
  std::vector<int32_t> out;
  RT_TRY(encode(ids, context, &out));
  if (!out.empty()) return out;
  if (ids.begin < 0) return invalid("the context is empty, and the tokenizer has no token that begins or ends a text");
  return std::vector<int32_t>{ids.begin};
}

Result<Encoded> encode_pair(const TextIds& ids, std::string_view context, std::string_view continuation) {
  const size_t kept = stripped_right(context).size();
  const std::string scored = std::string(context.substr(kept)) + std::string(continuation);
  context = context.substr(0, kept);
  Encoded out;
  if (context.empty()) {
    RT_TRY(ids.tokenizer->encode(scored, &out.continuation));
    RT_TRY(check_continuation(out, continuation));
    if (ids.begin < 0)
      return invalid("the context is empty, and the tokenizer has no token that begins or ends a text");
    out.context = {ids.begin};
    if (out.continuation.front() == ids.begin) out.continuation.erase(out.continuation.begin());
    RT_TRY(check_continuation(out, continuation));
    return out;
  }
  RT_TRY(encode(ids, context, &out.context));
  std::vector<int32_t> whole;
  RT_TRY(encode(ids, std::string(context) + scored, &whole));
  if (whole.size() > out.context.size()) {
    out.continuation.assign(whole.begin() + std::ssize(out.context), whole.end());
  }
  RT_TRY(check_continuation(out, continuation));
  return out;
}

std::vector<RollingWindow> rolling_windows(int64_t size, int64_t context) {
  std::vector<RollingWindow> out;
  for (int64_t scored = 1; scored < size; scored = out.back().end) {
    const int64_t end = std::min(size, scored + context);
    out.push_back({std::max<int64_t>(0, end - 1 - context), scored, end});
  }
  return out;
}

Status Scorer::check() const {
  if (session_.plan().recipe.model.mask == Mask::kCausal) return {};
  return Error{ErrorCode::kUnsupported,
               "the tokens of this model see a prefix both ways (model.mask): tasks and probes are of causal models"};
}

Result<std::span<const float>> Scorer::logits_behind(std::span<const int32_t> prefix, std::span<const int32_t> rest) {
  const int64_t all = std::ssize(prefix) + std::ssize(rest);
  const int64_t positions = session_.positions_for(all);
  // Where a text's length decides its angles the cache is that long, else some longer.
  const int64_t rounded = std::min(context(), (all + kCacheStep - 1) / kCacheStep * kCacheStep);
  const int64_t room = session_.positions_for(rounded) == positions ? rounded : all;
  if (!cached_ || session_.capacity() < all || session_.positions_for(session_.capacity()) != positions) {
    RT_TRY(session_.make_cache(1, room));
    cached_ = true;
    prefix_.clear();
  }
  // The prefix is read by itself, whether it is kept or not: so its bits are the same.
  if (!std::ranges::equal(prefix, prefix_)) {
    prefix_.clear();
    if (!prefix.empty()) RT_TRY(session_.start(0, prefix));
    prefix_.assign(prefix.begin(), prefix.end());
  }
  return session_.resume(0, std::ssize(prefix), rest);
}

Result<Score> Scorer::score(const Encoded& request) {
  const int64_t tokens = std::ssize(request.continuation);
  RT_CHECK(tokens > 0 && !request.context.empty(), "{} tokens behind {}", tokens, request.context.size());
  if (tokens > context()) {
    return invalid(fmt::format("a continuation of {} tokens; the model's context is {}", tokens, context()));
  }
  std::vector<int32_t> ids = request.context;
  ids.insert(ids.end(), request.continuation.begin(), request.continuation.end());
  if (std::ssize(ids) > context() + 1) ids.erase(ids.begin(), ids.end() - (context() + 1));
  const std::span<const int32_t> input = std::span(ids).first(ids.size() - 1);
  const auto prefix = input.first(input.size() - tokens);
  RT_TRY_SET(const std::span<const float> logits, logits_behind(prefix, input.last(tokens)));
  Score out{.tokens = tokens, .first_rank = 1, .greedy = true};
  for (int64_t r = 0; r < tokens; ++r) {
    const std::span<const float> row = logits.subspan(r * vocab(), vocab());
    const int32_t token = request.continuation[r];
    if (token < 0 || token >= vocab()) {
      return invalid(fmt::format("token {} is outside the vocabulary of {}", token, vocab()));
    }
    const double logprob = row[token] - log_sum(row);
    out.logprob += logprob;
    if (std::max_element(row.begin(), row.end()) - row.begin() != token) out.greedy = false;
    if (r > 0) continue;
    out.first_logprob = logprob;
    out.first_rank = 1 + std::ranges::count_if(row, [&](float other) { return other > row[token]; });
  }
  return out;
}

Result<std::span<const double>> Scorer::next_logprobs(std::span<const int32_t> ids) {
  const std::span<const int32_t> input = ids.last(std::min<size_t>(ids.size(), context()));
  RT_TRY_SET(const std::span<const float> logits, logits_behind(input.first(input.size() - 1), input.last(1)));
  const double sum = log_sum(logits);
  logprobs_.assign(logits.begin(), logits.end());
  for (double& x : logprobs_) x -= sum;
  return std::span<const double>(logprobs_);
}

Result<Rolling> Scorer::rolling(int32_t begin, std::span<const int32_t> ids) {
  std::vector<int32_t> all = {begin};
  all.insert(all.end(), ids.begin(), ids.end());
  Rolling out{.tokens = std::ssize(ids)};
  for (const auto& [first, scored, end] : rolling_windows(std::ssize(all), context())) {
    RT_TRY_SET(const std::vector<float> losses,
               session_.token_losses(std::span(all).subspan(first, end - 1 - first),
                                     std::span(all).subspan(first + 1, end - 1 - first)));
    for (int64_t k = scored; k < end; ++k) out.logprob -= losses[k - 1 - first];
  }
  return out;
}

Result<std::vector<int32_t>> Scorer::generate(std::span<const int32_t> ids, int64_t most, std::span<const int32_t> ends,
                                              const std::function<bool(std::span<const int32_t>)>& wants_more) {
  if (most >= context()) {
    return invalid(fmt::format("{} tokens are to be made; with its context of {} the model has no room for a prompt",
                               most, context()));
  }
  cached_ = false;  // generate() makes its own
  const auto kept = ids.last(std::min<size_t>(ids.size(), context() - most));
  std::vector<int32_t> made;
  inference::GenerateOptions options{.max_tokens = most, .sampling = {.temperature = 0}, .batch = 1};
  options.stop_ids.assign(ends.begin(), ends.end());
  RT_TRY(inference::generate(session_, {{kept.begin(), kept.end()}}, options, [&](size_t, int32_t token) {
    made.push_back(token);
    return wants_more(made);
  }));
  return made;
}

}  // namespace cairn::evaluation
