// Who keeps ranks of several hosts waiting, from what each host's memory shows.
#include <doctest/doctest.h>
#include <unistd.h>

#include <map>

#include "runtime/agent/child_process.h"
#include "runtime/agent/wait_report.h"
#include "runtime/comm/lane.h"
#include "tests/runtime/comm/fabric.h"

using namespace cairn;
using namespace cairn::agent;
using namespace cairn::comm;
using namespace cairn::comm::testing;

namespace {

std::vector<RankState> states(const Hosts& hosts) {
  std::vector<RankState> out;
  for (const RankView& view : hosts.views()) {
    const char state = view.pid > 0 ? process_state(static_cast<pid_t>(view.pid)) : '?';
    out.push_back({static_cast<int64_t>(out.size()), view, state});
  }
  return out;
}

/// The states once these ranks are in these operations and wait for somebody, and `still` for nobody: before that
/// they may wait for it for another reason, as to connect.
std::vector<RankState> states_once(const Hosts& hosts, const std::map<int64_t, std::string>& in, int64_t still) {
  const auto reached = [&](const std::vector<RankState>& now) {
    for (const auto& [rank, operation] : in) {
      const RankView& view = now[static_cast<size_t>(rank)].view;
      if (view.awaits < 0 || !view.text.starts_with("in " + operation + ", entered ")) return false;
    }
    const RankView& culprit = now[static_cast<size_t>(still)].view;
    return culprit.pid > 0 && !culprit.inside && find_culprit(now).culprits == std::vector<int64_t>{still};
  };
  std::vector<RankState> now = states(hosts);
  for (const double until = now_ms() + 20'000; !reached(now) && now_ms() < until; now = states(hosts)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return now;
}

[[noreturn]] void stand_still() {
  for (;;) ::pause();
}

}  // namespace

TEST_SUITE("runtime/agent/hosts_wait") {
  // Ranks 0 1 | 2 3: tp in memory, dp over TCP.
  TEST_CASE("a rank that stands still in front of a collective between hosts is blamed by all who wait for it") {
    Hosts hosts({.size = 4, .deadline_ms = 120'000}, 2, [](Engine& engine) -> std::string {
      const int64_t rank = engine.world_rank();
      EXPECT_SET(auto tp, engine.group("tp", {rank / 2 * 2, rank / 2 * 2 + 1}));
      EXPECT_SET(auto dp, engine.group("dp", {rank % 2, rank % 2 + 2}));
      float x = 0;
      EXPECT_OK(dp->all_reduce(&x, 1, DType::kF32, ReduceOp::kSum, "first"));
      EXPECT_OK(tp->barrier("start"));
      if (rank == 3) stand_still();
      EXPECT_OK((rank == 0 ? tp : dp)->all_reduce(&x, 1, DType::kF32, ReduceOp::kSum, "gradients"));
      return "";
    });
    const auto now = states_once(hosts,
                                 {{0, "tp[0,1].all_reduce(gradients)"},
                                  {1, "dp[1,3].all_reduce(gradients)"},
                                  {2, "dp[0,2].all_reduce(gradients)"}},
                                 3);
    CHECK(now[0].view.awaits == 1);
    CHECK(now[1].view.awaits == 3);
    CHECK(now[2].view.awaits == 0);
    CHECK(now[1].view.inside);
    CHECK(now[1].view.text.starts_with("in dp[1,3].all_reduce(gradients), entered "));
    CHECK(now[2].view.text.starts_with("in dp[0,2].all_reduce(gradients), entered "));
    CHECK(now[1].view.operations == 3);  // dp's connecting and first sum, and the barrier
    CHECK_FALSE(now[3].view.inside);
    CHECK(now[3].view.awaits == -1);
    const WaitFinding found = find_culprit(now);
    REQUIRE(found.culprits == std::vector<int64_t>{3});
    CHECK(found.chain.back() == 3);
  }

  TEST_CASE("the chain of waits leads through the hosts of an exact group") {
    Hosts hosts({.size = 6, .deadline_ms = 120'000}, 3, [](Engine& engine) -> std::string {
      EXPECT_SET(auto world, engine.exact_group("world", all_ranks(6)));
      EXPECT_OK(world->barrier("start"));
      if (engine.world_rank() == 5) stand_still();
      double x = 1;
      EXPECT_OK(world->all_reduce(&x, 1, DType::kF64, ReduceOp::kSum, "losses"));
      return "";
    });
    const auto now = states_once(hosts,
                                 {{0, "world[0,2,4].all_reduce(losses)"},
                                  {1, "world[0,1].broadcast(losses)"},
                                  {2, "world[0,2,4].all_reduce(losses)"},
                                  {3, "world[2,3].broadcast(losses)"},
                                  {4, "world[4,5].all_reduce(losses)"}},
                                 5);
    CHECK(now[4].view.awaits == 5);
    CHECK(now[4].view.text.starts_with("in world[4,5].all_reduce(losses), entered "));
    CHECK(now[2].view.text.starts_with("in world[0,2,4].all_reduce(losses), entered "));
    CHECK((now[2].view.awaits == 4));
    CHECK((now[0].view.awaits == 2 || now[0].view.awaits == 4));
    CHECK(now[1].view.awaits == 0);
    CHECK(now[3].view.awaits == 2);
    REQUIRE(find_culprit(now).culprits == std::vector<int64_t>{5});
  }

  TEST_CASE("a rank that does not come to make a group between hosts is blamed") {
    Hosts hosts({.size = 4, .deadline_ms = 120'000}, 2, [](Engine& engine) -> std::string {
      const int64_t rank = engine.world_rank();
      EXPECT_SET(auto tp, engine.group("tp", {rank / 2 * 2, rank / 2 * 2 + 1}));
      EXPECT_OK(tp->barrier("start"));
      if (rank == 3) stand_still();
      if (rank == 1) {
        EXPECT_SET(auto dp, engine.group("dp", {1, 3}));
      }
      EXPECT_OK(tp->barrier("groups"));
      return "";
    });
    const auto now = states_once(
        hosts, {{0, "tp[0,1].barrier(groups)"}, {1, "dp[1,3].group(connect)"}, {2, "tp[2,3].barrier(groups)"}}, 3);
    CHECK(now[1].view.text.starts_with("in dp[1,3].group(connect), entered "));
    CHECK(now[1].view.awaits == 3);
    CHECK(now[0].view.awaits == 1);
    CHECK(now[2].view.awaits == 3);
    REQUIRE(find_culprit(now).culprits == std::vector<int64_t>{3});
  }

  TEST_CASE("messages between hosts: the receiver awaits the sender, in either thread of a rank") {
    Hosts hosts({.size = 2, .deadline_ms = 120'000}, 2, [](Engine& engine) -> std::string {
      EXPECT_SET(auto pp, engine.group("pp", {0, 1}));
      EXPECT_SET(auto dp, engine.group("dp", {0, 1}));
      if (engine.world_rank() == 1) stand_still();
      const std::unique_ptr<Stream> compute = make_cpu_stream();
      Lane lane(*compute, true);
      lane.submit([&] { return dp->barrier("gradients"); });
      float x = 0;
      EXPECT_OK(pp->recv(&x, 4, 1, "activations"));
      return "";
    });
    const auto now = states_once(hosts, {{0, "pp[0,1].recv(activations)"}}, 1);
    CHECK(now[0].view.text.starts_with("in pp[0,1].recv(activations), entered "));
    CHECK(now[0].view.awaits == 1);
    for (int k = 0; k < 10'000 && hosts.views()[0].beside.awaits != 1; ++k) ::usleep(1000);
    CHECK(hosts.views()[0].beside.awaits == 1);
    CHECK(hosts.views()[0].beside.text.starts_with("in dp[0,1].barrier(gradients), entered "));
  }
}
