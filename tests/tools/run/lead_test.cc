// Who leads where leaders are lost: agents of three hosts, in one process.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "runtime/cluster/connection.h"
#include "runtime/cluster/epoch_store.h"
#include "runtime/cluster/lease.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"
#include "tools/run/fleet.h"
#include "tools/run/follower.h"

using namespace cairn;
using namespace cairn::tools;
using cairn::testing::TempDir;
namespace fs = std::filesystem;

namespace {

HostOptions host(int64_t index) {
  return {.placement = {.hosts = 3, .index = index, .names = {"h0", "h1", "h2"}, .leader = "127.0.0.1", .from = {}},
          .ranks = 1,
          .build = "test",
          .recipe_hash = "test",
          .beats = {.every_s = 0.1, .dead_after_s = 0.5}};
}

void nap(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

std::shared_ptr<cluster::EpochStore> store_of(const fs::path& run) {
  const auto store = cluster::open_store({}, run / "cluster");
  REQUIRE_OK(store);
  return store.value();
}

/// `leader` claims the epoch, and may be found at `port`.
cluster::Epoch claim(const fs::path& run, int64_t number, int64_t leader, int64_t port) {
  const cluster::Epoch epoch{
      .number = number,
      .leader = leader,
      .port = port,
      .incarnation = std::to_string(number),
      .members = {{"h0", "127.0.0.1", "a", 0}, {"h1", "127.0.0.1", "b", 1}, {"h2", "127.0.0.1", "c", 2}},
      .ranks_per_host = 1,
      .recipe_hash = "test",
      .build = "test",
      .reason = "start"};
  const Result<bool> made = store_of(run)->claim(epoch);
  REQUIRE_OK(made);
  REQUIRE(made.value());
  return epoch;
}

/// Claims epoch 1; with all hosts there it begins epoch 2.
class Leader {
 public:
  explicit Leader(const fs::path& run) {
    auto listener = cluster::Listener::open(24512, 25535);
    REQUIRE_OK(listener);
    cluster::Epoch epoch = claim(run, 1, 0, listener.value().port());
    auto fleet = Fleet::open(
        host(0), run,
        Lead{std::move(listener).value(), std::move(epoch), std::make_unique<cluster::Lease>(store_of(run))});
    REQUIRE_OK(fleet);
    fleet_ = std::move(fleet).value();
    fleet_->use({.say = [](const std::string&) {},
                 .stopped = [this] { return ends_.load(); },
                 .fail = {},
                 .put = {},
                 .event = {},
                 .stop = {},
                 .ask_save = {},
                 .own_memory = {},
                 .error = {},
                 .stacks = {}});
    gathered_ = std::async(std::launch::async, [this] { return fleet_->gather(); });
  }
  ~Leader() { ends_ = true; }
  bool has_gathered() { return gathered_.get().ok(); }

 private:
  std::atomic<bool> ends_ = false;
  std::unique_ptr<Fleet> fleet_;
  std::future<Status> gathered_;
};

class Member {
 public:
  Member(const fs::path& run, int64_t index) : follower_(host(index), run, [](const std::string&) {}) {
    done_ = std::async(std::launch::async, [this] {
      static_cast<void>(follower_.next_segment([this] { return ends_.load(); }));
      ended_ns_ = cluster::steady_ns();
    });
  }
  ~Member() { ends_ = true; }

  struct Claimed {
    int64_t epoch = 0, at_ns = 0;
  };
  /// What it claimed within `seconds`, if anything.
  std::optional<Claimed> claimed(double seconds) {
    if (done_.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready) return std::nullopt;
    const std::optional<Lead> lead = follower_.take_lead();
    return lead ? std::optional(Claimed{lead->epoch.number, ended_ns_}) : std::nullopt;
  }

 private:
  std::atomic<bool> ends_ = false;
  std::atomic<int64_t> ended_ns_ = 0;
  Follower follower_;
  std::future<void> done_;
};

}  // namespace

TEST_CASE("a leader that waits for one of many holds the lease while others are at its door") {
  const TempDir dir("lead");
  Leader leader(dir.path);
  Member h1(dir.path, 1);
  const auto store = store_of(dir.path);
  const double still_s = lease_still_s(host(0).beats, store.get());
  cluster::LeaseWatch lease(store);
  for (const int64_t until_ns = cluster::steady_after(2.5 * still_s); cluster::steady_ns() < until_ns;) {
    REQUIRE(lease.still_s() < still_s / 2);
    nap(0.1);
  }
}

TEST_CASE("who claims the lead is given time before the next one does, and a silent port costs none") {
  const TempDir dir("lead");
  auto leader = std::make_unique<Leader>(dir.path);
  Member h1(dir.path, 1), h2(dir.path, 2);
  REQUIRE(leader->has_gathered());
  const auto silent = cluster::Listener::open(24512, 25535);  // takes connections, and answers none: a frozen host
  REQUIRE_OK(silent);
  leader.reset();
  // Just before the others judge the one before: who has looked at that one may not follow this one.
  const double still_s = lease_still_s(host(0).beats, store_of(dir.path).get());
  nap(still_s - 0.5);
  claim(dir.path, 3, 0, silent.value().port());
  const int64_t since_ns = cluster::steady_ns();
  const auto first = h1.claimed(3 * still_s), second = h2.claimed(0);
  REQUIRE((first || second));
  CHECK_FALSE((first && second));
  const auto [epoch, at_ns] = first ? *first : *second;
  CHECK(epoch == 4);
  const double after_s = static_cast<double>(at_ns - since_ns) / 1e9;
  CHECK(after_s >= still_s - 0.3);
  CHECK(after_s <= 2 * still_s);
}
