#include "runtime/data/packed.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "runtime/core/check.h"
#include "runtime/core/count_text.h"
#include "runtime/core/random.h"

namespace cairn::data {
namespace {

struct OpenWindow {
  int64_t number = 0, room = 0;
};

class PackedTokens final : public TokenSource {
 public:
  PackedTokens(std::shared_ptr<const TokenSource> base, std::shared_ptr<const LossSpans> loss, int64_t first,
               int64_t end, int64_t window, std::vector<int32_t> lengths)
      : base_(std::move(base)),
        loss_(std::move(loss)),
        first_(first),
        end_(end),
        window_(window),
        lengths_(std::move(lengths)),
        packing_(pack(lengths_, window)),
        name_(fmt::format("{} in windows of {}", base_->name(), window)) {}

  const std::string& name() const override { return name_; }
  int64_t token_count() const override { return packing_.windows() * window_ + 1; }
  uint64_t fingerprint() const override {
    uint64_t out = mix64(base_->fingerprint() ^ marks());
    for (const int64_t part : {first_, end_, window_}) out = mix64(out ^ static_cast<uint64_t>(part));
    return out;
  }
  bool has_rows() const override { return true; }
  uint64_t marks() const override { return loss_->hash(); }

  Status read(int64_t start, int64_t count, int32_t* out) const override {
    check(start, count);
    std::fill_n(out, count, kFill);
    return in_documents(start, count, [&](const Part& part) {
      return base_->read(part.token, part.end - part.begin, out + (part.begin - start));
    });
  }

  Result<IdRange> id_range(int64_t start, int64_t count, int64_t limit) const override {
    check(start, count);
    IdRange out;
    const auto add = [&](const Part& part) -> Status {
      RT_TRY_SET(const IdRange range, base_->id_range(part.token, part.end - part.begin, limit));
      out.add(range);
      return {};
    };
    RT_TRY(in_documents(start, count, add));
    return out;
  }

  Result<std::vector<DocumentPart>> documents(int64_t start, int64_t count) const override {
    check(start, count);
    std::vector<DocumentPart> out;
    const auto add = [&](const Part& part) -> Status {
      RT_TRY_SET(const std::vector<DocumentPart> found, base_->documents(part.token, part.end - part.begin));
      for (DocumentPart one : found) {
        one.at += part.begin - part.token;
        out.push_back(std::move(one));
      }
      return {};
    };
    RT_TRY(in_documents(start, count, add));
    return out;
  }

  Status rows(int64_t start, int64_t count, int32_t* targets, int32_t* positions, int32_t* starts) const override {
    RT_CHECK(start % window_ == 0 && count == window_, "rows {} to {} of windows of {}", start, start + count, window_);
    int64_t filled = 0;
    const auto write = [&](const Part& part) -> Status {
      const int64_t begin = part.begin - start, end = part.end - start;
      for (int64_t t = begin; t < end; ++t) {
        positions[t] = static_cast<int32_t>(t - begin);
        starts[t] = static_cast<int32_t>(begin);
      }
      filled = end;
      std::vector<LossSpan> spans;
      std::vector<uint64_t> begins;
      RT_TRY(loss_->read(part.document, 1, &spans, &begins));
      // The row before a token guesses it. A document's first token has none; a cut-off one has fewer.
      int64_t row = begin;
      for (const LossSpan& span : spans) {
        const int64_t from = std::min<int64_t>(std::max<int64_t>(span.from, 1) - 1, end - begin - 1);
        const int64_t to = std::min<int64_t>(std::max<int64_t>(span.to, 1) - 1, end - begin - 1);
        for (; row < begin + from; ++row) targets[row] = kNoTarget;
        row = std::max(row, begin + to);
      }
      for (; row < end; ++row) targets[row] = kNoTarget;
      return {};
    };
    RT_TRY(in_documents(start, count, write));
    for (int64_t t = filled; t < count; ++t) {
      targets[t] = kNoTarget;
      positions[t] = static_cast<int32_t>(t - filled);
      starts[t] = static_cast<int32_t>(filled);
    }
    return {};
  }

 private:
  /// Tokens [begin, end) of this source, which are those of the base from `token` on, of one document.
  struct Part {
    int64_t document = 0, token = 0, begin = 0, end = 0;
  };

  void check(int64_t start, int64_t count) const {
    RT_CHECK(start >= 0 && count >= 0 && start <= token_count() - count, "tokens {} to {} of {}", start, start + count,
             token_count());
  }

  template <typename Visit>
  Status in_documents(int64_t start, int64_t count, const Visit& visit) const {
    for (int64_t window = start / window_; window < packing_.windows() && window * window_ < start + count; ++window) {
      int64_t at = window * window_;
      for (int64_t k = packing_.begins[window]; k < packing_.begins[window + 1]; ++k) {
        const int32_t index = packing_.documents[k];
        const int64_t begin = std::max(start, at), end = std::min(start + count, at + lengths_[index]);
        if (begin < end) {
          const int64_t document = first_ + index;
          RT_TRY_SET(const int64_t token, base_->sequence_start(document));
          RT_TRY(visit(Part{document, token + begin - at, begin, end}));
        }
        at += lengths_[index];
      }
    }
    return {};
  }

  std::shared_ptr<const TokenSource> base_;
  std::shared_ptr<const LossSpans> loss_;
  int64_t first_, end_, window_;
  std::vector<int32_t> lengths_;
  Packing packing_;
  std::string name_;
};

}  // namespace

Packing pack(const std::vector<int32_t>& lengths, int64_t window) {
  std::vector<OpenWindow> open;  // by age
  std::vector<int32_t> window_of(lengths.size(), -1);
  int64_t windows = 0;
  for (size_t k = 0; k < lengths.size(); ++k) {
    const int64_t length = lengths[k];
    RT_CHECK(length >= 0 && length <= window, "document {} of {} tokens, windows of {}", k, length, window);
    if (length == 0) continue;
    auto best = open.end();
    for (auto one = open.begin(); one != open.end(); ++one) {
      if (one->room >= length && (best == open.end() || one->room < best->room)) best = one;
    }
    if (best == open.end()) {
      if (open.size() == kOpenWindows) open.erase(open.begin());
      open.push_back({windows++, window});
      best = open.end() - 1;
    }
    window_of[k] = static_cast<int32_t>(best->number);
    best->room -= length;
    if (best->room == 0) open.erase(best);
  }
  Packing out;
  out.begins.resize(static_cast<size_t>(windows) + 1);
  for (const int32_t number : window_of) {
    if (number >= 0) ++out.begins[static_cast<size_t>(number) + 1];
  }
  std::partial_sum(out.begins.begin(), out.begins.end(), out.begins.begin());
  out.documents.resize(static_cast<size_t>(out.begins.back()));
  std::vector<int64_t> next(out.begins.begin(), out.begins.end() - 1);
  for (size_t k = 0; k < lengths.size(); ++k) {
    if (window_of[k] >= 0) out.documents[static_cast<size_t>(next[window_of[k]]++)] = static_cast<int32_t>(k);
  }
  return out;
}

Result<std::unique_ptr<TokenSource>> pack_documents(std::shared_ptr<const TokenSource> base,
                                                    std::shared_ptr<const LossSpans> loss, int64_t first, int64_t end,
                                                    int64_t window, DataSource::Overlong overlong) {
  std::vector<int32_t> lengths;
  lengths.reserve(static_cast<size_t>(end - first));
  int64_t too_long = 0, longest = 0, longest_at = 0, kept = 0;
  constexpr int64_t kBlock = 64 << 10;
  for (int64_t block = first; block < end; block += kBlock) {
    RT_TRY_SET(const std::vector<int64_t> starts, base->sequence_starts(block, std::min(kBlock, end - block)));
    for (size_t k = 0; k + 1 < starts.size(); ++k) {
      int64_t length = starts[k + 1] - starts[k];
      if (length > window) {
        ++too_long;
        if (length > longest) longest = length, longest_at = block + static_cast<int64_t>(k);
        length = overlong == DataSource::Overlong::kTruncate ? window : 0;
      }
      if (length > 0) ++kept;
      lengths.push_back(static_cast<int32_t>(length));
    }
  }
  if (too_long > 0 && overlong == DataSource::Overlong::kRefuse) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: {} longer than a sample of {} tokens (document {} has {}); take a longer "
                             "model.context, or say overlong = \"drop\" or \"truncate\"",
                             base->name(), count_text(too_long, "document"), window, longest_at, longest)};
  }
  if (kept == 0)
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: no document of at most {} tokens", base->name(), window)};
  return std::unique_ptr<TokenSource>(
      std::make_unique<PackedTokens>(std::move(base), std::move(loss), first, end, window, std::move(lengths)));
}

}  // namespace cairn::data
