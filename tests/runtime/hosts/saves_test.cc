// The rule of saves, transition by transition; tests/sim shows what all hosts together make of it.
#include "runtime/hosts/saves.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

using namespace cairn;
using namespace cairn::hosts;
using namespace cairn::hosts::saves;

namespace {

constexpr int64_t kSecond = 1'000'000'000;

template <typename One>
const One& only(const Actions& actions) {
  REQUIRE(actions.size() == 1);
  REQUIRE(std::holds_alternative<One>(actions[0]));
  return std::get<One>(actions[0]);
}

template <typename Word>
const Word& word(const Action& action) {
  REQUIRE(std::holds_alternative<Tell>(action));
  REQUIRE(std::holds_alternative<Word>(std::get<Tell>(action).what));
  return std::get<Word>(std::get<Tell>(action).what);
}

/// With h1 and h2; time stands still unless a test says so.
struct LeaderOfTwo {
  LeaderOfTwo() { CHECK(step(SetHosts{{{1, "h1"}, {2, "h2"}}, 7}).empty()); }
  Actions step(const LeaderEvent& event, double at_s = 1) {
    return rule.step(event, static_cast<int64_t>(at_s * kSecond));
  }
  /// Up to the own part.
  void until_written(const Try& of, double at_s = 1) {
    CHECK(only<MakeFolder>(step(Ask{of.step}, at_s)).of == of);
    CHECK(step(FolderMade{of, "tmp"}, at_s).size() == 2);
    CHECK(step(PartWritten{of}, at_s).empty());
  }
  Actions hear(int64_t host, Message what) { return step(Heard{host, std::move(what)}); }
  saves::Leader rule;
};

struct MemberOne {
  Actions step(const MemberEvent& event, double at_s = 1) {
    return rule.step(event, static_cast<int64_t>(at_s * kSecond));
  }
  void until_written(const Try& of) {
    CHECK(step(Told{hosts::Save{of.step, of.number, "tmp", {}}}).empty());
    CHECK(step(Ask{of.step}).size() == 2);
    const Actions written = step(PartWritten{of});
    REQUIRE(written.size() == 1);
    CHECK(word<Written>(written[0]).step == of.step);
  }
  saves::Member rule{1};
};

}  // namespace

TEST_SUITE("runtime/hosts/saves") {
  TEST_CASE("the leader orders a step, waits for every part, and reports the name") {
    LeaderOfTwo leader;
    const Try of{5, 1};
    CHECK(only<MakeFolder>(leader.step(Ask{5})).of == of);
    CHECK(leader.rule.phase(of) == Phase::kSave);
    const Actions ordered = leader.step(FolderMade{of, "tmp"});
    REQUIRE(ordered.size() == 2);
    CHECK(word<hosts::Save>(ordered[0]).folder == "tmp");
    CHECK(std::get<WriteParts>(ordered[1]).of == of);
    CHECK(leader.rule.phase(of) == Phase::kBegun);
    CHECK(leader.hear(1, Begun{5, 1}).empty());
    CHECK(leader.hear(1, Written{5, 1}).empty());
    CHECK(leader.step(PartWritten{of}).empty());
    CHECK(leader.rule.phase(of) == Phase::kWritten);
    CHECK(leader.rule.waits_for(5) == "h2 (has not begun)");
    CHECK(leader.hear(2, Written{5, 2}).empty());  // of another try
    const Actions all = leader.hear(2, Written{5, 1});
    CHECK(only<Commit>(all).parts.size() == 2);
    CHECK(only<Commit>(all).epoch == 7);
    CHECK(leader.rule.phase(of) == Phase::kCommitted);
    const Actions named = leader.step(Named{of});
    REQUIRE(named.size() == 2);
    CHECK(word<Committed>(named[0]).number == 1);
    CHECK_FALSE(std::get<Leave>(named[1]).error);
    CHECK_FALSE(leader.rule.current(5));
  }

  TEST_CASE("every wait of the leader has a name and ends at its deadline") {
    LeaderOfTwo leader;
    CHECK(leader.step(Lost{2, "silent"}).empty());
    CHECK(leader.step(Ask{5}, 10).empty());
    REQUIRE(leader.rule.waits().size() == 1);
    CHECK(leader.rule.waits()[0].what == "h2 to be back");
    CHECK(leader.rule.waits()[0].until_ns == 670 * kSecond);
    CHECK(leader.step(Tick{}, 669).empty());
    CHECK(only<Leave>(leader.step(Tick{}, 670)).error->message == "h2 has been away for 660 s");

    leader.step(Back{2});
    leader.until_written({5, 2}, 1000);
    leader.hear(1, Begun{5, 2});
    REQUIRE(leader.rule.waits().size() == 2);
    CHECK(leader.rule.waits()[0].what == "h1 to write its part");
    CHECK(leader.rule.waits()[0].until_ns == 1600 * kSecond);
    CHECK(leader.rule.waits()[1].what == "h2 to begin");
    CHECK(leader.rule.waits()[1].until_ns == 1180 * kSecond);
    CHECK(leader.step(Tick{}, 1179).empty());
    CHECK(only<Abandon>(leader.step(Tick{}, 1180)).error.message == "h2 has not begun in 180 s");
    CHECK(leader.rule.waits().empty());
    const Actions failed = leader.step(saves::Failed{{5, 2}, {ErrorCode::kTimeout, "late"}});
    REQUIRE(failed.size() == 2);
    CHECK(word<Dropped>(failed[0]).number == 2);
  }

  TEST_CASE("a step that a persister already saves is refused to a second one") {
    LeaderOfTwo leader;
    leader.until_written({5, 1});
    CHECK(only<Leave>(leader.step(Ask{5})).error->message == "step 5 is being saved already");
    CHECK(leader.rule.current(5) == Try{5, 1});

    MemberOne member;
    member.until_written({5, 1});
    member.step(Told{hosts::Save{5, 2, "next", {}}});
    CHECK_FALSE(member.rule.is_due(5));  // until the try of before has ended
    CHECK(only<Leave>(member.step(Ask{5})).of == Try{5, 0});
    CHECK(only<Leave>(member.step(Told{Dropped{5, 1, {ErrorCode::kIo, "no"}}})).error->message == "no");
    CHECK(member.rule.is_due(5));
    CHECK(std::get<WriteParts>(member.step(Ask{5})[1]).folder == "next");
  }

  TEST_CASE("a member waits for the leader's word no longer than twice as long as the leader for hosts") {
    MemberOne member;
    member.until_written({5, 1});
    REQUIRE(member.rule.waits().size() == 1);
    CHECK(member.rule.waits()[0].what == "the leader to commit");
    CHECK(member.rule.waits()[0].until_ns == 1201 * kSecond);
    CHECK(member.step(Told{Committed{5, 2}}, 2).empty());  // of another try
    CHECK(member.step(Tick{}, 1200).empty());
    CHECK(only<Leave>(member.step(Tick{}, 1201)).error->code == ErrorCode::kTimeout);
  }

  TEST_CASE("a member keeps silent about a try whose leader is lost, since the next leader's may have its number") {
    const Try of{5, 1};
    for (const bool fails : {false, true}) {
      MemberOne member;
      member.step(Told{hosts::Save{5, 1, "first", {}}});
      CHECK(member.step(Ask{5}).size() == 2);
      CHECK(member.step(LeaderLost{"reset"}).empty());
      CHECK(member.step(Told{hosts::Save{5, 1, "second", {}}}).empty());
      CHECK(member.step(Told{Dropped{5, 1, {ErrorCode::kIo, "of the second"}}}).empty());
      const Actions ended = member.step(fails ? MemberEvent(saves::Failed{of, {ErrorCode::kIo, "no such folder"}})
                                              : MemberEvent(PartWritten{of}));
      CHECK(only<Leave>(ended).error->message == (fails ? "no such folder" : "the leader was lost: reset"));
      CHECK(member.rule.phase(of) == Phase::kDropped);
      CHECK(only<Leave>(member.step(Ask{5})).error->message == "of the second");
    }
    MemberOne holder;
    const hosts::Ward ward{2, 1, {0, 3, 5}};
    CHECK(only<saves::WriteWard>(holder.step(Told{hosts::Save{5, 1, "first", {ward}}})).ward == ward);
    holder.step(LeaderLost{"reset"});
    CHECK(holder.step(WardWritten{of, 2}).empty());
  }

  TEST_CASE("an event that no order asked for is our own mistake, and a stranger's word is none") {
    LeaderOfTwo leader;
    CHECK(leader.hear(9, Written{5, 1}).empty());
    CHECK(leader.hear(1, NotWritten{.step = 5, .number = 1, .error = {ErrorCode::kIo, "no"}}).empty());
    CHECK(leader.step(saves::Failed{{5, 1}, {ErrorCode::kIo, "no"}}).empty());
    MemberOne member;
    CHECK(member.step(Told{Committed{5, 1}}).empty());
    CHECK(member.step(Told{Dropped{5, 1, {ErrorCode::kIo, "no"}}}).empty());
    CHECK_FALSE(member.rule.is_due(5));
  }
}
