#include "runtime/core/crc32c.h"

#include <doctest/doctest.h>

#include <string>

using namespace cairn;

TEST_SUITE("runtime/core/crc32c") {
  TEST_CASE("CRC-32C has the values of RFC 3720, and TFRecord masks it") {
    CHECK(crc32c("123456789") == 0xe3069283u);
    CHECK(crc32c(std::string(32, '\0')) == 0x8a9136aau);
    CHECK(masked_crc32c("123456789") == 0xc78ab0e5u);
  }
}
