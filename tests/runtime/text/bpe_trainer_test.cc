#include "runtime/text/bpe_trainer.h"

#include <doctest/doctest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "runtime/text/byte_level.h"
#include "runtime/text/tokenizer.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::text;

namespace {

nlohmann::json golden(const std::string& path) {
  std::ifstream in(CAIRN_SOURCE_DIR "/tests/golden/" + path);
  return nlohmann::json::parse(in);
}

WordCounts words_of(const std::vector<std::string>& texts) {
  const auto cutter = WordCutter::make();
  REQUIRE_OK(cutter);
  WordCounts out;
  for (const std::string& text : texts) REQUIRE_OK(cutter.value().count(text, &out));
  return out;
}

std::vector<std::string> corpus() {
  std::ifstream in(CAIRN_SOURCE_DIR "/tests/golden/tokenizers/texts.jsonl");
  std::vector<std::string> out;
  for (std::string line; std::getline(in, line);) out.push_back(nlohmann::json::parse(line).get<std::string>());
  return out;
}

/// The rule in few words: all words are counted anew before each merge. Equal as long as no two pairs spell one token.
std::vector<std::pair<std::string, std::string>> plain_merges(const WordCounts& words, size_t most) {
  std::vector<std::pair<std::vector<std::string>, int64_t>> cut;
  std::map<std::string, int> ids;  // by age; bytes by their code point
  for (int byte = 0; byte < 256; ++byte) ids[bytes_to_alphabet(std::string(1, static_cast<char>(byte)))] = 0;
  int next = 0;
  for (auto& [token, id] : ids) id = next++;
  for (const auto& [word, count] : words) {
    std::vector<std::string> symbols;
    for (const char c : alphabet_to_bytes(word)) symbols.push_back(bytes_to_alphabet(std::string(1, c)));
    cut.emplace_back(symbols, count);
  }
  std::vector<std::pair<std::string, std::string>> out;
  while (out.size() < most) {
    std::map<std::pair<int, int>, std::pair<int64_t, std::pair<std::string, std::string>>> counts;
    for (const auto& [symbols, count] : cut) {
      for (size_t k = 0; k + 1 < symbols.size(); ++k) {
        auto& at = counts[{ids.at(symbols[k]), ids.at(symbols[k + 1])}];
        at.first += count;
        at.second = {symbols[k], symbols[k + 1]};
      }
    }
    std::pair<int64_t, std::pair<std::string, std::string>> best{0, {}};
    for (const auto& [pair, found] : counts) {
      if (found.first > best.first) best = found;
    }
    if (best.first < 1) break;
    const auto& [left, right] = best.second;
    ids.emplace(left + right, next++);
    for (auto& [symbols, count] : cut) {
      std::vector<std::string> merged;
      for (size_t k = 0; k < symbols.size(); ++k) {
        const bool here = k + 1 < symbols.size() && symbols[k] == left && symbols[k + 1] == right;
        merged.push_back(here ? left + right : symbols[k]);
        k += here ? 1 : 0;
      }
      symbols = merged;
    }
    out.push_back(best.second);
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/text/bpe_trainer") {
  TEST_CASE("ids and merges are those of the tokenizers package on texts in all scripts") {
    const auto expected = golden("bpe-trained/expected.json");
    const BpeTraining training{.vocab = 700, .min_frequency = 2, .specials = {"<|endoftext|>", "<|im_end|>"}};
    const auto trained = train_bpe(words_of(corpus()), training);
    REQUIRE_OK(trained);
    REQUIRE(trained.value().tokens.size() == expected["vocab"].size());
    for (size_t id = 0; id < trained.value().tokens.size(); ++id) {
      CAPTURE(id);
      CHECK(expected["vocab"].at(trained.value().tokens[id]) == id);
    }
    REQUIRE(trained.value().merges.size() == expected["merges"].size());
    for (size_t rank = 0; rank < trained.value().merges.size(); ++rank) {
      const auto& [left, right] = trained.value().merges[rank];
      CHECK(expected["merges"][rank] == left + " " + right);
    }
    const auto tokenizer = make_hf_tokenizer(tokenizer_json(trained.value(), training.specials));
    REQUIRE_OK(tokenizer);
    CHECK(tokenizer.value()->vocab() == 700);
    CHECK(tokenizer.value()->special(1));
    for (const std::string& text : corpus()) {
      std::vector<int32_t> ids;
      REQUIRE_OK(tokenizer.value()->encode(text, &ids));
      CHECK(tokenizer.value()->decode(ids).value() == text);
    }
  }

  TEST_CASE("each merge is the most frequent pair of the words as they are by then, the older ids first") {
    std::mt19937 random(7);
    for (int round = 0; round < 20; ++round) {
      WordCounts words;
      for (int k = 0; k < 60; ++k) {
        std::string word;
        for (uint32_t letters = 1 + random() % 6; letters > 0; --letters) word += static_cast<char>('a' + random() % 6);
        words[word] = 1 + random() % 4;
      }
      const auto expected = plain_merges(words, 12);
      const auto trained = train_bpe(words, {.vocab = static_cast<int64_t>(256 + expected.size()), .min_frequency = 1});
      REQUIRE_OK(trained);
      CHECK(trained.value().merges == expected);
    }
  }

  TEST_CASE("a training ends where no pair is frequent enough, and refuses what cannot be") {
    const WordCounts words = words_of({"ab ab cd"});
    const auto trained = train_bpe(words, {.vocab = 1000, .min_frequency = 2});
    REQUIRE_OK(trained);
    CHECK(trained.value().merges == std::vector<std::pair<std::string, std::string>>{{"a", "b"}});
    CHECK(trained.value().tokens.size() == 257);
    CHECK(train_bpe(words, {.vocab = 256}).value().merges.empty());
    CHECK(train_bpe(words, {.vocab = 256, .specials = {"x y"}}).error().message.find("expected 257 or more") !=
          std::string::npos);
    CHECK(train_bpe(words, {.vocab = 300, .specials = {"s", "s"}}).error().message.find("\"s\" is named twice") !=
          std::string::npos);
    CHECK(train_bpe({}, {.vocab = 300}).error().message.find("no text") != std::string::npos);
    int64_t calls = 0;
    std::vector<std::string> texts = corpus();
    const auto stopped = train_bpe(words_of(texts), {.vocab = 700, .tokens = [&](int64_t) { return ++calls < 2; }});
    REQUIRE_FALSE(stopped.ok());
    CHECK(stopped.error().code == ErrorCode::kStopped);
  }
}
