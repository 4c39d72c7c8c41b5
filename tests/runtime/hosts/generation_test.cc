// The leader of three hosts, from one generation of ranks to the next.
#include "runtime/hosts/generation.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>
#include <variant>
#include <vector>

using namespace cairn;
using namespace cairn::hosts::generation;
using hosts::CannotIdle, hosts::Carried, hosts::Given, hosts::Held, hosts::Idle, hosts::Left, hosts::Memory,
    hosts::Slot, hosts::Stopped, hosts::Ward;

namespace {

constexpr int64_t kSecond = 1'000'000'000;
const Slot kStep4{0, 1, 4}, kStep5{1, 1, 5};

/// Host 0 leads; hosts 1 and 2 have places 1 and 2.
struct Fixture {
  Leader leader{Options{.own = 0, .answer_s = 10, .give_s = 60}};
  int64_t now_ns = 0;
  Actions last;

  Actions feed(const Event& event) { return last = leader.step(event, now_ns); }
  template <typename One>
  const One* find() const {
    const auto at = std::ranges::find_if(last, [](const Action& one) { return std::holds_alternative<One>(one); });
    return at == last.end() ? nullptr : &std::get<One>(*at);
  }
  void gather(Wants wants = Wants::kAll, std::set<int64_t> away = {}) {
    feed(Look{wants});
    REQUIRE(find<Gather>() != nullptr);
    feed(Gathered{{0, 1, 2}, {{1, "h1"}, {2, "h2"}}, std::move(away)});
    REQUIRE(find<Ask>() != nullptr);
    ask = find<Ask>()->number;
  }
  void answer(int64_t host, std::vector<Slot> whole, Held held = {}) {
    feed(Heard{host, Idle{.ask = ask, .memory = {3, std::move(whole)}, .held = std::move(held)}});
  }
  /// Hosts 0 to 2 hold what hosts 2, 0 and 1 have.
  Held held(int64_t host, std::vector<Slot> whole) {
    return {.place = (host + 2) % 3, .port = 4000 + host, .whole = std::move(whole)};
  }
  void load() {
    feed(Chosen{4});
    for (const int64_t host : {0, 1, 2}) feed(Heard{host, Carried{}});
  }
  int64_t ask = 0;
};

}  // namespace

TEST_SUITE("runtime/hosts/generation") {
  TEST_CASE_FIXTURE(Fixture, "hosts are asked, their saves settled, and ranks run once all have loaded") {
    gather();
    answer(2, {kStep4, kStep5});
    answer(0, {});
    CHECK(last.empty());
    answer(1, {kStep4});
    REQUIRE(find<Settle>() != nullptr);
    CHECK(find<Settle>()->common == std::vector{kStep4});
    CHECK(find<Ready>()->common == Memory{3, {kStep4}});
    load();
    REQUIRE(find<Loaded>() != nullptr);
    feed(Go{4});
    CHECK(leader.is_running());
    CHECK_FALSE(leader.all_left());
    feed(Heard{1, Left{4}});
    feed(Heard{2, Left{3}});  // of ranks before
    CHECK_FALSE(leader.all_left());
    feed(Heard{2, Left{4}});
    CHECK(leader.all_left());
    feed(Halt{});
    CHECK_FALSE(leader.is_running());
    feed(Heard{1, Stopped{4}});
    CHECK_FALSE(leader.all_stopped());
    feed(Lost{2, "the connection broke"});
    CHECK(leader.all_stopped());
  }

  TEST_CASE_FIXTURE(Fixture, "the answer to an ask before counts for nothing") {
    gather();
    const int64_t before = ask;
    feed(Lost{1, "silent"});
    REQUIRE(find<Gather>() != nullptr);
    feed(Gathered{{0, 1, 2}, {{1, "h1"}, {2, "h2"}}, {}});
    ask = find<Ask>()->number;
    CHECK(ask == before + 1);
    feed(Heard{1, Idle{.ask = before, .memory = {}}});
    answer(0, {});
    answer(2, {});
    CHECK(find<Ready>() == nullptr);
    answer(1, {});
    CHECK(find<Ready>() != nullptr);
  }

  TEST_CASE_FIXTURE(Fixture, "a host that does not answer is dropped at its deadline, by name") {
    gather();
    answer(0, {});
    answer(1, {});
    REQUIRE(leader.waits().size() == 1);
    CHECK(leader.waits()[0].what == "h2 to say what its memory holds");
    now_ns = 10 * kSecond - 1;
    CHECK(feed(Tick{}).empty());
    now_ns = 10 * kSecond;
    feed(Tick{});
    REQUIRE(find<Drop>() != nullptr);
    CHECK(find<Drop>()->host == 2);
    CHECK(find<Say>()->text == "h2 is taken for lost: it has not said what its memory holds in 10 s");
  }

  TEST_CASE_FIXTURE(Fixture,
                    "a slow host may take ten times as long to load as the leader, and an answer's time more") {
    gather();
    for (const int64_t host : {0, 1, 2}) answer(host, {});
    feed(Chosen{4});
    feed(Heard{1, Carried{}});
    now_ns = 3600 * kSecond;
    CHECK(feed(Tick{}).empty());  // the own host loads
    CHECK(leader.waits().empty());
    now_ns = 5 * kSecond;
    feed(Heard{0, Carried{}});
    REQUIRE(leader.waits().size() == 1);
    CHECK(leader.waits()[0].until_ns == 65 * kSecond);
    now_ns = 65 * kSecond;
    feed(Tick{});
    REQUIRE(find<Drop>() != nullptr);
    feed(Lost{2, find<Drop>()->why});
    REQUIRE(find<Failed>() != nullptr);
    CHECK(find<Failed>()->error.code == ErrorCode::kPeerLost);
  }

  TEST_CASE_FIXTURE(Fixture, "a host that is lost while all load counts more than what went wrong here") {
    gather();
    for (const int64_t host : {0, 1, 2}) answer(host, {});
    feed(Chosen{4});
    feed(Heard{0, Carried{Error{ErrorCode::kCorrupt, "its sums do not hold"}}});
    feed(Heard{1, Carried{}});
    feed(Lost{2, "the connection broke"});
    CHECK(find<Failed>()->error.code == ErrorCode::kPeerLost);
    CHECK(find<Failed>()->error.message == "h2 was lost: the connection broke");
  }

  TEST_CASE_FIXTURE(Fixture,
                    "what a host says went wrong has its name, and a host that cannot continue ends the look") {
    gather();
    answer(0, {});
    answer(2, {});
    feed(Heard{1, CannotIdle{ask, Error{ErrorCode::kNoSpace, "/dev/shm is full"}}});
    REQUIRE(find<Failed>() != nullptr);
    CHECK(find<Failed>()->error.message == "h1: /dev/shm is full");
  }

  TEST_CASE_FIXTURE(Fixture,
                    "a spare gets the step of its place from the host that holds it, before anything is chosen") {
    gather();
    answer(0, {kStep5}, held(0, {kStep5}));
    answer(1, {}, held(1, {kStep5}));
    answer(2, {kStep5}, held(2, {kStep4, kStep5}));
    REQUIRE(find<Give>() != nullptr);
    CHECK(find<Give>()->holder == 2);
    CHECK(find<Give>()->place == 1);
    CHECK(find<Give>()->slot == kStep5);
    feed(Heard{2, Given{}});
    CHECK(find<Say>()->text == "h1 has step 5 of its place from a copy in another host's memory");
    REQUIRE(find<Ready>() != nullptr);
    CHECK(find<Ready>()->common.whole == std::vector{kStep5});
  }

  TEST_CASE_FIXTURE(Fixture, "where a copy cannot be had, the next older step of all counts") {
    gather();
    answer(0, {kStep4, kStep5}, held(0, {}));
    answer(1, {}, held(1, {}));
    answer(2, {kStep4, kStep5}, held(2, {kStep4, kStep5}));
    CHECK(find<Give>()->slot == kStep5);
    feed(Heard{2, Given{Error{ErrorCode::kCorrupt, "its sums do not hold"}}});
    CHECK(find<Say>()->text == "step 5 of place 1 is in a copy that cannot be had: h2: its sums do not hold");
    REQUIRE(find<Give>() != nullptr);
    CHECK(find<Give>()->slot == kStep4);
  }

  TEST_CASE_FIXTURE(Fixture,
                    "a copy that is not given by its deadline cannot be had, and its holder is taken for lost") {
    gather();
    SUBCASE("another host holds it") {
      answer(0, {kStep5}, held(0, {}));
      answer(1, {}, held(1, {}));
      answer(2, {kStep5}, held(2, {kStep5}));
      REQUIRE(find<Give>() != nullptr);
      REQUIRE(leader.waits().size() == 1);
      CHECK(leader.waits()[0].what == "h2 to give step 5 of place 1");
      now_ns = 60 * kSecond - 1;
      CHECK(feed(Tick{}).empty());
      now_ns = 60 * kSecond;
      feed(Tick{});
      REQUIRE(find<Drop>() != nullptr);
      CHECK(find<Drop>()->host == 2);
      feed(Lost{2, find<Drop>()->why});
      CHECK(find<Gather>() != nullptr);
    }
    SUBCASE("the leader holds it") {
      answer(0, {kStep4, kStep5}, held(0, {kStep4, kStep5}));
      answer(1, {kStep4, kStep5}, held(1, {}));
      answer(2, {kStep4}, held(2, {}));
      REQUIRE(find<Give>() != nullptr);
      CHECK(leader.waits()[0].what == "this host to give step 5 of place 2");
      now_ns = 60 * kSecond;
      feed(Tick{});
      REQUIRE(find<Ready>() != nullptr);
      CHECK(find<Ready>()->common.whole == std::vector{kStep4});
    }
  }

  TEST_CASE_FIXTURE(Fixture, "a host that is lost while a copy is given has all gathered again once that has ended") {
    gather();
    answer(0, {kStep5}, held(0, {}));
    answer(1, {}, held(1, {}));
    answer(2, {kStep5}, held(2, {kStep5}));
    REQUIRE(find<Give>() != nullptr);
    CHECK(feed(Lost{1, "silent"}).empty());
    feed(Heard{2, Given{}});
    CHECK(find<Gather>() != nullptr);
  }

  TEST_CASE_FIXTURE(Fixture,
                    "with hosts that never come back, what others hold of them counts, and is saved by those") {
    gather(Wants::kLeft, {1});
    answer(0, {kStep5}, held(0, {}));
    answer(2, {kStep4, kStep5}, held(2, {kStep5}));
    REQUIRE(find<Ready>() != nullptr);
    CHECK(find<Ready>()->common.whole == std::vector{kStep5});
    CHECK(leader.wards(kStep5) == std::vector{Ward{1, 2, kStep5}});
  }

  TEST_CASE_FIXTURE(Fixture, "with hosts that never come back and no copy of their memory, the look ends so") {
    gather(Wants::kLeft, {1});
    answer(0, {kStep5});
    answer(2, {kStep5});
    REQUIRE(find<Failed>() != nullptr);
    CHECK(find<Failed>()->error.message == "no host has a copy of what h1 held");
  }

  TEST_CASE_FIXTURE(Fixture, "a stop ends each wait for other hosts") {
    gather();
    feed(Stop{});
    CHECK(find<Failed>()->error.message == "asked to stop while the hosts were being asked");
    gather();
    for (const int64_t host : {0, 1, 2}) answer(host, {});
    feed(Chosen{4});
    feed(Stop{});
    CHECK(find<Failed>()->error.message == "asked to stop while the hosts were loading");
  }

  TEST_CASE_FIXTURE(Fixture, "what all have in common is in the memory of each, with the highest incarnation of any") {
    gather();
    answer(0, {});
    answer(1, {kStep4, kStep5});
    feed(Heard{2, Idle{.ask = ask, .memory = {7, {kStep4}}}});
    CHECK(find<Ready>()->common == Memory{7, {kStep4}});
    gather();
    answer(0, {});
    feed(Heard{1, Idle{.ask = ask, .memory = {7, {kStep4}}}});
    answer(2, {kStep4, kStep5});
    CHECK(find<Ready>()->common == Memory{7, {kStep4}});
  }

  TEST_CASE_FIXTURE(Fixture, "a holder that is lost while it gives a copy has all gathered again at once") {
    gather();
    answer(0, {kStep5}, held(0, {}));
    answer(1, {}, held(1, {}));
    answer(2, {kStep5}, held(2, {kStep5}));
    feed(Lost{2, "silent"});
    CHECK(find<Gather>() != nullptr);
  }

  TEST_CASE_FIXTURE(Fixture,
                    "hosts are measured where that is wanted, and all gather again if one was lost meanwhile") {
    const auto asked = [this] {
      feed(Look{.wants = Wants::kAll, .measures = true});
      feed(Gathered{{0, 1, 2}, {{1, "h1"}, {2, "h2"}}, {}});
      ask = find<Ask>()->number;
      for (const int64_t host : {0, 1, 2}) answer(host, {});
      REQUIRE(find<Measure>() != nullptr);
    };
    asked();
    feed(Measured{Error{ErrorCode::kUnavailable, "the network"}});
    CHECK(find<Failed>()->error.message == "the network");
    asked();
    CHECK(feed(Lost{1, "silent"}).empty());
    feed(Measured{});
    CHECK(find<Gather>() != nullptr);
    asked();
    feed(Measured{});
    CHECK(find<Ready>() != nullptr);
  }

  TEST_CASE_FIXTURE(Fixture, "a membership that is not complete ends the look") {
    feed(Look{Wants::kAll});
    feed(GaveUp{{ErrorCode::kTimeout, "h1 has not joined"}});
    REQUIRE(find<Failed>() != nullptr);
    CHECK(find<Failed>()->error.message == "h1 has not joined");
  }

  TEST_CASE_FIXTURE(Fixture, "a host that is lost while the leader chooses does not load") {
    gather();
    for (const int64_t host : {0, 1, 2}) answer(host, {});
    CHECK(feed(Lost{2, "silent"}).empty());
    feed(Chosen{4});
    feed(Heard{0, Carried{}});
    feed(Heard{1, Carried{}});
    REQUIRE(find<Failed>() != nullptr);
    CHECK(find<Failed>()->error.code == ErrorCode::kPeerLost);
  }

  TEST_CASE_FIXTURE(Fixture, "ranks that have stopped or left count for their own generation alone") {
    gather();
    for (const int64_t host : {0, 1, 2}) answer(host, {});
    load();
    feed(Go{4});
    feed(Heard{1, Stopped{3}});
    feed(Heard{2, Stopped{4}});
    CHECK_FALSE(leader.all_stopped());
    feed(Heard{1, Stopped{4}});
    CHECK(leader.all_stopped());
    feed(Heard{1, Left{4}});
    feed(Heard{2, Left{4}});
    CHECK(leader.all_left());
    feed(Halt{});
    gather();
    for (const int64_t host : {0, 1, 2}) answer(host, {});
    feed(Chosen{5});
    for (const int64_t host : {0, 1, 2}) feed(Heard{host, Carried{}});
    feed(Go{5});
    CHECK_FALSE(leader.all_left());
    CHECK_FALSE(leader.all_stopped());
  }
}
