#include "runtime/data/scored_texts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/core/check.h"

namespace cairn::data {
namespace {

constexpr double kUnits = 0x1p30;
constexpr double kNotFinite = std::numeric_limits<double>::infinity();  // added to any other it stays

}  // namespace

Result<TextRows> TextRows::make(std::span<const ScoredText> texts, int64_t tokens, bool packs) {
  TextRows out;
  out.texts_ = texts;
  out.tokens_ = tokens;
  out.packs_ = packs;
  int64_t filled = tokens;  // of the last sequence
  for (int64_t text = 0; text < std::ssize(texts); ++text) {
    const ScoredText& one = texts[text];
    const int64_t ids = std::ssize(one.ids);
    RT_CHECK(one.scored >= 1 && one.scored < ids, "{} of {} ids are scored", one.scored, ids);
    if (one.scored > tokens) {
      return Error{ErrorCode::kInvalidInput, fmt::format("{} tokens are to be predicted at once, and a sequence of the "
                                                         "run has {}",
                                                         one.scored, tokens)};
    }
    const int64_t rows = std::min(ids - 1, tokens);
    if (!packs || filled + rows > tokens) {
      out.sequences_.emplace_back();
      filled = 0;
    }
    out.sequences_.back().push_back({text, filled});
    filled += rows;
  }
  return out;
}

void TextRows::fill(int64_t first, int64_t samples, int64_t pieces, MicroBatch* out) const {
  const auto rows = static_cast<size_t>(samples * pieces * tokens_);
  *out = {};
  out->samples = samples;
  out->seq_len = pieces * tokens_;
  out->inputs.assign(rows, 0);
  out->targets.assign(rows, kNoTarget);
  out->sources.assign(static_cast<size_t>(samples), 0);
  out->channels.assign(rows, -1);
  if (packs_) {
    out->positions.resize(rows);
    out->starts.resize(rows);
  }
  for (int64_t piece = 0; piece < samples * pieces; ++piece) {
    const int64_t base = piece * tokens_;
    int64_t end = 0;  // rows before it are filled
    const auto stand = [&](int64_t begin, int64_t count) {
      end = begin + count;
      if (!packs_) return;
      for (int64_t t = begin; t < end; ++t) {
        out->positions[base + t] = static_cast<int32_t>(t - begin);
        out->starts[base + t] = static_cast<int32_t>(begin);
      }
    };
    if (first + piece < sequences()) {
      for (const Part& part : sequences_[first + piece]) {
        const ScoredText& text = texts_[part.text];
        const int64_t count = std::min<int64_t>(std::ssize(text.ids) - 1, tokens_);
        const int32_t* const ids = text.ids.data() + (std::ssize(text.ids) - 1 - count);
        const int64_t row = base + part.at;
        std::copy_n(ids, count, out->inputs.begin() + row);
        for (int64_t t = count - text.scored; t < count; ++t) {
          out->targets[row + t] = ids[t + 1];
          out->channels[row + t] = static_cast<int32_t>(2 * part.text + (t == count - text.scored ? 1 : 0));
        }
        stand(part.at, count);
      }
    }
    stand(end, tokens_ - end);
  }
}

void TextSums::add(int32_t owner, float loss) {
  const double value =
      std::isfinite(loss) ? static_cast<double>(std::llrint(static_cast<double>(loss) * kUnits)) : kNotFinite;
  const auto text = static_cast<size_t>(owner / 2);
  units[2 * text] += value;
  if (owner % 2 == 1) units[2 * text + 1] += value;
}

std::vector<TextScore> TextSums::scores() const {
  std::vector<TextScore> out;
  for (size_t k = 0; k < units.size(); k += 2) out.push_back({-units[k] / kUnits, -units[k + 1] / kUnits});
  return out;
}

}  // namespace cairn::data
