#include "tests/sim/members.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/core/random.h"
#include "runtime/hosts/membership.h"
#include "tests/sim/assertion.h"

namespace cairn::sim {
namespace {

namespace membership = hosts::membership;

constexpr double kJoinS = 60, kWaitS = 120, kDeadS = 3, kLeaseEveryS = 0.25, kPollS = 0.3;
constexpr double kRestS = kWaitS + kJoinS + 70;  // in which the run has to train again, or to end

int64_t ns(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

struct Record {
  int64_t number = 0, leader = 0, life = 0;  // index of the leader, and which of its leads
  std::vector<int64_t> places;
};

struct Agent {
  int64_t index = 0, process = 0;
  bool up = false, gone = false, excluded = false;
  double frozen_s = 0, froze_at_s = 0, cut_s = 0;  // until when; since when
  int64_t memory = 0;                              // the generation of ranks that has left it; outlives the process

  // The state of a leader.
  std::unique_ptr<membership::Leader> rule;
  int64_t life = 0;
  bool runs = false, held = true;
  double began_s = 0, grants_s = 0;  // since when it leads; how long before a spare takes a place
  bool counts_copies = false;        // and none where a copy is
  double shown_s = 0, failed_s = 0;  // its own last sign of the lease, and the last that the store did not take
  int64_t led_before = -1;
  std::vector<int64_t> places;       // of its last epoch
  std::map<int64_t, double> lost_s;  // since when it knows a host away
  std::set<int64_t> ever_joined, barred, door;
  std::map<int64_t, double> heard_s;  // when it has heard a connected host last
  std::map<int64_t, int64_t> links;   // by host

  // The state of a member.
  int64_t link = 0, door_life = 0, link_life = 0;  // connected, and to which lead; at whose door
  bool has_joined = false;
  int64_t place = -1;
  int64_t seen = -1;  // the lease's sign
  double still_since_s = 0, join_until_s = 0;
};

struct Violation {
  std::string what;
};

struct Event {
  double at_s = 0;
  int64_t number = 0, host = -1, process = 0;
  std::function<void()> run;
  bool operator<(const Event& other) const { return std::tie(at_s, number) > std::tie(other.at_s, other.number); }
};

class Members {
 public:
  Members(const Life& life, bool story) : life_(life), story_(story), key_(mix64(life.seed ^ 0x3E3)) {
    for (int64_t k = 0; k < life.hosts; ++k) agents_.emplace_back().index = k;
    for (int64_t k = life.smallest; k > 0 && k <= life.hosts; ++k) sizes_.insert(k);
  }
  Outcome run();

 private:
  double uniform(double low, double high) { return low + (high - low) * uniform_at(key_, draws_++); }
  void push(double at_s, int64_t host, int64_t process, std::function<void()> run) {
    events_.push_back({at_s, numbers_++, host, process, std::move(run)});
    std::push_heap(events_.begin(), events_.end());
  }
  void after(double seconds, std::function<void()> run) { push(now_s_ + seconds, -1, 0, std::move(run)); }
  void after(double seconds, const Agent& agent, std::function<void()> run) {
    push(now_s_ + seconds, agent.index, agent.process, std::move(run));
  }
  template <typename... Args>
  void say(fmt::format_string<Args...> text, Args&&... args) {
    if (!story_) return;
    out_.story += fmt::format("{:8.1f}  ", now_s_);
    out_.story += fmt::format(text, std::forward<Args>(args)...) + "\n";
  }
  static void require(bool holds, const char* invariant, const std::string& what) {
    if (!holds) throw Violation{fmt::format("{}: {}", invariant, what)};
  }

  int64_t train() const { return life_.hosts - life_.spares; }
  double claims_s() const { return membership::claims_after_s(kDeadS, kLeaseEveryS, 0); }
  Agent& agent(int64_t index) { return agents_[static_cast<size_t>(index)]; }
  const Record* newest() const { return records_.empty() ? nullptr : &records_.back(); }
  bool store_answers() const { return now_s_ >= store_away_s_; }
  bool is_superseded(const Agent& leader) const {
    const Record* const last = newest();
    return last != nullptr && last->life != leader.life && last->number > leader.rule->epoch();
  }
  bool stands_still(const Agent& one) const { return one.frozen_s > now_s_; }
  bool reaches(const Agent& a, const Agent& b) const {
    return a.up && b.up && a.cut_s <= now_s_ && b.cut_s <= now_s_ && !stands_still(a) && !stands_still(b);
  }

  // --- agents
  void start(Agent& one);
  void stop_process(Agent& one, double noticed_s);
  void choose_role(Agent& one, double until_s, int64_t sign);
  double looks_s() const;
  std::vector<int64_t> places_before() const;
  void lead(Agent& one, membership::Options options, const membership::Gather& how);
  void follow(Agent& one);

  // --- a leader
  void tick(Agent& leader);
  void write(Agent& leader, int64_t life);
  membership::Gather gather_again(const char* why, int64_t places) const;
  void regather(Agent& leader);
  void feed(Agent& leader, const membership::Event& event);
  void perform(Agent& leader, const membership::Action& action);
  void claim(Agent& leader, const membership::Claim& next);
  void admit(Agent& leader, int64_t host);
  void gathered(Agent& leader);
  void check_memory(const Agent& leader);
  void gave_up(Agent& leader, const Error& error);
  void resize(Agent& leader, int64_t hosts);
  void leader_loses(Agent& leader, int64_t host, double seconds, const char* why);
  void check_hand_over(const Agent& leader, const membership::Claim& next);
  static double lost_s(const Agent& leader, int64_t host);
  void check_graces(const Agent& leader);
  double grace_s(const Agent& leader, int64_t host) const;
  static bool has_copy(const Agent& leader, int64_t host);
  bool runs_for_all(const Agent& leader);
  static bool has_come(const Agent& leader, int64_t host) {
    return leader.rule->is_there(host) || leader.door.contains(host);
  }
  static int64_t come(const Agent& leader);

  // --- a member
  void poll(Agent& member);
  void knock(Agent& member);
  void claim_lead(Agent& member);
  void member_loses(Agent& member, double seconds);

  void strike(const Fault& fault);
  void break_links(Agent& one, double seconds, bool own_end);
  void check(const Agent& leader);
  bool may_end() const;

  const Life life_;
  const bool story_;
  const uint64_t key_;
  uint64_t draws_ = 0;
  double now_s_ = 0;
  int64_t numbers_ = 0, lives_ = 0, links_ = 0;
  std::vector<Event> events_;
  std::vector<Agent> agents_;
  std::set<int64_t> sizes_;
  std::vector<Record> records_;
  int64_t sign_ = 0;  // of the lease
  double shown_s_ = -1e9;
  double store_away_s_ = 0;       // until then
  int64_t generation_ = 0;        // of ranks, the last that ran
  std::vector<int64_t> trained_;  // its places
  bool saved_ = true;             // what its hosts have in memory
  Outcome out_;
};

Outcome Members::run() {
  try {
    for (Agent& one : agents_) after(uniform(0, 5), [this, &one] { start(one); });
    for (const Fault& fault : life_.faults) push(fault.at_s, -1, 0, [this, fault] { strike(fault); });
    const double end_s = life_.faulty_s + kRestS;
    while (!events_.empty() && events_.front().at_s <= end_s && out_.ended == 0) {
      std::pop_heap(events_.begin(), events_.end());
      Event event = std::move(events_.back());
      events_.pop_back();
      now_s_ = event.at_s;
      if (event.host >= 0) {
        const Agent& one = agent(event.host);
        if (!one.up || one.process != event.process) continue;
        if (stands_still(one)) {
          push(one.frozen_s, event.host, event.process, std::move(event.run));
          continue;
        }
      }
      ++out_.events;
      event.run();
    }
    if (out_.ended == 0) {
      now_s_ = end_s;
      require(may_end() || std::ranges::any_of(agents_, [this](const Agent& one) { return runs_for_all(one); }),
              "progress", fmt::format("no run {:.0f} s after the last fault", kRestS));
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

// --- agents ----------------------------------------------------------------------------------------------------------

void Members::start(Agent& one) {
  if (one.up || one.gone || one.excluded) return;
  one = Agent{.index = one.index,
              .process = one.process + 1,
              .up = true,
              .frozen_s = 0,
              .cut_s = one.cut_s,
              .memory = one.memory};
  say("h{} starts", one.index);
  if (!store_answers()) {  // it ends, and its launcher starts it again
    one.up = false;
    return after(uniform(2, 10), [this, &one] { start(one); });
  }
  if (one.index != 0) return follow(one);
  choose_role(one, now_s_ + looks_s(), sign_);
}

std::vector<int64_t> Members::places_before() const {
  return newest() == nullptr ? std::vector<int64_t>() : newest()->places;
}

/// Seconds in which host 0 looks for another leader, at a start.
double Members::looks_s() const {
  return membership::first_leads(places_before()) ? claims_s() : std::max(claims_s(), kJoinS);
}

/// is_led_by_another
void Members::choose_role(Agent& one, double until_s, int64_t sign) {
  const Record* const last = newest();
  if (last != nullptr && last->leader != 0) {
    if (!store_answers()) until_s = now_s_ + looks_s();  // of that time nothing is known
    if (sign_ != sign) return follow(one);
    if (now_s_ < until_s) return after(0.1, one, [this, &one, until_s, sign] { choose_role(one, until_s, sign); });
  }
  membership::Options options{.hosts = life_.hosts,
                              .own = 0,
                              .places = membership::first_places(places_before(), train(), sizes_, life_.hosts, 0),
                              .epoch = last != nullptr ? last->number : 0};
  lead(one, std::move(options), {kJoinS + (sizes_.empty() ? 0 : 1), kJoinS, "start"});
}

void Members::lead(Agent& one, membership::Options options, const membership::Gather& how) {
  options.dead_after_s = kDeadS;
  options.fewer_after_s = life_.spare_after_s;
  options.alone_s = 2 * claims_s();
  one.life = ++lives_;
  one.runs = false;
  one.held = true;
  one.began_s = one.shown_s = now_s_;
  one.failed_s = -1e9;
  one.grants_s = how.fewer_after_s;
  one.counts_copies = !how.holders.empty();
  one.led_before = options.led_before;
  one.places = options.places;
  one.link = one.door_life = 0;
  for (const Agent& other : agents_) one.lost_s[other.index] = now_s_;
  one.rule = std::make_unique<membership::Leader>(std::move(options), ns(now_s_));
  one.rule->allow_sizes(sizes_);
  say("h{} leads, with places {}", one.index, fmt::join(one.places, " "));
  for (const Agent& other : agents_) {
    if (other.excluded && one.led_before >= 0) {
      one.barred.insert(other.index);
      feed(one, membership::Barred{other.index});
    }
  }
  feed(one, how);
  tick(one);
  write(one, one.life);
}

void Members::follow(Agent& one) {
  one.seen = sign_;
  one.still_since_s = now_s_;
  one.join_until_s = now_s_ + kJoinS;
  poll(one);
}

void Members::stop_process(Agent& one, double noticed_s) {
  if (!one.up) return;
  break_links(one, noticed_s, false);
  one.up = false;
  one.rule.reset();
  one.link = 0;
}

/// Both ends find out; `own_end`: this agent too.
void Members::break_links(Agent& one, double seconds, bool own_end) {
  for (Agent& other : agents_) {
    if (one.rule && other.link_life == one.life && other.link != 0) {
      member_loses(other, seconds * uniform(0.9, 1.1));
      if (own_end) leader_loses(one, other.index, seconds * uniform(0.9, 1.1), "it is silent");
    }
    if (other.rule && one.link != 0 && one.link_life == other.life)
      leader_loses(other, one.index, seconds * uniform(0.9, 1.1), "the connection broke");
    if (other.rule && seconds < kDeadS && !own_end) other.door.erase(one.index);
  }
  if (own_end && one.link != 0) member_loses(one, seconds * uniform(0.9, 1.1));
}

// --- a leader --------------------------------------------------------------------------------------------------------

void Members::tick(Agent& leader) {
  if (!leader.rule) return;
  after(kLeaseEveryS, leader, [this, &leader] { tick(leader); });
  feed(leader, membership::AtDoor{leader.door});
  if (!leader.rule) return;
  if (!leader.runs && store_answers() && is_superseded(leader)) {
    feed(leader, membership::Stop{});
    if (!leader.rule) return;
  }
  if (leader.runs) {
    if (const std::optional<int64_t> larger = leader.rule->larger(ns(now_s_))) {
      leader.runs = false;
      resize(leader, *larger);
    }
  }
  membership::Heard heard;
  for (const auto& [host, link] : leader.links) {
    if (!reaches(leader, agent(host)) || agent(host).link != link) continue;
    leader.heard_s[host] = now_s_;
    heard.at_ns[host] = ns(now_s_);
  }
  feed(leader, heard);
  feed(leader, membership::Tick{});
  if (!leader.rule) return;
  require(leader.held || now_s_ >= leader.began_s + 2 * claims_s() - 1e-6, "half",
          fmt::format("h{} lets go of the lease before its hosts may have found it", leader.index));
  // Lease::run
  const double last_s = std::max(leader.shown_s, leader.failed_s);
  if (leader.held && !store_answers() && now_s_ - last_s < claims_s()) leader.failed_s = now_s_;
  if (leader.held && store_answers() && (now_s_ - leader.shown_s < claims_s() || !is_superseded(leader))) {
    ++sign_;
    shown_s_ = leader.shown_s = now_s_;
    require(2 * come(leader) >= std::ssize(leader.rule->places()) || records_.empty() ||
                records_.back().life != leader.life || now_s_ < leader.began_s + 2 * claims_s() + 1e-6,
            "half", fmt::format("h{} holds the lease without half of its hosts", leader.index));
  }
  check(leader);
}

/// A line of a step, as LocalCoordinator::owns_run() lets it pass.
void Members::write(Agent& leader, int64_t life) {
  if (!leader.rule || leader.life != life) return;
  after(uniform(0.05, 0.4), leader, [this, &leader, life] { write(leader, life); });
  if (!leader.runs) return;
  const bool thawed = now_s_ - leader.frozen_s < membership::kStoreTriesS;
  const double still_s = thawed ? leader.frozen_s - leader.froze_at_s : 0;
  const membership::Sign sign{.since_shown_s = now_s_ - leader.shown_s,
                              .since_failed_s = now_s_ - leader.failed_s,
                              .stood_still_s = still_s,
                              .claims_after_s = claims_s()};
  if (!membership::leads_surely(sign) && !store_answers()) return;  // it is not known
  if (!membership::leads_surely(sign) && is_superseded(leader)) {
    say("h{} finds that another host leads", leader.index);
    after(uniform(2, 10), [this, &leader] { start(leader); });
    return stop_process(leader, 0.2);
  }
  require(!is_superseded(leader), "writes", fmt::format("h{} writes, and h{} leads", leader.index, newest()->leader));
}

/// The copy of a place's memory is at the host half the way round, complete as soon as ranks run.
membership::Gather Members::gather_again(const char* why, int64_t places) const {
  membership::Gather out{kWaitS, life_.copies ? 0 : life_.spare_after_s, why, false, life_.spare_after_s};
  for (int64_t k = 0; life_.copies && k < places; ++k) out.holders.push_back((k + places / 2) % places);
  return out;
}

/// Ranks were stopped.
void Members::regather(Agent& leader) {
  if (!leader.rule || !std::exchange(leader.runs, false)) return;
  after(uniform(0, 0.3), leader, [this, &leader] {
    if (!leader.rule) return;
    membership::Gather again = gather_again("hosts were away", std::ssize(leader.places));
    again.announces = true;
    leader.grants_s = life_.spare_after_s;
    leader.counts_copies = !again.holders.empty();
    feed(leader, membership::AtDoor{leader.door});
    feed(leader, again);
  });
}

void Members::feed(Agent& leader, const membership::Event& event) {
  const int64_t life = leader.life;
  for (const membership::Action& action : leader.rule->step(event, ns(now_s_))) {
    if (!leader.rule || leader.life != life) return;
    perform(leader, action);
  }
}

void Members::perform(Agent& leader, const membership::Action& action) {
  if (const auto* const said = std::get_if<membership::Say>(&action)) {
    say("h{}: {}", leader.index, said->text);
  } else if (const auto* const lease = std::get_if<membership::HoldLease>(&action)) {
    leader.held = lease->held;
    say("h{} {} the lease", leader.index, lease->held ? "holds" : "lets go of");
  } else if (std::holds_alternative<membership::CheckEpoch>(action)) {
    membership::Leads leads;
    if (!store_answers()) {
      leads.error = Error{ErrorCode::kTimeout, "the store does not answer"};
    } else if (is_superseded(leader)) {
      leads.error = Error{ErrorCode::kUnavailable, "led by another"};
    }
    feed(leader, leads);
  } else if (const auto* const next = std::get_if<membership::Claim>(&action)) {
    claim(leader, *next);
  } else if (const auto* const in = std::get_if<membership::Admit>(&action)) {
    for (const int64_t host : in->hosts) admit(leader, host);
  } else if (const auto* const rest = std::get_if<membership::Rest>(&action)) {
    if (agent(rest->host).link_life == leader.life) agent(rest->host).place = -1;
  } else if (std::holds_alternative<membership::Gathered>(action)) {
    gathered(leader);
  } else if (const auto* const error = std::get_if<membership::GaveUp>(&action)) {
    gave_up(leader, error->error);
  }
}

/// A host that was heard since this one was lost has a copy of its memory.
bool Members::has_copy(const Agent& leader, int64_t host) {
  const int64_t places = std::ssize(leader.places);
  const int64_t place = std::ranges::find(leader.places, host) - leader.places.begin();
  const int64_t holder = leader.places.at(static_cast<size_t>((place + places / 2) % places));
  if (holder == leader.index) return true;
  const auto heard = leader.heard_s.find(holder);
  return leader.links.contains(holder) && heard != leader.heard_s.end() && heard->second >= lost_s(leader, host);
}

double Members::grace_s(const Agent& leader, int64_t host) const {
  if (leader.barred.contains(host)) return 0;
  const bool comes = leader.led_before >= 0 && host != leader.led_before && !leader.ever_joined.contains(host);
  const double grants_s = leader.counts_copies && has_copy(leader, host) ? 0 : leader.grants_s;
  return comes ? std::max(grants_s, kDeadS) : grants_s;
}

/// This host, and those with a place that have joined or stand at the door, as the leader sees it.
int64_t Members::come(const Agent& leader) {
  return std::ranges::count_if(leader.rule->places(), [&](int64_t host) { return has_come(leader, host); });
}

/// Since when it knows that host away.
double Members::lost_s(const Agent& leader, int64_t host) {
  const auto lost = leader.lost_s.find(host);
  require(lost != leader.lost_s.end(), "places",
          fmt::format("h{} counts h{} as away and has not lost it", leader.index, host));
  return lost->second;
}

/// Each host that is away with a place has been for its grace.
void Members::check_graces(const Agent& leader) {
  for (const int64_t host : leader.places) {
    if (has_come(leader, host)) continue;
    const double away_s = now_s_ - lost_s(leader, host);
    require(away_s >= grace_s(leader, host) - 1e-6, "grace",
            fmt::format("h{} has lost its place, {:.1f} s after h{} knew it away", host, away_s, leader.index));
  }
}

void Members::check_hand_over(const Agent& leader, const membership::Claim& next) {
  const std::set<int64_t> all(next.places.begin(), next.places.end());
  // Another size was decided on earlier, and is for the hosts that have joined.
  if (next.places.size() == leader.places.size()) check_graces(leader);
  require(std::ssize(all) == std::ssize(next.places), "places",
          fmt::format("h{} gives a host two places: {}", leader.index, fmt::join(next.places, " ")));
  require(all.contains(leader.index), "places", fmt::format("h{} leads without a place", leader.index));
  require(std::ssize(all) == train() || sizes_.contains(std::ssize(all)), "size",
          fmt::format("h{} trains with {} hosts", leader.index, all.size()));
  for (const int64_t host : all) {
    require(has_come(leader, host), "places", fmt::format("h{} gives h{} a place, which is away", leader.index, host));
    require(!agent(host).excluded, "places", fmt::format("h{}, excluded, has a place", host));
  }
  int64_t had = 0;
  for (const int64_t host : leader.places) {
    const bool came = has_come(leader, host);
    had += came;
    require(!came || all.contains(host) || all.size() < leader.places.size(), "places",
            fmt::format("h{} was there and has lost its place", host));
  }
  require(2 * had >= std::ssize(leader.places) || all.size() >= leader.places.size(), "half",
          fmt::format("h{} continues with {} of {} hosts", leader.index, had, leader.places.size()));
}

void Members::claim(Agent& leader, const membership::Claim& next) {
  const Record* const last = newest();
  check_hand_over(leader, next);
  require(next.number == leader.rule->epoch() + 1, "leader", "an epoch is left out");
  if (last != nullptr && last->number >= next.number) {
    say("h{} comes too late for epoch {}", leader.index, next.number);
    return feed(leader, membership::Claimed{Error{ErrorCode::kUnavailable, "led by another"}});
  }
  records_.push_back({next.number, leader.index, leader.life, next.places});
  leader.places = next.places;
  say("h{} begins epoch {}, with places {}: {}", leader.index, next.number, fmt::join(next.places, " "), next.reason);
  feed(leader, membership::Claimed{});
  for (const int64_t host : std::exchange(leader.door, {})) admit(leader, host);
  for (size_t place = 0; place < next.places.size(); ++place) {  // Begin
    Agent& member = agent(next.places[place]);
    if (member.link != 0 && member.link_life == leader.life) member.place = static_cast<int64_t>(place);
  }
}

void Members::admit(Agent& leader, int64_t host) {
  Agent& member = agent(host);
  const int64_t link = ++links_;
  leader.door.erase(host);
  leader.links[host] = link;
  leader.lost_s.erase(host);
  leader.ever_joined.insert(host);
  feed(leader, membership::Admitted{host, fmt::format("h{}", host)});
  if (!reaches(leader, member) || member.door_life != leader.life) {  // it has left, and says nothing
    member.door_life = 0;
    return leader_loses(leader, host, kDeadS, "it is silent");
  }
  member.link = link;
  member.link_life = leader.life;
  member.door_life = 0;
  member.has_joined = true;
  member.place = leader.rule->place(host);
  say("h{} has joined h{}{}", host, leader.index, member.place < 0 ? ", as a spare" : "");
}

void Members::gathered(Agent& leader) {
  const int64_t number = leader.rule->epoch();
  const bool own =
      number > 0 && number <= std::ssize(records_) && records_[static_cast<size_t>(number - 1)].life == leader.life;
  require(own, "leader", fmt::format("h{} runs epoch {}, which another host leads", leader.index, number));
  check_memory(leader);
  ++generation_;
  trained_ = leader.rule->places();
  saved_ = false;
  leader.memory = generation_;
  for (Agent& other : agents_) {
    if (other.link != 0 && other.link_life == leader.life && leader.rule->place(other.index) >= 0)
      other.memory = generation_;
  }
  leader.runs = true;
  ++out_.generations;
  say("h{} runs epoch {}", leader.index, leader.rule->epoch());
  after(0, leader, [this, &leader] {  // once those at the door are let in
    if (leader.rule && leader.rule->someone_away()) regather(leader);
  });
}

/// A start resumes from memory that all its hosts have and nothing else has, by the same places.
void Members::check_memory(const Agent& leader) {
  const auto has_it = [&](int64_t host) {
    return agent(host).memory == generation_ && (host == leader.index || has_come(leader, host));
  };
  require(saved_ || leader.rule->places() == trained_ || !std::ranges::all_of(trained_, has_it), "memory",
          fmt::format("h{} begins with places {}, and places {} have what is nowhere else in memory", leader.index,
                      fmt::join(leader.rule->places(), " "), fmt::join(trained_, " ")));
}

/// Its ranks run, and each host of them follows it.
bool Members::runs_for_all(const Agent& leader) {
  return leader.up && leader.rule && leader.runs && std::ranges::all_of(leader.rule->places(), [&](int64_t host) {
           return host == leader.index ||
                  (agent(host).up && agent(host).link != 0 && agent(host).link_life == leader.life);
         });
}

void Members::gave_up(Agent& leader, const Error& error) {
  say("h{} gives up: {}", leader.index, error.message);
  const Record* const last = newest();
  const bool led = last != nullptr && last->life != leader.life && agent(last->leader).rule != nullptr &&
                   agent(last->leader).life == last->life;
  require(!is_superseded(leader) || !store_answers() || error.message == "led by another", "leader",
          fmt::format("h{} ends as though it led, though another host does: {}", leader.index, error.message));
  if (const std::optional<int64_t> smaller = leader.rule->smaller()) {
    check_graces(leader);
    return resize(leader, *smaller);
  }
  if (led || error.message == "led by another") {               // the run does not end with this agent
    after(uniform(2, 10), [this, &leader] { start(leader); });  // by its launcher
    return stop_process(leader, 0.2);
  }
  require(may_end() && error.code == ErrorCode::kTimeout, "progress",
          fmt::format("h{} ends the run: {}", leader.index, error.message));
  out_.ended = error.exit_code();
}

/// After a save.
void Members::resize(Agent& leader, int64_t hosts) {
  after(uniform(0, 3), leader, [this, &leader, hosts, life = leader.life] {
    if (!leader.rule || leader.life != life) return;
    saved_ = true;
    leader.grants_s = life_.spare_after_s;
    leader.counts_copies = false;
    feed(leader, membership::AtDoor{leader.door});
    feed(leader, membership::Resize{hosts, kWaitS});
  });
}

void Members::leader_loses(Agent& leader, int64_t host, double seconds, const char* why) {
  const auto link = leader.links.find(host);
  if (link == leader.links.end()) return;
  after(seconds, leader, [this, &leader, host, id = link->second, why] {
    if (!leader.rule) return;
    const auto last = leader.links.find(host);
    if (last == leader.links.end() || last->second != id) return;
    leader.links.erase(last);
    leader.lost_s[host] = now_s_;
    say("h{} has lost h{}", leader.index, host);
    feed(leader, membership::Lost{host, why});
    if (leader.rule && leader.rule->place(host) >= 0) regather(leader);
  });
}

/// The waits of the rule, and those that should have ended.
void Members::check(const Agent& leader) {
  for (const membership::Wait& wait : leader.rule->waits()) {
    require(!wait.what.empty() && wait.until_ns > 0 && wait.until_ns + ns(1) > ns(now_s_), "waits",
            fmt::format("h{} waits for \"{}\" beyond its end", leader.index, wait.what));
  }
  if (leader.runs) {
    for (const Agent& other : agents_) {
      const bool both = other.index != leader.index && runs_for_all(leader) && runs_for_all(other);
      require(!both, "leader", fmt::format("h{} and h{} both lead", leader.index, other.index));
    }
    return;
  }
  if (leader.rule->waits().empty() || now_s_ < store_away_s_ + 2) return;
  int64_t due = 0, spares = 0;
  for (const Agent& other : agents_) {
    if (other.index == leader.index) continue;
    const bool came = has_come(leader, other.index);
    if (leader.rule->place(other.index) < 0) {
      spares += came;
    } else if (!came) {
      if (now_s_ < lost_s(leader, other.index) + grace_s(leader, other.index) + 1) return;
      ++due;
    }
  }
  require(
      due == 0 || spares < due, "grace",
      fmt::format("h{} waits for {} hosts whose grace has ended, and {} spares are there", leader.index, due, spares));
}

// --- a member --------------------------------------------------------------------------------------------------------

void Members::poll(Agent& member) {
  if (member.rule) return;
  after(kPollS * uniform(0.8, 1.2), member, [this, &member] { poll(member); });
  if (member.link != 0) return;
  if (!store_answers()) {  // of that time nothing is known
    member.still_since_s = now_s_;
    if (now_s_ < member.join_until_s) return;
  }
  if (std::exchange(member.seen, sign_) != sign_) member.still_since_s = now_s_;
  knock(member);
  if (!member.up || member.link != 0 || member.rule) return;
  if (now_s_ >= member.join_until_s && member.door_life == 0) {
    say("h{} gives up", member.index);
    stop_process(member, 0.2);
    return after(uniform(2, 10), [this, &member] { start(member); });
  }
  claim_lead(member);
}

void Members::knock(Agent& member) {
  const Record* const last = newest();
  for (const int64_t index : {last != nullptr ? last->leader : 0, int64_t{0}}) {
    Agent& leader = agent(index);
    const bool leads = leader.rule && (index == 0 || leader.life == last->life);
    if (index == member.index || !leads || !reaches(leader, member)) continue;
    if (member.excluded) {
      leader.barred.insert(member.index);
      feed(leader, membership::Barred{member.index});
      return stop_process(member, 0.2);
    }
    if (leader.rule->is_there(member.index)) continue;  // its old connection is not known to be gone yet
    leader.door.insert(member.index);
    member.door_life = leader.life;
    return;
  }
  member.door_life = 0;
}

void Members::claim_lead(Agent& member) {
  const Record* const last = newest();
  if (last == nullptr || !store_answers()) return;
  const bool starts = !member.has_joined && !membership::first_leads(last->places);
  const auto at = std::ranges::find(last->places, member.index);
  const membership::Silence silence{.still_s = now_s_ - member.still_since_s,
                                    .claims_after_s = claims_s(),
                                    .has_joined = member.has_joined,
                                    .place = member.place,
                                    .place_in_newest = at == last->places.end() ? -1 : at - last->places.begin(),
                                    .starts = starts};
  if (!membership::claims_lead(silence)) {
    const bool had_place = starts || (member.has_joined && silence.place >= 0);
    require(!had_place || silence.place_in_newest < 0 || silence.still_s < claims_s() + 1, "leader",
            fmt::format("h{}, which has a place, does not claim the lead", member.index));
    return;
  }
  require(silence.place_in_newest >= 0 && (starts || silence.place >= 0), "leader",
          fmt::format("h{}, which has no place, claims the lead", member.index));
  require(now_s_ - shown_s_ >= claims_s() - 2 * kPollS, "leader",
          fmt::format("h{} claims the lead {:.1f} s after a sign of the leader", member.index, now_s_ - shown_s_));
  const Record next{last->number + 1, member.index, lives_ + 1, last->places};
  const int64_t before = last->leader;
  records_.push_back(next);
  lead(member,
       {.hosts = life_.hosts,
        .own = member.index,
        .places = next.places,
        .epoch = next.number,
        .leads = true,
        .led_before = starts ? -1 : before},
       starts ? membership::Gather{kJoinS + (sizes_.empty() ? 0 : 1), kJoinS, "a start"}
              : gather_again("the leader is lost", std::ssize(last->places)));
}

void Members::member_loses(Agent& member, double seconds) {
  after(seconds, member, [this, &member, link = member.link] {
    if (member.link != link || link == 0) return;
    member.link = 0;
    member.seen = sign_;
    member.still_since_s = now_s_;
    member.join_until_s = now_s_ + kWaitS;
    say("h{} has lost its leader", member.index);
  });
}

// --- faults ----------------------------------------------------------------------------------------------------------

void Members::strike(const Fault& fault) {
  Agent& host = agent(fault.host);
  if (fault.kind != FaultKind::kAll && (host.gone || host.excluded || !host.up)) return;
  say("FAULT {}", to_text(fault));
  const auto restart = [&] { after(fault.seconds, [this, &host] { start(host); }); };
  switch (fault.kind) {
    case FaultKind::kCut:
      host.cut_s = std::max(host.cut_s, now_s_ + fault.seconds);
      if (fault.seconds > kDeadS) break_links(host, kDeadS, true);
      return;
    case FaultKind::kKill:
      stop_process(host, 0.2);
      return restart();
    case FaultKind::kPower:
      stop_process(host, kDeadS);
      host.memory = 0;
      return restart();
    case FaultKind::kAll:
      for (Agent& one : agents_) {
        stop_process(one, 0.2);
        if (!one.gone && !one.excluded) after(fault.seconds + uniform(0, 3), [this, &one] { start(one); });
      }
      return;
    case FaultKind::kFreeze:
      host.froze_at_s = stands_still(host) ? host.froze_at_s : now_s_;
      host.frozen_s = std::max(host.frozen_s, now_s_ + fault.seconds);
      if (fault.seconds > kDeadS) break_links(host, kDeadS, true);
      return;
    case FaultKind::kGone:
      stop_process(host, kDeadS);
      host.memory = 0;
      host.gone = true;
      return;
    case FaultKind::kExclude:
      for (Agent& leader : agents_) {
        if (!leader.up || !leader.rule || !leader.runs || stands_still(leader) || fault.host == leader.index ||
            leader.rule->place(fault.host) < 0 || !leader.rule->can_spare_one())
          continue;
        saved_ = host.excluded = true;  // first
        leader.barred.insert(fault.host);
        leader.links.erase(fault.host);
        leader.lost_s[fault.host] = now_s_;
        feed(leader, membership::Exclude{fault.host, "it is slow"});
        regather(leader);
        return stop_process(host, 0.2);
      }
      return;
    case FaultKind::kStore:
      store_away_s_ = std::max(store_away_s_, now_s_ + fault.seconds);
      return;
    case FaultKind::kRank:
      for (Agent& leader : agents_) {
        if (leader.up && leader.rule && !stands_still(leader)) regather(leader);
      }
      return;
    default:
      return;
  }
}

/// Hosts were away for as long as a start waits for them, or for ever.
bool Members::may_end() const {
  if (std::ranges::any_of(agents_, [](const Agent& one) { return one.gone || one.excluded; })) return true;
  double from_s = -1, to_s = -1;
  for (const Fault& fault : life_.faults) {  // by time
    if (fault.at_s > to_s) from_s = fault.at_s;
    to_s = std::max(to_s, fault.at_s + fault.seconds + 15);
    if (to_s - from_s >= kJoinS) return true;
  }
  return false;
}

}  // namespace

Life random_members_life(uint64_t seed) {
  const uint64_t key = mix64(seed ^ 0xA11);
  uint64_t draws = 0;
  const auto uniform = [&](double low, double high) { return low + (high - low) * uniform_at(key, draws++); };
  const auto whole = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(uniform(0, 1) * static_cast<double>(high - low + 1));
  };
  const auto tenths = [](double seconds) { return std::round(seconds * 10) / 10; };
  Life life{.seed = seed};
  life.members = true;
  life.hosts = whole(2, 6);
  life.spares = life.hosts > 2 ? whole(0, std::min<int64_t>(2, life.hosts - 2)) : 0;
  life.smallest = uniform(0, 1) < 0.5 ? 0 : whole(1, life.hosts - life.spares);
  const double at_once = uniform(0, 1);
  life.spare_after_s = at_once < 0.15 ? 0 : at_once < 0.3 ? 1 : tenths(uniform(2, 30));
  life.copies = at_once >= 0.3 && at_once < 0.6;
  constexpr FaultKind kKinds[] = {FaultKind::kCut,     FaultKind::kKill, FaultKind::kPower, FaultKind::kFreeze,
                                  FaultKind::kExclude, FaultKind::kRank, FaultKind::kStore, FaultKind::kGone};
  const bool cruel = uniform(0, 1) < 0.5;
  double at_s = uniform(1, 40);
  for (int64_t k = whole(2, 9); k > 0; --k) {
    Fault fault{.at_s = tenths(at_s)};
    fault.kind = kKinds[whole(0, uniform(0, 1) < 0.3 ? 7 : 6)];
    if (uniform(0, 1) < 0.12) fault.kind = FaultKind::kAll;
    fault.host = whole(0, life.hosts - 1);
    fault.seconds = tenths(uniform(0, 1) < 0.6 ? uniform(0.1, 8) : uniform(5, 60));
    life.faults.push_back(fault);
    at_s += cruel && uniform(0, 1) < 0.6 ? uniform(0.1, 6) : uniform(10, 90);
  }
  life.faulty_s = 60;
  for (const Fault& fault : life.faults) life.faulty_s = std::max(life.faulty_s, fault.at_s + fault.seconds + 5);
  return life;
}

Outcome live_members(const Life& life, bool story) { return Members(life, story).run(); }

}  // namespace cairn::sim
