#include "runtime/json/json.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <string>

using namespace cairn;

namespace {

std::string nested(int64_t depth) {
  return std::string(static_cast<size_t>(depth), '[') + std::string(static_cast<size_t>(depth), ']');
}

}  // namespace

TEST_SUITE("runtime/json") {
  TEST_CASE("text as deep as is allowed is read, and one bracket more is refused with its byte") {
    CHECK(parse_json(nested(kMaxJsonDepth)).ok());
    CHECK_FALSE(json_or_nothing(nested(kMaxJsonDepth)).is_discarded());
    for (const int64_t depth : {kMaxJsonDepth + 1, int64_t{300'000}}) {
      const Result<nlohmann::json> deep = parse_json(nested(depth));
      REQUIRE_FALSE(deep.ok());
      CHECK(deep.error().code == ErrorCode::kCorrupt);
      CHECK(deep.error().message == "byte 64: JSON nested deeper than 64");
      CHECK_FALSE(parse_ordered_json(nested(depth)).ok());
      CHECK(json_or_nothing(nested(depth)).is_discarded());
    }
    CHECK(parse_json(R"({"a":"[[[[\"[[[["})", 1).ok());  // brackets in text are none
  }

  TEST_CASE("text that is no JSON is reported with the byte and what was found, in characters that a terminal takes") {
    const Result<nlohmann::json> bad = parse_json("{\"a\": \x1b[31m}");
    REQUIRE_FALSE(bad.ok());
    CHECK(bad.error().message.starts_with("byte 6: not JSON: found \"\\x1b[31m}\""));
    for (const char* text : {"", "{", "1e999", "\"\xff\"", "nul"}) {
      CAPTURE(text);
      CHECK_FALSE(parse_json(text).ok());
    }
    CHECK(json_or_nothing("{").is_discarded());
  }

  TEST_CASE("an integer is one that fits, and no other number") {
    const auto of = [](const char* text) { return json_integer(json_or_nothing(text), 0, INT32_MAX); };
    CHECK(of("0") == 0);
    CHECK(of("2147483647") == INT32_MAX);
    for (const char* text :
         {"2147483648", "4294967297", "18446744073709551615", "-1", "1.0", "\"1\"", "null", "[1]", "}"}) {
      CAPTURE(text);
      CHECK_FALSE(of(text));
    }
    CHECK_FALSE(json_integer(json_or_nothing("18446744073709551615"), -1, INT64_MAX));
  }

  TEST_CASE("strictly read, a key has one value") {
    CHECK(parse_json(R"({"a":1,"a":2})").ok());
    const Result<nlohmann::json> twice = parse_json_strictly(R"({"a":1,"a":2})", "the header", 8);
    REQUIRE_FALSE(twice.ok());
    CHECK(twice.error().message == R"(the header names "a" twice)");
    CHECK(parse_json_strictly("{", "the header", 8, 100).error().message.starts_with("byte 102: the header"));
    CHECK(parse_json_strictly(nested(9), "x", 8).error().message.find("nested deeper than 8") != std::string::npos);
  }
}
