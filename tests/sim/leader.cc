// The leader's gathering, in the order of tools/run/fleet.cc, and the training of all ranks.
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

void World::fail_generation(const std::string& why) {
  if (fleet_ != Fleet::kRunning) return;
  say("h0 stops the ranks: {}", why);
  stop_ranks(leader());
  ranks_gone(leader());
  fleet_ = Fleet::kGathering;
  gather();
}

void World::gather() {
  if (fleet_ != Fleet::kGathering || !leader().up) return;
  std::vector<int64_t> away;
  for (const int64_t member : members()) {
    if (!links_[static_cast<size_t>(member)].leader_has) away.push_back(member);
  }
  if (!away.empty()) {
    const int64_t number = ++gathering_;
    after(kSpareAfterS, leader(), [this, number] {
      if (number == gathering_ && fleet_ == Fleet::kGathering) use_copies();
    });
    after(kWaitS, leader(), [this, number] {
      if (number == gathering_ && fleet_ == Fleet::kGathering) end(69, "a host did not come back");
    });
    return;
  }
  ++gathering_;
  fleet_ = Fleet::kAsking;
  idle_.clear();
  ++asks_;
  for (const int64_t member : members()) send_down(member, hosts::Halt{asks_});
  after(uniform(0.1, 1), leader(), [this, ask = asks_] {
    if (fleet_ != Fleet::kAsking || ask != asks_) return;
    ranks_gone(leader());
    idle_[0] = memory_of(leader().slots);
    settle();
  });
}

std::vector<hosts::Slot> common_of(const std::map<int64_t, std::vector<hosts::Slot>>& memories) {
  std::vector<hosts::Slot> common = memories.begin()->second;
  std::erase_if(common, [&](const hosts::Slot& slot) {
    return std::ranges::any_of(
        memories, [&](const auto& one) { return std::ranges::find(one.second, slot) == one.second.end(); });
  });
  return common;
}

hosts::Slot newest(const std::vector<hosts::Slot>& slots) {
  return *std::ranges::max_element(slots, {},
                                   [](const hosts::Slot& slot) { return std::pair(slot.incarnation, slot.step); });
}

/// Hosts that are gone: the newest step that the others and copies have is saved, and the run continues without them.
void World::use_copies() {
  std::map<int64_t, std::vector<hosts::Slot>> memories;
  std::vector<hosts::Ward> wards;
  for (const int64_t place : places_) {
    const Host& host = hosts_[static_cast<size_t>(place)];
    if (place == 0 || links_[static_cast<size_t>(place)].leader_has) {
      memories[place] = memory_of(host.slots);
      continue;
    }
    const int64_t holder = (place + 1) % life_.hosts;
    if (!host.gone || !places_.contains(holder) || (holder > 0 && !links_[static_cast<size_t>(holder)].leader_has))
      return;
    memories[place] = memory_of(hosts_[static_cast<size_t>(holder)].held);
    wards.push_back({place, holder, {}});
  }
  const std::vector<hosts::Slot> common = common_of(memories);
  feed(leader(), saves::Settle{common});
  if (common.empty()) return end(69, "no host has a copy");
  const hosts::Slot slot = newest(common);
  for (hosts::Ward& ward : wards) ward.slot = slot;
  say("h0 uses copies of step {}", slot.step);
  fleet_ = Fleet::kSavingLast;
  last_step_ = slot.step;
  feed(leader(), saves::SetWards{0, wards});
  for (const int64_t member : members()) send_down(member, hosts::Promise{slot});
  Slot& own = leader().slots[static_cast<size_t>(slot.slot)];
  if (own.reserved == 0) reserve(own, slot.step);
  if (own.reserved == -slot.step) leader().again.insert(slot.step);
  poke(leader());
}

void World::shrink_to_present() {
  if (fleet_ != Fleet::kSavingLast) return;
  for (const int64_t place : places_) {
    const Host& host = hosts_[static_cast<size_t>(place)];
    if (host.up && !all_idle(host)) return after(0.5, leader(), [this] { shrink_to_present(); });
  }
  std::erase_if(places_, [this](int64_t place) { return hosts_[static_cast<size_t>(place)].gone; });
  for (const int64_t place : places_) lose_memory(hosts_[static_cast<size_t>(place)]);  // of another layout
  say("the run continues with {} hosts", places_.size());
  ++epoch_;
  set_hosts();
  fleet_ = Fleet::kGathering;
  gather();
}

void World::settle() {
  if (idle_.size() < places_.size()) return;
  const std::vector<hosts::Slot> common = common_of(idle_);
  feed(leader(), saves::Settle{common});
  resume(common);
}

void World::resume(const std::vector<hosts::Slot>& common) {
  fleet_ = Fleet::kLoading;
  carried_.clear();
  choice_ = {.generation = ++generation_};
  if (!common.empty()) {
    const hosts::Slot slot = newest(common);
    choice_.step = slot.step;
    choice_.slot = static_cast<size_t>(slot.slot);
    choice_.from_memory = true;
  } else {
    choice_.step = disk_.empty() ? 0 : disk_.rbegin()->first;
    if (!disk_.empty()) require(!disk_.rbegin()->second.empty(), "parts", "a step without parts");
    for (size_t k = 0; k < leader().slots.size(); ++k) {
      if (leader().slots[k].reserved == 0) choice_.slot = k;
    }
  }
  hosts::Resume order{.incarnation = choice_.generation,
                      .source = choice_.from_memory ? hosts::Resume::Source::kMemory : hosts::Resume::Source::kDisk,
                      .step = choice_.step,
                      .slot = static_cast<int64_t>(choice_.slot)};
  const std::set<int64_t> promises = promised(leader());
  order.promised = {promises.begin(), promises.end()};
  for (const int64_t member : members()) send_down(member, order);
  after(uniform(0.05, choice_.from_memory ? 0.5 : 4), leader(), [this, generation = choice_.generation] {
    if (fleet_ != Fleet::kLoading || generation != choice_.generation) return;
    load(leader(), choice_);
    carried(0);
  });
}

void World::load(Host& host, const Choice& choice) {
  Slot& slot = host.slots[choice.slot];
  if (!choice.from_memory) {
    ++slot.version;
    if (slot.reserved > 0) reserve(slot, 0);
    slot.whole = true;
    slot.step = choice.step;
    slot.generation = choice.generation;
  }
}

void World::carried(int64_t index) {
  if (fleet_ != Fleet::kLoading) return;
  carried_.insert(index);
  if (carried_.size() == places_.size()) go();
}

void World::go() {
  fleet_ = Fleet::kRunning;
  ++out_.generations;
  say("the ranks run, generation {}, from step {}", generation_, choice_.step);
  feed(leader(), saves::Resumed{});
  for (const int64_t member : members()) send_down(member, hosts::Go{generation_});
  leader().ranks = true;
  trained_ = choice_.step;
  current_ = choice_.slot;
  save_pending_ = false;
  no_slot_since_s_ = -1;
  publishing_ = 0;
  after(life_.step_s, leader(), [this, generation = generation_] { train(generation); });
  poke(leader());
}

void World::end(int64_t code, const std::string& why) {
  say("the run ends with {}: {}", code, why);
  out_.ended = code;
  fleet_ = Fleet::kEnded;
}

// --- training --------------------------------------------------------------------------------------------------------

/// One step of all ranks, where all run; else they wait for each other until the agents stop them.
void World::train(uint64_t generation) {
  if (fleet_ != Fleet::kRunning || generation != generation_) return;
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
      if (generation == generation_) --publishing_;
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
