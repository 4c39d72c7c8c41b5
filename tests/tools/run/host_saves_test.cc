// A step that two hosts save, each with a persister's thread of its own; what they tell each other goes by hand.
#include "tools/run/hosts/host_saves.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <new>
#include <thread>

#include "ckpt/persist/read.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::tools;
using cairn::testing::TempDir;
using ckpt::testing::make_state;
using ckpt::testing::TestState;
namespace fs = std::filesystem;

namespace {

using Saved = Result<ckpt::SaveReport>;

class FailingWrites final : public ckpt::PosixBackend {
 public:
  Result<std::unique_ptr<ckpt::IoFile>> create(const fs::path& path, int64_t size_bytes) override {
    if (path.extension() == ".h5") return Error{ErrorCode::kNoSpace, path.filename().string() + ": no space"};
    return ckpt::PosixBackend::create(path, size_bytes);
  }
};

/// From any thread.
class HandClock final : public Clock {
 public:
  int64_t now_ns() const override { return ns_; }
  double unix_s() const override { return static_cast<double>(ns_) / 1e9; }
  void forward(double seconds) { ns_ += static_cast<int64_t>(seconds * 1e9); }

 private:
  std::atomic<int64_t> ns_ = 1'000'000'000;
};

/// The leader and host 1, which has the second half of the files.
struct TwoHosts {
  TwoHosts()
      : leader([this](const hosts::Message& m) { to_host(m); }, {.away = 660, .begin = 180, .parts = 600}, clock),
        follower(
            1, [this](const hosts::Message& m) { to_leader(m); }, {.away = 660, .begin = 180, .parts = 600}, clock) {
    leader.set_hosts({{1, "h1"}}, 7);
    fs::create_directories(dir);
  }
  void to_host(const hosts::Message& message) {
    kinds.emplace_back(hosts::kind_of(message));
    if (!cut) CHECK((std::holds_alternative<hosts::Promise>(message) || follower.take(message, dir)));
  }
  void to_leader(const hosts::Message& message) {
    if (throws) throw std::bad_alloc();
    held = hold && std::holds_alternative<hosts::Begun>(message);
    while (held && hold) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!cut) CHECK(leader.take(1, message));
  }
  std::future<Saved> lead(const TestState& state) {
    return std::async(std::launch::async, [this, &state] {
      ckpt::PosixBackend io;
      return leader.save(io, dir, state.skeleton, std::span(state.parts).first(2), options(state));
    });
  }
  /// The persister of host 1, from the promise on.
  std::future<Saved> follow(const TestState& state, bool fails = false, size_t files = 2) {
    return std::async(std::launch::async, [this, &state, fails, files]() -> Saved {
      ckpt::PosixBackend io;
      FailingWrites failing;
      while (!follower.is_due(state.skeleton.step)) {
        if (cancel) return Error{ErrorCode::kStopped, "the persister ends"};
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return follower.save(fails ? failing : io, dir, state.skeleton, std::span(state.parts).subspan(2, files),
                           options(state));
    });
  }
  ckpt::SaveOptions options(const TestState& state) const {
    ckpt::SaveOptions out;
    out.checksum_bytes = ckpt::checksum_bytes_of(state.skeleton, state.parts, out.chunk_bytes);
    out.cancel = &cancel;
    out.check_folder = [this]() -> Status {
      return refuses ? Status(Error{ErrorCode::kIo, "the folder was moved away"}) : Status();
    };
    return out;
  }
  ckpt::Names names() {
    ckpt::PosixBackend io;
    return ckpt::list_names(io, dir).value();
  }

  HandClock clock;
  TempDir temp{"hosts"};
  fs::path dir = temp.path / "checkpoints";
  std::atomic<bool> cut = false, cancel = false;  // messages are lost; both persisters give up
  std::atomic<bool> refuses = false;              // the leader's save, before hosts are told of it
  std::atomic<bool> throws = false;               // the host has no memory for a message
  std::atomic<bool> hold = false, held = false;   // the host's persister, when it has begun
  std::vector<std::string> kinds;                 // of messages to the host
  LeaderSaves leader;
  FollowerSaves follower;
};

bool is_done(const std::future<Saved>& save) {
  return save.wait_for(std::chrono::milliseconds(300)) == std::future_status::ready;
}

}  // namespace

TEST_SUITE("tools/run/host_saves") {
  TEST_CASE("a step that two hosts save is the one that a single process saves, whoever comes first") {
    const TestState state = make_state(5, 1, 4);
    TempDir alone("alone");
    ckpt::PosixBackend io;
    ckpt::SaveOptions how;
    const auto one = ckpt::save_checkpoint(io, alone.path, state.skeleton, state.parts, how);
    REQUIRE_OK(one);
    for (const bool leader_first : {true, false}) {
      TwoHosts hosts;
      std::future<Saved> first = leader_first ? hosts.lead(state) : hosts.follow(state);
      CHECK_FALSE(is_done(first));
      std::future<Saved> second = leader_first ? hosts.follow(state) : hosts.lead(state);
      const Saved a = first.get(), b = second.get();
      REQUIRE_OK(a);
      REQUIRE_OK(b);
      const fs::path step = hosts.dir / "step-00000005";
      CHECK((leader_first ? a : b).value().dir == step);
      CHECK((leader_first ? a : b).value().payload_bytes == one.value().payload_bytes);
      CHECK(ckpt::verify_checkpoint(io, step, {}).value().whole());
      ckpt::Manifest got = ckpt::read_manifest(io, step).value(), wanted = one.value().manifest;
      CHECK(nlohmann::json::parse(got.extra).at("hosts") == nlohmann::json{got.writer.host, "h1"});
      CHECK(nlohmann::json::parse(got.extra).at("epoch") == 7);
      got.extra = wanted.extra;
      CHECK(got == wanted);
      CHECK(hosts.names().leftovers.empty());
    }
  }

  TEST_CASE("the part of a lost host is written by who holds its copy, the leader or another one") {
    const TestState state = make_state(5, 1, 4);
    const auto parts = std::span(state.parts);
    for (const int64_t holder : {0, 1}) {
      CAPTURE(holder);
      for (const bool fails : {false, true}) {
        TwoHosts hosts;
        const WriteWard write = [&](const Ward& ward, ckpt::IoBackend& io,
                                    const fs::path& work) -> Result<ckpt::PartSet> {
          CHECK(ward == Ward{2, holder, {0, 3, 5}});
          if (fails) return Error{ErrorCode::kUnavailable, "step 5 is not held here any more"};
          return ckpt::write_parts(io, work, state.skeleton, parts.subspan(3), hosts.options(state));
        };
        hosts.leader.set_hosts({{1, "h1"}, {2, "h2"}}, 7);
        hosts.leader.set_wards(0, {{2, holder, {0, 3, 5}}}, write);
        hosts.follower.use(write);
        std::future<Saved> follows = hosts.follow(state, false, 1);
        const Saved lead = hosts.lead(state).get(), follow = follows.get();
        hosts.follower.finish_wards();
        CHECK(follow.ok() != fails);
        if (fails) {
          REQUIRE_FALSE(lead.ok());
          CHECK(lead.error().message.find("step 5 is not held here any more") != std::string::npos);
          CHECK(hosts.names().steps.empty());
          continue;
        }
        REQUIRE_OK(lead);
        ckpt::PosixBackend io;
        CHECK(ckpt::verify_checkpoint(io, hosts.dir / "step-00000005", {}).value().whole());
      }
    }
  }

  TEST_CASE("who holds the copy of a lost host is waited for no more when it is lost, too") {
    const TestState state = make_state(5, 1, 4);
    TwoHosts hosts;
    hosts.leader.set_hosts({{1, "h1"}, {2, "h2"}}, 7);
    hosts.leader.set_wards(0, {{2, 1, {0, 3, 5}}}, {});
    hosts.cut = true;  // its own part is all that comes of it
    std::future<Saved> leads = hosts.lead(state);
    CHECK_FALSE(is_done(leads));
    CHECK(hosts.leader.take(1, hosts::Written{5, 1}));
    CHECK_FALSE(is_done(leads));
    hosts.leader.lost(1, "silent");
    const Saved lead = leads.get();
    REQUIRE_FALSE(lead.ok());
    CHECK(lead.error().message.find("h1 was lost: silent") != std::string::npos);
  }

  TEST_CASE("a host that cannot write ends the save on both, with its name, and nothing of it stays") {
    const TestState state = make_state(5, 1, 4);
    TwoHosts hosts;
    std::future<Saved> leads = hosts.lead(state), follows = hosts.follow(state, true);
    const Saved lead = leads.get(), follow = follows.get();
    REQUIRE_FALSE(lead.ok());
    REQUIRE_FALSE(follow.ok());
    CHECK(lead.error().code == ErrorCode::kNoSpace);
    CHECK(lead.error().message.find("h1: ") != std::string::npos);
    CHECK(hosts.names().steps.empty());
    CHECK(hosts.names().leftovers.empty());
    // The next try is as the first.
    std::future<Saved> again = hosts.lead(state), with = hosts.follow(state);
    CHECK(again.get().ok());
    CHECK(with.get().ok());
    // One without memory comes again, and the leader waits for it.
    TwoHosts others;
    std::future<Saved> waits = others.lead(state);
    CHECK_FALSE(is_done(waits));
    others.throws = true;
    CHECK_THROWS(others.follow(state).get());
    others.throws = false;
    CHECK_FALSE(is_done(waits));
    CHECK(others.follow(state).get().ok());
    CHECK(waits.get().ok());
  }

  TEST_CASE("a host that is lost, and a leader that is, end what waits for them") {
    const TestState state = make_state(5, 1, 4);
    TwoHosts hosts;
    std::future<Saved> lead = hosts.lead(state);
    CHECK_FALSE(is_done(lead));
    hosts.leader.lost(1, "silent for 3.0 s");
    const Saved ended = lead.get();
    REQUIRE_FALSE(ended.ok());
    CHECK(ended.error().message.find("h1 was lost: silent for 3.0 s") != std::string::npos);

    TwoHosts others;
    others.leader.set_hosts({{1, "h1"}, {2, "late"}}, 7);
    lead = others.lead(state);
    std::future<Saved> follow = others.follow(state);
    CHECK_FALSE(is_done(follow));
    others.follower.leader_lost("reset");
    CHECK(follow.get().error().message == "the leader was lost: reset");
    others.cancel = true;
    CHECK_FALSE(lead.get().ok());
  }

  TEST_CASE("a save that begins while a host is away reaches it once it is back") {
    const TestState state = make_state(5, 1, 4);
    TwoHosts hosts;
    hosts.cut = true;
    hosts.leader.lost(1, "silent");
    std::future<Saved> lead = hosts.lead(state);
    CHECK_FALSE(is_done(lead));
    CHECK(hosts.leader.waits_for(5) == "h1 (is away)");
    hosts.leader.lost(1, "silent");  // the agent's loop comes to it later than the thread of the connections
    CHECK_FALSE(is_done(lead));
    CHECK(hosts.kinds.empty());
    hosts.cut = false;
    hosts.leader.back(1);
    hosts.leader.settle({{2, 1, 5}});
    hosts.leader.resumed();
    std::future<Saved> follow = hosts.follow(state);
    REQUIRE_OK(lead.get());
    REQUIRE_OK(follow.get());
    CHECK(std::ranges::count(hosts.kinds, "save") == 1);
    CHECK(hosts.leader.waits_for(5).empty());
  }

  TEST_CASE("a save that begins while a host is away ends with an error where that host stays away") {
    const TestState state = make_state(5, 1, 4);
    {
      TwoHosts hosts;  // the hosts that are left continue, and none has a copy
      hosts.leader.lost(1, "silent");
      std::future<Saved> lead = hosts.lead(state);
      CHECK_FALSE(is_done(lead));
      hosts.leader.settle({{2, 1, 5}});
      CHECK(lead.get().error().message == "h1 is away: what its memory holds cannot be saved");
      CHECK(hosts.lead(state).get().error().code == ErrorCode::kUnavailable);
    }
    {
      TwoHosts hosts;  // it had lost its memory
      hosts.leader.lost(1, "silent");
      std::future<Saved> lead = hosts.lead(state);
      CHECK_FALSE(is_done(lead));
      hosts.leader.back(1);
      hosts.leader.settle({});
      CHECK(lead.get().error().message.find("before all hosts had it in memory") != std::string::npos);
    }
    {
      TwoHosts hosts;  // it never comes back
      hosts.leader.lost(1, "silent");
      std::future<Saved> lead = hosts.lead(state);
      CHECK_FALSE(is_done(lead));
      hosts.clock.forward(661);
      CHECK(lead.get().error().message == "h1 has been away for 660 s");
    }
    TwoHosts hosts;  // the persister ends
    hosts.leader.lost(1, "silent");
    std::future<Saved> lead = hosts.lead(state);
    CHECK_FALSE(is_done(lead));
    hosts.cancel = true;
    CHECK(lead.get().error().code == ErrorCode::kStopped);
  }

  TEST_CASE("a save waits for the host that has the place now, or for the copy of what the lost one held") {
    const TestState state = make_state(5, 1, 4);
    const auto parts = std::span(state.parts);
    {
      TwoHosts hosts;  // a spare
      hosts.leader.set_hosts({{2, "h2"}}, 7, {2});
      std::future<Saved> lead = hosts.lead(state);
      CHECK_FALSE(is_done(lead));
      hosts.leader.set_hosts({{1, "h1"}}, 8, {1});
      CHECK_FALSE(is_done(lead));
      hosts.leader.back(1);
      CHECK(hosts.follow(state).get().ok());
      const Saved saved = lead.get();
      REQUIRE_OK(saved);
      CHECK(nlohmann::json::parse(saved.value().manifest.extra).at("epoch") == 8);
    }
    TwoHosts hosts;
    hosts.leader.lost(1, "silent");
    std::future<Saved> lead = hosts.lead(state);
    CHECK_FALSE(is_done(lead));
    hosts.leader.set_wards(0, {{1, 0, {0, 3, 5}}},
                           [&](const Ward&, ckpt::IoBackend& io, const fs::path& work) -> Result<ckpt::PartSet> {
                             return ckpt::write_parts(io, work, state.skeleton, parts.subspan(2), hosts.options(state));
                           });
    REQUIRE_OK(lead.get());
    ckpt::PosixBackend io;
    CHECK(ckpt::verify_checkpoint(io, hosts.dir / "step-00000005", {}).value().whole());
  }

  TEST_CASE("a host that never begins, or never writes its part, ends the save in time and by name") {
    const TestState state = make_state(5, 1, 4);
    TwoHosts hosts;
    std::future<Saved> lead = hosts.lead(state);
    CHECK_FALSE(is_done(lead));
    CHECK(hosts.leader.waits_for(5) == "h1 (has not begun)");
    hosts.clock.forward(179);
    CHECK_FALSE(is_done(lead));
    hosts.clock.forward(2);
    CHECK(lead.get().error().message == "step 5 was not saved: h1 has not begun in 181 s");
    CHECK(hosts.kinds.back() == "dropped");

    lead = hosts.lead(state);
    CHECK_FALSE(is_done(lead));
    CHECK(hosts.leader.take(1, hosts::Begun{5, 2}));
    CHECK(hosts.leader.waits_for(5) == "h1 (writes its part)");
    hosts.clock.forward(599);
    CHECK_FALSE(is_done(lead));
    hosts.clock.forward(2);
    CHECK(lead.get().error().message == "step 5 was not saved: h1 has not written its part, 601 s after the leader");
    CHECK(hosts.names().leftovers.empty());
  }

  TEST_CASE("a leader that never commits is waited for no longer than twice as long as it waits for hosts") {
    const TestState state = make_state(5, 1, 4);
    TwoHosts hosts;
    hosts.leader.set_hosts({{1, "h1"}, {2, "late"}}, 7);
    std::future<Saved> lead = hosts.lead(state), follow = hosts.follow(state);
    CHECK_FALSE(is_done(follow));
    hosts.cut = true;
    hosts.clock.forward(1199);
    CHECK_FALSE(is_done(follow));
    hosts.clock.forward(2);
    CHECK(follow.get().error().message == "the leader has not committed step 5, 1201 s after this host's part");
    CHECK_FALSE(lead.get().ok());
  }

  TEST_CASE("both give a save up at once when they are told to") {
    const TestState state = make_state(5, 1, 4);
    TwoHosts hosts;
    hosts.leader.set_hosts({{1, "h1"}, {2, "late"}}, 7);
    std::future<Saved> lead = hosts.lead(state), follow = hosts.follow(state);
    CHECK_FALSE(is_done(lead));
    CHECK_FALSE(is_done(follow));
    hosts.cancel = true;
    CHECK(lead.get().error().code == ErrorCode::kStopped);
    CHECK(follow.get().error().code == ErrorCode::kStopped);
  }

  TEST_CASE("when ranks are stopped, what one host lacks is given up, and what all have is promised and saved") {
    const TestState state = make_state(5, 1, 4);
    {
      TwoHosts hosts;
      std::future<Saved> lead = hosts.lead(state);
      CHECK_FALSE(is_done(lead));
      hosts.leader.settle({});
      CHECK(lead.get().error().code == ErrorCode::kUnavailable);
      // The host whose persister comes late is told as well.
      CHECK(hosts.follow(state).get().error().code == ErrorCode::kUnavailable);
    }
    TwoHosts hosts;
    std::future<Saved> lead = hosts.lead(state);
    CHECK_FALSE(is_done(lead));
    hosts.leader.settle({{2, 1, 5}});
    CHECK(hosts.kinds.back() == "promise");
    CHECK_FALSE(is_done(lead));
    CHECK(hosts.follow(state).get().ok());
    CHECK(lead.get().ok());
  }

  TEST_CASE("a persister that comes to its promise when it is settled what all have waits for nobody in vain") {
    const TestState state = make_state(5, 1, 4);
    {
      TwoHosts hosts;  // on a host that was booted again nothing is whole
      hosts.leader.settle({{2, 1, 4}});
      std::future<Saved> lead = hosts.lead(state);
      REQUIRE(is_done(lead));
      CHECK(lead.get().error().message.find("before all hosts had it in memory") != std::string::npos);
      CHECK(hosts.kinds.empty());
      CHECK_FALSE(hosts.follower.is_due(5));
      hosts.leader.resumed();  // the step is reached again
      hosts.follower.resumed(4, {}, {});
      lead = hosts.lead(state);
      CHECK_FALSE(is_done(lead));
      CHECK(hosts.follow(state).get().ok());
      CHECK(lead.get().ok());
    }
    TwoHosts hosts;  // whole on the other host, which has promised it to nobody
    hosts.leader.settle({{2, 1, 5}});
    std::future<Saved> lead = hosts.lead(state);
    CHECK_FALSE(is_done(lead));
    CHECK(hosts.kinds == std::vector<std::string>{"save", "promise"});
    CHECK(hosts.follow(state).get().ok());
    CHECK(lead.get().ok());
  }

  TEST_CASE("who follows begins what the leader is at, in its order, and what will never come ends") {
    const TestState fifth = make_state(5, 1, 4), sixth = make_state(6, 1, 4);
    TwoHosts hosts;
    CHECK_FALSE(hosts.follower.is_due(5));
    std::future<Saved> lead = hosts.lead(sixth);
    CHECK_FALSE(is_done(lead));
    CHECK_FALSE(hosts.follower.is_due(5));
    CHECK(hosts.follower.is_due(6));
    CHECK(hosts.follow(sixth).get().ok());
    CHECK(lead.get().ok());
    CHECK_FALSE(hosts.follower.is_due(6));
    hosts.leader.failed(5, {ErrorCode::kNoSpace, "the disk is full"});
    CHECK(hosts.follower.is_due(5));
    CHECK(hosts.follow(fifth).get().error().code == ErrorCode::kNoSpace);
    CHECK_FALSE(hosts.follower.is_due(5));
    hosts.refuses = true;
    CHECK_FALSE(hosts.lead(fifth).get().ok());
    hosts.refuses = false;
    CHECK(hosts.kinds.back() == "dropped");
    CHECK(hosts.follow(fifth).get().error().code == ErrorCode::kIo);
    // The line of these is left, or the leader says anew which is next.
    hosts.leader.failed(6, {ErrorCode::kNoSpace, "the disk is full"});
    hosts.to_host(hosts::Save{7, 9, "left", {}});
    hosts.follower.resumed(6, {6}, {6});
    CHECK(hosts.follower.is_due(5));
    CHECK_FALSE(hosts.follower.is_due(6));
    CHECK_FALSE(hosts.follower.is_due(7));
    // What is promised anew is saved anew, though it was resumed from and all else of it has ended.
    hosts.leader.failed(5, {ErrorCode::kNoSpace, "the disk is full"});
    hosts.follower.promised(5);
    CHECK_FALSE(hosts.follower.is_due(5));
    lead = hosts.lead(fifth);
    CHECK_FALSE(is_done(lead));
    hosts.follower.look({5});
    CHECK_FALSE(is_done(lead));
    CHECK(hosts.follow(fifth).get().ok());
    CHECK(lead.get().ok());
  }

  TEST_CASE("a try that was dropped says nothing of the next one of the same step") {
    const TestState state = make_state(5, 1, 4);
    TwoHosts hosts;
    std::future<Saved> lead = hosts.lead(state);
    CHECK_FALSE(is_done(lead));
    hosts.hold = true;  // the host's persister is long in writing its part
    std::future<Saved> late = hosts.follow(state);
    while (!hosts.held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    hosts.leader.settle({});
    CHECK_FALSE(lead.get().ok());
    hosts.leader.resumed();
    lead = hosts.lead(state);
    CHECK_FALSE(is_done(lead));
    hosts.hold = false;
    CHECK_FALSE(late.get().ok());
    CHECK_FALSE(is_done(lead));
    const hosts::Message of_the_first = hosts::Dropped{5, 1, {ErrorCode::kIo, "late"}};
    hosts.to_host(of_the_first);
    CHECK(hosts.follower.is_due(5));
    hosts.hold = true;
    std::future<Saved> second = hosts.follow(state);
    while (!hosts.held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    hosts.to_host(of_the_first);
    hosts.hold = false;
    CHECK(second.get().ok());
    CHECK(lead.get().ok());
  }

  TEST_CASE("a step that one side has forgotten is refused instead of being waited for") {
    const TestState state = make_state(5, 1, 4);
    {
      TwoHosts hosts;  // the leader asks for what is not promised here any more
      std::future<Saved> lead = hosts.lead(state);
      CHECK_FALSE(is_done(lead));
      hosts.follower.resumed(8, {}, {5});
      CHECK(lead.get().error().message.find("h1: step 5 is not in the memory of all hosts any more") !=
            std::string::npos);
    }
    {
      TwoHosts hosts;  // asked for behind the decision
      hosts.follower.resumed(8, {}, {5});
      std::future<Saved> lead = hosts.lead(state);
      CHECK_FALSE(is_done(lead));
      hosts.follower.look({});
      CHECK_FALSE(lead.get().ok());
    }
    {
      TwoHosts hosts;  // the leader has not promised what is promised here
      hosts.follower.resumed(8, {5}, {});
      CHECK(hosts.follow(state).get().error().code == ErrorCode::kUnavailable);
    }
    TwoHosts hosts;  // both have
    hosts.follower.resumed(8, {5}, {5});
    std::future<Saved> follow = hosts.follow(state);
    CHECK_FALSE(is_done(follow));
    CHECK(hosts.lead(state).get().ok());
    CHECK(follow.get().ok());
  }

  TEST_CASE("a save that failed before the others heard of it ends their waiting") {
    const TestState state = make_state(5, 1, 4);
    TwoHosts hosts;
    std::future<Saved> follow = hosts.follow(state);
    CHECK_FALSE(is_done(follow));
    hosts.leader.failed(5, {ErrorCode::kCorrupt, "rank 0: its sums do not hold"});
    CHECK(follow.get().error().message == "rank 0: its sums do not hold");
  }
}
