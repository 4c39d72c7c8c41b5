#pragma once
// The inside of a life: its hosts, connections and folders, and the class that moves them. Each part has a source of
// its own: host.cc, network.cc, disk.cc, leader.cc, faults.cc.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/core/random.h"
#include "runtime/hosts/generation.h"
#include "runtime/hosts/member.h"
#include "runtime/hosts/saves.h"
#include "tests/sim/world.h"

namespace cairn::sim {

namespace generation = hosts::generation;
namespace member = hosts::member;
namespace saves = hosts::saves;
using hosts::Message;
using saves::Try;

inline constexpr double kWaitS = 600;       // for hosts, as hosts{ wait } by default
inline constexpr double kSpareAfterS = 30;  // until copies stand for a host that is gone
inline constexpr double kDeadS = 3;         // until a silent host is lost
inline constexpr double kLookS = 2;         // between two looks of a member
inline constexpr double kPromiseS = 60;     // saves::Limits::promise
inline constexpr double kLoadWaitS = 10;    // for a save that ends by itself
inline constexpr double kNever = 1e18;

inline constexpr std::array<std::string_view, kFaultKinds + 3> kFaultNames = {
    "cut",  "kill",   "power",  "leave", "rank",    "freeze", "slow", "hang",
    "full", "broken", "memory", "gone",  "exclude", "store",  "all"};

inline int64_t ns(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

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
  uint64_t left_by = 0;  // the generation of the slot
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
  std::unique_ptr<hosts::member::Member> follower;
  std::vector<Slot> slots;
  std::vector<Slot> held;  // copies of the host before it
  std::vector<Thread> threads;
  std::set<int64_t> again;  // steps promised while a write of them was under way
  std::set<Try> dropped;    // as this agent has heard
  bool ranks = false;       // run here
  int64_t ranks_life = 0;
  std::optional<Choice> choice;                   // that it has loaded
  int64_t layout = 0;                             // number of hosts that its memory is for; 0: it has none open
  std::deque<std::pair<int64_t, Message>> inbox;  // of its agent's loop; by connection
  bool busy = false;                              // the loop is
  double slow_s = 0, hang_s = 0, full_s = 0, broken_s = 0, frozen_s = 0, cut_s = 0;  // until
  bool no_memory = false;
  double tick_s = kNever, waits_s = kNever;  // the next Tick of saves, and of its member's
  double loads_since_s = kNever;             // it empties its memory: no write may be under way
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
  void read_inbox(Host& host);
  void on_members_loop(Host& host, const Message& message);
  void advance(Host& host, const member::Event& event);
  void perform(Host& host, const member::Action& action);
  void check_waits(Host& host);
  void close_memory(Host& host);
  void ranks_stop(Host& host);
  hosts::Begin begin_of(int64_t host) const;

  // --- the rule
  template <typename Event>
  void feed(Host& host, const Event& event);
  void perform(Host& host, const saves::Actions& actions);
  void check_rule(Host& host, const std::vector<saves::Wait>& waits);
  void tick(Host& host);
  void check_left();
  void check_loads();
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

  // --- the leader's driver, as tools/run/hosts/fleet.cc
  std::vector<int64_t> members() const;
  void set_hosts();
  void advance(const generation::Event& event);
  void perform(const generation::Action& action);
  void check_waits();
  void fail_generation(const std::string& why);
  void look(generation::Wants wants);
  void gather();
  void gathered();
  bool copies_stand_in() const;
  void ask(int64_t number);
  hosts::Idle idle_of(const Host& host, int64_t ask) const;
  void give(const generation::Give& order);
  void give_copy(Host& holder, int64_t to, const hosts::Slot& slot);
  void look_at_disk(const std::vector<hosts::Slot>& common);
  void choose(const std::vector<hosts::Slot>& common);
  void save_last(const hosts::Slot& slot);
  void shrink_to_present();
  void load(Host& host, const Choice& choice, const std::function<void()>& done);
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
  const bool copies_;  // hosts keep those of each other's memory
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

  std::optional<generation::Leader> generation_;  // of the leader's process
  bool gathering_ = false;                        // for the rule
  int64_t gatherings_ = 0, epoch_ = 0;
  generation::Wants wants_ = generation::Wants::kAll;
  bool over_ = false;
  double look_s_ = kNever;    // the next Tick of the rule
  std::set<int64_t> places_;  // hosts that train
  Choice choice_;
  uint64_t incarnation_ = 0;
  int64_t last_step_ = -1;  // that is saved before the run continues with fewer hosts; -1: none
  int64_t trained_ = 0;
  size_t current_ = 0;
  bool save_pending_ = false;
  double no_slot_since_s_ = -1;
  int64_t publishing_ = 0;
};

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

}  // namespace cairn::sim
