#include "runtime/data/split.h"

#include <doctest/doctest.h>

#include <cmath>

#include "runtime/data/megatron_writer.h"
#include "tests/runtime/data/scratch.h"

using namespace cairn;
using namespace cairn::data;

TEST_SUITE("runtime/data/split") {
  TEST_CASE("the bounds are Megatron-LM's, halves to even") {
    CHECK(split_bounds({995, 4, 1}, 1234).value() == std::array<int64_t, 4>{0, 1228, 1233, 1234});
    CHECK(split_bounds({9, 1, 0}, 15).value() == std::array<int64_t, 4>{0, 14, 15, 15});
    CHECK(split_bounds({98, 1, 1}, 150).value() == std::array<int64_t, 4>{0, 147, 148, 150});
    CHECK(split_bounds({}, 7).value() == std::array<int64_t, 4>{0, 7, 7, 7});
    CHECK(split_bounds({1}, 7).value() == std::array<int64_t, 4>{0, 7, 7, 7});
    CHECK(split_bounds({0.5, 0.5}, 5).value() == std::array<int64_t, 4>{0, 2, 5, 5});  // 2.5 rounds to 2
    CHECK(split_bounds({0.5, 0.5}, 7).value() == std::array<int64_t, 4>{0, 4, 7, 7});  // 3.5 rounds to 4
  }

  TEST_CASE("parts that are no split are refused") {
    for (const std::vector<double>& parts :
         {std::vector<double>{1, 1, 1, 1}, {-1, 2}, {0, 0}, {std::nan(""), 1}, {1.0 / 0.0, 1}, {1e308, 1e308}})
      CHECK(!split_bounds(parts, 10).ok());
  }

  TEST_CASE("several documents are cut between them, one by tokens") {
    const TempDir dir;
    auto writer = MegatronWriter::create(dir / "set", DType::kI32, {}).value();
    for (int32_t document = 0; document < 10; ++document) {
      const std::vector<int32_t> tokens(static_cast<size_t>(document + 1), document);
      REQUIRE(writer.add(tokens).ok());
      REQUIRE(writer.end_document().ok());
    }
    REQUIRE(writer.finish().ok());
    auto parts = split_source(open_megatron(dir / "set").value(), {8, 1, 1}).value();
    CHECK(parts[0]->token_count() == 36);
    CHECK(parts[1]->token_count() == 9);
    CHECK(parts[2]->token_count() == 10);
    std::vector<int32_t> out(9);
    REQUIRE(parts[1]->read(0, 9, out.data()).ok());
    CHECK(out == std::vector<int32_t>(9, 8));

    write_file(dir / "raw.bin", std::string(2000, 'a'));
    parts = split_source(open_token_file(dir / "raw.bin", "uint16").value(), {90, 10}).value();
    CHECK(parts[0]->token_count() == 900);
    CHECK(parts[1]->token_count() == 100);
    CHECK(parts[2] == nullptr);
    CHECK(parts[0]->fingerprint() != parts[1]->fingerprint());

    auto none = split_source(open_token_file(dir / "raw.bin", "uint16").value(), {0, 1});
    REQUIRE(!none.ok());
    CHECK(says(none.error().message, {"raw.bin", "0,1", "nothing to train on"}));
  }
}
