#include "ckpt/persist/checksum_bytes.h"

#include <doctest/doctest.h>

#include <vector>

#include "runtime/core/shape.h"

using namespace cairn;
using namespace cairn::ckpt;

TEST_SUITE("ckpt/persist/checksum_bytes") {
  constexpr int64_t kChunk = int64_t{4} << 20;
  int64_t of(const Shape& shape, int64_t elem_bytes = 4, int64_t chunk_bytes = kChunk) {
    return checksum_bytes(std::vector<int64_t>(shape.size()), shape, elem_bytes, chunk_bytes);
  }

  TEST_CASE("short rows, single rows and what is no matrix have chunks as large as requests") {
    CHECK(of({}) == kChunk);
    CHECK(of({1 << 24}) == kChunk);
    CHECK(of({4096, 16'383}) == kChunk);
    CHECK(of({1, 1 << 20}) == kChunk);
    CHECK(of({4096, 4096}, 2, 4096) == 4096);
  }

  TEST_CASE("a long row is cut into 16, 8, 4 or 2 parts of whole pages, of 16 KiB and more") {
    CHECK(of({64, 16'384}) == 16 << 10);       // 64 KiB
    CHECK(of({64, 32'768}) == 16 << 10);       // 128 KiB
    CHECK(of({64, 65'536}) == 16 << 10);       // 256 KiB
    CHECK(of({64, 65'536}, 2) == 16 << 10);    // 128 KiB
    CHECK(of({64, 262'144}) == 64 << 10);      // 1 MiB
    CHECK(of({64, 28'672}) == 28 << 10);       // 112 KiB: 28 pages
    CHECK(of({64, 49'152}) == 24 << 10);       // 192 KiB
    CHECK(of({64, 18'432}) == 36 << 10);       // 72 KiB: 18 pages
    CHECK(of({64, 53'248}) == 52 << 10);       // 208 KiB: 52 pages, 13 of them a quarter
    CHECK(of({64, 20'000}) == kChunk);         // 80,000 bytes: no part is whole pages
    CHECK(of({4, 1 << 26}) == kChunk);         // 256 MiB: a sixteenth is four chunks
    CHECK(of({4, 5 << 20}) == (5 << 20) / 4);  // 20 MiB
    CHECK(of({64, 16'384}, 4, 4096) == 4096);  // requests are smaller still
    CHECK(of({64, 8, 16'384}) == 16 << 10);    // the innermost long row decides
    CHECK(of({64, 128, 1024}) == 32 << 10);    // and here that is the middle dim's
    CHECK(of({64, 128, 1, 1024, 1}) == 32 << 10);
  }
}
