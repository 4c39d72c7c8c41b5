// Several runs in one terminal.
#include "tools/report/compare.h"

#include <doctest/doctest.h>

#include <cmath>
#include <sstream>

using namespace cairn::tools;
using cairn::telemetry::columns_of;

namespace {

ComparedRun run_of(std::string name, std::vector<cairn::telemetry::CurvePoint> loss) {
  ComparedRun out{.name = std::move(name), .saves = 2, .starts = 1, .loss = std::move(loss)};
  out.summary.step = out.loss.empty() ? 0 : out.loss.back().step;
  out.summary.last_loss = out.loss.empty() ? NAN : out.loss.back().value;
  return out;
}

}  // namespace

TEST_SUITE("tools/report/compare") {
  TEST_CASE("each run is drawn with its letter over one axis of steps, and a star is where runs meet") {
    const std::vector<ComparedRun> runs = {run_of("a", {{1, 4}, {32, 1}}), run_of("b", {{1, 4}, {16, 1}, {20, NAN}})};
    CHECK(draw_losses(runs, 41, 3, false) ==
          "  4.000 |*                               \n"
          "        |                                \n"
          "  1.000 |               B               A\n"
          "        +-------------------+------------\n"
          "         step 1            20          32\n");
  }

  TEST_CASE("picture, legend and table fit the columns, whatever the names are") {
    std::vector<ComparedRun> runs;
    for (int k = 0; k < 5; ++k) {
      runs.push_back(run_of("runs/a-long-name-of-a-folder-that-ends-with-\xc3\xa4-" + std::to_string(k) + "\n\x1b[31m",
                            {{1, 11.0 + k}, {50, 3.0 + k}, {100'000'000, 2.5 + k}}));
      runs.back().summary.tokens_per_s = 123456789;
      runs.back().goodput = 1;
      runs.back().alive = true;
    }
    runs.push_back(run_of("empty", {}));
    for (const bool utf8 : {false, true}) {
      const std::string text = compare_text(runs, 79, utf8);
      CHECK(text.find('\x1b') == std::string::npos);
      std::istringstream lines(text);
      for (std::string line; std::getline(lines, line);) {
        CAPTURE(line);
        CHECK(columns_of(line) <= 79);
      }
      CHECK(text.find("A ") != std::string::npos);
      CHECK(text.find("100%") != std::string::npos);
    }
  }

  TEST_CASE("runs without losses have a table and no picture") {
    CHECK(draw_losses({run_of("a", {}), run_of("b", {{1, NAN}, {2, NAN}})}, 79, 8, true).empty());
    CHECK(compare_text({run_of("a", {})}, 79, true).find("\nA a ") != std::string::npos);
  }
}
