// The driver of the rule of generations, as tools/run/hosts/fleet.cc is, and the training of all ranks.
#include "tests/sim/world_model.h"

#include "ckpt/snapshot/slot_rule.h"

namespace cairn::sim {

std::vector<int64_t> World::members() const {
  std::vector<int64_t> out;
  for (const int64_t place : places_) {
    if (place > 0) out.push_back(place);
  }
  return out;
}

void World::set_hosts() {
  saves::SetHosts event{.hosts = {}, .epoch = epoch_};
  for (const int64_t member : members()) {
    event.hosts[member] = hosts_[static_cast<size_t>(member)].name;
    if (!links_[static_cast<size_t>(member)].leader_has) event.away.insert(member);
  }
  feed(leader(), event);
}

void World::advance(const generation::Event& event) {
  if (!leader().up) return;
  for (const generation::Action& action : generation_->step(event, ns(now_s_))) {
    if (!leader().up || over_) return;
    perform(action);
  }
  check_waits();
}

void World::perform(const generation::Action& action) {
  std::visit(hosts::Overloaded{
                 [&](const generation::Say& one) { say("h0: {}", one.text); },
                 [&](const generation::Gather& one) {
                   wants_ = one.wants;
                   gathering_ = true;
                   ++gatherings_;
                   gather();
                 },
                 [&](const generation::Ask& one) { ask(one.number); },
                 [&](const generation::Measure&) { advance(generation::Measured{}); },
                 [&](const generation::Give& one) { give(one); },
                 [&](const generation::Settle& one) { feed(leader(), saves::Settle{one.common}); },
                 [&](const generation::Ready& one) { look_at_disk(one.common.whole); },
                 [&](const generation::Loaded&) { go(); },
                 [&](const generation::Failed& one) {
                   if (wants_ == generation::Wants::kLeft) {
                     require(!copies_stand_in() ||
                                 std::ranges::any_of(hosts_,
                                                     [this](const Host& host) { return memory_of(host.held).empty(); }),
                             "copies", one.error.message);
                     return end(69, one.error.message);
                   }
                   require(one.error.code == ErrorCode::kPeerLost, "look", one.error.message);
                   look(generation::Wants::kAll);
                 },
                 [&](const generation::Drop& one) {
                   say("h0 drops h{}: {}", one.host, one.why);
                   leader_hears_of_loss(one.host, one.why);
                   member_hears_of_loss(one.host, "the leader dropped it");
                   break_link(one.host, 0, 0);
                 },
             },
             action);
}

/// Every wait of the rule has a name and a deadline, and ends at it.
void World::check_waits() {
  for (const generation::Wait& wait : generation_->waits()) {
    const double until_s = static_cast<double>(wait.until_ns) / 1e9;
    require(!wait.what.empty() && until_s < 1e8 && until_s > now_s_ - 1, "waits",
            fmt::format("h0 waits for {} until {:.0f} s", wait.what, until_s));
    if (look_s_ <= until_s) continue;
    look_s_ = until_s;
    after(std::max(0.0, until_s - now_s_) + 0.1, leader(), [this, until_s] {
      if (look_s_ != until_s) return;
      look_s_ = kNever;
      advance(generation::Tick{});
    });
  }
}

void World::fail_generation(const std::string& why) {
  if (!leader().up || !generation_->is_running()) return;
  say("h0 stops the ranks: {}", why);
  stop_ranks(leader());
  ranks_gone(leader());
  advance(generation::Halt{});
  look(generation::Wants::kAll);
}

void World::look(generation::Wants wants) { advance(generation::Look{.wants = wants}); }

/// The rule of membership, of which nothing is modelled here except that a host comes back or has a copy of its memory
/// elsewhere (members.h has that rule).
void World::gather() {
  if (!gathering_ || !leader().up) return;
  const bool away = std::ranges::any_of(
      members(), [this](int64_t member) { return !links_[static_cast<size_t>(member)].leader_has; });
  if (!away || wants_ == generation::Wants::kLeft) return gathered();
  after(kSpareAfterS, leader(), [this, number = gatherings_] {
    if (number != gatherings_ || !gathering_ || !copies_stand_in()) return;
    gathering_ = false;
    say("h0 looks for copies");
    look(generation::Wants::kLeft);
  });
  after(kWaitS, leader(), [this, number = gatherings_] {
    if (number == gatherings_ && gathering_) end(69, "a host did not come back");
  });
}

void World::gathered() {
  gathering_ = false;
  generation::Gathered event{.places = {places_.begin(), places_.end()}, .names = {}};
  for (const int64_t member : members()) {
    event.names[member] = hosts_[static_cast<size_t>(member)].name;
    if (!links_[static_cast<size_t>(member)].leader_has) event.away.insert(member);
  }
  advance(event);
}

/// Each host that is away never comes back, and the one behind it is connected.
bool World::copies_stand_in() const {
  return std::ranges::all_of(members(), [this](int64_t place) {
    const int64_t holder = (place + 1) % life_.hosts;
    if (links_[static_cast<size_t>(place)].leader_has) return true;
    return hosts_[static_cast<size_t>(place)].gone && places_.contains(holder) &&
           (holder == 0 || links_[static_cast<size_t>(holder)].leader_has);
  });
}

hosts::Idle World::idle_of(const Host& host, int64_t ask) const {
  const int64_t held = (host.index + life_.hosts - 1) % life_.hosts;
  const auto place = std::ranges::distance(places_.begin(), places_.find(held));
  return {.ask = ask,
          .memory = {incarnation_, memory_of(host.slots)},
          .held = !copies_ ? std::nullopt
                           : std::optional(hosts::Held{places_.contains(held) ? place : -1, 1, memory_of(host.held)})};
}

void World::ask(int64_t number) {
  for (const int64_t member : members()) send_down(member, hosts::Halt{number});
  after(uniform(0.1, 1), leader(), [this, number] {
    ranks_gone(leader());
    advance(generation::Heard{0, idle_of(leader(), number)});
  });
}

void World::give(const generation::Give& order) {
  const int64_t to = *std::next(places_.begin(), order.place);
  say("h0 has h{} give step {} to h{}", order.holder, order.slot.step, to);
  if (order.holder == 0) return give_copy(leader(), to, order.slot);
  send_down(order.holder, hosts::Give{order.slot, {fmt::format("h{}", to), 1}});
}

/// tools/run/hosts/replicas.h: bytes from host to host.
void World::give_copy(Host& holder, int64_t to, const hosts::Slot& slot) {
  after(uniform(0.1, 3), holder, [this, &holder, to, slot] {
    Host& target = hosts_[static_cast<size_t>(to)];
    const Slot& held = holder.held[static_cast<size_t>(slot.slot)];
    Slot& into = target.slots[static_cast<size_t>(slot.slot)];
    hosts::Given given;
    if (!held.whole || held.step != slot.step || held.generation != slot.incarnation) {
      given.error = Error{ErrorCode::kUnavailable, "it is not held here any more"};
    } else if (!target.up || target.frozen_s > now_s_ || into.reserved != 0) {
      given.error = Error{ErrorCode::kUnavailable, "it is not taken"};
    } else {
      ++into.version;
      into.whole = true;
      into.step = slot.step;
      into.generation = slot.incarnation;
    }
    if (holder.index == 0) return advance(generation::Heard{0, given});
    send_up(holder.index, given);
  });
}

hosts::Slot newest(const std::vector<hosts::Slot>& slots) {
  return *std::ranges::max_element(slots, {},
                                   [](const hosts::Slot& slot) { return std::pair(slot.incarnation, slot.step); });
}

/// RestoreDecider::look: what is whole in memory is verified, and checkpoints are listed. Its loop opens no door.
void World::look_at_disk(const std::vector<hosts::Slot>& common) {
  leader().busy = true;
  on_disk(leader(), uniform(0.01, 0.5), [this, common] {
    leader().busy = false;
    choose(common);
  });
}

/// Where a run continues from (ckpt/restore.h), here and on all hosts.
void World::choose(const std::vector<hosts::Slot>& common) {
  std::vector<hosts::Slot> all = memory_of(leader().slots);
  std::erase_if(all, [&](const hosts::Slot& slot) {
    return places_.size() > 1 && std::ranges::find(common, slot) == common.end();
  });
  if (wants_ == generation::Wants::kLeft) {
    if (!all.empty()) return save_last(newest(all));
    last_step_ = 0;
    return shrink_to_present();  // from the newest checkpoint
  }
  choice_ = {.generation = ++incarnation_};
  if (!all.empty()) {
    const hosts::Slot slot = newest(all);
    choice_.step = slot.step;
    choice_.slot = static_cast<size_t>(slot.slot);
    choice_.from_memory = true;
    choice_.left_by = slot.incarnation;
  } else {
    choice_.step = disk_.empty() ? 0 : disk_.rbegin()->first;
    if (!disk_.empty()) require(!disk_.rbegin()->second.empty(), "parts", "a step without parts");
  }
  hosts::Resume order{.incarnation = choice_.generation,
                      .source = choice_.from_memory ? hosts::Resume::Source::kMemory : hosts::Resume::Source::kDisk,
                      .step = choice_.step,
                      .slot = static_cast<int64_t>(choice_.slot),
                      .slot_incarnation = choice_.left_by};
  const std::set<int64_t> promises = choice_.from_memory ? promised(leader()) : std::set<int64_t>();
  order.promised = {promises.begin(), promises.end()};
  advance(generation::Chosen{choice_.generation});
  for (const int64_t member : members()) send_down(member, order);
  load(leader(), choice_, [this, number = choice_.generation] {
    if (number == incarnation_) advance(generation::Heard{0, hosts::Carried{}});
  });
}

/// Hosts are gone: the newest step that the others and copies have is saved, and the run continues without them.
void World::save_last(const hosts::Slot& slot) {
  const std::vector<hosts::Ward> wards = generation_->wards(slot);
  const auto away = std::ranges::count_if(
      members(), [this](int64_t member) { return !links_[static_cast<size_t>(member)].leader_has; });
  require(std::ssize(wards) >= away, "copies", fmt::format("{} hosts are away, {} have wards", away, wards.size()));
  say("h0 uses copies of step {}", slot.step);
  last_step_ = slot.step;
  feed(leader(), saves::SetWards{0, wards});
  for (const int64_t member : members()) send_down(member, hosts::Promise{slot});
  Slot& own = leader().slots[static_cast<size_t>(slot.slot)];
  if (own.reserved == 0) reserve(own, slot.step);
  if (own.reserved == -slot.step) leader().again.insert(slot.step);
  poke(leader());
}

void World::shrink_to_present() {
  if (last_step_ < 0) return;
  for (const int64_t place : places_) {
    const Host& host = hosts_[static_cast<size_t>(place)];
    if (host.up && !all_idle(host)) return after(0.5, leader(), [this] { shrink_to_present(); });
  }
  std::erase_if(places_, [this](int64_t place) { return hosts_[static_cast<size_t>(place)].gone; });
  lose_memory(leader());  // of another layout
  leader().layout = std::ssize(places_);
  say("the run continues with {} hosts", places_.size());
  ++epoch_;
  last_step_ = -1;
  set_hosts();
  for (const int64_t member : members()) send_down(member, begin_of(member));
  look(generation::Wants::kAll);
}

/// RestoreDecider::carry_out. A load from the disk needs memory that no save writes from
/// (Arena::invalidate_slots).
void World::load(Host& host, const Choice& choice, const std::function<void()>& done) {
  if (choice.from_memory) {
    const Slot& slot = host.slots[choice.slot];
    require(slot.whole && slot.step == choice.step && slot.generation == choice.left_by, "common",
            fmt::format("{} is to resume from step {}, which it does not have", host.name, choice.step));
    return after(uniform(0.05, 0.5), host, done);
  }
  host.loads_since_s = now_s_;
  const auto read = [this, &host, choice, done](const auto& again) -> void {
    bool saves = false;
    for (Slot& slot : host.slots) {
      if (slot.reserved > 0) reserve(slot, 0);  // a writer that takes back its save promises the slot once more
      saves = saves || slot.reserved != 0;
    }
    if (saves) return after(0.1, host, [again] { again(again); });
    for (Slot& slot : host.slots) {
      slot.whole = false;
      ++slot.version;
    }
    host.loads_since_s = kNever;
    after(uniform(0.05, 4), host, [&host, choice, done] {
      Slot& slot = host.slots[choice.slot];
      slot.whole = true;
      slot.step = choice.step;
      slot.generation = choice.generation;
      done();
    });
  };
  read(read);
}

void World::go() {
  ++out_.generations;
  for (const int64_t member : members()) {
    const Host& host = hosts_[static_cast<size_t>(member)];
    const bool loaded = host.follower && host.follower->has_loaded(incarnation_);
    require(loaded || !host.up || !links_[static_cast<size_t>(member)].passes, "common",
            fmt::format("the ranks start, and {} has not loaded", host.name));
  }
  say("the ranks run, generation {}, from step {}", incarnation_, choice_.step);
  advance(generation::Go{incarnation_});
  feed(leader(), saves::Resumed{});
  for (const int64_t member : members()) send_down(member, hosts::Go{incarnation_});
  leader().ranks = true;
  trained_ = choice_.step;
  current_ = choice_.slot;
  save_pending_ = false;
  no_slot_since_s_ = -1;
  publishing_ = 0;
  after(life_.step_s, leader(), [this, number = incarnation_] { train(number); });
  poke(leader());
}

void World::end(int64_t code, const std::string& why) {
  say("the run ends with {}: {}", code, why);
  out_.ended = code;
  over_ = true;
}

// --- training --------------------------------------------------------------------------------------------------------

/// One step of all ranks, where all run; else they wait for each other until the agents stop them.
void World::train(uint64_t generation) {
  if (!generation_->is_running() || generation != incarnation_) return;
  const auto again = [this, generation](double seconds) {
    after(seconds, leader(), [this, generation] { train(generation); });
  };
  for (const int64_t place : places_) {
    if (!hosts_[static_cast<size_t>(place)].ranks) return again(0.5);
  }
  if (publishing_ > 0) return again(0.2);
  std::vector<ckpt::SlotView> views;
  for (const Slot& slot : leader().slots)
    views.push_back(
        {.whole = slot.whole, .reserved = slot.reserved != 0, .incarnation = slot.generation, .step = slot.step});
  std::optional<int64_t> slot = ckpt::choose_slot(views, static_cast<int64_t>(current_));
  if (!slot) {
    if (no_slot_since_s_ < 0) no_slot_since_s_ = now_s_;
    if (now_s_ - no_slot_since_s_ < 100 || leader().slots[current_].reserved != 0) return again(0.5);
    slot = static_cast<int64_t>(current_);  // in place
  }
  no_slot_since_s_ = -1;
  ++trained_;
  current_ = static_cast<size_t>(*slot);
  const int64_t reserved = std::ranges::count_if(leader().slots, [](const Slot& one) { return one.reserved != 0; });
  save_pending_ = save_pending_ || trained_ % life_.save_steps == 0;
  const bool persist = save_pending_ && reserved < life_.in_flight;
  if (persist) save_pending_ = false;
  for (const int64_t place : places_) {
    Host& host = hosts_[static_cast<size_t>(place)];
    Slot& into = host.slots[current_];
    into.whole = false;
    ++into.version;
    into.step = trained_;
    into.generation = generation;
    if (persist && place == 0) reserve(into, trained_);
    if (!persist) {
      publish(host, current_, trained_, generation, false);
      continue;
    }
    ++publishing_;
    after(uniform(0, 0.4), host, [this, &host, slot = current_, step = trained_, generation, life = host.ranks_life] {
      if (host.ranks_life != life) return;
      publish(host, slot, step, generation, true);
      if (generation == incarnation_) --publishing_;
    });
  }
  again(life_.step_s * uniform(0.9, 1.1));
}

void World::publish(Host& host, size_t slot, int64_t step, uint64_t generation, bool persist) {
  Slot& into = host.slots[slot];
  if (persist && host.index != 0) reserve(into, step);
  into.whole = true;
  into.step = step;
  into.generation = generation;
  Host& holder = hosts_[static_cast<size_t>((host.index + 1) % life_.hosts)];
  if (holder.up) holder.held[slot] = into;
  if (persist) poke(host);
}

}  // namespace cairn::sim
