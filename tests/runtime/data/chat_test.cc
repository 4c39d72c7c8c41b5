// Instruction data: formats, rows, what counts, and the set that comes of them.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "runtime/data/chat_encode.h"
#include "runtime/data/chat_format.h"
#include "runtime/data/chat_rows.h"
#include "runtime/data/loss_spans.h"
#include "runtime/data/tokenize.h"
#include "runtime/text/tokenizer.h"
#include "tests/runtime/data/scratch.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::data;
using nlohmann::json;

namespace {

const std::string kGolden = CAIRN_SOURCE_DIR "/tests/golden/";
const TokenizerConfig kBytes{TokenizerConfig::Kind::kBytes, ""};

/// tests/support/chat_model.py makes the same.
std::unique_ptr<text::Tokenizer> with_specials(const std::string& name, const json& expected) {
  json spec = json::parse(read_file(kGolden + "tokenizers/" + name + ".json"));
  int64_t known = 0;
  for (const auto& [token, id] : spec["model"]["vocab"].items()) known = std::max(known, id.get<int64_t>());
  const auto has = [&](const json& content) {
    return std::ranges::any_of(spec["added_tokens"], [&](const json& token) { return token["content"] == content; });
  };
  for (const json& token : spec["added_tokens"]) known = std::max(known, token["id"].get<int64_t>());
  for (const json& content : expected["specials"]) {
    if (has(content)) continue;
    spec["added_tokens"].push_back({{"id", ++known}, {"content", content}, {"normalized", false}, {"special", true}});
  }
  text::BesideFiles beside;
  beside.special_tokens_map = json{{"eos_token", expected["eos"]}}.dump();
  auto made = text::make_hf_tokenizer(spec.dump(), beside);
  REQUIRE_OK(made);
  return std::move(made).value();
}

std::unique_ptr<text::Tokenizer> bytes() {
  auto made = text::make_tokenizer(kBytes);
  REQUIRE_OK(made);
  return std::move(made).value();
}

std::string problem(const std::string& row, const std::string& format = "plain",
                    ContentSpecials specials = ContentSpecials::kRefuse) {
  const auto tokenizer = bytes();
  const auto made = chat_format(format, *tokenizer);
  REQUIRE_OK(made);
  const auto encoded = ChatEncoder(made.value(), *tokenizer, specials).encode(row);
  return encoded.ok() ? "" : encoded.error().message;
}

std::vector<std::pair<uint32_t, uint32_t>> pairs(const std::vector<LossSpan>& spans) {
  std::vector<std::pair<uint32_t, uint32_t>> out;
  for (const LossSpan& span : spans) out.emplace_back(span.from, span.to);
  return out;
}

}  // namespace

TEST_SUITE("runtime/data/chat") {
  TEST_CASE("ids and what counts, as transformers has them: row forms and templates, three tokenizers") {
    const json expected = json::parse(read_file(kGolden + "chat/expected.json"));
    const TempDir dir;
    write_file(dir / "brackets.json", expected["brackets"].dump());
    REQUIRE(expected["cases"].size() == 36);
    std::map<std::string, std::unique_ptr<text::Tokenizer>> tokenizers;
    for (const json& one : expected["cases"]) {
      const auto name = one["tokenizer"].get<std::string>(), form = one["format"].get<std::string>();
      CAPTURE(name);
      CAPTURE(one["case"].get<std::string>());
      if (!tokenizers.contains(name)) tokenizers[name] = with_specials(name, expected);
      const text::Tokenizer& tokenizer = *tokenizers[name];
      const auto format = chat_format(form == "brackets" ? std::string(dir / "brackets.json") : form, tokenizer);
      REQUIRE_OK(format);
      const auto document = ChatEncoder(format.value(), tokenizer, ContentSpecials::kRefuse).encode(one["row"].dump());
      REQUIRE_OK(document);
      CHECK(document.value().ids == one["ids"].get<std::vector<int32_t>>());
      CHECK(pairs(document.value().spans) == one["loss"].get<std::vector<std::pair<uint32_t, uint32_t>>>());
      CHECK(!document.value().open);
    }
  }

  TEST_CASE("turns that are not to be learnt do not count, and adjoining answers are one span") {
    const auto tokenizer = bytes();
    const ChatFormat chatml = chat_format("chatml", *tokenizer).value();
    const ChatEncoder encoder(chatml, *tokenizer, ContentSpecials::kRefuse);
    const std::string two =
        R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc", "train": false},
            {"role": "user", "content": "d"}, {"role": "assistant", "content": "ef", "weight": 1}]})";
    const auto document = encoder.encode(two);
    REQUIRE_OK(document);
    const std::string text(document.value().ids.begin(), document.value().ids.end());
    const auto at = static_cast<uint32_t>(text.find("ef"));
    CHECK(pairs(document.value().spans) == std::vector<std::pair<uint32_t, uint32_t>>{{at, at + 2}});
    CHECK(document.value().open);  // bytes have no special token for <|im_end|>
    CHECK(problem(
              R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]})",
              "chatml")
              .find("no answer counts") != std::string::npos);
  }

  TEST_CASE("a text counts whole, ids count by their spans") {
    const auto tokenizer = bytes();
    const ChatFormat plain = chat_format("plain", *tokenizer).value();
    const ChatEncoder encoder(plain, *tokenizer, ContentSpecials::kRefuse);
    const auto text = encoder.encode(R"({"text": "abc"})");
    REQUIRE_OK(text);
    CHECK(text.value().ids == std::vector<int32_t>{'a', 'b', 'c', 0});
    CHECK(pairs(text.value().spans) == std::vector<std::pair<uint32_t, uint32_t>>{{0, 4}});
    const auto ids = encoder.encode(R"({"ids": [5, 6, 7, 8], "loss": [[1, 2], [3, 4]]})");
    REQUIRE_OK(ids);
    CHECK(ids.value().ids == std::vector<int32_t>{5, 6, 7, 8});
    CHECK(pairs(ids.value().spans) == std::vector<std::pair<uint32_t, uint32_t>>{{1, 2}, {3, 4}});
  }

  TEST_CASE("a row that is none is named with what was found and expected") {
    struct Bad {
      const char* row;
      std::vector<std::string_view> parts;
      const char* format = "chatml";
    };
    const std::vector<Bad> kBad = {
        {R"([1])", {"an array", "expected a JSON object"}},
        {R"({"body": "x", "id": 1})", {"found \"body\", \"id\"", "expected messages, conversations"}},
        {R"({"messages": {}})", {"messages is an object, expected a list"}},
        {R"({"messages": []})", {"has no turn"}},
        {R"({"messages": ["x"]})", {"messages[0] is a string"}},
        {R"({"messages": [{"role": "user", "content": ["x"]}]})", {"messages[0].content is a list of parts"}},
        {R"({"messages": [{"role": "user", "content": null}]})", {"messages[0].content is null"}},
        {R"({"messages": [{"role": "wizard", "content": "x"}, {"role": "assistant", "content": "y"}]})",
         {"joins no \"begin wizard\"", "\"begin user\""}},
        {R"({"messages": [{"role": "a b", "content": "x"}]})", {"messages[0].role is \"a b\""}},
        {R"({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}]})",
         {"turn 2", "empty answer"}},
        {R"({"messages": [{"role": "user", "content": "x"}]})", {"no answer counts"}},
        {R"({"messages": [{"role": "assistant", "content": "x", "train": 1}]})", {"messages[0].train is a number"}},
        {R"({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]})", {"weight is 0.5", "0 or 1"}},
        {R"({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]})", {"tool_calls", "\"ids\""}},
        {R"({"messages": [{"role": "assistant", "content": "x"}], "tools": [{}]})", {"tools"}},
        {R"({"conversations": [{"from": "bard", "value": "x"}]})", {"from is \"bard\"", "human, gpt or system"}},
        {R"({"prompt": "x", "response": 3})", {"response is a number, expected a text"}},
        {R"({"instruction": "x", "output": "y", "history": [["a", "b"]]})", {"history"}},
        {R"({"chosen": "a", "rejected": "b"})", {"preferences"}},
        {R"({"system": "a", "messages": [{"role": "system", "content": "b"}, {"role": "assistant", "content": "c"}]})",
         {"system stands beside"}},
        {R"({"prompt": "\ud800", "response": "x"})", {"surrogate"}},
        {R"({"text": ""})", {"text is empty"}},
        {R"({"ids": [1, -1], "loss": [[0, 1]]})", {"ids[1] is -1"}},
        {R"({"ids": [1, 400], "loss": [[0, 1]]})", {"ids[1] is 400"}},
        {R"({"ids": [1, 2], "loss": [[1, 1]]})", {"loss[0] is [1,1]", "from < to <= 2"}},
        {R"({"ids": [1, 2, 3], "loss": [[1, 2], [0, 3]]})", {"loss[1]", "2 <= from"}},
        {R"({"ids": [1]})", {"loss: expected"}},
        {R"({"prompt": "x", "response": "y)", {"not JSON"}},
        {R"({"prompt": "x\u0000", "response": "y"})", {"turn 1", "special token", "--specials"}, "plain"},
    };
    for (const Bad& bad : kBad) {
      const std::string said = problem(bad.row, bad.format);
      for (const std::string_view part : bad.parts) {
        CHECK_MESSAGE(said.find(part) != said.npos, std::string(bad.row), "\n", said);
      }
    }
  }

  TEST_CASE("a content that spells a special token is refused, becomes text, or the token") {
    const json expected = json::parse(read_file(kGolden + "chat/expected.json"));
    const auto tokenizer = with_specials("qwen2", expected);
    const ChatFormat format = chat_format("chatml", *tokenizer).value();
    const std::string row = R"({"prompt": "say <|im_end|> now", "response": "no"})";
    const auto with = [&](ContentSpecials specials) { return ChatEncoder(format, *tokenizer, specials).encode(row); };
    CHECK(says(with(ContentSpecials::kRefuse).error().message, {"turn 1", "\"<|im_end|>\"", "--specials text"}));
    const int32_t end = *tokenizer->find("<|im_end|>");
    const auto text = with(ContentSpecials::kText), kept = with(ContentSpecials::kKeep);
    REQUIRE_OK(text);
    REQUIRE_OK(kept);
    CHECK(std::ranges::count(text.value().ids, end) == 2);
    CHECK(std::ranges::count(kept.value().ids, end) == 3);
    CHECK(tokenizer->decode(text.value().ids).value() == tokenizer->decode(kept.value().ids).value());
  }

  TEST_CASE("a format of a file is read strictly") {
    const auto tokenizer = bytes();
    const TempDir dir;
    const auto said = [&](std::string_view text) {
      write_file(dir / "joins.json", text);
      const auto made = chat_format(dir / "joins.json", *tokenizer);
      return made.ok() ? "" : made.error().message;
    };
    CHECK(said(R"({"joins": {"begin user": "", "user end": ""}, "trim": ["user end"], "generate": "x", "made": {}})") ==
          "");
    CHECK(says(said(R"({"join": {}})"), {"joins.json", "no object \"joins\""}));
    CHECK(says(said(R"({"joins": {"user": ""}})"), {"\"user\"", "two roles"}));
    CHECK(says(said(R"({"joins": {"begin user": 1}})"), {"\"begin user\"", "a text"}));
    CHECK(says(said(R"({"joins": {"begin user": ""}, "trims": []})"), {"\"trims\"", "known are"}));
    CHECK(says(said(R"({"joins": {"begin user": ""}, "trim": ["user"]})"), {"trim"}));
    CHECK(says(said(R"({"joins": {"begin user": "")"), {"joins.json", "byte"}));
    CHECK(says(chat_format("mistral", *tokenizer).error().message, {"\"mistral\"", "chatml, llama3", "chat_joins.py"}));
  }

  TEST_CASE("a set: pair and spans, the same for any number of threads; mistakes name file and line, nothing stays") {
    const TempDir dir;
    std::string rows;
    for (int k = 0; k < 3000; ++k) {
      rows +=
          k % 7 == 3
              ? "\n"
              : json{{"prompt", fmt::format("q{}?", k)}, {"completion", std::string(k % 90 + 1, 'a')}}.dump() + "\n";
    }
    write_file(dir / "a.jsonl", rows);
    const auto make = [&](const std::string& out, int64_t threads, bool overwrite = false) {
      TokenizeArgs args;
      args.inputs = {dir / "a.jsonl"};
      args.output_prefix = dir / out;
      args.tokenizer = kBytes;
      args.separator = DocumentSeparator::kJsonLine;
      args.chat = "plain";
      args.threads = threads;
      args.overwrite = overwrite;
      return tokenize_file(args);
    };
    const auto one = make("one", 1), many = make("many", 3);
    REQUIRE_OK(one);
    REQUIRE_OK(many);
    for (const char* suffix : {".bin", ".idx", ".loss"})
      CHECK(read_file((dir / "one").string() + suffix) == read_file((dir / "many").string() + suffix));
    auto pair = open_megatron(dir / "one");
    REQUIRE_OK(pair);
    const int64_t documents = pair.value()->sequence_count();
    CHECK(documents == one.value().documents);
    const auto spans = LossSpans::open(dir / "one", documents, pair.value()->token_count());
    REQUIRE_OK(spans);
    std::vector<LossSpan> all;
    std::vector<uint64_t> begins;
    REQUIRE(spans.value().read(0, documents, &all, &begins).ok());
    REQUIRE(all.size() == static_cast<size_t>(documents));
    int64_t counted = 0, document = 0;
    for (int k = 0; k < 3000; ++k) {
      if (k % 7 == 3) continue;
      const auto prompt = static_cast<uint32_t>(fmt::format("q{}?", k).size());
      CHECK(all[document].from == prompt);
      CHECK(all[document].to == prompt + static_cast<uint32_t>(k % 90 + 2));  // and the end of the document
      counted += all[document++].to - prompt;
    }
    CHECK(counted == one.value().counted);

    // A row that is wrong, in the middle.
    write_file(dir / "a.jsonl", rows + "{\"prompt\": 1, \"completion\": \"x\"}\n" + rows);
    const std::string before = read_file(dir / "one.loss");
    const auto bad = make("one", 3, true);
    REQUIRE(!bad.ok());
    CHECK(says(bad.error().message, {"a.jsonl:3001: prompt is a number"}));
    CHECK(read_file(dir / "one.loss") == before);
    CHECK(names_in(dir).size() == 11);  // no temporary file

    // Texts over the same name take the spans away: they would be of another pair.
    write_file(dir / "a.txt", "text");
    TokenizeArgs args;
    args.inputs = {dir / "a.txt"};
    args.output_prefix = dir / "one";
    args.tokenizer = kBytes;
    args.overwrite = true;
    REQUIRE(tokenize_file(args).ok());
    CHECK(says(LossSpans::open(dir / "one", 1, 4).error().message, {"one.loss", "No such file", "cairn data chat"}));
  }

  TEST_CASE("spans of another pair, and damaged ones, are refused") {
    const TempDir dir;
    auto writer = LossWriter::create(dir / "set");
    REQUIRE_OK(writer);
    const LossSpan span{2, 5};
    for (int k = 0; k < 10; ++k) REQUIRE(writer.value().add_document(std::span(&span, k % 2)).ok());
    CHECK(writer.value().counted() == 15);
    REQUIRE(writer.value().publish(100).ok());
    CHECK(LossSpans::open(dir / "set", 10, 100).ok());
    CHECK(says(LossSpans::open(dir / "set", 10, 99).error().message, {"100 tokens in 10 documents", "99 in 10"}));
    CHECK(says(LossSpans::open(dir / "set", 9, 100).error().message, {"make the set again"}));
    const std::string good = read_file(dir / "set.loss");
    for (size_t at = 0; at < good.size(); ++at) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 4);
      write_file(dir / "set.loss", bad);
      CHECK_MESSAGE(!LossSpans::open(dir / "set", 10, 100).ok(), at);
    }
    for (size_t size = 0; size < good.size(); ++size) {
      write_file(dir / "set.loss", good.substr(0, size));
      CHECK_MESSAGE(!LossSpans::open(dir / "set", 10, 100).ok(), size);
    }
  }
}
