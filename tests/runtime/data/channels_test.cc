// The channel of each conversation: written with a set, read with it, and by name in a training's micro-batches.
#include "runtime/data/channels.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "runtime/data/dataset.h"
#include "runtime/data/merge.h"
#include "runtime/data/tokenize.h"
#include "tests/runtime/data/scratch.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::data;

namespace {

using Names = std::vector<std::string>;

TokenizeArgs chat_args(const TempDir& dir, const std::string& rows, const std::string& out) {
  write_file(dir / (out + ".jsonl"), rows);
  TokenizeArgs args;
  args.inputs = {dir / (out + ".jsonl")};
  args.output_prefix = dir / out;
  args.tokenizer.kind = TokenizerConfig::Kind::kBytes;
  args.separator = DocumentSeparator::kJsonLine;
  args.chat = "plain";
  args.channel_key = "topic";
  args.overwrite = true;
  return args;
}

std::string row_of(const std::string& topic, const std::string& answer) {
  return nlohmann::json{{"prompt", "q"}, {"completion", answer}, {"topic", topic}}.dump() + "\n";
}

/// The channel of each document, by name.
Names channels_of(const std::string& prefix) {
  const auto pair = open_megatron(prefix);
  REQUIRE_OK(pair);
  const auto found = DocumentChannels::open(prefix, pair.value()->sequence_count(), pair.value()->token_count());
  REQUIRE_OK(found);
  REQUIRE(found.value());
  Names out;
  for (const uint16_t channel : found.value()->of_document) out.push_back(found.value()->names[channel]);
  return out;
}

DataSource instruct(const std::string& prefix, const std::string& name) {
  DataSource out;
  out.kind = DataSource::Kind::kInstruct;
  out.name = name;
  out.path = prefix;
  out.split = {1.0};
  return out;
}

}  // namespace

TEST_SUITE("runtime/data/channels") {
  TEST_CASE("a set knows each document's channel, the same for any number of threads") {
    const TempDir dir;
    std::string rows;
    Names wanted;
    for (int k = 0; k < 2000; ++k) {
      wanted.push_back(k % 5 == 0 ? "math" : k % 3 == 0 ? "Flüsse" : "a \"quoted\" one");
      rows += row_of(wanted.back(), std::string(k % 50 + 1, 'a'));
    }
    TokenizeArgs args = chat_args(dir, rows, "one");
    REQUIRE_OK(tokenize_file(args));
    CHECK(channels_of(dir / "one") == wanted);
    args = chat_args(dir, rows, "many");
    args.threads = 3;
    REQUIRE_OK(tokenize_file(args));
    CHECK(read_file(dir / "one.channel") == read_file(dir / "many.channel"));
    args.channel_key.clear();  // the next set of this name has none
    REQUIRE_OK(tokenize_file(args));
    const auto none = DocumentChannels::open(dir / "many", 2000, 1);
    REQUIRE_OK(none);
    CHECK(!none.value());
  }

  TEST_CASE("a row without a channel, and one channel too many, are refused by file and line") {
    const TempDir dir;
    const auto said = [&](const std::string& rows) {
      const auto made = tokenize_file(chat_args(dir, rows, "bad"));
      return made.ok() ? "" : made.error().message;
    };
    const std::string good = row_of("a", "x");
    CHECK(says(said(good + "{\"prompt\": \"q\", \"completion\": \"x\"}\n"), {"bad.jsonl:2", "topic is null", "text"}));
    CHECK(says(said(good + row_of("", "x")), {"bad.jsonl:2", "topic has 0 bytes", "1 to 64"}));
    CHECK(says(said(good + row_of(std::string(65, 'a'), "x")), {"bad.jsonl:2", "topic has 65 bytes"}));
    std::string many;
    for (int k = 0; k < 65; ++k) many += row_of(fmt::format("topic {}", k), "x");
    CHECK(says(said(many), {"bad.jsonl:65", "\"topic 64\" is channel 65", "at most 64"}));
    CHECK(names_in(dir).size() == 1);  // the rows: no set, no temporary file
  }

  TEST_CASE("merged sets keep the names, whatever their numbers were") {
    const TempDir dir;
    REQUIRE_OK(tokenize_file(chat_args(dir, row_of("a", "x") + row_of("b", "x"), "one")));
    REQUIRE_OK(tokenize_file(chat_args(dir, row_of("b", "x") + row_of("c", "x") + row_of("a", "x"), "two")));
    REQUIRE_OK(merge_sets({dir / "one", dir / "two"}, dir / "both", false));
    CHECK(channels_of(dir / "both") == Names{"a", "b", "b", "c", "a"});
    TokenizeArgs args = chat_args(dir, row_of("a", "x"), "three");
    args.channel_key.clear();
    REQUIRE_OK(tokenize_file(args));
    CHECK(says(merge_sets({dir / "one", dir / "three"}, dir / "no", false).error().message,
               {"one.channel names channels", "no such file"}));
  }

  TEST_CASE("each row of a packed sample has its document's channel, by its name over all sources") {
    const TempDir dir;
    REQUIRE_OK(tokenize_file(chat_args(dir, row_of("a", "xxxx") + row_of("b", "yyy"), "one")));
    REQUIRE_OK(tokenize_file(chat_args(dir, row_of("c", "zz") + row_of("b", "z"), "two")));
    DataConfig config;
    config.sources = {instruct(dir / "one", "one"), instruct(dir / "two", "two")};
    const auto opened = open_dataset(config, 257, 16);
    REQUIRE_OK(opened);
    CHECK(opened.value().channels == Names{"a", "b", "c"});
    const std::vector<SampleRef> samples = {{.position = 0, .source = 1}, {.position = 1, .source = 0}};
    MicroBatch batch;
    REQUIRE_OK(load_samples(opened.value(), DataPart::kTrain, samples, 16, &batch));
    // q zz end, q z end, fill; then q xxxx end, q yyy end, fill.
    CHECK(batch.channels == std::vector<int32_t>{2, 2, 2, 2, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                                 0, 0, 0, 0, 0, 0, 1, 1,  1,  1,  1,  -1, -1, -1, -1, -1});
  }

  TEST_CASE("channels of another pair, and damaged ones, are refused") {
    const TempDir dir;
    ChannelWriter writer;
    for (int k = 0; k < 10; ++k) REQUIRE_OK(writer.add_document(k % 3 == 0 ? "math" : "x"));
    REQUIRE_OK(writer.publish(dir / "set", 100));
    REQUIRE_OK(DocumentChannels::open(dir / "set", 10, 100));
    CHECK(
        says(DocumentChannels::open(dir / "set", 10, 99).error().message, {"100 tokens in 10 documents", "99 in 10"}));
    const std::string good = read_file(dir / "set.channel");
    for (size_t at = 0; at < good.size(); ++at) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 4);
      write_file(dir / "set.channel", bad);
      CHECK_MESSAGE(!DocumentChannels::open(dir / "set", 10, 100).ok(), at);
    }
    for (size_t size = 0; size < good.size(); ++size) {
      write_file(dir / "set.channel", good.substr(0, size));
      CHECK_MESSAGE(!DocumentChannels::open(dir / "set", 10, 100).ok(), size);
    }
  }
}
