#include "tools/run/folder/guard.h"

#include <doctest/doctest.h>

#include "tests/runtime/data/scratch.h"
#include "tools/run/folder/folder.h"

using namespace cairn;
using namespace cairn::data;
using namespace cairn::tools;

namespace {

constexpr int64_t kBatch = 10;

WatchConfig watch_of(std::vector<GuardAction> on_divergence) {
  WatchConfig out{.window = 32, .on_divergence = std::move(on_divergence)};
  out.roll_back = {.at_most = 3, .within = 1000, .lead = 4};
  return out;
}

Result<int64_t> begin_of(int64_t step) { return (step - 1) * kBatch; }

GuardDecision decided(const WatchConfig& watch, const Trouble& trouble, const std::vector<RollBack>& past,
                      const std::vector<int64_t>& good) {
  return decide(watch, trouble, past, good, begin_of).value();
}

const std::vector<GuardAction> kBoth{GuardAction::kRollBack, GuardAction::kStop};

}  // namespace

TEST_SUITE("tools/run/guard") {
  TEST_CASE("each try at a place goes to an older good checkpoint and skips more, until no try is left") {
    const WatchConfig watch = watch_of(kBoth);
    const Trouble trouble{.onset = 150, .step = 153, .why = "it diverges"};
    const std::vector<int64_t> good{80, 100, 120, 140, 152};
    std::vector<RollBack> past;
    // From step max(to + 1, 150 - 4 * 2^(n-1)) up to step 153 and 4 * (2^(n-1) - 1) steps behind it.
    const int64_t to[] = {140, 120, 100}, first[] = {146, 142, 134}, last[] = {153, 157, 165};
    for (int64_t k = 0; k < 3; ++k) {
      const GuardDecision next = decided(watch, trouble, past, good);
      REQUIRE(next.action == GuardAction::kRollBack);
      CHECK(next.roll_back == RollBack{.to_step = to[k],
                                       .onset = 150,
                                       .step = 153,
                                       .number = k + 1,
                                       .skip = {(first[k] - 1) * kBatch, last[k] * kBatch - 1},
                                       .why = "it diverges"});
      past.push_back(next.roll_back);
    }
    const GuardDecision end = decided(watch, trouble, past, good);
    CHECK(end.action == GuardAction::kStop);
    CHECK(says(end.no_way_back, {"3 times", "1000 steps"}));
    CHECK(!decided(watch_of({GuardAction::kRollBack}), trouble, past, good).action);
    // Elsewhere in the run the place is new, and later there are tries again.
    const Trouble elsewhere{.onset = 900, .step = 903, .why = ""};
    past.resize(2);
    CHECK(decided(watch, elsewhere, past, good).roll_back.number == 1);
    CHECK(decided(watch, elsewhere, past, good).roll_back.to_step == 152);
    past.resize(3, past.front());
    CHECK(decided(watch, elsewhere, past, good).action == GuardAction::kStop);
    CHECK(decided(watch, {.onset = 1153, .step = 1153, .why = ""}, past, good).action == GuardAction::kRollBack);
  }

  TEST_CASE("the oldest good checkpoint serves further tries; without one the next action counts") {
    const Trouble trouble{.onset = 40, .step = 41, .why = ""};
    const WatchConfig watch = watch_of(kBoth);
    const GuardDecision first = decided(watch, trouble, {}, {30, 40});
    CHECK(first.roll_back.to_step == 30);
    CHECK(first.roll_back.skip == PositionRange{350, 409});
    const GuardDecision second = decided(watch, trouble, {first.roll_back}, {30});
    CHECK(second.roll_back.to_step == 30);
    CHECK(second.roll_back.skip == PositionRange{310, 449});  // from step 32 on
    const GuardDecision none = decided(watch, trouble, {}, {40, 50});
    CHECK(none.action == GuardAction::kStop);
    CHECK(says(none.no_way_back, {"no good checkpoint", "step 40"}));
  }

  TEST_CASE("each kind of trouble has its own list; without one a warning is all") {
    WatchConfig watch = watch_of({GuardAction::kStop});
    watch.on_not_finite = {GuardAction::kRollBack};
    const std::vector<int64_t> good{5};
    CHECK(decided(watch, {.kind = Trouble::Kind::kDivergence, .onset = 9, .step = 9}, {}, good).action ==
          GuardAction::kStop);
    CHECK(!decided(watch, {.kind = Trouble::Kind::kDrop, .onset = 9, .step = 9}, {}, good).action);
    const GuardDecision ruined = decided(watch, {.kind = Trouble::Kind::kNotFinite, .onset = 9, .step = 9}, {}, good);
    CHECK(ruined.action == GuardAction::kRollBack);
    CHECK(ruined.roll_back.skip == PositionRange{50, 89});  // behind the checkpoint
  }

  TEST_CASE("the rate is lowered as often as the recipe allows, then the next action counts") {
    WatchConfig watch = watch_of({GuardAction::kLowerLr, GuardAction::kStop});
    watch.lower_lr = {.by = 0.3, .over = 20, .back = 10, .at_most = 2, .within = 100};
    const auto decide_with = [&](int64_t step, const std::vector<Lowering>& lowered) {
      return decide(watch, {.onset = step - 2, .step = step, .why = "it diverges"}, {}, {}, begin_of, lowered).value();
    };
    const GuardDecision first = decide_with(50, {});
    CHECK(first.action == GuardAction::kLowerLr);
    CHECK(first.lowering == Lowering{.by = 0.3, .over = 20, .back = 10, .onset = 48, .step = 50, .why = "it diverges"});
    const Lowering by_hand{.by = 0.5, .over = 5, .why = "by hand"};
    CHECK(decide_with(90, {first.lowering, by_hand}).action == GuardAction::kLowerLr);
    const GuardDecision end = decide_with(90, {first.lowering, first.lowering});
    CHECK(end.action == GuardAction::kStop);
    CHECK(says(end.not_lowered, {"2 times", "100 steps"}));
    CHECK(decide_with(150, {first.lowering, first.lowering}).action == GuardAction::kLowerLr);
  }

  TEST_CASE("an error of the machine goes back to the newest good checkpoint that it cannot be in, and skips nothing") {
    WatchConfig watch = watch_of({});
    watch.on_sdc = kBoth;
    const Trouble trouble{.kind = Trouble::Kind::kMachine, .onset = 101, .step = 120, .why = "replicas differ"};
    const std::vector<int64_t> good{60, 80, 100, 110};
    std::vector<RollBack> past;
    for (int64_t k = 0; k < 3; ++k) {
      const GuardDecision next = decided(watch, trouble, past, good);
      REQUIRE(next.action == GuardAction::kRollBack);
      CHECK(next.roll_back ==
            RollBack{.to_step = 100, .onset = 101, .step = 120, .number = k + 1, .why = "replicas differ"});
      CHECK(!next.roll_back.leaves_out());
      CHECK(roll_back_from(to_json(next.roll_back)) == next.roll_back);
      past.push_back(next.roll_back);
    }
    CHECK(decided(watch, trouble, past, good).action == GuardAction::kStop);
    CHECK(decided(watch, trouble, {}, {110}).action == GuardAction::kStop);
    // It is no try at the place of samples in trouble.
    watch.on_divergence = kBoth;
    CHECK(decided(watch, {.onset = 120, .step = 121, .why = ""}, {past[0]}, good).roll_back.number == 1);
  }

  TEST_CASE("tries at steps that a roll back has undone count, too") {
    const WatchConfig watch = watch_of(kBoth);
    const std::vector<RollBack> past(3, {.step = 200, .skip = {1900, 1999}});
    CHECK(decided(watch, {.onset = 150, .step = 150, .why = ""}, past, {100}).action == GuardAction::kStop);
    CHECK(decided(watch, {.onset = 1200, .step = 1200, .why = ""}, past, {100}).action == GuardAction::kRollBack);
    WatchConfig lowers = watch_of({GuardAction::kLowerLr, GuardAction::kStop});
    lowers.lower_lr = {.by = 0.5, .over = 5, .back = 5, .at_most = 1, .within = 100};
    const Lowering later{.by = 0.5, .over = 5, .back = 5, .onset = 198, .step = 200, .why = ""};
    CHECK(
        decide(lowers, {.onset = 150, .step = 150, .why = ""}, {}, {}, begin_of, std::span(&later, 1)).value().action ==
        GuardAction::kStop);
  }

  TEST_CASE("a decision that is not carried out is read back, and a damaged file is refused with what to do") {
    const TempDir run;
    CHECK(!pending_roll_back(run / ".").value());
    const RollBack back{.to_step = 3, .onset = 5, .step = 8, .number = 2, .skip = {30, 79}, .why = "no \"number\""};
    REQUIRE(write_pending(run / ".", back).ok());
    CHECK(pending_roll_back(run / ".").value() == back);
    for (const char* text :
         {"", "{}", "[1]", R"({"to_step":1,"onset":2,"step":3,"number":1,"skip":"4..1","why":""})"}) {
      REQUIRE(write_text_file(run / "rolling_back.json", text).ok());
      const auto read = pending_roll_back(run / ".");
      REQUIRE(!read.ok());
      CHECK(read.error().code == ErrorCode::kCorrupt);
      CHECK(says(read.error().message, {"rolling_back.json", "--from-step"}));
    }
    CHECK(!pending_lowering(run / ".").value());
    const Lowering lowering{.by = 0.5, .over = 7, .back = 0, .onset = 3, .step = 4, .why = "so"};
    REQUIRE(write_pending(run / ".", lowering).ok());
    CHECK(pending_lowering(run / ".").value() == lowering);
    REQUIRE(remove_pending(run / ".").ok());
    REQUIRE(remove_pending(run / ".").ok());
    CHECK(!pending_lowering(run / ".").value());
    CHECK(!pending_roll_back(run / ".").value());
  }
}
