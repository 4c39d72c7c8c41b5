#include "tests/sim/world_model.h"

#include <exception>

#include "ckpt/snapshot/slot_rule.h"
#include "tests/sim/assertion.h"
#include "tests/sim/members.h"

namespace cairn::sim {

World::World(const Life& life, bool story)
    : life_(life),
      story_(story),
      key_(mix64(life.seed)),
      copies_(key_ % 2 == 0 ||
              std::ranges::any_of(life.faults, [](const Fault& one) { return one.kind == FaultKind::kGone; })),
      hosts_(static_cast<size_t>(life.hosts)),
      links_(static_cast<size_t>(life.hosts)) {
  for (int64_t k = 0; k < life.hosts; ++k) {
    Host& host = hosts_[static_cast<size_t>(k)];
    host.index = k;
    host.name = fmt::format("h{}", k);
    host.slots.resize(static_cast<size_t>(ckpt::banks_for(life.in_flight)));
    host.held.resize(host.slots.size());
    places_.insert(k);
  }
}

Outcome World::run() {
  try {
    for (Host& host : hosts_) start(host);
    for (const Fault& fault : life_.faults) push(fault.at_s, -1, 0, [this, fault] { strike(fault); });
    const bool some_gone =
        std::ranges::any_of(life_.faults, [](const Fault& one) { return one.kind == FaultKind::kGone; });
    const double end_s = life_.faulty_s + (some_gone ? kWaitS + 2 * kSpareAfterS : kCalmS);  // it may have to end
    while (!events_.empty() && events_.front().at_s <= end_s && !over_) {
      std::pop_heap(events_.begin(), events_.end());
      Event event = std::move(events_.back());
      events_.pop_back();
      now_s_ = event.at_s;
      if (event.host >= 0) {
        Host& host = hosts_[static_cast<size_t>(event.host)];
        if (!host.up || host.process != event.process) continue;
        if (host.frozen_s > now_s_) {  // in the same order, once it thaws
          push(host.frozen_s, event.host, event.process, std::move(event.run));
          continue;
        }
      }
      ++out_.events;
      event.run();
      check_left();
      check_loads();
    }
    if (!over_) {
      now_s_ = end_s;
      const auto calm = std::ranges::upper_bound(committed_s_, life_.faulty_s);
      require(committed_s_.end() - calm >= 2, "progress",
              fmt::format("{} saves in {:.0f} s without a fault", committed_s_.end() - calm, kCalmS));
      out_.calm_s = *(calm + 1) - life_.faulty_s;
      for (const Host& host : hosts_) {
        for (const Slot& slot : host.slots) {
          require(!host.up || slot.reserved == 0 || now_s_ - slot.since_s < kCalmS || !slot.whole ||
                      slot.step != std::abs(slot.reserved),
                  "progress",
                  fmt::format("{} promises step {} since {:.0f} s", host.name, slot.reserved, slot.since_s));
        }
      }
      if (life_.faults.empty()) require(out_.failed == 0, "fails", fmt::format("{} saves", out_.failed));
    }
  } catch (const Violation& violation) {
    out_.violation = violation.what;
  } catch (const AssertionFailed& failed) {
    out_.violation = "assertion: " + failed.what;
  } catch (const std::exception& error) {  // of a container
    out_.violation = fmt::format("assertion: {}", error.what());
  }
  if (out_.violation) say("VIOLATION {}", *out_.violation);
  out_.seconds = now_s_;
  return std::move(out_);
}

Outcome live(const Life& life, bool story) {
  return life.members ? live_members(life, story) : World(life, story).run();
}

}  // namespace cairn::sim
