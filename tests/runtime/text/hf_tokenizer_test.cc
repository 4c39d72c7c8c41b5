#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "runtime/text/regex.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::text;
using nlohmann::json;

namespace {

const std::string kFolder = CAIRN_SOURCE_DIR "/tests/golden/tokenizers/";
const std::vector<std::string> kNames = {
    "gpt2",   "llama3",           "qwen2",   "neox",         "o200k", "bloom", "falcon", "deepseek", "clip",
    "llama2", "llama2-metaspace", "unigram", "unigram-bytes"};

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  REQUIRE_MESSAGE(in.good(), path);
  std::ostringstream out;
  out << in.rdbuf();
  return std::move(out).str();
}

std::vector<std::string> texts() {
  std::istringstream in(read(kFolder + "texts.jsonl"));
  std::vector<std::string> out;
  for (std::string line; std::getline(in, line);) out.push_back(json::parse(line).get<std::string>());
  return out;
}

std::unique_ptr<Tokenizer> open(const std::string& name) {
  Result<std::unique_ptr<Tokenizer>> made = make_tokenizer({TokenizerConfig::Kind::kHf, kFolder + name + ".json"});
  REQUIRE_OK(made);
  return std::move(made).value();
}

/// As tests/fixtures/make_tokenizer_fixtures.py has it.
std::string fnv(std::string_view bytes) {
  uint64_t value = 0xCBF29CE484222325u;
  for (const char c : bytes) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  char out[9];
  std::snprintf(out, sizeof(out), "%08x", static_cast<unsigned>(value & 0xFFFFFFFFu));
  return out;
}

std::string fnv_of(const std::vector<int32_t>& ids) {
  std::string bytes;
  for (const int32_t id : ids) {
    for (int k = 0; k < 4; ++k) bytes.push_back(static_cast<char>(id >> (8 * k)));
  }
  return fnv(bytes);
}

std::vector<int32_t> encode(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids;
  const Status done = tokenizer.encode(text, &ids);
  REQUIRE_OK(done);
  return ids;
}

Result<std::unique_ptr<Tokenizer>> changed(const std::function<void(json&)>& change) {
  json spec = json::parse(read(kFolder + "gpt2.json"));
  change(spec);
  return make_hf_tokenizer(spec.dump());
}

/// A byte-level BPE without merges: <s> 0, </s> 1, <unk> 2, then the printable ASCII from "!" (3) on, and the space
/// (97).
json byte_level() {
  json vocab = {{"<s>", 0}, {"</s>", 1}, {"<unk>", 2}, {"\u0120", 97}};
  for (int c = '!'; c <= '~'; ++c) vocab[std::string(1, static_cast<char>(c))] = c - '!' + 3;
  const json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  json added = json::array();
  for (const auto& [id, content] : {std::pair(0, "<s>"), std::pair(1, "</s>"), std::pair(2, "<unk>")}) {
    added.push_back({{"id", id}, {"content", content}, {"special", true}, {"normalized", false}});
  }
  return {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", json::array()}}},
          {"pre_tokenizer", bytes},
          {"post_processor", bytes},
          {"decoder", bytes},
          {"added_tokens", added}};
}

std::unique_ptr<Tokenizer> beside(const json& spec, const json& config, const json& map = nullptr,
                                  const json& added = nullptr) {
  const auto text = [](const json& value) { return value.is_null() ? std::string() : value.dump(); };
  Result<std::unique_ptr<Tokenizer>> made = make_hf_tokenizer(spec.dump(), {text(config), text(map), text(added)});
  REQUIRE_OK(made);
  return std::move(made).value();
}

}  // namespace

TEST_SUITE("runtime/text/hf_tokenizer") {
  TEST_CASE("ids and texts are those of the tokenizers package, for each kind of tokenizer.json") {
    const std::vector<std::string> sample = texts();
    REQUIRE(sample.size() > 150);
    for (const std::string& name : kNames) {
      CAPTURE(name);
      const std::unique_ptr<Tokenizer> tokenizer = open(name);
      const json expected = json::parse(read(kFolder + name + ".expected.json"));
      REQUIRE(expected["plain"].size() == sample.size());
      for (size_t k = 0; k < sample.size(); ++k) {
        CAPTURE(sample[k]);
        const std::vector<int32_t> ids = encode(*tokenizer, sample[k]);
        if (k < expected["first"].size()) CHECK(ids == expected["first"][k].get<std::vector<int32_t>>());
        CHECK(fnv_of(ids) == expected["plain"][k].get<std::string>());
        std::vector<int32_t> around = tokenizer->before();
        around.insert(around.end(), ids.begin(), ids.end());
        for (const int32_t id : tokenizer->after()) around.push_back(id);
        CHECK(fnv_of(around) == expected["special"][k].get<std::string>());
        const Result<std::string> decoded = tokenizer->decode(ids, Specials::kSkip);
        REQUIRE(decoded.ok());
        if (expected["decoded"][k] != "") CHECK(fnv(decoded.value()) == expected["decoded"][k].get<std::string>());
      }
    }
  }

  TEST_CASE("a stream of ids gives the text of all of them, never half a character") {
    for (const std::string& name : kNames) {
      CAPTURE(name);
      const std::unique_ptr<Tokenizer> tokenizer = open(name);
      std::string all;
      for (const std::string& text : texts()) all += text;
      all.resize(whole_characters(std::string_view(all).substr(0, 4000)));
      const std::vector<int32_t> ids = encode(*tokenizer, all);
      StreamDecoder stream(*tokenizer, Specials::kSkip);
      std::string shown;
      for (const int32_t id : ids) {
        Result<std::string> more = stream.add(id);
        REQUIRE(more.ok());
        if (find_invalid_utf8(shown) < 0) CHECK(find_invalid_utf8(more.value()) < 0);
        shown += more.value();
      }
      shown += stream.finish().value();
      CHECK(shown == tokenizer->decode(ids, Specials::kSkip).value());
    }
  }

  TEST_CASE("a text in parts, cut after a line end between letters, has the ids of the whole") {
    const auto check = [](const Tokenizer& tokenizer) {
      for (std::string text : texts()) {
        text = "ab" + text + "\nLetters  \n and\nmore\n" + text + "yz ";
        std::vector<int32_t> whole, parts;
        REQUIRE_OK(tokenizer.encode(text, &whole));
        size_t begin = 0;
        for (size_t at = text.find('\n'); at < text.size() - 1; at = text.find('\n', at + 1)) {
          const auto letter = [&](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
          if (at == 0 || !letter(text[at - 1]) || !letter(text[at + 1])) continue;
          REQUIRE_OK(tokenizer.encode_part(text.substr(begin, at + 1 - begin), {begin == 0, false}, &parts));
          begin = at + 1;
        }
        REQUIRE_OK(tokenizer.encode_part(text.substr(begin), {begin == 0, true}, &parts));
        CHECK(parts == whole);
      }
    };
    for (const std::string& name : kNames) {
      CAPTURE(name);
      check(*open(name));
    }
    // What a file puts before a text, or takes off its ends.
    for (const char* normalizer :
         {"null", R"({"type":"Strip","strip_left":true,"strip_right":true})", R"({"type":"Prepend","prepend":"x"})"}) {
      CAPTURE(normalizer);
      const auto made = changed([&](json& s) {
        s["normalizer"] = json::parse(normalizer);
        s["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", true}};
      });
      REQUIRE_OK(made);
      check(*made.value());
    }
  }

  TEST_CASE("unsupported parts of a tokenizer.json are refused by name; damage is reported with its place") {
    const auto refused = [](const std::function<void(json&)>& change, const char* part) {
      const auto made = changed(change);
      REQUIRE_FALSE(made.ok());
      CAPTURE(made.error().message);
      CHECK(made.error().message.find(part) != std::string::npos);
    };
    refused([](json& s) { s["model"]["type"] = "WordPiece"; }, "WordPiece");
    refused([](json& s) { s["model"]["dropout"] = 0.1; }, "dropout");
    refused([](json& s) { s["normalizer"] = {{"type", "BertNormalizer"}}; }, "BertNormalizer");
    refused([](json& s) { s["pre_tokenizer"] = {{"type", "UnicodeScripts"}}; }, "UnicodeScripts");
    refused([](json& s) { s["decoder"] = {{"type", "CTC"}}; }, "CTC");
    refused([](json& s) { s["post_processor"] = {{"type", "Strange"}}; }, "Strange");
    refused([](json& s) { s["model"]["merges"].push_back("nobody knows"); }, "nobody");
    refused([](json& s) { s["model"]["merges"].push_back("a b c"); }, "merges");
    refused([](json& s) { s["model"]["vocab"]["a"] = -3; }, "vocab");
    refused([](json& s) { s["added_tokens"][0]["id"] = 7; }, "added_tokens");
    refused([](json& s) { s.erase("model"); }, "model");
    CHECK_FALSE(make_hf_tokenizer("{").ok());
    CHECK_FALSE(make_tokenizer({TokenizerConfig::Kind::kHf, kFolder + "nowhere.json"}).ok());
    std::vector<int32_t> ids;
    const Status bad = open("gpt2")->encode("ab\xff", &ids);
    REQUIRE_FALSE(bad.ok());
    CHECK(bad.error().message.find("byte 2: 0xff") != std::string::npos);
    CHECK_FALSE(open("gpt2")->decode(std::vector<int32_t>{100000}).ok());
  }

  TEST_CASE("a file that a stranger made is refused in a sentence, whatever it says") {
    const auto refused = [](const std::function<void(json&)>& change, const char* part) {
      const auto made = changed(change);
      REQUIRE_FALSE(made.ok());
      CHECK_MESSAGE(made.error().message.find(part) != std::string::npos, made.error().message);
    };
    // Numbers that are ids only when 32 of their bits are left out.
    for (const uint64_t id : {uint64_t{1} << 32, (uint64_t{1} << 32) + 1, uint64_t{1} << 31, UINT64_MAX}) {
      CAPTURE(id);
      refused([&](json& s) { s["added_tokens"][0]["id"] = id; }, "added_tokens");
      refused([&](json& s) { s["model"]["vocab"]["a"] = id; }, "vocab");
      refused(
          [&](json& s) {
            s["post_processor"] = {{"type", "BertProcessing"}, {"cls", {"a", id}}, {"sep", {"a", 1}}};
          },
          "cls");
      const json template_of = {
          {"type", "TemplateProcessing"},
          {"single", json::array({{{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", json::object()}}})},
          {"special_tokens", {{"<s>", {{"ids", json::array({id})}}}}}};
      refused([&](json& s) { s["post_processor"] = template_of; }, "ids");
    }
    // An id that no token has, around every text.
    refused(
        [](json& s) {
          s["post_processor"] = {{"type", "BertProcessing"}, {"cls", {"a", 999999}}, {"sep", {"a", 1}}};
        },
        "no token has the id 999999");
    // A character to be taken off that is none, so often that it would never end.
    for (const char* content : {"", "ab"}) {
      refused(
          [&](json& s) {
            s["decoder"] = {{"type", "Strip"}, {"content", content}, {"start", INT64_MAX}, {"stop", 0}};
          },
          "one character");
    }
    const std::string deep(300'000, '[');
    const auto made = make_hf_tokenizer(R"({"model":{},"normalizer":)" + deep + "}");
    REQUIRE_FALSE(made.ok());
    CHECK(made.error().message.find("nested deeper than 64") != std::string::npos);
    const auto beside = make_hf_tokenizer(read(kFolder + "gpt2.json"), {{}, {}, deep});
    REQUIRE_FALSE(beside.ok());
    CHECK(beside.error().message.starts_with("added_tokens.json: byte 64: JSON nested deeper than 64"));
  }

  TEST_CASE("a charsmap puts only whole characters into text") {
    // A trie of one rule, "a" -> the replacement at byte `value`.
    const auto with = [](const std::string& replacements, uint32_t value) {
      std::vector<uint32_t> units(0x300, 0);
      units[0] = 0x100 << 10;
      units[0x161] = 0x61 | 1 << 8 | 0x361u << 10;  // to 0x161 ^ 0x361 = 0x200
      units[0x200] = value;
      std::string bytes;
      const auto put = [&](uint32_t word) {
        for (int k = 0; k < 4; ++k) bytes.push_back(static_cast<char>(word >> (8 * k)));
      };
      put(static_cast<uint32_t>(units.size() * 4));
      for (const uint32_t unit : units) put(unit);
      bytes += replacements;
      static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
      std::string base64;
      uint32_t bits = 0;
      int held = 0;
      for (const char c : bytes) {
        bits = bits << 8 | static_cast<unsigned char>(c);
        for (held += 8; held >= 6;) base64 += kDigits[bits >> (held -= 6) & 63];
      }
      if (held > 0) base64 += kDigits[bits << (6 - held) & 63];
      json spec =
          json::parse(R"({"model":{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0],["b",-1],["\u00e9",-1]]}})");
      spec["normalizer"] = {{"type", "Precompiled"}, {"precompiled_charsmap", base64}};
      return make_hf_tokenizer(spec.dump());
    };
    const auto ids_of = [](const Result<std::unique_ptr<Tokenizer>>& made) {
      REQUIRE_OK(made);
      std::vector<int32_t> ids;
      REQUIRE_OK(made.value()->encode("ab", &ids));
      return ids;
    };
    const std::string good("b\0\xc3\xa9\0", 5);
    CHECK(ids_of(with(good, 0)) == std::vector<int32_t>{1, 1});
    CHECK(ids_of(with(good, 2)) == std::vector<int32_t>{2, 1});
    CHECK_FALSE(with(good, 3).ok());  // inside a character
    for (const char* bad : {"\xf0", "b\xc3", "\x80", "\xff"}) {
      CAPTURE(bad);
      const auto made = with(std::string(bad) + '\0', 0);
      REQUIRE_FALSE(made.ok());
      CHECK(made.error().message.find("not UTF-8") != std::string::npos);
    }
  }

  // All ids of the next four are those of transformers 4.57.6 and 5.24.0 for folders with these files.
  TEST_CASE("tokens that stand in a file beside tokenizer.json are tokens, by the order of their ids") {
    using Ids = std::vector<int32_t>;
    const json spec = byte_level();
    const std::string text = "a<|im|>b <|b|> </s> c";
    const Ids plain = encode(*beside(spec, json::object()), text);
    const auto special = [](const char* content) { return json{{"content", content}, {"special", true}}; };
    const Ids both = {67, 98, 68, 97, 99, 97, 1, 97, 69};  // <|im|> 98, <|b|> 99
    CHECK(encode(*beside(spec, {{"added_tokens_decoder", {{"98", special("<|im|>")}, {"99", special("<|b|>")}}}}),
                 text) == both);
    // Gaps between ids are not kept, nor is the order in the file.
    CHECK(encode(*beside(spec, {{"added_tokens_decoder", {{"300", special("<|b|>")}, {"290", special("<|im|>")}}}}),
                 text) == both);
    CHECK(encode(*beside(spec, nullptr, nullptr, {{"<|b|>", 99}, {"<|im|>", 98}}), text) == both);
    CHECK(encode(*beside(spec, json::object(), nullptr, {{"<|b|>", 301}, {"<|im|>", 300}}), text) == both);
    CHECK(encode(*beside(spec, nullptr, {{"additional_special_tokens", {"<|im|>", "<|b|>"}}}), text) == both);
    CHECK(encode(*beside(spec, {{"additional_special_tokens", {"<|im|>", "<|b|>"}}}), text) == both);
    CHECK(encode(*beside(spec, {{"eos_token", "<|im|>"}, {"pad_token", special("<|b|>")}}), text) == both);
    CHECK(encode(*beside(spec, {{"extra_special_tokens", {{"image_token", "<|im|>"}, {"more", "<|b|>"}}}}), text) ==
          both);
    // added_tokens_decoder has the say where it is: neither of the other files is asked.
    const json decoder = {{"added_tokens_decoder", {{"98", special("</s>")}}}};
    CHECK(encode(*beside(spec, decoder, {{"eos_token", "<|im|>"}}, {{"<|b|>", 98}}), text) == plain);
    // Its switches win over those of tokenizer.json.
    const json strips = {{"added_tokens_decoder",
                          {{"1", {{"content", "</s>"}, {"special", true}, {"lstrip", true}, {"rstrip", true}}}}}};
    CHECK(encode(*beside(spec, strips), "a </s> b") == Ids{67, 1, 68});
    // A token that the vocabulary has keeps its id.
    CHECK(encode(*beside(spec, nullptr, nullptr, {{"b", 68}}), "ab") == Ids{67, 68});
    const auto made = beside(spec, nullptr, nullptr, {{"<|im|>", 98}});
    CHECK(made->vocab() == 99);
    CHECK(made->own_vocab() == 98);
    CHECK(made->decode(Ids{67, 98}).value() == "a<|im|>");
    CHECK(made->notes().empty());
    // An end of documents may be one of them; one that only a name makes is none.
    CHECK(beside(spec, {{"eos_token", "<|im|>"}}, nullptr, {{"<|im|>", 98}})->eod() == 98);
    CHECK(beside(spec, {{"eos_token", "<|im|>"}})->eod() == -1);
    for (const json& bad :
         {json{{"added_tokens_decoder", {{"x", special("a")}}}}, json{{"added_tokens_decoder", {{"98", "a"}}}},
          json{{"added_tokens_decoder", {{"98", {{"special", true}}}}}},
          json{{"added_tokens_decoder", {{"98", {{"content", "a"}, {"lstrip", 1}}}}}}}) {
      CAPTURE(bad.dump());
      const auto refused = make_hf_tokenizer(spec.dump(), {.config = bad.dump()});
      REQUIRE_FALSE(refused.ok());
      CHECK(refused.error().message.find("tokenizer_config.json") != std::string::npos);
    }
  }

  TEST_CASE(
      "a damaged file beside tokenizer.json is refused by its name and the byte, also where another has the say") {
    const std::string spec = byte_level().dump(), decoder = R"({"added_tokens_decoder": {}, "x": "\ud800"})";
    for (const auto& [text, said] : {std::pair(std::string("{\"a\": "), "byte 6: not JSON"),
                                     {"[]", "expected a JSON object, found \"[]\""},
                                     {std::string("\xff\xfe{\0}\0", 6), "is UTF-16"},
                                     {"{\"a\": \"\xe9\"}", "byte 8: not JSON"},
                                     {"<html>", "is a page of HTML"}}) {
      for (const char* name : kBesideNames) {
        BesideFiles files{.config = decoder};
        *files.find(name) = text;
        const auto made = make_hf_tokenizer(spec, files);
        REQUIRE_FALSE(made.ok());
        CHECK(made.error().message.starts_with(std::string(name) + ": "));
        CHECK(made.error().message.find(said) != std::string::npos);
      }
    }
    CHECK(make_hf_tokenizer(spec, {.config = decoder}).ok());  // the half of a pair is of a field without a reader
    for (const BesideFiles& files :
         {BesideFiles{.config = R"({"eos_token": "\ud800"})"}, BesideFiles{.added_tokens = R"({"a\udfff": 98})"},
          BesideFiles{.special_tokens_map = R"({"pad_token": {"content": "\ud800"}})"}}) {
      const auto made = make_hf_tokenizer(spec, files);
      REQUIRE_FALSE(made.ok());
      CHECK(made.error().message.find("half of a surrogate pair") != std::string::npos);
    }
  }

  TEST_CASE("with split_special_tokens a special token in a text is text") {
    const json spec = byte_level();
    const std::string text = "a</s>b<w>";
    const json config = {{"split_special_tokens", true},
                         {"added_tokens_decoder", {{"98", {{"content", "<w>"}, {"special", false}}}}}};
    CHECK(encode(*beside(spec, config), text) == std::vector<int32_t>{67, 30, 17, 85, 32, 68, 98});
    CHECK(encode(*beside(spec, json::object()), "a</s>b") == std::vector<int32_t>{67, 1, 68});
  }

  TEST_CASE("switches beside a tokenizer may be 1 and 0, as Python reads them, and no other type") {
    const json spec = byte_level();
    for (const auto& [one, other] : {std::pair(json(1), json(true)), {json(0), json(false)}}) {
      for (const char* name : {"add_prefix_space", "split_special_tokens"}) {
        CAPTURE(name);
        CHECK(encode(*beside(spec, {{name, one}}), "a</s>") == encode(*beside(spec, {{name, other}}), "a</s>"));
      }
    }
    const auto made = make_hf_tokenizer(spec.dump(), {.config = R"({"add_bos_token": "no"})"});
    REQUIRE_FALSE(made.ok());
    CHECK(made.error().message.find("\"add_bos_token\" must be true or false") != std::string::npos);
  }

  TEST_CASE("add_prefix_space of tokenizer_config.json wins over tokenizer.json, as the line that wrote it reads it") {
    json spec = byte_level();
    const std::vector<int32_t> with = {97, 67}, without = {67};
    const auto ids = [&](const json& config) { return encode(*beside(spec, config), "a"); };
    CHECK(ids({{"add_prefix_space", true}}) == with);
    CHECK(ids({{"add_prefix_space", true}, {"backend", "tokenizers"}}) == without);  // transformers 5 of no class
    for (const char* name : {"GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizer"}) {
      CHECK(ids({{"add_prefix_space", true}, {"tokenizer_class", name}, {"backend", "tokenizers"}}) == with);
    }
    CHECK(beside(spec, {{"add_prefix_space", true}})->notes().size() == 1);
    spec["pre_tokenizer"]["add_prefix_space"] = true;
    CHECK(ids(nullptr) == with);
    CHECK(ids(json::object()) == without);
    CHECK(ids({{"backend", "tokenizers"}}) == with);
    CHECK(ids({{"add_prefix_space", true}}) == with);
    spec["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {spec["pre_tokenizer"]}}};
    CHECK(ids({{"add_prefix_space", false}}) == with);  // neither line looks into a sequence
  }

  TEST_CASE("add_bos_token and add_eos_token count for the classes that read them, in transformers 4") {
    using Ids = std::vector<int32_t>;
    json spec = byte_level();
    const auto around = [&](const char* name, json config) {
      config.update({{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"tokenizer_class", name}});
      const auto made = beside(spec, config);
      return std::tuple(made->before(), made->after(), made->notes().size());
    };
    const Ids none, bos = {0}, eos = {1};
    CHECK(around("LlamaTokenizerFast", {{"add_bos_token", true}}) == std::tuple(bos, none, 1));
    CHECK(around("LlamaTokenizer", json::object()) == std::tuple(bos, none, 1));
    CHECK(around("GemmaTokenizer", {{"add_eos_token", true}}) == std::tuple(bos, eos, 1));
    CHECK(around("CohereTokenizerFast", {{"add_bos_token", true}}) == std::tuple(bos, none, 1));
    CHECK(around("GPTNeoXTokenizerFast", {{"add_bos_token", true}}) == std::tuple(bos, none, 1));
    CHECK(around("GPTNeoXTokenizerFast", json::object()) == std::tuple(none, none, 0));
    for (const char* other : {"PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"}) {
      CHECK(around(other, {{"add_bos_token", true}, {"add_eos_token", true}}) == std::tuple(none, none, 0));
    }
    CHECK(around("LlamaTokenizer", {{"add_bos_token", true}, {"backend", "tokenizers"}}) == std::tuple(none, none, 0));
    spec["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single",
         {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
        {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {0}}, {"tokens", {"<s>"}}}}}}};
    CHECK(around("LlamaTokenizer", json::object()) == std::tuple(bos, none, 0));
    CHECK(around("LlamaTokenizer", {{"add_bos_token", false}}) == std::tuple(none, none, 1));
    CHECK(around("PreTrainedTokenizerFast", {{"add_bos_token", false}}) == std::tuple(bos, none, 0));
  }

  TEST_CASE("a SentencePiece model with files beside it has their marks, as the line that wrote them reads it") {
    using Ids = std::vector<int32_t>;
    const std::string model = read(CAIRN_SOURCE_DIR "/tests/golden/sentencepiece-tiny/tiny.model");
    const std::string text = "a way<|im|>b";
    json config = {
        {"tokenizer_class", "LlamaTokenizer"}, {"bos_token", "<s>"}, {"eos_token", "</s>"}, {"unk_token", "<unk>"}};
    const auto of = [&](const json& more, const json& map = nullptr, const json& added = nullptr) {
      json all = config;
      all.update(more);
      const auto dump = [](const json& value) { return value.is_null() ? std::string() : value.dump(); };
      Result<std::unique_ptr<Tokenizer>> made =
          make_sentencepiece_tokenizer(model, {dump(all), dump(map), dump(added)});
      REQUIRE_OK(made);
      return std::move(made).value();
    };
    const json five = {{"backend", "tokenizers"}};
    CHECK(of({{"add_bos_token", true}})->before() == Ids{1});
    CHECK(of({{"add_bos_token", true}})->notes().empty());
    CHECK(of({{"add_bos_token", false}})->before().empty());
    CHECK(of(json::object())->before() == Ids{1});
    CHECK(of(json::object())->notes().size() == 1);
    CHECK(of(five)->before().empty());
    CHECK(of({{"add_bos_token", true}, {"add_eos_token", true}})->after() == Ids{2});
    const auto bare = make_sentencepiece_tokenizer(model).value();
    CHECK(bare->before().empty());
    REQUIRE(bare->notes().size() == 1);
    CHECK(bare->notes()[0].find("no <s> is put before a text") != std::string::npos);
    CHECK(encode(*bare, "a </s>") != encode(*of(json::object()), "a </s>"));

    const json mark = {{"content", "<|im|>"}, {"special", true}, {"normalized", false}};
    const Ids before = {266, 291};  // "a way"
    const auto ids = [&](std::initializer_list<int32_t> behind) {
      Ids out = before;
      out.insert(out.end(), behind);
      return out;
    };
    const json decoder = {{"added_tokens_decoder", {{"330", mark}}}};
    CHECK(encode(*of(decoder), text) == ids({330, 303, 326}));  // a space again behind the mark
    json later = decoder;
    later["legacy"] = false;
    CHECK(encode(*of(later), text) == ids({330, 326}));
    later = decoder;
    later.update(five);
    CHECK(encode(*of(later), text) == ids({330, 326}));
    CHECK(encode(*of(json::object(), {{"additional_special_tokens", {"<|im|>"}}}), text) == ids({330, 303, 326}));
    CHECK(encode(*of(five, nullptr, {{"<|im|>", 337}}), text) == ids({330, 326}));
    // A mark that is not special stands behind a space only, in transformers 4.
    const Ids spelled = ids({63, 127, 314, 320, 127, 65, 326});
    CHECK(encode(*of(json::object(), nullptr, {{"<|im|>", 330}}), text) == spelled);
    CHECK(encode(*of(json::object(), nullptr, {{"<|im|>", 330}}), "a way <|im|>b") == ids({330, 326}));
    const json anywhere = {
        {"added_tokens_decoder", {{"2", {{"content", "</s>"}, {"special", true}, {"normalized", true}}}}}};
    CHECK(encode(*of(anywhere), "a way</s>") == ids({2}));
    CHECK(encode(*of({{"split_special_tokens", true}, {"added_tokens_decoder", {{"330", mark}}}}), text) == spelled);
    CHECK(encode(*of({{"add_prefix_space", false}}), "a") == Ids{309});
    const auto made = of(decoder);
    CHECK(made->decode(encode(*made, text)).value() == "a way<|im|> b");
    CHECK(made->decode(encode(*made, text), Specials::kSkip).value() == "a way b");
    CHECK(made->own_vocab() == 330);
    CHECK(made->find("<|im|>") == 330);
    CHECK_FALSE(made->decode(Ids{331}).ok());
    CHECK(of({{"eos_token", "<|im|>"}, {"added_tokens_decoder", {{"330", mark}}}})->eod() == 330);
    CHECK(of({{"tokenizer_class", "ChatGLMTokenizer"}})->before().empty());
  }

  TEST_CASE("the token that ends documents is that of the files beside it") {
    const std::string spec = read(kFolder + "gpt2.json");
    const auto eod = [&](const char* config, const char* map) {
      return make_hf_tokenizer(spec, {config, map, {}}).value()->eod();
    };
    const int32_t id = open("gpt2")->find("<|endoftext|>").value();
    CHECK(eod("", "") == -1);
    CHECK(eod(R"({"eos_token": "<|endoftext|>"})", "") == id);
    CHECK(eod("", R"({"eos_token": {"content": "<|endoftext|>"}})") == id);
    CHECK(eod(R"({"eos_token": "<none>"})", "") == -1);
  }

  TEST_CASE("a tokenizer.json without an end-of-document token says which file lacks it, and which token was sought") {
    const std::string spec = read(kFolder + "gpt2.json");
    const auto why = [&](const char* config, const char* map) {
      return make_hf_tokenizer(spec, {config, map, {}}).value()->why_no_eod();
    };
    CHECK(why("", "") ==
          "tokenizer_config.json beside it is missing or empty, special_tokens_map.json beside it is missing or empty");
    CHECK(why(R"({"eos_token": "<none>"})", R"({"bos_token": "<s>"})") ==
          "tokenizer_config.json names the eos_token \"<none>\", which is no token of the vocabulary, "
          "special_tokens_map.json names no eos_token");
    CHECK(why("{}", R"({"eos_token": {"content": "</s>"}})") ==
          "tokenizer_config.json names no eos_token, special_tokens_map.json names the eos_token \"</s>\", which is no "
          "token of the vocabulary");
  }

  TEST_CASE("patterns are read as Oniguruma reads them, or refused") {
    const auto pieces = [](const char* pattern, std::string_view text) {
      const Result<Regex> regex = Regex::compile(pattern);
      REQUIRE_OK(regex);
      std::vector<std::pair<size_t, size_t>> found;
      REQUIRE(regex.value().matches(text, &found).ok());
      std::vector<std::string> out;
      for (const auto& [begin, end] : found) out.emplace_back(text.substr(begin, end - begin));
      return out;
    };
    using Pieces = std::vector<std::string>;
    CHECK(pieces(R"(([^(\s|[.,])])+)", "ab.c(d |e)") == Pieces{"ab", "c", "d", "e"});  // a class in a class
    CHECK(pieces(R"(\s+)", "a\u180Eb\u00A0c") == Pieces{"\u00A0"});                    // U+180E is no space
    CHECK(pieces(R"(\w+)", "a\u24B6-\u00B2") == Pieces{"a\u24B6", "\u00B2"});
    CHECK(pieces(R"(\p{L}+)", "x\U00031350\u1C89y") == Pieces{"x\U00031350\u1C89y"});  // of Unicode 15 and 16
    CHECK(pieces("^b$", "a\nb\nc") == Pieces{"b"});
    for (const char* pattern : {R"([a-z&&[^b]])", R"([[:alpha:]])", R"(\h)", R"(\R)", R"((?<n>a))", R"(a\1)",
                                R"(\p{Mongolian})", R"(\p{N}{1,3}+)", R"([a[^b]])", R"(a{,3})"}) {
      CAPTURE(pattern);
      CHECK_FALSE(Regex::compile(pattern).ok());
    }
    for (const char* pattern : {"(", "[a", "a\\", "\\p{L", "*"}) {
      CAPTURE(pattern);
      CHECK_FALSE(Regex::compile(pattern).ok());
    }
  }
}
