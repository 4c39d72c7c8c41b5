#include "converters/safetensors.h"

#include <doctest/doctest.h>

#include <cstring>
#include <random>

using namespace cairn;
using namespace cairn::convert;

namespace {

std::string file_of(const std::string& json, int64_t data_bytes) {
  const uint64_t n = json.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &n, 8);
  return out + json + std::string(data_bytes, 'x');
}

std::string refusal(const std::string& json, int64_t data_bytes) {
  const std::string file = file_of(json, data_bytes);
  const auto header = decode_safetensors_header(file, static_cast<int64_t>(file.size()));
  return header.ok() ? "accepted" : header.error().message;
}

}  // namespace

TEST_SUITE("converters/safetensors") {
  TEST_CASE("headers are the library's own bytes") {
    std::vector<SafeTensor> none;
    CHECK(encode_safetensors_header(none, {}).value().substr(8) == "{}      ");
    CHECK(encode_safetensors_header(none, {{"framework", "pt"}}).value().substr(8) ==
          "{\"__metadata__\":{\"framework\":\"pt\"}}     ");
    std::vector<SafeTensor> one = {{.name = "attn.0", .dtype = "F32", .shape = {1, 2, 3}}};
    CHECK(encode_safetensors_header(one, {}).value().substr(8) ==
          "{\"attn.0\":{\"dtype\":\"F32\",\"shape\":[1,2,3],\"data_offsets\":[0,24]}}");
    std::vector<SafeTensor> two = {{.name = "b", .dtype = "BF16", .shape = {3}},
                                   {.name = "a", .dtype = "F32", .shape = {2, 2}}};
    const std::string bytes = encode_safetensors_header(two, {{"format", "pt"}}).value();
    CHECK(bytes.size() == 8 + 144);
    CHECK(bytes.substr(8, 59) == "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":");
    CHECK(two[1].begin == 16);
  }

  TEST_CASE("each reader rule refuses with its reason") {
    CHECK(refusal("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8) == "accepted");
    CHECK(refusal("  {}  ", 0) == "accepted");
    CHECK(refusal("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 9) ==
          "the header describes 70 bytes, the file has 71: it is followed by something else");
    CHECK(refusal("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 7).find("cut short") !=
          std::string::npos);
    CHECK(refusal("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4) ==
          "tensor \"a\": data_offsets [0, 4] hold 4 bytes, but F32 of shape [2] takes 8");
    CHECK(refusal("{\"a\":{\"dtype\":\"F33\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8) ==
          "tensor \"a\": unknown dtype \"F33\"");
    CHECK(refusal("{\"a\":1,\"a\":2}", 0) == "the header names \"a\" twice");
    CHECK(refusal("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8) ==
          "tensor \"a\": unknown field \"x\"");
    CHECK(refusal("{\"a\":{\"dtype\":\"F32\",\"shape\":[9223372036854775807,4],\"data_offsets\":[0,8]}}", 8) ==
          "tensor \"a\": its size overflows");
    CHECK(refusal("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}", 3).find("hole") !=
          std::string::npos);
    CHECK(refusal("{\"__metadata__\":{\"a\":1}}", 0) == "\"__metadata__\".\"a\" is no string");
    CHECK(refusal("[1]", 0) == "byte 8: the header is no JSON object");
    CHECK(refusal("{", 0).find("not JSON") != std::string::npos);
    CHECK(decode_safetensors_header("abc", 3).error().message ==
          "byte 0: the file has 3 bytes, a safetensors file at least 8");
  }

  TEST_CASE("no mutation of a header crashes the reader") {
    std::vector<SafeTensor> tensors = {{.name = "w", .dtype = "F32", .shape = {4, 4}},
                                       {.name = "i", .dtype = "I64", .shape = {2}}};
    const std::string head = encode_safetensors_header(tensors, {{"format", "pt"}}).value();
    const std::string file = head + std::string(80, 'x');
    std::mt19937 random(1);
    int accepted = 0;
    for (int k = 0; k < 20000; ++k) {
      std::string mutated = file;
      for (uint32_t n = 0; n <= random() % 4; ++n) mutated[random() % head.size()] = static_cast<char>(random());
      if (random() % 4 == 0) mutated.resize(random() % mutated.size());
      accepted += decode_safetensors_header(mutated, static_cast<int64_t>(mutated.size())).ok();
    }
    CHECK(accepted < 20000);  // most are refused; a changed name is a valid file
  }
}
