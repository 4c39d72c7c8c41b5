#include "runtime/telemetry/kernel_times.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

using namespace cairn;
using namespace cairn::telemetry;
using nlohmann::json;

namespace {

KernelTimes some_times() {
  return {
      .rank = 3,
      .device = "cuda:1",
      .times = {.steps = 4,
                .left_out = 2,
                .ops = {{.name = "matmul", .sizes = {8192, 3072, 768}, .words = {"bias", "gelu"}, .calls = 8, .ms = 60},
                        {.name = "rows_to_experts", .sizes = {}, .words = {}, .calls = 6, .ms = 20}},
                .gaps_ms = 20}};
}

}  // namespace

TEST_SUITE("runtime/telemetry/kernel_times") {
  TEST_CASE("the table has calls, milliseconds and shares of a step, and ends with gaps and the step") {
    const std::vector<std::string> lines = table_of(some_times());
    CHECK(lines ==
          std::vector<std::string>{"kernel times of rank 3 on cuda:1, of a step (mean of 4; the first 2 left out)",
                                   "  op               sizes                       calls          ms   share",
                                   "  matmul           8192x3072x768 bias gelu         2      15.000   60.0%",
                                   "  rows_to_experts                                1.5       5.000   20.0%",
                                   "  gaps                                                     5.000   20.0%",
                                   "  step                                                    25.000  100.0%"});
  }

  TEST_CASE("ops beyond a number of lines are added up in one") {
    KernelTimes of = some_times();
    of.times.ops.clear();
    of.times.gaps_ms = 0;
    for (int64_t i = 0; i < 30; ++i) of.times.ops.push_back({"add", {i}, {}, 4, 40});
    const std::vector<std::string> lines = table_of(of);
    REQUIRE(lines.size() == 2 + 25 + 3);
    CHECK(lines[27] == "  other  (5 kinds)         5      50.000   16.7%");
    of.times.ops.resize(25);
    CHECK(table_of(of).size() == 2 + 25 + 2);
  }

  TEST_CASE("a run without a step that counts says so in place of a table") {
    KernelTimes of = some_times();
    of.times = {.steps = 0, .left_out = 2, .ops = {}, .gaps_ms = 0};
    CHECK(table_of(of) ==
          std::vector<std::string>{"kernel times of rank 3 on cuda:1: none; the first 2 steps of a start "
                                   "do not count, and there were no more"});
  }

  TEST_CASE("times come back from their JSON, and JSON that lacks something is refused with its field") {
    const json written = to_json(some_times());
    CHECK(written.at("steps_ms") == 100);
    const auto read = kernel_times_from_json(written);
    REQUIRE(read.ok());
    CHECK(to_json(read.value()) == written);
    CHECK(read.value().times.ops[0].words == std::vector<std::string>{"bias", "gelu"});
    for (const char* const field : {"rank", "device", "steps", "left_out", "gaps_ms", "ops"}) {
      CAPTURE(field);
      json less = written;
      less.erase(field);
      const auto refused = kernel_times_from_json(less);
      REQUIRE_FALSE(refused.ok());
      CHECK(refused.error().code == ErrorCode::kCorrupt);
      CHECK(refused.error().message.find(fmt::format("\"{}\"", field)) != std::string::npos);
    }
    for (const char* const field : {"op", "sizes", "words", "calls", "ms"}) {
      CAPTURE(field);
      json other = written;
      other["ops"][1][field] = json::object();
      CHECK_FALSE(kernel_times_from_json(other).ok());
    }
    CHECK_FALSE(kernel_times_from_json(json::array()).ok());
  }
}
