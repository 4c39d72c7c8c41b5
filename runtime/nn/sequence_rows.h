#pragma once
// Where the rows of a micro-batch stand and what they see, where that is not the plain order
// (runtime/data/objective.h).

#include <cstdint>
#include <span>

namespace cairn::nn {

/// Each [T] or empty: then row r stands at r % S and sees what the model's mask says. Where a rank holds some tokens of
/// each sequence, T rows are those, and `starts` is of all tokens [B, S], in their order.
struct SequenceRows {
  std::span<const int32_t> positions;  // in [0, S)
  std::span<const int32_t> starts;     // the first key that the row sees, within its sequence, at most its own
  std::span<const int32_t> ends;       // the row sees keys up to here at least; never falls within a sequence
  std::span<const float> weights;      // times which the row's loss is in the gradient; empty: 1

  bool empty() const { return positions.empty() && starts.empty() && ends.empty(); }
};

}  // namespace cairn::nn
