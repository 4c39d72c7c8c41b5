// Data that changes under a run: the rules of Sampler::resume, and what Sampler::changes says of them.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "runtime/data/sampler.h"
#include "tests/runtime/data/sampler_v1_golden.h"
#include "tests/runtime/data/scratch.h"

using namespace cairn;
using namespace cairn::data;
using Kind = OrderChange::Kind;

namespace {

constexpr int64_t kLength = 8;

std::vector<int32_t> numbers(int64_t count, int32_t first) {
  std::vector<int32_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), first);
  return out;
}

/// A source of `tokens`, known by its content alone: the fingerprint is another each time.
Sampler::Source source_of(std::string name, std::vector<int32_t> tokens, double weight) {
  static uint64_t fingerprint = 0;
  auto store = std::make_shared<const MemoryTokens>(std::move(tokens));
  return {std::move(name), store->token_count(), ++fingerprint, weight,
          [store](int64_t first) { return content_hash(*store, first); }};
}

Sampler::Spec spec_of(std::vector<Sampler::Source> sources, uint64_t seed = 99, int64_t seq_len = kLength) {
  return {seed, seq_len, std::move(sources)};
}

Sampler::Spec web_and_code(double web = 70, double code = 30) {
  return spec_of({source_of("web", numbers(8001, 0), web), source_of("code", numbers(801, 100'000), code)});
}

SamplerState reread(const SamplerState& state) {
  auto read = sampler_state_from_json(to_json(state));
  REQUIRE(read.ok());
  CHECK(read.value() == state);
  return std::move(read).value();
}

Sampler resumed(const Sampler::Spec& spec, const SamplerState& state) {
  auto sampler = Sampler::resume(spec, reread(state));
  REQUIRE(sampler.ok());
  return std::move(sampler).value();
}

std::vector<OrderChange> changes(const Sampler::Spec& spec, const SamplerState& state) {
  auto found = Sampler::changes(spec, state);
  REQUIRE(found.ok());
  return std::move(found).value();
}

SamplerState state_at(const Sampler::Spec& spec, int64_t position) {
  Sampler sampler = Sampler::make(spec).value();
  sampler.advance(position);
  return sampler.state();
}

std::vector<Kind> kinds(const std::vector<OrderChange>& changes) {
  std::vector<Kind> out;
  for (const OrderChange& change : changes) out.push_back(change.kind);
  return out;
}

uint64_t hash_of(const std::vector<SampleRef>& samples, uint64_t hash) {
  for (const SampleRef& sample : samples)
    for (const auto value : {sample.position, int64_t{sample.source}, sample.k, sample.start})
      hash = mix64(hash ^ static_cast<uint64_t>(value));
  return hash;
}

/// Samples by the names of their sources.
using Named = std::tuple<int64_t, std::string, int64_t, int64_t>;
std::vector<Named> named(const Sampler::Spec& spec, const std::vector<SampleRef>& samples) {
  std::vector<Named> out;
  for (const SampleRef& sample : samples)
    out.emplace_back(sample.position, spec.sources[static_cast<size_t>(sample.source)].name, sample.k, sample.start);
  return out;
}

/// Starts of samples k, k + 1, ... of a single source, and past them.
std::vector<int64_t> starts(Sampler& sampler, int64_t count) {
  std::vector<int64_t> out;
  for (const SampleRef& sample : sampler.peek(count)) out.push_back(sample.start);
  sampler.advance(count);
  return out;
}

std::set<int64_t> unique(const std::vector<int64_t>& values) { return {values.begin(), values.end()}; }

}  // namespace

TEST_SUITE("runtime/data/order_change") {
  TEST_CASE("states of version 1 resume with the samples of the program that wrote them, and so do their successors") {
    for (const golden::Blend& blend : golden::version_1()) {
      CHECK(hash_of(Sampler::make(blend.spec).value().peek(100'000), 0) == blend.first_100000);
      for (const golden::Point& point : blend.points) {
        auto saved = sampler_state_from_json(point.state);
        REQUIRE(saved.ok());
        CHECK(changes(blend.spec, saved.value()).empty());
        const Sampler first = Sampler::resume(blend.spec, saved.value()).value();
        CHECK(first.peek(std::ssize(point.next)) == point.next);
        CHECK(resumed(blend.spec, first.state()).peek(std::ssize(point.next)) == point.next);
      }
    }
  }

  TEST_CASE("100,000 samples across resumes from version 1 and 2 are those of version 1") {
    for (const golden::Blend& blend : golden::version_1()) {
      const golden::Point& point = blend.points[1];
      auto saved = sampler_state_from_json(point.state);
      REQUIRE(saved.ok());
      Sampler sampler = Sampler::make(blend.spec).value();
      uint64_t hash = hash_of(sampler.peek(saved.value().position), 0);
      sampler = Sampler::resume(blend.spec, saved.value()).value();
      while (sampler.position() < 100'000) {
        const int64_t count = std::min<int64_t>(7919, 100'000 - sampler.position());
        hash = hash_of(sampler.peek(count), hash);
        sampler.advance(count);
        sampler = resumed(blend.spec, sampler.state());
      }
      CHECK(hash == blend.first_100000);
    }
  }

  TEST_CASE("a state of version 1 knows its sources by fingerprint, in any order") {
    golden::Blend blend = golden::version_1()[1];
    const SamplerState saved = sampler_state_from_json(blend.points[2].state).value();
    Sampler::Spec swapped = blend.spec;
    std::swap(swapped.sources[0], swapped.sources[1]);
    CHECK(changes(swapped, saved).empty());
    CHECK(named(swapped, resumed(swapped, Sampler::resume(swapped, saved).value().state()).peek(500)) ==
          named(blend.spec, Sampler::resume(blend.spec, saved).value().peek(500)));
    // One of another fingerprint alone on either side is the same source with other tokens; two are not.
    Sampler::Spec other = blend.spec;
    other.sources[1].fingerprint = 5;
    auto found = changes(other, saved);
    REQUIRE(kinds(found) == std::vector{Kind::kReplaced});
    CHECK(found[0].source == "code");
    CHECK(Sampler::resume(other, saved).value().peek(8) == blend.points[2].next);
    other.sources[0].fingerprint = 6;
    CHECK(kinds(changes(other, saved)) == std::vector{Kind::kAdded, Kind::kAdded, Kind::kRemoved, Kind::kRemoved});
    other.sources.pop_back();
    CHECK(kinds(changes(other, saved)) == std::vector{Kind::kAdded, Kind::kRemoved, Kind::kRemoved});
    // The share that may come again is known although that version did not save how many tokens there were.
    Sampler::Spec seeded = blend.spec;
    ++seeded.seed;
    found = changes(seeded, saved);
    REQUIRE(kinds(found) == std::vector{Kind::kSeed});
    CHECK(found[0].repeats > 0);
    CHECK(found[0].repeats == changes(seeded, Sampler::resume(blend.spec, saved).value().state())[0].repeats);
  }

  TEST_CASE("unchanged data gives back the state, wherever it was saved") {
    const Sampler::Spec spec = web_and_code();
    for (const int64_t position : {0, 1, 2, 333, 5000}) {
      const SamplerState state = state_at(spec, position);
      CHECK(changes(spec, state).empty());
      CHECK(resumed(spec, state).state() == state);
    }
  }

  TEST_CASE("order in the recipe, container, path and scale of the weights change nothing") {
    const Sampler::Spec spec = web_and_code();
    const SamplerState state = state_at(spec, 1000);
    const auto wanted = named(spec, resumed(spec, state).peek(2000));
    Sampler::Spec other = web_and_code(0.7, 0.3);  // other fingerprints
    std::swap(other.sources[0], other.sources[1]);
    CHECK(changes(other, state).empty());
    CHECK(named(other, resumed(other, state).peek(2000)) == wanted);
    CHECK(resumed(other, state).state() == state);
    // Renamed: known by the content, and under the new name from then on.
    other.sources[1].name = "common";
    CHECK(changes(other, state).empty());
    CHECK(resumed(other, state).state().sources[0].name == "common");
    const auto renamed = named(other, resumed(other, state).peek(2000));
    for (size_t i = 0; i < wanted.size(); ++i) CHECK(std::get<3>(renamed[i]) == std::get<3>(wanted[i]));
    // Thirds of 0.3 are not those of 3 to the last bit, yet the same.
    const Sampler::Spec thirds = web_and_code(0.1, 0.2);
    CHECK(changes(web_and_code(1, 2), state_at(thirds, 100)).empty());
    CHECK(resumed(web_and_code(1, 2), state_at(thirds, 100)).state() == state_at(thirds, 100));
  }

  TEST_CASE("a source added after 20,000 draws gets its share at once, and does not catch up") {
    Sampler::Spec spec = web_and_code();
    const SamplerState state = state_at(spec, 20'000);
    spec = web_and_code(0.5, 0.2);
    spec.sources.insert(spec.sources.begin(), source_of("books", numbers(4001, 500'000), 0.3));
    const auto found = changes(spec, state);
    REQUIRE(kinds(found) == std::vector{Kind::kAdded, Kind::kWeights});
    CHECK(found[0].source == "books");
    CHECK(says(found[0].text, {"\"books\"", "added", "weight 0.3", "sample 20000"}));
    CHECK(says(found[1].text, {"web 0.7 -> 0.5", "code 0.3 -> 0.2"}));
    CHECK(found[1].before == "web 0.7, code 0.3");
    CHECK(found[1].after == "web 0.5, code 0.2");
    Sampler sampler = resumed(spec, state);
    std::map<std::string, int64_t> counts;
    for (const auto& [position, name, k, start] : named(spec, sampler.peek(1000))) {
      if (counts[name]++ == 0) CHECK(k == (name == "web" ? 14'000 : name == "code" ? 6'000 : 0));
    }
    CHECK(counts == std::map<std::string, int64_t>{{"web", 500}, {"code", 200}, {"books", 300}});
    CHECK(sampler.state().sources[2].stream == 2);
    CHECK(sampler.state().base_position == 20'000);
    // Where the weights are the old ones beside each other, only the added one is reported.
    spec = web_and_code(0.7 * 0.7, 0.3 * 0.7);
    spec.sources.push_back(source_of("books", numbers(4001, 500'000), 0.3));
    CHECK(kinds(changes(spec, state)) == std::vector{Kind::kAdded});
  }

  TEST_CASE("ties of a stage fall to the lowest stream, in whatever order the recipe lists the sources") {
    Sampler::Spec spec = spec_of({source_of("b", numbers(81, 0), 1), source_of("a", numbers(81, 900), 1)});
    const SamplerState state = state_at(spec, 10);
    spec.sources.insert(spec.sources.begin(), source_of("c", numbers(81, 5000), 1));
    std::string first;
    for (const Named& sample : named(spec, resumed(spec, state).peek(3))) first += std::get<1>(sample);
    CHECK(first == "bac");
  }

  TEST_CASE("changed weights begin a stage; unchanged ones keep it") {
    const SamplerState state = state_at(web_and_code(70, 30), 1000);
    Sampler sampler = resumed(web_and_code(20, 80), state);
    CHECK(kinds(changes(web_and_code(20, 80), state)) == std::vector{Kind::kWeights});
    sampler.advance(500);
    CHECK(sampler.state().sources[0].taken == 700 + 100);
    CHECK(sampler.state().sources[1].taken == 300 + 400);
    CHECK(changes(web_and_code(20, 80), sampler.state()).empty());
    CHECK(resumed(web_and_code(20, 80), sampler.state()).state() == sampler.state());
  }

  TEST_CASE("a source that leaves keeps its place and resumes behind it when it is back") {
    Sampler::Spec both = web_and_code();
    const SamplerState state = state_at(both, 1000);
    Sampler::Spec web = both;
    web.sources.pop_back();
    const auto removed = changes(web, state);
    REQUIRE(kinds(removed) == std::vector{Kind::kRemoved});
    CHECK(says(removed[0].text, {"\"code\"", "removed after 300 samples"}));
    Sampler alone = resumed(web, state);
    alone.advance(100);
    CHECK(alone.state().sources[0].taken == 800);
    CHECK(alone.state().sources[1].taken == 300);
    CHECK(alone.state().sources[1].retired());
    CHECK(changes(web, alone.state()).empty());
    CHECK(resumed(web, alone.state()).state() == alone.state());
    // Another source takes a stream of its own, not that of the one that left.
    Sampler::Spec other = web;
    other.sources.push_back(source_of("books", numbers(801, 300'000), 30));
    CHECK(resumed(other, alone.state()).state().sources[2].stream == 2);

    const auto back = changes(both, alone.state());
    REQUIRE(kinds(back) == std::vector{Kind::kReturned});
    CHECK(says(back[0].text, {"\"code\"", "300 samples", "weight 0.3"}));
    // Its windows are those that would have come.
    const auto next = [](const Sampler::Spec& spec, const Sampler& sampler) {
      std::vector<int64_t> out;
      for (const Named& sample : named(spec, sampler.peek(100)))
        if (std::get<1>(sample) == "code") out.push_back(std::get<3>(sample));
      return out;
    };
    CHECK(next(both, resumed(both, alone.state())) == next(both, resumed(both, state)));
  }

  TEST_CASE("a source of weight 0 waits: nothing is drawn from it, and its first window comes with its first share") {
    const auto three = [](double web, double code, double ift) {
      Sampler::Spec spec = web_and_code(web, code);
      spec.sources.push_back(source_of("ift", numbers(801, 200'000), ift));
      return spec;
    };
    // What is drawn is what would be without it, also while it leads the list.
    Sampler::Spec first = three(70, 30, 0);
    std::rotate(first.sources.begin(), first.sources.end() - 1, first.sources.end());
    const auto drawn = [](const Sampler& sampler, int64_t count) {
      std::vector<std::pair<int64_t, int64_t>> out;
      for (const SampleRef& sample : sampler.peek(count)) out.emplace_back(sample.k, sample.start);
      return out;
    };
    const Sampler without = Sampler::make(web_and_code()).value(), with = Sampler::make(three(70, 30, 0)).value();
    CHECK(drawn(with, 2000) == drawn(without, 2000));
    for (const SampleRef& sample : Sampler::make(first).value().peek(2000)) CHECK(sample.source != 0);

    const SamplerState waits = state_at(three(70, 30, 0), 1000);
    CHECK(resumed(three(70, 30, 0), waits).state() == waits);
    CHECK(changes(three(70, 30, 0), waits).empty());
    CHECK(waits.sources[2].taken == 0);
    // Its share from here on, from its first sample on; the others as they stand.
    const std::vector<OrderChange> begins = changes(three(35, 15, 50), waits);
    CHECK(kinds(begins) == std::vector<Kind>{Kind::kReturned});
    CHECK(begins[0].text == "data source \"ift\": no longer of weight 0; weight 0.5 of the blend from sample 1000 on");
    Sampler on = resumed(three(35, 15, 50), waits);
    std::map<int32_t, std::vector<int64_t>> k;
    for (const SampleRef& sample : on.peek(1000)) k[sample.source].push_back(sample.k);
    CHECK(k[2].size() == 500);
    CHECK(k[2].front() == 0);
    CHECK(k[2].back() == 499);
    CHECK(k[0].front() == 700);
    CHECK(k[0].size() == 350);
    // And to 0 again: its place is kept.
    on.advance(1000);
    const std::vector<OrderChange> rests = changes(three(70, 30, 0), on.state());
    REQUIRE(rests.size() == 1);
    CHECK(rests[0].kind == Kind::kRemoved);
    Sampler resting = resumed(three(70, 30, 0), on.state());
    resting.advance(100);
    CHECK(resting.state().sources[2].taken == 500);
    CHECK(resumed(three(1, 1, 2), resting.state()).peek(1)[0].k == 500);
    // One that comes with weight 0 changes nothing.
    const SamplerState two = state_at(web_and_code(), 777);
    CHECK(kinds(changes(three(70, 30, 0), two)) == std::vector<Kind>{Kind::kAdded});
    CHECK(drawn(resumed(three(70, 30, 0), two), 500) == drawn(resumed(web_and_code(), two), 500));
  }

  TEST_CASE("a source that grew ends its epoch over the old windows, then all are drawn once an epoch") {
    for (const int64_t taken : {0, 1, 9, 10, 11, 25}) {
      CAPTURE(taken);
      const Sampler::Spec small = spec_of({source_of("a", numbers(81, 0), 1)});    // 10 windows
      const Sampler::Spec large = spec_of({source_of("a", numbers(205, 0), 1)});   // 25
      const Sampler::Spec larger = spec_of({source_of("a", numbers(241, 0), 1)});  // 30
      const SamplerState state = state_at(small, taken);
      const auto found = changes(large, state);
      REQUIRE(kinds(found) == std::vector{Kind::kGrown});
      CHECK(found[0].source == "a");
      CHECK(says(found[0].text, {"81 tokens", "205"}));
      Sampler sampler = resumed(large, state);
      const int64_t rest = (10 - taken % 10) % 10;
      Sampler as_before = resumed(small, state);
      CHECK(starts(sampler, rest) == starts(as_before, rest));
      for (int epoch = 0; epoch < 2; ++epoch) CHECK(unique(starts(sampler, 25)).size() == 25);
      // Again, in the middle of an epoch, and once more before that has ended.
      const auto begun = starts(sampler, 7);
      sampler = resumed(larger, sampler.state());
      CHECK(sampler.state().sources[0].growth.size() == 2);
      const Sampler::Spec largest = spec_of({source_of("a", numbers(321, 0), 1)});  // 40
      sampler = resumed(largest, sampler.state());
      auto ended = starts(sampler, 18);
      ended.insert(ended.end(), begun.begin(), begun.end());
      CHECK(unique(ended).size() == 25);
      CHECK(unique(starts(sampler, 40)).size() == 40);
      CHECK(unique(starts(sampler, 40)).size() == 40);
      CHECK(changes(largest, sampler.state()).empty());
    }
  }

  TEST_CASE("a source that grew before its first sample is as if it had always been long") {
    const Sampler::Spec large = spec_of({source_of("a", numbers(205, 0), 1)});
    const SamplerState state = resumed(large, state_at(spec_of({source_of("a", numbers(81, 0), 1)}), 0)).state();
    CHECK(state == Sampler::make(large).value().state());
    // Tokens that make no window more change nothing that is drawn.
    const Sampler::Spec little = spec_of({source_of("a", numbers(84, 0), 1)});
    const SamplerState later = state_at(spec_of({source_of("a", numbers(81, 0), 1)}), 33);
    CHECK(kinds(changes(little, later)) == std::vector{Kind::kGrown});
    CHECK(resumed(little, later).state().sources[0].growth.empty());
    CHECK(resumed(little, later).state() == state_at(little, 33));
  }

  TEST_CASE("a source limited to the tokens that it had is the one before it grew, from scratch") {
    const SamplerState state = state_at(spec_of({source_of("a", numbers(81, 0), 1)}), 5);
    // numbers(81, 0) stands for a file of 205 tokens with tokens = 81: content is of the first 81 either way.
    CHECK(content_hash(MemoryTokens(numbers(205, 0)), 81).value() == state.sources[0].content);
  }

  TEST_CASE("a source that grew under another name is known by the tokens that it had") {
    Sampler::Spec spec = web_and_code();
    const SamplerState state = state_at(spec, 100);
    spec.sources[0] = source_of("web2", numbers(9001, 0), 70);
    const auto found = changes(spec, state);
    REQUIRE(kinds(found) == std::vector{Kind::kGrown});
    CHECK(found[0].source == "web2");
    // One that has all of its tokens comes before one that grew from them.
    const SamplerState nested =
        state_at(spec_of({source_of("long", numbers(801, 0), 1), source_of("short", numbers(401, 0), 1)}), 100);
    for (const bool swapped : {false, true}) {
      Sampler::Spec renamed = spec_of({source_of("a", numbers(801, 0), 1), source_of("b", numbers(401, 0), 1)});
      if (swapped) std::swap(renamed.sources[0], renamed.sources[1]);
      CHECK(changes(renamed, nested).empty());
    }
  }

  TEST_CASE("the source that was drawn from is matched when two have the same tokens and one is renamed") {
    for (const int64_t stays : {0, 1}) {
      CAPTURE(stays);
      Sampler::Spec spec = spec_of({source_of("a", numbers(801, 0), 1), source_of("b", numbers(801, 0), 1)});
      const SamplerState both = state_at(spec, 30);
      spec.sources = {spec.sources[static_cast<size_t>(stays)]};
      const SamplerState one = resumed(spec, both).state();
      spec.sources[0].name = "c";
      CHECK(changes(spec, one).empty());
    }
  }

  TEST_CASE("a source of other tokens goes on at its sample number, and the share that may repeat is told") {
    const Sampler::Spec spec = spec_of({source_of("a", numbers(81, 0), 1)});
    const SamplerState state = state_at(spec, 14);  // 4 of the 10 windows of its second epoch
    for (const auto& [tokens, share] :
         {std::pair(numbers(81, 7), 0.4), std::pair(numbers(61, 0), 0.4), std::pair(numbers(161, 7), 0.2)}) {
      CAPTURE(tokens.size());
      const Sampler::Spec other = spec_of({source_of("a", tokens, 1)});
      const auto found = changes(other, state);
      REQUIRE(kinds(found) == std::vector{Kind::kReplaced});
      CHECK(found[0].source == "a");
      CHECK(found[0].repeats == doctest::Approx(share));
      CHECK(says(found[0].text, {"\"a\"", "sample 14", share == 0.4 ? "40 %" : "20 %"}));
      // As a run that had the new tokens from the start draws its samples from there.
      CHECK(resumed(other, state).peek(100) == resumed(other, state_at(other, 14)).peek(100));
      CHECK(changes(other, resumed(other, state).state()).empty());
      // Also where the old ones had grown, and the epoch under way was to end over fewer windows.
      const SamplerState grown = resumed(spec_of({source_of("a", numbers(205, 0), 1)}), state).state();
      REQUIRE(grown.sources[0].growth.size() == 2);
      CHECK(resumed(other, grown).peek(100) == resumed(other, state_at(other, 14)).peek(100));
    }
  }

  TEST_CASE("another seed of the data gives other windows for the same sample numbers") {
    Sampler::Spec spec = web_and_code();
    const SamplerState state = state_at(spec, 100);
    spec.seed = 7;
    const auto found = changes(spec, state);
    REQUIRE(kinds(found) == std::vector{Kind::kSeed});
    CHECK(found[0].before == "99");
    CHECK(found[0].after == "7");
    CHECK(found[0].repeats == doctest::Approx(0.7 * 70 / 1000 + 0.3 * 30 / 100));
    CHECK(says(found[0].text, {"99 -> 7", "sample 100", "14 %"}));
    CHECK(resumed(spec, state).peek(100) == resumed(spec, state_at(spec, 100)).peek(100));
  }

  TEST_CASE("another sequence length keeps the consumed tokens, rounded up to windows") {
    const Sampler::Spec spec = web_and_code();
    const SamplerState state = state_at(spec, 1001);  // 701 and 300
    for (const int64_t length : {3, 5, 16, 64}) {
      CAPTURE(length);
      Sampler::Spec other = spec;
      other.seq_len = length;
      const auto found = changes(other, state);
      REQUIRE(kinds(found) == std::vector{Kind::kSeqLen});
      CHECK(says(found[0].text, {"8 -> " + std::to_string(length)}));
      Sampler sampler = resumed(other, state);
      CHECK(sampler.position() == 1001);
      CHECK(sampler.state().sources[0].taken == (701 * 8 + length - 1) / length);
      CHECK(sampler.state().sources[1].taken == (300 * 8 + length - 1) / length);
      for (const SampleRef& sample : sampler.peek(500))
        CHECK(sample.start + length < other.sources[static_cast<size_t>(sample.source)].tokens);
      sampler.advance(100);
      CHECK(sampler.state().sources[0].taken - sampler.state().sources[0].base_taken == 70);
      CHECK(changes(other, sampler.state()).empty());
    }
  }

  TEST_CASE("changes of data sources are all reported at once, and sources shorter than a longer window do no harm") {
    const SamplerState state = state_at(web_and_code(), 1000);
    Sampler::Spec spec = spec_of({source_of("books", numbers(4001, 500'000), 1), source_of("web", numbers(9001, 0), 1)},
                                 5, 1000);  // "code" has 801 tokens
    CHECK(kinds(changes(spec, state)) ==
          std::vector{Kind::kSeed, Kind::kSeqLen, Kind::kAdded, Kind::kGrown, Kind::kRemoved});
    const Sampler longer = resumed(spec, state);
    CHECK(changes(spec, longer.state()).empty());
    spec.sources.push_back(source_of("code", numbers(1601, 100'000), 1));
    CHECK(kinds(changes(spec, longer.state())) == std::vector{Kind::kReturned, Kind::kGrown});
    CHECK(changes(spec, resumed(spec, longer.state()).state()).empty());
  }

  TEST_CASE("tokens that cannot be read are an error that names the source") {
    Sampler::Spec spec = web_and_code();
    const SamplerState state = state_at(spec, 10);
    spec.sources[1].content = [](int64_t) -> Result<uint64_t> { return Error{ErrorCode::kCorrupt, "token 5 is bad"}; };
    for (const auto& error :
         {Sampler::make(spec).error(), Sampler::changes(spec, state).error(), Sampler::resume(spec, state).error()}) {
      CHECK(error.code == ErrorCode::kCorrupt);
      CHECK(says(error.message, {"data source code", "token 5 is bad"}));
    }
  }

  TEST_CASE("resumes between changes of data sources change nothing, and no window comes twice in an epoch") {
    struct Held {
      std::string name;
      int64_t tokens = 0;
      int32_t first = 0;
      double weight = 1;
      bool present = true;
    };
    struct Epoch {
      int64_t windows = 0, drawn = 0;
      bool mixed = false;  // the seed changed in it
      std::set<int64_t> starts;
    };
    for (uint32_t life = 0; life < 60; ++life) {
      CAPTURE(life);
      std::mt19937 random(life);
      const auto below = [&random](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
      std::vector<Held> held;
      const auto add = [&] {
        const auto at = static_cast<int32_t>(held.size());
        held.push_back({"s" + std::to_string(at), 9 + below(400), at * 1'000'000, 0.1 + 0.1 * below(30)});
      };
      uint64_t seed = life;
      add();
      add();
      const auto spec_now = [&](bool shuffled) {
        std::vector<Sampler::Source> sources;
        for (const Held& one : held)
          if (one.present) sources.push_back(source_of(one.name, numbers(one.tokens, one.first), one.weight));
        if (shuffled) std::shuffle(sources.begin(), sources.end(), random);
        return spec_of(sources, seed);
      };
      Sampler::Spec spec = spec_now(false), other_spec = spec;
      Sampler straight = Sampler::make(spec).value(), often = straight;
      std::map<std::string, Epoch> epochs;
      for (int change = 0; change < 12; ++change) {
        for (int64_t left = below(300); left > 0;) {
          const int64_t count = std::min<int64_t>(left, 1 + below(5));
          const auto samples = named(spec, straight.peek(count));
          REQUIRE(samples == named(other_spec, often.peek(count)));
          straight.advance(count);
          often.advance(count);
          other_spec = spec_now(true);
          REQUIRE(changes(other_spec, often.state()).empty());
          often = resumed(other_spec, often.state());
          left -= count;
          for (const auto& [position, name, k, start] : samples) {
            Epoch& epoch = epochs[name];
            const auto one = std::find_if(held.begin(), held.end(), [&](const Held& h) { return h.name == name; });
            if (epoch.drawn == 0) epoch.windows = window_count(one->tokens, kLength);
            if (!epoch.mixed) CHECK(epoch.starts.insert(start).second);
            CHECK(start / kLength < epoch.windows);
            if (++epoch.drawn == epoch.windows) epoch = {};
          }
        }
        Held& one = held[static_cast<size_t>(below(std::ssize(held)))];
        const auto present = std::count_if(held.begin(), held.end(), [](const Held& h) { return h.present; });
        switch (below(6)) {
          case 0:
          case 1:
            one.tokens += 1 + below(200);
            break;
          case 2:
            if (held.size() < 6) add();
            break;
          case 3:
            if (present > 1 || !one.present) one.present = !one.present;
            break;
          case 4:
            one.weight = 0.1 + 0.1 * below(30);
            break;
          default:
            ++seed;
            for (auto& [name, epoch] : epochs) epoch.mixed = epoch.drawn > 0;
        }
        spec = spec_now(false);
        straight = resumed(spec, straight.state());
        other_spec = spec_now(true);
        // An added source is alone, so the recipe's order gives it the same stream.
        often = resumed(other_spec, often.state());
        REQUIRE(often.state() == straight.state());
      }
    }
  }
}
