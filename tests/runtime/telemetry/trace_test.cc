#include "runtime/telemetry/trace.h"

#include <doctest/doctest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::telemetry;
using nlohmann::json;

namespace {

void spend(int64_t ms) {
  const int64_t until = trace_clock_ns() + ms * 1'000'000;
  while (trace_clock_ns() < until) {
  }
}

json bars(const json& trace) {
  json out = json::array();
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "X") out.push_back(event);
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/telemetry/trace") {
  TEST_CASE("a window is read from text, or refused with what was found") {
    CHECK(parse_trace_window("steps=5..8").value().first == 5);
    CHECK(parse_trace_window("steps=5..8").value().last == 8);
    CHECK(parse_trace_window("7").value().contains(7));
    CHECK_FALSE(parse_trace_window("7").value().contains(8));
    for (const char* wrong : {"", "steps=", "0..3", "5..4", "a..b", "3..", "3..4x", "-1"}) {
      CAPTURE(wrong);
      const auto refused = parse_trace_window(wrong);
      REQUIRE_FALSE(refused.ok());
      CHECK(refused.error().message.find(std::string("trace window ") + wrong) == 0);
    }
  }

  TEST_CASE("the phases of a lane sum to its wall time, each moment in the innermost phase") {
    Recorder recorder({}, 0, "rank 0");
    const int64_t begin_ns = trace_clock_ns();
    recorder.attach("training");
    {
      const PhaseScope forward(Phase::kForward);
      spend(4);
      {
        const PhaseScope waiting(Phase::kPipeline);
        spend(3);
      }
      spend(2);
    }
    const StepSplit split = recorder.take_split();
    const double wall_ms = static_cast<double>(trace_clock_ns() - begin_ns) / 1e6;
    double sum = 0;
    for (const double ms : split) sum += ms;
    CHECK(sum <= wall_ms);
    CHECK(split[static_cast<size_t>(Phase::kForward)] >= 6);
    CHECK(split[static_cast<size_t>(Phase::kPipeline)] >= 3);
    CHECK(split[static_cast<size_t>(Phase::kData)] == 0);
    // Taken: the next split begins at zero.
    CHECK(recorder.take_split()[static_cast<size_t>(Phase::kForward)] == 0);
    Recorder::detach();
    CHECK(Recorder::current() == nullptr);
  }

  TEST_CASE("only steps of the window are drawn, as nested bars with their arguments") {
    Recorder recorder({2, 3}, 5, "rank 5 (\"quoted\")");
    recorder.attach("training");
    for (int64_t step = 1; step <= 4; ++step) {
      recorder.begin_step(step);
      const PhaseScope forward(Phase::kForward, {.micro_batch = 7});
      const TraceScope comm("comm", "all_reduce", {.bytes = 64, .group = "tp[0,1]", .what = "attn.out"});
    }
    CHECK(recorder.end_window());
    const json trace = json::parse(recorder.to_json());
    const json drawn = bars(trace);
    REQUIRE(drawn.size() == 4);
    for (size_t i = 0; i < drawn.size(); i += 2) {  // an inner bar ends, and is written, first
      const json& inner = drawn[i];
      const json& outer = drawn[i + 1];
      CHECK(inner["name"] == "all_reduce");
      CHECK(inner["args"] == json({{"step", 2 + i / 2}, {"bytes", 64}, {"group", "tp[0,1]"}, {"what", "attn.out"}}));
      CHECK(outer["name"] == "forward");
      CHECK(outer["args"]["micro_batch"] == 7);
      CHECK(outer["ts"] <= inner["ts"]);
      CHECK(outer["ts"].get<double>() + outer["dur"].get<double>() + 1e-3 >=
            inner["ts"].get<double>() + inner["dur"].get<double>());
    }
    Recorder::detach();
  }

  TEST_CASE("trace scopes do nothing without a recorder, and on a thread that has not attached") {
    Recorder recorder({1, 1}, 0, "rank 0");
    recorder.begin_step(1);
    { const TraceScope scope("comm", "barrier"); }
    recorder.attach("training");
    std::thread([] { const TraceScope scope("comm", "barrier"); }).join();
    CHECK(bars(json::parse(recorder.to_json())).empty());
    Recorder::detach();
  }

  TEST_CASE("merging keeps every event, counts time from the first, and refuses what is no trace") {
    const cairn::testing::TempDir dir("trace");
    std::vector<TracePart> parts;
    for (int64_t rank = 0; rank < 2; ++rank) {
      Recorder recorder({1, 1}, rank, "rank");
      recorder.attach("training");
      recorder.begin_step(1);
      { const TraceScope scope("comm", rank == 0 ? "isend" : "recv", {.flow = 42, .flow_begins = rank == 0}); }
      parts.push_back({dir.path / std::to_string(rank)});
      std::ofstream(parts.back().path) << recorder.to_json();
      Recorder::detach();
    }
    const int64_t now_ns = trace_clock_ns();
    const auto out = dir.path / "merged";
    REQUIRE(merge_traces(parts, {{"save step 1", now_ns, now_ns + 5'000'000, 1000}}, out).ok());
    std::ifstream in(out);
    const json trace = json::parse(in);
    double first = 1e300;
    for (const json& bar : bars(trace)) first = std::min(first, bar["ts"].get<double>());
    CHECK(first == 0);
    CHECK(bars(trace).size() == 3);
    CHECK(bars(trace)[0]["dur"] == 5000);
    // A host whose clock shows a day more, or less: its bars stand where they stood.
    for (const int64_t day_ns : {86'400'000'000'000, -86'400'000'000'000}) {
      auto shifted = parts;
      shifted[1] = {dir.path / "ahead", day_ns};
      json part = json::parse(std::ifstream(parts[1].path));
      for (json& event : part["traceEvents"]) {
        if (event.contains("ts")) event["ts"] = event["ts"].get<double>() + static_cast<double>(day_ns) / 1e3;
      }
      std::ofstream(shifted[1].path) << part;
      REQUIRE(merge_traces(shifted, {{"save step 1", now_ns, now_ns + 5'000'000, 1000}}, out).ok());
      std::ifstream again(out);
      const json same = json::parse(again);
      for (size_t k = 0; k < bars(trace).size(); ++k) {
        CHECK(bars(same)[k]["ts"].get<double>() == doctest::Approx(bars(trace)[k]["ts"].get<double>()).epsilon(1e-6));
      }
    }
    std::ofstream(parts[0].path, std::ios::trunc) << "[1";
    const Status refused = merge_traces(parts, {}, out);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message.find(parts[0].path.string()) == 0);
  }

}  // TEST_SUITE
