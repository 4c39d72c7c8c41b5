#include "tools/run/agent/narrator.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/tools/run/run_fixture.h"

using namespace cairn;
using namespace cairn::tools;
using namespace cairn::tools::testing;
namespace fs = std::filesystem;

namespace {

struct Told {
  explicit Told(Plan with = small_plan(2), NarratorOptions options = {}) : plan(std::move(with)), dir("narrator") {
    options.console = console.fd();
    narrator.emplace(plan, dir.path, options, clock);
    REQUIRE_OK(narrator->open_metrics("run-1"));
    REQUIRE_OK(narrator->open_events());
  }
  std::vector<nlohmann::json> events(const std::string& kind) const { return events_of(dir.path, kind); }

  Plan plan;
  HandClock clock;
  cairn::testing::TempDir dir;
  Console console;
  std::optional<Narrator> narrator;
};

/// The steps that a log has lines of, where a step takes `step_s`.
std::vector<int64_t> steps_in_log(Plan plan, double step_s) {
  plan.end_step = plan.steps = 3600;
  Told told(std::move(plan));
  REQUIRE_OK(told.narrator->begins(0, {.source = ckpt::arena::Source::kFresh}));
  for (int64_t step = 1; step <= 600; ++step) {
    told.clock.forward(step_s);
    told.narrator->step(metrics_at(step));
  }
  std::vector<int64_t> out;
  std::istringstream lines(told.console.text());
  for (std::string line; std::getline(lines, line);) {
    CHECK(line.starts_with("2023-11-1"));  // of the clock that was moved
    const size_t step = line.find("UTC  step ");
    REQUIRE(step != std::string::npos);
    CHECK(line.find("  ckpt 0.50 ms  eta ") != std::string::npos);  // nothing is dropped, and the time left is printed
    out.push_back(std::stoll(line.substr(step + 10)));
  }
  return out;
}

agent::RestartInfo info_of(const agent::Failure& failure) { return {failure, 0}; }

}  // namespace

TEST_SUITE("tools/run/narrator") {
  TEST_CASE("a start, its steps, its saves and its end are told on the console and in the files") {
    Plan plan = small_plan(2);
    plan.recipe.log.tensorboard = true;
    Told told(plan, {.peak_tflops = 1e-3});
    fs::create_directory(told.dir.path / "tensorboard");
    REQUIRE_OK(told.narrator->begins(0, {.source = ckpt::arena::Source::kFresh}));
    CHECK_FALSE(told.console.has("from"));  // nobody asks where a fresh start comes from
    for (int64_t step = 1; step <= 3; ++step) {
      told.clock.forward(1);
      const telemetry::StepMetrics written = told.narrator->step(metrics_at(step));
      CHECK(written.time == doctest::Approx(told.clock.unix_s()));
      CHECK(written.tflops.has_value());
      CHECK(*written.mfu == doctest::Approx(*written.tflops / 1e-3));
    }
    told.narrator->saved({.step = 3, .dir = "/ck/step-00000003", .bytes = 7, .asked = 1, .removed = {1}});
    told.narrator->done("/ck/step-00000003");

    CHECK(told.console.has("step  1/10  loss 3.9000"));
    CHECK(told.console.has("saved step 3, as asked: /ck/step-00000003\n"));
    CHECK(
        told.console.has("done: 3 steps in 3.0 s, loss 3.7000, 1.0 steps/s, 2 ms lost to checkpoints; "
                         "/ck/step-00000003\n"));
    const auto metrics = lines_of(told.dir.path / "metrics.jsonl");
    CHECK(metrics.back().at("step") == 3);
    CHECK(metrics.back().at("mfu").get<double>() > 0);
    REQUIRE(told.events("start").size() == 1);
    const nlohmann::json start = told.events("start")[0];
    CHECK(start.at("source") == "fresh");
    CHECK(start.at("world") == 2);
    CHECK(start.at("time").get<double>() > 1.7e9);
    CHECK(told.events("saved")[0].at("removed") == std::vector<int64_t>{1});
    CHECK(std::distance(fs::directory_iterator(told.dir.path / "tensorboard"), {}) == 1);
    CHECK(told.narrator->progress().first_step == 0);
    CHECK(told.narrator->progress().last_step == 3);
  }

  TEST_CASE("a log gets a line a minute, some more before the first minute is over, or those of log.at") {
    CHECK(steps_in_log(small_plan(2), 1) ==
          std::vector<int64_t>{1, 3, 6, 12, 24, 48, 96, 156, 216, 276, 336, 396, 456, 516, 576});
    CHECK(steps_in_log(small_plan(2), 0.01) == std::vector<int64_t>{1, 201, 402});
    CHECK(steps_in_log(small_plan(2), 90).size() == 600);  // a step that takes longer
    Plan plan = small_plan(2);
    plan.recipe.log.every_steps = 0;
    CHECK(steps_in_log(plan, 0.01).size() == 600);
    plan.recipe.log.every_steps = 250;
    CHECK(steps_in_log(plan, 90) == std::vector<int64_t>{1, 250, 500});
  }

  TEST_CASE("steps are counted to the end of all stages, and time left by the samples that are left") {
    Told told(small_plan(2), {.run_end = {.step = 8, .samples = 264, .tokens = 2112}});
    REQUIRE_OK(told.narrator->begins(0, {.source = ckpt::arena::Source::kFresh}));
    told.clock.forward(1);
    told.narrator->step(metrics_at(1));
    CHECK(told.console.has("step 1/8  loss"));
    CHECK(told.events("start")[0].at("steps") == 8);
    CHECK(told.narrator->summary(0, false, {}).at("of") == 8);
    CHECK(told.narrator->run_steps() == 8);
    CHECK(Told().narrator->run_steps() == 10);
  }

  TEST_CASE("the end of a resumed run counts all its steps, and those of all segments of the start") {
    Told told;
    REQUIRE_OK(told.narrator->begins(0, {.source = ckpt::arena::Source::kDisk, .step = 2, .dir = "/ck/step-00000002"}));
    told.clock.forward(1);
    for (int64_t step = 3; step <= 5; ++step) told.narrator->step(metrics_at(step));
    Told next(small_plan(2), {.before = told.narrator->progress()});
    next.clock.forward(2);
    REQUIRE_OK(next.narrator->begins(0, {.source = ckpt::arena::Source::kMemory, .step = 5}));
    const nlohmann::json between = next.narrator->summary(0, false, {});  // a segment without a step of its own
    CHECK(between.at("why") == "done");
    CHECK(between.at("step") == 5);
    for (int64_t step = 6; step <= 10; ++step) next.narrator->step(metrics_at(step));
    next.narrator->done("/ck/step-00000010");
    CHECK(next.console.has("done: 10 steps, 8 of them by this start in 2.0 s, loss "));
    CHECK(next.narrator->summary(0, false, {}).at("first_step") == 2);
  }

  TEST_CASE("a log gets a line of the first step of a resumed start") {
    Told told;
    REQUIRE_OK(told.narrator->begins(0, {.source = ckpt::arena::Source::kMemory, .step = 4}));
    told.narrator->step(metrics_at(5));
    CHECK(told.console.has("step  5/10  loss "));
    told.narrator->step(metrics_at(6));
    CHECK_FALSE(told.console.has("step  6/10  loss "));
  }

  TEST_CASE("a start says what it resumes from, and when an option for new runs counts for nothing") {
    Told told(small_plan(2), {.init_on_command_line = true});
    REQUIRE_OK(told.narrator->begins(0, {.source = ckpt::arena::Source::kMemory, .step = 4}));
    CHECK(told.console.has("from step 4 in shared memory\n"));
    CHECK(told.console.has("--init-from is for a new run"));
    REQUIRE_OK(told.narrator->begins(1, {.source = ckpt::arena::Source::kDisk, .step = 2, .dir = "/ck/step-00000002"}));
    CHECK(told.console.has("from /ck/step-00000002\n"));
    CHECK(told.events("start")[1].at("generation") == 1);
    CHECK(told.narrator->progress().first_step == 4);  // of the start, not of its generations
  }

  TEST_CASE("a host that follows does not say that ranks start again, which the leader decides") {
    const Plan plan = small_plan(2);
    const cairn::testing::TempDir dir("narrator");
    const Console console;
    const HandClock clock;
    Narrator narrator(plan, dir.path, {.console = console.fd()}, clock);
    narrator.failed(info_of({.rank = 1, .message = "rank 1 was killed by signal 9"}), true, 0, "");
    CHECK(console.has("this host's ranks stopped; the leader says whether they start again\n"));
    CHECK_FALSE(console.has("starting again"));
  }

  TEST_CASE("a recovery ends with the first step of new ranks, not with news of the dead ones") {
    Told told;
    REQUIRE_OK(told.narrator->begins(0, {.source = ckpt::arena::Source::kFresh}));
    told.narrator->step(metrics_at(1));
    const agent::Failure failure{.generation = 0,
                                 .rank = 1,
                                 .status = {.signal = 9},
                                 .message = "rank 1 (pid 7) was killed by signal 9",
                                 .failure_class = agent::FailureClass::kOutOfMemory,
                                 .seen_ns = told.clock.now_ns() - 250'000'000,
                                 .host_name = "h2"};
    told.narrator->failed(info_of(failure), true, 0, "/run/reports/1.txt");
    CHECK(told.events("failure")[0].at("class") == "out_of_memory");
    CHECK(told.events("failure")[0].at("host") == "h2");
    const auto record = nlohmann::json::parse(read_text_file(told.dir.path / "failure.json").value());
    CHECK(record.at("first_seen").get<double>() == doctest::Approx(told.clock.unix_s() - 0.25));
    CHECK(record.at("restarting") == true);
    CHECK(record.at("step") == 1);
    CHECK(record.at("report") == "/run/reports/1.txt");
    CHECK(told.console.has("where each rank was: /run/reports/1.txt\n"));
    CHECK(told.console.has("all ranks stopped; starting again\n"));
    told.clock.forward(0.25);
    told.narrator->step(metrics_at(2));  // the dead ones had finished it
    told.narrator->respawned({.detected_ns = 1'000'000,
                              .killed_ns = 2'000'000,
                              .reaped_ns = 4'000'000,
                              .prepared_ns = 5'000'000,
                              .spawned_ns = 6'000'000});
    CHECK(told.events("respawned")[0].at("ms_to_reap") == 3.0);
    told.narrator->step(metrics_at(1));  // what is done again
    CHECK(told.events("recovered").empty());
    told.clock.forward(0.25);
    told.narrator->step(metrics_at(2));
    REQUIRE(told.events("recovered").size() == 1);
    CHECK(told.events("recovered")[0].at("seconds") == doctest::Approx(0.5));
    told.narrator->step(metrics_at(3));
    CHECK(told.events("recovered").size() == 1);
  }

  TEST_CASE("files that cannot be written refuse a first generation, and are told of once after that") {
    Plan plan = small_plan(2);
    plan.recipe.log.tensorboard = true;
    Told told(plan);  // without a folder for TensorBoard's
    const Status refused = told.narrator->begins(0, {.source = ckpt::arena::Source::kFresh});
    REQUIRE_FALSE(refused.ok());
    for (int64_t generation = 1; generation < 4; ++generation)
      CHECK(told.narrator->begins(generation, {.source = ckpt::arena::Source::kMemory, .step = 1}).ok());
    const std::string text = told.console.text();
    CHECK(text.find("warning: ") != std::string::npos);
    CHECK(text.find("warning: ") == text.rfind("warning: "));
  }

  TEST_CASE("names that somebody else has written do nothing to a terminal") {
    Plan plan = small_plan(2);
    plan.recipe.data.sources.resize(2);
    Told told(plan);
    REQUIRE_OK(told.narrator->begins(0, {.source = ckpt::arena::Source::kFresh}));
    telemetry::StepMetrics metrics = metrics_at(1);
    metrics.valid_loss = 2.5;
    metrics.valid_source_loss = {{"web\x1b[2J", 2.25}, {"books", 2.75}};
    told.narrator->step(metrics);
    CHECK(told.console.has("step 1: validation loss 2.5000 (web\\x1b[2J 2.2500, books 2.7500)\n"));
    CHECK(told.console.text().find('\x1b') == std::string::npos);
  }

  TEST_CASE("a summary says why a start ended, and knows nothing of steps that it has not made") {
    Told told;
    const auto why = [&](const Result<int>& code, bool stop_asked = false) {
      return told.narrator->summary(code, stop_asked, {}).at("why").get<std::string>();
    };
    CHECK(told.narrator->summary(0, false, {}).at("loss").is_null());
    CHECK(why(0) == "nothing_to_do");
    REQUIRE_OK(told.narrator->begins(0, {.source = ckpt::arena::Source::kDisk, .step = 2, .dir = "/ck/step-00000002"}));
    CHECK(told.narrator->summary(0, false, {}).at("checkpoint") == "/ck/step-00000002");
    CHECK(told.narrator->summary(0, false, "/ck/step-00000003").at("checkpoint") == "/ck/step-00000003");
    told.narrator->step(metrics_at(3));
    CHECK(why(0) == "done");
    CHECK(why(0, true) == "stopped");
    CHECK(why(75, true) == "stopped");
    CHECK(why(137) == "signal");
    CHECK(why(69) == "failed");
    CHECK(why(Error{ErrorCode::kNoSpace, "full"}) == error_code_name(ErrorCode::kNoSpace));
    told.narrator->step(metrics_at(10));
    CHECK(why(0, true) == "done");  // a stop that came too late
    const nlohmann::json summary = told.narrator->summary(0, false, {});
    CHECK(summary.at("first_step") == 2);
    CHECK(summary.at("step") == 10);
    CHECK(summary.at("samples") == 240);
  }

  TEST_CASE("a trace of ranks of which some have died is merged at the end, and of all at once") {
    Told told(small_plan(2), {.traced = true});
    REQUIRE_OK(told.narrator->begin_trace());
    CHECK(fs::is_directory(told.narrator->trace_dir()));
    told.narrator->drew({told.narrator->trace_dir() / "rank-0.json"});
    CHECK(told.console.text().empty());
    told.narrator->drew({told.narrator->trace_dir() / "rank-1.json"});
    CHECK(told.console.text().starts_with("warning: "));  // these files are not there
    const size_t so_far = told.console.text().size();
    told.narrator->finish_trace();  // nothing is left
    CHECK(told.console.text().size() == so_far);
  }

  TEST_CASE(
      "a table of kernel times is printed once rank 0 has written its file, and files of earlier ranks are removed") {
    Told told(small_plan(2), {.time_kernels = true});
    const fs::path dir = told.narrator->kernel_times_dir();
    fs::create_directories(dir);
    std::ofstream(dir / "rank-7.json") << "{}";
    std::ofstream(dir / "notes") << "a person's";
    REQUIRE_OK(told.narrator->begin_kernel_times());
    CHECK_FALSE(fs::exists(dir / "rank-7.json"));
    CHECK(fs::exists(dir / "notes"));
    told.narrator->timed_kernels(1);
    told.narrator->tell_kernel_times();
    CHECK(told.console.text().empty());
    CHECK(told.narrator->summary(0, false, {}).at("kernel_times").is_null());
    std::ofstream(dir / "rank-0.json") << R"({"rank":0,"device":"cpu","steps":0,"left_out":2,"gaps_ms":0,"ops":[]})";
    told.narrator->timed_kernels(0);
    told.narrator->tell_kernel_times();
    CHECK(told.console.text().find("kernel times of rank 0 on cpu: none; the first 2 steps") != std::string::npos);
    CHECK(told.narrator->summary(0, false, {}).at("kernel_times") == (dir / "rank-0.json").string());
    std::ofstream(dir / "rank-0.json") << "{";
    told.narrator->tell_kernel_times();
    CHECK(told.console.text().find("warning: " + (dir / "rank-0.json").string()) != std::string::npos);
    CHECK_FALSE(Told(small_plan(2)).narrator->summary(0, false, {}).contains("kernel_times"));
  }
}
