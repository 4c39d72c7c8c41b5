#include "runtime/hosts/membership.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "runtime/core/check.h"

namespace cairn::hosts::membership {
namespace {

constexpr size_t kMostNamed = 8;  // hosts, in a text
constexpr double kAskAgainS = 1;  // after a store did not answer

int64_t after(int64_t from_ns, double seconds) { return from_ns + static_cast<int64_t>(seconds * 1e9); }

}  // namespace

std::vector<int64_t> first_places(const std::vector<int64_t>& before, int64_t train, const std::set<int64_t>& sizes,
                                  int64_t hosts, int64_t own) {
  std::vector<int64_t> in_order(static_cast<size_t>(train));
  std::iota(in_order.begin(), in_order.end(), 0);
  const std::set<int64_t> seen(before.begin(), before.end());
  const bool has_size = std::ssize(before) == train || sizes.contains(std::ssize(before));
  const bool fits =
      has_size && seen.size() == before.size() && seen.contains(own) && *seen.begin() >= 0 && *seen.rbegin() < hosts;
  return fits ? before : in_order;
}

bool first_leads(const std::vector<int64_t>& before) {
  return before.empty() || std::ranges::find(before, 0) != before.end();
}

double claims_after_s(double dead_after_s, double every_s, double stale_s) {
  return std::max({1.5 * dead_after_s, 4 * every_s, stale_s});
}

bool claims_lead(const Silence& silence) {
  const bool had_place = silence.starts || (silence.has_joined && silence.place >= 0);
  return had_place && silence.place_in_newest >= 0 && silence.still_s >= silence.claims_after_s;
}

bool leads_surely(const Sign& sign) {
  const double failing_s = sign.stood_still_s > 0 ? sign.claims_after_s : std::max(sign.claims_after_s, kStoreTriesS);
  return sign.since_shown_s < sign.claims_after_s || sign.since_failed_s < failing_s;
}

Leader::Leader(Options options, int64_t now_ns)
    : options_(std::move(options)), alone_until_ns_(after(now_ns, options_.alone_s)) {
  for (int64_t k = 0; k < options_.hosts; ++k) {
    if (k == options_.own) continue;
    const bool named = !options_.names.empty();
    hosts_[k] = {.name = named ? options_.names.at(static_cast<size_t>(k)) : fmt::format("host {}", k),
                 .away = "it has not joined",
                 .away_since_ns = now_ns};
  }
  set_places(std::move(options_.places));
}

Actions Leader::step(const Event& event, int64_t now_ns) {
  Actions out;
  std::visit([&](const auto& one) { on(one, now_ns, out); }, event);
  // First: what follows may be answered while it is performed.
  if (const bool holds = holds_lease(now_ns); std::exchange(held_, holds) != holds)
    out.insert(out.begin(), HoldLease{holds});
  return out;
}

// --- what is known ---------------------------------------------------------------------------------------------------

int64_t Leader::place(int64_t host) const {
  if (host == options_.own) return own_place_;
  const auto at = hosts_.find(host);
  return at == hosts_.end() ? -1 : at->second.place;
}

void Leader::set_places(std::vector<int64_t> places) {
  options_.places = std::move(places);
  for (auto& [index, host] : hosts_) host.place = -1;
  for (size_t place = 0; place < options_.places.size(); ++place) {
    const int64_t host = options_.places[place];
    (host == options_.own ? own_place_ : hosts_.at(host).place) = static_cast<int64_t>(place);
  }
}

bool Leader::someone_away() const {
  return std::ranges::any_of(options_.places, [this](int64_t host) { return is_away(host); });
}

std::string Leader::who_is_away() const {
  std::vector<std::string> away;
  size_t others = 0;
  for (const auto& [index, host] : hosts_) {
    if (host.there || place(index) < 0) continue;
    if (away.size() < kMostNamed) {
      away.push_back(fmt::format("{} ({})", host.name, host.away));
    } else {
      ++others;
    }
  }
  return fmt::format("{}{}", fmt::join(away, ", "), others > 0 ? fmt::format(" and {} more hosts", others) : "");
}

std::string Leader::missing_text(const std::vector<int64_t>& missing) const {
  std::vector<std::string> names;
  for (const int64_t k : missing) {
    names.push_back(options_.names.empty() ? fmt::format("host {}", k)
                                           : fmt::format("{} (host {})", options_.names.at(static_cast<size_t>(k)), k));
  }
  return fmt::format("{} of {} hosts have not joined: {}", names.size(), options_.hosts, fmt::join(names, ", "));
}

Error Leader::goes_on_smaller() const {
  RT_CHECK(smaller_.has_value(), "there is no smaller size");
  return {ErrorCode::kUnavailable, fmt::format("{}: the run continues with {} hosts", who_is_away(), *smaller_)};
}

/// Hosts without a place that have been let in, or have come to the door.
std::vector<int64_t> Leader::free_spares(bool at_door) const {
  std::vector<int64_t> out;
  for (const auto& [index, host] : hosts_) {
    if (place(index) < 0 && (at_door ? has_come(index) : host.there)) out.push_back(index);
  }
  return out;
}

/// This host among them. `spares`: those without a place too. `at_door`: those that wait there too.
int64_t Leader::count_there(bool spares, bool at_door) const {
  return 1 + std::ranges::count_if(hosts_, [&](const auto& one) {
           return (spares || place(one.first) >= 0) && (at_door ? has_come(one.first) : one.second.there);
         });
}

/// The most that the run may continue with, of `hosts`.
std::optional<int64_t> Leader::size_for(int64_t hosts) const {
  const auto next = sizes_.upper_bound(hosts);
  return next == sizes_.begin() ? std::nullopt : std::optional(*std::prev(next));
}

std::optional<int64_t> Leader::larger(int64_t now_ns) const {
  if (someone_away()) return std::nullopt;
  const int64_t there = 1 + std::ranges::count_if(hosts_, [&](const auto& one) {
                          const auto& [index, host] = one;
                          const bool stays = now_ns >= after(host.there_since_ns, options_.fewer_after_s);
                          return host.there && (place(index) >= 0 || stays);
                        });
  const std::optional<int64_t> size = size_for(there);
  return size && *size > std::ssize(options_.places) ? size : std::nullopt;
}

bool Leader::can_spare_one() const {
  const auto promised = std::ranges::count_if(
      hosts_, [this](const auto& one) { return one.second.excluded && !one.second.there && place(one.first) >= 0; });
  return std::ssize(free_spares(false)) > promised || size_for(count_there(true, false) - 1).has_value();
}

std::vector<Wait> Leader::waits() const {
  std::vector<Wait> out;
  const auto* const gathering = std::get_if<Gathering>(&phase_);
  if (gathering == nullptr) return out;
  for (const auto& [index, host] : hosts_) {
    if (place(index) >= 0 && !has_come(index))
      out.push_back({index, fmt::format("{} ({})", host.name, host.away), gathering->until_ns});
  }
  if (gathering->unknown) out.push_back({options_.own, "the store of epochs to answer", gathering->until_ns});
  return out;
}

// --- gathering -------------------------------------------------------------------------------------------------------

bool Leader::is_due(int64_t index, double grace_s, int64_t now_ns) const {
  const Host& host = hosts_.at(index);
  // A host that was not lost is on its way to the new leader.
  const bool comes = options_.led_before >= 0 && index != options_.led_before && !host.joined;
  const double waits_s = comes ? std::max(grace_s, options_.dead_after_s) : grace_s;
  return host.excluded || now_ns >= after(host.away_since_ns, waits_s);
}

/// Whether a host that was heard since this one was lost holds the copy of its memory.
bool Leader::is_copied(const std::vector<int64_t>& holders, int64_t host) const {
  if (holders.size() != options_.places.size()) return false;  // none, or of another size
  const int64_t holder = options_.places.at(static_cast<size_t>(holders.at(static_cast<size_t>(place(host)))));
  if (holder == options_.own) return true;
  const Host& has = hosts_.at(holder);
  return has.there && has.heard_ns >= hosts_.at(host).away_since_ns;
}

/// How long a host is away before a spare takes its place.
double Leader::spare_grace_s(const Gather& how, int64_t host) const {
  return is_copied(how.holders, host) ? how.spare_after_s : std::max(how.spare_after_s, how.fewer_after_s);
}

/// Whom the leader waits for: hosts with a place that are away, until spares may take the places of all of them, or
/// smaller_ is a size without them.
std::vector<int64_t> Leader::missing(const Gathering& gathering, int64_t now_ns) {
  smaller_.reset();
  std::vector<int64_t> out;
  for (const auto& [index, host] : hosts_) {
    if (place(index) >= 0 && !has_come(index)) out.push_back(index);
  }
  const Gather& how = gathering.how;
  const bool spares_may =
      std::ranges::all_of(out, [&](int64_t index) { return is_due(index, spare_grace_s(how, index), now_ns); });
  if (spares_may && free_spares(true).size() >= out.size()) return {};
  if (!std::ranges::all_of(out, [&](int64_t index) { return is_due(index, how.fewer_after_s, now_ns); })) return out;
  // Half of the hosts at least: the others may have another leader, which would do the same.
  if (2 * count_there(false, true) >= std::ssize(options_.places)) smaller_ = size_for(count_there(true, true));
  return smaller_ ? std::vector<int64_t>() : out;
}

void Leader::proceed(int64_t now_ns, Actions& out) {
  auto* const gathering = std::get_if<Gathering>(&phase_);
  if (gathering == nullptr) return;
  const std::vector<int64_t> away = missing(*gathering, now_ns);
  std::optional<Error> failed;
  if (away.empty() && now_ns < gathering->until_ns && !gathering->stops) {
    if (now_ns < gathering->ask_again_ns) return;
  } else if (gathering->stops && (!away.empty() || gathering->unknown)) {
    failed = Error{ErrorCode::kStopped, "asked to stop"};
  } else if (!away.empty() && now_ns >= gathering->until_ns) {
    failed = Error{ErrorCode::kTimeout, missing_text(away)};
  } else if (!away.empty()) {
    return;
  }
  phase_ = Judging{std::move(*gathering), std::move(failed)};
  out.push_back(CheckEpoch{});
}

void Leader::give_up(Error error, Actions& out) {
  phase_ = Idle{};
  // Hosts that are left: what their memory holds counts yet.
  if (smaller_ && options_.leads && !door_.empty()) out.push_back(Admit{door_});
  out.push_back(GaveUp{std::move(error)});
}

/// The hosts that are away have none any more.
void Leader::give_places_to_spares(Actions& out) {
  std::vector<int64_t> spares = free_spares(true);
  std::vector<int64_t> places = options_.places;
  for (int64_t& host : places) {
    if (host == options_.own || has_come(host)) continue;
    const Host& lost = hosts_.at(host);
    RT_CHECK(!spares.empty(), "no spare can take the place of {}", lost.name);
    out.push_back(Say{
        fmt::format("{}, a spare, takes the place of {} ({})", hosts_.at(spares.front()).name, lost.name, lost.away)});
    host = spares.front();
    spares.erase(spares.begin());
  }
  set_places(std::move(places));
}

void Leader::claim(const std::string& reason, Actions& out) {
  phase_ = Claiming{};
  out.push_back(Claim{options_.epoch + 1, options_.places, reason});
}

/// More than half of the hosts lost: they may have another leader. One that has just begun has to find them first.
bool Leader::holds_lease(int64_t now_ns) const {
  return !options_.leads || 2 * count_there(false, true) >= std::ssize(options_.places) || now_ns < alone_until_ns_;
}

void Leader::on(const Gather& event, int64_t now_ns, Actions& out) {
  RT_CHECK(std::holds_alternative<Idle>(phase_), "hosts are being gathered already");
  smaller_.reset();
  gather({.how = event, .until_ns = after(now_ns, event.patience_s)}, now_ns, out);
}

void Leader::gather(Gathering gathering, int64_t now_ns, Actions& out) {
  if (const Gather& how = gathering.how; how.announces && someone_away()) {
    const std::vector<int64_t> spares = free_spares(false);
    const std::optional<int64_t> fewer = size_for(count_there(true, false));
    double spare_s = 0;  // of the host that is granted most
    for (const int64_t host : options_.places) {
      if (is_away(host)) spare_s = std::max(spare_s, spare_grace_s(how, host));
    }
    const std::string then =
        !spares.empty() ? fmt::format("; after {:.0f} s a spare takes over", spare_s)
        : fewer         ? fmt::format("; after {:.0f} s the run continues with {} hosts", how.fewer_after_s, *fewer)
                        : "";
    const bool in_vain =
        std::ranges::any_of(hosts_, [this](const auto& one) { return one.second.excluded && place(one.first) >= 0; });
    const bool at_once = spare_s <= 0 && spares.size() >= missing(gathering, now_ns).size();
    if (!(in_vain || at_once) || spares.empty())
      out.push_back(Say{fmt::format("waiting up to {:.0f} s for {}{}", how.patience_s, who_is_away(), then)});
  }
  phase_ = std::move(gathering);
  proceed(now_ns, out);
}

void Leader::on(const Leads& event, int64_t now_ns, Actions& out) {
  auto* const judging = std::get_if<Judging>(&phase_);
  RT_CHECK(judging != nullptr, "whether this host leads was not asked");
  Gathering gathering = std::move(judging->of);
  const bool unknown = event.error && event.error->code != ErrorCode::kUnavailable;
  const std::optional<Error> failed = event.error && !(unknown && judging->failed) ? event.error : judging->failed;
  if (unknown && !judging->failed && now_ns < gathering.until_ns) {
    if (!gathering.unknown)
      out.push_back(
          Say{fmt::format("whether this host leads yet is not known, and is asked again: {}", event.error->message)});
    gathering.unknown = event.error;
    gathering.ask_again_ns = after(now_ns, kAskAgainS);
    phase_ = std::move(gathering);
    return;
  }
  gathering.unknown.reset();
  if (failed) {
    smaller_.reset();
    return give_up(*failed, out);
  }
  if (!missing(gathering, now_ns).empty()) {  // one has left meanwhile
    phase_ = gathering;
  } else if (options_.leads && !someone_away() && !gathering.resizes) {
    phase_ = Idle{};
    out.push_back(Gathered{});
  } else if (smaller_ && gathering.resizes) {
    resize(*smaller_, out);
  } else if (smaller_) {
    give_up(goes_on_smaller(), out);
  } else {
    give_places_to_spares(out);
    claim(gathering.how.reason, out);
  }
}

void Leader::on(const Claimed& event, int64_t, Actions& out) {
  RT_CHECK(std::holds_alternative<Claiming>(phase_), "no epoch was claimed");
  if (event.error) return give_up(*event.error, out);
  phase_ = Idle{};
  ++options_.epoch;
  options_.leads = true;
  out.push_back(Gathered{});
}

void Leader::on(const Resize& event, int64_t now_ns, Actions& out) {
  RT_CHECK(std::holds_alternative<Idle>(phase_), "hosts are being gathered");
  if (count_there(true, true) >= event.hosts) return resize(event.hosts, out);
  const std::string away = who_is_away();
  Gather how{.patience_s = event.patience_s,
             .spare_after_s = options_.fewer_after_s,
             .reason = fmt::format("{} was away", away.empty() ? "a spare" : away),
             .announces = true};
  gather({.how = std::move(how), .until_ns = after(now_ns, event.patience_s), .resizes = true}, now_ns, out);
}

void Leader::resize(int64_t hosts, Actions& out) {
  smaller_.reset();
  // By place, then those that have none; this host leads, and so trains.
  std::vector<int64_t> order;
  for (const int64_t host : options_.places) {
    if (host != options_.own && has_come(host)) order.push_back(host);
  }
  std::ranges::copy(free_spares(true), std::back_inserter(order));
  RT_CHECK(std::ssize(order) + 1 >= hosts, "{} hosts for {} places", order.size() + 1, hosts);
  order.resize(static_cast<size_t>(hosts - 1));
  order.push_back(options_.own);
  std::ranges::sort(order, {}, [this](int64_t host) {
    return std::pair(static_cast<uint64_t>(place(host)), host);  // -1 comes last
  });
  const std::vector<int64_t> before = options_.places;
  set_places(std::move(order));
  for (const int64_t host : before) {
    if (host != options_.own && place(host) < 0 && hosts_.at(host).there) out.push_back(Rest{host});
  }
  out.push_back(Say{fmt::format("{} hosts train from here on, of {} before", hosts, before.size())});
  claim(fmt::format("{} hosts instead of {}", hosts, before.size()), out);
}

void Leader::on(const Stop&, int64_t now_ns, Actions& out) {
  if (auto* const gathering = std::get_if<Gathering>(&phase_)) gathering->stops = true;
  proceed(now_ns, out);
}

void Leader::on(const Tick&, int64_t now_ns, Actions& out) { proceed(now_ns, out); }

// --- hosts that come and go ------------------------------------------------------------------------------------------

void Leader::on(const AtDoor& event, int64_t, Actions& out) {
  door_ = event.hosts;
  if (!std::holds_alternative<Idle>(phase_) || !options_.leads) return;
  // The place of a host that comes back is settled when ranks are stopped.
  Admit spares;
  std::ranges::copy_if(door_, std::inserter(spares.hosts, spares.hosts.end()),
                       [this](int64_t host) { return place(host) < 0; });
  if (!spares.hosts.empty()) out.push_back(std::move(spares));
}

void Leader::on(const Admitted& event, int64_t now_ns, Actions&) {
  Host& host = hosts_.at(event.host);
  door_.erase(event.host);
  host.name = event.name;
  host.there = host.joined = true;
  host.there_since_ns = now_ns;
  host.excluded = false;  // it has booted since
}

void Leader::on(const Lost& event, int64_t now_ns, Actions&) {
  Host& host = hosts_.at(event.host);
  if (!std::exchange(host.there, false)) return;
  host.away = event.why;
  host.away_since_ns = now_ns;
}

void Leader::on(const Heard& event, int64_t, Actions&) {
  for (const auto& [index, at_ns] : event.at_ns) hosts_.at(index).heard_ns = at_ns;
}

/// A leader that has just begun learns so that no host is to be waited for.
void Leader::on(const Barred& event, int64_t, Actions&) {
  if (const auto host = hosts_.find(event.host); host != hosts_.end()) host->second.excluded = true;
}

void Leader::on(const Exclude& event, int64_t now_ns, Actions& out) {
  on(Lost{event.host, {}}, now_ns, out);
  Host& host = hosts_.at(event.host);
  host.excluded = true;
  host.away = "excluded: " + event.reason;
}

}  // namespace cairn::hosts::membership
