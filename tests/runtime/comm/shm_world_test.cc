#include "runtime/comm/shm_world.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>

#include "runtime/comm/lane.h"
#include "tests/runtime/comm/fabric.h"

using namespace cairn;
using namespace cairn::comm;
using namespace cairn::comm::testing;

TEST_SUITE("runtime/comm/shm_world") {
  TEST_CASE("the bytes that groups and channels take are the bytes predicted") {
    const ShmWorldConfig config = {.world_size = 4, .channel_bytes = 5000, .staging_bytes = 10000};
    const auto world = ShmWorld::create(config).value();
    CHECK(world.bytes() == shm_world_bytes(config).value());
    CHECK(world.used_bytes() == 0);
    {
      Processes ranks(
          4, [&](int64_t r) { return attach_shm_engine(world.fd(), r, {}); },
          [](Engine& engine) -> std::string {
            EXPECT_SET(auto all, engine.group("dp", all_ranks(4)));
            const int64_t pair = engine.world_rank() / 2 * 2;
            EXPECT_SET(auto tp, engine.group("tp", {pair, pair + 1}));
            EXPECT_SET(auto alone, engine.group("pp", {engine.world_rank()}));
            const int64_t x = 1;
            if (engine.world_rank() == 0) EXPECT_OK(all->isend(&x, 8, 3, "x"));
            return "";
          });
      for (int64_t r = 0; r < 4; ++r) CHECK(ranks.join(r) == "");
    }
    CHECK(world.used_bytes() ==
          shm_group_bytes(config, 4) + 2 * shm_group_bytes(config, 2) + shm_channel_bytes(config));
  }

  TEST_CASE("the room asked for is there: every group and channel that the configuration allows fits") {
    const ShmWorldConfig config = {
        .world_size = 4, .channel_bytes = 300, .staging_bytes = 1000, .groups_per_rank = 3, .channels_per_rank = 2};
    const auto world = ShmWorld::create(config).value();
    std::vector<std::unique_ptr<Engine>> engines;
    for (int64_t r = 0; r < 4; ++r) engines.push_back(attach_shm_engine(world.fd(), r, {.deadline_ms = 50}).value());
    std::vector<std::unique_ptr<Comm>> comms;
    for (const int64_t r : {0, 2}) {
      for (int64_t i = 0; i < 3; ++i) comms.push_back(engines[static_cast<size_t>(r)]->group("tp", {r, r + 1}).value());
    }
    const char x = 0;
    for (size_t i = 0; i < 6; ++i) CHECK(comms[i]->isend(&x, 1, 1, "x").ok());
    for (size_t i = 0; i < 2; ++i) CHECK(comms[i]->isend(&x, 1, 0, "x").ok());
    const Status full = comms[2]->isend(&x, 1, 0, "x");
    REQUIRE_FALSE(full.ok());
    CHECK(full.error().message ==
          "communication segment has room for 8 point-to-point channels, this is one more; raise channels_per_rank of "
          "the world");
  }

  TEST_CASE("a world or a descriptor that cannot be is refused") {
    CHECK(ShmWorld::create({.world_size = 0}).error().message ==
          "shared-memory world: world_size must be 1 to 1048576, got 0");
    CHECK(ShmWorld::create({.world_size = 100, .staging_bytes = 4096}).error().code == ErrorCode::kInvalidInput);
    const auto world = ShmWorld::create({.world_size = 2}).value();
    CHECK(attach_shm_engine(world.fd(), 2, {}).error().message == "rank must be 0 to 1, got 2");
    const auto first = attach_shm_engine(world.fd(), 0, {}).value();
    CHECK(attach_shm_engine(world.fd(), 0, {}).error().message == fmt::format("rank 0 is taken by pid {}", ::getpid()));
    CHECK_FALSE(attach_shm_engine(-1, 0, {}).ok());
    const Fd other(::memfd_create("other", MFD_CLOEXEC));
    CHECK(attach_shm_engine(other.get(), 0, {}).error().message ==
          fmt::format("descriptor {} holds 0 bytes: not a communication segment", other.get()));
    REQUIRE(::ftruncate(other.get(), 1 << 16) == 0);
    CHECK(attach_shm_engine(other.get(), 0, {}).error().code == ErrorCode::kInvalidInput);
  }

  TEST_CASE("the owner sees what each rank does") {
    const auto world = ShmWorld::create({.world_size = 2}).value();
    CHECK(world.ranks()[1].pid == 0);
    CHECK(world.ranks()[1].description == "not started yet");
    auto engine = attach_shm_engine(world.fd(), 0, {.deadline_ms = 30}).value();
    auto comm = engine->group("tp", {0, 1}).value();
    CHECK_FALSE(comm->barrier("start").ok());
    const RankView view = world.ranks()[0];
    CHECK(view.pid == ::getpid());
    CHECK_FALSE(view.inside);
    CHECK(view.operations == 1);
    CHECK(view.description.starts_with("outside of any operation, after tp[0,1].barrier(start), entered "));
    CHECK(view.step == -1);
    CHECK(view.awaits == -1);  // the wait is over
    engine->at(7, "forward and backward");
    CHECK(world.ranks()[0].step == 7);
    CHECK(world.ranks()[0].phase == "forward and backward");
    CHECK(world.ranks()[0].description.ends_with(" ms ago, at step 7 (forward and backward)"));
    engine->at(8, "a phase whose name is far longer than the room for it");
    CHECK(world.ranks()[0].phase == "a phase whose name is far longe");
    engine.reset();
    CHECK(world.ranks()[0].closed);
  }

  TEST_CASE("the owner sees whom a rank waits for while it waits") {
    const auto world = ShmWorld::create({.world_size = 3}).value();
    auto engine = attach_shm_engine(world.fd(), 1, {.deadline_ms = 60'000}).value();
    auto comm = engine->group("tp", {1, 2}).value();
    std::thread waits([&] { CHECK_FALSE(comm->barrier("start").ok()); });
    RankView view;
    while ((view = world.ranks()[1]).awaits < 0) std::this_thread::yield();
    CHECK(view.inside);
    CHECK(view.awaits == 2);
    engine->abort("seen");
    waits.join();
    CHECK(world.ranks()[1].awaits == -1);
  }

  TEST_CASE("operations of the thread beside a rank's own are seen apart from its own") {
    const auto world = ShmWorld::create({.world_size = 3}).value();
    auto engine = attach_shm_engine(world.fd(), 1, {.deadline_ms = 60'000}).value();
    auto own = engine->group("tp", {0, 1}).value();
    auto other = engine->group("dp", {1, 2}).value();
    std::thread waits([&] { CHECK_FALSE(own->barrier("activations").ok()); });
    const std::unique_ptr<Stream> compute = make_cpu_stream();
    Lane lane(*compute, true);
    lane.submit([&] { return other->barrier("gradients"); });
    RankView view;
    while ((view = world.ranks()[1]).awaits < 0 || view.beside.awaits < 0) std::this_thread::yield();
    CHECK(view.inside);
    CHECK(view.awaits == 0);
    CHECK(view.beside.inside);
    CHECK(view.beside.awaits == 2);
    CHECK(view.text.starts_with("in tp[0,1].barrier(activations), entered "));
    CHECK(view.beside.text.starts_with("in dp[1,2].barrier(gradients), entered "));
    CHECK(view.description == view.text + "; beside it " + view.beside.text);
    engine->abort("seen");
    CHECK_FALSE(lane.wait_all().ok());
    waits.join();
    view = world.ranks()[1];
    CHECK(view.finished_operations() == 2);
    CHECK_FALSE(view.beside.inside);
  }
}
