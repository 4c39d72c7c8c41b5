#pragma once
// Which tokens of a sequence a rank has. Context parallelism cuts a sequence into 2 cp chunks; rank r has chunks r and
// 2 cp - 1 - r, so that under a causal mask all ranks see equally many keys.

#include <cstdint>

namespace cairn {

struct TokenRuns {
  int64_t tokens = 0;             // of the whole sequence
  int64_t count = 0;              // of those held, in two runs of equal length unless it is all
  int64_t first = 0, second = 0;  // where the runs begin

  TokenRuns() = default;
  /// All of them. Implicit: most sequences are whole.
  TokenRuns(int64_t all) : tokens(all), count(all) {}  // NOLINT(google-explicit-constructor)
  /// The part of `rank` among `cp`; 2 cp must divide `all`.
  static TokenRuns of_rank(int64_t all, int64_t cp, int64_t rank) {
    TokenRuns out(all);
    if (cp == 1) return out;
    const int64_t chunk = all / (2 * cp);
    out.count = 2 * chunk;
    out.first = rank * chunk;
    out.second = (2 * cp - 1 - rank) * chunk;
    return out;
  }

  bool whole() const { return count == tokens; }
  /// Of the row-th token held.
  int64_t position(int64_t row) const {
    return whole() ? row : row < count / 2 ? first + row : second + row - count / 2;
  }
};

}  // namespace cairn
