#pragma once

namespace cairn {

/// A quantity of training in the unit the person wrote. Positions in samples survive a change of batch.
struct Span {
  enum class Unit { kSteps, kSamples, kTokens, kFraction } unit = Unit::kSteps;
  double value = 0;
};

}  // namespace cairn
