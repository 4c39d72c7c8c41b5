#include "runtime/hosts/member.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "runtime/core/check.h"
#include "runtime/hosts/membership.h"

namespace cairn::hosts::member {
namespace {

constexpr const char* kSpare = "a spare: waits to take the place of a host that is lost";

int64_t after(int64_t from_ns, double seconds) { return from_ns + static_cast<int64_t>(seconds * 1e9); }

Error asked_to_stop() { return {ErrorCode::kStopped, "asked to stop while the leader was waited for"}; }

}  // namespace

Actions Member::step(const Event& event, int64_t now_ns) {
  Actions out;
  std::visit([&](const auto& one) { on(one, now_ns, out); }, event);
  settle(now_ns, out);
  RT_CHECK(!displaced_ || is_open(), "the memory of another place is closed, and counts");
  RT_CHECK(!is_joined() || has_joined_, "a leader counts as joined before any was");
  return out;
}

// --- what is known ---------------------------------------------------------------------------------------------------

std::optional<int64_t> Member::joins_until_ns() const {
  const auto* const joining = std::get_if<Joining>(&leader_);
  if (joining == nullptr) return std::nullopt;
  return std::max(joining->until_ns, joining->door_until_ns.value_or(0));
}

bool Member::is_open() const {
  return !std::holds_alternative<Outside>(phase_) && !std::holds_alternative<Over>(phase_);
}

bool Member::has_loaded(uint64_t incarnation) const {
  const auto* const loaded = std::get_if<HasLoaded>(&phase_);
  return loaded != nullptr && loaded->of.incarnation == incarnation;
}

/// Until when the leader has to say what comes next; nullopt: it owes this host nothing.
std::optional<int64_t> Member::order_until_ns() const {
  const auto* const there = std::get_if<There>(&leader_);
  if (there == nullptr || !is_idle()) return std::nullopt;
  const auto* const loaded = std::get_if<HasLoaded>(&phase_);
  const double beside_s = loaded == nullptr ? 0 : options_.load_times * loaded->took_s;
  return after(there->heard_ns, options_.order_s + beside_s);
}

std::vector<Wait> Member::waits() const {
  std::vector<Wait> out;
  if (const auto until_ns = joins_until_ns()) {
    const bool at_door = std::get<Joining>(leader_).door_until_ns.has_value();
    out.push_back({at_door ? "the leader to let this host in" : "the leader to be joined", *until_ns});
  }
  if (const auto until_ns = order_until_ns()) {
    const bool loaded = std::holds_alternative<HasLoaded>(phase_);
    out.push_back({loaded ? "the leader to let ranks run" : "the leader's next order", *until_ns});
  }
  return out;
}

// --- from one phase to the next --------------------------------------------------------------------------------------

/// The next phase, after any event.
void Member::settle(int64_t now_ns, Actions& out) {
  const bool away = std::holds_alternative<Away>(leader_);
  if (std::holds_alternative<Outside>(phase_)) {
    if (end_ || leads_) return give_up(std::nullopt, out);
    if (next_) {
      segment_ = std::exchange(next_, std::nullopt);
      phase_ = Opening{};
      out.emplace_back(Open{*segment_});
      return;
    }
  } else if (const auto* const refusing = std::get_if<Refusing>(&phase_)) {
    if (end_ || away) leave(Error(refusing->why), out);
    return;
  } else if (is_idle()) {
    if (end_ || goes_on()) return leave({ErrorCode::kStopped, "the leader has ended this"}, out);
    if (!away) return;
    phase_ = Idle{};
    if (stop_signal_ != 0) return leave(asked_to_stop(), out);  // it has no leader to ask
    out.emplace_back(
        Say{fmt::format("the leader is away ({}): the ranks are stopped and their memory stays; joining "
                        "it again for {:.0f} s",
                        away_, options_.wait_s)});
  } else if (const auto* const running = std::get_if<Running>(&phase_)) {
    if (end_ && !running->left) stop_ranks("the run has ended", out);
    return;
  } else {
    return;
  }
  if (!away) return;
  leader_ = Joining{after(now_ns, has_joined_ ? options_.wait_s : options_.join_s)};
  halt_.reset();
  out.emplace_back(Join{});
}

void Member::leave(Error why, Actions& out) {
  RT_CHECK(is_open() && !is_running(), "there is no memory to leave, or ranks run in it");
  phase_ = Leaving{};
  if (joins_until_ns()) leader_ = Away{};
  out.emplace_back(Leave{std::move(why)});
}

void Member::give_up(std::optional<Error> error, Actions& out) {
  RT_CHECK(!is_open(), "memory is open");
  phase_ = Over{};
  if (joins_until_ns()) leader_ = Away{};
  out.emplace_back(GaveUp{std::move(error)});
}

void Member::stop_ranks(std::string why, Actions& out) {
  RT_CHECK(is_running(), "no rank runs");
  phase_ = Stopping{};
  out.emplace_back(StopRanks{std::move(why)});
}

void Member::on(const Idled&, int64_t now_ns, Actions& out) {
  RT_CHECK(is_open() && !is_idle(), "no rank has run, and no memory was to be opened");
  phase_ = Idle{};
  if (auto* const there = std::get_if<There>(&leader_)) {
    there->heard_ns = now_ns;
    out.emplace_back(Send{Stopped{incarnation_}});
  }
  if (!end_ && !goes_on()) answer(out);
}

void Member::on(const Refused& event, int64_t, Actions& out) {
  RT_CHECK(std::holds_alternative<Opening>(phase_), "no memory was to be opened");
  phase_ = Refusing{event.error};
  answer(out);
}

/// The leader's question, where one is open.
void Member::answer(Actions& out) {
  const int64_t ask = std::exchange(halt_, std::nullopt).value_or(0);
  if (ask == 0 || !is_joined()) return;
  if (const auto* const refusing = std::get_if<Refusing>(&phase_)) {
    out.emplace_back(Send{CannotIdle{ask, refusing->why}});
    return;
  }
  RT_CHECK(is_idle(), "ranks may run");
  phase_ = Idle{};
  out.emplace_back(Answer{ask});
}

void Member::on(const Loaded& event, int64_t now_ns, Actions& out) {
  auto* const loading = std::get_if<Loading>(&phase_);
  RT_CHECK(loading != nullptr, "nothing was to be loaded");
  if (auto* const there = std::get_if<There>(&leader_)) {
    there->heard_ns = now_ns;
    out.emplace_back(Send{Carried{event.error}});
  }
  if (event.error) {
    phase_ = Idle{};
  } else {
    const double took_s = static_cast<double>(now_ns - loading->since_ns) / 1e9;
    phase_ = HasLoaded{std::move(*loading), took_s};
  }
  answer(out);
}

void Member::on(const Failing& event, int64_t, Actions& out) {
  if (!is_running()) return;  // by StopRanks
  phase_ = Stopping{};
  if (is_joined()) out.emplace_back(Send{hosts::Failed{incarnation_, event.failure}});
}

void Member::on(const AllLeft&, int64_t, Actions& out) {
  auto* const running = std::get_if<Running>(&phase_);
  if (running == nullptr || std::exchange(running->left, true)) return;
  if (is_joined()) out.emplace_back(Send{Left{incarnation_}});
}

void Member::on(const Closed&, int64_t, Actions&) {
  if (std::holds_alternative<Over>(phase_)) return;
  phase_ = Outside{};
  segment_.reset();
  displaced_ = false;
}

// --- the leader ------------------------------------------------------------------------------------------------------

/// Memory is of one place among a number of hosts.
void Member::take_place(int64_t place, int64_t hosts) {
  RT_CHECK(place < hosts, "place {} of {} hosts", place, hosts);
  const bool same = place == place_ && hosts == hosts_;
  place_ = place;
  hosts_ = hosts;
  if (same || !segment_) return;
  displaced_ = true;
  next_.reset();
}

void Member::on(const Joined& event, int64_t now_ns, Actions& out) {
  RT_CHECK(joins_until_ns().has_value(), "no leader was looked for");
  leader_ = There{.heard_ns = now_ns};
  has_joined_ = true;
  leader_place_ = event.leader;
  take_place(event.place, event.hosts);
  if (place_ < 0) out.emplace_back(Say{kSpare});
  if (displaced_) return leave({ErrorCode::kStopped, "another host has taken this one's place"}, out);
  if (is_open()) out.emplace_back(Say{fmt::format("joined again, in epoch {}", event.epoch)});
  tell_wishes(out);
}

void Member::on(const JoinFailed& event, int64_t, Actions& out) {
  if (!joins_until_ns()) return;
  is_open() ? leave(event.error, out) : give_up(event.error, out);
}

void Member::on(const AtDoor&, int64_t now_ns, Actions&) {
  if (auto* const joining = std::get_if<Joining>(&leader_)) joining->door_until_ns = after(now_ns, options_.order_s);
}

void Member::on(const Silent& event, int64_t, Actions& out) {
  if (!joins_until_ns()) return;
  std::get<Joining>(leader_).door_until_ns.reset();
  if (membership::claims_lead({.still_s = event.still_s,
                               .claims_after_s = event.claims_after_s,
                               .has_joined = has_joined_,
                               .place = place_,
                               .place_in_newest = event.place_in_newest,
                               .starts = event.starts && !has_joined_}))
    out.emplace_back(Claim{});
}

void Member::on(const Claimed& event, int64_t, Actions&) {
  if (!event.leads) return;
  leads_ = true;
  take_place(event.place, event.hosts);
}

void Member::on(const EndFound& event, int64_t, Actions&) {
  if (joins_until_ns() && !end_) end_ = End{.code = event.code, .keep = true, .text = {}};  // it may be needed
}

void Member::on(const LeaderLost& event, int64_t, Actions& out) {
  RT_CHECK(is_joined(), "no leader was joined");
  leader_ = Away{};
  away_ = event.why;
  if (is_running() && !end_) stop_ranks("the leader was lost: " + event.why, out);
}

void Member::on(const Told& event, int64_t now_ns, Actions& out) {
  auto* const there = std::get_if<There>(&leader_);
  if (there == nullptr || std::holds_alternative<Over>(phase_)) return;
  there->heard_ns = now_ns;
  std::visit(Overloaded{
                 [&](const Begin& one) { take_begin(one); },
                 [&](const Prepare& one) {
                   if (place_ < 0 && !is_open()) out.emplace_back(MakeSpare{one.segment});
                 },
                 [&](const Rest&) {
                   take_place(-1, hosts_);
                   out.emplace_back(EndCheck{});
                   out.emplace_back(Say{kSpare});
                 },
                 [&](const End& one) { take_end(one, out); },
                 [&](const Halt& one) { take_halt(one, out); },
                 [&](const Give& one) {
                   if (is_idle()) out.emplace_back(GiveCopy{one});
                 },
                 [&](const Resume& one) { take_resume(one, now_ns, out); },
                 [&](const Go& one) { take_go(one, out); },
                 [](const auto&) {},
             },
             event.what);
}

void Member::take_begin(const Begin& begin) {
  if (begin.place >= begin.segment.hosts || begin.segment.hosts > options_.hosts) return;
  take_place(begin.place, begin.segment.hosts);
  if (begin.leader < begin.segment.hosts) leader_place_ = begin.leader;
  if (displaced_ || segment_ != begin.segment) next_ = begin.segment;
}

void Member::take_end(const End& end, Actions& out) {
  end_ = end;
  if (!end.text.empty()) out.emplace_back(Say{end.text});
}

/// Before memory is open, and while ranks are being stopped, the question waits.
void Member::take_halt(const Halt& halt, Actions& out) {
  halt_ = halt.ask;
  if (is_running()) {
    stop_ranks(halt.why.value_or(""), out);
  } else if (is_idle() || std::holds_alternative<Refusing>(phase_)) {
    answer(out);
  }
}

void Member::take_resume(const Resume& order, int64_t now_ns, Actions& out) {
  if (!is_idle()) return;
  phase_ = Loading{now_ns, order.incarnation, {order.promised.begin(), order.promised.end()}};
  out.emplace_back(Load{order});
}

void Member::take_go(const Go& go, Actions& out) {
  if (!has_loaded(go.incarnation)) return;
  Run run{std::move(std::get<HasLoaded>(phase_).of.promised)};
  incarnation_ = go.incarnation;
  phase_ = Running{};
  out.emplace_back(std::move(run));
  tell_wishes(out);
}

// --- persons, and time -----------------------------------------------------------------------------------------------

/// Also what was asked for while the leader was away.
void Member::tell_wishes(Actions& out) {
  auto* const there = std::get_if<There>(&leader_);
  if (there == nullptr || !is_open()) return;
  if (stop_signal_ != 0 && !std::exchange(there->stop_told, true)) {
    out.emplace_back(Say{"asked to stop: the leader hears of it"});
    out.emplace_back(Send{Stop{stop_signal_}});
  }
  if (!save_by_.empty() && is_running()) out.emplace_back(Send{AskSave{std::exchange(save_by_, {})}});
}

void Member::on(const WantsStop& event, int64_t, Actions& out) {
  stop_signal_ = event.signal;
  if (!is_open() && !std::holds_alternative<Over>(phase_)) return give_up(asked_to_stop(), out);
  if (joins_until_ns()) return leave(asked_to_stop(), out);
  tell_wishes(out);
}

void Member::on(const WantsSave& event, int64_t, Actions& out) {
  save_by_ = event.by;
  tell_wishes(out);
}

void Member::on(const LeaveNow&, int64_t, Actions& out) {
  const bool stands = is_idle() || std::holds_alternative<Refusing>(phase_);
  if (stands) return leave(asked_to_stop(), out);
  if (std::holds_alternative<Outside>(phase_)) give_up(asked_to_stop(), out);
}

void Member::on(const Tick&, int64_t now_ns, Actions& out) {
  tell_wishes(out);
  for (const Wait& wait : waits()) {
    if (now_ns < wait.until_ns) continue;
    if (is_joined()) {
      out.emplace_back(Drop{fmt::format("it has said nothing for {:.0f} s while it was to say what comes next",
                                        static_cast<double>(now_ns - std::get<There>(leader_).heard_ns) / 1e9)});
      return;
    }
    return on(JoinFailed{{ErrorCode::kUnavailable, "no leader can be joined"}}, now_ns, out);
  }
}

}  // namespace cairn::hosts::member
