#include "ckpt/persist/checksum_bytes.h"

#include <doctest/doctest.h>

#include <vector>

#include "runtime/core/shape.h"

using namespace cairn;
using namespace cairn::ckpt;

TEST_SUITE("ckpt/persist/checksum_bytes") {
  constexpr int64_t kChunk = int64_t{4} << 20;
  int64_t of(const Shape& shape, int64_t elem_bytes = 4, int64_t chunk_bytes = kChunk) {
    return ChecksumBytes(chunk_bytes).of(std::vector<int64_t>(shape.size()), shape, elem_bytes);
  }

  TEST_CASE("short rows, single rows and what is no matrix have chunks as large as requests") {
    CHECK(of({}) == kChunk);
    CHECK(of({1 << 24}) == kChunk);
    CHECK(of({4096, 8'191}) == kChunk);
    CHECK(of({1, 1 << 20}) == kChunk);
    CHECK(of({4096, 4096}, 2, 4096) == 4096);
  }

  TEST_CASE("a long row is cut into 16, 8, 4 or 2 parts of whole pages, of 8 KiB and more") {
    CHECK(of({64, 8'192}) == 8 << 10);         // 32 KiB
    CHECK(of({64, 10'240}) == 20 << 10);       // 40 KiB: 10 pages
    CHECK(of({64, 16'384}) == 8 << 10);        // 64 KiB
    CHECK(of({64, 32'768}) == 8 << 10);        // 128 KiB
    CHECK(of({64, 65'536}) == 16 << 10);       // 256 KiB
    CHECK(of({64, 65'536}, 2) == 8 << 10);     // 128 KiB
    CHECK(of({64, 262'144}) == 64 << 10);      // 1 MiB
    CHECK(of({64, 28'672}) == 28 << 10);       // 112 KiB: 28 pages
    CHECK(of({64, 49'152}) == 12 << 10);       // 192 KiB
    CHECK(of({64, 18'432}) == 36 << 10);       // 72 KiB: 18 pages
    CHECK(of({64, 53'248}) == 52 << 10);       // 208 KiB: 52 pages, 13 of them a quarter
    CHECK(of({64, 20'000}) == kChunk);         // 80,000 bytes: no part is whole pages
    CHECK(of({4, 1 << 26}) == kChunk);         // 256 MiB: a sixteenth is four chunks
    CHECK(of({4, 5 << 20}) == (5 << 20) / 4);  // 20 MiB
    CHECK(of({64, 16'384}, 4, 4096) == 4096);  // requests are smaller still
    CHECK(of({64, 8, 16'384}) == 8 << 10);     // the innermost long row decides
    CHECK(of({64, 128, 1024}) == 32 << 10);    // and here that is the middle dim's
    CHECK(of({64, 128, 1, 1024, 1}) == 32 << 10);
  }

  TEST_CASE("a large state has less of them: 8 KiB and doubled until they are few enough, short rows apart") {
    const auto least = [](int64_t gib, std::vector<Shape> others = {}) {
      ChecksumBytes bytes(kChunk);
      others.push_back({gib << 15, 8'192});  // rows of 32 KiB
      for (const Shape& shape : others) bytes.count(Shape(shape.size()), shape, 4);
      return bytes.least();
    };
    CHECK(least(32) == 8 << 10);  // 4 Mi of 8 KiB
    CHECK(least(32, {{1 << 20, 8'191}, {1 << 30}, {}}) == 8 << 10);
    CHECK(least(32, {{2, 8'192}}) == 16 << 10);
    CHECK(least(64) == 16 << 10);
    CHECK(least(65) == 32 << 10);                           // a row of 32 KiB is not cut then
    CHECK(least(65, {{64 << 10, 16'384}}) == 32 << 10);     // 4 GiB of halves of 64 KiB
    CHECK(least(1, {{1 << 14, 64, 65'536}}) == 64 << 10);   // 256 GiB in rows of 256 KiB
    CHECK(least(1, {{1 << 20, 1 << 21}}) == 1 << 20 << 1);  // 8 TiB in rows of 8 MiB
    CHECK(least(1, {{1 << 16, 1 << 26}}) == 8 << 10);       // 16 TiB in rows of 256 MiB: those are not cut
  }

  TEST_CASE("the number of counted checksums decides for all shards of a save") {
    ChecksumBytes bytes(kChunk);
    const Shape zero = {0, 0}, large = {64 << 15, 8'192}, small = {64, 16'384};
    bytes.count(zero, small, 4);
    CHECK(bytes.of(zero, small, 4) == 8 << 10);
    bytes.count(zero, large, 4);
    CHECK(bytes.least() == 32 << 10);
    CHECK(bytes.of(zero, small, 4) == 32 << 10);
    CHECK(bytes.of(zero, large, 4) == kChunk);
  }
}
