#include "ckpt/plan/overlap.h"

#include <doctest/doctest.h>

#include "runtime/core/random.h"
#include "tests/ckpt/plan/layouts.h"

using namespace cairn;
using namespace cairn::ckpt;

TEST_SUITE("ckpt/plan/overlap") {
  TEST_CASE("a cut of columns is one entry of many rows, whole rows are one row together") {
    const Shape shape{4, 8};
    CHECK(overlap_rows(Box::whole(shape), Box{{1, 2}, {3, 6}}, shape, DType::kF32).value() ==
          std::vector<CopyRows>{{(8 + 2) * 4, 0, 16, 2, 32, 16}});
    CHECK(overlap_rows(Box::whole(shape), Box{{1, 0}, {3, 8}}, shape, DType::kBf16).value() ==
          std::vector<CopyRows>{{16, 0, 32}});
    CHECK(overlap_rows(Box{{0, 0}, {2, 8}}, Box{{2, 0}, {4, 8}}, shape, DType::kF32).value().empty());
    CHECK(overlap_rows(Box{}, Box{}, {}, DType::kF64).value() == std::vector<CopyRows>{{0, 0, 8}});
  }

  TEST_CASE("rows go on over every dimension outside that is whole in both boxes") {
    const Shape experts{3, 4, 8};
    const Box columns{{0, 0, 2}, {3, 4, 6}};
    CHECK(overlap_rows(Box::whole(experts), columns, experts, DType::kF32).value() ==
          std::vector<CopyRows>{{8, 0, 16, 12, 32, 16}});
    const Box some_rows{{0, 1, 2}, {3, 3, 6}};  // each expert begins elsewhere
    CHECK(overlap_rows(Box::whole(experts), some_rows, experts, DType::kF32).value() ==
          std::vector<CopyRows>{{40, 0, 16, 2, 32, 16}, {168, 32, 16, 2, 32, 16}, {296, 64, 16, 2, 32, 16}});
    const Box one_row{{0, 1, 2}, {3, 2, 6}};  // a row of each expert: the experts are the rows
    CHECK(overlap_rows(Box::whole(experts), one_row, experts, DType::kF32).value() ==
          std::vector<CopyRows>{{40, 0, 16, 3, 128, 16}});
    const Shape thin{5, 1, 8};
    CHECK(overlap_rows(Box::whole(thin), Box{{1, 0, 2}, {4, 1, 6}}, thin, DType::kF32).value() ==
          std::vector<CopyRows>{{40, 0, 16, 3, 32, 16}});
  }

  TEST_CASE("a box outside the tensor, inverted or of other dims is refused by name") {
    CHECK(overlap_rows(Box{{0}, {9}}, Box{{0}, {8}}, {8}, DType::kF32).error().message ==
          "saved box [0:9] is not a box of a tensor of shape [8]");
    CHECK(overlap_rows(Box{{0}, {8}}, Box{{5}, {3}}, {8}, DType::kF32).error().message ==
          "wanted box [5:3] is not a box of a tensor of shape [8]");
    CHECK_FALSE(overlap_rows(Box{{0}, {8}}, Box{{0, 0}, {1, 1}}, {8}, DType::kF32).ok());
  }

  TEST_CASE("rows of random boxes move exactly the common elements, sorted, and no two could be one") {
    for (uint64_t seed = 0; seed < 400; ++seed) {
      CAPTURE(seed);
      const uint64_t key = stream_key(seed, "overlap");
      uint64_t n = 0;
      const auto below = [&](int64_t limit) {
        return static_cast<int64_t>(uniform_at(key, n++) * static_cast<double>(limit));
      };
      Shape shape(1 + below(4));
      for (int64_t& d : shape) d = 1 + below(5);
      const auto random_box = [&] {
        Box box = Box::whole(shape);
        for (size_t d = 0; d < shape.size(); ++d) {
          if (below(2) == 0) continue;
          box.lo[d] = below(shape[d]);
          box.hi[d] = box.lo[d] + 1 + below(shape[d] - box.lo[d]);
        }
        return box;
      };
      const Box saved = random_box(), wanted = random_box();
      struct Row {
        int64_t source_offset, target_offset, bytes;
      };
      std::vector<Row> rows;
      const auto copies = overlap_rows(saved, wanted, shape, DType::kF32).value();
      for (const CopyRows& copy : copies) {
        REQUIRE(copy.rows >= 1);
        for (int64_t k = 0; k < copy.rows; ++k) {
          rows.push_back(
              {copy.source_offset + k * copy.source_stride, copy.target_offset + k * copy.target_stride, copy.bytes});
        }
      }
      if (shape.size() < 3) REQUIRE(copies.size() <= 1);  // any cut of a matrix

      std::vector<int64_t> source(saved.count_elems()), target(wanted.count_elems(), -1);
      ckpt::testing::walk(saved, shape, [&](int64_t k, int64_t flat) { source[k] = flat; });
      for (size_t k = 0; k < rows.size(); ++k) {
        for (int64_t e = 0; e < rows[k].bytes / 4; ++e) {
          REQUIRE(target[rows[k].target_offset / 4 + e] == -1);
          target[rows[k].target_offset / 4 + e] = source[rows[k].source_offset / 4 + e];
        }
        if (k == 0) continue;
        REQUIRE(rows[k - 1].source_offset + rows[k - 1].bytes <= rows[k].source_offset);
        const bool joined = rows[k - 1].source_offset + rows[k - 1].bytes == rows[k].source_offset &&
                            rows[k - 1].target_offset + rows[k - 1].bytes == rows[k].target_offset;
        REQUIRE_FALSE(joined);
      }
      ckpt::testing::walk(wanted, shape, [&](int64_t k, int64_t flat) {
        std::vector<int64_t> at(shape.size());
        for (int64_t d = static_cast<int64_t>(shape.size()) - 1, rest = flat; d >= 0; --d) {
          at[d] = rest % shape[d];
          rest /= shape[d];
        }
        Box one{at, at};
        for (int64_t& hi : one.hi) ++hi;
        REQUIRE(target[k] == (contains(saved, one) ? flat : -1));
      });
    }
  }
}
