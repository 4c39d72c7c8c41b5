// Who leads where leaders are lost: agents of three hosts, in one process.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "runtime/cluster/connection.h"
#include "runtime/cluster/epoch_store.h"
#include "runtime/cluster/lease.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"
#include "tools/run/agent/follower.h"
#include "tools/run/hosts/fleet.h"

using namespace cairn;
using namespace cairn::tools;
using cairn::testing::TempDir;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kPortFrom = 25024, kPortTo = 25535;  // at the first of all others' runs may listen

HostOptions options_of(int64_t index) {
  return {.placement = {.hosts = 3, .index = index, .names = {"h0", "h1", "h2"}, .leader = "127.0.0.1", .from = {}},
          .ranks = 1,
          .build = "test",
          .recipe_hash = "test",
          .port_from = kPortFrom,
          .port_to = kPortTo,
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
  explicit Leader(const fs::path& run, double answer_s = 600) {
    HostOptions options = options_of(0);
    options.answer_s = answer_s;
    auto listener = cluster::Listener::open(kPortFrom, kPortTo);
    REQUIRE_OK(listener);
    cluster::Epoch epoch = claim(run, 1, 0, listener.value().port());
    auto fleet = Fleet::open(
        options, run,
        Lead{std::move(listener).value(), std::move(epoch), std::make_unique<cluster::Lease>(store_of(run))});
    REQUIRE_OK(fleet);
    fleet_ = std::move(fleet).value();
    fleet_->use({.say =
                     [this](const std::string& line) {
                       const std::lock_guard lock(of_said_);
                       said_ += line + "\n";
                     },
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
  bool has_gathered_within(double seconds) {
    return gathered_.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready && has_gathered();
  }
  int64_t port() const { return fleet_->port(); }
  void ask_for_memory() {
    asked_ = std::async(std::launch::async, [this] { static_cast<void>(fleet_->look(Fleet::Wants::kAll)); });
  }
  bool has_said_within(double seconds, const std::string& text) {
    for (const int64_t until_ns = cluster::steady_after(seconds); cluster::steady_ns() < until_ns; nap(0.02)) {
      const std::lock_guard lock(of_said_);
      if (said_.find(text) != std::string::npos) return true;
    }
    return false;
  }

 private:
  std::atomic<bool> ends_ = false;
  std::mutex of_said_;
  std::string said_;
  std::unique_ptr<Fleet> fleet_;
  std::future<Status> gathered_;
  std::future<void> asked_;
};

class Member {
 public:
  Member(const fs::path& run, int64_t index) : Member(run, options_of(index)) {}
  Member(const fs::path& run, HostOptions options)
      : follower_(std::move(options), run, [this](const std::string& line) { said_ += line + "\n"; }) {
    done_ = std::async(std::launch::async, [this] {
      const auto segment = follower_.next_segment([this] { return ends_.load(); });
      if (!segment.ok()) error_ = segment.error();
      ended_ns_ = cluster::steady_ns();
    });
  }
  ~Member() { ends_ = true; }

  struct Claimed {
    int64_t epoch = 0, at_ns = 0;
  };
  /// Why it gave up, and what it said before.
  std::pair<std::optional<Error>, std::string> given_up() {
    done_.wait();
    return {error_, said_};
  }
  /// What it claimed within `seconds`, if anything.
  std::optional<Claimed> claimed(double seconds) {
    if (done_.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready) return std::nullopt;
    const std::optional<Lead> lead = follower_.take_lead();
    return lead ? std::optional(Claimed{lead->epoch.number, ended_ns_}) : std::nullopt;
  }

 private:
  std::atomic<bool> ends_ = false;
  std::atomic<int64_t> ended_ns_ = 0;
  std::optional<Error> error_;
  std::string said_;
  Follower follower_;
  std::future<void> done_;
};

}  // namespace

TEST_CASE("hosts bring by what means their ranks compute: each choice makes another word") {
  HostOptions options = options_of(0);
  CHECK(hello_of(options).computes == "cpu");
  std::set<std::string> words = {"cpu"};
  options.device = DeviceChoice::kCuda;
  for (const char* const comm : {"nccl", "registered", "staged"}) {
    for (const char* const attention : {"own", "cudnn"}) {
      options.comm = comm;
      options.attention = attention;
      words.insert(hello_of(options).computes);
    }
  }
  CHECK(words.size() == 7);
  CHECK(words.contains("cuda, registered, attention cudnn"));
}

TEST_CASE("a leader that waits for one of many holds the lease while others are at its door") {
  const TempDir dir("lead");
  Leader leader(dir.path);
  Member h1(dir.path, 1);
  const auto store = store_of(dir.path);
  const double still_s = lease_still_s(options_of(0).beats, store.get());
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
  // Takes connections, and answers none: a frozen host.
  const auto silent = cluster::Listener::open(kPortFrom, kPortTo);
  REQUIRE_OK(silent);
  leader.reset();
  // Just before the others judge the one before: who has looked at that one may not follow this one.
  const double still_s = lease_still_s(options_of(0).beats, store_of(dir.path).get());
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

TEST_CASE("a connected host that does not answer is taken for lost, in time and by name") {
  const TempDir dir("lead");
  Leader leader(dir.path, 0.5);
  Member h1(dir.path, 1), h2(dir.path, 2);  // nothing is trained yet, and so neither says what its memory holds
  REQUIRE(leader.has_gathered());
  leader.ask_for_memory();
  CHECK(leader.has_said_within(10, own_host_name() + " is taken for lost: it has not said what its memory holds in"));
  CHECK(leader.has_said_within(10, "waiting up to 600 s for"));
}

TEST_CASE("a host that meets another run's leader at the first port joins its own as soon as that leads") {
  const TempDir theirs("lead"), dir("lead");
  const Leader other(theirs.path);
  HostOptions own = options_of(1);
  own.port_from = other.port();
  Member h1(dir.path, own);
  nap(1.5);
  Leader leader(dir.path);
  Member h2(dir.path, 2);
  CHECK(leader.has_gathered_within(6));
}

TEST_CASE("a host that meets another run's leader alone says so while it waits, and at the end of join_timeout") {
  const TempDir theirs("lead"), dir("lead");
  const Leader other(theirs.path);
  HostOptions own = options_of(1);
  own.port_from = other.port();
  own.join_s = 7;
  const int64_t since_ns = cluster::steady_ns();
  const auto [error, said] = Member(dir.path, own).given_up();
  CHECK(cluster::steady_ns() - since_ns >= 7'000'000'000);
  REQUIRE(error);
  CHECK(error->code == ErrorCode::kUnavailable);
  const std::string what = "is not the folder of 127.0.0.1, which leads: its token is not there";
  CHECK(error->message.find(what) != std::string::npos);
  CHECK(error->message.find("or another run leads there") != std::string::npos);
  CHECK(said.find("still waits") == 0);
  CHECK(said.find(what) != std::string::npos);
  CHECK(said.find("still waits", 1) == std::string::npos);  // once
}
