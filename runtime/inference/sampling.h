#pragma once
// From one row of logits to a token.

#include <cstdint>
#include <span>

namespace cairn::inference {

struct Sampling {
  double temperature = 1.0;  // 0: greedy
  int64_t top_k = 0;         // 0: all
  double top_p = 1.0;
  uint64_t seed = 0;  // same seed, prompt and weights: same text
};

/// Index of the next token; `text` and `index` number the draw: the index-th of the text-th prompt.
/// First the k likeliest remain, then of these the fewest whose probabilities reach top_p.
int32_t sample_token(std::span<const float> logits, const Sampling& sampling, int64_t index, int64_t text = 0);

}  // namespace cairn::inference
