#include "runtime/hosts/saves.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "runtime/core/check.h"

namespace cairn::hosts::saves {
namespace {

constexpr size_t kMostNamed = 8;  // hosts, in a text

double seconds_between(int64_t from_ns, int64_t to_ns) { return static_cast<double>(to_ns - from_ns) / 1e9; }

int64_t after(int64_t from_ns, double seconds) { return from_ns + static_cast<int64_t>(seconds * 1e9); }

/// For what follows the own part.
double patience_after(double wrote_s, const Limits& limits) { return std::max(limits.parts, 4 * wrote_s); }

Error given_up() { return {ErrorCode::kStopped, "the save was given up"}; }

/// Ranks have reached the step again, in another slot, while a persister writes it.
Error saved_already(int64_t step) {
  return {ErrorCode::kUnavailable, fmt::format("step {} is being saved already", step)};
}

Error not_ordered(int64_t step) {
  return {ErrorCode::kUnavailable, fmt::format("step {} is not in the leader's memory", step)};
}

Error stopped_too_early() {
  return {ErrorCode::kUnavailable, "the ranks were stopped before all hosts had it in memory"};
}

const Slot* slot_of(const std::vector<Slot>& slots, int64_t step) {
  const auto found = std::ranges::find(slots, step, &Slot::step);
  return found == slots.end() ? nullptr : &*found;
}

bool is_ward(const std::vector<Ward>& wards, int64_t host) {
  return std::ranges::find(wards, host, &Ward::host) != wards.end();
}

}  // namespace

std::string_view phase_name(Phase phase) {
  switch (phase) {
    case Phase::kSave:
      return "save";
    case Phase::kBegun:
      return "begun";
    case Phase::kWritten:
      return "written";
    case Phase::kCommitted:
      return "committed";
    case Phase::kDropped:
      return "dropped";
  }
  return "?";
}

// --- leader --------------------------------------------------------------------------------------------------------

Actions Leader::step(const LeaderEvent& event, int64_t now_ns) {
  Actions out;
  std::visit([&](const auto& one) { on(one, now_ns, out); }, event);
  proceed(now_ns, out);
  return out;
}

Leader::Save* Leader::find(const Try& of) {
  const auto found = saves_.find(of.step);
  return found == saves_.end() || found->second.of != of ? nullptr : &found->second;
}

bool Leader::has_ward(int64_t host, int64_t step) const {
  return std::ranges::any_of(wards_, [&](const Ward& ward) { return ward.host == host && ward.slot.step == step; });
}

Leader::Owes Leader::owes(int64_t host, const Save& save) const {
  if (!save.all_hear) return away_.contains(host) && !has_ward(host, save.of.step) ? Owes::kToBeThere : Owes::kNothing;
  if (!save.others.contains(host) || save.written.contains(host)) return Owes::kNothing;
  return save.begun.contains(host) || is_ward(save.wards, host) ? Owes::kItsPart : Owes::kToBegin;
}

double Leader::patience_s(const Save& save) const {
  return patience_after(seconds_between(save.told_ns, save.written_ns), limits_);
}

std::string Leader::waits_for(int64_t step) const {
  const auto save = saves_.find(step);
  if (save == saves_.end()) return {};
  std::vector<std::string> out;
  size_t more = 0;
  for (const auto& [host, name] : hosts_) {
    const Owes what = owes(host, save->second);
    if (what == Owes::kNothing || (what == Owes::kItsPart && save->second.written_ns == 0)) continue;
    const char* const words = what == Owes::kToBeThere ? "is away"
                              : what == Owes::kToBegin ? "has not begun"
                                                       : "writes its part";
    if (out.size() < kMostNamed) {
      out.push_back(fmt::format("{} ({})", name, words));
    } else {
      ++more;
    }
  }
  return fmt::format("{}{}", fmt::join(out, ", "), more > 0 ? fmt::format(" and {} more", more) : "");
}

std::vector<Wait> Leader::waits() const {
  std::vector<Wait> out;
  for (const auto& [step, save] : saves_) {
    if (save.phase == Phase::kSave && !save.all_hear) {
      for (const auto& [host, name] : hosts_) {
        if (owes(host, save) == Owes::kToBeThere)
          out.push_back({save.of, name + " to be back", after(save.asked_ns, limits_.away)});
      }
    }
    if (save.phase != Phase::kWritten) continue;
    for (const auto& [host, name] : save.others) {
      const Owes what = owes(host, save);
      if (what == Owes::kToBegin) out.push_back({save.of, name + " to begin", after(save.told_ns, limits_.begin)});
      if (what == Owes::kItsPart)
        out.push_back({save.of, name + " to write its part", after(save.written_ns, patience_s(save))});
    }
  }
  return out;
}

std::optional<Try> Leader::current(int64_t step) const {
  const auto save = saves_.find(step);
  return save == saves_.end() ? std::nullopt : std::optional(save->second.of);
}

std::optional<Phase> Leader::phase(const Try& of) const {
  const auto save = saves_.find(of.step);
  return save == saves_.end() || save->second.of != of ? std::nullopt : std::optional(save->second.phase);
}

/// Takes each save that waits as far as events have made possible.
void Leader::proceed(int64_t now_ns, Actions& out) {
  for (auto at = saves_.begin(); at != saves_.end();) {
    Save& save = at->second;
    const bool hears = save.phase == Phase::kSave && !save.all_hear;
    at = hears && !begin(save, now_ns, out) ? saves_.erase(at) : std::next(at);
  }
  for (auto& [step, save] : saves_) {
    if (save.phase == Phase::kWritten) conclude(save, now_ns, out);
  }
}

/// False: it has ended without a try that any host has heard of.
bool Leader::begin(Save& save, int64_t now_ns, Actions& out) {
  RT_CHECK(save.phase == Phase::kSave && !save.all_hear, "step {} has begun already", save.of.step);
  if (std::optional<Error> error = why_not_begun(save, now_ns)) {
    out.push_back(Leave{save.of, std::move(error)});
    return false;
  }
  if (std::ranges::any_of(hosts_, [&](const auto& host) { return owes(host.first, save) == Owes::kToBeThere; }))
    return true;
  save.all_hear = true;
  if (common_) save.whole = *slot_of(*common_, save.of.step);
  save.others = save.hosts = hosts_;
  save.epoch = epoch_;
  for (const Ward& ward : wards_) {
    if (ward.slot.step != save.of.step) continue;
    save.wards.push_back(ward);
    if (ward.holder == own_) save.others.erase(ward.host);
  }
  out.push_back(MakeFolder{save.of});
  return true;
}

std::optional<Error> Leader::why_not_begun(const Save& save, int64_t now_ns) const {
  if (save.error) return save.error;
  const auto away =
      std::ranges::find_if(hosts_, [&](const auto& host) { return owes(host.first, save) == Owes::kToBeThere; });
  if (away == hosts_.end())
    return common_ && slot_of(*common_, save.of.step) == nullptr ? std::optional(stopped_too_early()) : std::nullopt;
  if (common_) {
    return Error{ErrorCode::kUnavailable,
                 fmt::format("{} is away: what its memory holds cannot be saved", away->second)};
  }
  if (save.gives_up) return given_up();
  if (seconds_between(save.asked_ns, now_ns) >= limits_.away)
    return Error{ErrorCode::kTimeout, fmt::format("{} has been away for {:.0f} s", away->second, limits_.away)};
  return std::nullopt;
}

/// The error of a save whose own part is written.
std::optional<Error> Leader::late(const Save& save, int64_t now_ns) const {
  for (const auto& [host, name] : save.others) {
    const Owes what = owes(host, save);
    const double since_told_s = seconds_between(save.told_ns, now_ns);
    const double since_written_s = seconds_between(save.written_ns, now_ns);
    if (what == Owes::kToBegin && since_told_s >= limits_.begin)
      return Error{ErrorCode::kTimeout, fmt::format("{} has not begun in {:.0f} s", name, since_told_s)};
    if (what == Owes::kItsPart && since_written_s >= patience_s(save)) {
      return Error{ErrorCode::kTimeout,
                   fmt::format("{} has not written its part, {:.0f} s after the leader", name, since_written_s)};
    }
  }
  return std::nullopt;
}

void Leader::conclude(Save& save, int64_t now_ns, Actions& out) {
  if (!save.error) save.error = late(save, now_ns);
  const bool all =
      std::ranges::all_of(save.others, [&](const auto& host) { return save.written.contains(host.first); });
  if (!save.error && !all && save.gives_up) save.error = given_up();
  if (save.error) {
    save.phase = Phase::kDropped;
    out.push_back(Abandon{save.of, *save.error});
  } else if (all) {
    save.phase = Phase::kCommitted;
    out.push_back(Commit{save.of, save.others, save.hosts, save.epoch});
  }
}

void Leader::on(const Ask& event, int64_t now_ns, Actions& out) {
  if (saves_.contains(event.step)) return out.push_back(Leave{{event.step, 0}, saved_already(event.step)});
  Save save;
  save.of = {event.step, ++tries_};
  save.asked_ns = now_ns;
  saves_.emplace(event.step, std::move(save));
}

void Leader::on(const FolderMade& event, int64_t now_ns, Actions& out) {
  Save* const save = find(event.of);
  RT_CHECK(save != nullptr && save->phase == Phase::kSave && save->all_hear, "no folder of step {} was asked for",
           event.of.step);
  save->phase = Phase::kBegun;
  save->told_ns = now_ns;
  out.push_back(Tell{hosts::Save{save->of.step, save->of.number, event.folder, save->wards}});
  if (save->whole) out.push_back(Tell{Promise{*save->whole}});
  WriteParts parts{save->of};
  std::ranges::copy_if(save->wards, std::back_inserter(parts.wards),
                       [&](const Ward& ward) { return ward.holder == own_; });
  out.push_back(std::move(parts));
}

void Leader::on(const PartWritten& event, int64_t now_ns, Actions&) {
  Save* const save = find(event.of);
  RT_CHECK(save != nullptr && save->phase == Phase::kBegun, "no part of step {} was asked for", event.of.step);
  save->phase = Phase::kWritten;
  save->written_ns = now_ns;
}

void Leader::on(const Named& event, int64_t, Actions& out) {
  const Save* const save = find(event.of);
  RT_CHECK(save != nullptr && save->phase == Phase::kCommitted, "step {} was not to be committed", event.of.step);
  saves_.erase(event.of.step);
  out.push_back(Tell{hosts::Committed{event.of.step, event.of.number}});
  out.push_back(Leave{event.of});
}

void Leader::on(const Failed& event, int64_t, Actions& out) {
  const Save* const save = find(event.of);
  if (save == nullptr) return;  // it has ended before
  const bool told = save->phase != Phase::kSave;
  saves_.erase(event.of.step);
  out.push_back(Tell{hosts::Dropped{event.of.step, told ? event.of.number : 0, event.error}});
  out.push_back(Leave{event.of, event.error});
}

void Leader::on(const GiveUp& event, int64_t, Actions&) {
  if (Save* const save = find(event.of)) save->gives_up = true;
}

void Leader::on(const NeverAsked& event, int64_t, Actions& out) {
  if (saves_.contains(event.step)) return;  // another try of it
  out.push_back(Tell{hosts::Dropped{event.step, 0, event.error}});
}

void Leader::on(const Heard& event, int64_t, Actions&) {
  if (const auto* const begun = std::get_if<hosts::Begun>(&event.what)) {
    take_part(event.host, {begun->step, begun->number}, std::nullopt, nullptr, false);
  } else if (const auto* const written = std::get_if<hosts::Written>(&event.what)) {
    take_part(event.host, {written->step, written->number}, written->of, nullptr, true);
  } else if (const auto* const failed = std::get_if<hosts::NotWritten>(&event.what)) {
    take_part(event.host, {failed->step, failed->number}, failed->of, &failed->error, false);
  }
}

/// `ward`: the one whose part it is. Neither `error` nor `written`: the host has begun.
void Leader::take_part(int64_t host, const Try& of, std::optional<int64_t> ward, const Error* error, bool written) {
  Save* const save = find(of);
  if (save == nullptr || (ward && !is_ward(save->wards, *ward))) return;
  host = ward.value_or(host);
  save->begun.insert(host);
  if (written) save->written.insert(host);
  if (error != nullptr && !save->error) save->error = Error(*error).with(hosts_[host]);
}

void Leader::on(const Lost& event, int64_t, Actions&) {
  away_.insert(event.host);
  for (auto& [step, save] : saves_) {
    if (!save.all_hear || save.error) continue;
    const bool holds = std::ranges::any_of(
        save.wards, [&](const Ward& ward) { return ward.holder == event.host && !save.written.contains(ward.host); });
    if (holds || owes(event.host, save) != Owes::kNothing)
      save.error = Error{ErrorCode::kUnavailable, fmt::format("{} was lost: {}", hosts_[event.host], event.why)};
  }
}

void Leader::on(const Back& event, int64_t, Actions&) { away_.erase(event.host); }

void Leader::on(const SetHosts& event, int64_t, Actions&) {
  hosts_ = event.hosts;
  epoch_ = event.epoch;
  away_ = event.away;
}

void Leader::on(const SetWards& event, int64_t, Actions&) {
  own_ = event.own;
  wards_ = event.wards;
}

void Leader::on(const Settle& event, int64_t, Actions& out) {
  common_ = event.common;
  for (auto& [step, save] : saves_) {
    const bool has_to_begin = std::ranges::any_of(
        save.others, [&save = save, this](const auto& host) { return owes(host.first, save) == Owes::kToBegin; });
    if (save.error || (save.all_hear && !has_to_begin)) continue;
    if (const Slot* const whole = slot_of(*common_, step)) {
      out.push_back(Tell{Promise{*whole}});
    } else {
      save.error = stopped_too_early();
    }
  }
}

void Leader::on(const Resumed&, int64_t, Actions&) { common_.reset(); }

void Leader::on(const Tick&, int64_t, Actions&) {}

// --- member --------------------------------------------------------------------------------------------------------

// Either side may have forgotten a step of before: ranks were killed between its last byte and the promise. Which ones
// the other side has not, is known of steps up to resumed_step_.

Actions Member::step(const MemberEvent& event, int64_t now_ns) {
  Actions out;
  std::visit([&](const auto& one) { on(one, now_ns, out); }, event);
  proceed(now_ns, out);
  return out;
}

Member::Running* Member::find(const Try& of) {
  const auto found = running_.find(of.step);
  return found == running_.end() || found->second.order.number != of.number ? nullptr : &found->second;
}

/// By a word of the leader.
Member::Running* Member::find_told(const Try& of) {
  Running* const save = find(of);
  return save == nullptr || save->orphan ? nullptr : save;
}

bool Member::is_due(int64_t step) const {
  if (running_.contains(step)) return false;  // a try of before has not ended yet
  return orders_.contains(step) || (step <= resumed_step_ && !leaders_.contains(step));
}

int64_t Member::until_ns(const Running& save) const {
  // The leader writes its own part as long as it takes, and then waits for the other hosts'.
  return after(save.written_ns, 2 * patience_after(seconds_between(save.began_ns, save.written_ns), limits_));
}

std::vector<Wait> Member::waits() const {
  std::vector<Wait> out;
  for (const auto& [step, save] : running_) {
    if (save.phase == Phase::kWritten)
      out.push_back({{step, save.order.number}, "the leader to commit", until_ns(save)});
  }
  return out;
}

std::optional<Try> Member::current(int64_t step) const {
  const auto save = running_.find(step);
  return save == running_.end() ? std::nullopt : std::optional(Try{step, save->second.order.number});
}

std::optional<Phase> Member::phase(const Try& of) const {
  const auto save = running_.find(of.step);
  if (save != running_.end() && save->second.order.number == of.number) return save->second.phase;
  const auto order = orders_.find(of.step);
  if (order == orders_.end() || order->second.number != of.number) return std::nullopt;
  return order->second.error ? Phase::kDropped : Phase::kSave;
}

void Member::proceed(int64_t now_ns, Actions& out) {
  std::erase_if(running_, [&](const auto& one) {
    const auto& [step, save] = one;
    if (save.phase != Phase::kWritten) return false;
    Leave leave{{step, save.order.number}};
    if (save.order.error) {
      leave.error = save.order.error;
    } else if (save.committed) {
      // well
    } else if (save.gives_up) {
      leave.error = given_up();
    } else if (now_ns >= until_ns(save)) {
      leave.error = Error{ErrorCode::kTimeout,
                          fmt::format("the leader has not committed step {}, {:.0f} s after this host's part", step,
                                      seconds_between(save.written_ns, now_ns))};
    } else {
      return false;
    }
    out.push_back(std::move(leave));
    return true;
  });
}

void Member::on(const Ask& event, int64_t now_ns, Actions& out) {
  if (running_.contains(event.step)) return out.push_back(Leave{{event.step, 0}, saved_already(event.step)});
  const auto found = orders_.find(event.step);
  if (found == orders_.end()) return out.push_back(Leave{{event.step, 0}, not_ordered(event.step)});
  Order order = std::move(found->second);
  orders_.erase(found);
  const Try of{event.step, order.number};
  if (order.error) {
    out.push_back(Leave{of, std::move(order.error)});
    return;
  }
  out.push_back(Tell{hosts::Begun{of.step, of.number}});
  out.push_back(WriteParts{of, order.folder});
  Running save;
  save.order = std::move(order);
  save.began_ns = now_ns;
  running_.emplace(event.step, std::move(save));
}

void Member::on(const PartWritten& event, int64_t now_ns, Actions& out) {
  Running* const save = find(event.of);
  RT_CHECK(save != nullptr && save->phase == Phase::kBegun, "no part of step {} was asked for", event.of.step);
  save->phase = Phase::kWritten;
  save->written_ns = now_ns;
  if (!save->orphan) out.push_back(Tell{hosts::Written{event.of.step, event.of.number}});
}

void Member::on(const Failed& event, int64_t, Actions& out) {
  const Running* const save = find(event.of);
  if (save == nullptr) return;  // it has ended before
  const bool orphan = save->orphan;
  running_.erase(event.of.step);
  if (!orphan)
    out.push_back(Tell{hosts::NotWritten{.step = event.of.step, .number = event.of.number, .error = event.error}});
  out.push_back(Leave{event.of, event.error});
}

void Member::on(const GiveUp& event, int64_t, Actions&) {
  if (Running* const save = find(event.of)) save->gives_up = true;
}

void Member::on(const Thrown& event, int64_t, Actions&) {
  Running* const save = find(event.of);
  if (save == nullptr) return;
  if (!save->orphan) orders_.try_emplace(event.of.step, std::move(save->order));  // the leader waits for the next time
  running_.erase(event.of.step);
}

void Member::on(const WardWritten& event, int64_t, Actions& out) {
  const auto writes = with_wards_.find(event.of);
  if (writes == with_wards_.end()) return;  // of a leader that is lost
  with_wards_.erase(writes);
  if (event.error) {
    out.push_back(Tell{hosts::NotWritten{event.of.step, event.of.number, event.host, *event.error}});
  } else {
    out.push_back(Tell{hosts::Written{event.of.step, event.of.number, event.host}});
  }
}

void Member::on(const Told& event, int64_t now_ns, Actions& out) {
  if (const auto* const order = std::get_if<hosts::Save>(&event.what)) {
    take_order(*order, now_ns, out);
  } else if (const auto* const committed = std::get_if<hosts::Committed>(&event.what)) {
    if (Running* const save = find_told({committed->step, committed->number})) save->committed = true;
  } else if (const auto* const dropped = std::get_if<hosts::Dropped>(&event.what)) {
    take_dropped(*dropped);
  }
}

void Member::take_order(const hosts::Save& order, int64_t now_ns, Actions& out) {
  orders_[order.step] = {.folder = order.folder, .number = order.number, .at_ns = now_ns, .error = {}};
  for (const Ward& ward : order.wards) {
    if (ward.holder != host_) continue;
    with_wards_.insert({order.step, order.number});
    out.push_back(WriteWard{{order.step, order.number}, order.folder, ward});
  }
}

/// A word on a try that this host does not know is of one that has ended here, or of a line that was left.
void Member::take_dropped(const hosts::Dropped& dropped) {
  const auto order = orders_.find(dropped.step);
  if (Running* const save = find_told({dropped.step, dropped.number})) {
    if (!save->order.error) save->order.error = dropped.error;
  } else if (dropped.number == 0 || (order != orders_.end() && order->second.number == dropped.number)) {
    orders_[dropped.step].error = dropped.error;
  }
}

void Member::on(const LeaderLost& event, int64_t, Actions&) {
  orders_.clear();
  with_wards_.clear();
  for (auto& [step, save] : running_) {
    save.orphan = true;
    if (!save.order.error) save.order.error = Error{ErrorCode::kUnavailable, "the leader was lost: " + event.why};
  }
}

void Member::on(const Promised& event, int64_t, Actions&) {
  here_.insert(event.step);
  leaders_.insert(event.step);
  if (const auto order = orders_.find(event.step); order != orders_.end() && order->second.error) orders_.erase(order);
}

void Member::on(const Resumed& event, int64_t now_ns, Actions& out) {
  resumed_step_ = event.step;
  here_ = event.here;
  leaders_ = event.leaders;
  // Orders of steps that are trained again are of the line that was left.
  std::erase_if(orders_, [&](const auto& one) { return one.first > event.step || one.second.error; });
  on(Look{event.here}, now_ns, out);
}

/// Refuses what the leader asks for and no persister here will write.
void Member::on(const Look& event, int64_t now_ns, Actions& out) {
  std::erase_if(orders_, [&](const auto& one) {
    const auto& [step, order] = one;
    if (order.error || running_.contains(step)) return false;
    const bool late = !event.promised.contains(step) && seconds_between(order.at_ns, now_ns) > limits_.promise;
    if (!late && (step > resumed_step_ || here_.contains(step))) return false;
    Error error{ErrorCode::kUnavailable, fmt::format("step {} is not in the memory of all hosts any more", step)};
    out.push_back(Tell{hosts::NotWritten{.step = step, .number = order.number, .error = std::move(error)}});
    return true;
  });
}

void Member::on(const Tick&, int64_t, Actions&) {}

}  // namespace cairn::hosts::saves
