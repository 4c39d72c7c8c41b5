#pragma once
// Which tokens of a sequence a rank has, and where they stand among the rows of a micro-batch. Context parallelism cuts
// a sequence into 2 cp chunks. Rank r has chunks r and 2 cp - 1 - r, so that under a causal mask all ranks see equally
// many keys.
//
// Where sums over tokens are taken in parts (Plan::token_parts()) a sequence is cut likewise: part p of P is chunks p
// and 2 P - 1 - p of 2 P. A rank has a run of the parts. Its rows stand part by part, in each sample by sample. So a
// part is a run of rows, and the rows of all ranks, one after the other, are those of one rank.

#include <cstdint>

namespace cairn {

struct TokenRuns {
  int64_t tokens = 0;             // of the whole sequence
  int64_t count = 0;              // of those held, in two runs of equal length unless it is all
  int64_t first = 0, second = 0;  // where the runs begin
  int64_t parts = 1;              // of those held

  constexpr TokenRuns() = default;
  /// All of them. Implicit: most sequences are whole.
  constexpr TokenRuns(int64_t all) : tokens(all), count(all), second(all / 2) {}  // NOLINT(google-explicit-constructor)
  /// What `rank` among `cp` has, in `parts` of all ranks: 2 cp must divide `all`; cp `parts`, and 2 `parts` `all`,
  /// where there is more than one.
  static constexpr TokenRuns of_rank(int64_t all, int64_t cp, int64_t rank, int64_t parts = 1) {
    TokenRuns out(all);
    if (parts > 1) out.parts = parts / cp;
    if (cp == 1) return out;
    const int64_t chunk = all / (2 * cp);
    out.count = 2 * chunk;
    out.first = rank * chunk;
    out.second = (2 * cp - 1 - rank) * chunk;
    return out;
  }

  /// Tokens stand in their order.
  constexpr bool whole() const { return count == tokens && parts == 1; }
  constexpr int64_t part_tokens() const { return count / parts; }
  /// Of the index-th token held, part by part.
  constexpr int64_t position(int64_t index) const {
    if (whole()) return index;
    const int64_t part = index / part_tokens(), at = index % part_tokens(), chunk = part_tokens() / 2;
    return at < chunk ? first + part * chunk + at : second + (parts - 1 - part) * chunk + at - chunk;
  }

  struct Place {
    int64_t sample, position;
  };
  /// Of a row of a micro-batch of `samples`.
  constexpr Place place(int64_t row, int64_t samples) const {
    if (parts == 1) return {row / count, position(row % count)};
    const int64_t run = row / part_tokens();
    return {run % samples, position(run / samples * part_tokens() + row % part_tokens())};
  }
};

}  // namespace cairn
