#include "runtime/config/skipped_positions.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

namespace cairn {
namespace {

constexpr int64_t kMostPosition = int64_t{1} << 52;  // exact as a double, which the blend's rule counts in

std::optional<int64_t> position_of(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > kMostPosition) return {};
  return value;
}

}  // namespace

Result<PositionRange> parse_positions(const std::string& text) {
  const std::string_view all = text;
  const size_t dots = all.find("..");
  const std::optional<int64_t> first = position_of(all.substr(0, dots));
  const std::optional<int64_t> last = dots == std::string_view::npos ? first : position_of(all.substr(dots + 2));
  if (first && last && *first <= *last) return PositionRange{*first, *last};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("\"{}\" is no range of positions: expected \"A..B\", the first and the last of them, from 0 "
                           "up, as `cairn data samples` prints them",
                           text)};
}

std::string to_text(const PositionRange& range) {
  return range.first == range.last ? fmt::format("{}", range.first) : fmt::format("{}..{}", range.first, range.last);
}

Result<SkippedPositions> SkippedPositions::parse(std::span<const std::string> ranges) {
  std::vector<PositionRange> all;
  for (const std::string& text : ranges) {
    RT_TRY_SET(const PositionRange range, parse_positions(text));
    all.push_back(range);
  }
  std::ranges::sort(all, {}, &PositionRange::first);
  SkippedPositions out;
  for (const PositionRange& range : all) {
    if (!out.ranges_.empty() && range.first <= out.ranges_.back().last + 1) {
      out.ranges_.back().last = std::max(out.ranges_.back().last, range.last);
    } else {
      out.ranges_.push_back(range);
    }
  }
  const int64_t skipped = out.count(0, kMostPosition + 1);
  if (skipped > kMost) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("{} positions are skipped, at most {}: leave out a source instead, by its weight", skipped, kMost)};
  }
  return out;
}

bool SkippedPositions::holds(int64_t position) const { return count(position, position + 1) == 1; }

int64_t SkippedPositions::count(int64_t begin, int64_t end) const {
  int64_t out = 0;
  for (const PositionRange& range : ranges_)
    out += std::max<int64_t>(0, std::min(end, range.last + 1) - std::max(begin, range.first));
  return out;
}

int64_t SkippedPositions::after(int64_t begin, int64_t samples) const {
  int64_t at = begin;
  for (const PositionRange& range : ranges_) {
    if (samples == 0 || range.last < at) continue;
    const int64_t before = std::max<int64_t>(0, range.first - at);
    if (before >= samples) return at + samples;
    samples -= before;
    at = range.last + 1;
  }
  return at + samples;
}

}  // namespace cairn
