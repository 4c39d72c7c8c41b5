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
  return make_hf_tokenizer(spec.dump(), "", "");
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
    CHECK_FALSE(make_hf_tokenizer("{", "", "").ok());
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
    const auto made = make_hf_tokenizer(R"({"model":{},"normalizer":)" + deep + "}", "", "");
    REQUIRE_FALSE(made.ok());
    CHECK(made.error().message.find("nested deeper than 64") != std::string::npos);
    CHECK(make_hf_tokenizer(read(kFolder + "gpt2.json"), deep, deep).value()->eod() == -1);
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
      return make_hf_tokenizer(spec.dump(), "", "");
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

  TEST_CASE("the token that ends documents is that of the files beside it") {
    const std::string spec = read(kFolder + "gpt2.json");
    const auto eod = [&](const char* config, const char* map) {
      return make_hf_tokenizer(spec, config, map).value()->eod();
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
      return make_hf_tokenizer(spec, config, map).value()->why_no_eod();
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
