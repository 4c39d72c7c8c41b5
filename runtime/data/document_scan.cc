#include "runtime/data/document_scan.h"

#include <fmt/format.h>
#include <xxhash.h>
#include <zstd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "runtime/core/random.h"
#include "runtime/core/robust_level.h"

namespace cairn::data {
namespace {

constexpr int64_t kDocumentsAtOnce = 4096;
constexpr int64_t kLeastAlike = 32;  // pieces of a length, to compare one with
constexpr double kShifted = 6;       // deviations of a length's median from its neighbours', from which on it is dirt
constexpr uint64_t kShareKey = 0x5ca9;

enum : size_t { kPacked, kDistinct, kRun, kPeriod, kOdd };
/// The least deviation of each measure; those of run and period are of their logarithms.
constexpr std::array<double, kScanCount> kFloors{0.01, 0.01, 0.3, 0.3, 0.002};

/// The longest stretch in which each id is the one `period` before it.
int64_t longest_repeat(const std::vector<int32_t>& ids, int64_t period) {
  int64_t longest = 0, now = 0;
  for (int64_t k = period; k < std::ssize(ids); ++k) {
    now = ids[static_cast<size_t>(k)] == ids[static_cast<size_t>(k - period)] ? now + 1 : 0;
    longest = std::max(longest, now);
  }
  return longest == 0 ? 0 : longest + period;
}

/// Share of characters that text has no use for. Bytes that are no UTF-8 count as a character each, an odd one.
double odd_share(std::string_view text) {
  int64_t all = 0, odd = 0;
  for (size_t at = 0; at < text.size(); ++all) {
    const auto lead = static_cast<unsigned char>(text[at]);
    const size_t length = lead < 0x80                   ? 1
                          : lead >= 0xC2 && lead < 0xE0 ? 2
                          : lead >= 0xE0 && lead < 0xF0 ? 3
                          : lead >= 0xF0 && lead < 0xF5 ? 4
                                                        : 0;
    const std::string_view one = text.substr(at, std::max<size_t>(length, 1));
    const bool whole = length > 0 && one.size() == length && std::ranges::all_of(one.substr(1), [](char c) {
                         return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
                       });
    const bool control = lead == 0x7F || (lead < 0x20 && lead != '\t' && lead != '\n' && lead != '\r');
    if (!whole || control || one == "\xEF\xBF\xBD") ++odd;
    at += whole ? length : 1;
  }
  return all == 0 ? 0 : static_cast<double>(odd) / static_cast<double>(all);
}

class Measurer {
 public:
  explicit Measurer(const text::Tokenizer* tokenizer) : tokenizer_(tokenizer), zstd_(ZSTD_createCCtx()) {}

  Status measure(const std::vector<int32_t>& ids, ScannedPiece* out) {
    const size_t bytes = ids.size() * sizeof(ids[0]);
    out->tokens = std::ssize(ids);
    out->hash = XXH3_64bits(ids.data(), bytes);
    packed_.resize(ZSTD_compressBound(bytes));
    const size_t packed = ZSTD_compressCCtx(zstd_.get(), packed_.data(), packed_.size(), ids.data(), bytes, 1);
    if (ZSTD_isError(packed) != 0) return Error{ErrorCode::kInternal, ZSTD_getErrorName(packed)};
    out->measures[kPacked] = static_cast<float>(static_cast<double>(packed) / static_cast<double>(bytes));
    sorted_ = ids;
    std::ranges::sort(sorted_);
    const auto distinct = std::ssize(sorted_) - std::ssize(std::ranges::unique(sorted_));
    out->measures[kDistinct] = static_cast<float>(distinct) / static_cast<float>(ids.size());
    out->measures[kRun] = static_cast<float>(std::max<int64_t>(1, longest_repeat(ids, 1)));
    for (int64_t period = 2; period <= kLongestPeriod; ++period)
      out->measures[kPeriod] = std::max(out->measures[kPeriod], static_cast<float>(longest_repeat(ids, period)));
    if (tokenizer_ == nullptr) return {};
    RT_TRY_SET(const std::string text, tokenizer_->decode(ids));
    out->measures[kOdd] = static_cast<float>(odd_share(text));
    return {};
  }

 private:
  struct FreeZstd {
    void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  };
  const text::Tokenizer* tokenizer_;
  std::unique_ptr<ZSTD_CCtx, FreeZstd> zstd_;
  std::vector<char> packed_;
  std::vector<int32_t> sorted_;
};

/// A measure as it is compared: lengths by their logarithms.
float compared(const ScannedPiece& piece, size_t measure) {
  const float value = piece.measures[measure];
  return measure == kRun || measure == kPeriod ? std::log2(1 + value) : value;
}

/// The level of a length by those half and twice as long: the middle between the two, and no finer than the
/// way from the one to the other. Nothing at either end.
std::optional<RobustLevel> level_around(const std::map<int, RobustLevel>& levels, int length) {
  const auto shorter = levels.find(length - 1), longer = levels.find(length + 1);
  if (shorter == levels.end() || longer == levels.end()) return std::nullopt;
  const RobustLevel &a = shorter->second, &b = longer->second;
  return RobustLevel{(a.median + b.median) / 2, std::max({a.spread, b.spread, std::fabs(a.median - b.median) / 2})};
}

}  // namespace

Result<std::vector<ScannedPiece>> scan_documents(const TokenSource& source, const DocumentScanArgs& args) {
  std::vector<ScannedPiece> out;
  Measurer measurer(args.tokenizer);
  std::vector<int32_t> ids;
  const int64_t documents = source.sequence_count();
  for (int64_t first = 0; first < documents; first += kDocumentsAtOnce) {
    const int64_t count = std::min(kDocumentsAtOnce, documents - first);
    RT_TRY_SET(const std::vector<int64_t> starts, source.sequence_starts(first, count));
    for (int64_t k = 0; k < count; ++k) {
      if (args.share < 1 && uniform_at(kShareKey, first + k) >= args.share) continue;
      const int64_t end = starts[static_cast<size_t>(k) + 1];
      for (int64_t at = starts[static_cast<size_t>(k)]; at < end; at += args.piece_tokens) {
        ids.resize(static_cast<size_t>(std::min(args.piece_tokens, end - at)));
        RT_TRY(source.read(at, std::ssize(ids), ids.data()));
        ScannedPiece piece{.document = first + k, .begin = at - starts[static_cast<size_t>(k)]};
        RT_TRY(measurer.measure(ids, &piece).with(fmt::format("{}: document {}", source.name(), piece.document)));
        out.push_back(piece);
      }
    }
    if (args.progress && !args.progress(first + count)) return Error{ErrorCode::kStopped, "the scan was stopped"};
  }
  return out;
}

std::vector<std::array<float, kScanCount>> scan_deviations(const std::vector<ScannedPiece>& pieces) {
  std::map<int, std::vector<size_t>> alike;  // by length, within a factor of two
  for (size_t k = 0; k < pieces.size(); ++k)
    alike[std::bit_width(static_cast<uint64_t>(pieces[k].tokens))].push_back(k);
  std::erase_if(alike, [](const auto& one) { return std::ssize(one.second) < kLeastAlike; });
  std::vector<std::array<float, kScanCount>> out(pieces.size());
  for (size_t m = 0; m < kScanCount; ++m) {
    std::map<int, RobustLevel> levels;
    for (const auto& [length, members] : alike) {
      std::vector<float> values;
      for (const size_t k : members) values.push_back(compared(pieces[k], m));
      levels[length] = RobustLevel::of(std::move(values), kFloors[m]);
    }
    for (const auto& [length, members] : alike) {
      const RobustLevel& level = levels[length];
      const std::optional<RobustLevel> around = level_around(levels, length);
      const bool shifted = around && std::fabs(around->deviations(static_cast<float>(level.median))) > kShifted;
      for (const size_t k : members) {
        const float x = compared(pieces[k], m);
        const double own = level.deviations(x), other = shifted ? around->deviations(x) : 0;
        out[k][m] = static_cast<float>(std::fabs(other) > std::fabs(own) ? other : own);
      }
    }
  }
  return out;
}

std::vector<int64_t> first_copies(const std::vector<ScannedPiece>& pieces) {
  std::unordered_map<uint64_t, int64_t> first;
  std::vector<int64_t> out(pieces.size());
  for (size_t k = 0; k < pieces.size(); ++k) {
    const auto self = static_cast<int64_t>(k);
    out[k] = pieces[k].tokens < kLeastCopied ? self : first.emplace(pieces[k].hash, self).first->second;
  }
  return out;
}

}  // namespace cairn::data
