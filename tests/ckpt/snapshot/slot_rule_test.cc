// Walks every interleaving of three ranks, rank 0's decisions, a persister, kills of the ranks and of the agent.
#include "ckpt/snapshot/slot_rule.h"

#include <doctest/doctest.h>

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

constexpr int kRanks = 3, kSlots = 2, kMaxOrders = 4, kMaxKills = 2, kMaxQueue = 2;

struct Order {
  int8_t slot = 0, step = 0;
};

struct World {
  std::array<std::array<SlotMark, kRanks>, kSlots> marks{};  // by slot
  std::array<int8_t, kSlots> reserved{};                     // the step to be persisted; 0: free
  int8_t reading = -1;                                       // the slot that the persister reads
  std::array<std::array<Order, kMaxQueue>, kRanks> queue{};  // orders on their way to a rank, oldest first
  std::array<int8_t, kRanks> queued{};
  std::array<bool, kRanks> writing{};  // the first order of the queue has begun
  int8_t incarnation = 1, step = 0, orders = 0, kills = 0;
  bool had_whole = false;

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
    out += static_cast<char>(reading);
    for (int r = 0; r < kRanks; ++r) {
      out += static_cast<char>(queued[r] * 2 + writing[r]);
      for (int k = 0; k < queued[r]; ++k) {
        out += static_cast<char>(queue[r][k].slot);
        out += static_cast<char>(queue[r][k].step);
      }
    }
    for (const int8_t number : {incarnation, step, orders, kills}) out += static_cast<char>(number);
    out += static_cast<char>(had_whole);
    return out;
  }
};

struct Rule {
  std::function<SlotView(std::span<const SlotMark>, bool)> view = view_of;
  std::function<std::optional<int64_t>(std::span<const SlotView>)> choose = choose_slot;
};

struct Walk {
  int64_t states = 0, reads = 0;
  std::string violation;  // the first one
};

enum class Ranks {
  kInStep,   // a collective of all ranks lies between two orders, as in training: nobody is an order behind
  kLagging,  // orders queue up
};

/// Lagging ranks can make a slot whole between a decision that saw none whole and rank 0's next write: there, the
/// promise begins with the first decision that sees a whole slot.
Walk explore(const Rule& rule, Ranks ranks = Ranks::kInStep) {
  Walk walk;
  std::unordered_set<std::string> seen;
  std::deque<World> open;
  const auto truly_whole = [](const World& w, int slot) { return view_of(w.marks[slot], false).whole; };
  const auto visit = [&](World w, const char* action) {
    bool any = false;
    for (int slot = 0; slot < kSlots; ++slot) any = any || truly_whole(w, slot);
    if (walk.violation.empty() && w.had_whole && !any)
      walk.violation = std::string("no whole slot is left after ") + action;
    if (walk.violation.empty() && w.reading >= 0 && !truly_whole(w, w.reading))
      walk.violation = std::string("a slot is written while it is persisted, after ") + action;
    w.had_whole = w.had_whole || (any && ranks == Ranks::kInStep);
    if (seen.insert(w.key()).second) open.push_back(w);
  };
  visit(World{}, "the start");
  while (!open.empty() && walk.violation.empty()) {
    const World w = open.front();
    open.pop_front();
    ++walk.states;
    const auto views = [&] {
      std::vector<SlotView> out;
      for (int slot = 0; slot < kSlots; ++slot) out.push_back(rule.view(w.marks[slot], w.reserved[slot] != 0));
      return out;
    };
    // Rank 0 decides when it has finished its own part of the order before; the others may lag behind.
    bool room = w.queued[0] == 0 && w.orders < kMaxOrders;
    for (int r = 0; r < kRanks; ++r) room = room && w.queued[r] < (ranks == Ranks::kInStep ? 1 : kMaxQueue);
    if (room) {
      const std::vector<SlotView> seen_by_rank0 = views();
      if (const auto slot = rule.choose(seen_by_rank0)) {
        for (const bool persist : {false, true}) {
          World next = w;
          for (const SlotView& view : seen_by_rank0) next.had_whole = next.had_whole || view.whole;
          ++next.orders;
          ++next.step;
          if (persist) next.reserved[*slot] = next.step;
          for (int r = 0; r < kRanks; ++r) next.queue[r][next.queued[r]++] = {static_cast<int8_t>(*slot), next.step};
          visit(next, "an order");
        }
      }
    }
    for (int r = 0; r < kRanks; ++r) {
      if (w.queued[r] == 0) continue;
      World next = w;
      const Order order = w.queue[r][0];
      SlotMark& mark = next.marks[order.slot][r];
      mark = {SlotPhase::kWriting, static_cast<uint64_t>(w.incarnation), order.step};
      if (!w.writing[r]) {
        next.writing[r] = true;
        visit(next, "the begin of a write");
      } else {
        mark.phase = SlotPhase::kWhole;
        next.writing[r] = false;
        next.queue[r][0] = next.queue[r][1];
        --next.queued[r];
        visit(next, "the end of a write");
      }
    }
    if (w.reading >= 0) {
      World next = w;
      next.reserved[w.reading] = 0;
      next.reading = -1;
      visit(next, "a persist");
    } else {
      const std::vector<SlotView> seen_by_agent = views();
      for (int slot = 0; slot < kSlots; ++slot) {
        if (w.reserved[slot] == 0 || !seen_by_agent[slot].whole || seen_by_agent[slot].step != w.reserved[slot])
          continue;
        World next = w;
        next.reading = static_cast<int8_t>(slot);
        ++walk.reads;
        visit(next, "the begin of a persist");
      }
    }
    // One rank's death is a rank that never acts again until all are killed, so killing all at any instant covers it.
    if (w.kills < kMaxKills) {
      for (const bool agent_too : {false, true}) {
        World next = w;
        ++next.kills;
        ++next.incarnation;
        next.queued = {};
        next.writing = {};
        next.queue = {};
        if (agent_too) next.reading = -1;
        std::vector<SlotView> left;
        for (int slot = 0; slot < kSlots; ++slot) {
          left.push_back(view_of(w.marks[slot], false));
          if (agent_too || !left.back().whole) next.reserved[slot] = 0;
        }
        const auto newest = newest_whole(left);
        next.step = static_cast<int8_t>(newest ? left[*newest].step : 0);  // and train those steps again
        visit(next, agent_too ? "a kill of everything" : "a kill of the ranks");
      }
    }
  }
  return walk;
}

}  // namespace

TEST_SUITE("ckpt/snapshot/slot_rule") {
  TEST_CASE("whatever is killed when: a whole snapshot, once there, never goes away, and none is written while read") {
    for (const Ranks ranks : {Ranks::kInStep, Ranks::kLagging}) {
      const Walk walk = explore({}, ranks);
      CHECK_MESSAGE(walk.violation.empty(), walk.violation);
      MESSAGE(walk.states << " states, " << walk.reads << " persists begun");
      CHECK(walk.states > 10000);
      CHECK(walk.reads > 100);
    }
  }

  TEST_CASE("the walk bites: each part of the rule is needed") {
    const auto worse = [](const SlotView& a, const SlotView& b) {
      return std::tuple(a.whole, a.incarnation, a.step) < std::tuple(b.whole, b.incarnation, b.step);
    };
    Rule last_one;  // also the only whole slot, when the other one is reserved
    last_one.choose = [&](std::span<const SlotView> slots) {
      std::optional<int64_t> best;
      for (int64_t k = 0; k < std::ssize(slots); ++k) {
        if (!slots[k].reserved && (!best || worse(slots[k], slots[*best]))) best = k;
      }
      return best;
    };
    CHECK(explore(last_one, Ranks::kLagging).violation == "no whole slot is left after the begin of a write");
    Rule reserved;  // takes slots that are promised to the persister
    reserved.choose = [&](std::span<const SlotView> slots) {
      return std::optional<int64_t>(worse(slots[0], slots[1]) ? 0 : 1);
    };
    CHECK(explore(reserved).violation.starts_with("a slot is written while it is persisted"));
    CHECK_FALSE(explore(reserved, Ranks::kLagging).violation.empty());
    Rule blind;  // to incarnations: parts of two lives of a step pass for one snapshot
    blind.view = [](std::span<const SlotMark> marks, bool is_reserved) {
      std::vector<SlotMark> same(marks.begin(), marks.end());
      for (SlotMark& mark : same) mark.incarnation = 1;
      return view_of(same, is_reserved);
    };
    CHECK_FALSE(explore(blind).violation.empty());
    Rule newest;  // overwrites the newest instead of the older one
    newest.choose = [&](std::span<const SlotView> slots) {
      return std::optional<int64_t>(worse(slots[0], slots[1]) ? 1 : 0);
    };
    CHECK_FALSE(explore(newest).violation.empty());
  }

  TEST_CASE("what view_of calls whole") {
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
