#include "runtime/core/shape.h"

#include <doctest/doctest.h>

using namespace cairn;

TEST_SUITE("runtime/core/shape") {
  TEST_CASE("boxes of a flat range tile it in order, each contiguous") {
    const Shape shape = {3, 4, 5};
    for (int64_t begin = 0; begin <= 60; ++begin) {
      for (int64_t end = begin; end <= 60; ++end) {
        int64_t at = begin;
        const auto boxes = boxes_of_flat_range(shape, begin, end);
        CHECK(boxes.size() <= 5);
        for (const Box& box : boxes) {
          REQUIRE(flat_offset(shape, box.lo) == at);
          std::vector<int64_t> last = box.hi;
          for (auto& x : last) --x;
          REQUIRE(flat_offset(shape, last) == at + box.count_elems() - 1);
          at += box.count_elems();
        }
        REQUIRE(at == end);
      }
    }
  }

  TEST_CASE("intersection of boxes that do not meet is empty") {
    const Box a{{0, 0}, {2, 2}}, b{{2, 0}, {4, 2}};
    CHECK(intersect(a, b).empty());
    CHECK(intersect(a, Box{{1, 1}, {4, 4}}) == Box{{1, 1}, {2, 2}});
    CHECK(contains(a, Box{{0, 1}, {1, 2}}));
    CHECK_FALSE(contains(a, b));
  }
}
