#include "tools/run/agent/coordinator.h"

#include <filesystem>

#include "ckpt/retention/catalog.h"
#include "ckpt/store/posix_backend.h"
#include "tests/tools/run/run_fixture.h"
#include "tools/run/hosts/fleet.h"

using namespace cairn;
using namespace cairn::tools;
using namespace cairn::tools::testing;
namespace fs = std::filesystem;

TEST_SUITE("tools/run/coordinator") {
  TEST_CASE("a fresh start is written down once its ranks have something to begin with") {
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    CHECK_FALSE(fs::exists(run.folder.recipe()));
    const Result<ckpt::RestoreChoice> choice = run.coordinator->next_generation(0);
    REQUIRE_OK(choice);
    CHECK(choice.value().source == ckpt::arena::Source::kFresh);
    CHECK(choice.value().incarnation == 1);
    CHECK(read_text_file(run.folder.recipe()).value() == run.start.whole.canonical_json);
    CHECK(run.events("start").size() == 1);
    CHECK_FALSE(run.coordinator->save_under_way());
  }

  TEST_CASE("a step that ranks complete is saved and told, and is what the next generation resumes from") {
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    run.train(3, 0, true);
    REQUIRE(run.wait_until([&] { return !run.events("saved").empty(); }));
    CHECK(run.events("saved")[0].at("step") == 3);
    CHECK(run.control.wakes > 0);
    CHECK(run.control.progress > 0);
    ckpt::PosixBackend io;
    CHECK(ckpt::newest_complete(io, run.folder.checkpoints()).value().step == 3);
    CHECK(lines_of(run.folder.path() / "metrics.jsonl").back().at("step") == 3);
    run.train(4, 1, false);
    const Result<ckpt::RestoreChoice> again = run.coordinator->next_generation(1);
    REQUIRE_OK(again);
    CHECK(again.value().source == ckpt::arena::Source::kMemory);
    CHECK(again.value().step == 4);
    CHECK(run.console.has("from step 4 in shared memory\n"));
    CHECK(run.events("recipe_changed").empty());
  }

  TEST_CASE("a stop goes to the ranks, and the end saves what they have left and says with which code") {
    RunFixture run(small_plan(2), {.requests = {.any_limit = false, .exit_when_unfinished = 75}});
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    run.train(2, 0, false);
    CHECK(run.coordinator->memory().control().stop == 0);
    run.control.stop = true;
    run.coordinator->stop(SIGTERM);
    CHECK(run.coordinator->memory().control().stop == 1);
    CHECK(run.events("stop_requested")[0].at("by") == "SIGTERM");
    const Result<int> code = run.coordinator->conclude({.kind = agent::EndKind::kFinished, .stop_signal = SIGTERM});
    REQUIRE_OK(code);
    CHECK(code.value() == 75);
    CHECK(run.console.has("saved step 2 from shared memory\n"));
    CHECK(run.console.has("stopped after step 2 of 10; checkpoint "));
    CHECK(run.events("end")[0].at("exit_code") == 75);
    const nlohmann::json summary = run.coordinator->summary(code);
    CHECK(summary.at("why") == "stopped");
    CHECK(summary.at("checkpoint") == (run.folder.checkpoints() / "step-00000002").string());
  }

  TEST_CASE("ranks that end with 0 before the last step finish no run unless a stop was asked for") {
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    run.train(2, 0, false);
    const Result<int> code = run.coordinator->conclude({.kind = agent::EndKind::kFinished});
    REQUIRE_FALSE(code.ok());
    CHECK(code.error().message == "the ranks ended at step 2 of 10, and nothing asked them to stop");
    CHECK(run.events("end")[0].at("exit_code") == 70);
    CHECK(run.console.has("saved step 2 from shared memory\n"));

    RunFixture failed(small_plan(2));
    REQUIRE_OK(failed.coordinator->open());
    REQUIRE_OK(failed.coordinator->next_generation(0));
    failed.train(2, 0, false);
    agent::Failure error{.rank = 1, .message = "a peer went away", .failure_class = agent::FailureClass::kSymptom};
    error.status.exit_code = 69;
    failed.coordinator->on_rank_error(error);
    const Result<int> of_rank = failed.coordinator->conclude({.kind = agent::EndKind::kFinished});
    REQUIRE_OK(of_rank);
    CHECK(of_rank.value() == 69);
    CHECK(failed.console.has("the first error: a peer went away"));
    CHECK(failed.events("end")[0].at("class") == "symptom");
  }

  TEST_CASE("a save that takes too long is reported, and again when it has taken twice as long") {
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    run.train(3, 0, false);
    run.coordinator->memory().control().reserved[0].store(-3);  // a persister is at it
    run.coordinator->on_tick();
    run.clock.forward(59);
    run.coordinator->on_tick();
    CHECK(run.events("save_overdue").empty());
    for (const double seconds : {2, 20, 50, 100}) {
      run.clock.forward(seconds);
      run.coordinator->on_tick();
    }
    const std::vector<nlohmann::json> events = run.events("save_overdue");
    REQUIRE(events.size() == 2);
    CHECK(events[0].at("step") == 3);
    CHECK(events[0].at("seconds") == 61);
    CHECK(events[1].at("seconds") == 131);
    CHECK(run.console.has("step 3 is not saved yet after 61 s; the save waits for "));
    run.coordinator->memory().control().reserved[0].store(0);
    run.clock.forward(1000);
    run.coordinator->on_tick();
    CHECK(run.events("save_overdue").size() == 2);
  }

  TEST_CASE("the cause of a generation's end is its earliest error that is no symptom, with what came after it") {
    using enum agent::FailureClass;
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    run.coordinator->on_rank_error({.rank = 0, .failure_class = kSymptom, .seen_ns = 5});
    run.coordinator->on_rank_error({.rank = 1, .message = "a wild write", .failure_class = kCrash, .seen_ns = 10});
    agent::Failure failure{.rank = 0, .message = "a peer went away", .failure_class = kSymptom, .seen_ns = 5};
    run.coordinator->settle(failure);
    CHECK(failure.rank == 1);
    CHECK(failure.failure_class == kCrash);
    CHECK(failure.message.starts_with("a wild write"));
    REQUIRE(failure.others.size() == 1);
    CHECK(failure.others[0].rank == 0);
    CHECK(run.coordinator->restart_of(failure) == agent::Restart::kInPlace);
    failure.failure_class = kDevice;
    CHECK(run.coordinator->restart_of(failure) == agent::Restart::kEnd);  // there is no other host

    run.train(1, 0, false);
    REQUIRE_OK(run.coordinator->next_generation(1));
    agent::Failure hang{.rank = 0, .hang = true, .message = "stands still", .failure_class = kHang, .seen_ns = 20};
    run.coordinator->settle(hang);
    CHECK(hang.rank == 0);
    CHECK(hang.hang);
    CHECK(hang.others.empty());  // of the generation before
    CHECK(hang.host_name == own_host_name());
  }

  TEST_CASE("a rank that computes longer than the others is told with what its host shows, and when that is over") {
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    const auto pace = [&](int64_t rank, int64_t step, double ms) {
      run.coordinator->on_rank_event(
          rank, {{"event", "pace"}, {"blocks", {{step, ms}, {"x", 1}, 3}}, {"load", {{"throttled", 0.6}}}});
    };
    run.coordinator->on_tick();
    for (const int64_t step : {20, 40, 60}) {
      pace(0, step, 10);
      pace(1, step, 20);
    }
    run.clock.forward(4);
    run.coordinator->on_tick();
    REQUIRE(run.events("straggler").size() == 1);
    const nlohmann::json told = run.events("straggler")[0];
    CHECK(told.at("ranks") == std::vector<int64_t>{1});
    CHECK(told.at("cause") == "throttled");
    CHECK(told.at("ratio").get<double>() == doctest::Approx(2));
    CHECK(run.console.has(
        "computes 2.0 x as long as those that do the same work: a CPU limit stopped its cgroup for 60%"));
    pace(0, 80, 10);
    pace(1, 80, 10);
    run.clock.forward(4);
    run.coordinator->on_tick();
    CHECK(run.events("straggler_over").size() == 1);
  }

  TEST_CASE("where no boundary comes the newest step in memory is saved meanwhile") {
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    run.train(2, 0, false);
    run.coordinator->stop(SIGTERM);
    run.clock.forward(4);
    run.coordinator->on_tick();
    CHECK_FALSE(run.console.has("meanwhile"));
    run.clock.forward(2);
    run.coordinator->on_tick();
    CHECK(run.console.has("no step boundary in 5 s: saving step 2, the newest in memory, meanwhile\n"));
    CHECK(run.wait_until([&] { return !run.events("saved").empty(); }));
  }

  TEST_CASE("a run that another agent has taken is left as it is, and its memory kept") {
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    run.train(2, 0, false);
    const std::string memory = run.coordinator->memory().name();
    std::ofstream(run.folder.path() / "run.lock") << R"({"host":"other","pid":"1","since":"2026"})";
    const Result<ckpt::RestoreChoice> refused = run.coordinator->next_generation(1);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnavailable);
    CHECK(run.control.lost.has_value());
    const size_t events = lines_of(run.folder.path() / "events.jsonl").size();
    run.coordinator->on_tick();
    run.coordinator->close();
    CHECK(lines_of(run.folder.path() / "events.jsonl").size() == events);
    CHECK(fs::is_empty(run.folder.checkpoints()));
    CHECK(fs::exists(memory));
    fs::remove(memory);
  }

  TEST_CASE("the first save that fails ends the run where the recipe says so, with the disk's code") {
    Plan plan = small_plan(2);
    plan.recipe.checkpoint.on_failure = OnSaveFailure::kStop;
    RunFixture run(plan);
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    fs::rename(run.folder.checkpoints(), run.folder.path() / "away");
    run.train(3, 0, true);
    REQUIRE(run.wait_until([&] { return !run.events("save_failed").empty(); }));
    CHECK(run.console.has("the run stops, as checkpoint.on_failure says\n"));
    CHECK(run.coordinator->memory().control().stop == 1);
    fs::rename(run.folder.path() / "away", run.folder.checkpoints());
    const Result<int> code = run.coordinator->conclude({.kind = agent::EndKind::kFinished});
    REQUIRE_FALSE(code.ok());
    CHECK(code.error().code == ErrorCode::kIo);
    CHECK(code.error().message.find("stopped because step 3 was not saved") != std::string::npos);
    CHECK(run.events("end")[0].at("exit_code") == 74);
  }

  TEST_CASE("a stop that is asked for while a save is stuck is heard, and the end saves what memory holds") {
    RunFixture run(small_plan(2), {.requests = {.any_limit = false, .exit_when_unfinished = 75}});
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    run.train(3, 0, false);
    run.coordinator->memory().control().reserved[0].store(3);  // promised, and never begun
    run.coordinator->on_tick();
    run.clock.forward(61);
    run.coordinator->on_tick();
    CHECK(run.console.has("step 3 is not saved yet after 61 s; the save waits for "));
    run.control.stop = true;
    run.coordinator->stop(SIGTERM);
    run.clock.forward(61);
    run.coordinator->on_tick();
    CHECK(run.console.has("step 3 is not saved yet after 122 s"));  // a stop silences nothing
    const Result<int> code = run.coordinator->conclude({.kind = agent::EndKind::kFinished, .stop_signal = SIGTERM});
    REQUIRE_OK(code);
    CHECK(code.value() == 75);
    ckpt::PosixBackend io;
    CHECK(ckpt::newest_complete(io, run.folder.checkpoints()).value().step == 3);
  }

  TEST_CASE("saves that fail one after another have a line, and the others one together a minute later") {
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    fs::rename(run.folder.checkpoints(), run.folder.path() / "away");
    for (const int64_t step : {1, 2, 3}) {
      run.train(step, step % 2, true);
      REQUIRE(run.wait_until([&] { return std::ssize(run.events("save_failed")) == step; }));
    }
    CHECK(run.console.has("step 1 was not saved: "));
    CHECK_FALSE(run.console.has("step 2 was not saved: "));
    run.clock.forward(60);
    run.coordinator->on_tick();
    CHECK(run.console.has("2 more saves failed, of steps 2 to 3; the last: step 3 was not saved: "));
    fs::rename(run.folder.path() / "away", run.folder.checkpoints());
  }

  TEST_CASE("memory is distrusted after the death of a rank that may have written anywhere") {
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    run.coordinator->on_rank_exit({.exit_code = 0, .signal = SIGKILL});
    run.coordinator->on_rank_exit({.exit_code = 1, .signal = 0});
    CHECK(run.coordinator->memory().control().distrusted == 0);
    run.coordinator->on_rank_exit({.exit_code = 0, .signal = SIGSEGV});
    CHECK(run.coordinator->memory().control().distrusted == 1);
  }

  TEST_CASE("a save that is asked for is the ranks' to make at their next boundary, and every 100 steps are progress") {
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    run.coordinator->ask_save("SIGUSR1");
    CHECK(run.coordinator->memory().control().saves_asked == 1);
    run.coordinator->on_rank_event(0, step_event(99));
    CHECK(run.control.progress == 0);
    run.coordinator->on_rank_event(0, step_event(100));
    CHECK(run.control.progress == 1);
    run.coordinator->on_rank_event(0, step_event(101));
    CHECK(run.control.progress == 1);
  }

  TEST_CASE("what ranks send is told, and what makes no sense is passed over") {
    RunFixture run(small_plan(2));
    REQUIRE_OK(run.coordinator->open());
    REQUIRE_OK(run.coordinator->next_generation(0));
    run.coordinator->on_rank_event(1, {{"event", "ready"}, {"ms", 3.5}, {"from", "memory"}});
    CHECK(events_of(run.folder.path(), "ready")[0].at("rank") == 1);
    run.coordinator->on_rank_event(0, step_event(1));
    run.coordinator->on_rank_event(0, {{"event", "step"}});  // of another build, say
    run.coordinator->on_rank_event(0, {{"event", "new"}});
    CHECK(run.console.has("step  1/"));
    CHECK(lines_of(run.folder.path() / "metrics.jsonl").size() == 2);  // with the schema's
  }
}
