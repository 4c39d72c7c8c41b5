#include "runtime/data/objective.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

using namespace cairn;
using namespace cairn::data;

namespace {

constexpr int32_t kMask = 1001, kGMask = 1002, kSop = 1003, kEop = 1004;

ObjectiveConfig infill() {
  ObjectiveConfig out;
  out.kind = ObjectiveConfig::Kind::kInfill;
  out.mask_token = kMask;
  out.gmask_token = kGMask;
  out.start_token = kSop;
  out.end_token = kEop;
  return out;
}

/// Samples whose token t of sample i is 10 + (7 i + t) % 900, so that neighbours tell where they come from.
MicroBatch plain(int64_t samples, int64_t seq_len) {
  MicroBatch out;
  out.samples = samples;
  out.seq_len = seq_len;
  for (int64_t i = 0; i < samples; ++i) {
    for (int64_t t = 0; t < seq_len; ++t) {
      out.inputs.push_back(static_cast<int32_t>(10 + (7 * i + t) % 900));
      out.targets.push_back(static_cast<int32_t>(10 + (7 * i + t + 1) % 900));
    }
  }
  return out;
}

std::vector<SampleRef> places(int64_t samples, int64_t first = 0) {
  std::vector<SampleRef> out(samples);
  for (int64_t i = 0; i < samples; ++i) out[i].position = first + i;
  return out;
}

MicroBatch applied(const ObjectiveConfig& objective, int64_t samples, int64_t seq_len, int64_t tokens,
                   uint64_t seed = 5) {
  MicroBatch out = plain(samples, seq_len);
  apply_objective(objective, seed, tokens, places(samples), &out);
  return out;
}

/// One window of an infilled sequence, read as GLM's code reads it: what stands where.
struct Window {
  std::vector<int32_t> inputs, targets, positions;
  int64_t context = 0;  // rows that see each other
};

Window window_of(const MicroBatch& batch, int64_t first, int64_t count) {
  Window out;
  const auto part = [&](const std::vector<int32_t>& rows) {
    return std::vector<int32_t>(rows.begin() + first, rows.begin() + first + count);
  };
  out.inputs = part(batch.inputs);
  out.targets = part(batch.targets);
  out.positions = part(batch.positions);
  const int64_t in_sequence = batch.starts[first];
  out.context = batch.ends[first] - in_sequence;
  for (int64_t t = 0; t < count; ++t) {
    CHECK(batch.starts[first + t] == in_sequence);
    CHECK(batch.ends[first + t] == in_sequence + std::max(out.context, t + 1));
    CHECK((out.targets[t] == kNoTarget) == (t < out.context));
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/data/objective") {
  TEST_CASE("nothing changes without an objective") {
    const MicroBatch before = plain(2, 12), after = applied({}, 2, 12, 12);
    CHECK(after.inputs == before.inputs);
    CHECK(after.targets == before.targets);
    CHECK(after.positions.empty());
    CHECK(after.starts.empty());
    CHECK(after.ends.empty());
    CHECK(!changes_rows({}));
  }

  TEST_CASE("documents: attention, positions and loss, each by its switch, cut where sequences are") {
    ObjectiveConfig objective;
    objective.document_end = 13;  // sample 0: rows 3; sample 1: none in 10 tokens from 17 on
    using Rows = std::vector<int32_t>;
    const auto first = [](const Rows& rows) { return Rows(rows.begin(), rows.begin() + 10); };
    MicroBatch batch = applied(objective, 2, 10, 10);
    CHECK(first(batch.positions) == Rows{0, 1, 2, 3, 0, 1, 2, 3, 4, 5});
    CHECK(first(batch.starts) == Rows{0, 0, 0, 0, 4, 4, 4, 4, 4, 4});
    CHECK(batch.ends.empty());
    CHECK(first(batch.targets) == Rows{11, 12, 13, kNoTarget, 15, 16, 17, 18, 19, 20});
    CHECK(Rows(batch.positions.begin() + 10, batch.positions.end()) == Rows{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
    batch = applied(objective, 1, 10, 5);  // two sequences: the second begins a document anew
    CHECK(batch.positions == Rows{0, 1, 2, 3, 0, 0, 1, 2, 3, 4});
    CHECK(batch.starts == Rows{0, 0, 0, 0, 4, 0, 0, 0, 0, 0});
    objective.reset_positions = false;
    objective.document_loss = true;
    batch = applied(objective, 1, 10, 10);
    CHECK(batch.positions.empty());
    CHECK(batch.targets == plain(1, 10).targets);
    CHECK(batch.starts == Rows{0, 0, 0, 0, 4, 4, 4, 4, 4, 4});
    objective.reset_attention = false;
    CHECK(applied(objective, 1, 10, 10).starts.empty());
  }

  TEST_CASE("prefixes of every length come, and what sees its target does not count") {
    ObjectiveConfig objective;
    objective.kind = ObjectiveConfig::Kind::kPrefix;
    const int64_t samples = 600, tokens = 8;
    const MicroBatch batch = applied(objective, samples, tokens, tokens);
    std::map<int32_t, int> seen;
    for (int64_t i = 0; i < samples; ++i) {
      const int32_t* ends = batch.ends.data() + i * tokens;
      const int32_t* targets = batch.targets.data() + i * tokens;
      const int32_t prefix = ends[0];
      ++seen[prefix];
      for (int32_t t = 0; t < tokens; ++t) {
        CHECK(ends[t] == std::max(prefix, t + 1));
        CHECK((targets[t] == kNoTarget) == (t + 1 < prefix));
      }
    }
    CHECK(seen.size() == 7);  // 1 to 7
    for (const auto& [prefix, count] : seen) {
      CHECK(prefix >= 1);
      CHECK(std::abs(count - samples / 7.0) < 5 * std::sqrt(samples / 7.0));  // five standard deviations
    }
  }

  TEST_CASE("[gMASK]: text + gMASK + sop + gap, the gap a uniform part of a fifth to all") {
    ObjectiveConfig objective = infill();
    objective.gmask_share = 1;
    const int64_t samples = 400, tokens = 41;
    const MicroBatch batch = applied(objective, samples, tokens, tokens);
    int64_t least = tokens, most = 0;
    for (int64_t i = 0; i < samples; ++i) {
      const Window w = window_of(batch, i * tokens, tokens);
      const int64_t kept = w.context - 1;
      const std::vector<int32_t> text = plain(samples, tokens).inputs;
      const auto token = [&](int64_t t) { return text[i * tokens + t]; };
      for (int64_t t = 0; t < kept; ++t) CHECK(w.inputs[t] == token(t));
      CHECK(w.inputs[kept] == kGMask);
      CHECK(w.inputs[kept + 1] == kSop);
      for (int64_t t = kept + 2; t < tokens; ++t) CHECK(w.inputs[t] == token(t - 2));
      for (int64_t t = kept + 1; t < tokens; ++t) CHECK(w.targets[t] == token(t - 1));
      for (int64_t t = 0; t < tokens; ++t) CHECK(w.positions[t] == t);
      least = std::min(least, 40 - kept);
      most = std::max(most, 40 - kept);
    }
    CHECK(least == 8);  // a fifth of 40
    CHECK(most == 40);
  }

  TEST_CASE("[MASK]: parts A and B put together are the text, and part B stands where its masks are") {
    ObjectiveConfig objective = infill();
    objective.gmask_share = 0;
    objective.mask_windows = 3;
    const int64_t samples = 60, tokens = 192, window = 64;
    const MicroBatch batch = applied(objective, samples, tokens, tokens);
    const std::vector<int32_t> text = plain(samples, tokens).inputs;
    double share = 0;
    bool shuffled = false;
    for (int64_t at = 0; at < samples * tokens; at += window) {
      const Window w = window_of(batch, at, window);
      CHECK(batch.starts[at] == at % tokens);
      std::map<int32_t, std::vector<int32_t>> spans;  // by position
      int32_t last = -1;
      int64_t taken = 0;
      for (int64_t t = w.context; t < window;) {
        REQUIRE(w.inputs[t] == kSop);
        const int32_t place = w.positions[t];
        shuffled |= place < last;
        last = place;
        CHECK(w.inputs[place] == kMask);
        std::vector<int32_t>& span = spans[place];
        CHECK(span.empty());
        for (; w.targets[t] != kEop; ++t) {
          CHECK(w.positions[t] == place);
          span.push_back(w.targets[t]);
          CHECK(w.inputs[t + 1] == w.targets[t]);
        }
        CHECK(w.positions[t] == place);
        CHECK(!span.empty());
        taken += std::ssize(span);
        ++t;
      }
      std::vector<int32_t> together;
      for (int64_t t = 0; t < w.context; ++t) {
        CHECK(w.positions[t] == t);
        if (w.inputs[t] != kMask) {
          together.push_back(w.inputs[t]);
          continue;
        }
        CHECK((t == 0 || w.inputs[t - 1] != kMask));  // text between spans
        const auto& span = spans.at(static_cast<int32_t>(t));
        together.insert(together.end(), span.begin(), span.end());
      }
      CHECK(std::ssize(together) + 2 * std::ssize(spans) == window);
      CHECK(std::equal(together.begin(), together.end(), text.begin() + at));
      share += static_cast<double>(taken) / window / (samples * 3.0);
    }
    CHECK(shuffled);
    CHECK(share > 0.14);
    CHECK(share < 0.21);  // the last span goes beyond the share
  }

  TEST_CASE("small windows hold a span, and both kinds come by their share") {
    ObjectiveConfig objective = infill();
    objective.gmask_share = 0.3;
    for (const int64_t tokens : {8, 9, 11, 16}) {
      const int64_t samples = 300;
      const MicroBatch batch = applied(objective, samples, tokens, tokens);
      int64_t ends = 0;
      for (int64_t i = 0; i < samples; ++i) {
        const auto row = std::span(batch.inputs).subspan(i * tokens, tokens);
        const bool gap_at_end = std::ranges::count(row, kGMask) == 1;
        ends += gap_at_end;
        CHECK((gap_at_end || std::ranges::count(row, kMask) >= 1));
        window_of(batch, i * tokens, tokens);
      }
      CHECK(std::abs(static_cast<double>(ends) - 90) < 40);
    }
  }

  TEST_CASE("a sample's draws depend on seed and place alone") {
    const ObjectiveConfig objective = infill();
    const MicroBatch whole = applied(objective, 4, 32, 32), other = applied(objective, 4, 32, 32, 6);
    CHECK(whole.inputs != other.inputs);
    MicroBatch one = plain(4, 32);
    one.samples = 1;
    for (auto* rows : {&one.inputs, &one.targets}) rows->erase(rows->begin(), rows->begin() + 3 * 32);
    apply_objective(objective, 5, 32, places(1, 3), &one);
    CHECK(std::equal(one.inputs.begin(), one.inputs.end(), whole.inputs.begin() + 3 * 32));
    CHECK(std::equal(one.positions.begin(), one.positions.end(), whole.positions.begin() + 3 * 32));
  }
}
