#include "tests/sim/world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "ckpt/snapshot/slot_rule.h"
#include "runtime/core/check.h"
#include "runtime/core/random.h"
#include "runtime/hosts/saves.h"
#include "tests/sim/assertion.h"

namespace cairn::sim {
namespace {

namespace saves = hosts::saves;
using hosts::Message;
using saves::Try;

constexpr double kWaitS = 600;       // for hosts, as hosts{ wait } by default
constexpr double kSpareAfterS = 30;  // until copies stand for a host that is gone
constexpr double kDeadS = 3;         // until a silent host is lost
constexpr double kLookS = 2;         // between two looks of a member
constexpr double kPromiseS = 60;     // saves::Limits::promise
constexpr double kNever = 1e18;

constexpr std::array<std::string_view, kFaultKinds> kFaultNames = {
    "cut", "kill", "power", "leave", "rank", "freeze", "slow", "hang", "full", "broken", "memory", "gone"};

int64_t ns(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

struct Slot {
  bool whole = false;
  uint64_t generation = 0;
  int64_t step = 0;
  int64_t reserved = 0;  // as in the arena: a step that is promised, negative while it is being saved
  int64_t version = 0;   // counts writes
  double since_s = 0;    // reserved
};

/// One of a persister's threads.
struct Thread {
  enum class At : uint8_t { kIdle, kRule, kDisk, kPause };
  At at = At::kIdle;  // kRule: it waits for an order of the rule
  Try of;
  int64_t step = 0;
  size_t slot = 0;
  int64_t version = 0;
  std::string folder;
};

struct Choice {
  int64_t step = 0;
  size_t slot = 0;
  bool from_memory = false;
  uint64_t generation = 0;
};

struct Host {
  int64_t index = 0;
  std::string name;
  bool up = false, gone = false;
  int64_t process = 0;  // counts lives of its agent: events of an earlier one are dropped
  std::unique_ptr<saves::Leader> leader;
  std::unique_ptr<saves::Member> member;
  std::vector<Slot> slots;
  std::vector<Slot> held;  // copies of the host before it
  std::vector<Thread> threads;
  std::set<int64_t> again;  // steps promised while a write of them was under way
  std::set<Try> dropped;    // as this agent has heard
  bool ranks = false;       // run here
  int64_t ranks_life = 0;
  std::optional<Choice> choice;
  std::set<int64_t> leader_promises;
  double loop_free_s = 0;                                                            // its agent's loop
  double slow_s = 0, hang_s = 0, full_s = 0, broken_s = 0, frozen_s = 0, cut_s = 0;  // until
  bool no_memory = false;
  double tick_s = kNever;
};

/// The connection of a member to the leader.
struct Link {
  int64_t id = 0;
  bool passes = false;                                     // bytes do
  bool leader_has = false, member_has = false;             // as the two ends see it
  bool leader_heard = false;                               // of its loss, on the thread of the connections
  double last_down_s = 0, last_up_s = 0;                   // first in, first out
  std::map<int64_t, std::pair<bool, Message>> on_the_way;  // to the member?
};

struct Folder {
  int64_t step = 0;
  std::set<int64_t> parts;
};

struct Event {
  double at_s = 0;
  int64_t number = 0, host = -1, process = 0;
  std::function<void()> run;
  bool operator<(const Event& other) const { return std::tie(at_s, number) > std::tie(other.at_s, other.number); }
};

struct Violation {
  std::string what;
};

class World {
 public:
  World(const Life& life, bool story);
  Outcome run();

 private:
  // --- time and chance
  double uniform(double low, double high) { return low + (high - low) * uniform_at(key_, draws_++); }
  bool chance(double of) { return uniform(0, 1) < of; }
  void after(double seconds, std::function<void()> run) { push(now_s_ + seconds, -1, 0, std::move(run)); }
  /// As long as this life of the host's agent lasts.
  void after(double seconds, Host& host, std::function<void()> run) {
    push(now_s_ + seconds, host.index, host.process, std::move(run));
  }
  void push(double at_s, int64_t host, int64_t process, std::function<void()> run) {
    events_.push_back({at_s, numbers_++, host, process, std::move(run)});
    std::push_heap(events_.begin(), events_.end());
  }
  template <typename... Args>
  void say(fmt::format_string<Args...> text, Args&&... args) {
    if (!story_) return;
    out_.story += fmt::format("{:8.1f}  ", now_s_);
    out_.story += fmt::format(text, std::forward<Args>(args)...);
    out_.story += '\n';
  }
  [[noreturn]] void violate(std::string what) { throw Violation{std::move(what)}; }
  void require(bool holds, const char* invariant, const std::string& what) {
    if (!holds) violate(fmt::format("{}: {}", invariant, what));
  }

  // --- hosts
  Host& leader() { return hosts_[0]; }
  void start(Host& host);
  void stop_process(Host& host);
  void lose_memory(Host& host);
  void stop_ranks(Host& host);
  void ranks_gone(Host& host);
  std::set<int64_t> promised(const Host& host) const;
  std::vector<hosts::Slot> memory_of(const std::vector<Slot>& slots) const;
  void reserve(Slot& slot, int64_t step) {
    if (std::abs(slot.reserved) != std::abs(step) || step == 0) slot.since_s = now_s_;
    slot.reserved = step;
  }

  // --- connections
  void break_link(int64_t host, double leader_s, double member_s);
  void leader_hears_of_loss(int64_t host, const std::string& why);
  void member_hears_of_loss(int64_t host, const std::string& why);
  void reconnect(int64_t host);
  void send_down(int64_t host, const Message& message);
  void send_up(int64_t host, const Message& message);
  void carry(int64_t host, bool down, const Message& message);
  void at_leader(int64_t host, const Message& message);
  void at_member(int64_t host, const Message& message);
  void on_members_loop(Host& host, const Message& message);

  // --- the rule
  template <typename Event>
  void feed(Host& host, const Event& event);
  void perform(Host& host, const saves::Actions& actions);
  void check_rule(Host& host, const std::vector<saves::Wait>& waits);
  void tick(Host& host);
  void check_left();
  std::optional<Try> current(const Host& host, int64_t step) const {
    return host.leader ? host.leader->current(step) : host.member->current(step);
  }

  // --- persisters and the disk
  void poke(Host& host);
  bool begin_one(Host& host, Thread& thread);
  void ask(Host& host, Thread& thread);
  void order(Host& host, const saves::Action& action);
  void leave(Host& host, Thread& thread, const std::optional<Error>& error);
  void release(Host& host, Thread& thread, bool saved);
  void on_disk(Host& host, double seconds, std::function<void()> done);
  std::optional<Error> disk_error(Host& host) const;
  void write_parts(Host& host, Thread& thread, const saves::WriteParts& order);
  void write_ward(Host& host, const saves::WriteWard& order);
  void commit(Host& host, const Thread& thread, const saves::Commit& order);
  bool all_idle(const Host& host) const {
    return std::ranges::all_of(host.threads, [](const Thread& thread) { return thread.at == Thread::At::kIdle; });
  }

  // --- the leader's gathering, as Fleet does it
  enum class Fleet : uint8_t { kGathering, kAsking, kLoading, kRunning, kSavingLast, kEnded };
  std::vector<int64_t> members() const;
  void set_hosts();
  void fail_generation(const std::string& why);
  void gather();
  void asked_too_long(int64_t gathering);
  void use_copies();
  void shrink_to_present();
  void settle();
  void resume(const std::vector<hosts::Slot>& common);
  void load(Host& host, const Choice& choice);
  void carried(int64_t host);
  void go();
  void end(int64_t code, const std::string& why);

  // --- training
  void train(uint64_t generation);
  void publish(Host& host, size_t slot, int64_t step, uint64_t generation, bool persist);

  // --- faults
  void strike(const Fault& fault);

  const Life life_;
  const bool story_;
  const uint64_t key_;
  uint64_t draws_ = 0;
  double now_s_ = 0;
  int64_t numbers_ = 0;
  std::vector<Event> events_;
  std::vector<Host> hosts_;
  std::vector<Link> links_;  // by host; 0: unused
  Outcome out_;

  std::map<std::string, Folder> folders_;
  std::map<int64_t, std::set<int64_t>> disk_;    // the hosts whose parts a step has
  std::set<std::pair<int64_t, Try>> committed_;  // by the leader's process
  std::map<int64_t, int64_t> order_process_;     // by host: the leader's that it is connected to
  std::vector<double> committed_s_;
  std::map<std::pair<int64_t, Try>, double> unpromised_s_;  // by host: since when it could have refused an order

  Fleet fleet_ = Fleet::kGathering;
  std::set<int64_t> places_;  // hosts that train
  int64_t asks_ = 0, gathering_ = 0, epoch_ = 0;
  std::map<int64_t, std::vector<hosts::Slot>> idle_;
  std::set<int64_t> carried_;
  Choice choice_;
  uint64_t generation_ = 0;
  int64_t last_step_ = -1;  // kSavingLast
  int64_t trained_ = 0;
  size_t current_ = 0;
  bool save_pending_ = false;
  double no_slot_since_s_ = -1;
  int64_t publishing_ = 0;
};

World::World(const Life& life, bool story)
    : life_(life),
      story_(story),
      key_(mix64(life.seed)),
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
    while (!events_.empty() && events_.front().at_s <= end_s && fleet_ != Fleet::kEnded) {
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
    }
    if (fleet_ != Fleet::kEnded) {
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
  }
  if (out_.violation) say("VIOLATION {}", *out_.violation);
  out_.seconds = now_s_;
  return std::move(out_);
}

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
  host.leader_promises.clear();
  host.loop_free_s = now_s_;
  host.tick_s = kNever;
  for (Slot& slot : host.slots) {
    if (slot.reserved < 0) reserve(slot, -slot.reserved);  // as Arena::adopt()
  }
  ranks_gone(host);
  say("{} starts", host.name);
  if (host.index == 0) {
    host.leader = std::make_unique<saves::Leader>();
    fleet_ = Fleet::kGathering;
    unpromised_s_.clear();  // its tries count from 1 again
    ++epoch_;
    set_hosts();
    gather();
  } else {
    host.member = std::make_unique<saves::Member>(host.index);
    const auto look = [this, &host](const auto& again) -> void {
      feed(host, saves::Look{promised(host)});
      after(kLookS, host, [again] { again(again); });
    };
    after(uniform(0, kLookS), host, [look] { look(look); });
    reconnect(host.index);
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

// --- connections -----------------------------------------------------------------------------------------------------

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
  after(uniform(0, 0.5), leader(), [this, index, why, id = link.id] {  // its loop comes to it later
    Link& lost = links_[static_cast<size_t>(index)];
    if (lost.id != id || !lost.leader_has) return;
    lost.leader_has = false;
    if (!places_.contains(index)) return;
    feed(leader(), saves::Lost{index, why});
    fail_generation(fmt::format("h{} was lost", index));
    if (fleet_ == Fleet::kAsking || fleet_ == Fleet::kLoading) {
      fleet_ = Fleet::kGathering;
      gather();
    }
  });
}

void World::member_hears_of_loss(int64_t index, const std::string& why) {
  Link& link = links_[static_cast<size_t>(index)];
  if (!link.member_has) return;
  link.member_has = false;
  Host& host = hosts_[static_cast<size_t>(index)];
  say("{} has lost the leader", host.name);
  feed(host, saves::LeaderLost{why});
  stop_ranks(host);
  after(uniform(0, 1), host, [this, &host] { ranks_gone(host); });
}

void World::reconnect(int64_t index) {
  Link& link = links_[static_cast<size_t>(index)];
  Host& host = hosts_[static_cast<size_t>(index)];
  if (host.gone || (link.leader_has && link.member_has && link.passes)) return;
  if (!host.up || !leader().up || host.cut_s > now_s_ || host.frozen_s > now_s_ || leader().frozen_s > now_s_ ||
      link.leader_has || link.member_has) {
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
  if (places_.contains(index)) feed(leader(), saves::Back{index});
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
    if (const auto* const idle = std::get_if<hosts::Idle>(&message);
        idle != nullptr && fleet_ == Fleet::kAsking && idle->ask == asks_) {
      idle_[index] = idle->memory.whole;
      settle();
    }
    if (std::holds_alternative<hosts::Carried>(message)) carried(index);
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
  host.loop_free_s = std::max(host.loop_free_s, now_s_) + uniform(0, 0.1);
  after(host.loop_free_s - now_s_, host, [this, &host, message, id = links_[static_cast<size_t>(index)].id] {
    if (links_[static_cast<size_t>(host.index)].id == id) on_members_loop(host, message);
  });
}

/// The follower does the same (tools/run/follower.cc).
void World::on_members_loop(Host& host, const Message& message) {
  if (const auto* const promise = std::get_if<hosts::Promise>(&message)) {
    feed(host, saves::Promised{promise->slot.step});
    Slot& slot = host.slots[static_cast<size_t>(promise->slot.slot)];
    if (slot.whole && slot.step == promise->slot.step && slot.generation == promise->slot.incarnation) {
      if (slot.reserved == 0) reserve(slot, slot.step);
      if (slot.reserved == -slot.step) host.again.insert(slot.step);
      poke(host);
    }
  } else if (const auto* const halt = std::get_if<hosts::Halt>(&message)) {
    stop_ranks(host);
    host.loop_free_s = now_s_ + uniform(0, 1.5);
    after(host.loop_free_s - now_s_, host, [this, &host, ask = halt->ask] {
      ranks_gone(host);
      host.choice.reset();
      send_up(host.index, hosts::Idle{.ask = ask, .memory = {generation_, memory_of(host.slots)}});
    });
  } else if (const auto* const order = std::get_if<hosts::Resume>(&message)) {
    const Choice choice{order->step, static_cast<size_t>(order->slot), order->source == hosts::Resume::Source::kMemory,
                        order->incarnation};
    host.loop_free_s = now_s_ + uniform(0.05, choice.from_memory ? 0.5 : 5);
    after(host.loop_free_s - now_s_, host, [this, &host, choice, promised = order->promised] {
      load(host, choice);
      host.choice = choice;
      host.leader_promises = {promised.begin(), promised.end()};
      send_up(host.index, hosts::Carried{});
    });
  } else if (const auto* const go = std::get_if<hosts::Go>(&message);
             go != nullptr && host.choice && go->incarnation == host.choice->generation) {
    feed(host, saves::Resumed{host.choice->step, promised(host), std::exchange(host.leader_promises, {})});
    host.choice.reset();
    host.ranks = true;
    poke(host);
  }
}

// --- the rule --------------------------------------------------------------------------------------------------------

template <typename Event>
void World::feed(Host& host, const Event& event) {
  if (!host.up) return;
  const int64_t now_ns = ns(now_s_);
  saves::Actions actions;
  std::vector<saves::Wait> waits;
  if (host.leader) {
    if constexpr (std::is_constructible_v<saves::LeaderEvent, Event>) {
      actions = host.leader->step(event, now_ns);
      waits = host.leader->waits();
    }
  } else {
    if constexpr (std::is_constructible_v<saves::MemberEvent, Event>) {
      actions = host.member->step(event, now_ns);
      waits = host.member->waits();
    }
  }
  check_rule(host, waits);
  perform(host, actions);
}

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
        const bool in_vain = each || (fleet_ == Fleet::kRunning && !promised(leader()).contains(thread.step));
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

// --- persisters and the disk -----------------------------------------------------------------------------------------

void World::poke(Host& host) {
  for (Thread& thread : host.threads) {
    while (host.up && thread.at == Thread::At::kIdle && begin_one(host, thread)) {
    }
  }
}

/// NodePersister::write_promised
bool World::begin_one(Host& host, Thread& thread) {
  std::optional<size_t> chosen;
  for (size_t k = 0; k < host.slots.size(); ++k) {
    const Slot& slot = host.slots[k];
    if (slot.reserved <= 0 || !slot.whole || slot.step != slot.reserved) continue;
    if (host.member && !host.member->is_due(slot.step)) continue;
    if (!chosen || slot.step < host.slots[*chosen].step) chosen = k;
  }
  if (!chosen) return false;
  Slot& slot = host.slots[*chosen];
  reserve(slot, -slot.step);
  thread.step = slot.step;
  thread.slot = *chosen;
  thread.version = slot.version;
  ask(host, thread);
  return true;
}

/// SharedRule::ask
void World::ask(Host& host, Thread& thread) {
  const bool busy = current(host, thread.step).has_value();
  const int64_t now_ns = ns(now_s_);
  saves::Actions actions = host.leader ? host.leader->step(saves::Ask{thread.step}, now_ns)
                                       : host.member->step(saves::Ask{thread.step}, now_ns);
  thread.of = busy ? Try{thread.step, 0} : current(host, thread.step).value_or(Try{thread.step, 0});
  for (const saves::Action& action : actions) {
    const auto* const leave = std::get_if<saves::Leave>(&action);
    if (leave != nullptr && leave->of.step == thread.step && !busy) thread.of = leave->of;
  }
  thread.at = Thread::At::kRule;
  say("{} comes to step {}{}", host.name, thread.step,
      thread.of.number > 0 ? fmt::format(", try {}", thread.of.number) : "");
  check_rule(host, host.leader ? host.leader->waits() : host.member->waits());
  perform(host, actions);
}

void World::order(Host& host, const saves::Action& action) {
  const auto of = std::visit(
      [](const auto& one) {
        if constexpr (requires { one.of; }) return one.of;
        return Try{};
      },
      action);
  const auto thread =
      std::ranges::find_if(host.threads, [&](const Thread& one) {  // 0: it waits without a try (planted)
        return one.at == Thread::At::kRule && one.of.step == of.step && (one.of.number == 0 || one.of == of);
      });
  require(thread != host.threads.end(), "assertion",
          fmt::format("{}: an order for step {}, try {} to no thread", host.name, of.step, of.number));
  Thread* const mine = &*thread;
  mine->of = of;
  if (const auto* const left = std::get_if<saves::Leave>(&action)) return leave(host, *mine, left->error);
  mine->at = Thread::At::kDisk;
  if (std::holds_alternative<saves::MakeFolder>(action)) {
    on_disk(host, uniform(0.001, 0.02), [this, &host, mine] {
      mine->at = Thread::At::kRule;
      if (const std::optional<Error> error = disk_error(host)) return feed(host, saves::Failed{mine->of, *error});
      mine->folder = fmt::format("tmp-{}-{}-{}", mine->of.step, host.process, mine->of.number);
      folders_[mine->folder] = {mine->of.step, {}};
      feed(host, saves::FolderMade{mine->of, mine->folder});
    });
  } else if (const auto* const write = std::get_if<saves::WriteParts>(&action)) {
    write_parts(host, *mine, *write);
  } else if (const auto* const all = std::get_if<saves::Commit>(&action)) {
    on_disk(host, uniform(0.05, 0.3), [this, &host, mine, order = *all] {
      mine->at = Thread::At::kRule;
      commit(host, *mine, order);
    });
  } else if (const auto* const abandon = std::get_if<saves::Abandon>(&action)) {
    on_disk(host, uniform(0.01, 0.1), [this, &host, mine, error = abandon->error] {
      mine->at = Thread::At::kRule;
      folders_.erase(mine->folder);
      feed(host, saves::Failed{mine->of, error});
    });
  }
}

void World::leave(Host& host, Thread& thread, const std::optional<Error>& error) {
  if (!error) {
    require(committed_.contains({host.leader ? host.process : order_process_[host.index], thread.of}), "reported",
            fmt::format("{} takes step {}, try {} for saved", host.name, thread.of.step, thread.of.number));
  }
  if (error) {
    ++out_.failed;
    say("{} has not saved step {}: {}", host.name, thread.step, error->message);
    if (host.leader) {
      after(uniform(0, 0.2), host, [this, &host, step = thread.step, why = *error] {
        feed(host, saves::NeverAsked{step, why});
      });
    }
  } else {
    say("{} has saved step {}", host.name, thread.step);
  }
  release(host, thread, !error.has_value());
}

void World::release(Host& host, Thread& thread, bool saved) {
  Slot& slot = host.slots[thread.slot];
  const bool promised_again = host.again.erase(thread.step) > 0 && !saved;
  if (slot.reserved == -thread.step) reserve(slot, promised_again ? thread.step : 0);
  const int64_t step = thread.step;
  thread.at = Thread::At::kIdle;
  after(0.001, host, [this, &host] { poke(host); });
  if (host.leader && fleet_ == Fleet::kSavingLast && step == last_step_ && slot.reserved == 0) {
    after(0.5, host, [this, saved] {
      if (saved) return shrink_to_present();
      end(69, "what memory held could not be saved");
    });
  }
}

void World::on_disk(Host& host, double seconds, std::function<void()> done) {
  if (host.slow_s > now_s_) seconds = std::min(50 * seconds, host.slow_s - now_s_ + seconds);
  const auto finish = [this, &host](const auto& again, const std::function<void()>& run) -> void {
    if (host.hang_s <= now_s_) return run();
    after(host.hang_s - now_s_ + uniform(0, 0.5), host, [again, run] { again(again, run); });
  };
  after(seconds, host, [finish, done = std::move(done)] { finish(finish, done); });
}

std::optional<Error> World::disk_error(Host& host) const {
  if (host.full_s > now_s_) return Error{ErrorCode::kNoSpace, "the disk is full"};
  if (host.broken_s > now_s_) return Error{ErrorCode::kIo, "the disk fails"};
  return std::nullopt;
}

void World::write_parts(Host& host, Thread& thread, const saves::WriteParts& order) {
  on_disk(host, chance(0.1) ? uniform(1, 20) : uniform(0.1, 1.5), [this, &host, mine = &thread, order] {
    mine->at = Thread::At::kRule;
    if (std::exchange(host.no_memory, false)) {
      say("{} has no memory for step {}", host.name, mine->step);
      if (host.leader) {
        folders_.erase(mine->folder);
        host.again.insert(mine->step);  // promised still
        return feed(host, saves::Failed{mine->of, {ErrorCode::kInternal, "the leader could not save it"}});
      }
      feed(host, saves::Thrown{mine->of});
      reserve(host.slots[mine->slot], mine->step);
      mine->at = Thread::At::kPause;
      return after(1, host, [this, &host, mine] {
        mine->at = Thread::At::kIdle;
        poke(host);
      });
    }
    const auto folder = folders_.find(host.leader ? mine->folder : order.folder);
    std::optional<Error> error = disk_error(host);
    const Slot& slot = host.slots[mine->slot];
    if (!error && folder == folders_.end()) error = Error{ErrorCode::kIo, "no such folder"};
    if (!error && (slot.version != mine->version || !slot.whole))
      error = Error{ErrorCode::kCorrupt, "its sums do not hold"};
    for (const hosts::Ward& ward : order.wards) {
      const Slot& held = host.held[static_cast<size_t>(ward.slot.slot)];
      if (!error && (!held.whole || held.step != ward.slot.step))
        error = Error{ErrorCode::kUnavailable, "it is not held here any more"};
    }
    if (error) {
      if (host.leader && folder != folders_.end()) folders_.erase(folder);
      return feed(host, saves::Failed{mine->of, *error});
    }
    require(folder->second.step == slot.step, "parts",
            fmt::format("{} writes step {} into the folder of step {}", host.name, slot.step, folder->second.step));
    folder->second.parts.insert(host.index);
    for (const hosts::Ward& ward : order.wards) folder->second.parts.insert(ward.host);
    feed(host, saves::PartWritten{mine->of});
  });
}

void World::write_ward(Host& host, const saves::WriteWard& order) {
  on_disk(host, uniform(0.1, 3), [this, &host, order] {
    saves::WardWritten done{.of = order.of, .host = order.ward.host, .error = disk_error(host)};
    const Slot& held = host.held[static_cast<size_t>(order.ward.slot.slot)];
    if (!done.error && (!held.whole || held.step != order.of.step))
      done.error = Error{ErrorCode::kUnavailable, "it is not held here any more"};
    const auto folder = folders_.find(order.folder);
    if (!done.error && folder == folders_.end()) done.error = Error{ErrorCode::kIo, "no such folder"};
    if (!done.error) folder->second.parts.insert(order.ward.host);
    say("{} has {}written the part of h{}", host.name, done.error ? "not " : "", order.ward.host);
    feed(host, done);
  });
}

void World::commit(Host& host, const Thread& thread, const saves::Commit& order) {
  const auto folder = folders_.find(thread.folder);
  std::optional<Error> error = disk_error(host);
  if (!error && folder == folders_.end()) error = Error{ErrorCode::kIo, "no such folder"};
  if (error) {
    if (folder != folders_.end()) folders_.erase(folder);
    return feed(host, saves::Failed{order.of, *error});
  }
  std::set<int64_t> all{0};
  for (const auto& [index, name] : order.hosts) all.insert(index);
  require(folder->second.parts == all && all == places_, "parts",
          fmt::format("step {} gets its name with the parts of {}, of {}", order.of.step,
                      fmt::join(folder->second.parts, ", "), fmt::join(places_, ", ")));
  disk_[order.of.step] = folder->second.parts;
  folders_.erase(folder);
  committed_.insert({host.process, order.of});
  committed_s_.push_back(now_s_);
  ++out_.saves;
  feed(host, saves::Named{order.of});
}

// --- the leader's gathering ------------------------------------------------------------------------------------------

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

// --- faults ----------------------------------------------------------------------------------------------------------

void World::strike(const Fault& fault) {
  Host& host = hosts_[static_cast<size_t>(fault.host)];
  const double until_s = now_s_ + fault.seconds;
  if (host.gone) return;
  say("FAULT {}", to_text(fault));
  const auto restart = [this, &host](double seconds) { after(seconds, [this, &host] { start(host); }); };
  switch (fault.kind) {
    case FaultKind::kCut:
      if (host.index == 0) return;
      host.cut_s = std::max(host.cut_s, until_s);
      return break_link(host.index, uniform(0, kDeadS), uniform(0, kDeadS));
    case FaultKind::kKill:
      stop_process(host);
      return restart(fault.seconds);
    case FaultKind::kPower:
      stop_process(host);
      lose_memory(host);
      return restart(fault.seconds);
    case FaultKind::kLeave: {
      if (!host.up || host.frozen_s > now_s_) return;
      for (Thread& thread : host.threads) {
        if (thread.at != Thread::At::kRule) continue;
        const Try of = thread.of;
        feed(host, saves::GiveUp{of});
        require(thread.at != Thread::At::kRule || thread.of != of, "leaves",
                fmt::format("{} still waits for step {}", host.name, of.step));
      }
      after(0.3, host, [this, &host] { stop_process(host); });
      return restart(std::max(1.0, fault.seconds));
    }
    case FaultKind::kRank:
      if (!host.up || !host.ranks) return;
      if (host.index == 0) return fail_generation("a rank of h0 has failed");
      stop_ranks(host);
      return send_up(host.index, hosts::Failed{.incarnation = generation_, .failure = {}});
    case FaultKind::kFreeze:
      host.frozen_s = std::max(host.frozen_s, until_s);
      if (fault.seconds <= kDeadS) return;
      if (host.index > 0) return break_link(host.index, uniform(kDeadS * 0.9, kDeadS * 1.1), 0);
      for (const int64_t member : members()) break_link(member, 0, uniform(kDeadS * 0.9, kDeadS * 1.1));
      return;
    case FaultKind::kSlow:
      host.slow_s = until_s;
      return;
    case FaultKind::kHang:
      host.hang_s = until_s;
      return;
    case FaultKind::kFull:
      host.full_s = until_s;
      return;
    case FaultKind::kBroken:
      host.broken_s = until_s;
      return;
    case FaultKind::kMemory:
      host.no_memory = true;
      return;
    case FaultKind::kGone:
      if (host.index == 0 || !places_.contains(host.index)) return;
      stop_process(host);
      host.gone = true;
      return;
  }
}

}  // namespace

// --- lives -----------------------------------------------------------------------------------------------------------

std::string to_text(const Fault& fault) {
  return fmt::format("at {:.1f} s: {} h{} for {:.1f} s", fault.at_s, kFaultNames[static_cast<size_t>(fault.kind)],
                     fault.host, fault.seconds);
}

std::optional<Fault> fault_from(std::string_view text) {
  char kind[16] = {};
  Fault out;
  int host = 0;
  if (std::sscanf(std::string(text).c_str(), "at %lf s: %15s h%d for %lf s", &out.at_s, kind, &host, &out.seconds) != 4)
    return std::nullopt;
  const auto* const found = std::ranges::find(kFaultNames, std::string_view(kind));
  if (found == kFaultNames.end()) return std::nullopt;
  out.kind = static_cast<FaultKind>(found - kFaultNames.begin());
  out.host = host;
  return out;
}

Life random_life(uint64_t seed) {
  const uint64_t key = mix64(seed ^ 0x5EED);
  uint64_t draws = 0;
  const auto uniform = [&](double low, double high) { return low + (high - low) * uniform_at(key, draws++); };
  const auto whole = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(uniform(0, 1) * static_cast<double>(high - low + 1));
  };
  Life life{.seed = seed};
  life.hosts = uniform(0, 1) < 0.8 ? whole(2, 4) : whole(5, 8);
  life.in_flight = uniform(0, 1) < 0.7 ? 1 : whole(2, 3);
  life.save_steps = whole(3, 10);
  life.step_s = uniform(1, 5);
  const bool cruel = uniform(0, 1) < 0.5;  // faults close together
  const int64_t faults = uniform(0, 1) < 0.03 ? 0 : whole(3, 9);
  double at_s = uniform(5, 60);
  for (int64_t k = 0; k < faults; ++k) {
    Fault fault{.at_s = std::round(at_s * 10) / 10};
    fault.kind = static_cast<FaultKind>(whole(0, kFaultKinds - (uniform(0, 1) < 0.5 ? 1 : 2)));
    fault.host = whole(0, life.hosts - 1);
    if ((fault.kind == FaultKind::kCut || fault.kind == FaultKind::kGone) && fault.host == 0) fault.host = 1;
    const double length = uniform(0, 1), next = uniform(0, 1);
    fault.seconds = std::round((length < 0.5   ? uniform(0.1, 5)
                                : length < 0.9 ? uniform(5, 60)
                                               : uniform(60, 300)) *
                               10) /
                    10;
    if (fault.kind == FaultKind::kHang && next < 0.15) fault.seconds = 1600;
    if (fault.kind == FaultKind::kHang && next < 0.1) fault.host = 0;
    life.faults.push_back(fault);
    if (fault.kind == FaultKind::kGone && next < 0.4) {  // and its holder, while copies are used
      life.faults.push_back({.at_s = std::round((fault.at_s + uniform(30, 37)) * 10) / 10,
                             .kind = FaultKind::kKill,
                             .host = (fault.host + 1) % life.hosts,
                             .seconds = 5});
    }
    at_s += cruel && uniform(0, 1) < 0.6 ? uniform(0.1, 8) : uniform(20, 200);
  }
  life.faulty_s = 1000;
  for (const Fault& fault : life.faults) life.faulty_s = std::max(life.faulty_s, fault.at_s + fault.seconds + 5);
  return life;
}

Outcome live(const Life& life, bool story) { return World(life, story).run(); }

Life shrink(const Life& life) {
  const auto kind_of = [](const std::optional<std::string>& violation) {
    return violation ? violation->substr(0, violation->find(':')) : std::string();
  };
  Life best = life;
  const std::string wanted = kind_of(live(life, false).violation);
  const auto still = [&](const Life& one) { return kind_of(live(one, false).violation) == wanted; };
  for (bool smaller = true; smaller;) {
    smaller = false;
    const auto attempt = [&](const Life& one) {
      if (!still(one)) return false;
      best = one;
      return smaller = true;
    };
    for (size_t k = 0; k < best.faults.size(); ++k) {
      Life one = best;
      one.faults.erase(one.faults.begin() + static_cast<int64_t>(k));
      if (attempt(one)) break;
    }
    const bool uses_last =
        std::ranges::any_of(best.faults, [&](const Fault& one) { return one.host == best.hosts - 1; });
    if (best.hosts > 2 && !uses_last) {
      Life one = best;
      --one.hosts;
      attempt(one);
    }
    if (best.in_flight > 1) {
      Life one = best;
      --one.in_flight;
      attempt(one);
    }
    for (const double faulty_s :
         {best.faults.empty() ? 0.0 : best.faults.back().at_s + best.faults.back().seconds + 5}) {
      if (faulty_s + 10 > best.faulty_s) continue;
      Life one = best;
      one.faulty_s = faulty_s;
      attempt(one);
    }
  }
  return best;
}

}  // namespace cairn::sim
