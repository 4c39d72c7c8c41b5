#include "runtime/agent/wait_report.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "runtime/agent/child_process.h"

using namespace cairn::agent;

namespace {

RankState at_step(int64_t rank, char state, cairn::comm::OperationView main, std::string phase) {
  RankState out{.rank = rank, .state = state};
  static_cast<cairn::comm::OperationView&>(out.view) = std::move(main);
  out.view.pid = 100 + rank;
  out.view.step = 7;
  out.view.phase = std::move(phase);
  out.view.description = out.view.text;
  return out;
}

RankState waiting(int64_t rank, int64_t awaits, int64_t since_ms) {
  return at_step(rank, 'S',
                 {.inside = true,
                  .awaits = awaits,
                  .since_ms = since_ms,
                  .text = "in dp[0,1].reduce_scatter(gradient bucket), entered 5 ms ago"},
                 "gradients");
}

RankState computing(int64_t rank) {
  return at_step(rank, 'R', {.text = "outside of any operation, after tp[0,1].all_reduce(mlp.out), entered 9 ms ago"},
                 "forward and backward");
}

/// A rank whose second thread waits, beside its own work or alone.
RankState beside(RankState rank, int64_t awaits, int64_t since_ms) {
  rank.view.beside = {.inside = true,
                      .awaits = awaits,
                      .since_ms = since_ms,
                      .text = "in dp[0,1].reduce_scatter(gradients of layer 3), entered 4 ms ago"};
  return rank;
}

ProcessStacks stacks_of(pid_t pid) {
  ProcessStacks out;
  read_stacks({pid}, [&](const ProcessStacks& stacks) { out = stacks; });
  return out;
}

}  // namespace

// Not inlined, and not static: its name must stand in the stack.
extern "C" __attribute__((noinline)) void cairn_test_waits_here(int ready) {
  const char byte = 1;
  if (write(ready, &byte, 1) != 1) _exit(1);
  for (;;) pause();
}

TEST_SUITE("runtime/agent/wait_report") {
  TEST_CASE("the culprit stands at the end of the waits") {
    const WaitFinding found =
        find_culprit({waiting(0, 1, 3000), waiting(1, 3, 2000), waiting(2, 0, 4000), computing(3)});
    CHECK(found.culprits == std::vector<int64_t>{3});
    CHECK(found.chain == std::vector<int64_t>{2, 0, 1, 3});
    CHECK(found.waited_ms == 4000);
    CHECK_FALSE(found.deadlock);
  }

  TEST_CASE("the wait report blames a rank that is gone before one that is stopped, and both before any guess") {
    std::vector<RankState> ranks = {waiting(0, 1, 3000), waiting(1, 0, 2000), computing(2), computing(3)};
    ranks[2].state = 'T';
    CHECK(find_culprit(ranks).culprits == std::vector<int64_t>{2});
    CHECK(find_culprit(ranks).reason == "is stopped (state T)");
    ranks[3].state = 'Z';
    CHECK(find_culprit(ranks).culprits == std::vector<int64_t>{3});
    CHECK(find_culprit(ranks).reason == "has died");
  }

  TEST_CASE("ranks that wait for each other are all named") {
    const WaitFinding found = find_culprit({waiting(0, 1, 3000), waiting(1, 2, 2000), waiting(2, 1, 1000)});
    CHECK(found.deadlock);
    CHECK(found.culprits == std::vector<int64_t>{1, 2});
    CHECK(summary_text(found, {waiting(0, 1, 3000), waiting(1, 2, 2000), waiting(2, 1, 1000)})
              .find("ranks 1, 2 wait for each other") == 0);
  }

  TEST_CASE("a reduction beside a rank's own work is not what it is blamed for, unless it waits for it") {
    // Rank 1 computes while its reductions wait for rank 0, which waits for rank 1's activations.
    std::vector<RankState> ranks = {waiting(0, 1, 2000), beside(computing(1), 0, 3000)};
    WaitFinding found = find_culprit(ranks);
    CHECK(found.culprits == std::vector<int64_t>{1});
    CHECK(found.waited_ms == 3000);
    CHECK(found.chain == std::vector<int64_t>{1, 0, 1});
    CHECK_FALSE(found.deadlock);
    // At the end of a step rank 1 sleeps until its reductions are done: the chain goes on through them.
    ranks = {waiting(0, 1, 2000), beside(computing(1), 2, 1500), computing(2)};
    ranks[1].state = 'S';
    found = find_culprit(ranks);
    CHECK(found.culprits == std::vector<int64_t>{2});
    CHECK(found.chain == std::vector<int64_t>{0, 1, 2});
    const std::string text = summary_text(found, ranks);
    CHECK(text.find("rank 1 beside its own work in dp[0,1].reduce_scatter(gradients of layer 3)") != std::string::npos);
    CHECK(text.find("rank 0 in dp[0,1].reduce_scatter(gradient bucket)") != std::string::npos);
    // Both threads wait; both are told.
    ranks = {beside(waiting(0, 1, 2000), 1, 1000), computing(1)};
    CHECK(find_culprit(ranks).culprits == std::vector<int64_t>{1});
    const std::string both = summary_text(find_culprit(ranks), ranks);
    CHECK(both.find("for 2.0 s, waiting for rank 1") != std::string::npos);
    CHECK(both.find("beside its own work") != std::string::npos);
    CHECK(both.find("for 1.0 s, waiting for rank 1") != std::string::npos);
  }

  TEST_CASE("nobody is blamed when nobody waits") {
    CHECK(find_culprit({computing(0), computing(1)}).culprits.empty());
    CHECK(find_culprit({}).culprits.empty());
  }

  TEST_CASE("the report names the culprit first and tells equal waits once") {
    WaitReport report;
    report.title = "title";
    report.ranks = {waiting(0, 2, 3000), waiting(1, 2, 2000), computing(2)};
    report.finding = find_culprit(report.ranks);
    report.stacks = {
        {2, {.pid = 102, .threads = {{1, "cairn", {"a", "b"}}, {2, "worker", {"c"}}, {3, "worker", {"c"}}}}},
        {0, {.pid = 100, .threads = {}, .problem = "it had left"}}};
    const std::string text = to_text(report);
    CHECK(text.find("rank 2 (pid 102) is in no operation") < text.find("ranks 0, 1 in dp[0,1].reduce_scatter"));
    CHECK(text.find("for 3.0 s, waiting for rank 2") != std::string::npos);
    CHECK(text.find("\nrank 2 (pid 102), state R") < text.find("\nrank 0 (pid 100), state S"));
    CHECK(text.find("threads 2 (worker), 3 (worker)\n    #0  c") != std::string::npos);
    CHECK(text.find("no stacks: it had left") != std::string::npos);
  }

  TEST_CASE("ranks of all hosts whose training threads stand at one place are told once, fewest first") {
    const auto stands = [](int64_t rank, std::vector<std::string> frames) {
      // Numbers of processes are those of each host: two may be equal.
      const pid_t pid = 100 + static_cast<pid_t>(rank % 2);
      return RankStacks{rank, {.pid = pid, .threads = {{pid + 1, "team", {"x"}}, {pid, "cairn", std::move(frames)}}}};
    };
    const std::vector<RankStacks> all = {
        stands(3, {"recv", "pass"}), stands(0, {"recv", "pass"}), stands(2, {"pause", "pass"}),
        RankStacks{5, {.pid = 7, .threads = {}, .problem = "gone"}}, stands(1, {"recv", "pass"})};
    const std::vector<StackGroup> groups = group_stacks(all);
    REQUIRE(groups.size() == 2);
    CHECK(groups[0].ranks == std::vector<int64_t>{2});
    CHECK(groups[0].frames == std::vector<std::string>{"pause", "pass"});
    CHECK(groups[1].ranks == std::vector<int64_t>{0, 1, 3});

    WaitReport report;
    for (int64_t rank = 0; rank < 4; ++rank) report.ranks.push_back(waiting(rank, 2, 1000));
    report.ranks[2] = computing(2);
    report.finding = find_culprit(report.ranks);
    report.stacks = all;
    const std::string text = to_text(report);
    CHECK(text.find("  rank 2\n    #0  pause\n    #1  pass\n  ranks 0, 1, 3\n    #0  recv\n") != std::string::npos);

    const auto read = rank_stacks_from_json(nlohmann::json::parse(to_json(all[0]).dump()));
    REQUIRE(read.ok());
    CHECK(read.value().rank == 3);
    CHECK(read.value().stacks.threads[1].frames == all[0].stacks.threads[1].frames);
    for (const char* bad : {"1", "{}", R"({"rank": -1, "stacks": {}})", R"({"rank": 1, "stacks": []})",
                            R"({"rank": 1, "stacks": {"pid": "x"}})"})
      CHECK_FALSE(rank_stacks_from_json(nlohmann::json::parse(bad)).ok());
  }

  TEST_CASE("the stacks of a stopped process are read by name, and it stays stopped") {
    int ready[2];
    REQUIRE(pipe(ready) == 0);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      cairn_test_waits_here(ready[1]);
      _exit(0);
    }
    char byte = 0;
    REQUIRE(read(ready[0], &byte, 1) == 1);
    REQUIRE(kill(pid, SIGSTOP) == 0);
    int status = 0;
    REQUIRE(waitpid(pid, &status, WUNTRACED) == pid);
    const ProcessStacks stacks = stacks_of(pid);
    // A tracer that lets go makes it stop anew: for a moment it runs.
    for (int k = 0; k < 2000 && process_state(pid) != 'T'; ++k) usleep(1000);
    CHECK(process_state(pid) == 'T');
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    close(ready[0]);
    close(ready[1]);
    if (stacks.problem.find("refused: Operation not permitted") != std::string::npos) {
      MESSAGE("not tested: tracing is not permitted here");
      return;
    }
    REQUIRE_MESSAGE(stacks.problem.empty(), stacks.problem);
    REQUIRE_FALSE(stacks.threads.empty());
    CHECK(to_text(stacks, "").find("cairn_test_waits_here") != std::string::npos);
    const auto again = process_stacks_from_json(to_json(stacks));
    REQUIRE(again.ok());
    CHECK(to_text(again.value(), "") == to_text(stacks, ""));
  }

  TEST_CASE("a process that is not there is a problem told, no failure") {
    const pid_t pid = fork();
    if (pid == 0) _exit(0);
    int status = 0;
    waitpid(pid, &status, 0);
    CHECK_FALSE(stacks_of(pid).problem.empty());
  }

}  // TEST_SUITE
