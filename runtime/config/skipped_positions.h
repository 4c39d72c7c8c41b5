#pragma once
// Positions of the sample order that a run passes over (batch.skip). Each is drawn from its source like any other and
// then left, so that the samples behind it stay the same.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/result.h"

namespace cairn {

/// From `first` to `last`, both of them.
struct PositionRange {
  int64_t first = 0, last = 0;
  bool operator==(const PositionRange&) const = default;
};

/// "A..B", or "A" for one. Errors: kInvalidInput with what was found and expected.
Result<PositionRange> parse_positions(const std::string& text);
std::string to_text(const PositionRange& range);

class SkippedPositions {
 public:
  /// A start walks over what is skipped, so no run leaves out more.
  static constexpr int64_t kMost = int64_t{1} << 27;

  SkippedPositions() = default;
  /// Ranges in any order, overlapping ones too. Errors: those of parse_positions; kInvalidInput for more than kMost.
  static Result<SkippedPositions> parse(std::span<const std::string> ranges);

  bool empty() const { return ranges_.empty(); }
  /// Ascending, with at least one position between any two.
  const std::vector<PositionRange>& ranges() const { return ranges_; }
  bool holds(int64_t position) const;
  /// How many of the positions from `begin` up to and without `end` are skipped.
  int64_t count(int64_t begin, int64_t end) const;
  /// The position behind the next `samples` from `begin` on that are not skipped. Not moved where `samples` is 0.
  int64_t after(int64_t begin, int64_t samples) const;
  bool operator==(const SkippedPositions&) const = default;

 private:
  std::vector<PositionRange> ranges_;
};

}  // namespace cairn
