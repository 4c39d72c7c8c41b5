// Both ways to meet: files, and the agents' hubs. Hubs of several hosts are joined as their agents join them.
#include "runtime/comm/rendezvous.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <thread>

#include "runtime/comm/rendezvous_hub.h"
#include "tests/runtime/comm/fabric.h"

using namespace cairn;
using namespace cairn::comm;
using namespace cairn::comm::testing;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

Rendezvous::Time in_ms(int64_t ms) { return Clock::now() + milliseconds(ms); }

/// Hubs of several hosts, each passing on to the others what its ranks publish.
struct Joined {
  explicit Joined(size_t hosts) {
    for (size_t h = 0; h < hosts; ++h) {
      hubs.push_back(std::make_unique<RendezvousHub>(
          RendezvousHub::make([this, h](const std::string& key, const std::string& value) {
            ++passed_on;
            for (size_t other = 0; other < hubs.size(); ++other) {
              if (other != h) hubs[other]->put(key, value);
            }
          }).value()));
    }
  }
  ~Joined() { stop(); }

  /// The agents' event loops, on one thread.
  void start() {
    thread_ = std::jthread([this](const std::stop_token& stop) {
      std::vector<pollfd> fds;
      for (const auto& hub : hubs) fds.push_back({hub->fd(), POLLIN, 0});
      while (!stop.stop_requested()) {
        if (::poll(fds.data(), fds.size(), 5) <= 0) continue;
        for (size_t h = 0; h < hubs.size(); ++h) {
          if (fds[h].revents != 0) hubs[h]->poll();
        }
      }
    });
  }
  void stop() {
    if (!thread_.joinable()) return;
    thread_.request_stop();
    thread_.join();
  }
  std::shared_ptr<Rendezvous> open(size_t host, int64_t rank) {
    return open_agent_rendezvous(hubs[host]->add(rank).value());
  }

  std::vector<std::unique_ptr<RendezvousHub>> hubs;
  std::atomic<int64_t> passed_on = 0;

 private:
  std::jthread thread_;
};

/// Two hosts of two ranks, whose rendezvous goes through their hubs.
struct World {
  World(const WorldSpec& spec, const Body& body) : agents(2) {
    std::vector<Fd> sockets;
    for (int64_t r = 0; r < spec.size; ++r) {
      sockets.push_back(agents.hubs[static_cast<size_t>(r * 2 / spec.size)]->add(r).value());
    }
    hosts.emplace(spec, 2, body, [&](int64_t rank) {
      Fd mine = std::move(sockets[static_cast<size_t>(rank)]);
      sockets.clear();  // as exec would: an agent must see a rank go
      return open_agent_rendezvous(std::move(mine));
    });
    sockets.clear();
    agents.start();
  }
  std::string join(int64_t rank) { return hosts->ranks->join(rank); }

  Joined agents;
  std::optional<Hosts> hosts;
};

}  // namespace

TEST_SUITE("runtime/comm/rendezvous") {
  TEST_CASE("a value is published once, and whoever awaits it has it, before and after") {
    const TempDir dir;
    Joined one_host(1), two_hosts(2);
    std::vector<std::pair<std::shared_ptr<Rendezvous>, std::shared_ptr<Rendezvous>>> pairs;
    pairs.emplace_back(open_file_rendezvous(dir.path).value(), open_file_rendezvous(dir.path).value());
    pairs.emplace_back(one_host.open(0, 0), one_host.open(0, 1));
    pairs.emplace_back(two_hosts.open(0, 0), two_hosts.open(1, 1));
    one_host.start();
    two_hosts.start();
    for (auto& [here, there] : pairs) {
      const std::string value("a\0b/[]\n", 7), large(1 << 20, 'x');
      CHECK(here->publish("dp-2-0/0", value, in_ms(10'000)).value());
      CHECK_FALSE(here->publish("dp-2-0/0", "other", in_ms(10'000)).value());
      CHECK(here->await("dp-2-0/0", in_ms(10'000)).value() == value);
      CHECK(there->await("dp-2-0/0", in_ms(10'000)).value() == value);
      CHECK_FALSE(there->publish("dp-2-0/0", "other", in_ms(10'000)).value());

      std::thread later([&] {
        std::this_thread::sleep_for(milliseconds(30));
        CHECK(there->publish("later", large, in_ms(10'000)).value());
      });
      std::thread other([&] { CHECK(here->await("later", in_ms(5000)).value() == large); });
      CHECK(here->await("later", in_ms(5000)).value() == large);
      later.join();
      other.join();

      const auto since = Clock::now();
      CHECK_FALSE(here->await("never", in_ms(40)).value());
      CHECK(Clock::now() - since >= milliseconds(40));
      CHECK(Clock::now() - since < milliseconds(4000));
      CHECK_FALSE(here->await("never", in_ms(-1)).value());
      CHECK(here->await("later", in_ms(-1)).value() == large);  // looks at least once
    }
    CHECK(one_host.passed_on.load() == 2);  // each key once
    CHECK(two_hosts.passed_on.load() == 2);
  }

  TEST_CASE("close ends every wait of a rendezvous, now and later") {
    const TempDir dir;
    Joined agents(1);
    for (const auto& one : {open_file_rendezvous(dir.path).value(), agents.open(0, 0)}) {
      std::atomic<int> ended = 0;
      std::vector<std::thread> waits;
      for (int k = 0; k < 3; ++k) {
        waits.emplace_back([&, k] {
          CHECK_FALSE(one->await(k == 0 ? "a" : "b", in_ms(60'000)).value());
          ++ended;
        });
      }
      std::this_thread::sleep_for(milliseconds(20));
      CHECK(ended == 0);
      one->close();
      for (std::thread& wait : waits) wait.join();
      CHECK_FALSE(one->await("c", in_ms(60'000)).value());
    }
  }

  TEST_CASE("a rendezvous directory that cannot be is refused") {
    const auto directory = open_file_rendezvous("/proc/no/a");
    REQUIRE_FALSE(directory.ok());
    CHECK(directory.error().message.starts_with("rendezvous directory /proc/no/a: "));
  }

  TEST_CASE("an agent that is stuck is a timeout, and one that is gone a lost peer") {
    std::optional<Joined> agents(1);
    const auto rank = agents->open(0, 0);  // nobody polls
    CHECK(rank->publish("a", "b", in_ms(30)).error().code == ErrorCode::kTimeout);
    CHECK(rank->publish("large", std::string(8 << 20, 'x'), in_ms(30)).error().code == ErrorCode::kTimeout);
    CHECK_FALSE(rank->await("c", in_ms(30)).ok());  // the frame before it is cut off
    const auto other = agents->open(0, 1);
    std::thread waits([&] { CHECK(other->await("c", in_ms(60'000)).error().code == ErrorCode::kPeerLost); });
    std::this_thread::sleep_for(milliseconds(20));
    agents.reset();
    waits.join();
    CHECK(other->publish("d", "e", in_ms(10'000))
              .error()
              .message.starts_with("rendezvous with the agent of this host: "));
  }

  TEST_CASE("a hub forgets a rank that is gone or talks nonsense, and keeps for one that does not read") {
    Joined agents(1);
    RendezvousHub& hub = *agents.hubs[0];
    auto first = agents.open(0, 0);
    const auto second = agents.open(0, 1);
    Fd nonsense = hub.add(2).value(), deaf = hub.add(3).value();
    CHECK(hub.ranks() == 4);
    REQUIRE(::send(nonsense.get(), "nonsense nonsense", 17, 0) == 17);
    std::string wants;
    for (int k = 0; k < 8; ++k) FrameReader::append(wants, FrameKind::kWant, fmt::format("large-{}", k), {});
    REQUIRE(::send(deaf.get(), wants.data(), wants.size(), 0) == std::ssize(wants));
    agents.start();
    std::thread waits([&, first] { CHECK_FALSE(first->await("never", in_ms(50)).value()); });
    waits.join();
    first.reset();  // it waited, and is gone
    const std::string large(1 << 20, 'x');
    for (int k = 0; k < 8; ++k) CHECK(second->publish(fmt::format("large-{}", k), large, in_ms(5000)).value());
    CHECK(second->publish("never", "a", in_ms(10'000)).value());
    agents.stop();
    CHECK(hub.ranks() == 2);
    agents.start();
    const auto reads = open_agent_rendezvous(std::move(deaf));  // at last
    for (int k = 0; k < 8; ++k) CHECK(reads->await(fmt::format("large-{}", k), in_ms(5000)).value() == large);
  }

  TEST_CASE("a new generation has no value of the one before, and ranks of that one reach nobody") {
    Joined agents(2);
    const auto old = agents.open(0, 0);
    agents.start();
    CHECK(old->publish("rank-0", "old", in_ms(10'000)).value());
    agents.stop();
    for (const auto& hub : agents.hubs) hub->clear();
    CHECK(agents.hubs[0]->ranks() == 0);
    const auto fresh = agents.open(0, 0), other = agents.open(1, 1);
    agents.start();
    CHECK(old->publish("late", "old", in_ms(10'000)).error().code == ErrorCode::kPeerLost);
    CHECK(fresh->publish("rank-0", "new", in_ms(10'000)).value());
    CHECK(other->await("rank-0", in_ms(10'000)).value() == "new");
    CHECK_FALSE(other->await("late", in_ms(20)).value());
  }

  TEST_CASE("4096 ranks of a host publish, and each awaits its neighbour's value and one of all") {
    rlimit limit{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
    const rlimit before = limit;
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    const auto ranks = std::min<int64_t>(4096, (static_cast<int64_t>(limit.rlim_cur) - 100) / 3);
    if (ranks < 4096) MESSAGE("with " << ranks << " ranks: " << limit.rlim_cur << " descriptors");
    {
      Joined agents(1);
      std::vector<std::shared_ptr<Rendezvous>> all;
      for (int64_t r = 0; r < ranks; ++r) all.push_back(agents.open(0, r));
      agents.start();
      const std::string padding(300, ' ');
      // Each says that it wants the value of all, which comes last.
      for (const auto& rank : all) CHECK_FALSE(rank->await("abort", in_ms(-1)).value());
      for (int64_t r = 0; r < ranks; ++r) {
        REQUIRE(all[r]->publish(std::to_string(r), std::to_string(r) + padding, in_ms(5000)).value());
      }
      for (int64_t r = 0; r < ranks; ++r) {
        const int64_t next = (r + 1) % ranks;
        REQUIRE(all[r]->await(std::to_string(next), in_ms(5000)).value() == std::to_string(next) + padding);
      }
      CHECK(all.back()->publish("abort", "x", in_ms(5000)).value());
      for (const auto& rank : all) REQUIRE(rank->await("abort", in_ms(5000)).value() == "x");
    }
    ::setrlimit(RLIMIT_NOFILE, &before);
  }

  TEST_CASE("ranks of two hosts meet through their agents and reduce") {
    World world({.size = 4}, [](Engine& engine) -> std::string {
      EXPECT_SET(auto all, engine.exact_group("world", all_ranks(4)));
      EXPECT_SET(auto dp, engine.group("dp", {engine.world_rank() % 2, engine.world_rank() % 2 + 2}));
      for (int64_t i = 0; i < 100; ++i) {
        std::vector<float> x(1000, static_cast<float>(engine.world_rank() + i));
        EXPECT_OK(dp->all_reduce(x.data(), 1000, DType::kF32, ReduceOp::kSum, "gradients"));
        EXPECT(x[999] == static_cast<float>(2 * (engine.world_rank() % 2) + 2 + 2 * i));
        double sum = 1;
        EXPECT_OK(all->all_reduce(&sum, 1, DType::kF64, ReduceOp::kSum, "tokens"));
        EXPECT(sum == 4);
      }
      return "";
    });
    for (int64_t r = 0; r < 4; ++r) CHECK(world.join(r) == "");
  }

  TEST_CASE("a rank that dies between agents' hosts ends all waits, and everyone names it") {
    World world({.size = 4}, [](Engine& engine) -> std::string {
      EXPECT_SET(auto all, engine.exact_group("world", all_ranks(4)));
      const int64_t line = engine.world_rank() / 2 * 2, column = engine.world_rank() % 2;
      EXPECT_SET(auto tp, engine.group("tp", {line, line + 1}));
      EXPECT_SET(auto dp, engine.group("dp", {column, column + 2}));
      EXPECT_OK(all->barrier("start"));
      float x = 0;
      for (int64_t i = 0;; ++i) {
        if (engine.world_rank() == 3 && i == 50) ::raise(SIGKILL);
        Status status = tp->all_reduce(&x, 1, DType::kF32, ReduceOp::kMax, "attn.out");
        if (status.ok()) status = dp->all_reduce(&x, 1, DType::kF32, ReduceOp::kMax, "gradients");
        if (status.ok()) continue;
        EXPECT(all->barrier("after").error().code == ErrorCode::kPeerLost);
        return fmt::format("{}: {}", error_code_name(status.error().code), status.error().message);
      }
    });
    CHECK(world.join(3) == "signal 9");
    for (int64_t r = 0; r < 3; ++r) {
      const std::string text = world.join(r);
      CAPTURE(r);
      CAPTURE(text);
      CHECK(text.starts_with("peer lost: "));
      CHECK(text.find("rank 3 (") != std::string::npos);
    }
    world.agents.stop();
    for (int k = 0; k < 100; ++k) {  // their last words, and that they are gone
      for (const auto& hub : world.agents.hubs) hub->poll();
    }
    CHECK(world.agents.hubs[0]->ranks() + world.agents.hubs[1]->ranks() == 0);
  }

  TEST_CASE("an abort reaches the ranks of all hosts through their agents, at once") {
    World world({.size = 4, .deadline_ms = 60'000}, [](Engine& engine) -> std::string {
      EXPECT_SET(auto all, engine.exact_group("world", all_ranks(4)));
      EXPECT_SET(auto pp, engine.group("pp", {engine.world_rank() % 2, engine.world_rank() % 2 + 2}));
      EXPECT_OK(all->barrier("start"));
      std::this_thread::sleep_for(milliseconds(20));  // everyone is out of the barrier
      if (engine.world_rank() == 0) {
        engine.abort("out of time");
        return "";
      }
      if (engine.world_rank() == 2) std::this_thread::sleep_for(milliseconds(100));
      float x = 0;
      const double start_ms = now_ms();
      const Status status = pp->recv(&x, 4, 1 - pp->rank(), "never sent");
      EXPECT(now_ms() - start_ms < 5000);
      return fmt::format("{}: {}", error_code_name(status.error().code), status.error().message);
    });
    CHECK(world.join(0) == "");
    CHECK(world.join(1) == "stopped: pp[1,3].recv(never sent): rank 0: out of time");
    CHECK(world.join(2) == "stopped: pp[0,2].recv(never sent): rank 0: out of time");
    CHECK(world.join(3) == "stopped: pp[1,3].recv(never sent): rank 0: out of time");
  }

  TEST_CASE("a rank whose agent goes gives up at once") {
    const WorldSpec spec{.size = 2, .deadline_ms = 60'000};
    const TempDir dir;
    std::optional<Joined> agents(1);
    GlooConfig config = loopback_config(spec, dir, 0);
    config.rendezvous = agents->open(0, 0);
    agents->start();
    const auto engine = make_gloo_engine(config).value();
    std::thread goes([&] {
      std::this_thread::sleep_for(milliseconds(30));
      agents.reset();
    });
    const double start_ms = now_ms();
    const auto comm = engine->group("tp", {0, 1});  // rank 1 never comes
    goes.join();
    CHECK(now_ms() - start_ms < 5000);
    REQUIRE_FALSE(comm.ok());
    CHECK(comm.error().code == ErrorCode::kPeerLost);
    CHECK(comm.error().message.find("rendezvous with the agent of this host: it has closed the connection") !=
          std::string::npos);
  }
}
