// Walks every interleaving of three ranks that train, rank 0's decisions, a persister, kills of the ranks and of the
// agent, with two, three and four slots.
#include "ckpt/snapshot/slot_rule.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

using namespace cairn::ckpt;

namespace {

constexpr int kRanks = 3, kMostSlots = 4, kMaxSteps = 4, kMaxKills = 2;

enum class Phase : int8_t { kIdle, kOrdered, kWriting, kWritten };  // of a rank in a step
enum class Decision : int8_t { kNone, kGoOn, kPublish };

struct World {
  std::array<std::array<SlotMark, kRanks>, kMostSlots> marks{};  // by slot
  std::array<int8_t, kMostSlots> reserved{};                     // the step to be persisted; 0: free
  std::array<bool, kMostSlots> reading{};                        // the slots that the persister reads
  std::array<Phase, kRanks> phase{};
  Decision decision = Decision::kNone;  // of rank 0 on the step that is written
  int8_t chosen = -1;                   // for the next update
  int8_t current = 0, published = -1;   // as the ranks know them
  int8_t incarnation = 1, step = 0, steps = 0, kills = 0;
  bool over = false;     // the last step is done
  int8_t promise = 0;    // the step that must be restorable, or a later one
  int8_t given_up = -1;  // the slot that rank 0 gave up keeping

  std::string key() const {
    std::string out;
    for (const auto& slot : marks) {
      for (const SlotMark& mark : slot) {
        out += static_cast<char>(mark.phase);
        out += static_cast<char>(mark.incarnation);
        out += static_cast<char>(mark.step);
      }
    }
    for (const int8_t step_reserved : reserved) out += static_cast<char>(step_reserved);
    for (const Phase p : phase) out += static_cast<char>(p);
    for (const bool read : reading) out += static_cast<char>(read);
    for (const int8_t number : {static_cast<int8_t>(decision), chosen, current, published, incarnation, step, steps,
                                kills, static_cast<int8_t>(over), promise, given_up}) {
      out += static_cast<char>(number);
    }
    return out;
  }
};

struct Rule {
  std::function<SlotView(std::span<const SlotMark>, bool)> view = view_of;
  std::function<std::optional<int64_t>(std::span<const SlotView>, int64_t)> choose = choose_slot;
  bool collective = true;  // between publishing and the next update
  bool stay = false;       // in a published slot: always in place
  bool careless = false;   // gives up waiting also when the current slot is promised to the persister
  int8_t spare = 2;        // slots that reservations leave to training, when there are three
};

struct Walk {
  int64_t states = 0, reads = 0, most_readers = 0, in_place = 0, waits = 0;
  std::string violation;  // the first one
};

Walk explore(int slots, const Rule& rule = {}, int kills = kMaxKills) {
  Walk walk;
  std::unordered_set<std::string> seen;
  std::deque<World> open;
  const auto truly_whole = [](const World& w, int slot) { return view_of(w.marks[slot], false).whole; };
  const auto newest_step = [&](const World& w, int without = -1) {
    std::vector<SlotView> views;
    for (int slot = 0; slot < slots; ++slot)
      views.push_back(slot == without ? SlotView{} : view_of(w.marks[slot], false));
    const auto newest = newest_whole(views);
    return static_cast<int8_t>(newest ? views[*newest].step : 0);
  };
  const auto visit = [&](World w, const char* action) {
    const int8_t restorable = newest_step(w);
    if (walk.violation.empty() && restorable < w.promise)
      walk.violation = "step " + std::to_string(w.promise) + " is lost after " + action;
    for (int slot = 0; slot < slots; ++slot) {
      if (walk.violation.empty() && w.reading[slot] && !truly_whole(w, slot))
        walk.violation = std::string("a slot is written while it is persisted, after ") + action;
    }
    w.promise = std::max(w.promise, newest_step(w, w.given_up));
    if (seen.insert(w.key()).second) open.push_back(w);
  };
  visit(World{}, "the start");
  while (!open.empty() && walk.violation.empty()) {
    const World w = open.front();
    open.pop_front();
    ++walk.states;
    const auto views = [&] {
      std::vector<SlotView> out;
      for (int slot = 0; slot < slots; ++slot) out.push_back(rule.view(w.marks[slot], w.reserved[slot] != 0));
      return out;
    };
    // Rank 0 chooses when it has finished its own part of the step before; the others may lag behind.
    if (w.phase[0] == Phase::kIdle && w.chosen < 0 && w.steps < kMaxSteps && !w.over) {
      World next = w;
      if (w.current != w.published || rule.stay) {
        next.chosen = w.current;
        ++walk.in_place;
        visit(next, "a choice in place");
      } else if (const auto slot = rule.choose(views(), w.current)) {
        next.chosen = static_cast<int8_t>(*slot);
        visit(next, "a choice");
      } else if (++walk.waits; w.reserved[w.current] == 0 || rule.careless) {
        // It waits, or gives up waiting, which costs the newest step, and no more than it.
        next.chosen = w.current;
        next.published = -1;
        next.given_up = w.current;
        next.promise = newest_step(w, w.current);
        if (next.promise == 0) walk.violation = "nothing else is whole where rank 0 gives up waiting";
        visit(next, "giving up the wait");
      }
    }
    const bool all_idle = std::all_of(w.phase.begin(), w.phase.end(), [](Phase p) { return p == Phase::kIdle; });
    if (w.chosen >= 0 && (all_idle || (!rule.collective && w.phase[0] == Phase::kIdle))) {
      World next = w;
      next.phase.fill(Phase::kOrdered);  // without the collective, a rank that lags leaves its publishing out
      next.current = w.chosen;
      next.chosen = -1;
      next.decision = Decision::kNone;
      ++next.step;
      ++next.steps;
      visit(next, "the collective");
    }
    for (int r = 0; r < kRanks; ++r) {
      World next = w;
      SlotMark& mark = next.marks[w.current][r];
      const SlotMark written{SlotPhase::kWriting, static_cast<uint64_t>(w.incarnation), w.step};
      if (w.phase[r] == Phase::kOrdered) {
        mark = written;
        next.phase[r] = Phase::kWriting;
        visit(next, "the begin of an update");
      } else if (w.phase[r] == Phase::kWriting) {
        next.phase[r] = Phase::kWritten;
        visit(next, "the end of an update");
      } else if (w.phase[r] == Phase::kWritten && w.decision != Decision::kNone) {
        if (w.decision == Decision::kPublish) {
          mark = written;
          mark.phase = SlotPhase::kWhole;
          if (r == 0) next.published = w.current;
          if (r == 0) next.given_up = -1;
        }
        next.phase[r] = Phase::kIdle;
        visit(next, "publishing");
      }
    }
    if (w.phase[0] == Phase::kWritten && w.decision == Decision::kNone) {
      World next = w;
      next.decision = Decision::kGoOn;  // a step that is no snapshot
      visit(next, "a decision");
      next.decision = Decision::kPublish;
      visit(next, "a decision");
      next.reserved[w.current] = w.step;
      const auto taken = std::count_if(w.reserved.begin(), w.reserved.end(), [](int8_t step) { return step != 0; });
      if (taken < std::max(1, slots - rule.spare)) visit(next, "a save");
      next.over = true;  // the last step is always saved
      visit(next, "the last save");
    }
    const auto readers = std::count(w.reading.begin(), w.reading.end(), true);
    walk.most_readers = std::max<int64_t>(walk.most_readers, readers);
    const std::vector<SlotView> seen_by_agent = views();
    for (int slot = 0; slot < slots; ++slot) {
      World next = w;
      if (w.reading[slot]) {
        next.reserved[slot] = 0;
        next.reading[slot] = false;
        visit(next, "a persist");
      } else if (readers < std::max(1, slots - 2) && w.reserved[slot] != 0 && seen_by_agent[slot].whole &&
                 seen_by_agent[slot].step == w.reserved[slot]) {
        next.reading[slot] = true;
        ++walk.reads;
        visit(next, "the begin of a persist");
      }
    }
    // One rank's death is a rank that never acts again until all are killed, so killing all at any instant covers it.
    if (w.kills < kills) {
      for (const bool agent_too : {false, true}) {
        World next = w;
        ++next.kills;
        ++next.incarnation;
        next.phase.fill(Phase::kIdle);
        next.decision = Decision::kNone;
        next.chosen = -1;
        next.over = false;
        next.given_up = -1;
        if (agent_too) next.reading = {};  // its successor finds the promise
        std::vector<SlotView> left;
        for (int slot = 0; slot < slots; ++slot) {
          left.push_back(view_of(w.marks[slot], false));
          if (!left.back().whole) next.reserved[slot] = 0;
        }
        const auto newest = newest_whole(left);
        next.step = static_cast<int8_t>(newest ? left[*newest].step : 0);  // and train those steps again
        next.current = next.published = static_cast<int8_t>(newest.value_or(0));
        if (!newest) {
          next.published = -1;
          next.marks = {};
        }
        visit(next, agent_too ? "a kill of everything" : "a kill of the ranks");
      }
    }
  }
  return walk;
}

// --- copies: a step ends on a rank, and its copy later -------------------------------------------------------------

constexpr int kCopySteps = 5;

/// Ranks that copy. A rank in step s: trains, has updated (its copy of s - 1 is done by then, or is not published yet),
/// and after rank 0's order begins its copy of s, for which that of s - 1 must be published.
struct Copying {
  std::array<std::array<SlotMark, kRanks>, kMostSlots> marks{};
  std::array<int8_t, kMostSlots> reserved{};
  std::array<bool, kMostSlots> reading{};
  std::array<int8_t, kRanks> step{};     // that the rank has completed: its copy is ordered
  std::array<bool, kRanks> updated{};    // and its update of the next one is done
  std::array<int8_t, kRanks> copying{};  // slot that its copy is on the way to; -1: none
  int8_t ordered = -1, order_step = 0;   // rank 0's choice for order_step; -2: left out
  int8_t last = -1;                      // slot of the last copy that was ordered
  int8_t incarnation = 1, steps = 0, kills = 0, promise = 0;

  std::string key() const {
    std::string out;
    for (const auto& slot : marks) {
      for (const SlotMark& mark : slot) {
        out += static_cast<char>(mark.phase);
        out += static_cast<char>(mark.incarnation);
        out += static_cast<char>(mark.step);
      }
    }
    for (int slot = 0; slot < kMostSlots; ++slot) {
      out += static_cast<char>(reserved[slot]);
      out += static_cast<char>(reading[slot]);
    }
    for (int r = 0; r < kRanks; ++r) {
      out += static_cast<char>(step[r]);
      out += static_cast<char>(updated[r]);
      out += static_cast<char>(copying[r]);
    }
    for (const int8_t number : {ordered, order_step, last, incarnation, steps, kills, promise}) {
      out += static_cast<char>(number);
    }
    return out;
  }
};

struct CopyRule {
  std::function<std::optional<int64_t>(std::span<const SlotView>, int64_t)> choose = choose_slot_for_copy;
  bool finishes = true;  // a rank begins a copy when the one before is published
};

Walk explore_copies(int slots, const CopyRule& rule = {}, int kills = kMaxKills) {
  Walk walk;
  std::unordered_set<std::string> seen;
  std::deque<Copying> open;
  const auto views_of = [&](const Copying& w) {
    std::vector<SlotView> out;
    for (int slot = 0; slot < slots; ++slot) out.push_back(view_of(w.marks[slot], w.reserved[slot] != 0));
    return out;
  };
  const auto newest_step = [&](const Copying& w) {
    const auto views = views_of(w);
    const auto newest = newest_whole(views);
    return static_cast<int8_t>(newest ? views[*newest].step : 0);
  };
  const auto visit = [&](Copying w, const char* action) {
    const int8_t newest = newest_step(w);
    if (walk.violation.empty() && newest < w.promise)
      walk.violation = "step " + std::to_string(w.promise) + " is lost after " + action;
    for (int slot = 0; slot < slots; ++slot) {
      if (walk.violation.empty() && w.reading[slot] && !view_of(w.marks[slot], false).whole)
        walk.violation = std::string("a slot is written while it is persisted, after ") + action;
    }
    if (slots > 1) w.promise = std::max(w.promise, newest);  // the only one is overwritten
    if (slots > 2) {                                         // with two, saves leave copies out
      const int8_t completed = *std::min_element(w.step.begin(), w.step.end());
      if (walk.violation.empty() && newest + 1 < completed)
        walk.violation = "all have completed step " + std::to_string(completed) + " after " + action;
    }
    if (seen.insert(w.key()).second) open.push_back(w);
  };
  visit(Copying{.copying = {-1, -1, -1}}, "the start");
  while (!open.empty() && walk.violation.empty()) {
    const Copying w = open.front();
    open.pop_front();
    ++walk.states;
    for (int r = 0; r < kRanks; ++r) {
      // The gradients' collective: nobody updates step s + 1 before all have begun their copies of s, if one is
      // ordered.
      const bool all_here = std::all_of(w.step.begin(), w.step.end(), [&](int8_t s) { return s >= w.step[r]; });
      if (!w.updated[r] && all_here && w.step[r] < kCopySteps) {
        Copying next = w;
        next.updated[r] = true;
        visit(next, "an update");
      }
      if (w.copying[r] >= 0) {  // the copier's thread, at any time
        Copying next = w;
        next.marks[w.copying[r]][r].phase = SlotPhase::kWhole;
        next.copying[r] = -1;
        visit(next, "publishing");
      }
      const bool ordered = w.ordered != -1 && w.order_step == w.step[r] + 1;
      if (w.updated[r] && ordered && (w.copying[r] < 0 || !rule.finishes)) {
        Copying next = w;
        next.updated[r] = false;
        ++next.step[r];
        if (w.ordered >= 0) {
          next.marks[w.ordered][r] = {SlotPhase::kWriting, static_cast<uint64_t>(w.incarnation), next.step[r]};
          next.copying[r] = w.ordered;
        }
        visit(next, "the begin of a copy");
      }
    }
    // Rank 0 decides when its own last copy is published; the others may lag behind by that step.
    if (w.updated[0] && w.order_step == w.step[0] && (w.copying[0] < 0 || !rule.finishes)) {
      const std::vector<SlotView> views = views_of(w);
      const auto slot = rule.choose(views, w.last);
      for (const bool save : {false, true}) {
        Copying next = w;
        ++next.order_step;
        if (slot) {
          const auto taken = std::count_if(w.reserved.begin(), w.reserved.end(), [](int8_t s) { return s != 0; });
          if (save && taken >= std::max(1, slots - 2)) continue;
          next.ordered = next.last = static_cast<int8_t>(*slot);
          next.marks[*slot][0] = {SlotPhase::kWriting, static_cast<uint64_t>(w.incarnation), next.order_step};
          if (save) next.reserved[*slot] = next.order_step;
        } else if (++walk.waits; !save && w.last >= 0 && views[w.last].whole) {
          next.ordered = -2;
        } else {
          continue;  // it waits for the others' copies
        }
        visit(next, "an order");
      }
    }
    for (int slot = 0; slot < slots; ++slot) {
      Copying next = w;
      const SlotView view = view_of(w.marks[slot], false);
      if (w.reading[slot]) {
        next.reserved[slot] = 0;
        next.reading[slot] = false;
        visit(next, "a persist");
      } else if (w.reserved[slot] != 0 && view.whole && view.step == w.reserved[slot]) {
        next.reading[slot] = true;
        ++walk.reads;
        visit(next, "the begin of a persist");
      }
    }
    if (w.kills < kills) {
      Copying next = w;
      ++next.kills;
      ++next.incarnation;
      next.updated = {};
      next.copying.fill(-1);
      next.ordered = -1;
      for (int slot = 0; slot < slots; ++slot) {
        const SlotView view = view_of(w.marks[slot], false);
        if (!view.whole || view.step != w.reserved[slot]) next.reserved[slot] = 0;
      }
      const auto newest = newest_whole(views_of(w));
      next.step.fill(newest_step(w));
      next.order_step = next.step[0];
      next.last = static_cast<int8_t>(newest ? *newest : -1);
      if (!newest) next.marks = {};
      visit(next, "a kill");
    }
  }
  return walk;
}

}  // namespace

TEST_SUITE("ckpt/snapshot/slot_rule") {
  TEST_CASE("whatever is killed when: the last step that all published is restorable, and none is written while read") {
    for (const int slots : {2, 3}) {
      const Walk walk = explore(slots);
      CHECK_MESSAGE(walk.violation.empty(), walk.violation);
      MESSAGE(slots << " slots: " << walk.states << " states, " << walk.reads << " persists begun, " << walk.in_place
                    << " choices in place, " << walk.waits << " waits");
      CHECK(walk.states > 10000);
      CHECK(walk.reads > 100);
      CHECK(walk.in_place > 100);
    }
    const Walk four = explore(4, {}, 1);  // two saves in flight
    CHECK_MESSAGE(four.violation.empty(), four.violation);
    CHECK(four.most_readers == 2);
    MESSAGE("4 slots: " << four.states << " states, " << four.reads << " persists begun");
    CHECK(explore(2, {}, 0).waits > 0);
    CHECK(explore(3, {}, 0).waits == 0);  // with three, no update waits for the disk but after a kill in the last save
  }

  TEST_CASE("the walk bites: each part of the rule is needed") {
    for (const int slots : {2, 3}) {
      const auto worse = [](const SlotView& a, const SlotView& b) {
        return std::tuple(a.whole, a.incarnation, a.step) < std::tuple(b.whole, b.incarnation, b.step);
      };
      Rule reserved;  // takes slots that are promised to the persister
      reserved.choose = [&](std::span<const SlotView> views, int64_t current) {
        std::optional<int64_t> best;
        for (int64_t k = 0; k < std::ssize(views); ++k) {
          if (k != current && (!best || worse(views[k], views[*best]))) best = k;
        }
        return best;
      };
      CHECK(explore(slots, reserved).violation.starts_with("a slot is written while it is persisted"));
      Rule newest;  // overwrites the step that was just published
      newest.choose = [&](std::span<const SlotView>, int64_t current) { return std::optional<int64_t>(current); };
      CHECK(explore(slots, newest).violation.ends_with("after the begin of an update"));
      Rule stay;
      stay.stay = true;
      CHECK(explore(slots, stay).violation.ends_with("after the begin of an update"));
      Rule careless;
      careless.careless = true;
      CHECK(explore(slots, careless).violation.starts_with("a slot is written while it is persisted"));
      Rule alone;  // rank 0 does not wait for the others
      alone.collective = false;
      CHECK_FALSE(explore(slots, alone).violation.empty());
      Rule blind;  // to incarnations: parts of two lives of a step pass for one snapshot
      blind.view = [](std::span<const SlotMark> marks, bool is_reserved) {
        std::vector<SlotMark> same(marks.begin(), marks.end());
        for (SlotMark& mark : same) mark.incarnation = 1;
        return view_of(same, is_reserved);
      };
      CHECK_FALSE(explore(slots, blind).violation.empty());
    }
    Rule greedy;  // reserves the slot that the update needs
    greedy.spare = 1;
    CHECK(explore(3, greedy, 0).waits > 0);
  }

  TEST_CASE("copies: whatever lags and is killed when, the newest whole copy stays, one step at most behind") {
    for (const int slots : {2, 3, 4}) {
      const Walk walk = explore_copies(slots, {}, slots == 4 ? 0 : 1);
      CHECK_MESSAGE(walk.violation.empty(), walk.violation);
      MESSAGE(slots << " slots: " << walk.states << " states, " << walk.reads << " persists begun, " << walk.waits
                    << " waits");
      CHECK(walk.states > 5000);
      CHECK(walk.reads > 100);
    }
  }

  TEST_CASE("copies into one slot: none is written while it is read, and each is whole or lost") {
    const Walk walk = explore_copies(1);
    CHECK_MESSAGE(walk.violation.empty(), walk.violation);
    CHECK(walk.states > 1000);
    CHECK(walk.reads > 100);
    CopyRule reserved;
    reserved.choose = [](std::span<const SlotView>, int64_t) { return std::optional<int64_t>(0); };
    CHECK(explore_copies(1, reserved).violation.starts_with("a slot is written while it is persisted"));
    CHECK(choose_slot_for_copy(std::vector<SlotView>{{}}, -1) == 0);              // the first copy of a life
    CHECK(choose_slot_for_copy(std::vector<SlotView>{{.whole = true}}, 0) == 0);  // over the copy before
    CHECK_FALSE(choose_slot_for_copy(std::vector<SlotView>{{}}, 0).has_value());  // which another rank still writes
    CHECK_FALSE(choose_slot_for_copy(std::vector<SlotView>{{.whole = true, .reserved = true}}, 0).has_value());
  }

  TEST_CASE("the walk of copies bites: each part of their rule is needed") {
    CopyRule banks;  // the rule of banks: the newest whole one may be taken while the last is not whole
    banks.choose = choose_slot;
    CHECK(explore_copies(2, banks).violation.find("is lost after") != std::string::npos);
    CopyRule reserved;
    reserved.choose = [](std::span<const SlotView> views, int64_t last) {
      std::vector<SlotView> free(views.begin(), views.end());
      for (SlotView& view : free) view.reserved = false;
      return choose_slot_for_copy(free, last);
    };
    CHECK(explore_copies(3, reserved).violation.starts_with("a slot is written while it is persisted"));
    CopyRule hasty;  // begins a copy while the one before is under way
    hasty.finishes = false;
    CHECK_FALSE(explore_copies(3, hasty).violation.empty());
  }

  TEST_CASE("view_of calls a slot whole only when the marks of all ranks are") {
    const SlotMark whole{SlotPhase::kWhole, 2, 5};
    CHECK(view_of(std::vector<SlotMark>{whole, whole}, false).whole);
    for (const SlotMark other : {SlotMark{SlotPhase::kWriting, 2, 5}, SlotMark{SlotPhase::kWhole, 1, 5},
                                 SlotMark{SlotPhase::kWhole, 2, 6}, SlotMark{}}) {
      CHECK_FALSE(view_of(std::vector<SlotMark>{whole, other}, false).whole);
      CHECK_FALSE(view_of(std::vector<SlotMark>{other, whole}, true).whole);
    }
    CHECK_FALSE(view_of({}, false).whole);
  }
}
