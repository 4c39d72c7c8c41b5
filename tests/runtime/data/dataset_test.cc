#include "runtime/data/dataset.h"

#include <doctest/doctest.h>

#include <set>

#include "tests/runtime/data/scratch.h"

using namespace cairn;
using namespace cairn::data;

namespace {

// Two token files whose tokens are their own positions (+ 30000 in the second), so that a sample tells where it is
// from.
DataConfig write_two_sources(const TempDir& dir) {
  DataConfig config;
  for (int source = 0; source < 2; ++source) {
    std::vector<uint16_t> tokens(source == 0 ? 1000u : 600u);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i + (source == 0 ? 0 : 30000));
    const std::string path = dir / (source == 0 ? "a.bin" : "b.bin");
    write_file(path, bytes_of(tokens));
    DataSource one;
    one.kind = DataSource::Kind::kTokenFile;
    one.path = path;
    one.dtype = "uint16";
    one.weight = source == 0 ? 3 : 1;
    one.split = {90, 10};
    config.sources.push_back(one);
  }
  return config;
}

Sampler::Spec spec_of(const Dataset& dataset, const DataConfig& config) {
  Recipe recipe;
  recipe.seed = 5;
  recipe.model.context = 16;
  recipe.data = config;
  return sampler_spec(dataset, recipe).value();
}

}  // namespace

TEST_SUITE("runtime/data/dataset") {
  TEST_CASE("micro-batches hold the tokens of their samples, targets one further") {
    const TempDir dir;
    const DataConfig config = write_two_sources(dir);
    auto opened = open_dataset(config, 65000, 16);
    REQUIRE(opened.ok());
    const Dataset& dataset = opened.value();
    CHECK(dataset.sources[0].name == "a");
    const Sampler sampler = Sampler::make(spec_of(dataset, config)).value();
    const auto step = sampler.peek(24);
    MicroBatch batch;
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t a = 0; a < 3; ++a) {
        const auto mine = micro_batch_samples(step, 2, r, 4, a);
        REQUIRE(load_samples(dataset, DataPart::kTrain, mine, 16, &batch).ok());
        REQUIRE(batch.inputs.size() == 64);
        REQUIRE(batch.targets.size() == 64);
        for (int64_t i = 0; i < 4; ++i) {
          const SampleRef& sample = mine[static_cast<size_t>(i)];
          CHECK(batch.sources[static_cast<size_t>(i)] == sample.source);
          CHECK(sample.start + 16 < (sample.source == 0 ? 900 : 540));  // inside the train part
          for (int64_t j = 0; j < 16; ++j) {
            const auto at = static_cast<size_t>(i * 16 + j);
            CHECK(batch.inputs[at] == sample.start + j + (sample.source == 0 ? 0 : 30000));
            CHECK(batch.targets[at] == batch.inputs[at] + 1);
          }
        }
      }
    }
  }

  TEST_CASE("an epoch is a pass over the training part of the one source that is drawn from") {
    const TempDir dir;
    DataConfig config = write_two_sources(dir);
    const Result<int64_t> several = epoch_samples(config, 65000, 16);
    REQUIRE_FALSE(several.ok());
    CHECK(several.error().message.find("an epoch is a pass over one source") != std::string::npos);
    config.sources[0].weight = 0;
    CHECK(epoch_samples(config, 65000, 16).value() == (540 - 1) / 16);
    config.sources[1].tokens = 33;
    CHECK(epoch_samples(config, 65000, 16).value() == 2);
    config.sources[1].path = dir / "none.bin";
    CHECK(epoch_samples(config, 65000, 16).error().message.find("none.bin") != std::string::npos);
  }

  TEST_CASE("a sequence length of one token is a sample too") {
    const TempDir dir;
    const DataConfig config = write_two_sources(dir);
    const Dataset dataset = open_dataset(config, 0, 16).value();
    const std::vector<SampleRef> samples = {{0, 0, 0, 7}};
    MicroBatch batch;
    REQUIRE(load_samples(dataset, DataPart::kTrain, samples, 1, &batch).ok());
    CHECK(batch.inputs == std::vector<int32_t>{7});
    CHECK(batch.targets == std::vector<int32_t>{8});
  }

  TEST_CASE("validation batches are fixed, disjoint, and lie in the validation part") {
    const TempDir dir;
    const DataConfig config = write_two_sources(dir);
    const Dataset dataset = open_dataset(config, 0, 16).value();
    const auto set = ValidationSet::make(dataset, 8, 3, 100).value();
    // 100 tokens make 12 windows of 8, 60 make 7: 19 in all, 6 whole batches of 3.
    CHECK(set.batches() == 6);
    std::set<std::pair<int32_t, int64_t>> seen;
    MicroBatch batch;
    for (int64_t b = 0; b < set.batches(); ++b) {
      REQUIRE(load_samples(dataset, DataPart::kValid, set.batch(b), 8, &batch).ok());
      for (const SampleRef& sample : set.batch(b)) CHECK(seen.insert({sample.source, sample.start}).second);
      for (size_t i = 0; i < 3; ++i) {
        const int32_t base = batch.sources[i] == 0 ? 900 : 30000 + 540;
        CHECK(batch.inputs[i * 8] == base + set.batch(b)[i].start);
      }
    }
    // Fewer batches are the first of more.
    const auto fewer = ValidationSet::make(dataset, 8, 3, 2).value();
    CHECK(fewer.batches() == 2);
    for (size_t i = 0; i < 3; ++i) CHECK(fewer.batch(1)[i] == set.batch(1)[i]);
    CHECK(ValidationSet::make(dataset, 8, 3, 0).value().batches() == 0);
    // Of a source of weight 0 there are none.
    DataConfig waits = config;
    waits.sources[0].weight = 0;
    const auto of_one = ValidationSet::make(open_dataset(waits, 0, 16).value(), 8, 3, 100).value();
    CHECK(of_one.batches() == 2);
    for (int64_t b = 0; b < 2; ++b) CHECK(of_one.batch(b)[0].source == 1);

    auto too_few = ValidationSet::make(dataset, 8, 20, 1);
    REQUIRE(!too_few.ok());
    CHECK(says(too_few.error().message, {"19 windows", "one batch needs 20"}));
  }

  TEST_CASE("a validation file of its own, and mistakes in the list of sources") {
    const TempDir dir;
    DataConfig config = write_two_sources(dir);
    config.sources[0].split.clear();
    config.sources[0].valid_path = config.sources[1].path;
    config.sources.pop_back();
    const Dataset dataset = open_dataset(config, 0, 16).value();
    CHECK(dataset.sources[0].train->token_count() == 1000);
    CHECK(dataset.sources[0].valid->token_count() == 600);

    config.sources[0].split = {9, 1};
    auto both = open_dataset(config, 0, 16);
    REQUIRE(!both.ok());
    CHECK(says(both.error().message, {"data source", "a.bin", "choose one"}));

    config.sources[0].split.clear();
    config.sources.push_back(config.sources[0]);
    auto twice = open_dataset(config, 0, 16);
    REQUIRE(!twice.ok());
    CHECK(says(twice.error().message, {"two data sources are named \"a\""}));

    config.sources[1].path = dir / "nowhere.bin";
    CHECK(says(open_dataset(config, 0, 16).error().message, {"nowhere.bin", "No such file"}));
  }

  TEST_CASE("tokens limits the training part to its first ones, which are those of a source before it grew") {
    const TempDir dir;
    DataConfig config = write_two_sources(dir);
    const Dataset all = open_dataset(config, 0, 16).value();
    config.sources[0].tokens = 450;
    const Dataset limited = open_dataset(config, 0, 16).value();
    CHECK(limited.sources[0].train->token_count() == 450);
    CHECK(limited.sources[0].valid->token_count() == 100);
    CHECK(limited.sources[1].train->token_count() == 540);
    int32_t last = 0;
    REQUIRE(limited.sources[0].train->read(449, 1, &last).ok());
    CHECK(last == 449);

    // A run of the first 450 tokens, and then of all.
    const Sampler::Spec before = spec_of(limited, config), now = spec_of(all, config);
    Sampler sampler = Sampler::make(before).value();
    sampler.advance(30);
    const auto changes = Sampler::changes(now, sampler.state()).value();
    REQUIRE(changes.size() == 1);
    CHECK(changes[0].kind == OrderChange::Kind::kGrown);
    CHECK(says(changes[0].text, {"\"a\"", "450", "900"}));
    CHECK(Sampler::changes(before, sampler.state()).value().empty());

    config.sources[0].tokens = 900;
    CHECK(open_dataset(config, 0, 16).value().sources[0].train->token_count() == 900);
    config.sources[0].tokens = 901;
    CHECK(says(open_dataset(config, 0, 16).error().message, {"data source", "a.bin", "tokens is 901", "has 900"}));
  }

  TEST_CASE("a file that grows, with a split too, is the source that it was; its container does not count") {
    const TempDir dir;
    DataConfig config = write_two_sources(dir);
    const auto changes = [&](const SamplerState& state) {
      const Dataset dataset = open_dataset(config, 0, 16).value();
      std::vector<std::string> out;
      for (const OrderChange& change : Sampler::changes(spec_of(dataset, config), state).value())
        out.push_back(change.text);
      return out;
    };
    const Dataset dataset = open_dataset(config, 0, 16).value();
    Sampler sampler = Sampler::make(spec_of(dataset, config)).value();
    sampler.advance(50);
    std::vector<uint16_t> tokens(1000);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i);
    write_file(config.sources[0].path, bytes_of(std::vector<uint32_t>(tokens.begin(), tokens.end())));
    config.sources[0].dtype = "uint32";
    CHECK(changes(sampler.state()).empty());
    config.sources[0].dtype = "uint16";
    tokens.resize(2000, 7);
    write_file(config.sources[0].path, bytes_of(tokens));
    auto found = changes(sampler.state());
    REQUIRE(found.size() == 1);
    CHECK(says(found[0], {"\"a\"", "grew from 900 tokens to 1800"}));
    tokens[3] = 9;
    write_file(config.sources[0].path, bytes_of(tokens));
    found = changes(sampler.state());
    REQUIRE(found.size() == 1);
    CHECK(says(found[0], {"\"a\"", "not those that it began with"}));
    // A greater training part is a longer beginning, a smaller one is another source.
    write_two_sources(dir);
    config.sources[0].split = {99, 1};
    CHECK(says(changes(sampler.state()).at(0), {"grew from 900 tokens to 990"}));
    config.sources[0].split = {50, 50};
    CHECK(says(changes(sampler.state()).at(0), {"not those that it began with", "900 tokens, 500 now"}));
  }

  TEST_CASE("the recipe's seed is used unless the data has its own") {
    const TempDir dir;
    DataConfig config = write_two_sources(dir);
    const Dataset dataset = open_dataset(config, 0, 16).value();
    CHECK(spec_of(dataset, config).seed == 5);
    config.seed = 6;
    CHECK(spec_of(dataset, config).seed == 6);
  }
}
