// Steps that take much longer than the run's own steps did.
#include "tools/run/agent/step_pace.h"

#include <doctest/doctest.h>

#include <optional>
#include <vector>

using namespace cairn::tools;

namespace {

struct Run {
  StepPace pace;
  int64_t step = 0, tokens = 0;
  /// The news of `count` steps.
  std::vector<StepPace::News> steps(int64_t count, double ms, int64_t tokens_of_each = 1000) {
    std::vector<StepPace::News> out;
    for (; count > 0; --count) {
      tokens += tokens_of_each;
      if (const auto news = pace.add(++step, ms, tokens)) out.push_back(*news);
    }
    return out;
  }
};

}  // namespace

TEST_SUITE("tools/run/step_pace") {
  TEST_CASE("steps that take twice as long for a window are reported once, and once when they no longer do") {
    Run run;
    CHECK(run.steps(8, 90'000).empty());  // the first of a start
    CHECK(run.steps(80, 1000).empty());
    CHECK(run.steps(80, 1900).empty());
    const auto slow = run.steps(80, 20'000);
    REQUIRE(slow.size() == 1);
    CHECK_FALSE(slow[0].over);
    CHECK(slow[0].step == 176);
    CHECK(slow[0].ratio == doctest::Approx(20));
    CHECK(slow[0].step_ms == doctest::Approx(20'000));
    run.pace.clear();
    CHECK(run.steps(8, 90'000).empty());
    CHECK(run.steps(80, 1600).empty());  // not yet as before
    const auto over = run.steps(80, 1200);
    REQUIRE(over.size() == 1);
    CHECK(over[0].over);
    CHECK(over[0].step == 344);
    CHECK(over[0].ratio == doctest::Approx(1.2));
    CHECK(run.steps(80, 1200).empty());
  }

  TEST_CASE("a few steps that take long each time are slow steps, though most are as fast as before") {
    Run run;
    run.steps(8 + 4000, 4);
    size_t told = 0;
    for (int k = 0; k < 200; ++k) told += run.steps(2, 4).size() + run.steps(1, 44).size();
    CHECK(told == 1);
  }

  TEST_CASE("steps that become slower bit by bit are compared with the fastest of the run") {
    Run run;
    run.steps(16, 1000);
    size_t told = 0;
    for (double ms = 1000; ms < 3000; ms *= 1.1) told += run.steps(8, ms).size();
    CHECK(told == 1);
  }

  TEST_CASE("single steps, other batches and the first steps of a start are no change") {
    Run run;
    run.steps(80, 1000);
    for (int k = 0; k < 20; ++k) {  // a validation, a save
      CHECK(run.steps(7, 1000).empty());
      CHECK(run.steps(1, 60'000).empty());
    }
    CHECK(run.steps(80, 4000, 4000).empty());
    run.pace.clear();
    CHECK(run.steps(8, 60'000).empty());
    CHECK(run.steps(80, 1000).empty());
    run.tokens -= 200'000;  // back to an earlier step, and a count that stands still
    CHECK(run.steps(80, 60'000, 0).empty());
    CHECK(run.steps(80, 0).empty());
    CHECK(run.steps(80, 1000).empty());
  }

  TEST_CASE("fast steps are compared over seconds") {
    Run run;
    run.steps(8 + 2000, 5);
    CHECK(run.steps(300, 15).empty());  // 4.5 s
    CHECK(run.steps(100, 15).size() == 1);
  }
}
