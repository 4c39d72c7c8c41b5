#include "runtime/data/sampler.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include "tests/runtime/data/scratch.h"

using namespace cairn;
using namespace cairn::data;

namespace {

Sampler::Spec spec_of(int64_t sources) {
  Sampler::Spec spec;
  spec.seed = 99;
  spec.seq_len = 8;
  for (int64_t i = 0; i < sources; ++i)
    spec.sources.push_back({"s" + std::to_string(i), 100 + 37 * i, 1000 + static_cast<uint64_t>(i), 1.0 + 0.5 * i, {}});
  return spec;
}

Sampler sampler_of(int64_t sources) {
  auto made = Sampler::make(spec_of(sources));
  REQUIRE(made.ok());
  return std::move(made).value();
}

// One step as dp ranks with micro-batches of m see it, put together again in order of (micro-step, rank).
std::vector<SampleRef> step_as_seen(std::span<const SampleRef> step, int64_t dp, int64_t micro) {
  std::vector<SampleRef> seen;
  for (int64_t a = 0; a < static_cast<int64_t>(step.size()) / (dp * micro); ++a)
    for (int64_t r = 0; r < dp; ++r)
      for (const SampleRef& sample : micro_batch_samples(step, dp, r, micro, a)) seen.push_back(sample);
  return seen;
}

}  // namespace

TEST_SUITE("runtime/data/sampler") {
  TEST_CASE("dp 1, 2, 3, 4, 6, 12 give the same samples in the same order for a batch of 12") {
    Sampler sampler = sampler_of(3);
    for (int64_t step = 0; step < 50; ++step) {
      const auto samples = sampler.peek(12);
      for (const int64_t dp : {1, 2, 3, 4, 6, 12})
        for (int64_t micro = 1; micro * dp <= 12; ++micro)
          if (12 % (micro * dp) == 0) CHECK(step_as_seen(samples, dp, micro) == samples);
      for (size_t i = 0; i < samples.size(); ++i) CHECK(samples[i].position == step * 12 + static_cast<int64_t>(i));
      sampler.advance(12);
    }
  }

  TEST_CASE("where a step does not divide, its first sample stands behind the last one") {
    const auto step = sampler_of(3).peek(10);
    const auto filled = fill_rounds(step, 4);
    REQUIRE(filled.size() == 12);
    CHECK(std::equal(step.begin(), step.end(), filled.begin()));
    CHECK(filled[10] == step[0]);
    CHECK(filled[11] == step[0]);
    CHECK(fill_rounds(step, 5) == step);
  }

  TEST_CASE("rank r of micro-step a reads P + a m dp + r m") {
    const Sampler sampler = sampler_of(1);
    const auto step = sampler.peek(12);
    CHECK(micro_batch_samples(step, 3, 2, 2, 1)[0].position == 1 * 2 * 3 + 2 * 2);
    CHECK(micro_batch_samples(step, 3, 2, 2, 1)[1].position == 1 * 2 * 3 + 2 * 2 + 1);
  }

  TEST_CASE("stop after any step and resume: no gap, no repeat, at another batch size too") {
    Sampler straight = sampler_of(3);
    const auto all = straight.peek(600);
    for (int64_t stop = 0; stop <= 40; ++stop) {
      Sampler before = sampler_of(3);
      std::vector<SampleRef> seen;
      for (int64_t step = 0; step < stop; ++step) {
        const auto samples = before.peek(12);
        seen.insert(seen.end(), samples.begin(), samples.end());
        before.advance(12);
      }
      auto saved = sampler_state_from_json(to_json(before.state()));
      REQUIRE(saved.ok());
      CHECK(saved.value() == before.state());
      auto resumed = Sampler::resume(spec_of(3), saved.value());
      REQUIRE(resumed.ok());
      Sampler after = std::move(resumed).value();
      while (static_cast<int64_t>(seen.size()) + 8 <= 600) {
        const auto samples = after.peek(8);
        seen.insert(seen.end(), samples.begin(), samples.end());
        after.advance(8);
      }
      CHECK(std::equal(seen.begin(), seen.end(), all.begin()));
    }
  }

  TEST_CASE("a longer run changes nothing before the old end") {
    const Sampler sampler = sampler_of(2);
    const auto shorter = sampler.peek(100), longer = sampler.peek(1000);
    CHECK(std::equal(shorter.begin(), shorter.end(), longer.begin()));
  }

  TEST_CASE("a crash between reading ahead and the step loses nothing") {
    Sampler sampler = sampler_of(2);
    sampler.advance(24);
    const SamplerState saved = sampler.state();
    const auto read_ahead = sampler.peek(64);
    CHECK(sampler.state() == saved);  // looking moves nothing
    auto resumed = Sampler::resume(spec_of(2), saved);
    REQUIRE(resumed.ok());
    CHECK(resumed.value().peek(64) == read_ahead);
  }

  TEST_CASE("a position that is skipped is drawn and left: the samples behind it stay the same") {
    const std::vector<SampleRef> all = sampler_of(3).peek(200);
    Sampler::Spec spec = spec_of(3);
    spec.skip = SkippedPositions::parse(std::vector<std::string>{"150", "20..31", "0..1", "30..40"}).value();
    std::vector<SampleRef> left;
    for (const SampleRef& sample : all)
      if (!spec.skip.holds(sample.position)) left.push_back(sample);
    CHECK(std::ssize(left) == 200 - 2 - 21 - 1);

    Sampler sampler = Sampler::make(spec).value();
    CHECK(sampler.peek(std::ssize(left)) == left);
    // Through JSON after each step, of sizes that end before, inside and behind the ranges.
    size_t at = 0;
    for (const int64_t step : {5, 13, 1, 30, 7, 60, 11}) {
      const std::vector<SampleRef> next = sampler.peek(step);
      CHECK(std::equal(next.begin(), next.end(), left.begin() + static_cast<std::ptrdiff_t>(at)));
      sampler.advance(step);
      at += static_cast<size_t>(step);
      CHECK(sampler.trained() == static_cast<int64_t>(at));
      CHECK(sampler.position() == left[at - 1].position + 1);
      CHECK(sampler.position() - sampler.trained() == sampler.state().skipped);
      CHECK(Sampler::changes(spec, sampler.state()).value().empty());
      sampler = Sampler::resume(spec, sampler_state_from_json(to_json(sampler.state())).value()).value();
    }
    // A range that the run has passed changes nothing any more.
    spec.skip = SkippedPositions::parse(std::vector<std::string>{"3..9", "150"}).value();
    CHECK(Sampler::resume(spec, sampler.state()).value().peek(20) == sampler.peek(20));
  }

  TEST_CASE("each epoch of a source visits every window once, epochs differ") {
    Sampler sampler = sampler_of(1);
    const int64_t windows = window_count(100, 8);
    REQUIRE(windows == 12);
    std::vector<int64_t> previous;
    for (int64_t epoch = 0; epoch < 5; ++epoch) {
      std::vector<int64_t> starts;
      for (const SampleRef& sample : sampler.peek(windows)) starts.push_back(sample.start);
      CHECK(starts != previous);
      previous = starts;
      std::sort(starts.begin(), starts.end());
      for (int64_t i = 0; i < windows; ++i) CHECK(starts[static_cast<size_t>(i)] == i * 8);
      sampler.advance(windows);
      CHECK(sampler.epochs(0) == doctest::Approx(epoch + 1.0));
    }
  }

  TEST_CASE("the last window's target is the last token it may need") {
    // 2 windows of 8 need 17 tokens; with 16 there is one.
    CHECK(window_count(17, 8) == 2);
    CHECK(window_count(16, 8) == 1);
    CHECK(window_count(0, 8) == 0);
  }

  TEST_CASE("a blend draws sources by weight and counts them") {
    Sampler sampler = sampler_of(3);  // weights 1, 1.5, 2
    std::map<int32_t, int64_t> counts;
    for (const SampleRef& sample : sampler.peek(900)) {
      CHECK(sample.k == counts[sample.source]);
      ++counts[sample.source];
    }
    CHECK(counts[0] == 200);
    CHECK(counts[1] == 300);
    CHECK(counts[2] == 400);
    sampler.advance(900);
    for (size_t i = 0; i < 3; ++i) CHECK(sampler.state().sources[i].taken == 200 + 100 * static_cast<int64_t>(i));
  }

  TEST_CASE("weights count relative to each other, seeds and source order matter") {
    Sampler::Spec doubled = spec_of(3);
    for (auto& source : doubled.sources) source.weight *= 2;
    CHECK(Sampler::make(doubled).value().state() == sampler_of(3).state());
    Sampler::Spec seeded = spec_of(3);
    seeded.seed = 100;
    CHECK(Sampler::make(seeded).value().peek(20) != sampler_of(3).peek(20));
  }

  TEST_CASE("a state that contradicts itself is corrupt") {
    Sampler sampler = sampler_of(2);
    sampler.advance(10);
    Sampler::Spec heavier = spec_of(2);
    heavier.sources[0].weight = 5;
    Sampler staged = Sampler::resume(heavier, sampler.state()).value();
    staged.advance(10);
    REQUIRE(Sampler::resume(heavier, staged.state()).ok());
    const std::vector<std::function<void(SamplerState&)>> mistakes = {
        [](SamplerState& s) { s.position = 21; },
        [](SamplerState& s) { s.position = INT64_MAX; },
        [](SamplerState& s) { s.base_position = -1; },
        [](SamplerState& s) { s.base_position = 21; },
        [](SamplerState& s) { s.base_position = 0; },
        [](SamplerState& s) { s.seq_len = 0; },
        [](SamplerState& s) { s.sources[0].taken = -1; },
        [](SamplerState& s) { s.sources[0].taken = s.sources[1].taken = INT64_MAX; },
        [](SamplerState& s) { s.sources[0].taken += 1; },
        [](SamplerState& s) { s.sources[0].base_taken = s.sources[0].taken + 1; },
        [](SamplerState& s) { s.sources.pop_back(); },
        [](SamplerState& s) { s.sources[1].stream = 0; },
        [](SamplerState& s) { s.sources[0].stream = -1; },
        [](SamplerState& s) { s.sources[1].name = s.sources[0].name; },
        [](SamplerState& s) { s.sources[0].tokens = -1; },
        [](SamplerState& s) { s.sources[0].tokens = 8; },
        [](SamplerState& s) { s.sources[0].weight = -0.5; },
        [](SamplerState& s) { s.sources[0].weight = 0; },
        [](SamplerState& s) { s.sources[0].weight = std::numeric_limits<double>::quiet_NaN(); },
        [](SamplerState& s) {
          s.sources[0].growth = {{0, 11, 0}};
        },
        [](SamplerState& s) {
          s.sources[0].growth = {{0, 0, 0}, {6, 12, 1}};
        },
        [](SamplerState& s) {
          s.sources[0].growth = {{0, 4, 0}, {6, 12, 1}};
        },
        [](SamplerState& s) {
          s.sources[0].growth = {{0, 6, 0}, {6, 12, 2}};
        },
        [](SamplerState& s) {
          s.sources[0].growth = {{600, 6, 100}, {606, 12, 101}};
        },
        [](SamplerState& s) {
          s.sources[0].growth = {{0, 12, 0}, {12, 12, 1}, {24, 12, 2}};
        },
    };
    for (size_t i = 0; i < mistakes.size(); ++i) {
      CAPTURE(i);
      SamplerState state = staged.state();
      mistakes[i](state);
      auto resumed = Sampler::resume(heavier, state);
      REQUIRE(!resumed.ok());
      CHECK(resumed.error().code == ErrorCode::kCorrupt);
      CHECK(!Sampler::changes(heavier, state).ok());
    }
  }

  TEST_CASE("specs that cannot be sampled are refused with the source's name") {
    const auto refused = [](const Sampler::Spec& spec) {
      auto made = Sampler::make(spec);
      REQUIRE(!made.ok());
      return made.error().message;
    };
    Sampler::Spec spec = spec_of(2);
    spec.sources[1].tokens = 8;
    CHECK(says(refused(spec), {"s1", "8 tokens", "needs 9"}));
    spec = spec_of(2);
    for (const double wrong : {-1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
      spec.sources[0].weight = wrong;
      CHECK(says(refused(spec), {"s0", "expected 0 or more"}));
    }
    for (Sampler::Source& source : spec.sources) source.weight = 0;
    CHECK(says(refused(spec), {"every data source has weight 0"}));
    CHECK(says(refused({}), {"no data sources"}));
  }

  TEST_CASE("the state's JSON reads back bit for bit and nothing else passes") {
    SamplerState state;
    state.position = 9;
    state.seed = UINT64_MAX;
    state.seq_len = 1024;
    state.base_position = 6;
    SourceState web{"w\"eb", 0, 5, 3, 70000, UINT64_MAX, 0, 1.0 / 3, {{0, 2, 0}, {6, 68, 3}}};
    SourceState old{"", 1, 2, 2, 0, 0, 0xab, 0, {}};
    SourceState code{"code", 3, 2, 1, 5000, 1, 0, 2.0 / 3, {}};
    state.sources = {web, old, code};
    const std::string text = to_json(state);
    CHECK(
        text ==
        R"({"position":9,"names":["w\"eb","","code"],"streams":[0,1,3],"taken":[5,2,2],"base":{"position":6,"taken":[3,2,1]},)"
        R"("seed":18446744073709551615,"tokens":[70000,0,5000],"content":["ffffffffffffffff",null,"0000000000000001"],)"
        R"("fingerprints":{"1":"00000000000000ab"},"seq_len":1024,"weights":[0.3333333333333333,0.0,0.6666666666666666],)"
        R"("growth":{"0":[[0,2,0],[6,68,3]]},"order_version":2})");
    auto back = sampler_state_from_json(text);
    REQUIRE(back.ok());
    CHECK(back.value() == state);

    const auto refused = [&text](std::string_view from, std::string_view to) {
      std::string changed = text;
      const size_t at = changed.find(from);
      REQUIRE(at != std::string::npos);
      changed.replace(at, from.size(), to);
      auto read = sampler_state_from_json(changed);
      REQUIRE(!read.ok());
      CHECK(read.error().code == ErrorCode::kCorrupt);
      return read.error().message;
    };
    CHECK(says(refused("\"position\":9", "\"position\":9.0"), {"position", "9.0", "integer"}));
    CHECK(says(refused("\"position\":9,", ""), {"position", "missing"}));
    CHECK(says(refused("\"position\":9", "\"position\":-3"), {"position", "-3"}));
    CHECK(says(refused("18446744073709551615", "1.8446744073709552e19"), {"seed"}));
    CHECK(says(refused("ffffffffffffffff", "fffffffffffffff"), {"content"}));
    CHECK(says(refused("ffffffffffffffff", "fffffffffffffffg"), {"content"}));
    CHECK(says(refused("ffffffffffffffff", "0000000000000000"), {"content"}));
    CHECK(says(refused("[5,2,2]", "[5,2,\"2\"]"), {"taken"}));
    CHECK(says(refused("[5,2,2]", "[5,2]"), {"taken", "2 entries", "3 sources"}));
    CHECK(says(refused("[0,1,3]", "[0,1]"), {"streams"}));
    CHECK(says(refused("[3,2,1]", "[3,2]"), {"base.taken"}));
    CHECK(says(refused("\"base\":{", "\"base\":{\"k\":1,"), {"base.k"}));
    CHECK(says(refused("\"base\":{\"position\":6,", "\"base\":{"), {"position", "missing"}));
    CHECK(says(refused("[6,68,3]", "[6,68]"), {"growth.0"}));
    CHECK(says(refused("{\"0\":[[", "{\"2\":[["), {"growth", "stream 2"}));
    CHECK(says(refused("{\"1\":\"", "{\"1\":\"x"), {"fingerprints.1"}));
    CHECK(says(refused("\"seed\"", "\"extra\":1,\"seed\""), {"unknown field \"extra\""}));
    CHECK(says(refused("1024", "0"), {"seq_len"}));
    CHECK(says(refused("\"order_version\":2", "\"order_version\":1"), {"fingerprints"}));
    CHECK(says(refused("\"order_version\":2", "\"order_version\":0"), {"order_version"}));
    CHECK(says(refused("{", "["), {"not a JSON object"}));
    CHECK(says(refused("\"position\":9,", "\"position\":9,\"skipped\":0,"), {"skipped", "0", ">= 1"}));
    for (size_t cut = 0; cut < text.size(); ++cut) CHECK(!sampler_state_from_json(text.substr(0, cut)).ok());
    state.skipped = 4;
    CHECK(says(to_json(state), {"\"position\":9,\"skipped\":4,"}));
    CHECK(sampler_state_from_json(to_json(state)).value() == state);

    std::string newer = text;
    newer.replace(newer.find("version\":2"), 10, "version\":3");
    auto read = sampler_state_from_json(newer);
    REQUIRE(!read.ok());
    CHECK(read.error().code == ErrorCode::kInvalidInput);
    CHECK(says(read.error().message, {"order_version", "is 3", "reads 1 to 2"}));
  }

  TEST_CASE("a state of version 1 is as strict") {
    const std::string text =
        R"({"position":3,"taken":[1,2],"seed":5,"fingerprints":["0000000000000000","ffffffffffffffff"],)"
        R"("seq_len":1024,"weights":[0.3333333333333333,0.6666666666666666],"order_version":1})";
    REQUIRE(sampler_state_from_json(text).ok());
    const auto refused = [&text](std::string_view from, std::string_view to) {
      std::string changed = text;
      changed.replace(changed.find(from), from.size(), to);
      auto read = sampler_state_from_json(changed);
      REQUIRE(!read.ok());
      CHECK(read.error().code == ErrorCode::kCorrupt);
      return read.error().message;
    };
    CHECK(says(refused("[1,2]", "[1]"), {"fingerprints", "2 entries"}));
    CHECK(says(refused(",0.6666666666666666", ""), {"weights", "1 entries"}));
    CHECK(says(refused("\"taken\":[1,2],", ""), {"taken", "missing"}));
    CHECK(says(refused("\"taken\"", "\"names\":[],\"taken\""), {"unknown field \"names\""}));
    for (size_t cut = 0; cut < text.size(); ++cut) CHECK(!sampler_state_from_json(text.substr(0, cut)).ok());
  }

  TEST_CASE("as many sources as may start may start again, at the greatest counters and behind a change of the blend") {
    const auto spec_of = [](int count) {
      Sampler::Spec spec;
      spec.seed = UINT64_MAX;
      spec.seq_len = 4096;
      for (int i = 0; i < count; ++i)
        spec.sources.push_back({"source-name-" + std::to_string(1000 + i), 900'000'000'000 + i, 1, 1.0 + i / 97.0,
                                [i](int64_t) -> Result<uint64_t> { return UINT64_MAX - static_cast<uint64_t>(i); }});
      return spec;
    };
    const auto starts = [&](int count) { return check_state_fits(Sampler::make(spec_of(count)).value().state()); };
    int most = 100;
    while (most < 1000 && starts(most + 1).ok()) ++most;
    CAPTURE(most);
    CHECK(most > 350);
    REQUIRE_FALSE(starts(most + 1).ok());
    CHECK(starts(most + 1).error().message.find(fmt::format("blend at most about {}", most)) != std::string::npos);
    CHECK(starts(1000).error().message.find(" too many ") != std::string::npos);

    Sampler::Spec spec = spec_of(most);
    SamplerState state = Sampler::make(spec).value().state();
    for (SourceState& source : state.sources) source.taken = 1'000'000'000, state.position += source.taken;
    REQUIRE(to_json(state).size() < kMaxStateBytes);
    CHECK(check_state_fits(state).ok());
    spec.sources[0].weight = 7;  // and with a base
    const SamplerState later = Sampler::resume(spec, state).value().state();
    CHECK(to_json(later).size() < kMaxStateBytes);
    CHECK(check_state_fits(later).ok());
  }
}
