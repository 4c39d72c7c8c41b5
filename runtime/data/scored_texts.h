#pragma once
// Texts that a run scores while it trains, laid into the rows that training has room for. Each is read by itself: what
// stands in other rows, and in which, changes nothing in its score.

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/data/dataset.h"

namespace cairn::data {

/// The last `scored` of `ids` are predicted, each from those before it.
struct ScoredText {
  std::vector<int32_t> ids;  // two at least
  int64_t scored = 0;        // one at least, one fewer than ids at most
};

struct TextScore {
  double logprob = 0;        // nats, the sum over the scored tokens
  double first_logprob = 0;  // of the first of them
};

/// Sequences of a number of tokens that hold the texts, in their order.
class TextRows {
 public:
  /// The last `tokens` + 1 ids of a text count. `packs`: several may stand in one sequence, where the model can keep
  /// them apart. Errors: kInvalidInput for a text of which more than `tokens` are scored.
  static Result<TextRows> make(std::span<const ScoredText> texts, int64_t tokens, bool packs);

  int64_t sequences() const { return std::ssize(sequences_); }

  /// Fills `samples` samples of `pieces` sequences each, from sequence `first` on; rows behind the last text have no
  /// targets. MicroBatch::channels then says of each row whose token it predicts: 2 * text, and 1 more at the first
  /// that is scored; -1: none.
  void fill(int64_t first, int64_t samples, int64_t pieces, MicroBatch* out) const;

 private:
  struct Part {
    int64_t text = 0, at = 0;  // of the sequence
  };
  std::span<const ScoredText> texts_;
  int64_t tokens_ = 0;
  bool packs_ = false;
  std::vector<std::vector<Part>> sequences_;
};

/// Sums of the texts' scores on one rank, in whole units of 2^-30 nats: added up over ranks in any order they have the
/// same bits.
class TextSums {
 public:
  explicit TextSums(int64_t texts) : units(static_cast<size_t>(2 * texts), 0.0) {}
  /// `owner`: of MicroBatch::channels, not -1.
  void add(int32_t owner, float loss);
  std::vector<TextScore> scores() const;

  std::vector<double> units;  // of each text: all scored tokens, the first one
};

}  // namespace cairn::data
