#include "tools/run/fleet.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <numeric>
#include <utility>

#include "ckpt/snapshot/arena.h"
#include "runtime/cluster/token.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/trace.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using cluster::Message;
using cluster::News;
using nlohmann::json;

constexpr int kLookMs = 50;                       // at least so often somebody's stop is seen
constexpr int64_t kClockGoodNs = 60'000'000'000;  // clocks of two hosts drift apart: some microseconds a second
constexpr int64_t kLookNs = 250'000'000;          // so often at most, for a newer epoch

std::string boot_id() {
  std::string out;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::getline(file, out);
  return out;
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

uint64_t incarnation_in(const json& body) {
  const auto at = body.find("incarnation");
  return at != body.end() && at->is_number_unsigned() ? at->get<uint64_t>() : 0;
}

}  // namespace

std::string own_host_name() {
  std::array<char, 256> out{};
  return ::gethostname(out.data(), out.size() - 1) == 0 ? out.data() : "";
}

double lease_still_s(const cluster::Beats& beats) { return std::max(2 * beats.dead_after_s, cluster::kLeaseStillS); }

cluster::Hello hello_of(const HostOptions& options) {
  return {.index = options.placement.index,
          .name = own_host_name(),
          .boot_id = boot_id(),
          .build = options.build,
          .recipe_hash = options.recipe_hash,
          .ranks = options.ranks,
          .kernel_level = static_cast<int64_t>(kernels::gemm_isa())};
}

namespace {

/// The index of each place's host: as in the epoch before, whose hosts have memory of their places, or in order.
std::vector<int64_t> places_of(const std::optional<cluster::Epoch>& before, const HostOptions& options) {
  std::vector<int64_t> in_order(static_cast<size_t>(options.hosts())), out;
  std::iota(in_order.begin(), in_order.end(), 0);
  if (!before || std::ssize(before->members) != options.hosts()) return in_order;
  std::set<int64_t> seen;
  for (const cluster::Member& member : before->members) {
    if (member.index >= options.placement.hosts || !seen.insert(member.index).second) return in_order;
    out.push_back(member.index);
  }
  return seen.contains(options.placement.index) ? out : in_order;
}

}  // namespace

Result<std::unique_ptr<Fleet>> Fleet::open(HostOptions options, const fs::path& run,
                                           const std::optional<cluster::Epoch>& before) {
  RT_TRY_SET(cluster::Listener listener, cluster::Listener::open(options.port_from, options.port_to));
  RT_TRY_SET(cluster::EpochStore store, cluster::EpochStore::open(run / "cluster"));
  RT_TRY_SET(std::string token, cluster::make_token(run / "cluster"));
  return std::unique_ptr<Fleet>(new Fleet(std::move(options), run, std::move(listener), std::move(store),
                                          std::move(token), before, std::make_unique<cluster::Lease>(run / "cluster")));
}

Result<std::unique_ptr<Fleet>> Fleet::open(HostOptions options, const fs::path& run, Lead lead) {
  RT_TRY_SET(cluster::EpochStore store, cluster::EpochStore::open(run / "cluster"));
  RT_TRY_SET(std::string token, cluster::make_token(run / "cluster"));
  std::unique_ptr<Fleet> fleet(new Fleet(std::move(options), run, std::move(lead.listener), std::move(store),
                                         std::move(token), lead.epoch, std::move(lead.lease)));
  fleet->incarnation_ = lead.epoch.incarnation;
  fleet->own_address_ = lead.epoch.members.at(static_cast<size_t>(lead.epoch.leader)).address;
  fleet->epoch_ = std::move(lead.epoch);
  return fleet;
}

Fleet::Fleet(HostOptions options, fs::path run, cluster::Listener listener, cluster::EpochStore store,
             std::string token, const std::optional<cluster::Epoch>& before, std::unique_ptr<cluster::Lease> lease)
    : options_(std::move(options)),
      run_(std::move(run)),
      checkpoints_(run_ / "checkpoints"),
      store_(std::move(store)),
      token_(std::move(token)),
      incarnation_(cluster::random_hex()),
      known_epoch_(before ? before->number : 0),
      saves_([this](Message message) { tell_all(message.kind, message.body); }),
      door_(std::move(listener),
            {.names = options_.placement.names,
             .hosts = options_.placement.hosts,
             .token = token_,
             .present =
                 [this](int64_t index) {
                   const auto host = hosts_.find(index);
                   return host != hosts_.end() && host->second.peer >= 0;
                 }},
            hello_of(options_), [this](const std::string& text) { callbacks_.say(text); }),
      lease_(std::move(lease)),
      board_(options_.beats, [this](const News& news) { return take_early(news); }) {
  const std::vector<int64_t> places = places_of(before, options_);
  for (int64_t k = 0; k < options_.placement.hosts; ++k) {
    const auto at = std::ranges::find(places, k);
    const int64_t place = at == places.end() ? -1 : at - places.begin();
    if (k == options_.placement.index) {
      place_ = place;
      continue;
    }
    const std::vector<std::string>& known = options_.placement.names;
    hosts_[k] = Host{.index = k,
                     .place = place,
                     .name = known.empty() ? fmt::format("host {}", k) : known[static_cast<size_t>(k)],
                     .away = "it has not joined",
                     .away_since_ns = cluster::steady_ns()};
  }
  settle_places();
  alone_until_ns_ = cluster::steady_after(2 * lease_still_s(options_.beats));  // others may still try the one before
}

Fleet::~Fleet() = default;

// --- membership ----------------------------------------------------------------------------------------------------

Status Fleet::gather() {
  if (epoch_.members.empty()) return assemble(options_.join_s, options_.join_s, "start");
  return assemble(options_.wait_s, options_.spare_after_s, epoch_.reason);
}

bool Fleet::someone_away() const {
  return std::ranges::any_of(hosts_, [](const auto& one) { return one.second.place >= 0 && one.second.peer < 0; });
}

std::string Fleet::who_is_away() const {
  std::vector<std::string> away;
  for (const auto& [index, host] : hosts_) {
    if (host.place >= 0 && host.peer < 0) away.push_back(fmt::format("{} ({})", host.name, host.away));
  }
  return fmt::format("{}", fmt::join(away, ", "));
}

/// Hosts without a place that are there, or have come to the door.
std::vector<int64_t> Fleet::free_spares(const std::set<int64_t>& joined) const {
  std::vector<int64_t> out;
  for (const auto& [index, host] : hosts_) {
    if (host.place < 0 && (host.peer >= 0 || joined.contains(index))) out.push_back(index);
  }
  return out;
}

/// Whom the leader waits for: hosts with a place that are away, until spares may take the places of all of them.
std::vector<int64_t> Fleet::missing(const std::set<int64_t>& joined, double spare_after_s) {
  take_news();
  hold_lease();
  std::vector<int64_t> out;
  int64_t due = 0;
  const int64_t now_ns = cluster::steady_ns();
  for (const auto& [index, host] : hosts_) {
    if (host.place < 0 || host.peer >= 0 || joined.contains(index)) continue;
    out.push_back(index);
    if (static_cast<double>(now_ns - host.away_since_ns) >= spare_after_s * 1e9) ++due;
  }
  if (due == std::ssize(out) && std::ssize(free_spares(joined)) >= due) return {};
  return out;
}

/// The hosts that are away have none any more.
void Fleet::give_places_to_spares() {
  std::vector<int64_t> spares = free_spares(door_.joined());
  for (auto& [index, host] : hosts_) {
    if (host.place < 0 || host.peer >= 0 || door_.joined().contains(index)) continue;
    Host& spare = hosts_.at(spares.front());
    spares.erase(spares.begin());
    callbacks_.say(fmt::format("{}, a spare, takes the place of {} ({})", spare.name, host.name, host.away));
    spare.place = std::exchange(host.place, -1);
  }
}

/// Waits until every place has a host that is there, and begins an epoch with them.
Status Fleet::assemble(double patience_s, double spare_after_s, const std::string& reason) {
  if (!someone_away()) return {};
  const Status all =
      door_.wait([&](const std::set<int64_t>& joined) { return missing(joined, spare_after_s); },
                 cluster::steady_after(patience_s), [this] { return callbacks_.stopped() || is_superseded(); });
  RT_TRY(check_epoch());
  RT_TRY(Status(all));
  give_places_to_spares();
  std::vector<cluster::Joined> joined = door_.take([](int64_t) { return true; });
  for (const cluster::Joined& member : joined) {
    if (own_address_.empty()) own_address_ = member.connection.own_address();
    Host& host = hosts_.at(member.hello.index);
    host = Host{.index = member.hello.index,
                .place = host.place,
                .name = member.hello.name,
                .address = member.address,
                .boot_id = member.hello.boot_id,
                .kernel_level = member.hello.kernel_level};
  }
  cluster::Epoch next = next_epoch(reason);
  const auto loops = [](const cluster::Member& member) { return is_loopback(member.address); };
  if (std::ranges::any_of(next.members, loops) && !std::ranges::all_of(next.members, loops)) {
    std::vector<std::string> texts;
    for (const cluster::Member& member : next.members) texts.push_back(member.name + " " + member.address);
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("some hosts have loopback addresses, which the others cannot reach: {}; give each by a "
                             "name or address that all can reach (--hosts)",
                             fmt::join(texts, ", "))};
  }
  next.number = known_epoch_ + 1;
  RT_TRY_SET(const bool made, store_.claim(next));
  if (!made) {
    RT_TRY(check_epoch());
    return Error{ErrorCode::kUnavailable, fmt::format("another agent has begun epoch {} of this run", next.number)};
  }
  known_epoch_ = next.number;
  epoch_ = std::move(next);
  settle_places();
  settle_isa();
  for (auto& [index, host] : hosts_) tell_begin(host);
  admit(std::move(joined));
  hold_lease();
  return {};
}

cluster::Epoch Fleet::next_epoch(const std::string& reason) const {
  const cluster::Hello own = hello_of(options_);
  cluster::Epoch out{.leader = place_,
                     .port = door_.port(),
                     .incarnation = incarnation_,
                     .members = std::vector<cluster::Member>(static_cast<size_t>(options_.hosts())),
                     .ranks_per_host = options_.ranks,
                     .recipe_hash = own.recipe_hash,
                     .build = own.build,
                     .reason = reason};
  out.members.at(static_cast<size_t>(place_)) = {own.name, own_address_, own.boot_id, own.index};
  for (const auto& [index, host] : hosts_) {
    if (host.place >= 0)
      out.members.at(static_cast<size_t>(host.place)) = {host.name, host.address, host.boot_id, index};
  }
  return out;
}

/// They are hosts of this epoch from here on.
void Fleet::admit(std::vector<cluster::Joined> joined) {
  cluster::welcome(joined, epoch_, token_);
  for (cluster::Joined& member : joined) {
    Host& host = hosts_.at(member.hello.index);
    host.name = member.hello.name;
    host.address = member.address;
    host.boot_id = member.hello.boot_id;
    host.kernel_level = member.hello.kernel_level;
    host.peer = peers_++;
    if (host.place >= 0) {
      const std::lock_guard lock(of_peers_);
      host_of_peer_[host.peer] = host.index;
    }
    board_.add(host.peer, host.name, std::move(member.connection));
    tell_begin(host);
  }
}

/// After places have changed hands.
void Fleet::settle_places() {
  std::map<int64_t, std::string> names;
  std::map<int64_t, int64_t> peers;
  for (const auto& [index, host] : hosts_) {
    if (host.place < 0) continue;
    names[index] = host.name;
    if (host.peer >= 0) peers[host.peer] = index;
  }
  saves_.set_hosts(std::move(names), epoch_.number);
  const std::lock_guard lock(of_peers_);
  host_of_peer_ = std::move(peers);
}

/// Other instructions add in another order: all hosts use those that each of them has.
void Fleet::settle_isa() {
  const kernels::GemmIsa own = kernels::gemm_isa(), before = isa_;
  int64_t lowest = static_cast<int64_t>(own), highest = lowest;
  std::string which = own_host_name();
  for (const auto& [index, host] : hosts_) {
    if (host.place < 0) continue;
    highest = std::max(highest, host.kernel_level);
    if (host.kernel_level >= lowest) continue;
    lowest = host.kernel_level;
    which = host.name;
  }
  isa_ = static_cast<kernels::GemmIsa>(lowest);
  if (lowest == highest && isa_ == before) return;
  callbacks_.say(fmt::format("all hosts use the instructions of {} ({}): where they differ, so do the last bits", which,
                             kernels::gemm_isa_name(isa_)));
}

/// More than half of the hosts lost: they may have another leader. One that has just begun has to find them first.
void Fleet::hold_lease() {
  const std::set<int64_t> joined = door_.joined();
  const auto there = 1 + std::ranges::count_if(hosts_, [&](const auto& one) {
                       return one.second.place >= 0 && (one.second.peer >= 0 || joined.contains(one.first));
                     });
  lease_->hold(epoch_.members.empty() || 2 * there >= options_.hosts() || cluster::steady_ns() < alone_until_ns_);
}

void Fleet::on_tick() {
  if (!door_.serve(0).ok()) return;  // the next one tries again
  admit(door_.take([this](int64_t index) { return hosts_.at(index).place < 0; }));
}

/// Another agent leads: looked for at most a few times a second.
bool Fleet::is_superseded() {
  const int64_t now_ns = cluster::steady_ns();
  if (now_ns - looked_ns_ < kLookNs) return false;
  looked_ns_ = now_ns;
  const Result<std::optional<cluster::Epoch>> newest = store_.newest();
  return newest.ok() && is_newer(newest.value());
}

bool Fleet::is_newer(const std::optional<cluster::Epoch>& epoch) const {
  return epoch && epoch->number > known_epoch_ && epoch->incarnation != incarnation_;
}

Status Fleet::check_epoch() const {
  RT_TRY_SET(const std::optional<cluster::Epoch> newest, store_.newest());
  if (!is_newer(newest)) return {};
  const cluster::Member& leader = newest->members.at(static_cast<size_t>(newest->leader));
  return Error{ErrorCode::kUnavailable,
               fmt::format("the run is led by {} ({}) now, in epoch {}", leader.name, leader.address, newest->number)};
}

void Fleet::lose(Host& host, const std::string& why) {
  if (host.peer < 0) return;
  {
    const std::lock_guard lock(of_peers_);
    host_of_peer_.erase(host.peer);
  }
  host.peer = -1;
  host.away = why;
  host.away_since_ns = cluster::steady_ns();
  host.memory.reset();
  host.carried = Status(Error{ErrorCode::kPeerLost, fmt::format("{} was lost: {}", host.name, why)});
  if (host.place >= 0) saves_.lost(host.index, why);
  hold_lease();
}

// --- messages ------------------------------------------------------------------------------------------------------

void Fleet::tell(Host& host, std::string kind, json body) {
  if (host.peer < 0 || host.place < 0) return;
  board_.send(host.peer, {.kind = std::move(kind), .epoch = epoch_.number, .body = std::move(body)});
}

void Fleet::tell_begin(Host& host) {
  if (!segment_) return;
  json body = segment_to_json(*segment_);
  body["place"] = host.place;
  tell(host, "begin", std::move(body));
}

/// From any thread.
void Fleet::tell_all(const std::string& kind, const json& body) {
  std::vector<int64_t> peers;
  {
    const std::lock_guard lock(of_peers_);
    for (const auto& [peer, host] : host_of_peer_) peers.push_back(peer);
  }
  for (const int64_t peer : peers) board_.send(peer, {.kind = kind, .epoch = 0, .body = body});
}

Fleet::Host* Fleet::by_peer(int64_t peer) {
  for (auto& [index, host] : hosts_) {
    if (host.peer == peer) return &host;
  }
  return nullptr;
}

/// On the switchboard's thread: a save goes on while the loop reads a checkpoint.
bool Fleet::take_early(const News& news) {
  int64_t host = -1;
  {
    const std::lock_guard lock(of_peers_);
    const auto at = host_of_peer_.find(news.peer);
    if (at == host_of_peer_.end()) return false;
    host = at->second;
  }
  if (news.kind == News::Kind::kMessage) return saves_.take(host, news.message);
  saves_.lost(host, news.why);
  return false;
}

void Fleet::take_news() {
  for (const News& news : board_.take()) take(news);
}

void Fleet::take(const News& news) {
  Host* const host = by_peer(news.peer);
  if (host == nullptr) return;
  if (news.kind == News::Kind::kMessage) return take_message(*host, news.message);
  lose(*host, news.why);
  if (host->place < 0) return callbacks_.say(fmt::format("{}, a spare, was lost: {}", host->name, news.why));
  if (!running_) return;
  agent::Failure failure{.rank = host->place * options_.ranks, .host = true};
  failure.status.exit_code = Error{ErrorCode::kPeerLost, ""}.exit_code();
  failure.message = fmt::format("{} ({}), host {} of {}, was lost: {}", host->name, host->address, host->index,
                                options_.placement.hosts, news.why);
  callbacks_.fail(std::move(failure));
}

void Fleet::take_message(Host& host, const Message& message) {
  const json& body = message.body;
  const auto part = [&](const char* key) { return body.value(key, json()); };
  if (message.kind == "idle") {
    host.asked = json_integer(part("ask"), 0, INT64_MAX).value_or(0);
    if (body.contains("error")) {
      host.memory = Result<ckpt::HostMemory>(error_from_json(body).with(host.name));
    } else {
      host.memory = memory_from_json(part("memory"));
    }
  } else if (message.kind == "carried") {
    host.carried = body.contains("error") ? Status(error_from_json(body).with(host.name)) : Status();
  } else if (message.kind == "clock") {
    const auto asked_ns = json_integer(part("asked_ns"), 0, INT64_MAX),
               there_ns = json_integer(part("there_ns"), 0, INT64_MAX);
    if (asked_ns && there_ns) take_clock(host, *asked_ns, *there_ns);
  } else if (message.kind == "stop") {
    callbacks_.stop(static_cast<int>(json_integer(part("signal"), 1, 64).value_or(15)));
  } else if (message.kind == "ask_save") {
    callbacks_.ask_save(fmt::format("{} on {}", body.value("by", json("a signal")).dump(), host.name));
  } else if (!running_ || incarnation_in(body) != incarnation_of_ranks_) {
    return;  // of ranks that are gone
  } else if (message.kind == "failed") {
    agent::Failure failure = failure_from_json(part("failure"));
    failure.message += fmt::format(" [{}]", host.name);
    callbacks_.fail(std::move(failure));
  } else if (message.kind == "ranks") {
    host.states = states_from_json(part("ranks"));
  } else if (message.kind == "left") {
    host.left = true;
  } else if (message.kind == "put") {
    const std::optional<Published> one = published_from_json(body);
    if (!one) return;
    callbacks_.put(one->key, one->value);
    for (auto& [index, other] : hosts_) {
      if (index != host.index) tell(other, "put", body);
    }
  } else if (message.kind == "event") {
    callbacks_.event(json_integer(part("rank"), 0, options_.world() - 1).value_or(0), part("event"));
  }
}

/// False: somebody wants to stop.
bool Fleet::wait_for_news() {
  pollfd ready{board_.fd(), POLLIN, 0};
  ::poll(&ready, 1, kLookMs);
  take_news();
  return !(callbacks_.stopped && callbacks_.stopped());
}

// --- what ranks do -------------------------------------------------------------------------------------------------

void Fleet::begin(HostSegment segment) {
  waits_ = true;
  if (segment_ == segment) return;
  segment_ = std::move(segment);
  for (auto& [index, host] : hosts_) tell_begin(host);
}

Result<ckpt::HostMemory> Fleet::memory() {
  running_ = false;
  for (;;) {
    if (someone_away()) {
      const std::string away = who_is_away();
      if (!waits_) {
        return Error{ErrorCode::kUnavailable, fmt::format("{} is away: what its memory holds cannot be saved", away)};
      }
      const std::string then =
          free_spares({}).empty() ? "" : fmt::format("; after {:.0f} s a spare takes over", options_.spare_after_s);
      callbacks_.say(fmt::format("waiting up to {:.0f} s for {}{}", options_.wait_s, away, then));
      RT_TRY(assemble(options_.wait_s, options_.spare_after_s, fmt::format("{} was away", away)));
    }
    ++asks_;
    for (auto& [index, host] : hosts_) tell(host, "halt", {{"ask", asks_}});
    const auto pending = [&] {
      return std::ranges::any_of(hosts_, [&](const auto& one) {
        return one.second.place >= 0 && one.second.peer >= 0 && one.second.asked < asks_;
      });
    };
    while (pending()) {
      if (!wait_for_news()) return Error{ErrorCode::kStopped, "asked to stop while the hosts were being asked"};
    }
    if (someone_away()) continue;
    std::optional<ckpt::HostMemory> common;
    for (const auto& [index, host] : hosts_) {
      if (host.place < 0) continue;
      if (!host.memory->ok()) return host.memory->error();
      common = common ? ckpt::common_memory(*common, host.memory->value()) : host.memory->value();
    }
    saves_.settle(common->whole);
    return *std::move(common);
  }
}

void Fleet::carry_out(const ckpt::RestoreChoice& choice, const ckpt::Arena& memory) {
  HostOrder order{.choice = choice,
                  .starts = {memory.starts().begin(), memory.starts().end()},
                  .promised = {},
                  .kernel_level = static_cast<int64_t>(isa_)};
  if (choice.dir.parent_path() == checkpoints_) order.choice.dir = choice.dir.filename();
  for (int64_t slot = 0; slot < memory.slots(); ++slot) {
    const int64_t step = memory.control().reserved[slot].load(std::memory_order_acquire);
    if (step != 0) order.promised.push_back(step > 0 ? step : -step);
  }
  incarnation_of_ranks_ = choice.incarnation;
  const json body = order_to_json(order);
  for (auto& [index, host] : hosts_) {
    if (host.peer >= 0 && host.place >= 0) host.carried.reset();
    tell(host, "resume", body);
  }
}

Status Fleet::carried_out() {
  const auto pending = [&] {
    return std::ranges::any_of(
        hosts_, [](const auto& one) { return one.second.place >= 0 && !one.second.carried.has_value(); });
  };
  while (pending()) {
    if (!wait_for_news()) return Error{ErrorCode::kStopped, "asked to stop while the hosts were loading"};
  }
  for (const auto& [index, host] : hosts_) {
    if (host.place >= 0) RT_TRY(Status(*host.carried));
  }
  return {};
}

void Fleet::save(const ckpt::WholeSlot& slot) { tell_all("promise", slot_to_json(slot)); }

void Fleet::go(uint64_t incarnation) {
  running_ = true;
  for (auto& [index, host] : hosts_) {
    host.left = false;
    host.states.clear();
    tell(host, "go", {{"incarnation", incarnation}});
  }
}

void Fleet::publish(const std::string& key, const std::string& value) {
  const json body = published_to_json({incarnation_of_ranks_, key, value});
  for (auto& [index, host] : hosts_) tell(host, "put", body);
}

void Fleet::halt(const std::string& why) {
  running_ = false;
  for (auto& [index, host] : hosts_) tell(host, "halt", {{"ask", 0}, {"why", why}});
}

bool Fleet::all_left() const {
  return std::ranges::all_of(hosts_, [](const auto& one) { return one.second.left || one.second.place < 0; });
}

void Fleet::ask_where_ranks_are() { tell_all("look", json::object()); }

void Fleet::ask_clocks() { tell_all("clock", {{"asked_ns", telemetry::trace_clock_ns()}}); }

/// The answer was given half-way between question and now, to half of that.
void Fleet::take_clock(Host& host, int64_t asked_ns, int64_t there_ns) {
  const int64_t now_ns = telemetry::trace_clock_ns(), round_ns = now_ns - asked_ns;
  if (round_ns < 0 || (round_ns > host.clock_round_ns && now_ns - host.clock_at_ns < kClockGoodNs)) return;
  host.clock_ahead_ns = there_ns - (asked_ns + round_ns / 2);
  host.clock_round_ns = round_ns;
  host.clock_at_ns = now_ns;
}

int64_t Fleet::clock_ahead_ns(int64_t rank) const {
  const auto of_rank = [&](const auto& one) { return one.second.place == rank / options_.ranks; };
  const auto host = std::ranges::find_if(hosts_, of_rank);
  return host == hosts_.end() ? 0 : host->second.clock_ahead_ns;
}

void Fleet::ask_reports() { tell_all("report", json::object()); }

void Fleet::put_in(std::vector<agent::RankState>& ranks) const {
  for (const auto& [index, host] : hosts_) {
    if (host.place < 0) continue;
    for (int64_t rank = host.place * options_.ranks; rank < (host.place + 1) * options_.ranks; ++rank) {
      if (rank >= std::ssize(ranks)) continue;
      agent::RankState& state = ranks[static_cast<size_t>(rank)];
      const auto told = std::ranges::find(host.states, rank, &agent::RankState::rank);
      state = told != host.states.end() ? *told : agent::RankState{.rank = rank};
      state.host = fmt::format("{} ({})", host.name, host.address);
    }
  }
}

void Fleet::kill(int64_t rank) {
  for (auto& [index, host] : hosts_) {
    if (host.place == rank / options_.ranks) tell(host, "kill", {{"rank", rank}});
  }
}

void Fleet::end(int code, bool keep, const std::string& text) {
  on_tick();
  running_ = false;
  for (auto& [index, host] : hosts_) {
    if (host.peer < 0) continue;
    board_.send(host.peer,
                {.kind = "end", .epoch = epoch_.number, .body = {{"code", code}, {"keep", keep}, {"text", text}}});
    board_.drop(host.peer);
    {
      const std::lock_guard lock(of_peers_);
      host_of_peer_.erase(host.peer);
    }
    host.peer = -1;
    host.away = "it has left";
  }
}

}  // namespace cairn::tools
