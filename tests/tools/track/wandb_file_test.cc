#include "tools/track/wandb_file.h"

#include <doctest/doctest.h>

using namespace cairn::tools;

namespace {

std::string hex(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    out += kDigits[static_cast<uint8_t>(c) >> 4];
    out += kDigits[static_cast<uint8_t>(c) & 15];
  }
  return out;
}

}  // namespace

TEST_SUITE("tools/track/wandb_file") {
  TEST_CASE("a file begins with its mark, and a record has zlib's CRC of its type and bytes") {
    CHECK(hex(wandb::file_header()) == "3a572642e1be00");
    // python3 -c "import zlib; print(hex(zlib.crc32(b'\x01abc')))": 0x539d20a9
    CHECK(hex(wandb::framed("abc", 7)) ==
          "a9209d53"
          "0300"
          "01"
          "616263");
  }

  TEST_CASE("records are cut at blocks of 32768 bytes, whose last 6 bytes or fewer stay empty") {
    const auto type_at = [](const std::string& bytes, size_t at) { return static_cast<int>(bytes.at(at + 6)); };
    const std::string at_the_end = wandb::framed("abc", 32768 - 6);
    CHECK(at_the_end.substr(0, 6) == std::string(6, '\0'));
    CHECK(type_at(at_the_end, 6) == 1);
    const std::string fits_no_byte = wandb::framed("abc", 32768 - 7);  // an empty first piece
    CHECK(fits_no_byte.size() == 7 + 7 + 3);
    CHECK(type_at(fits_no_byte, 0) == 2);
    CHECK(type_at(fits_no_byte, 7) == 4);
    const std::string long_one = wandb::framed(std::string(70000, 'x'), 0);
    CHECK(long_one.size() == 70000 + 3 * 7);
    CHECK(type_at(long_one, 0) == 2);
    CHECK(type_at(long_one, 32768) == 3);
    CHECK(type_at(long_one, 65536) == 4);
    CHECK(wandb::framed(std::string(32761, 'x'), 0).size() == 32768);  // exactly a block
  }

  TEST_CASE("a step is a message of items and its number") {
    CHECK(hex(wandb::history_record(3, {.step = 300, .time = 1.5, .values = {{"a", 0.5}}})) ==
          "0803"
          "1233"  // num 3; history
          "0a09"
          "0a0161"
          "820103302e35"  // a: 0.5
          "0a12"
          "0a0a5f74696d657374616d70"
          "820103312e35"  // _timestamp: 1.5
          "0a0d"
          "0a055f73746570"
          "82010333"
          "3030"  // _step: 300
          "1203"
          "08ac02");  // step { num: 300 }
    CHECK(hex(wandb::exit_record(4, 0)) ==
          "08049201"
          "00");
  }
}
