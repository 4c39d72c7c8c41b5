// The rule of membership, transition by transition; tests/sim shows what agents together make of it.
#include "runtime/hosts/membership.h"

#include <doctest/doctest.h>

#include <string>
#include <variant>
#include <vector>

using namespace cairn;
using namespace cairn::hosts::membership;

namespace {

constexpr int64_t kSecond = 1'000'000'000;

/// h0 leads; h1 and h2 train with it, h3 is a spare.
struct Run {
  explicit Run(Options options = {}) : rule(filled(std::move(options)), 0) {}

  static Options filled(Options options) {
    options.hosts = 4;
    options.names = {"h0", "h1", "h2", "h3"};
    if (options.places.empty()) options.places = {0, 1, 2};
    return options;
  }

  /// The actions of the kind, with what the driver answers at once.
  Actions step(const Event& event, double at_s = 1) {
    Actions out;
    for (const Action& action : rule.step(event, static_cast<int64_t>(at_s * kSecond))) {
      out.push_back(action);
      Actions more;
      if (std::holds_alternative<CheckEpoch>(action)) more = step(Leads{newer}, at_s);
      if (std::holds_alternative<Claim>(action)) more = step(Claimed{taken}, at_s);
      out.insert(out.end(), more.begin(), more.end());
    }
    return out;
  }
  void come(int64_t host, double at_s = 1) { step(Admitted{host, "h" + std::to_string(host)}, at_s); }
  /// All have come, and epoch 1 has begun.
  void begin() {
    for (const int64_t host : {1, 2}) come(host);
    step(AtDoor{{1, 2}});
    step(Gather{.patience_s = 300, .spare_after_s = 300, .reason = "start"});
  }

  std::optional<Error> newer, taken;
  Leader rule;
};

template <typename One>
const One* find(const Actions& actions) {
  for (const Action& action : actions) {
    if (const auto* const one = std::get_if<One>(&action)) return one;
  }
  return nullptr;
}

/// A run whose hosts with a place have joined, and h3 too where `spare` says so.
Run running(bool spare, std::set<int64_t> sizes = {}) {
  Run run({.fewer_after_s = 10, .epoch = 1, .leads = true});
  run.rule.allow_sizes(std::move(sizes));
  for (const int64_t host : {1, 2}) run.come(host);
  if (spare) run.come(3);
  return run;
}

constexpr double kWaitS = 600, kSpareAfterS = 10;
const Gather kAgain{.patience_s = kWaitS, .spare_after_s = kSpareAfterS, .reason = "again", .announces = true};
const Resize kSmaller{.hosts = 2, .patience_s = kWaitS};

}  // namespace

TEST_SUITE("runtime/hosts/membership") {
  TEST_CASE("a start waits for each place, then claims the next epoch with the hosts at the door") {
    Run run({.epoch = 6});
    CHECK(run.step(Gather{300, 300, "start"}).empty());
    CHECK(run.rule.waits().size() == 2);
    CHECK(run.rule.waits()[0].what == "h1 (it has not joined)");
    CHECK(run.rule.waits()[0].until_ns == 301 * kSecond);
    run.step(AtDoor{{1}});
    CHECK(run.step(Tick{}).empty());
    run.step(AtDoor{{1, 2}});
    const Actions all = run.step(Tick{}, 2);
    const auto* const claim = find<Claim>(all);
    REQUIRE(claim != nullptr);
    CHECK(claim->number == 7);
    CHECK(claim->places == std::vector<int64_t>{0, 1, 2});
    CHECK(claim->reason == "start");
    CHECK(find<Gathered>(all) != nullptr);
    CHECK(run.rule.epoch() == 7);
    CHECK(run.rule.waits().empty());
  }

  TEST_CASE("a host that never comes ends the gathering by name, at its end and not before") {
    Run run;
    run.step(Gather{300, 300, "start"}, 1);
    run.step(AtDoor{{2}});
    CHECK(run.step(Tick{}, 300.9).empty());
    const Actions end = run.step(Tick{}, 301);
    const auto* const gave_up = find<GaveUp>(end);
    REQUIRE(gave_up != nullptr);
    CHECK(gave_up->error.code == ErrorCode::kTimeout);
    CHECK(gave_up->error.message == "1 of 4 hosts have not joined: h1 (host 1)");
  }

  TEST_CASE("a newer epoch of another leader counts before all else that ends a gathering") {
    Run run;
    run.newer = Error{ErrorCode::kUnavailable, "h2 leads"};
    SUBCASE("all have come") { run.step(AtDoor{{1, 2}}); }
    SUBCASE("somebody wants to stop") { run.step(AtDoor{{1}}); }
    run.step(Gather{300, 300, "start"});
    const Actions end = run.step(Stop{});
    if (const auto* const gave_up = find<GaveUp>(end)) CHECK(gave_up->error.message == "h2 leads");
    CHECK(find<Claim>(end) == nullptr);
    CHECK(run.rule.epoch() == 0);
  }

  TEST_CASE("a store that does not answer is asked again, by name and until the gathering's end") {
    Run run = running(false);
    run.newer = Error{ErrorCode::kTimeout, "etcd: none answers"};
    SUBCASE("no host is away: ranks start again once it answers, in the same epoch") {
      SUBCASE("etcd is away") {}
      SUBCASE("a disk fails") { run.newer->code = ErrorCode::kIo; }
      CHECK(find<Say>(run.step(kAgain, 100))->text ==
            "whether this host leads yet is not known, and is asked again: etcd: none answers");
      REQUIRE(run.rule.waits().size() == 1);
      CHECK(run.rule.waits()[0].what == "the store of epochs to answer");
      CHECK(run.step(Tick{}, 100.9).empty());
      const Actions again = run.step(Tick{}, 101);
      CHECK(find<CheckEpoch>(again) != nullptr);
      CHECK(find<Say>(again) == nullptr);
      run.newer.reset();
      const Actions end = run.step(Tick{}, 102);
      CHECK(find<Gathered>(end) != nullptr);
      CHECK(find<Claim>(end) == nullptr);
      CHECK(run.rule.waits().empty());
    }
    SUBCASE("a host is lost meanwhile, and is waited for") {
      run.step(kAgain, 100);
      run.step(Lost{1, "power"}, 101);
      run.newer.reset();
      CHECK(run.step(Tick{}, 102).empty());
      run.step(AtDoor{{1}}, 103);
      CHECK(find<Claim>(run.step(Tick{}, 103)) != nullptr);
    }
    SUBCASE("it never answers") {
      run.step(kAgain, 100);
      const Actions end = run.step(Tick{}, 700);
      REQUIRE(find<GaveUp>(end) != nullptr);
      CHECK(find<GaveUp>(end)->error.message == "etcd: none answers");
    }
    SUBCASE("somebody wants to stop") {
      run.step(kAgain, 100);
      CHECK(find<GaveUp>(run.step(Stop{}, 101))->error.code == ErrorCode::kStopped);
    }
    SUBCASE("another host leads by then") {
      run.step(kAgain, 100);
      run.newer = Error{ErrorCode::kUnavailable, "h2 leads"};
      CHECK(find<GaveUp>(run.step(Tick{}, 101))->error.message == "h2 leads");
    }
  }

  TEST_CASE("a leader is sure of its lead while its sign is fresh, or the store takes no sign and so no claim") {
    const auto sure = [](double shown_s, double failed_s) {
      return leads_surely({.since_shown_s = shown_s, .since_failed_s = failed_s, .claims_after_s = 4.5});
    };
    CHECK(sure(4.4, 1e9));
    CHECK_FALSE(sure(4.5, 1e9));
    CHECK(sure(100, 10.9));
    CHECK_FALSE(sure(100, 11));
    const auto stood_still = [](double failed_s) {
      return leads_surely(
          {.since_shown_s = 100, .since_failed_s = failed_s, .stood_still_s = 4, .claims_after_s = 4.5});
    };
    CHECK(stood_still(4.4));
    CHECK_FALSE(stood_still(4.5));
  }

  TEST_CASE("an epoch that another agent has claimed is not this leader's") {
    Run run;
    run.taken = Error{ErrorCode::kUnavailable, "taken"};
    run.step(AtDoor{{1, 2}});
    const Actions end = run.step(Gather{300, 300, "start"});
    CHECK(find<GaveUp>(end)->error.message == "taken");
    CHECK(find<Gathered>(end) == nullptr);
    CHECK(run.rule.epoch() == 0);
  }

  TEST_CASE("a stop ends a gathering at once") {
    Run run;
    run.step(Gather{300, 300, "start"});
    const Actions end = run.step(Stop{}, 2);
    REQUIRE(find<GaveUp>(end) != nullptr);
    CHECK(find<GaveUp>(end)->error.code == ErrorCode::kStopped);
  }

  TEST_CASE("a spare takes the place of a host when its grace has ended, counted from its loss") {
    Run run = running(true);
    run.step(Lost{1, "the connection broke"}, 100);
    const Actions begun = run.step(kAgain, 105);
    CHECK(find<Say>(begun)->text == "waiting up to 600 s for h1 (the connection broke); after 10 s a spare takes over");
    CHECK(find<Claim>(run.step(Tick{}, 109.9)) == nullptr);
    const Actions end = run.step(Tick{}, 110);
    CHECK(find<Say>(end)->text == "h3, a spare, takes the place of h1 (the connection broke)");
    CHECK(find<Claim>(end)->places == std::vector<int64_t>{0, 3, 2});
    CHECK(run.rule.place(1) == -1);
    CHECK(run.rule.place(3) == 1);
    CHECK(run.rule.own_place() == 0);
  }

  TEST_CASE("a spare that is to take a place at once does, and a smaller size waits for its own grace") {
    Gather at_once = kAgain;
    at_once.spare_after_s = 0;
    at_once.fewer_after_s = 10;
    at_once.holders = {1, 0, 0};  // h1 has the copy of h0, h0 those of h1 and h2
    SUBCASE("a spare has joined") {
      Run run = running(true, {1, 2});
      run.step(Lost{1, "power"}, 100);
      const Actions begun = run.step(at_once, 100);
      CHECK(find<Say>(begun)->text == "h3, a spare, takes the place of h1 (power)");
      CHECK(find<Claim>(begun)->places == std::vector<int64_t>{0, 3, 2});
    }
    SUBCASE("one comes while hosts are waited for") {
      Run run = running(false, {1, 2});
      run.step(Lost{1, "power"}, 100);
      CHECK(find<Say>(run.step(at_once, 100))->text ==
            "waiting up to 600 s for h1 (power); after 10 s the run continues with 2 hosts");
      run.step(AtDoor{{3}}, 104);
      CHECK(find<Claim>(run.step(Tick{}, 104))->places == std::vector<int64_t>{0, 3, 2});
    }
    SUBCASE("none comes") {
      Run run = running(false, {1, 2});
      run.step(Lost{1, "power"}, 100);
      run.step(at_once, 100);
      CHECK(run.step(Tick{}, 109.9).empty());
      CHECK_FALSE(run.rule.smaller());
      CHECK(find<GaveUp>(run.step(Tick{}, 110)) != nullptr);
      CHECK(run.rule.smaller() == 2);
    }
    SUBCASE("one spare stands in for one of two hosts") {
      Run run = running(true, {1, 2});
      run.step(Lost{1, "power"}, 100);
      run.step(Lost{2, "power"}, 100);
      CHECK(find<Claim>(run.step(at_once, 100)) == nullptr);
      run.step(AtDoor{{2}}, 104);
      CHECK(find<Claim>(run.step(Tick{}, 104))->places == std::vector<int64_t>{0, 3, 2});
    }
  }

  TEST_CASE("a spare takes at once no place whose memory may be nowhere else") {
    Gather at_once = kAgain;
    at_once.spare_after_s = 0;
    at_once.fewer_after_s = 10;
    at_once.holders = {1, 2, 0};  // h2 has the copy of h1
    Run run = running(true);
    bool hears = false;
    run.step(Heard{{{2, 100 * kSecond - 1}}}, 100);
    run.step(Lost{1, "power"}, 100);
    SUBCASE("the holder is lost too, and comes back first") {
      run.step(Lost{2, "power"}, 100);
      run.step(AtDoor{{2}}, 100);
    }
    SUBCASE("the holder was not heard since") {}
    SUBCASE("no copy is complete yet") { at_once.holders.clear(); }
    SUBCASE("copies are of another number of places") { at_once.holders = {1, 0}; }
    SUBCASE("the holder is heard") { hears = true; }
    const Actions begun = run.step(at_once, 100);
    CHECK(find<Say>(begun)->text.find("h1 (power)") != std::string::npos);
    CHECK(find<Say>(begun)->text.ends_with("; after 10 s a spare takes over"));
    CHECK(find<Claim>(begun) == nullptr);
    run.step(Heard{{{2, 100 * kSecond - 1 + hears}}}, 101);
    const Actions next = run.step(Tick{}, 101);
    REQUIRE((find<Claim>(next) != nullptr) == hears);
    if (hears) return;
    SUBCASE("its host comes back with its memory") {
      run.step(AtDoor{{1, 2}}, 109);
      CHECK(find<Claim>(run.step(Tick{}, 109))->places == std::vector<int64_t>{0, 1, 2});
    }
    SUBCASE("it does not, and the grace ends") {
      CHECK(find<Claim>(run.step(Tick{}, 109.9)) == nullptr);
      CHECK(find<Claim>(run.step(Tick{}, 110))->places == std::vector<int64_t>{0, 3, 2});
    }
  }

  TEST_CASE("a host that comes back within its grace keeps its place") {
    Run run = running(true);
    run.step(Lost{1, "the connection broke"}, 100);
    run.step(kAgain, 100);
    run.step(AtDoor{{1}}, 108);
    const Actions end = run.step(Tick{}, 108);
    CHECK(find<Claim>(end)->places == std::vector<int64_t>{0, 1, 2});
  }

  TEST_CASE("a host that leaves the door before the epoch is claimed is waited for again") {
    Run run;
    run.step(AtDoor{{1, 2}});
    CHECK(std::holds_alternative<CheckEpoch>(run.rule.step(Gather{300, 300, "start"}, kSecond).at(0)));
    run.step(AtDoor{{1}});
    CHECK(run.rule.step(Leads{}, kSecond).empty());
    CHECK(run.rule.waits().size() == 1);
  }

  TEST_CASE("no start waits for an excluded host") {
    Run run = running(true);
    SUBCASE("it had joined") { run.step(Exclude{1, "its GPU is slow"}, 100); }
    SUBCASE("it comes and is barred") {
      run.step(Lost{1, "the connection broke"}, 100);
      run.step(Barred{1}, 100);
    }
    CHECK(find<Claim>(run.step(kAgain, 100))->places == std::vector<int64_t>{0, 3, 2});
  }

  TEST_CASE("a host that was excluded and has booted is waited for like another one") {
    Run run = running(false);
    run.step(Exclude{1, "its GPU is slow"}, 100);
    CHECK(run.rule.who_is_away() == "h1 (excluded: its GPU is slow)");
    run.come(1, 200);
    run.step(Lost{1, "the connection broke"}, 300);
    CHECK(run.step(kAgain, 300).size() == 1);
    CHECK(run.rule.waits().size() == 1);
  }

  TEST_CASE("without a spare the run continues with the most hosts that it may, half of them at least") {
    Run run = running(false, {1, 2});
    run.step(Lost{1, "power"}, 100);
    const Actions begun = run.step(kAgain, 100);
    CHECK(find<Say>(begun)->text == "waiting up to 600 s for h1 (power); after 10 s the run continues with 2 hosts");
    SUBCASE("two of three have joined") {
      const Actions end = run.step(Tick{}, 110);
      CHECK(find<GaveUp>(end)->error.message == "h1 (power): the run continues with 2 hosts");
      CHECK(run.rule.smaller() == 2);
      const Actions resized = run.step(kSmaller, 111);
      CHECK(find<Claim>(resized)->places == std::vector<int64_t>{0, 2});
      CHECK(find<Claim>(resized)->reason == "2 hosts instead of 3");
      CHECK_FALSE(run.rule.smaller());
    }
    SUBCASE("one of three has joined: the others may have another leader") {
      run.step(Lost{2, "power"}, 100);
      CHECK(run.step(Tick{}, 699).empty());
      CHECK_FALSE(run.rule.smaller());
      CHECK(find<GaveUp>(run.step(Tick{}, 700))->error.code == ErrorCode::kTimeout);
    }
  }

  TEST_CASE("hosts that are at the door when a smaller size is found are let in, for what their memory holds") {
    Run run = running(false, {2});
    run.step(Lost{1, "power"}, 100);
    run.step(Lost{2, "a cut"}, 100);
    run.step(kAgain, 100);
    run.step(AtDoor{{2}}, 110);
    const Actions end = run.step(Tick{}, 110);
    CHECK(find<Admit>(end)->hosts == std::set<int64_t>{2});
    CHECK(find<GaveUp>(end) != nullptr);
  }

  TEST_CASE("a host that is lost after a size was found is waited for, then the size is found anew") {
    Run run = running(true, {2, 3});
    run.step(Lost{1, "power"}, 100);
    run.step(Lost{3, "power"}, 100);
    run.step(kAgain, 100);
    run.step(Tick{}, 110);
    CHECK(run.rule.smaller() == 2);
    SUBCASE("it comes back: the size counts all that have come") {
      run.step(Lost{2, "a switch"}, 111);
      CHECK(find<Say>(run.step(kSmaller, 111))->text == "waiting up to 600 s for h1 (power), h2 (a switch)");
      REQUIRE(run.rule.waits().size() == 2);
      CHECK(run.rule.waits()[1].what == "h2 (a switch)");
      run.step(AtDoor{{2}}, 115);
      CHECK(find<Claim>(run.step(Tick{}, 115))->places == std::vector<int64_t>{0, 2});
    }
    SUBCASE("one takes its place") {
      run.come(3, 111);
      run.step(Lost{2, "a switch"}, 111);
      CHECK(find<Claim>(run.step(kSmaller, 111))->places == std::vector<int64_t>{0, 3});
    }
    SUBCASE("none comes: fewer than half of the places have hosts") {
      run.step(Lost{2, "a switch"}, 111);
      run.step(kSmaller, 111);
      CHECK(run.step(Tick{}, 710).empty());
      CHECK(find<GaveUp>(run.step(Tick{}, 711))->error.code == ErrorCode::kTimeout);
    }
    SUBCASE("none comes: the next smaller size") {
      Run four({.places = {0, 1, 2, 3}, .fewer_after_s = 10, .epoch = 1, .leads = true});
      four.rule.allow_sizes({2, 3, 4});
      for (const int64_t host : {1, 2, 3}) four.come(host);
      four.step(Lost{1, "power"}, 100);
      four.step(Lost{2, "a switch"}, 101);
      CHECK(find<Claim>(four.step(Resize{3, kWaitS}, 101)) == nullptr);
      CHECK(four.step(Tick{}, 110).empty());
      const Actions end = four.step(Tick{}, 111);
      CHECK(find<Claim>(end)->places == std::vector<int64_t>{0, 3});
      CHECK(find<Claim>(end)->reason == "2 hosts instead of 4");
      CHECK(find<Gathered>(end) != nullptr);
      CHECK_FALSE(four.rule.smaller());
    }
  }

  TEST_CASE("a larger size whose spare was lost meanwhile leaves the places as they are") {
    Run run = running(false, {3, 4});
    const Actions end = run.step(Resize{4, kWaitS}, 100);
    CHECK(find<Claim>(end)->places == std::vector<int64_t>{0, 1, 2});
    CHECK(find<Gathered>(end) != nullptr);
  }

  TEST_CASE("a host that loses its place to a size learns it, and one that gains it follows those of before") {
    Run run = running(true, {2, 4});
    const Actions fewer = run.step(kSmaller, 100);
    CHECK(find<Rest>(fewer)->host == 2);
    CHECK(find<Claim>(fewer)->places == std::vector<int64_t>{0, 1});
    CHECK(find<Claim>(run.step(Resize{4, kWaitS}, 101))->places == std::vector<int64_t>{0, 1, 2, 3});
  }

  TEST_CASE("a larger size waits until spares have been there for a while, and for no host that is away") {
    Run run = running(false, {3, 4});
    run.come(3, 100);
    CHECK_FALSE(run.rule.larger(109 * kSecond));
    CHECK(run.rule.larger(110 * kSecond) == 4);
    run.step(Lost{1, "power"}, 111);
    CHECK_FALSE(run.rule.larger(120 * kSecond));
  }

  TEST_CASE("a host can be spared where a spare is not promised to another one, or a smaller size may train") {
    CHECK_FALSE(running(false).rule.can_spare_one());
    CHECK(running(false, {2}).rule.can_spare_one());
    Run run = running(true);
    CHECK(run.rule.can_spare_one());
    run.step(Exclude{1, "its GPU is slow"}, 100);
    CHECK_FALSE(run.rule.can_spare_one());
  }

  TEST_CASE("spares are let in while ranks run; a host with a place waits until they are stopped") {
    Run run = running(false);
    run.step(Lost{1, "a cut"}, 100);
    CHECK(find<Admit>(run.step(AtDoor{{1, 3}}, 101))->hosts == std::set<int64_t>{3});
    CHECK(find<Admit>(run.step(AtDoor{{1}}, 101)) == nullptr);
  }

  TEST_CASE("a leader that has lost more than half lets its lease stand still, once it has had time to find them") {
    Run run({.alone_s = 50, .epoch = 1, .leads = true});
    for (const int64_t host : {1, 2}) run.come(host);
    CHECK(run.step(Lost{1, "a cut"}, 10).empty());
    CHECK(run.step(Lost{2, "a cut"}, 10).empty());
    CHECK_FALSE(find<HoldLease>(run.step(Tick{}, 50))->held);
    CHECK(run.step(Tick{}, 51).empty());
    CHECK(find<HoldLease>(run.step(AtDoor{{2}}, 52))->held);
  }

  TEST_CASE("a new leader grants hosts that were not lost the time in which they find out") {
    Run run({.dead_after_s = 30, .epoch = 4, .leads = true, .led_before = 1});
    run.rule.allow_sizes({1, 2});
    run.step(Gather{600, 10, "h1, which led, is lost"}, 1);
    run.step(AtDoor{{3}}, 2);
    CHECK(find<Claim>(run.step(Tick{}, 29)) == nullptr);  // h1's grace has ended, that of h2 has not
    run.step(AtDoor{{2, 3}}, 29);
    CHECK(find<Claim>(run.step(Tick{}, 29))->places == std::vector<int64_t>{0, 3, 2});
  }

  TEST_CASE("places are those of the epoch before where it fits this start, else in order") {
    using Places = std::vector<int64_t>;
    CHECK(first_places({2, 0, 1}, 3, {}, 4, 0) == Places{2, 0, 1});
    CHECK(first_places({}, 3, {}, 4, 0) == Places{0, 1, 2});
    CHECK(first_places({2, 0}, 3, {}, 4, 0) == Places{0, 1, 2});     // another size
    CHECK(first_places({2, 0}, 3, {2, 3}, 4, 0) == Places{2, 0});    // that may train
    CHECK(first_places({2, 2, 0}, 3, {}, 4, 0) == Places{0, 1, 2});  // a host twice
    CHECK(first_places({4, 0, 1}, 3, {}, 4, 0) == Places{0, 1, 2});  // no such host
    CHECK(first_places({2, 3, 1}, 3, {}, 4, 0) == Places{0, 1, 2});  // the leader was a spare
    CHECK(first_leads({}));
    CHECK(first_leads({2, 0}));
    CHECK_FALSE(first_leads({2, 1}));
  }

  TEST_CASE("a host with a place claims the lead when the lease stands still, and a spare never does") {
    const Silence silence{.still_s = 6, .claims_after_s = 6, .has_joined = true, .place = 1, .place_in_newest = 1};
    CHECK(claims_lead(silence));
    const auto but = [&](auto change) {
      Silence one = silence;
      change(one);
      return claims_lead(one);
    };
    CHECK_FALSE(but([](Silence& one) { one.still_s = 5.9; }));
    CHECK_FALSE(but([](Silence& one) { one.has_joined = false; }));
    CHECK_FALSE(but([](Silence& one) { one.place = -1; }));
    CHECK_FALSE(but([](Silence& one) { one.place_in_newest = -1; }));
    const Silence start{.still_s = 6, .claims_after_s = 6, .place_in_newest = 1, .starts = true};
    CHECK(claims_lead(start));
    CHECK_FALSE(claims_lead({.still_s = 6, .claims_after_s = 6, .place_in_newest = -1, .starts = true}));
    CHECK(claims_after_s(3, 0.25, 0) == 4.5);
    CHECK(claims_after_s(0.1, 0.25, 0) == 1);
    CHECK(claims_after_s(3, 0.25, 30) == 30);
  }
}
