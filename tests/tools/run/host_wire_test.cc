#include "tools/run/hosts/host_wire.h"

#include <doctest/doctest.h>

#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::tools;

TEST_SUITE("tools/run/host_wire") {
  TEST_CASE("what the leader orders reaches a host as it was, to the last bit of each number") {
    ckpt::RestoreChoice wanted{.incarnation = 0xffffffffffffffffu,
                               .source = ckpt::arena::Source::kDisk,
                               .step = int64_t{1} << 53,
                               .slot = 2,
                               .slot_incarnation = 7,
                               .dir = "step-00000012",
                               .foreign = true};
    wanted.match.emplace();
    hosts::Resume order = to_wire(wanted);
    const Result<ckpt::RestoreChoice> got = from_wire(order);
    REQUIRE_OK(got);
    CHECK(got.value().incarnation == wanted.incarnation);
    CHECK(got.value().source == wanted.source);
    CHECK(got.value().step == wanted.step);
    CHECK(got.value().slot == wanted.slot);
    CHECK(got.value().slot_incarnation == wanted.slot_incarnation);
    CHECK(got.value().dir == wanted.dir);
    CHECK(got.value().match.has_value());
    CHECK(got.value().foreign);
    for (const ckpt::arena::Source source : {ckpt::arena::Source::kMemory, ckpt::arena::Source::kFresh}) {
      wanted.source = source;
      CHECK(from_wire(to_wire(wanted)).value().source == source);
    }
    order.kernel_level = 99;
    CHECK(from_wire(order).error().message == "the leader orders instructions 99, which are unknown");
  }

  TEST_CASE("memory, ranks and failures reach the leader as they were") {
    const ckpt::HostMemory memory{.incarnation = 9, .whole = {{0, 8, 4}, {2, 9, 5}}};
    CHECK(from_wire(to_wire(memory)) == memory);

    agent::RankState rank{.rank = 5, .state = 'T'};
    rank.view.pid = 812;
    rank.view.step = 12;
    rank.view.phase = "optimizer";
    rank.view.description = "in dp[1,5]";
    rank.view.beside.inside = true;
    rank.view.beside.awaits = 1;
    rank.view.beside.text = "in dp[1,5].reduce";
    const std::vector<agent::RankState> states = from_wire(to_wire(std::vector{rank}));
    REQUIRE(states.size() == 1);
    CHECK(states[0].rank == 5);
    CHECK(states[0].state == 'T');
    CHECK(states[0].view.pid == 812);
    CHECK(states[0].view.step == 12);
    CHECK(states[0].view.phase == "optimizer");
    CHECK(states[0].view.description == "in dp[1,5]");
    CHECK_FALSE(states[0].view.inside);
    CHECK(states[0].view.beside.inside);
    CHECK(states[0].view.beside.awaits == 1);
    CHECK(states[0].view.beside.text == "in dp[1,5].reduce");

    const agent::Failure failure{.rank = 3,
                                 .status = {.exit_code = 0, .signal = 9},
                                 .hang = true,
                                 .message = "m",
                                 .failure_class = agent::FailureClass::kOutOfMemory,
                                 .pid = 812,
                                 .seen_ns = int64_t{1} << 60,
                                 .last_lines = {"a", "b"}};
    const agent::Failure told = from_wire(to_wire(failure));
    CHECK(told.rank == 3);
    CHECK(told.status.signal == 9);
    CHECK(told.hang);
    CHECK(told.message == "m");
    CHECK(told.failure_class == agent::FailureClass::kOutOfMemory);
    CHECK(told.pid == 812);
    CHECK(told.seen_ns == int64_t{1} << 60);
    CHECK(told.last_lines == failure.last_lines);
    CHECK(from_wire(hosts::Failure{.signal = 11}).failure_class == agent::FailureClass::kCrash);  // by its status
  }

  TEST_CASE("numbers of a rank whose memory is damaged are none") {
    const hosts::Operation wild{.operations = -3, .awaits = -7, .since_ms = INT64_MIN};
    const std::vector<agent::RankState> states =
        from_wire(std::vector{hosts::RankState{.own = wild, .beside = wild, .pid = -1, .step = -9}});
    REQUIRE(states.size() == 1);
    for (const comm::OperationView& view : {comm::OperationView(states[0].view), states[0].view.beside}) {
      CHECK(view.operations == 0);
      CHECK(view.awaits == -1);
      CHECK(view.since_ms == 0);
    }
    CHECK(states[0].state == '?');
    CHECK(states[0].view.pid == 0);
    CHECK(states[0].view.step == -1);
  }
}
