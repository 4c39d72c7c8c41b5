#include "runtime/text/sentencepiece_json.h"

#include <doctest/doctest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "runtime/text/tokenizer.h"

using namespace cairn;
using namespace cairn::text;

namespace {

std::string tiny_model() {
  std::ostringstream out;
  out << std::ifstream(CAIRN_SOURCE_DIR "/tests/golden/sentencepiece-tiny/tiny.model", std::ios::binary).rdbuf();
  return out.str();
}

/// The model with one more piece at its end: fields of a protocol buffer that repeat may be appended.
std::string with_piece(std::string model, const std::string& text, char type) {
  const std::string piece =
      std::string("\x0a") + static_cast<char>(text.size()) + text + std::string("\x15\0\0\0\0", 5) + "\x18" + type;
  return std::move(model) + "\x0a" + static_cast<char>(piece.size()) + piece;
}

std::vector<int32_t> ids_of(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> out;
  REQUIRE(tokenizer.encode(text, &out).ok());
  return out;
}

constexpr const char* kTexts[] = {"",
                                  " ",
                                  "the cairn stands on the hill",
                                  "  two  spaces  and\ttab\nlines\r\n ",
                                  " the dog sleeps ",
                                  "\n the fox\n\n  walks ",
                                  "\xC3\x9Cn\xC3\xAF e\xCC\x81 \xE2\x98\x83 \xF0\x9F\x98\x80"};

}  // namespace

TEST_SUITE("runtime/text/sentencepiece_json") {
  TEST_CASE("a SentencePiece model as a tokenizer.json gives the same ids and texts") {
    const std::string model = tiny_model();
    const auto own = make_sentencepiece_tokenizer(model);
    REQUIRE(own.ok());
    const Result<std::string> json = sentencepiece_as_json(model);
    REQUIRE_MESSAGE(json.ok(), json.error().message);
    const auto made = make_hf_tokenizer(json.value());
    REQUIRE_MESSAGE(made.ok(), made.error().message);
    CHECK(made.value()->vocab() == own.value()->vocab());
    CHECK(made.value()->before().empty());
    for (const char* text : kTexts) {
      CAPTURE(text);
      const std::vector<int32_t> ids = ids_of(*own.value(), text);
      CHECK(ids_of(*made.value(), text) == ids);
      CHECK(made.value()->decode(ids).value() == own.value()->decode(ids).value());
    }
  }

  TEST_CASE("a tokenizer.json puts the model's own tokens around a text where that is asked for") {
    const Result<std::string> json = sentencepiece_as_json(tiny_model(), {.bos = true, .eos = true});
    REQUIRE(json.ok());
    const auto made = make_hf_tokenizer(json.value());
    REQUIRE(made.ok());
    CHECK(made.value()->before() == std::vector<int32_t>{1});
    CHECK(made.value()->after() == std::vector<int32_t>{2});
  }

  TEST_CASE("special pieces have the model's ids and names") {
    const Result<SpecialPieces> special = special_pieces(tiny_model());
    REQUIRE(special.ok());
    CHECK(special.value().unk.id == 0);
    CHECK(special.value().bos.piece == "<s>");
    CHECK(special.value().eos.id == 2);
    CHECK(special.value().pad.id == -1);
    CHECK_FALSE(special_pieces("no model").ok());
  }

  TEST_CASE("a model that no tokenizer.json can say is refused by the piece") {
    const Result<std::string> symbol = sentencepiece_as_json(with_piece(tiny_model(), "<x>", 4));
    REQUIRE_FALSE(symbol.ok());
    CHECK(symbol.error().code == ErrorCode::kUnsupported);
    CHECK(symbol.error().message.find("<x>") != std::string::npos);
    CHECK(sentencepiece_as_json(with_piece(tiny_model(), "<y>", 3)).ok());  // a control token
  }

  TEST_CASE("the bytes tokenizer as a tokenizer.json gives each byte its own id") {
    const auto bytes = make_tokenizer({.kind = TokenizerConfig::Kind::kBytes, .path = {}});
    const auto made = make_hf_tokenizer(bytes_as_json(), {.config = R"({"eos_token": "\u0000"})"});
    REQUIRE(bytes.ok());
    REQUIRE_MESSAGE(made.ok(), made.error().message);
    CHECK(made.value()->vocab() == 256);
    CHECK(made.value()->eod() == 0);
    for (const std::string& text : {std::string("a\0b", 3), std::string("<0x41> \n\n"), std::string(kTexts[6])}) {
      const std::vector<int32_t> ids = ids_of(*bytes.value(), text);
      CHECK(ids_of(*made.value(), text) == ids);
      CHECK(made.value()->decode(ids).value() == text);
    }
  }
}
