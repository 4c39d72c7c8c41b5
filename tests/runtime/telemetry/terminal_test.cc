#include "runtime/telemetry/terminal.h"

#include <doctest/doctest.h>

#include <cmath>
#include <sstream>
#include <string>
#include <vector>

using namespace cairn::telemetry;

TEST_SUITE("runtime/telemetry/terminal") {
  TEST_CASE("durations and curves are written for people") {
    CHECK(format_duration(0.85) == "850 ms");
    CHECK(format_duration(65.2) == "1 min 05 s");
    CHECK(format_duration(7800) == "2 h 10 min");
    CHECK(draw_curve({{1, 1.0}}, 40, 3, false).empty());
    CHECK(draw_curve({{10, 3}, {20, NAN}, {30, 2}, {40, 1}}, 40, 3, false) ==
          "  3.000 |#  \n"
          "        |## \n"
          "  1.000 |##.\n"
          "        +---\n"
          "         step 10 40\n");
  }

  TEST_CASE("a curve of many steps fits its width and its axis ends at the last step") {
    std::vector<CurvePoint> points;
    for (int64_t step = 1; step <= 1000; ++step) points.push_back({step * 100, 20000.0 / static_cast<double>(step)});
    for (const int64_t columns : {40, 79, 80, 200}) {
      CAPTURE(columns);
      for (const bool utf8 : {false, true}) {
        const std::string curve = draw_curve(points, columns, 8, utf8);
        std::istringstream lines(curve);
        std::string last;
        for (std::string line; std::getline(lines, line); last = line) CHECK(columns_of(line) <= columns);
        CHECK(last.starts_with("          "));
        CHECK(last.ends_with(" 100000"));
        CHECK(columns_of(last) == columns);
        CHECK(last.find("step 100 ") != std::string::npos);
      }
    }
  }

  TEST_CASE("round steps between the first and the last have a tick, and their labels keep apart") {
    std::vector<CurvePoint> points;
    for (int64_t step = 1; step <= 2000; ++step) points.push_back({step, static_cast<double>(step) / 2000});
    const std::string curve = draw_curve(points, 79, 3, false);
    CHECK(
        curve.ends_with("        +------------------+----------------+-----------------+----------------\n"
                        "         step 1           500             1000              1500           2000\n"));
  }

  TEST_CASE("a curve of any finite values fits its width") {
    for (const double value : {1e9, 1e300, 1.7e308, -1.7e308}) {
      CAPTURE(value);
      const std::string curve = draw_curve({{1, value}, {2, value}, {3, 0}, {4, -value}, {5, value}}, 79, 3, true);
      CHECK_FALSE(curve.empty());
      std::istringstream lines(curve);
      for (std::string line; std::getline(lines, line);) CHECK(columns_of(line) <= 79);
    }
  }

  TEST_CASE("a long line breaks at spaces, below the text of its first line") {
    CHECK(wrap_text("short", 10) == "short");
    CHECK(wrap_text("", 10).empty());
    CHECK(wrap_text("\n\naa bb\n", 3) == "\n\naa\n    bb\n");
    CHECK(wrap_text("aa bb cc dd", 5) == "aa bb\n    cc\n    dd");
    CHECK(wrap_text("  --out X   a path without ending", 24) ==
          "  --out X   a path\n            without\n            ending");
    CHECK(wrap_text("a-word-without-any-space more", 10) == "a-word-without-any-space\n    more");
    CHECK(wrap_text("\x1b[1mbold\x1b[0m text", 9) == "\x1b[1mbold\x1b[0m text");  // escapes take no room
    CHECK(wrap_text("│││││ ││││", 10) == "│││││ ││││");                           // nor do bytes of one character
    CHECK(wrap_text("trailing   ", 8) == "trailing");
    // A table whose gaps lie all behind the middle hangs by four.
    CHECK(wrap_text("                    number  complete, the newest", 40) ==
          "                    number  complete,\n                        the newest");
  }

  TEST_CASE("a line that is too long drops its least important parts and keeps their order") {
    const std::vector<LinePart> parts = {{"step 1/9", 0}, {"lr 1e-3", 3}, {"ckpt 0 ms", 4}, {"eta 2 h", 1}};
    CHECK(fit_line(parts, 80) == "step 1/9  lr 1e-3  ckpt 0 ms  eta 2 h");
    CHECK(fit_line(parts, 36) == "step 1/9  lr 1e-3  eta 2 h");
    CHECK(fit_line(parts, 20) == "step 1/9  eta 2 h");
    CHECK(fit_line(parts, 10) == "step 1/9");
    CHECK(fit_line(parts, 4) == "step");
  }
}
