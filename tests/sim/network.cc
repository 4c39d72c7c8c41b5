// Connections to the leader, and what the two ends do with what comes.
#include "tests/sim/world_model.h"

#include "runtime/hosts/message.h"

namespace cairn::sim {

void World::break_link(int64_t index, double leader_s, double member_s) {
  Link& link = links_[static_cast<size_t>(index)];
  link.passes = false;
  link.on_the_way.clear();
  const int64_t id = link.id;
  Host& host = hosts_[static_cast<size_t>(index)];
  if (leader().up && link.leader_has) {
    after(leader_s, leader(), [this, index, id] {
      if (links_[static_cast<size_t>(index)].id == id) leader_hears_of_loss(index, "the connection broke");
    });
  }
  if (host.up && link.member_has) {
    after(member_s, host, [this, index, id] {
      if (links_[static_cast<size_t>(index)].id == id) member_hears_of_loss(index, "the connection broke");
    });
  }
  after(std::max(leader_s, member_s) + uniform(0.3, 2), [this, index] { reconnect(index); });
}

void World::leader_hears_of_loss(int64_t index, const std::string& why) {
  Link& link = links_[static_cast<size_t>(index)];
  if (!link.leader_has || link.leader_heard) return;
  link.leader_heard = true;
  say("h0 has lost h{}", index);
  if (places_.contains(index)) feed(leader(), saves::Lost{index, why});
  const auto loop = [this, index, why, id = link.id](const auto& again) -> void {
    if (leader().busy) return after(0.2, leader(), [again] { again(again); });
    Link& lost = links_[static_cast<size_t>(index)];
    if (lost.id != id || !lost.leader_has) return;
    lost.leader_has = false;
    if (!places_.contains(index)) return;
    feed(leader(), saves::Lost{index, why});
    advance(generation::Lost{index, why});
    fail_generation(fmt::format("h{} was lost", index));
  };
  after(uniform(0, 0.5), leader(), [loop] { loop(loop); });  // it comes to it later
}

void World::member_hears_of_loss(int64_t index, const std::string& why) {
  Link& link = links_[static_cast<size_t>(index)];
  if (!link.member_has) return;
  link.member_has = false;
  Host& host = hosts_[static_cast<size_t>(index)];
  say("{} has lost the leader", host.name);
  feed(host, saves::LeaderLost{why});
  if (host.follower->is_joined()) advance(host, member::LeaderLost{why});
}

void World::reconnect(int64_t index) {
  Link& link = links_[static_cast<size_t>(index)];
  Host& host = hosts_[static_cast<size_t>(index)];
  if (host.gone || (link.leader_has && link.member_has && link.passes)) return;
  if (host.up && !host.follower->joins_until_ns()) return;  // it will ask
  if (!host.up || !leader().up || host.cut_s > now_s_ || host.frozen_s > now_s_ || leader().frozen_s > now_s_ ||
      link.leader_has || link.member_has || leader().busy ||
      wants_ == generation::Wants::kLeft) {  // it waits at the door
    const bool at_door = host.up && leader().up && host.cut_s <= now_s_ && host.frozen_s <= now_s_;
    if (at_door) {
      advance(host, member::AtDoor{});
    } else if (host.up) {
      advance(host, member::Silent{});
    }
    after(uniform(0.5, 1.5), [this, index] { reconnect(index); });
    return;
  }
  ++link.id;
  link.passes = link.leader_has = link.member_has = true;
  link.leader_heard = false;
  link.on_the_way.clear();
  link.last_down_s = link.last_up_s = now_s_;
  host.dropped.clear();
  order_process_[index] = leader().process;
  say("{} has joined", host.name);
  const int64_t place = places_.contains(index) ? begin_of(index).place : -1;
  advance(host, member::Joined{.place = place, .hosts = std::ssize(places_), .leader = 0, .epoch = epoch_});
  if (place >= 0) feed(leader(), saves::Back{index});
  send_down(index, begin_of(index));
  gather();
}

void World::send_down(int64_t index, const Message& message) {
  if (links_[static_cast<size_t>(index)].leader_has && places_.contains(index)) carry(index, true, message);
}

void World::send_up(int64_t index, const Message& message) {
  if (links_[static_cast<size_t>(index)].member_has) carry(index, false, message);
}

void World::carry(int64_t index, bool down, const Message& message) {
  Link& link = links_[static_cast<size_t>(index)];
  if (!link.passes) return;  // it goes nowhere, and the sender does not know yet
  ++out_.messages;
  double& last_s = down ? link.last_down_s : link.last_up_s;
  last_s = std::max(last_s, now_s_ + (chance(0.05) ? uniform(0, 2) : uniform(0.001, 0.05)));
  const int64_t number = numbers_;
  link.on_the_way[number] = {down, message};
  Host& to = down ? hosts_[static_cast<size_t>(index)] : leader();
  push(last_s, to.index, to.process, [this, index, down, number, id = link.id] {
    Link& now = links_[static_cast<size_t>(index)];
    const auto found = now.on_the_way.find(number);
    if (now.id != id || found == now.on_the_way.end()) return;
    const Message what = std::move(found->second.second);
    now.on_the_way.erase(found);
    if (down && now.member_has) at_member(index, what);
    if (!down && now.leader_has && !now.leader_heard) at_leader(index, what);
  });
}

std::string text_of(const Message& message) {
  std::string of;
  std::visit(
      [&](const auto& one) {
        if constexpr (requires { one.number; }) {
          of = fmt::format(" step {}, try {}", one.step, one.number);
        } else if constexpr (requires { one.slot.step; }) {
          of = fmt::format(" step {}", one.slot.step);
        } else if constexpr (requires { one.step; }) {
          of = fmt::format(" step {}", one.step);
        }
        if constexpr (requires { one.error.message; }) of += fmt::format(": {}", one.error.message);
      },
      message);
  return std::string(hosts::kind_of(message)) + of;
}

void World::at_leader(int64_t index, const Message& message) {
  say("h{} -> h0  {}", index, text_of(message));
  if (std::holds_alternative<hosts::Begun>(message) || std::holds_alternative<hosts::Written>(message) ||
      std::holds_alternative<hosts::NotWritten>(message))
    return feed(leader(), saves::Heard{index, message});
  after(uniform(0, 0.1), leader(), [this, index, message, id = links_[static_cast<size_t>(index)].id] {
    if (links_[static_cast<size_t>(index)].id != id) return;
    if (std::holds_alternative<hosts::Failed>(message)) fail_generation(fmt::format("a rank of h{} has failed", index));
    advance(generation::Heard{index, message});
  });
}

void World::at_member(int64_t index, const Message& message) {
  Host& host = hosts_[static_cast<size_t>(index)];
  say("h0 -> {}  {}", host.name, text_of(message));
  if (std::holds_alternative<hosts::Save>(message) || std::holds_alternative<hosts::Committed>(message) ||
      std::holds_alternative<hosts::Dropped>(message)) {
    if (const auto* const dropped = std::get_if<hosts::Dropped>(&message))
      host.dropped.insert({dropped->step, dropped->number});
    feed(host, saves::Told{message});
    return after(uniform(0, 0.02), host, [this, &host] { poke(host); });  // its persister looks now and then
  }
  host.inbox.emplace_back(links_[static_cast<size_t>(index)].id, message);
  after(uniform(0, 0.1), host, [this, &host] { read_inbox(host); });
}

void World::read_inbox(Host& host) {
  while (!host.busy && !host.inbox.empty()) {
    const auto [id, message] = std::move(host.inbox.front());
    host.inbox.pop_front();
    if (links_[static_cast<size_t>(host.index)].id == id) on_members_loop(host, message);
  }
}

/// The member's loop, as tools/run/agent/follower.cc is.
void World::on_members_loop(Host& host, const Message& message) {
  if (const auto* const promise = std::get_if<hosts::Promise>(&message)) {
    feed(host, saves::Promised{promise->slot.step});
    Slot& slot = host.slots[static_cast<size_t>(promise->slot.slot)];
    if (slot.whole && slot.step == promise->slot.step && slot.generation == promise->slot.incarnation) {
      if (slot.reserved == 0) reserve(slot, slot.step);
      if (slot.reserved == -slot.step) host.again.insert(slot.step);
      poke(host);
    }
  }
  advance(host, member::Told{message});
}

void World::advance(Host& host, const member::Event& event) {
  if (!host.up || over_) return;
  for (const member::Action& action : host.follower->step(event, ns(now_s_))) {
    if (!host.up || over_) return;
    perform(host, action);
  }
  check_waits(host);
}

void World::perform(Host& host, const member::Action& action) {
  std::visit(hosts::Overloaded{
                 [&](const member::Send& one) { send_up(host.index, one.what); },
                 [&](const member::Join&) { reconnect(host.index); },
                 [&](const member::Drop& one) {
                   say("{} drops the leader: {}", host.name, one.why);
                   break_link(host.index, 0, 0);
                 },
                 [&](const member::Open& one) {
                   after(uniform(0.01, 0.3), host, [this, &host, layout = one.segment.hosts] {
                     host.layout = layout;
                     ranks_gone(host);
                     advance(host, member::Idled{});
                   });
                 },
                 [&](const member::Answer& one) { send_up(host.index, idle_of(host, one.ask)); },
                 [&](const member::GiveCopy& one) {
                   give_copy(host, std::atoll(one.order.to.host.c_str() + 1), one.order.slot);
                 },
                 [&](const member::Load& one) {
                   const hosts::Resume& order = one.order;
                   const Choice choice{order.step, order.slot_incarnation, static_cast<size_t>(order.slot),
                                       order.source == hosts::Resume::Source::kMemory, order.incarnation};
                   require(host.layout == std::ssize(places_), "common",
                           fmt::format("{} loads into memory for {} hosts", host.name, host.layout));
                   host.busy = true;
                   load(host, choice, [this, &host, choice] {
                     host.busy = false;
                     host.choice = choice;
                     advance(host, member::Loaded{});
                     read_inbox(host);
                   });
                 },
                 [&](const member::Run& one) {
                   feed(host, saves::Resumed{host.choice->step, promised(host), one.promised});
                   host.ranks = true;
                   poke(host);
                 },
                 [&](const member::StopRanks&) { ranks_stop(host); },
                 [&](const member::Leave&) { close_memory(host); },
                 [&](const member::GaveUp&) {
                   say("{} gives up", host.name);
                   stop_process(host);
                   after(uniform(2, 10), [this, &host] { start(host); });  // by its launcher
                 },
                 [](const auto&) {},
             },
             action);
}

/// By its agent, which takes a while.
void World::ranks_stop(Host& host) {
  stop_ranks(host);
  after(uniform(0, 1.5), host, [this, &host] {
    ranks_gone(host);
    advance(host, member::Idled{});
    read_inbox(host);
  });
}

void World::close_memory(Host& host) {
  if (!all_idle(host)) return after(0.5, host, [this, &host] { close_memory(host); });
  if (host.follower->is_displaced()) lose_memory(host);
  host.layout = 0;
  after(0.05, host, [this, &host] { advance(host, member::Closed{}); });
}

/// Every wait of the rule has a name and a deadline, and ends at it.
void World::check_waits(Host& host) {
  if (!host.up) return;
  for (const member::Wait& wait : host.follower->waits()) {
    const double until_s = static_cast<double>(wait.until_ns) / 1e9;
    require(!wait.what.empty() && until_s < 1e8 && until_s > now_s_ - 1, "waits",
            fmt::format("{} waits for {} until {:.0f} s", host.name, wait.what, until_s));
    if (host.waits_s <= until_s) continue;
    host.waits_s = until_s;
    after(std::max(0.0, until_s - now_s_) + 0.1, host, [this, &host, until_s] {
      if (host.waits_s != until_s) return;
      host.waits_s = kNever;
      advance(host, member::Tick{});
    });
  }
}

hosts::Begin World::begin_of(int64_t host) const {
  hosts::Begin begin{.segment = {.hosts = std::ssize(places_)},
                     .place = std::ranges::distance(places_.begin(), places_.find(host))};
  return begin;
}

}  // namespace cairn::sim
