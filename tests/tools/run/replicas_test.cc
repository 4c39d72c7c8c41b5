// Copies of banks between the agents of two hosts, and to a third that takes a place, in one process.
#include "tools/run/hosts/replicas.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <future>
#include <memory>
#include <thread>

#include "ckpt/position.h"
#include "ckpt/run_memory.h"
#include "ckpt/snapshot/snapshot.h"
#include "runtime/cluster/join.h"
#include "tests/tools/run/run_fixture.h"

using namespace cairn;
using namespace cairn::tools;
using cairn::tools::testing::small_plan;

namespace {

constexpr int64_t kHosts = 2, kRanks = 2;

Plan plan_with_copies() {
  Plan out = small_plan(kHosts * kRanks);
  out.recipe.checkpoint.replicate_steps = 1;
  return out;
}

struct Told {
  int64_t step = 0, bytes = 0;
  std::string why;
};

/// ZeRO 0: every rank keeps all state.
Plan plan_with_free_copies() {
  Plan plan = plan_with_copies();
  Recipe recipe = plan.recipe;
  recipe.optimizer.zero = 0;
  return make_plan(recipe, kHosts * kRanks).value();
}

class Host {
 public:
  Host(const Plan& plan, int64_t place, const std::string& token = "secret") : plan_(plan), place_(place) {
    const ckpt::RunText run{.run_name = "run", .run_id = "run-1", .recipe_json = "{}", .recipe_hash = "hash"};
    auto spec = ckpt::arena_spec(plan, run, ckpt::RankRange{place * kRanks, (place + 1) * kRanks});
    REQUIRE_OK(spec);
    spec.value().backing = ckpt::ArenaBacking::kMemfd;
    auto made = ckpt::Arena::create(spec.value());
    REQUIRE_OK(made);
    arena_.emplace(std::move(made).value());
    attach(place, token);
  }
  ~Host() { replicas.detach(); }

  void attach(int64_t place, const std::string& token = "secret") {
    REQUIRE_OK(
        replicas.attach({.plan = plan_,
                         .run = {.run_name = "run", .run_id = "run-1", .recipe_json = "{}", .recipe_hash = "hash"},
                         .arena = *arena_,
                         .place = place,
                         .hosts = kHosts,
                         .token = token,
                         .sent = [this](int64_t step, int64_t bytes, const std::string& why) {
                           const std::lock_guard lock(mutex_);
                           told_.push_back({step, bytes, why});
                           changed_.notify_all();
                         }}));
  }

  ckpt::Arena& arena() { return *arena_; }
  PeerAddress address() const { return {"127.0.0.1", replicas.held().port}; }

  /// All ranks have published this step in the slot.
  void put(int64_t slot, int64_t step) {
    for (int64_t rank = arena_->ranks().first; rank < arena_->ranks().end; ++rank) {
      const std::span<std::byte> payload = arena_->payload(rank, slot);
      for (size_t at = 0; at + 4 <= payload.size(); at += 4) {
        const auto value = static_cast<float>(step * 1000 + rank) + static_cast<float>(at % 64);
        std::memcpy(payload.data() + at, &value, 4);
      }
      const std::string position = ckpt::encode_position({.step = step, .samples = step * 8}, ckpt::kPositionCapacity);
      REQUIRE_OK(ckpt::SnapshotWriter(*arena_, rank).seal(slot, 7, step, position));
    }
  }
  void mark(int64_t slot, int64_t step) { arena_->control().replica[slot] = step; }
  int64_t mark_of(int64_t slot) const { return arena_->control().replica[slot]; }

  /// What it says of its next copy.
  Told copied() {
    std::unique_lock lock(mutex_);
    REQUIRE(changed_.wait_for(lock, std::chrono::seconds(20), [&] { return !told_.empty(); }));
    Told out = told_.front();
    told_.erase(told_.begin());
    return out;
  }
  int64_t bank_bytes() const {
    int64_t out = 0;
    for (int64_t rank = arena_->ranks().first; rank < arena_->ranks().end; ++rank)
      out += std::ssize(arena_->payload(rank, 0));
    return out;
  }

  Replicas replicas{{}};

 private:
  const Plan& plan_;
  int64_t place_;
  std::optional<ckpt::Arena> arena_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Told> told_;
};

struct Pair {
  Plan plan = plan_with_copies();
  Host a{plan, 0}, b{plan, 1};
  Pair() {
    a.replicas.begin(3, b.address(), {});
    b.replicas.begin(3, a.address(), {});
  }
};

bool same_bytes(const ckpt::Arena& x, int64_t slot_x, const ckpt::Arena& y, int64_t slot_y, int64_t rank) {
  const auto p = x.payload(rank, slot_x), q = y.payload(rank, slot_y);
  return p.size() == q.size() && std::memcmp(p.data(), q.data(), p.size()) == 0;
}

Status give(Host& from, const ckpt::WholeSlot& slot, const PeerAddress& to) {
  std::promise<Status> done;
  from.replicas.give(slot, to, [&](const Status& given) { done.set_value(given); });
  return done.get_future().get();
}

}  // namespace

TEST_CASE("each host's buddy is half the way round, and each holds for one") {
  for (int64_t hosts = 2; hosts < 9; ++hosts) {
    for (int64_t place = 0; place < hosts; ++place) {
      CHECK(buddy_of(place, hosts) != place);
      CHECK(ward_of(buddy_of(place, hosts), hosts) == place);
    }
  }
  CHECK(buddy_of(1, 4) == 3);
}

TEST_CASE("a marked bank is copied to the buddy with as many bytes as it has, both ways at once") {
  Pair hosts;
  for (int64_t step = 1; step <= 6; ++step) {
    const int64_t slot = step % 4;
    for (Host* host : {&hosts.a, &hosts.b}) {
      host->put(slot, step);
      host->mark(slot, step);
    }
    for (Host* host : {&hosts.a, &hosts.b}) {
      const Told told = host->copied();
      CHECK(told.why.empty());
      CHECK(told.step == step);
      CHECK(told.bytes == host->bank_bytes());
      host->replicas.agreed(step);
    }
    for (Host* host : {&hosts.a, &hosts.b}) {
      CHECK(host->mark_of(slot) == -step);
      if (step > 1) CHECK(host->mark_of((step - 1) % 4) == 0);
      const Held held = host->replicas.held();
      CHECK(held.place == (host == &hosts.a ? 1 : 0));
      CHECK(std::ranges::count(held.whole, ckpt::WholeSlot{slot, 7, step}) == 1);
      if (step > 1) CHECK(std::ranges::count(held.whole, ckpt::WholeSlot{(step - 1) % 4, 7, step - 1}) == 1);
    }
  }
  CHECK(ckpt::banks_of(hosts.plan.recipe.checkpoint, true) == 5);
  CHECK(ckpt::banks_of(hosts.plan.recipe.checkpoint, false) == 3);
}

TEST_CASE("idle connections of strangers to the holder's port cost no copy") {
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit small{128, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &small) == 0);  // so that few connections fill the pool of guests
  Pair hosts;
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  std::vector<cluster::Connection> strangers;
  for (int k = 0; k < 60; ++k) {
    for (Host* host : {&hosts.a, &hosts.b}) {
      auto made = cluster::Connection::connect("127.0.0.1", host->address().port, cluster::steady_after(5));
      REQUIRE_OK(made);
      strangers.push_back(std::move(made).value());
    }
  }
  for (int64_t step = 1; step <= 3; ++step) {
    for (Host* host : {&hosts.a, &hosts.b}) {
      host->put(step % 4, step);
      host->mark(step % 4, step);
    }
    for (Host* host : {&hosts.a, &hosts.b}) CHECK(host->copied().why.empty());
  }
}

TEST_CASE("an answer without a proof of the token is tried again, whatever it is, and reported in printable words") {
  const Plan plan = plan_with_copies();
  Host a(plan, 0);
  auto opened = cluster::Listener::open(0, 0);
  REQUIRE_OK(opened);
  cluster::Listener listener = std::move(opened).value();
  a.replicas.begin(3, {"127.0.0.1", listener.port()}, {});
  a.put(0, 1);
  a.mark(0, 1);
  auto waits = std::async(std::launch::async, [&] { return a.copied(); });
  int64_t tries = 0;
  while (waits.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    std::optional<cluster::Connection> sender = listener.accept().value();
    if (!sender) continue;
    switch (tries++) {
      case 0:
        REQUIRE(::send(sender->fd(), "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL) == 18);
        break;
      case 1:
        REQUIRE(sender->send({hosts::Challenge{"n", "t"}}).ok());
        break;
      case 2:
        REQUIRE(sender->send({hosts::KeepsCopies{"n"}}).ok());
        REQUIRE(sender->send({hosts::TakesCopies{"p"}}).ok());
        break;
      case 3:
        REQUIRE(sender->send({hosts::KeepsCopies{"n"}}).ok());
        REQUIRE(sender->send({hosts::WholeBank{}}).ok());
        break;
      default:
        REQUIRE(sender->send({hosts::KeepsCopies{"n"}}).ok());
        REQUIRE(sender->send({hosts::Refused{"no\x1b[2J"}}).ok());
    }
  }
  const Told told = waits.get();
  CHECK(tries > 5);
  CHECK(told.why.find("refused by 127.0.0.1") != std::string::npos);
  CHECK(told.why.find('\x1b') == std::string::npos);
}

TEST_CASE("a copy whose bytes are damaged is refused, and the one before stays") {
  Pair hosts;
  hosts.a.put(0, 1);
  hosts.a.mark(0, 1);
  REQUIRE(hosts.a.copied().why.empty());
  hosts.a.replicas.agreed(1);
  hosts.a.put(1, 2);
  hosts.a.arena().payload(1, 1)[40] ^= std::byte{1};  // behind its sums
  hosts.a.mark(1, 2);
  const Told told = hosts.a.copied();
  CHECK(told.step == 2);
  CHECK(told.why.find("refused") != std::string::npos);
  hosts.a.replicas.dropped(2);
  CHECK(hosts.a.mark_of(1) == 0);
  CHECK(hosts.a.mark_of(0) == -1);
  CHECK(hosts.b.replicas.held().whole == std::vector<ckpt::WholeSlot>{{0, 7, 1}});
  // And the next one is taken, over a connection of its own.
  hosts.a.put(2, 3);
  hosts.a.mark(2, 3);
  CHECK(hosts.a.copied().why.empty());
}

TEST_CASE("the host that takes a place gets its bank from the holder, into the slot that the others have it in") {
  Pair hosts;
  hosts.a.put(3, 5);
  hosts.a.mark(3, 5);
  REQUIRE(hosts.a.copied().why.empty());
  hosts.b.replicas.halt();
  Host spare(hosts.plan, 0);
  CHECK_FALSE(give(hosts.b, {3, 7, 6}, spare.address()).ok());  // it never had that
  REQUIRE_OK(give(hosts.b, {3, 7, 5}, spare.address()));
  const auto got = ckpt::read_common(spare.arena(), 3, ckpt::Check::kEveryByte);
  REQUIRE_OK(got);
  CHECK(got.value().incarnation == 7);
  CHECK(got.value().step == 5);
  CHECK(ckpt::decode_position(got.value().position).value().samples == 40);
  for (const int64_t rank : {0, 1}) CHECK(same_bytes(hosts.a.arena(), 3, spare.arena(), 3, rank));
  // Memory that ranks use is nobody else's to fill.
  spare.replicas.begin(4, hosts.b.address(), {});
  CHECK(give(hosts.b, {3, 7, 5}, spare.address()).error().message.find("ranks run there") != std::string::npos);
}

TEST_CASE("what is held is there for the next leader's segment, and not for another place's") {
  Pair hosts;
  hosts.a.put(0, 4);
  hosts.a.mark(0, 4);
  REQUIRE(hosts.a.copied().why.empty());
  hosts.b.replicas.detach();
  hosts.b.attach(1);
  CHECK(hosts.b.replicas.held().whole == std::vector<ckpt::WholeSlot>{{0, 7, 4}});
  hosts.b.replicas.detach();
  hosts.b.attach(0);
  CHECK(hosts.b.replicas.held().whole.empty());
}

TEST_CASE("a run that goes back keeps the copy that it goes on from, when the next one comes") {
  Pair hosts;
  for (const int64_t step : {4, 5}) {
    hosts.a.put(step % 4, step);
    hosts.a.mark(step % 4, step);
    REQUIRE(hosts.a.copied().why.empty());
    if (step == 4) hosts.a.replicas.agreed(step);
  }
  hosts.a.replicas.halt();
  hosts.b.replicas.halt();
  const ckpt::WholeSlot from{0, 7, 4};  // not all hosts had 5
  hosts.a.replicas.begin(3, hosts.b.address(), from);
  hosts.b.replicas.begin(3, hosts.a.address(), from);
  CHECK(hosts.b.replicas.held().whole == std::vector<ckpt::WholeSlot>{from});
  hosts.a.put(1, 5);
  hosts.a.arena().payload(1, 1)[40] ^= std::byte{1};
  hosts.a.mark(1, 5);
  CHECK_FALSE(hosts.a.copied().why.empty());
  CHECK(hosts.b.replicas.held().whole == std::vector<ckpt::WholeSlot>{from});
}

TEST_CASE("copies of another epoch, of another run and for nobody's place are refused") {
  const Plan plan = plan_with_copies();
  Host a(plan, 0), b(plan, 1), stranger(plan, 0, "another secret"), third(plan, 1);
  b.replicas.begin(3, a.address(), {});
  const auto why = [&](Host& from, int64_t epoch) {
    from.replicas.begin(epoch, b.address(), {});
    from.put(0, epoch);
    from.mark(0, epoch);
    return from.copied().why;
  };
  CHECK(why(a, 2).find("epoch 2, it is 3 there") != std::string::npos);
  CHECK(why(stranger, 3).find("token") != std::string::npos);
  CHECK(why(third, 3).find("place 1 is none") != std::string::npos);
  CHECK(b.replicas.held().whole.empty());
  CHECK(why(a, 3).empty());
  // Whoever is stopped sends nothing, and its marks are gone but for what all have.
  a.replicas.agreed(3);
  a.put(1, 9);
  a.replicas.halt();
  a.mark(1, 9);
  a.replicas.halt();
  CHECK(a.mark_of(1) == 0);
  CHECK(a.mark_of(0) == -3);
  a.replicas.begin(3, b.address(), ckpt::WholeSlot{1, 7, 9});
  CHECK(a.mark_of(0) == 0);
  CHECK(a.mark_of(1) == -9);
}

TEST_CASE("where copies are free nothing is sent, and what ranks have put there is given away as a copy is") {
  const Plan plan = plan_with_free_copies();
  Host a(plan, 0), b(plan, 1);
  CHECK(a.arena().slots() == 3);  // no banks for what is sent
  a.replicas.begin(3, b.address(), {});
  b.replicas.begin(3, a.address(), {});
  CHECK(b.replicas.are_free());
  const Result<Fd> memory = b.replicas.descriptor();
  REQUIRE_OK(memory);
  REQUIRE(memory.value());
  const auto attached = ckpt::Arena::attach_fd(memory.value().get());
  REQUIRE_OK(attached);
  const ckpt::Arena& ward = attached.value();
  CHECK(ward.ranks() == a.arena().ranks());
  CHECK(ward.slots() == a.arena().slots());
  CHECK(b.replicas.held().whole.empty());

  a.put(2, 5);  // and b's ranks what they keep of it
  for (const int64_t rank : {0, 1}) {
    std::ranges::copy(a.arena().payload(rank, 2), ward.payload(rank, 2).begin());
    const std::string position = ckpt::encode_position({.step = 5, .samples = 40}, ckpt::kPositionCapacity);
    REQUIRE_OK(ckpt::SnapshotWriter(ward, rank).seal(2, 7, 5, position));
  }
  CHECK(b.replicas.held().place == 0);
  CHECK(b.replicas.held().whole == std::vector<ckpt::WholeSlot>{{2, 7, 5}});
  b.replicas.halt();
  Host spare(plan, 0);
  REQUIRE_OK(give(b, {2, 7, 5}, spare.address()));
  const auto got = ckpt::read_common(spare.arena(), 2, ckpt::Check::kEveryByte);
  REQUIRE_OK(got);
  CHECK(got.value().step == 5);
  for (const int64_t rank : {0, 1}) CHECK(same_bytes(a.arena(), 2, spare.arena(), 2, rank));

  // A copy that comes all the same is refused: what is there is of ranks. And the run may go back behind it.
  b.replicas.begin(3, a.address(), ckpt::WholeSlot{1, 7, 4});
  CHECK(b.replicas.held().whole.empty());
  CHECK(b.mark_of(1) == 0);
}
