// A host that follows: from one generation of ranks to the next, and while it has no leader.
#include "runtime/hosts/member.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <variant>
#include <vector>

using namespace cairn;
using namespace cairn::hosts::member;

namespace {

constexpr int64_t kSecond = 1'000'000'000;

hosts::Segment segment_of(int64_t hosts, const std::string& recipe = "r") {
  hosts::Segment out;
  out.recipe = recipe;
  out.hosts = hosts;
  return out;
}

/// Host 1 of three, of which `train` train; host 0 leads.
struct Fixture {
  Member member{Options{.hosts = 3, .train = 3, .join_s = 10, .wait_s = 20, .order_s = 100, .load_times = 10}};
  int64_t now_ns = 0;
  Actions last;

  const Actions& feed(const Event& event) { return last = member.step(event, now_ns); }
  const Actions& hear(hosts::Message message) { return feed(Told{std::move(message)}); }
  template <typename One>
  const One* find() const {
    const auto at = std::ranges::find_if(last, [](const Action& one) { return std::holds_alternative<One>(one); });
    return at == last.end() ? nullptr : &std::get<One>(*at);
  }
  /// The message of that kind that it sends.
  template <typename One>
  const One* sent() const {
    for (const Action& one : last) {
      const auto* const send = std::get_if<Send>(&one);
      if (send != nullptr && std::holds_alternative<One>(send->what)) return &std::get<One>(send->what);
    }
    return nullptr;
  }
  void join(int64_t place = 1, int64_t hosts = 3) {
    feed(Tick{});
    feed(Joined{.place = place, .hosts = hosts, .leader = 0, .epoch = 1});
  }
  void open() {
    hear(hosts::Begin{.segment = segment_of(3), .place = 1});
    REQUIRE(find<Open>() != nullptr);
    feed(Idled{});
    REQUIRE(sent<hosts::Stopped>() != nullptr);
  }
  void load(uint64_t incarnation = 4) {
    hosts::Resume order;
    order.incarnation = incarnation;
    order.promised = {7};
    hear(order);
    REQUIRE(find<Load>() != nullptr);
    feed(Loaded{});
    REQUIRE(sent<hosts::Carried>() != nullptr);
  }
  void run() {
    join();
    open();
    load();
    hear(hosts::Go{4});
    REQUIRE(find<Run>() != nullptr);
  }
};

}  // namespace

TEST_SUITE("runtime/hosts/member") {
  TEST_CASE_FIXTURE(Fixture,
                    "a member joins, opens memory, says what it holds, loads, and runs when the leader says so") {
    CHECK(feed(Tick{}).size() == 1);
    CHECK(find<Join>() != nullptr);
    join();
    CHECK(member.waits().empty());  // nothing is trained yet
    hear(hosts::Halt{.ask = 1});    // right behind the segment
    CHECK(last.empty());
    hear(hosts::Begin{.segment = segment_of(3), .place = 1, .leader = 2});
    REQUIRE(find<Open>() != nullptr);
    CHECK(find<Open>()->segment == segment_of(3));
    CHECK(member.leader_place() == 2);
    feed(Idled{});
    REQUIRE(find<Answer>() != nullptr);
    CHECK(find<Answer>()->ask == 1);
    REQUIRE(member.waits().size() == 1);
    CHECK(member.waits()[0].what == "the leader's next order");
    hear(hosts::Halt{.ask = 2});
    CHECK(find<Answer>()->ask == 2);
    load(5);
    CHECK(member.has_loaded(5));
    CHECK(member.waits()[0].what == "the leader to let ranks run");
    CHECK(hear(hosts::Go{4}).empty());  // of another order
    hear(hosts::Go{5});
    REQUIRE(find<Run>() != nullptr);
    CHECK(find<Run>()->promised == std::set<int64_t>{7});
    CHECK(member.is_running());
    CHECK(member.incarnation() == 5);
    CHECK(hear(hosts::Resume{}).empty());  // ranks run
    CHECK(member.waits().empty());
  }

  TEST_CASE_FIXTURE(Fixture,
                    "a question takes back what was loaded, and one that comes while ranks stop is answered then") {
    join();
    open();
    load();
    hear(hosts::Halt{.ask = 2});
    CHECK(find<Answer>()->ask == 2);
    CHECK(hear(hosts::Go{4}).empty());
    load();
    hear(hosts::Go{4});
    hear(hosts::Halt{.ask = 0, .why = "a rank has failed"});
    REQUIRE(find<StopRanks>() != nullptr);
    CHECK(find<StopRanks>()->why == "a rank has failed");
    CHECK(feed(Failing{}).empty());  // as the leader said: it is no news
    CHECK(hear(hosts::Halt{.ask = 3}).empty());
    feed(Idled{});
    CHECK(sent<hosts::Stopped>()->incarnation == 4);
    CHECK(find<Answer>()->ask == 3);
  }

  TEST_CASE_FIXTURE(Fixture, "a question that comes while memory is loaded is answered behind that") {
    join();
    open();
    hear(hosts::Resume{.incarnation = 4});
    CHECK(hear(hosts::Halt{.ask = 2}).empty());
    feed(Loaded{Error{ErrorCode::kCorrupt, "damaged"}});
    REQUIRE(sent<hosts::Carried>() != nullptr);
    CHECK(sent<hosts::Carried>()->error->message == "damaged");
    CHECK(find<Answer>()->ask == 2);
    CHECK_FALSE(member.has_loaded(4));
  }

  TEST_CASE_FIXTURE(Fixture, "the leader hears once that a rank has failed, or that all have ended") {
    run();
    CHECK(sent<hosts::Left>() == nullptr);
    feed(AllLeft{});
    REQUIRE(sent<hosts::Left>() != nullptr);
    CHECK(sent<hosts::Left>()->incarnation == 4);
    CHECK(feed(AllLeft{}).empty());
    feed(Failing{hosts::Failure{.rank = 1}});
    REQUIRE(sent<hosts::Failed>() != nullptr);
    CHECK(sent<hosts::Failed>()->failure.rank == 1);
    CHECK(feed(Failing{}).empty());
  }

  TEST_CASE_FIXTURE(Fixture, "ranks stop when the leader is lost, and their memory stays while it is looked for") {
    run();
    feed(LeaderLost{"the connection broke"});
    REQUIRE(find<StopRanks>() != nullptr);
    CHECK(find<StopRanks>()->why == "the leader was lost: the connection broke");
    CHECK_FALSE(member.joins_until_ns());
    now_ns = 3 * kSecond;
    feed(Idled{});
    CHECK(sent<hosts::Stopped>() == nullptr);
    REQUIRE(find<Join>() != nullptr);
    CHECK(find<Say>()->text ==
          "the leader is away (the connection broke): the ranks are stopped and their memory stays; joining it again "
          "for 20 s");
    REQUIRE(member.waits().size() == 1);
    CHECK(member.waits()[0].what == "the leader to be joined");
    CHECK(member.waits()[0].until_ns == 23 * kSecond);
    feed(Joined{.place = 1, .hosts = 3, .leader = 0, .epoch = 2});
    CHECK(find<Say>()->text == "joined again, in epoch 2");
    CHECK(member.is_open());
    hear(hosts::Begin{.segment = segment_of(3), .place = 1});
    CHECK(last.empty());  // the same
    hear(hosts::Halt{.ask = 1});
    CHECK(find<Answer>() != nullptr);
  }

  TEST_CASE_FIXTURE(Fixture, "what was loaded for a leader that is lost does not count for the next one") {
    join();
    open();
    load();
    feed(LeaderLost{"reset"});
    CHECK_FALSE(member.has_loaded(4));
    feed(Joined{.place = 1, .hosts = 3, .leader = 0, .epoch = 2});
    CHECK(hear(hosts::Go{4}).empty());
    hear(hosts::Resume{.incarnation = 5});
    feed(LeaderLost{"reset"});
    CHECK(last.empty());  // the driver loads
    feed(Loaded{});
    CHECK(sent<hosts::Carried>() == nullptr);
    CHECK(find<Join>() != nullptr);
  }

  TEST_CASE_FIXTURE(Fixture, "no leader is looked for beyond the time for it, which is another one at the start") {
    feed(Tick{});
    CHECK(member.joins_until_ns() == 10 * kSecond);
    now_ns = 10 * kSecond - 1;
    CHECK(feed(Tick{}).empty());
    now_ns = 10 * kSecond;
    feed(Tick{});
    REQUIRE(find<GaveUp>() != nullptr);
    CHECK(find<GaveUp>()->error->code == ErrorCode::kUnavailable);
    CHECK(feed(Tick{}).empty());

    Fixture open;
    open.join();
    open.open();
    open.feed(LeaderLost{"reset"});
    open.now_ns = 20 * kSecond;
    open.feed(Tick{});
    REQUIRE(open.find<Leave>() != nullptr);
    CHECK(open.find<Leave>()->why.code == ErrorCode::kUnavailable);

    Fixture refused;
    refused.feed(Tick{});
    refused.feed(JoinFailed{{ErrorCode::kInvalidInput, "another recipe"}});
    CHECK(refused.find<GaveUp>()->error->message == "another recipe");
  }

  TEST_CASE_FIXTURE(Fixture, "at a leader's door this host's own time to join does not count, until that was in vain") {
    feed(Tick{});
    now_ns = 9 * kSecond;
    CHECK(feed(AtDoor{}).empty());
    REQUIRE(member.waits().size() == 1);
    CHECK(member.waits()[0].what == "the leader to let this host in");
    now_ns = 60 * kSecond;
    CHECK(feed(Tick{}).empty());
    CHECK(member.joins_until_ns() == (9 + 100) * kSecond);
    SUBCASE("the leader lets it in") {
      join();
      CHECK(member.is_joined());
    }
    SUBCASE("the leader goes: its own time is over") {
      feed(Silent{});
      CHECK(member.joins_until_ns() == 10 * kSecond);
      feed(Tick{});
      CHECK(find<GaveUp>()->error->code == ErrorCode::kUnavailable);
    }
    SUBCASE("the leader lives and never lets it in") {
      now_ns = (9 + 100) * kSecond;
      feed(Tick{});
      CHECK(find<GaveUp>()->error->code == ErrorCode::kUnavailable);
    }
  }

  TEST_CASE_FIXTURE(Fixture, "a leader that lives and gives no order is dropped, later where loading takes long") {
    join();
    open();
    now_ns = 100 * kSecond - 1;
    CHECK(feed(Tick{}).empty());
    hear(hosts::Resume{.incarnation = 4});  // it has said something
    now_ns += 50 * kSecond;                 // the driver loads
    feed(Loaded{});
    const int64_t from_ns = now_ns;
    now_ns = from_ns + 600 * kSecond - 1;
    CHECK(feed(Tick{}).empty());
    now_ns = from_ns + 600 * kSecond;
    feed(Tick{});
    REQUIRE(find<Drop>() != nullptr);
    feed(LeaderLost{find<Drop>()->why});
    CHECK(find<Join>() != nullptr);
  }

  TEST_CASE_FIXTURE(Fixture, "memory of another place or number of hosts is left, and the next one opened") {
    run();
    hear(hosts::Begin{.segment = segment_of(2), .place = 1});
    CHECK(last.empty());  // ranks run
    CHECK(member.goes_on());
    CHECK(member.is_displaced());
    hear(hosts::Halt{.ask = 5});
    feed(Idled{});
    REQUIRE(find<Leave>() != nullptr);
    CHECK(find<Answer>() == nullptr);
    CHECK(find<Leave>()->why.code == ErrorCode::kStopped);
    CHECK(member.is_displaced());  // until it is closed
    feed(Closed{});
    CHECK_FALSE(member.is_displaced());
    REQUIRE(find<Open>() != nullptr);
    CHECK(member.hosts() == 2);
    feed(Idled{});
    CHECK(find<Answer>()->ask == 5);
  }

  TEST_CASE_FIXTURE(Fixture, "another segment follows when the ranks of this one have ended") {
    run();
    feed(AllLeft{});
    CHECK_FALSE(member.goes_on());
    hear(hosts::Begin{.segment = segment_of(3, "next"), .place = 1});
    CHECK(member.goes_on());
    CHECK_FALSE(member.is_displaced());
    feed(Closed{});
    CHECK(find<Open>()->segment.recipe == "next");
  }

  TEST_CASE_FIXTURE(Fixture, "a segment that this host cannot have a place in is no segment") {
    join();
    CHECK(hear(hosts::Begin{.segment = segment_of(3), .place = 3}).empty());
    CHECK(hear(hosts::Begin{.segment = segment_of(4), .place = 1}).empty());
  }

  TEST_CASE_FIXTURE(Fixture, "a host whose place another one has taken leaves its memory and is a spare") {
    run();
    feed(LeaderLost{"reset"});
    feed(Idled{});
    feed(Joined{.place = -1, .hosts = 3, .leader = 0, .epoch = 2});
    REQUIRE(find<Leave>() != nullptr);
    CHECK(find<Leave>()->why.message == "another host has taken this one's place");
    CHECK(find<Say>()->text.starts_with("a spare: waits"));
    feed(Closed{});
    CHECK(last.empty());
    hear(hosts::Prepare{segment_of(3)});
    REQUIRE(find<MakeSpare>() != nullptr);
    CHECK(member.waits().empty());
    feed(Silent{.still_s = 9, .claims_after_s = 4, .place_in_newest = -1});
    CHECK(last.empty());
    hear(hosts::Begin{.segment = segment_of(3), .place = 2});
    CHECK(find<Open>() != nullptr);
    CHECK(hear(hosts::Prepare{segment_of(3)}).empty());  // it has its own memory
    feed(Idled{});
    hear(hosts::Rest{});
    CHECK(find<EndCheck>() != nullptr);
    CHECK(find<Leave>() != nullptr);
    CHECK(member.place() == -1);
  }

  TEST_CASE_FIXTURE(Fixture, "a host with a place claims the lead when the lease has stood still, and then leads") {
    join();
    open();
    CHECK(feed(Silent{.still_s = 9, .claims_after_s = 4, .place_in_newest = 1}).empty());  // it has a leader
    feed(LeaderLost{"reset"});
    CHECK(feed(Silent{.still_s = 3.9, .claims_after_s = 4, .place_in_newest = 1}).empty());
    feed(Silent{.still_s = 4, .claims_after_s = 4, .place_in_newest = 1});
    REQUIRE(find<Claim>() != nullptr);
    CHECK(feed(Claimed{}).empty());  // another host was first
    feed(Silent{.still_s = 4, .claims_after_s = 4, .place_in_newest = 1});
    feed(Claimed{.leads = true, .place = 1, .hosts = 3});
    CHECK(find<Leave>() != nullptr);
    CHECK_FALSE(member.is_displaced());  // its memory counts
    CHECK(member.goes_on());
    feed(Closed{});
    REQUIRE(find<GaveUp>() != nullptr);
    CHECK_FALSE(find<GaveUp>()->error);
  }

  TEST_CASE_FIXTURE(Fixture, "a host of the epoch before claims the lead of a start that host 0 does not lead") {
    const Silent silent{.still_s = 4, .claims_after_s = 4, .place_in_newest = 1, .starts = true};
    feed(Tick{});
    CHECK(feed(Silent{.still_s = 4, .claims_after_s = 4, .place_in_newest = 1}).empty());
    feed(silent);
    REQUIRE(find<Claim>() != nullptr);
    feed(Claimed{.leads = true, .place = 1, .hosts = 3});
    REQUIRE(find<GaveUp>() != nullptr);
    CHECK_FALSE(find<GaveUp>()->error);

    Fixture spare;  // it has joined, and has no place
    spare.feed(Tick{});
    spare.feed(Joined{.place = -1, .hosts = 3, .leader = 0, .epoch = 2});
    spare.feed(LeaderLost{"reset"});
    CHECK(spare.feed(silent).empty());
  }

  TEST_CASE_FIXTURE(Fixture, "the run's end is heard in every phase, and ranks that run are stopped") {
    Fixture outside;
    outside.join();
    outside.hear(hosts::End{.code = 3, .text = "why"});
    CHECK(outside.find<Say>()->text == "why");
    REQUIRE(outside.find<GaveUp>() != nullptr);
    CHECK_FALSE(outside.find<GaveUp>()->error);
    CHECK(outside.member.end()->code == 3);

    Fixture idle;
    idle.join();
    idle.open();
    idle.hear(hosts::End{.code = 3});
    CHECK(idle.find<Leave>()->why.code == ErrorCode::kStopped);

    run();
    hear(hosts::End{.code = 3});
    CHECK(find<StopRanks>()->why == "the run has ended");
    CHECK(feed(LeaderLost{"closed"}).empty());
    feed(Idled{});
    CHECK(find<Leave>() != nullptr);

    Fixture left;
    left.run();
    left.feed(AllLeft{});
    CHECK(left.hear(hosts::End{.code = 0}).empty());  // its ranks have ended
  }

  TEST_CASE_FIXTURE(Fixture, "the end in the run folder counts while no leader is there, and memory stays then") {
    join();
    open();
    CHECK(feed(EndFound{3}).empty());
    feed(LeaderLost{"reset"});
    feed(EndFound{3});
    CHECK(find<Leave>() != nullptr);
    CHECK(member.end()->code == 3);
    CHECK(member.end()->keep == true);
  }

  TEST_CASE_FIXTURE(Fixture, "a host without memory says so to the leader's question, and stays until the run ends") {
    join();
    hear(hosts::Begin{.segment = segment_of(3), .place = 1});
    feed(Refused{{ErrorCode::kNoSpace, "/dev/shm is full"}});
    CHECK(last.empty());
    hear(hosts::Halt{.ask = 2});
    REQUIRE(sent<hosts::CannotIdle>() != nullptr);
    CHECK(sent<hosts::CannotIdle>()->ask == 2);
    CHECK(sent<hosts::CannotIdle>()->error.message == "/dev/shm is full");
    hear(hosts::End{.code = 74});
    REQUIRE(find<Leave>() != nullptr);
    CHECK(find<Leave>()->why.code == ErrorCode::kNoSpace);

    Fixture alone;
    alone.join();
    alone.hear(hosts::Halt{.ask = 1});
    alone.hear(hosts::Begin{.segment = segment_of(3), .place = 1});
    alone.feed(Refused{{ErrorCode::kNoSpace, "full"}});
    CHECK(alone.sent<hosts::CannotIdle>()->ask == 1);
    alone.feed(LeaderLost{"reset"});
    CHECK(alone.find<Leave>()->why.code == ErrorCode::kNoSpace);
  }

  TEST_CASE_FIXTURE(Fixture, "a wish to stop or to save reaches the leader that is there, once") {
    run();
    feed(WantsStop{15});
    REQUIRE(sent<hosts::Stop>() != nullptr);
    CHECK(sent<hosts::Stop>()->signal == 15);
    CHECK(feed(Tick{}).empty());
    feed(WantsSave{"SIGUSR1"});
    CHECK(sent<hosts::AskSave>()->by == "SIGUSR1");
    CHECK(feed(Tick{}).empty());

    Fixture later;
    later.join();
    later.open();
    CHECK(later.feed(WantsSave{"SIGUSR1"}).empty());
    later.load();
    later.hear(hosts::Go{4});
    CHECK(later.sent<hosts::AskSave>() != nullptr);
  }

  TEST_CASE_FIXTURE(Fixture, "a host that is to stop while no leader is there leaves by itself") {
    run();
    feed(LeaderLost{"reset"});
    CHECK(feed(WantsStop{15}).empty());
    feed(Idled{});
    CHECK(find<Join>() == nullptr);
    REQUIRE(find<Leave>() != nullptr);
    CHECK(find<Leave>()->why.message == "asked to stop while the leader was waited for");

    Fixture later;
    later.join();
    later.open();
    later.feed(LeaderLost{"reset"});
    later.feed(WantsStop{15});
    CHECK(later.find<Leave>() != nullptr);

    Fixture spare;
    spare.join(-1);
    spare.feed(LeaveNow{});
    CHECK(spare.find<GaveUp>()->error->code == ErrorCode::kStopped);

    Fixture idle;
    idle.join();
    idle.open();
    idle.feed(LeaveNow{});
    CHECK(idle.find<Leave>() != nullptr);
  }

  TEST_CASE_FIXTURE(Fixture, "a question is of the leader that asks it, and is answered behind what is being loaded") {
    run();
    hear(hosts::Halt{.ask = 3});
    feed(LeaderLost{"reset"});
    feed(Idled{});
    feed(Joined{.place = 1, .hosts = 3, .leader = 0, .epoch = 2});
    CHECK(find<Answer>() == nullptr);
    hear(hosts::Resume{.incarnation = 5});
    hear(hosts::Halt{.ask = 1});
    feed(Loaded{});
    REQUIRE(find<Answer>() != nullptr);
    CHECK(find<Answer>()->ask == 1);
    CHECK_FALSE(member.has_loaded(5));
  }

  TEST_CASE_FIXTURE(Fixture, "what could not be loaded starts no ranks") {
    join();
    open();
    hear(hosts::Resume{.incarnation = 5});
    feed(Loaded{Error{ErrorCode::kCorrupt, "damaged"}});
    CHECK_FALSE(member.has_loaded(5));
    CHECK(hear(hosts::Go{5}).empty());
  }

  TEST_CASE_FIXTURE(Fixture, "a copy is given only while no rank runs") {
    join();
    open();
    hear(hosts::Give{});
    CHECK(find<GiveCopy>() != nullptr);
    load();
    hear(hosts::Go{4});
    CHECK(hear(hosts::Give{}).empty());
  }
}
