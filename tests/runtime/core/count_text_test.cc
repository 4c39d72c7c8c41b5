#include "runtime/core/count_text.h"

#include <doctest/doctest.h>

using namespace cairn;

TEST_SUITE("runtime/core/count_text") {
  TEST_CASE("one thing is singular, and no other number is") {
    CHECK(count_text(1, "rank") == "1 rank");
    CHECK(count_text(0, "rank") == "0 ranks");
    CHECK(count_text(2, "rank") == "2 ranks");
    CHECK(count_text(-1, "rank") == "-1 ranks");
    CHECK(count_text(1, "micro-batch") == "1 micro-batch");
    CHECK(count_text(3, "micro-batch") == "3 micro-batches");
    CHECK(count_text(2, "other copy") == "2 other copies");
    CHECK(count_text(2, "key") == "2 keys");
    CHECK(plural(2, "process") == "processes");
    CHECK(plural(1, "process") == "process");
  }
}
