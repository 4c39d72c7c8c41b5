// A run shows its state to other machines, and counts as unwell or not.
#include "tools/run/hosts/run_board.h"

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "runtime/json/json.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"
#include "tools/run/agent/status_http.h"
#include "tools/run/folder/folder.h"

using namespace cairn;
using namespace cairn::tools;

namespace {

RunStatus training() {
  RunStatus out{
      .phase = RunPhase::kTraining, .time = 1000, .phase_time = 900, .epoch = 3, .leader = 1, .step = 40, .of = 60};
  out.hosts = {{.index = 0, .place = -1, .name = "h0", .state = "away", .why = "its GPU is slow", .excluded = true},
               {.index = 1, .place = 0, .name = "h1", .address = "10.0.0.1", .state = "training"},
               {.index = 2, .place = 1, .name = "h2", .state = "training", .heard_s = 0.5},
               {.index = 3, .place = -1, .name = "h3", .state = "spare"}};
  out.last.step = 40;
  out.last.loss = 2.5;
  out.last.step_ms = 250;
  out.step_time = 990;
  return out;
}

}  // namespace

TEST_SUITE("tools/run/run_board") {
  TEST_CASE("the file holds all hosts, and a damaged one is refused by its field") {
    const Result<RunStatus> read = run_status_from_json(to_json(training()));
    REQUIRE_OK(read);
    CHECK(read.value().hosts == training().hosts);
    CHECK(read.value().phase == RunPhase::kTraining);
    CHECK(read.value().epoch == 3);
    CHECK(read.value().leader == 1);
    CHECK_FALSE(read.value().exit_code);
    for (const char* field : {"phase", "time", "epoch", "leader", "step", "of", "hosts"}) {
      nlohmann::json without = to_json(training());
      without[field] = "x";
      const Result<RunStatus> bad = run_status_from_json(without);
      REQUIRE_FALSE(bad.ok());
      CHECK(bad.error().code == ErrorCode::kCorrupt);
      CHECK(bad.error().message == std::string("\"") + field + "\" is missing or of another type");
    }
    CHECK_FALSE(run_status_from_json(nlohmann::json::array()).ok());
  }

  TEST_CASE("the last state is in the file once the board is gone, and another host's file stays its own") {
    const testing::TempDir dir;
    const std::filesystem::path file = dir / "hosts.json", other = dir / "other.json";
    {
      RunBoard board;
      board.write_to(file);
      board.begins(7, 60, false);
      board.set_hosts(3, 1, training().hosts);
      for (int64_t step = 8; step < 200; ++step) {
        telemetry::StepMetrics metrics;
        metrics.step = step;
        board.step(metrics, 60);
      }
      board.ended(75);
      board.set_phase(RunPhase::kTraining);  // the end stays
    }
    const Result<std::string> text = read_text_file(file);
    REQUIRE_OK(text);
    const Result<RunStatus> read = run_status_from_json(json_or_nothing(text.value()));
    REQUIRE_OK(read);
    CHECK(read.value().phase == RunPhase::kEnded);
    CHECK(read.value().exit_code == 75);
    CHECK(read.value().step == 199);
    CHECK(read.value().hosts[1].state == "ended");
    CHECK(read.value().hosts[3].state == "spare");
    {
      RunBoard board;
      board.write_to(other);
      while (is_gone(other)) std::this_thread::yield();
      board.write_to({});  // another host leads
      std::filesystem::remove(other);
      board.follows(RunPhase::kTraining, 2);
      board.ended(0);
      CHECK(board.now().exit_code == 0);
    }
    CHECK(is_gone(other));
  }

  TEST_CASE(
      "a run is unwell that has ended, or trains and reports no step for longer than its deadline and its steps") {
    RunStatus status = training();
    CHECK(why_unwell(status, 120).empty());
    status.time = 990 + 121;
    CHECK(why_unwell(status, 120) == "no step for 121 s");
    CHECK(why_unwell(status, 0).empty());
    status.last.step_ms = 20'000;
    CHECK(why_unwell(status, 120).empty());
    status.last.step_ms = 250;
    status.phase_time = 1100;  // began again
    CHECK(why_unwell(status, 120).empty());
    status.phase_time = 900;
    for (const RunPhase waits : {RunPhase::kGathering, RunPhase::kLoading}) {
      status.phase = waits;
      CHECK(why_unwell(status, 120).empty());
    }
    status.phase = RunPhase::kEnded;
    status.exit_code = 69;
    CHECK(why_unwell(status, 120) == "the run has ended with exit code 69");
  }

  TEST_CASE("the page of metrics has what is known, and no number that is none") {
    RunStatus status = training();
    std::string page = metrics_text(status, 120);
    for (const char* line : {"cairn_healthy 1", "cairn_step 40", "cairn_steps 60", "cairn_loss 2.5",
                             "cairn_step_seconds 0.25", "cairn_hosts 2", "cairn_places 2", "cairn_spares 1",
                             "cairn_excluded 1", "cairn_epoch 3", "cairn_saves_total 0"})
      CHECK_MESSAGE(page.find(std::string("\n") + line + "\n") != page.npos, line);
    CHECK(page.find("cairn_mfu") == page.npos);
    CHECK(page.find("cairn_checkpoint") == page.npos);
    status.last.mfu = 0.4;
    status.last.loss = std::nan("");
    status.saved_time = 940;
    page = metrics_text(status, 120);
    CHECK(page.find("cairn_mfu 0.4\n") != page.npos);
    CHECK(page.find("cairn_loss") == page.npos);
    CHECK(page.find("cairn_checkpoint_age_seconds 60\n") != page.npos);
    status.leads = false;
    CHECK(metrics_text(status, 120).find("cairn_step ") == std::string::npos);
  }
}
