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

  TEST_CASE("numbers that Python writes and JSON lacks are read as text where Python's dialect is asked for") {
    const std::string text =
        R"({"a": NaN, "b": [0, Infinity, -Infinity], "c": 1e999, "d": -1E400, "e": "NaN", "f": 1e-999})";
    CHECK_FALSE(parse_json(text).ok());
    CHECK(json_or_nothing(text).is_discarded());
    CHECK_FALSE(parse_json_strictly(text, "it", 8).ok());
    const auto read = parse_json_strictly(text, "it", 8, 0, JsonNumbers::kPython);
    REQUIRE(read.ok());
    CHECK(read.value() == json_or_nothing(text, JsonNumbers::kPython));
    CHECK(read.value()["a"] == "NaN (no JSON number)");
    CHECK(read.value()["b"][2] == "-Infinity (no JSON number)");
    CHECK(read.value()["c"] == "1e999 (no JSON number)");
    CHECK(read.value()["e"] == "NaN");
    CHECK(read.value()["f"] == 0);
    CHECK_FALSE(json_integer(read.value()["a"], 0, 9));
    const auto ordered = parse_ordered_json(R"({"z": [NaN, -Infinity], "a": "Infinity"})", 8, JsonNumbers::kPython);
    REQUIRE(ordered.ok());
    CHECK(python_json_text(ordered.value(), -1) == R"({"z":[NaN,-Infinity],"a":"Infinity"})");
    for (const char* bad : {"{\"a\": Nan}", "{\"a\": NaN NaN}", "{\"a\": +Infinity}", "{\"a\": - 1}"}) {
      CAPTURE(bad);
      CHECK(json_or_nothing(bad, JsonNumbers::kPython).is_discarded());
    }
    CHECK_FALSE(parse_json_strictly(nested(9) + "NaN", "it", 8, 0, JsonNumbers::kPython).ok());
  }

  TEST_CASE("half of a surrogate pair is read where Python's dialect is asked for, found, and written back") {
    const std::string text = R"({"a":"x\ud83d","b":"\uDC00","c":"\ud83d\ude00","d":"\\ud800"})";
    CHECK_FALSE(parse_json(text).ok());
    const auto read = parse_ordered_json(text, 8, JsonNumbers::kPython);
    REQUIRE(read.ok());
    for (const char* key : {"a", "b"}) CHECK(has_half_pair(read.value()[key].get<std::string>()));
    for (const char* key : {"c", "d"}) CHECK_FALSE(has_half_pair(read.value()[key].get<std::string>()));
    CHECK(python_json_text(read.value(), -1) ==
          "{\"a\":\"x\\ud83d\",\"b\":\"\\uDC00\",\"c\":\"\xf0\x9f\x98\x80\",\"d\":\"\\\\ud800\"}");
  }

  TEST_CASE("another kind of file in place of JSON is named") {
    for (const auto& [text, kind] : {std::pair(std::string("\xff\xfe{\0", 4), "is UTF-16: convert it (iconv"),
                                     {std::string("{\0\"\0", 4), "is UTF-16LE"},
                                     {" \n<!DOCTYPE html>", "is a page of HTML or XML"},
                                     {"\x1f\x8b\x08", "is packed by gzip"},
                                     {"", "is empty"},
                                     {std::string(8, '\0'), "begins with NULs"},
                                     {"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"}}) {
      CAPTURE(kind);
      for (const auto& read : {parse_json(text), parse_json_strictly(text, "it", 8), parse_python_object(text)}) {
        REQUIRE_FALSE(read.ok());
        CHECK(read.error().message.find(kind) != std::string::npos);
      }
    }
    CHECK(parse_python_object("{\"a\": NaN}").ok());
    CHECK(parse_python_object(" []").error().message.starts_with("byte 0: expected a JSON object, found \" []\""));
    CHECK(parse_python_object("{\"a\": ").error().message.starts_with("byte 6: not JSON"));
  }

  TEST_CASE("the text of a line is read whatever its other fields hold") {
    const auto deep = [](int64_t depth) { return R"({"text": "world", "meta": )" + nested(depth) + "}"; };
    for (const std::string& line :
         {std::string(R"({"text": "world", "score": NaN})"), std::string(R"({"score": -Infinity, "text": "world"})"),
          std::string(R"({"score": [1e999, {"text": "no"}], "text": "world"})"), deep(80), deep(200'000),
          std::string(R"({"other": "\ud83d half", "text": "world", "more": "\udc00\ud800"})"),
          std::string(R"({"text": 1, "text": "world"})"), std::string(R"({"te\u0078t": "w\u006frld"})")}) {
      CAPTURE(line.substr(0, 60));
      const Result<std::string> text = json_text_field(line, "text");
      REQUIRE(text.ok());
      CHECK(text.value() == "world");
    }
    CHECK(json_text_field(R"({"text": "\ud83d\ude00", "x": NaN})", "text").value() == "\xf0\x9f\x98\x80");
    for (const auto& [line, says] :
         {std::pair(R"({"text": "a\ud83d", "x": NaN})", "half of a surrogate pair"),
          std::pair(R"({"text": NaN, "b": "c"})", "\"text\" is no text; fields with text: \"b\""),
          std::pair(R"({"text": {"text": "a"}})", "\"text\" is no text; fields with text: none"),
          std::pair(R"({"texts": "a"})", "\"text\" is missing; fields with text: \"texts\""),
          std::pair(R"({"text": "a", "x": Nope})", "byte 19: not JSON"), std::pair(R"({"text": "a"} x)", "not JSON"),
          std::pair("\"a\"", "expected a JSON object"), std::pair(R"([{"text": "a"}])", "expected a JSON object")}) {
      CAPTURE(says);
      const Result<std::string> text = json_text_field(line, "text");
      REQUIRE_FALSE(text.ok());
      CHECK_MESSAGE(text.error().message.find(says) != std::string::npos, text.error().message);
    }
  }

  TEST_CASE("strictly read, a key has one value") {
    CHECK(parse_json(R"({"a":1,"a":2})").ok());
    const Result<nlohmann::json> twice = parse_json_strictly(R"({"a":1,"a":2})", "the header", 8);
    REQUIRE_FALSE(twice.ok());
    CHECK(twice.error().message == R"(the header names "a" twice)");
    CHECK(parse_json_strictly("{", "the header", 8, 100).error().message.starts_with("byte 102: the header"));
    CHECK(parse_json_strictly(nested(9), "x", 8).error().message.find("nested deeper than 8") != std::string::npos);
  }

  TEST_CASE("a key that a text names twice is quoted in characters that a terminal takes, and cut where it is long") {
    const std::string key = "a\\u001b[2J\\nstep 7 is saved";
    const Result<nlohmann::json> twice = parse_json_strictly("{\"" + key + "\":1,\"" + key + "\":2}", "the message", 8);
    REQUIRE_FALSE(twice.ok());
    CHECK(twice.error().message == R"(the message names "a\x1b[2J\x0astep 7 is saved" twice)");
    const std::string wide = "\"" + std::string(5000, 'k') + "\":1";
    CHECK(parse_json_strictly("{" + wide + "," + wide + "}", "x", 8).error().message.size() < 200);
  }

  TEST_CASE("a value has a text whatever its bytes are") {
    const nlohmann::json value{{"why", "caf\xe9: no space left"}};
    CHECK(json_text(value) == "{\"why\":\"caf\xef\xbf\xbd: no space left\"}");
    CHECK(json_text(value, 1) == "{\n \"why\": \"caf\xef\xbf\xbd: no space left\"\n}");
    CHECK(parse_json(json_text(nlohmann::ordered_json{{"\xff", "\xc3"}})).ok());
  }

  TEST_CASE("a field of a value of any type is read without a throw") {
    for (const char* text : {"[]", "null", "\"ok\"", "3", "{}", "}", R"({"a":[]})", R"({"a":{}})", R"({"a":null})"}) {
      CAPTURE(text);
      const nlohmann::json value = json_or_nothing(text);
      CHECK((json_field(value, "a").is_null() || json_field(value, "a").empty()));
      CHECK(json_string(value, "a", "none") == "none");
      CHECK(json_number(value, "a", 2.5) == 2.5);
      CHECK(json_count(value, "a", 7) == 7);
      CHECK_FALSE(json_flag(value, "a"));
    }
    const nlohmann::json value = json_or_nothing(R"({"s":"x","n":1.5,"c":4,"less":-4,"f":true})");
    CHECK(json_string(value, "s") == "x");
    CHECK(json_number(value, "n") == 1.5);
    CHECK(json_count(value, "c") == 4);
    CHECK(json_count(value, "less", 9) == 9);
    CHECK(json_flag(value, "f"));
    CHECK(json_string(value, "c").empty());
  }
}
