// Agents that start and end, and what they hand to the rule and do for it.
#include "tests/sim/world_model.h"

#include <cmath>

namespace cairn::sim {

// --- hosts -----------------------------------------------------------------------------------------------------------

void World::start(Host& host) {
  if (host.up || host.gone) return;
  host.up = true;
  ++host.process;
  host.threads.assign(static_cast<size_t>(life_.in_flight), {});
  host.again.clear();
  host.dropped.clear();
  host.ranks = false;
  host.choice.reset();
  host.layout = 0;
  host.inbox.clear();
  host.busy = false;
  host.tick_s = host.waits_s = host.loads_since_s = kNever;
  for (Slot& slot : host.slots) {
    if (slot.reserved < 0) reserve(slot, -slot.reserved);  // as Arena::adopt()
  }
  ranks_gone(host);
  say("{} starts", host.name);
  if (host.index == 0) {
    host.leader = std::make_unique<saves::Leader>();
    generation_.emplace(generation::Options{.own = 0});
    gathering_ = false;
    wants_ = generation::Wants::kAll;
    last_step_ = -1;
    look_s_ = kNever;
    unpromised_s_.clear();  // its tries count from 1 again
    ++epoch_;
    set_hosts();
    look(generation::Wants::kAll);
  } else {
    host.member = std::make_unique<saves::Member>(host.index);
    const auto look = [this, &host](const auto& again) -> void {
      feed(host, saves::Look{promised(host)});
      after(kLookS, host, [again] { again(again); });
    };
    after(uniform(0, kLookS), host, [look] { look(look); });
    host.follower = std::make_unique<member::Member>(
        member::Options{.hosts = life_.hosts, .train = life_.hosts, .join_s = kWaitS, .wait_s = kWaitS});
    advance(host, member::Tick{});
  }
  after(0.02, host, [this, &host] { poke(host); });
}

void World::stop_process(Host& host) {
  if (!host.up) return;
  host.up = false;
  host.ranks = false;
  ++host.ranks_life;
  host.leader.reset();
  host.member.reset();
  host.follower.reset();
  host.frozen_s = 0;
  if (host.index == 0) {
    for (int64_t k = 1; k < life_.hosts; ++k) {
      links_[static_cast<size_t>(k)].leader_has = false;
      break_link(k, 0, uniform(0, kDeadS));
    }
  } else {
    links_[static_cast<size_t>(host.index)].member_has = false;
    break_link(host.index, uniform(0, kDeadS), 0);
  }
}

void World::lose_memory(Host& host) {
  for (Slot& slot : host.slots) {
    slot.whole = false;
    reserve(slot, 0);
  }
  for (Slot& slot : host.held) slot = {};
}

void World::stop_ranks(Host& host) {
  host.ranks = false;
  ++host.ranks_life;
}

/// NodePersister::ranks_gone: promises that no rank will complete.
void World::ranks_gone(Host& host) {
  for (Slot& slot : host.slots) {
    if (slot.reserved > 0 && !(slot.whole && slot.step == slot.reserved)) reserve(slot, 0);
  }
}

std::set<int64_t> World::promised(const Host& host) const {
  std::set<int64_t> out;
  for (const Slot& slot : host.slots) {
    if (slot.reserved != 0) out.insert(std::abs(slot.reserved));
  }
  return out;
}

std::vector<hosts::Slot> World::memory_of(const std::vector<Slot>& slots) const {
  std::vector<hosts::Slot> out;
  for (size_t k = 0; k < slots.size(); ++k) {
    if (slots[k].whole) out.push_back({static_cast<int64_t>(k), slots[k].generation, slots[k].step});
  }
  return out;
}

// --- the rule --------------------------------------------------------------------------------------------------------

void World::perform(Host& host, const saves::Actions& actions) {
  for (const saves::Action& action : actions) {
    if (const auto* const tell = std::get_if<saves::Tell>(&action)) {
      if (host.index == 0) {
        for (const int64_t member : members()) send_down(member, tell->what);
      } else {
        if (const auto* const begun = std::get_if<hosts::Begun>(&tell->what)) {
          require(!host.dropped.contains({begun->step, begun->number}), "ordered",
                  fmt::format("{} begins step {}, try {}, which was dropped", host.name, begun->step, begun->number));
        }
        send_up(host.index, tell->what);
      }
    } else if (const auto* const ward = std::get_if<saves::WriteWard>(&action)) {
      write_ward(host, *ward);
    } else {
      order(host, action);
    }
  }
}

void World::check_rule(Host& host, const std::vector<saves::Wait>& waits) {
  for (const saves::Wait& wait : waits) {
    const double until_s = static_cast<double>(wait.until_ns) / 1e9;
    if (wait.what.empty() || wait.until_ns <= 0 || until_s > 1e8)
      violate(fmt::format("waits: {} waits for \"{}\" until {:.0f} s", host.name, wait.what, until_s));
    if (until_s < now_s_ - 1)
      violate(fmt::format("waits: {} waits for {} beyond {:.0f} s", host.name, wait.what, until_s));
    if (host.tick_s <= until_s) continue;
    host.tick_s = until_s;
    after(std::max(0.0, until_s - now_s_) + 0.1, host, [this, &host, until_s] {
      if (host.tick_s == until_s) tick(host);
    });
  }
}

void World::tick(Host& host) {
  host.tick_s = kNever;
  feed(host, saves::Tick{});
}

/// No start waits for a save that waits for a host which has nothing of it (3c555ca3 mended that).
void World::check_loads() {
  if (!leader().up || now_s_ - leader().loads_since_s < kLoadWaitS || leader().frozen_s > now_s_) return;
  for (const Thread& thread : leader().threads) {
    for (const saves::Wait& wait : leader().leader->waits()) {
      for (const int64_t index : members()) {
        const Host& host = hosts_[static_cast<size_t>(index)];
        const bool idle =
            thread.at == Thread::At::kRule && wait.of == thread.of && wait.what == host.name + " to begin";
        require(!idle || !host.up || host.frozen_s > now_s_ || promised(host).contains(wait.of.step), "loads",
                fmt::format("h0 has waited for {:.0f} s to load, for {} in step {}, which that host does not have",
                            now_s_ - leader().loads_since_s, wait.what, wait.of.step));
      }
    }
  }
}

/// No agent waits for what will not come.
void World::check_left() {
  if (!leader().up || leader().frozen_s > now_s_) return;
  const auto comes = [](const Link& link, bool down, const Try& of) {
    return std::ranges::any_of(link.on_the_way, [&](const auto& one) {
      if (one.second.first != down) return false;
      return std::visit(
          [&](const auto& message) {
            if constexpr (requires { message.number; }) {
              return message.step == of.step && message.number == of.number;
            } else {
              return false;
            }
          },
          one.second.second);
    });
  };
  for (const int64_t index : members()) {
    const Host& host = hosts_[static_cast<size_t>(index)];
    const Link& link = links_[static_cast<size_t>(index)];
    if (!host.up || !link.passes || !link.leader_has || !link.member_has) continue;
    for (const Thread& thread : host.threads) {
      if (thread.at != Thread::At::kRule) continue;
      bool left = !leader().leader->phase(thread.of) && !comes(link, true, thread.of);
      if (thread.of.number == 0) {  // without an order (planted): the leader may come to it yet
        const bool each = std::ranges::any_of(leader().leader->waits(), [&](const saves::Wait& wait) {
          return wait.of.step != thread.step && wait.what == host.name + " to begin";
        });
        const bool in_vain = each || (generation_->is_running() && !promised(leader()).contains(thread.step));
        double& since_s = unpromised_s_.try_emplace({-index, thread.of}, now_s_).first->second;
        if (!in_vain) since_s = now_s_;
        left = now_s_ - since_s > 10;
      }
      if (left) {
        violate(fmt::format("left: {} waits for step {}, try {}, which the leader has left", host.name, thread.of.step,
                            thread.of.number));
      }
    }
  }
  for (const generation::Wait& wait : generation_->waits()) {
    const Host& host = hosts_[static_cast<size_t>(wait.host)];
    const Link& link = links_[static_cast<size_t>(wait.host)];
    double& since_s = unpromised_s_.try_emplace({wait.host, Try{-1, wait.until_ns}}, now_s_).first->second;
    const bool there = host.up && link.passes && link.leader_has && link.member_has && host.follower->is_joined();
    const bool idle = there && host.frozen_s <= now_s_ && !host.busy && host.inbox.empty() && link.on_the_way.empty() &&
                      !host.follower->waits().empty();
    if (!idle) since_s = now_s_;
    if (now_s_ - since_s > 5) violate(fmt::format("left: h0 waits for {}, which waits for h0", wait.what));
  }
  for (const Thread& thread : leader().threads) {
    if (thread.at != Thread::At::kRule || leader().leader->phase(thread.of) != saves::Phase::kWritten) continue;
    for (const saves::Wait& wait : leader().leader->waits()) {
      if (wait.of != thread.of) continue;
      for (const int64_t index : members()) {
        const Host& host = hosts_[static_cast<size_t>(index)];
        const Link& link = links_[static_cast<size_t>(index)];
        if (!host.up || !link.passes || !link.leader_has || !link.member_has || !wait.what.starts_with(host.name + " "))
          continue;
        double& since_s = unpromised_s_.try_emplace({index, wait.of}, now_s_).first->second;
        if (host.member->phase(wait.of) != saves::Phase::kSave || promised(host).contains(wait.of.step))
          since_s = now_s_;
        if (now_s_ - since_s > kPromiseS + 2 * kLookS + kDeadS) {
          violate(fmt::format("left: h0 waits for {} in step {}, try {}, which that host has not promised for {:.0f} s",
                              wait.what, wait.of.step, wait.of.number, now_s_ - since_s));
        }
        if (!host.member->phase(wait.of) && !comes(link, true, wait.of) && !comes(link, false, wait.of)) {
          violate(fmt::format("left: h0 waits for {} in step {}, try {}, which that host has left", wait.what,
                              wait.of.step, wait.of.number));
        }
      }
    }
  }
}

}  // namespace cairn::sim
