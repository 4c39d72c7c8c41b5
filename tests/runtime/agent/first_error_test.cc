// Which error of all hosts ended a generation.
#include "runtime/agent/first_error.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

using namespace cairn::agent;

namespace {

Failure error(int64_t rank, int64_t seen_ns, FailureClass which = FailureClass::kCrash) {
  return {.rank = rank, .failure_class = which, .seen_ns = seen_ns};
}
Failure lost(int64_t rank, int64_t seen_ns) {
  Failure out = error(rank, seen_ns, FailureClass::kHostLost);
  out.host = true;
  return out;
}

struct Told {
  int64_t host;
  Failure failure;
};

/// The rank of the cause, the same in whichever order errors come; -1: none.
int64_t cause_of(std::vector<Told> told) {
  std::ranges::sort(told, {}, [](const Told& one) { return one.failure.seen_ns; });
  std::vector<size_t> order(told.size());
  for (size_t k = 0; k < order.size(); ++k) order[k] = k;
  int64_t rank = -2;
  do {
    FirstError errors;
    for (const size_t k : order) errors.add(told[k].host, told[k].failure);
    const int64_t now = errors.cause() != nullptr ? errors.cause()->rank : -1;
    if (rank == -2) rank = now;
    CHECK(now == rank);
    CHECK(errors.others().size() + (errors.cause() != nullptr ? 1 : 0) == told.size());
  } while (std::ranges::next_permutation(order).found);
  return rank;
}

}  // namespace

TEST_SUITE("runtime/agent/first_error") {
  TEST_CASE("the earliest error wins, in whatever order errors come") {
    CHECK(cause_of({}) == -1);
    CHECK(cause_of({{0, error(0, 30)}, {1, error(2, 10)}, {2, error(4, 20)}}) == 2);
  }

  TEST_CASE("what tells of another's end is a cause only where nothing else is known") {
    using enum FailureClass;
    CHECK(cause_of({{0, error(0, 5, kSymptom)}, {1, error(2, 10)}, {0, error(1, 6, kSymptom)}}) == 2);
    CHECK(cause_of({{0, error(1, 6, kSymptom)}, {1, error(2, 5, kSymptom)}}) == 2);
    CHECK(cause_of({{0, error(1, 6, kSymptom)}, {1, error(3, 500, kHang)}}) == 3);
  }

  TEST_CASE("a lost host is the cause, unless one of its ranks had failed before, or another host's") {
    using enum FailureClass;
    CHECK(cause_of({{1, lost(2, 10)}, {0, error(0, 12, kSymptom)}}) == 2);
    CHECK(cause_of({{1, lost(2, 10)}, {1, error(3, 8, kOutOfMemory)}}) == 3);
    CHECK(cause_of({{1, lost(2, 10)}, {1, error(3, 8, kSymptom)}}) == 2);
    CHECK(cause_of({{1, lost(2, 10)}, {0, error(0, 9)}}) == 0);
    CHECK(cause_of({{1, lost(2, 10)}, {0, error(0, 11)}}) == 2);
  }

  TEST_CASE("a second word on a rank counts where the first was a symptom") {
    FirstError errors;
    errors.add(0, error(1, 5, FailureClass::kSymptom));
    errors.add(0, error(1, 9, FailureClass::kHang));
    REQUIRE(errors.cause() != nullptr);
    CHECK(errors.cause()->failure_class == FailureClass::kHang);
    errors.add(0, error(1, 1, FailureClass::kCrash));
    CHECK(errors.cause()->failure_class == FailureClass::kHang);
    CHECK(errors.others().empty());
    errors.clear();
    CHECK(errors.cause() == nullptr);
  }
}
