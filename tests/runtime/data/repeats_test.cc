// Which samples repeat a few tokens too often, and what of them counts no more.
#include "runtime/data/repeats.h"

#include <doctest/doctest.h>

#include <numeric>
#include <random>
#include <vector>

using namespace cairn;
using namespace cairn::data;

namespace {

/// Plainly: every stretch, every period.
bool repeats_plainly(const MaskRepeats& mask, const std::vector<int32_t>& tokens) {
  const auto size = std::ssize(tokens);
  for (int64_t period = 1; period <= mask.period; ++period) {
    for (int64_t begin = 0; begin + period * mask.count <= size; ++begin) {
      bool all = true;
      for (int64_t i = begin + period; i < begin + period * mask.count; ++i)
        all = all && tokens[i] == tokens[i - period];
      if (all) return true;
    }
  }
  return false;
}

MicroBatch of_tokens(int64_t seq_len, const std::vector<std::vector<int32_t>>& samples) {
  MicroBatch out;
  out.samples = std::ssize(samples);
  out.seq_len = seq_len;
  for (const std::vector<int32_t>& tokens : samples) {
    REQUIRE(std::ssize(tokens) == seq_len + 1);
    out.inputs.insert(out.inputs.end(), tokens.begin(), tokens.end() - 1);
    out.targets.insert(out.targets.end(), tokens.begin() + 1, tokens.end());
    out.sources.push_back(0);
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/data/repeats") {
  TEST_CASE("repeats are found where a plain search finds them") {
    std::mt19937 draw(5);
    int found = 0;
    for (int k = 0; k < 4000; ++k) {
      std::vector<int32_t> tokens(24);
      const auto letters = 1 + draw() % 4;
      for (int32_t& token : tokens) token = static_cast<int32_t>(draw() % letters);
      const MaskRepeats mask{.period = 1 + static_cast<int64_t>(draw() % 5),
                             .count = 2 + static_cast<int64_t>(draw() % 4)};
      CAPTURE(k);
      REQUIRE(has_repeats(mask, tokens) == repeats_plainly(mask, tokens));
      found += has_repeats(mask, tokens) ? 1 : 0;
    }
    CHECK(found > 500);
    CHECK(found < 3500);
  }

  TEST_CASE("a sample with repeats counts in no loss, to its last target") {
    std::vector<int32_t> text(9), dirty(9), at_its_end(9);
    std::iota(text.begin(), text.end(), 1);
    std::iota(dirty.begin(), dirty.end(), 1);
    for (int k = 2; k < 8; ++k) dirty[k] = 7 + k % 2;
    std::iota(at_its_end.begin(), at_its_end.end(), 1);
    for (int k = 3; k < 9; ++k) at_its_end[k] = 20 + k % 2;  // three times only with the token behind the inputs
    MicroBatch batch = of_tokens(8, {text, dirty, at_its_end});
    batch.targets[9] = kNoTarget;  // of the second sample, for another reason
    const MicroBatch before = batch;
    find_repeats({.period = 2, .count = 3}, &batch);
    CHECK(mask_repeats(&batch) == 15);
    CHECK(batch.inputs == before.inputs);
    for (int64_t row = 0; row < 24; ++row) CHECK(batch.targets[row] == (row < 8 ? before.targets[row] : kNoTarget));
    find_repeats({}, &batch);
    CHECK(batch.repeats.empty());
    CHECK(mask_repeats(&batch) == 0);
  }

  TEST_CASE("a packed conversation with repeats is left out, its neighbours count, and fill is no repeat") {
    MicroBatch batch = of_tokens(8, {{1, 2, 3, 5, 5, 5, 0, 0, 0}});
    batch.apart = {1};
    batch.starts = {0, 0, 0, 3, 3, 3, 6, 6};
    batch.targets = {2, 3, kNoTarget, 5, 5, kNoTarget, kNoTarget, kNoTarget};
    find_repeats({.period = 1, .count = 3}, &batch);
    CHECK(mask_repeats(&batch) == 2);
    CHECK(batch.targets ==
          std::vector<int32_t>{2, 3, kNoTarget, kNoTarget, kNoTarget, kNoTarget, kNoTarget, kNoTarget});
  }
}
