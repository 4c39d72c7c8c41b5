#include "runtime/data/scored_texts.h"

#include <cmath>
#include <vector>

#include <doctest/doctest.h>

using namespace cairn;
using data::MicroBatch;
using data::ScoredText;
using data::TextRows;
using data::TextSums;

namespace {

std::vector<int32_t> part(const std::vector<int32_t>& all, int64_t begin, int64_t count) {
  return {all.begin() + begin, all.begin() + begin + count};
}

}  // namespace

TEST_CASE("each sequence holds one text") {
  const std::vector<ScoredText> texts = {{{5, 6, 7}, 1}, {{1, 2, 3, 4, 5, 6}, 2}};
  const auto rows = TextRows::make(texts, 4, false);
  REQUIRE(rows.ok());
  CHECK(rows.value().sequences() == 2);
  MicroBatch out;
  rows.value().fill(0, 3, 1, &out);
  CHECK(out.samples == 3);
  CHECK(out.seq_len == 4);
  CHECK(part(out.inputs, 0, 4) == std::vector<int32_t>{5, 6, 0, 0});
  CHECK(part(out.targets, 0, 4) == std::vector<int32_t>{kNoTarget, 7, kNoTarget, kNoTarget});
  CHECK(part(out.channels, 0, 4) == std::vector<int32_t>{-1, 1, -1, -1});
  // The last five ids of six.
  CHECK(part(out.inputs, 4, 4) == std::vector<int32_t>{2, 3, 4, 5});
  CHECK(part(out.targets, 4, 4) == std::vector<int32_t>{kNoTarget, kNoTarget, 5, 6});
  CHECK(part(out.channels, 4, 4) == std::vector<int32_t>{-1, -1, 3, 2});
  // Behind the last text.
  CHECK(part(out.targets, 8, 4) == std::vector<int32_t>(4, kNoTarget));
  CHECK(out.positions.empty());
  CHECK(out.starts.empty());
}

TEST_CASE("TextRows: several texts in a sequence, none sees another") {
  const std::vector<ScoredText> texts = {{{5, 6, 7}, 2}, {{8, 9}, 1}, {{1, 2, 3}, 1}};
  const auto rows = TextRows::make(texts, 4, true);
  REQUIRE(rows.ok());
  CHECK(rows.value().sequences() == 2);
  MicroBatch out;
  rows.value().fill(0, 1, 2, &out);  // two sequences of one sample
  CHECK(out.seq_len == 8);
  CHECK(out.inputs == std::vector<int32_t>{5, 6, 8, 0, 1, 2, 0, 0});
  CHECK(out.targets == std::vector<int32_t>{6, 7, 9, kNoTarget, kNoTarget, 3, kNoTarget, kNoTarget});
  CHECK(out.channels == std::vector<int32_t>{1, 0, 3, -1, -1, 5, -1, -1});
  CHECK(out.positions == std::vector<int32_t>{0, 1, 0, 0, 0, 1, 0, 1});
  CHECK(out.starts == std::vector<int32_t>{0, 0, 2, 3, 0, 0, 2, 2});
  rows.value().fill(1, 1, 1, &out);  // from the second sequence on
  CHECK(out.inputs == std::vector<int32_t>{1, 2, 0, 0});
}

TEST_CASE("TextRows: more is to be predicted than a sequence has") {
  const std::vector<ScoredText> texts = {{{1, 2, 3, 4, 5, 6}, 5}};
  const auto rows = TextRows::make(texts, 4, false);
  REQUIRE(!rows.ok());
  CHECK(rows.error().message.find("5 tokens are to be predicted at once, and a sequence of the run has 4") !=
        std::string::npos);
}

TEST_CASE("any order of ranks gives the same bits") {
  const std::vector<float> losses = {0.1f, 3.7f, 2.25f, 11.5f, 0.003f};
  TextSums whole(2);
  for (size_t k = 0; k < losses.size(); ++k) whole.add(k == 0 ? 3 : 2, losses[k]);
  TextSums first(2), second(2);
  for (size_t k = losses.size(); k-- > 0;) (k % 2 == 0 ? first : second).add(k == 0 ? 3 : 2, losses[k]);
  for (size_t k = 0; k < first.units.size(); ++k) first.units[k] += second.units[k];
  CHECK(first.units == whole.units);
  const auto scores = whole.scores();
  REQUIRE(scores.size() == 2);
  CHECK(scores[0].logprob == 0);
  CHECK(scores[1].first_logprob == doctest::Approx(-0.1).epsilon(1e-7));
  CHECK(scores[1].logprob == doctest::Approx(-17.553).epsilon(1e-7));
  whole.add(2, NAN);
  CHECK(std::isinf(whole.scores()[1].logprob));
}
