// Peers that die, stop, leave or disagree: every survivor learns it, soon, and by name.
#include <doctest/doctest.h>
#include <thread>

#include "runtime/core/process.h"
#include "tests/runtime/comm/fabric.h"

using namespace cairn;
using namespace cairn::comm;
using namespace cairn::comm::testing;

namespace {

// From a SIGKILL to the error in every survivor, on a host with busy cores.
#ifdef CAIRN_SANITIZED
constexpr double kSoonMs = 1000 + kNoticedMs;
#else
constexpr double kSoonMs = 100 + kNoticedMs;
#endif

/// "peer lost 1234.5 message": code, time it came, text.
std::string report(const Status& status) {
  if (status.ok()) return "ok";
  return fmt::format("{} {:.3f} {}", error_code_name(status.error().code), now_ms(), status.error().message);
}

struct Report {
  std::string code, message;
  double at_ms = 0;
};

Report parse(const std::string& text) {
  for (const char* code : {"peer lost", "timeout", "stopped", "internal", "invalid input"}) {
    if (text.starts_with(code)) {
      const size_t at = std::string(code).size() + 1;
      const size_t end = text.find(' ', at);
      std::string message = text.substr(end + 1);
      if (message.starts_with(kSettledOn)) message.erase(0, kSettledOn.size());
      return {code, std::move(message), std::stod(text.substr(at, end - at))};
    }
  }
  return {text, text, 0};
}

struct World {
  explicit World(const WorldSpec& spec, const Body& body)
      : shm(ShmWorld::create(world_config(spec)).value()),
        ranks(
            spec.size,
            [&, outer = around(spec)](int64_t r) -> Result<std::unique_ptr<Engine>> {
              RT_TRY_SET(auto host, attach_shm_engine(shm.fd(), r, {.deadline_ms = spec.deadline_ms}));
              return outer(std::move(host));
            },
            body) {}
  ShmWorld shm;
  Processes ranks;
};

/// On two hosts.
std::vector<std::string> run_on_hosts(const WorldSpec& spec, const Body& body) {
  return run_hosts(spec, 2, body, around(spec));
}

/// Stops a rank at a moment when it is inside of an operation.
void stop_inside(World& world, int64_t rank) {
  for (;;) {
    world.ranks.send_signal(rank, SIGSTOP);
    while (process_stat(world.ranks.pid(rank)).value().state != 'T') std::this_thread::yield();
    // Behind a device its thread is in one for an instant only.
    if (!kSettledOn.empty() || world.shm.ranks()[static_cast<size_t>(rank)].inside) return;
    world.ranks.send_signal(rank, SIGCONT);
  }
}

using Count = Shared<std::atomic<int64_t>>;

std::string loop_all_reduce(Engine& engine, int64_t n, const Count& done) {
  EXPECT_SET(auto comm, engine.group("dp", all_ranks(n)));
  std::vector<float> data(20000, 1.0f);
  for (;;) {
    const Status status = comm->all_reduce(data.data(), 20000, DType::kF32, ReduceOp::kMax, "gradients");
    if (!status.ok()) return report(status);
    ++*done;
  }
}

}  // namespace

TEST_SUITE("runtime/comm/failure") {
  TEST_CASE("a rank killed inside a collective is a lost peer to every survivor at once, by rank and pid") {
    for (const int64_t n : {2, 4, 8}) {
      CAPTURE(n);
      const Count done;
      World world({.size = n}, [&](Engine& engine) { return loop_all_reduce(engine, n, done); });
      while ((*done).load() < 10 * n) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      stop_inside(world, 1);
      const double killed_ms = now_ms();
      world.ranks.send_signal(1, SIGKILL);
      // On a device it is in the collective while its thread is behind it.
      const std::string died = fmt::format("rank 1 (pid {}) died; it was last seen ", world.ranks.pid(1));
      const auto where = [](const std::string& message) {
        return message.find("it was last seen in dp[") != std::string::npos ||
               (!kSettledOn.empty() &&
                message.find("it was last seen outside of any operation, after dp[") != std::string::npos);
      };
      for (int64_t r = 0; r < n; ++r) {
        const std::string text = world.ranks.join(r);
        CAPTURE(r);
        CAPTURE(text);
        if (r == 1) {
          CHECK(text == "signal 9");
          continue;
        }
        const Report got = parse(text);
        CHECK(got.code == "peer lost");
        CHECK(got.at_ms - killed_ms < kSoonMs);
        CHECK(got.message.starts_with("dp["));
        CHECK(got.message.find(died) != std::string::npos);
        CHECK(where(got.message));
      }
      CHECK(world.shm.aborted());
      CHECK(world.shm.abort_reason().find(died) != std::string::npos);
    }
  }

  TEST_CASE("a rank killed while it computes is noticed by those who wait for it, and by those who wait for them") {
    const Shared<std::atomic<int64_t>> out;
    World world({.size = 3}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto all, engine.group("dp", all_ranks(3)));
      std::unique_ptr<Comm> tp, pp;
      if (engine.world_rank() > 0) {
        EXPECT_SET(tp, engine.group("tp", {1, 2}));
      }
      if (engine.world_rank() < 2) {
        EXPECT_SET(pp, engine.group("pp", {0, 1}));
      }
      EXPECT_OK(all->barrier("start"));
      meet(out, 3);
      if (engine.world_rank() == 2) {
        for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
      }
      float x = 0;
      if (engine.world_rank() == 1) return report(tp->all_reduce(&x, 1, DType::kF32, ReduceOp::kSum, "attn.out"));
      return report(pp->recv(&x, 4, 1, "activations"));  // waits for one that waits for the dead
    });
    while ((*out).load() < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // let the waits grow to their longest slices
    const double killed_ms = now_ms();
    world.ranks.send_signal(2, SIGKILL);
    const Report first = parse(world.ranks.join(0)), second = parse(world.ranks.join(1));
    CHECK(first.code == "peer lost");
    CHECK(second.code == "peer lost");
    CHECK(first.at_ms - killed_ms < kSoonMs);
    CHECK(second.at_ms - killed_ms < kSoonMs);
    CAPTURE(first.message);
    CAPTURE(second.message);
    CHECK(second.message.starts_with("tp[1,2].all_reduce(attn.out): rank 2 (pid "));
    CHECK(second.message.find("died; it was last seen outside of any operation, after dp[0,1,2].barrier(start)") !=
          std::string::npos);
    CHECK(first.message.starts_with("pp[0,1].recv(activations): rank 1: tp[1,2].all_reduce(attn.out): rank 2 (pid "));
  }

  TEST_CASE("a stopped rank is a timeout at the deadline, which says who is missing and where it was last seen") {
    constexpr int64_t kDeadlineMs = 400;
    World world({.size = 2, .deadline_ms = kDeadlineMs}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto comm, engine.group("tp", {0, 1}));
      EXPECT_OK(comm->barrier("start"));
      if (engine.world_rank() == 1) {
        ::raise(SIGSTOP);
        return "";
      }
      const double start_ms = now_ms();
      float x = 0;
      const Status status = comm->all_reduce(&x, 1, DType::kF32, ReduceOp::kSum, "layer 3 attn.out");
      EXPECT(now_ms() - start_ms >= kDeadlineMs);
      EXPECT(now_ms() - start_ms < kDeadlineMs + 200 + kNoticedMs);
      return report(status);
    });
    const Report got = parse(world.ranks.join(0));
    CAPTURE(got.message);
    CHECK(got.code == "timeout");
    const std::string seen = "it was last seen outside of any operation, after tp[0,1].barrier(start), entered ";
    if (kSettledOn.empty()) {
      CHECK(got.message.starts_with(
          fmt::format("tp[0,1].all_reduce(layer 3 attn.out): rank 1 (pid {}) did not arrive within 400 ms, {}",
                      world.ranks.pid(1), seen)));
    } else {
      CHECK(got.message.starts_with(
          "tp[0,1].all_reduce(layer 3 attn.out): not done after 400 ms on the device of rank "));
      CHECK(got.message.find(fmt::format("; rank 1 (pid {}) is stopped; {}", world.ranks.pid(1), seen)) !=
            std::string::npos);
    }
  }

  TEST_CASE("a rank that never starts is a timeout, not a lost peer") {
    const WorldSpec spec{.size = 2, .deadline_ms = 50};
    const auto world = ShmWorld::create({.world_size = 2}).value();
    const auto started = [&]() -> Status {
      RT_TRY_SET(auto host, attach_shm_engine(world.fd(), 0, {.deadline_ms = spec.deadline_ms}));
      RT_TRY_SET(const auto engine, around(spec)(std::move(host)));
      RT_TRY_SET(const auto comm, engine->group("tp", {0, 1}));
      return comm->barrier("start");
    };
    const Status status = started();
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().code == ErrorCode::kTimeout);
    CHECK(status.error().message.ends_with(
        "): rank 1 (no process) did not arrive within 50 ms, it was last seen not started yet"));
  }

  TEST_CASE("abort from a rank or from the world's owner wakes every rank, with the reason") {
    for (const bool from_owner : {false, true}) {
      CAPTURE(from_owner);
      const Count out;
      World world({.size = 4}, [&](Engine& engine) -> std::string {
        EXPECT_SET(auto all, engine.group("dp", all_ranks(4)));
        EXPECT_OK(all->barrier("start"));
        meet(out, 4);
        std::thread watcher;
        if (engine.world_rank() == 0 && !from_owner) {
          watcher = std::thread([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            engine.abort("out of time");
          });
        }
        float x = 0;
        Status status;
        if (engine.world_rank() == 3) {  // three wait in different ways, one for a rank that is not there
          status = all->recv(&x, 4, 0, "never sent");
        } else {
          auto pair = engine.group("pp", {engine.world_rank(), 3});
          status = pair.ok() ? pair.value()->all_reduce(&x, 1, DType::kF32, ReduceOp::kSum, "never met")
                             : Status(std::move(pair).error());
        }
        if (watcher.joinable()) watcher.join();
        EXPECT(!status.ok());
        EXPECT(status.error().message.ends_with("out of time"));
        const Status again = all->barrier("after");
        EXPECT((!again.ok() && again.error().code == ErrorCode::kStopped));
        return report(status);
      });
      while ((*out).load() < 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      double stopped_ms = now_ms() + 20;
      if (from_owner) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        stopped_ms = now_ms();
        world.shm.abort("out of time");
      }
      for (int64_t r = 0; r < 4; ++r) {
        const std::string text = world.ranks.join(r);
        CAPTURE(text);
        const Report got = parse(text);
        CHECK(got.code == "stopped");
        CHECK(got.at_ms - stopped_ms < kSoonMs);
      }
    }
  }

  TEST_CASE("a thread that leaves is a lost peer to the others") {
    const auto results = run_threads({.size = 3}, [](Engine& engine) -> std::string {
      EXPECT_SET(auto comm, engine.group("tp", all_ranks(3)));
      EXPECT_OK(comm->barrier("start"));
      if (engine.world_rank() == 1) return "gone";
      const double start_ms = now_ms();
      const Status status = comm->barrier("end");
      EXPECT((!status.ok() && status.error().code == ErrorCode::kPeerLost));
      EXPECT(now_ms() - start_ms < kSoonMs);
      return status.error().message;
    });
    CHECK(results[1] == "gone");
    for (const int64_t r : {0, 2}) {
      CAPTURE(results[static_cast<size_t>(r)]);
      CHECK(results[static_cast<size_t>(r)].find("has left; it was last seen") != std::string::npos);
    }
  }

  TEST_CASE("messages that a rank sent before it left are still received") {
    for (const Fabric& fabric : fabrics()) {
      const auto results = fabric.run({.size = 2}, [](Engine& engine) -> std::string {
        EXPECT_SET(auto comm, engine.group("pp", {0, 1}));
        int64_t x = 0;
        if (engine.world_rank() == 0) {
          x = 17;
          EXPECT_OK(comm->isend(&x, 8, 1, "last words"));
          EXPECT_OK(comm->wait_sends("last words"));
          return "";
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        EXPECT_OK(comm->recv(&x, 8, 0, "last words"));
        EXPECT(x == 17);
        EXPECT(comm->recv(&x, 8, 0, "more").error().code == ErrorCode::kPeerLost);
        return "";
      });
      CAPTURE(fabric.name);
      CHECK(results == std::vector<std::string>{"", ""});
    }
  }

  TEST_CASE("members that disagree on size, kind, dtype or root get an error that names both calls") {
    struct Disagreement {
      const char* first;
      const char* second;
      std::function<Status(Comm&, bool, float*)> call;
      bool moves_alike = false;  // the same bytes: who does not compare calls cannot see it
    };
    const std::vector<Disagreement> cases = {
        {"all_reduce of 40 bytes (f32 sum)", "all_reduce of 44 bytes (f32 sum)",
         [](Comm& c, bool odd, float* x) {
           return c.all_reduce(x, odd ? 11 : 10, DType::kF32, ReduceOp::kSum, "grads");
         }},
        {"all_reduce of 40 bytes (f32 sum)", "all_reduce of 40 bytes (f32 max)",
         [](Comm& c, bool odd, float* x) {
           return c.all_reduce(x, 10, DType::kF32, odd ? ReduceOp::kMax : ReduceOp::kSum, "grads");
         },
         true},
        {"reduce_scatter of 80 bytes (f32 sum)", "all_gather of 40 bytes",
         [](Comm& c, bool odd, float* x) {
           if (odd) return c.all_gather(x, x + 20, 40, "grads");
           return c.reduce_scatter(x, x + 20, 10, DType::kF32, ReduceOp::kSum, "grads");
         }},
        {"broadcast of 40 bytes from root 0", "broadcast of 40 bytes from root 1",
         [](Comm& c, bool odd, float* x) { return c.broadcast(x, 40, odd ? 1 : 0, "grads"); }},
    };
    for (const Fabric& fabric : fabrics()) {
      for (const Disagreement& d : cases) {
        if (d.moves_alike && !fabric.compares) continue;
        const WorldSpec spec{.size = 2, .deadline_ms = fabric.compares ? 20000 : 300};
        const auto results = fabric.run(spec, [&](Engine& engine) -> std::string {
          EXPECT_SET(auto comm, engine.group("dp", {0, 1}));
          std::vector<float> data(64, 1.0f);
          const Status status = d.call(*comm, engine.world_rank() == 1, data.data());
          EXPECT(!status.ok());
          return status.error().message;
        });
        CAPTURE(fabric.name);
        CAPTURE(results[0]);
        // Whoever sees it first gives up, and the other may hear of that before it sees it.
        const auto says = [&](const std::string& text) { return results[0].find(text) != std::string::npos; };
        if (!fabric.compares) {
          CHECK(says("(grads): "));
          CHECK((says("not done after 300 ms") || says("rank 1: ")));
          continue;
        }
        CHECK((says(fmt::format("rank 1 calls {}, this rank (rank 0) calls {}", d.second, d.first)) ||
               says(fmt::format("rank 0 calls {}, this rank (rank 1) calls {}", d.first, d.second))));
      }
    }
  }

  TEST_CASE("a message of another size than expected is an error that names both") {
    for (const Fabric& fabric : fabrics()) {
      const WorldSpec spec{.size = 2, .deadline_ms = fabric.compares ? 20000 : 300};
      const auto results = fabric.run(spec, [&](Engine& engine) -> std::string {
        EXPECT_SET(auto comm, engine.group("pp", {0, 1}));
        std::vector<char> data(64);
        if (engine.world_rank() == 0) {
          EXPECT_OK(comm->isend(data.data(), 64, 1, "act 3"));
          ignore(comm->wait_sends("act 3"), "the receiver gives up");
          return "";
        }
        const Status status = comm->recv(data.data(), 32, 0, "act 4");
        EXPECT(!status.ok());
        EXPECT((!fabric.compares || status.error().code == ErrorCode::kInternal));
        return status.error().message;
      });
      CAPTURE(fabric.name);
      if (!fabric.compares) {
        CHECK(results[1].find("pp[0,1].recv(act 4): ") != std::string::npos);
        continue;
      }
      CHECK(
          results[1] ==
          "pp[0,1].recv(act 4): rank 0 sent 64 bytes as message 0 ('act 3'), this rank expects 32 bytes as message 0");
    }
  }

  TEST_CASE("over TCP: a killed rank, busy or idle, is a lost peer to every survivor, who can say which rank") {
    for (const bool idle : {false, true}) {
      for (const int64_t n : {2, 4}) {
        CAPTURE(idle);
        CAPTURE(n);
        const Shared<double> killed;
        const auto results = run_gloo({.size = n}, [&](Engine& engine) -> std::string {
          EXPECT_SET(auto comm, engine.group("dp", all_ranks(n)));
          std::vector<float> data(20000, 1.0f);
          for (int64_t i = 0;; ++i) {
            if (engine.world_rank() == 1 && i == 20) {
              *killed = now_ms();
              ::raise(SIGKILL);
            }
            if (idle && i == 20) std::this_thread::sleep_for(std::chrono::milliseconds(50));
            const Status status = comm->all_reduce(data.data(), 20000, DType::kF32, ReduceOp::kMax, "gradients");
            if (!status.ok()) {
              EXPECT(comm->barrier("after").error().code == ErrorCode::kPeerLost);
              return report(status);
            }
          }
        });
        for (int64_t r = 0; r < n; ++r) {
          const std::string& text = results[static_cast<size_t>(r)];
          CAPTURE(text);
          if (r == 1) {
            CHECK(text == "signal 9");
            continue;
          }
          const Report got = parse(text);
          CHECK(got.code == "peer lost");
          CHECK(got.at_ms - *killed < kSoonMs + (idle ? 50 : 0));
          CHECK(got.message.starts_with("dp["));
          CHECK(got.message.find("rank 1 (") != std::string::npos);
        }
      }
    }
  }

  TEST_CASE("over TCP: a stopped rank is a timeout at the deadline") {
    constexpr int64_t kDeadlineMs = 400;
    const TempDir dir;
    const WorldSpec spec{.size = 2, .deadline_ms = kDeadlineMs};
    Processes ranks(
        2, [&](int64_t r) { return make_loopback_engine(spec, dir, r); },
        [](Engine& engine) -> std::string {
          EXPECT_SET(auto comm, engine.group("tp", {0, 1}));
          EXPECT_OK(comm->barrier("start"));
          if (engine.world_rank() == 1) {
            ::raise(SIGSTOP);
            return "";
          }
          const double start_ms = now_ms();
          float x = 0;
          const Status status = comm->all_reduce(&x, 1, DType::kF32, ReduceOp::kSum, "attn.out");
          EXPECT(now_ms() - start_ms >= kDeadlineMs);
          EXPECT(now_ms() - start_ms < kDeadlineMs + 300);
          return report(status);
        });
    const Report got = parse(ranks.join(0));
    CAPTURE(got.message);
    CHECK(got.code == "timeout");
    CHECK(got.message.starts_with("tp[0,1].all_reduce(attn.out): rank 1 ("));
    CHECK(got.message.ends_with("did not answer within 400 ms"));
  }

  TEST_CASE("over TCP: a rank that never starts is a timeout, and a rendezvous is good for one start") {
    const TempDir dir;
    const WorldSpec spec{.size = 2, .deadline_ms = 60};
    auto engine = make_loopback_engine(spec, dir, 0).value();
    CHECK(make_loopback_engine(spec, dir, 0).error().message.find("rank 0 has started before (") != std::string::npos);
    const auto comm = engine->group("tp", {0, 1});
    REQUIRE_FALSE(comm.ok());
    CHECK(comm.error().code == ErrorCode::kTimeout);
    CHECK(comm.error().message == "tp[0,1].group(connect): rank 1 did not connect within 60 ms");
  }

  TEST_CASE("over TCP: an address that is not this host's, or no rendezvous, is refused") {
    const TempDir dir;
    const auto address = make_gloo_engine({.rank = 0,
                                           .world_size = 1,
                                           .interface_address = "192.0.2.1",  // RFC 5737: nobody's
                                           .rendezvous = open_file_rendezvous(dir.path).value()});
    REQUIRE_FALSE(address.ok());
    CHECK(address.error().code == ErrorCode::kInvalidInput);
    CHECK(address.error().message.starts_with("interface address '192.0.2.1' is none of this host's, which has "));
    CHECK(address.error().message.find("127.0.0.1") != std::string::npos);
    const auto alone = make_gloo_engine({.rank = 0, .world_size = 1, .interface_address = "127.0.0.1"});
    REQUIRE_FALSE(alone.ok());
    CHECK(alone.error().code == ErrorCode::kInvalidInput);
  }

  TEST_CASE("over TCP: a rank that publishes where it is and does not connect is a timeout at the deadline") {
    // Of two addresses the higher one connects, so rank 0 listens. Gloo would wait for five times the deadline.
    constexpr int64_t kDeadlineMs = 400;
    const TempDir dir;
    const WorldSpec spec{.size = 2, .deadline_ms = kDeadlineMs};
    struct Deaf final : Rendezvous {  // hears of nobody
      explicit Deaf(std::shared_ptr<Rendezvous> r) : inner(std::move(r)) {}
      Result<bool> publish(const std::string& key, const std::string& value, Time until) override {
        return inner->publish(key, value, until);
      }
      Result<std::optional<std::string>> await(const std::string&, Time until) override {
        return inner->await("nothing", until);
      }
      std::chrono::milliseconds lag() const override { return inner->lag(); }
      void close() override { inner->close(); }
      const std::shared_ptr<Rendezvous> inner;
    };
    Processes ranks(
        2,
        [&](int64_t rank) {
          GlooConfig config = loopback_config(spec, dir, rank);
          if (rank == 1) {
            config.interface_address = "127.0.0.2";
            config.rendezvous = std::make_shared<Deaf>(config.rendezvous);
            config.options.deadline_ms = 10 * kDeadlineMs;
          }
          return make_gloo_engine(config);
        },
        [](Engine& engine) -> std::string {
          const double start_ms = now_ms();
          const auto comm = engine.group("tp", {0, 1});
          EXPECT(!comm.ok());
          if (engine.world_rank() == 1) return "";
          EXPECT(now_ms() - start_ms >= kDeadlineMs);
          EXPECT(now_ms() - start_ms < kDeadlineMs + 300);
          return report(comm.error());
        });
    const Report got = parse(ranks.join(0));
    CAPTURE(got.message);
    CHECK(got.code == "timeout");
    CHECK(got.message.starts_with("tp[0,1].group(connect): rank 1 ("));
    CHECK(got.message.ends_with("did not connect within 400 ms"));
  }

  TEST_CASE("over TCP: an address at which nobody listens ends the connecting of all members at once") {
    const TempDir dir;
    const WorldSpec spec{.size = 2};
    struct Elsewhere final : Rendezvous {  // says another port
      explicit Elsewhere(std::shared_ptr<Rendezvous> r) : inner(std::move(r)) {}
      Result<bool> publish(const std::string& key, const std::string& value, Time until) override {
        std::string changed = value;
        const size_t line = value.find('\n');
        if (line != std::string::npos) changed[line + 4] = changed[line + 3] = 0;  // sockaddr_in: port 0
        return inner->publish(key, changed, until);
      }
      Result<std::optional<std::string>> await(const std::string& key, Time until) override {
        return inner->await(key, until);
      }
      std::chrono::milliseconds lag() const override { return inner->lag(); }
      void close() override { inner->close(); }
      const std::shared_ptr<Rendezvous> inner;
    };
    Processes ranks(
        2,
        [&](int64_t rank) {
          GlooConfig config = loopback_config(spec, dir, rank);
          if (rank == 1) {
            config.interface_address = "127.0.0.2";  // the higher one: it connects
          } else {
            config.rendezvous = std::make_shared<Elsewhere>(config.rendezvous);
          }
          return make_gloo_engine(config);
        },
        [](Engine& engine) -> std::string {
          const double start_ms = now_ms();
          const auto comm = engine.group("tp", {0, 1});
          EXPECT(!comm.ok());
          EXPECT(now_ms() - start_ms < 3000);
          return report(comm.error());
        });
    for (const int64_t rank : {0, 1}) {
      const Report got = parse(ranks.join(rank));
      CAPTURE(got.message);
      CHECK(got.code == "peer lost");
      CHECK(got.message.find("tp[0,1].group(connect): cannot connect to rank 0 (") != std::string::npos);
    }
  }

  TEST_CASE("over TCP: abort wakes every rank, with the reason") {
    const Shared<std::atomic<int64_t>> out;
    const auto results = run_gloo({.size = 3}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto all, engine.group("dp", all_ranks(3)));
      EXPECT_OK(all->barrier("start"));
      meet(out, 3);
      const double start_ms = now_ms();
      std::thread watcher;
      if (engine.world_rank() == 0) {
        watcher = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          engine.abort("out of time");
        });
      }
      float x = 0;
      const Status status = all->recv(&x, 4, (all->rank() + 1) % 3, "never sent");
      if (watcher.joinable()) watcher.join();
      EXPECT(now_ms() - start_ms < 20 + kSoonMs);
      EXPECT((!status.ok() && status.error().code == ErrorCode::kStopped));
      EXPECT(status.error().message.ends_with("rank 0: out of time"));
      EXPECT(all->barrier("after").error().code == ErrorCode::kStopped);
      return "";
    });
    CHECK(results == std::vector<std::string>{"", "", ""});
  }

  TEST_CASE("over TCP: abort reaches ranks that wait for each other and not for who gave up") {
    const Shared<std::atomic<int64_t>> out;
    const auto results = run_gloo({.size = 3}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto all, engine.group("dp", all_ranks(3)));
      std::unique_ptr<Comm> pair;
      if (engine.world_rank() != 0) {
        EXPECT_SET(pair, engine.group("pp", {1, 2}));
      }
      EXPECT_OK(all->barrier("start"));
      meet(out, 3);
      if (engine.world_rank() == 0) {
        engine.abort("out of time");
        return "";
      }
      const double start_ms = now_ms();
      float x = 0;
      const Status status = pair->recv(&x, 4, 1 - pair->rank(), "never sent");
      EXPECT(now_ms() - start_ms < 1000);
      EXPECT((!status.ok() && status.error().code == ErrorCode::kStopped));
      return "";
    });
    for (const std::string& text : results) CHECK(text == "");
  }

  TEST_CASE("over TCP: abort ends the connecting of a group whose other member does not come") {
    const Shared<std::atomic<int64_t>> out;
    const auto results = run_gloo({.size = 3}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto all, engine.group("dp", all_ranks(3)));
      EXPECT_OK(all->barrier("start"));
      meet(out, 3);
      if (engine.world_rank() == 2) return "";
      if (engine.world_rank() == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        engine.abort("out of time");
        return "";
      }
      const double start_ms = now_ms();
      const auto pair = engine.group("pp", {1, 2});
      EXPECT(now_ms() - start_ms < 3000);
      return report(pair.ok() ? Status() : Status(pair.error()));
    });
    CHECK(results[0] == "");
    CHECK(parse(results[1]).code == "stopped");
    CHECK(parse(results[1]).message == "pp[1,2].group(connect): rank 0: out of time");
    CHECK(results[2] == "");
  }

  TEST_CASE("across hosts: a rank killed on one host ends all waits on the other, through memory and network") {
    // Ranks 0 1 | 2 3. Rank 3 dies; 2 waits for it in memory, 0 for 2 over the network, 1 for 0 in memory.
    const Shared<double> killed;
    const Shared<std::atomic<int64_t>> out;
    const auto results = run_on_hosts({.size = 4}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto all, engine.group("world", all_ranks(4)));
      const int64_t rank = engine.world_rank(), line = rank / 2 * 2, column = rank % 2;
      EXPECT_SET(auto tp, engine.group("tp", {line, line + 1}));
      EXPECT_SET(auto pp, engine.group("pp", {column, column + 2}));
      EXPECT_OK(all->barrier("start"));
      meet(out, 4);
      float x = 0;
      if (rank == 3) {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        *killed = now_ms();
        ::raise(SIGKILL);
      }
      if (rank == 0) return report(pp->recv(&x, 4, 1, "activations"));
      return report(tp->all_reduce(&x, 1, DType::kF32, ReduceOp::kSum, "attn.out"));
    });
    CHECK(results[3] == "signal 9");
    for (const size_t r : {0, 1, 2}) {
      CAPTURE(results[r]);
      const Report got = parse(results[r]);
      CHECK(got.code == "peer lost");
      CHECK(got.at_ms - *killed < kSoonMs);
      CHECK(got.message.find("rank 3 (pid ") != std::string::npos);
    }
    CHECK(parse(results[2]).message.starts_with("tp[2,3].all_reduce(attn.out): rank 3 (pid "));
  }

  TEST_CASE("across hosts: abort wakes every rank") {
    const Shared<std::atomic<int64_t>> out;
    const auto results = run_on_hosts({.size = 4}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto all, engine.group("world", all_ranks(4)));
      const int64_t line = engine.world_rank() / 2 * 2;
      EXPECT_SET(auto tp, engine.group("tp", {line, line + 1}));
      EXPECT_OK(all->barrier("start"));
      meet(out, 4);
      if (engine.world_rank() == 0) engine.abort("out of time");
      float x = 0;
      const double start_ms = now_ms();
      const Status status = tp->recv(&x, 4, 1 - tp->rank(), "never sent");
      EXPECT(now_ms() - start_ms < 1000);
      return status.ok() ? "ok" : std::string(error_code_name(status.error().code));
    });
    for (const std::string& text : results) CHECK(text == "stopped");
  }
}
