#include "runtime/hosts/generation.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "runtime/core/check.h"

namespace cairn::hosts::generation {
namespace {

int64_t after(int64_t from_ns, double seconds) { return from_ns + static_cast<int64_t>(seconds * 1e9); }
double seconds_between(int64_t from_ns, int64_t to_ns) { return static_cast<double>(to_ns - from_ns) / 1e9; }

std::vector<Slot> in_both(const std::vector<Slot>& a, const std::vector<Slot>& b) {
  std::vector<Slot> out;
  std::ranges::copy_if(a, std::back_inserter(out),
                       [&](const Slot& slot) { return std::ranges::find(b, slot) != b.end(); });
  return out;
}

}  // namespace

Actions Leader::step(const Event& event, int64_t now_ns) {
  Actions out;
  std::visit([&](const auto& one) { on(one, now_ns, out); }, event);
  return out;
}

// --- what is known ---------------------------------------------------------------------------------------------------

bool Leader::all_left() const {
  return std::ranges::all_of(names_, [this](const auto& one) { return left_.contains(one.first); });
}

bool Leader::all_stopped() const {
  return std::ranges::all_of(
      names_, [this](const auto& one) { return stopped_.contains(one.first) || away_.contains(one.first); });
}

Held Leader::held(int64_t host) const {
  const auto answer = answers_.find(host);
  return answer == answers_.end() || away_.contains(host) ? Held() : answer->second.held.value_or(Held());
}

std::optional<int64_t> Leader::holder_of(int64_t place) const {
  for (const int64_t host : places_) {
    if (held(host).place == place) return host;
  }
  return std::nullopt;
}

std::vector<Slot> Leader::copies_of(int64_t place) const {
  const std::optional<int64_t> holder = holder_of(place);
  if (!holder) return {};
  std::vector<Slot> out = held(*holder).whole;
  std::erase_if(out, [&](const Slot& slot) { return unheld_.contains({place, slot.step}); });
  return out;
}

std::vector<Ward> Leader::wards(const Slot& slot) const {
  std::vector<Ward> out;
  for (size_t place = 0; place < places_.size(); ++place) {
    const int64_t host = places_[place];
    const std::optional<int64_t> holder = holder_of(static_cast<int64_t>(place));
    if (away_.contains(host) && holder) out.push_back({host, *holder, slot});
  }
  return out;
}

std::vector<Slot> Leader::memory_of(int64_t place) const {
  const int64_t host = places_.at(static_cast<size_t>(place));
  if (away_.contains(host)) return copies_of(place);
  const auto answer = answers_.find(host);
  return answer == answers_.end() ? std::vector<Slot>() : answer->second.memory.whole;
}

/// The newest step that every place has, in the memory of its host or (with copies) of another one.
std::optional<Slot> Leader::newest(bool with_copies) const {
  std::vector<Slot> common;
  for (size_t place = 0; place < places_.size(); ++place) {
    std::vector<Slot> here = memory_of(static_cast<int64_t>(place));
    if (with_copies) std::ranges::copy(copies_of(static_cast<int64_t>(place)), std::back_inserter(here));
    common = place == 0 ? here : in_both(common, here);
  }
  const auto best = std::ranges::max_element(
      common, {}, [](const Slot& slot) { return std::tuple(slot.incarnation, slot.step, -slot.slot); });
  return best == common.end() ? std::nullopt : std::optional(*best);
}

int64_t Leader::until_ns(const Loading& loading) const {
  return loading.limit_s > 0 ? after(loading.since_ns, loading.limit_s) : INT64_MAX;
}

/// The hosts that owe an answer.
std::set<int64_t> Leader::silent() const {
  std::set<int64_t> out;
  if (const auto* const asking = std::get_if<Asking>(&phase_)) out = asking->owe;
  if (const auto* const loading = std::get_if<Loading>(&phase_); loading != nullptr && !loading->over) {
    for (const auto& [host, name] : names_) {
      if (!loading->carried.contains(host)) out.insert(host);
    }
  }
  out.erase(options_.own);
  return out;
}

std::vector<Wait> Leader::waits() const {
  std::vector<Wait> out;
  const auto* const asking = std::get_if<Asking>(&phase_);
  if (const auto* const filling = std::get_if<Filling>(&phase_)) {
    const auto& [holder, slot, place] = filling->now;
    const std::string name = holder == options_.own ? "this host" : names_.at(holder);
    out.push_back({holder, fmt::format("{} to give step {} of place {}", name, slot.step, place), filling->until_ns});
  }
  const auto* const loading = std::get_if<Loading>(&phase_);
  if (loading != nullptr && loading->limit_s == 0) return out;  // it waits for the own host first
  for (const int64_t host : silent()) {
    out.push_back({host, names_.at(host) + (asking != nullptr ? " to say what its memory holds" : " to load"),
                   asking != nullptr ? asking->until_ns : until_ns(*loading)});
  }
  return out;
}

// --- before ranks run ------------------------------------------------------------------------------------------------

void Leader::regather(Actions& out) {
  phase_ = Gathering{};
  out.emplace_back(Gather{look_.wants});
}

void Leader::fail(Error error, Actions& out) {
  phase_ = Halting{};
  out.emplace_back(Failed{std::move(error)});
}

void Leader::on(const Look& event, int64_t, Actions& out) {
  RT_CHECK(!std::holds_alternative<Ended>(phase_), "the run has ended");
  look_ = event;
  regather(out);
}

void Leader::on(const Gathered& event, int64_t now_ns, Actions& out) {
  RT_CHECK(std::holds_alternative<Gathering>(phase_), "hosts were not to be gathered");
  RT_CHECK(event.away.empty() || look_.wants == Wants::kLeft, "a host is away");
  places_ = event.places;
  names_ = event.names;
  away_ = event.away;
  lost_one_ = false;
  answers_.clear();
  unheld_.clear();
  refused_.reset();
  Asking asking{.until_ns = after(now_ns, options_.answer_s), .owe = {}};
  for (const int64_t host : places_) {
    if (!away_.contains(host)) asking.owe.insert(host);
  }
  phase_ = std::move(asking);
  out.emplace_back(Ask{++asks_});
}

void Leader::on(const GaveUp& event, int64_t, Actions& out) {
  RT_CHECK(std::holds_alternative<Gathering>(phase_), "hosts were not to be gathered");
  fail(event.error, out);
}

void Leader::take_memory(int64_t host, int64_t ask, Idle idle, std::optional<Error> error, int64_t now_ns,
                         Actions& out) {
  auto* const asking = std::get_if<Asking>(&phase_);
  if (asking == nullptr || ask != asks_ || asking->owe.erase(host) == 0) return;
  answers_[host] = std::move(idle);
  if (error && !refused_) refused_ = std::move(error);
  if (asking->owe.empty()) asked(now_ns, out);
}

/// All have said what their memory holds.
void Leader::asked(int64_t now_ns, Actions& out) {
  if (refused_) return fail(*refused_, out);
  if (look_.wants == Wants::kLeft) return finish(out);
  if (look_.measures) {
    phase_ = Measuring{};
    out.emplace_back(Measure{});
    return;
  }
  fill(now_ns, out);
}

void Leader::on(const Measured& event, int64_t now_ns, Actions& out) {
  RT_CHECK(std::holds_alternative<Measuring>(phase_), "hosts were not to be measured");
  if (event.error) return fail(*event.error, out);
  look_.measures = false;
  lost_one_ ? regather(out) : fill(now_ns, out);
}

/// Where the newest step of all places is for some only in a copy, their hosts get it, one after the other.
void Leader::fill(int64_t now_ns, Actions& out) {
  if (held(options_.own).port == 0) return finish(out);  // nothing is copied
  const std::optional<Slot> own = newest(false), best = newest(true);
  if (!best || own == best) return finish(out);
  for (int64_t place = 0; place < std::ssize(places_); ++place) {
    const std::vector<Slot> here = memory_of(place);
    if (std::ranges::find(here, *best) != here.end()) continue;
    const Give give{holder_of(place).value(), *best, place};
    phase_ = Filling{after(now_ns, options_.give_s), give};
    out.emplace_back(give);
    return;
  }
}

void Leader::take_given(int64_t host, const std::optional<Error>& error, int64_t now_ns, Actions& out) {
  const auto* const filling = std::get_if<Filling>(&phase_);
  if (filling == nullptr || filling->now.holder != host) return;
  const auto [holder, slot, place] = filling->now;
  if (lost_one_) return regather(out);
  const int64_t to = places_[static_cast<size_t>(place)];
  if (error) {
    out.emplace_back(
        Say{fmt::format("step {} of place {} is in a copy that cannot be had: {}", slot.step, place, error->message)});
    unheld_.insert({place, slot.step});
  } else {
    answers_[to].memory.whole.push_back(slot);
    if (to != options_.own)
      out.emplace_back(Say{
          fmt::format("{} has step {} of its place from a copy in another host's memory", names_.at(to), slot.step)});
  }
  fill(now_ns, out);
}

void Leader::finish(Actions& out) {
  std::optional<Memory> common;
  for (const auto& [host, name] : names_) {
    const auto place = std::ranges::find(places_, host) - places_.begin();
    Memory one{.incarnation = 0, .whole = memory_of(place)};
    if (away_.contains(host)) {
      if (one.whole.empty())
        return fail({ErrorCode::kUnavailable, fmt::format("no host has a copy of what {} held", name)}, out);
    } else {
      one.incarnation = answers_.at(host).memory.incarnation;
    }
    if (common) {
      one.incarnation = std::max(common->incarnation, one.incarnation);
      one.whole = in_both(common->whole, one.whole);
    }
    common = std::move(one);
  }
  phase_ = Choosing{};
  if (!common) common.emplace();
  std::ranges::sort(common->whole, {}, [](const Slot& slot) { return std::tuple(slot.slot, slot.incarnation); });
  out.emplace_back(Settle{common->whole});
  out.emplace_back(Ready{*std::move(common)});
}

void Leader::on(const Chosen& event, int64_t now_ns, Actions&) {
  RT_CHECK(std::holds_alternative<Choosing>(phase_), "nothing was to be chosen");
  incarnation_ = event.incarnation;
  Loading loading{.since_ns = now_ns, .limit_s = 0, .carried = {}};
  for (const int64_t host : away_) loading.carried[host] = Error{ErrorCode::kPeerLost, names_.at(host) + " is away"};
  phase_ = std::move(loading);
}

void Leader::take_carried(int64_t host, const std::optional<Error>& error, int64_t now_ns, Actions& out) {
  auto* const loading = std::get_if<Loading>(&phase_);
  if (loading == nullptr || loading->over || !loading->carried.try_emplace(host, error).second) return;
  if (host == options_.own)
    loading->limit_s = options_.answer_s + (1 + options_.load_times) * seconds_between(loading->since_ns, now_ns);
  conclude(*loading, out);
}

/// A host that was lost counts more than what went wrong here, for all look again then.
void Leader::conclude(Loading& loading, Actions& out) {
  if (std::ssize(loading.carried) < std::ssize(places_)) return;
  loading.over = true;
  std::optional<Error> failed;
  for (const auto& [host, error] : loading.carried) {
    if (host != options_.own && error && !failed) failed = error;
  }
  const std::optional<Error>& own = loading.carried.at(options_.own);
  if (own && (!failed || failed->code != ErrorCode::kPeerLost)) failed = own;
  if (failed) return fail(*std::move(failed), out);
  out.emplace_back(Loaded{});
}

void Leader::on(const Go& event, int64_t, Actions&) {
  const auto* const loading = std::get_if<Loading>(&phase_);
  const bool nothing_to_load = std::holds_alternative<Choosing>(phase_);
  RT_CHECK(nothing_to_load || (loading != nullptr && loading->over), "not all hosts have loaded");
  incarnation_ = event.incarnation;
  phase_ = Running{};
  stopped_.clear();
  left_.clear();
}

// --- at any time -----------------------------------------------------------------------------------------------------

void Leader::on(const Heard& event, int64_t now_ns, Actions& out) {
  const auto other = names_.find(event.host);
  if ((event.host != options_.own && other == names_.end()) || away_.contains(event.host)) return;
  const auto named = [&](std::optional<Error> error) {
    return error && other != names_.end() ? std::move(*error).with(other->second) : error;
  };
  std::visit(Overloaded{
                 [&](const Idle& one) { take_memory(event.host, one.ask, one, std::nullopt, now_ns, out); },
                 [&](const CannotIdle& one) { take_memory(event.host, one.ask, {}, named(one.error), now_ns, out); },
                 [&](const Given& one) { take_given(event.host, named(one.error), now_ns, out); },
                 [&](const Carried& one) { take_carried(event.host, named(one.error), now_ns, out); },
                 [&](const Stopped& one) {
                   if (one.incarnation == incarnation_) stopped_.insert(event.host);
                 },
                 [&](const Left& one) {
                   if (one.incarnation == incarnation_ && is_running()) left_.insert(event.host);
                 },
                 [](const auto&) {},
             },
             event.what);
}

void Leader::on(const Halt&, int64_t, Actions&) {
  if (is_running()) phase_ = Halting{};
}

void Leader::on(const Lost& event, int64_t now_ns, Actions& out) {
  if (!names_.contains(event.host) || !away_.insert(event.host).second) return;
  lost_one_ = true;
  if (auto* const asking = std::get_if<Asking>(&phase_)) {
    if (look_.wants != Wants::kLeft) return regather(out);
    if (asking->owe.erase(event.host) > 0 && asking->owe.empty()) asked(now_ns, out);
  } else if (const auto* const filling = std::get_if<Filling>(&phase_)) {
    // Else the holder's word comes yet, and would count for the next order to it.
    if (filling->now.holder == event.host) regather(out);
  } else if (auto* const loading = std::get_if<Loading>(&phase_); loading != nullptr && !loading->over) {
    const Error lost{ErrorCode::kPeerLost, fmt::format("{} was lost: {}", names_.at(event.host), event.why)};
    loading->carried[event.host] = lost;
    conclude(*loading, out);
  }
}

void Leader::on(const Stop&, int64_t, Actions& out) {
  const char* const what = std::holds_alternative<Asking>(phase_)    ? "the hosts were being asked"
                           : std::holds_alternative<Filling>(phase_) ? "a copy was being fetched"
                           : is_loading()                            ? "the hosts were loading"
                                                                     : nullptr;
  if (what != nullptr) fail({ErrorCode::kStopped, fmt::format("asked to stop while {}", what)}, out);
}

void Leader::on(const End&, int64_t, Actions&) { phase_ = Ended{}; }

void Leader::on(const Tick&, int64_t now_ns, Actions& out) {
  const auto* const loading = std::get_if<Loading>(&phase_);
  const bool fills = std::holds_alternative<Filling>(phase_);
  for (const Wait& wait : waits()) {  // of all at the same time
    if (now_ns < wait.until_ns) return;
    const std::string why =
        loading != nullptr ? fmt::format("it has not said that it has loaded in {:.0f} s", loading->limit_s)
        : fills            ? fmt::format("it has not given what it holds for another host in {:.0f} s", options_.give_s)
                           : fmt::format("it has not said what its memory holds in {:.0f} s", options_.answer_s);
    if (wait.host == options_.own) return take_given(wait.host, Error{ErrorCode::kTimeout, why}, now_ns, out);
    out.emplace_back(Say{fmt::format("{} is taken for lost: {}", names_.at(wait.host), why)});
    out.emplace_back(Drop{wait.host, why});
  }
}

}  // namespace cairn::hosts::generation
