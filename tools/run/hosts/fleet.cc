#include "tools/run/hosts/fleet.h"

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
#include "runtime/core/clock.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/trace.h"
#include "tools/run/folder/excluded.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using cluster::News;
namespace generation = hosts::generation;
namespace membership = hosts::membership;
using nlohmann::json;

constexpr int64_t kClockGoodNs = 60'000'000'000;  // clocks of two hosts drift apart: some microseconds a second
constexpr int64_t kMostAsked = 32;                // hosts, for stacks: each has some kilobytes a rank
constexpr int64_t kLookNs = 250'000'000;          // so often at most, for a newer epoch
constexpr int kDoorMs = 100;                      // between two looks for a stop
constexpr double kBeyondWaitS = 60;
constexpr int64_t kShowNs = 500'000'000;  // between two looks at the hosts, for the board

std::string boot_id() {
  std::string out;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::getline(file, out);
  return out;
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

}  // namespace

std::string own_host_name() {
  std::array<char, 256> out{};
  return ::gethostname(out.data(), out.size() - 1) == 0 ? out.data() : "";
}

double lease_still_s(const cluster::Beats& beats, const cluster::EpochStore* store) {
  return membership::claims_after_s(beats.dead_after_s, cluster::kLeaseEveryS, store != nullptr ? store->stale_s() : 0);
}

cluster::Hello hello_of(const HostOptions& options) {
  return {.index = options.placement.index,
          .name = own_host_name(),
          .boot_id = boot_id(),
          .build = options.build,
          .recipe_hash = options.recipe_hash,
          .computes = options.device != DeviceChoice::kCuda
                          ? "cpu"
                          : fmt::format("cuda, {}, attention {}", options.comm, options.attention),
          .ranks = options.ranks,
          .kernel_level = static_cast<int64_t>(kernels::gemm_isa()),
          .nccl = options.nccl,
          .gid_types = options.gid_types};
}

namespace {

membership::Options rule_options(const HostOptions& options, const cluster::EpochStore& store,
                                 const std::optional<cluster::Epoch>& before) {
  std::vector<int64_t> had;
  if (before) {
    for (const cluster::Member& member : before->members) had.push_back(member.index);
  }
  const cluster::Placement& placement = options.placement;
  return {.hosts = placement.hosts,
          .own = placement.index,
          .names = placement.names,
          .places = membership::first_places(had, options.hosts(), {}, placement.hosts, placement.index),
          .dead_after_s = options.beats.dead_after_s,
          .fewer_after_s = options.fewer_after_s,
          .alone_s = 2 * lease_still_s(options.beats, &store),  // others may still try the one before
          .epoch = before ? before->number : 0};
}

}  // namespace

Result<std::unique_ptr<Fleet>> Fleet::open(HostOptions options, const fs::path& run,
                                           const std::optional<cluster::Epoch>& before) {
  RT_TRY_SET(cluster::Listener listener, cluster::Listener::open(options.port_from, options.port_to));
  RT_TRY_SET(const std::shared_ptr<cluster::EpochStore> store, cluster::open_store(options.store, run / "cluster"));
  RT_TRY(store->newest());  // a store that does not answer is told before hosts are waited for
  RT_TRY_SET(std::string token, cluster::make_token(run / "cluster"));
  membership::Options rule = rule_options(options, *store, before);
  std::unique_ptr<Fleet> fleet(new Fleet(std::move(options), std::move(rule), run, std::move(listener), store,
                                         std::move(token), std::make_unique<cluster::Lease>(store)));
  fleet->watch_lease();
  return fleet;
}

void Fleet::watch_lease() {
  lease_->watch(claims_after_s_, [this] { return check_epoch(); });
}

Result<std::unique_ptr<Fleet>> Fleet::open(HostOptions options, const fs::path& run, Lead lead) {
  RT_TRY_SET(const std::shared_ptr<cluster::EpochStore> store, cluster::open_store(options.store, run / "cluster"));
  RT_TRY_SET(std::string token, cluster::make_token(run / "cluster"));
  options.train_with(std::ssize(lead.epoch.members));
  membership::Options rule = rule_options(options, *store, lead.epoch);
  rule.leads = true;
  rule.led_before = lead.led_before;
  const bool starts = lead.led_before < 0;
  std::unique_ptr<Fleet> fleet(new Fleet(std::move(options), std::move(rule), run, std::move(lead.listener), store,
                                         std::move(token), std::move(lead.lease)));
  fleet->starts_ = starts;
  fleet->incarnation_ = lead.epoch.incarnation;
  fleet->own_address_ = lead.epoch.members.at(static_cast<size_t>(lead.epoch.leader)).address;
  fleet->epoch_ = std::move(lead.epoch);
  fleet->watch_lease();
  fleet->settle_places();
  RT_TRY_SET(const std::vector<Exclusion> excluded, read_excluded(run));
  for (const cluster::Member& member : fleet->epoch_.members) {
    if (!why_excluded(excluded, member.name, member.boot_id).empty()) fleet->feed(membership::Barred{member.index});
  }
  return fleet;
}

Fleet::Fleet(HostOptions options, membership::Options rule, fs::path run, cluster::Listener listener,
             std::shared_ptr<cluster::EpochStore> store, std::string token, std::unique_ptr<cluster::Lease> lease)
    : options_(std::move(options)),
      run_(std::move(run)),
      checkpoints_(run_ / "checkpoints"),
      store_(std::move(store)),
      claims_after_s_(lease_still_s(options_.beats, store_.get())),
      token_(std::move(token)),
      incarnation_(cluster::random_hex()),
      known_epoch_(rule.epoch),
      rule_(std::move(rule), cluster::steady_ns()),
      generation_({.own = options_.placement.index, .answer_s = options_.answer_s}),
      saves_([this](const hosts::Message& message) { tell_all(message); },
             {.away = options_.wait_s + kBeyondWaitS}),  // look() gives up first
      door_(
          std::move(listener),
          {.names = options_.placement.names,
           .hosts = options_.placement.hosts,
           .token = token_,
           .present =
               [this](int64_t index) {
                 const auto host = hosts_.find(index);
                 return host != hosts_.end() && host->second.peer >= 0;
               },
           .doubts = [this](const cluster::Hello& hello) { return host::nccl_differences(options_.nccl, hello.nccl); },
           .barred =
               [this](const cluster::Hello& hello) {
                 const Result<std::vector<Exclusion>> excluded = read_excluded(run_);
                 if (!excluded.ok()) return excluded.error().message;
                 std::string why = why_excluded(excluded.value(), hello.name, hello.boot_id);
                 if (!why.empty()) feed(membership::Barred{hello.index});
                 return why;
               }},
          hello_of(options_), [this](const std::string& text) { callbacks_.say(text); }),
      lease_(std::move(lease)),
      board_(options_.beats, [this](const News& news) { return take_early(news); }) {
  for (int64_t k = 0; k < options_.placement.hosts; ++k) {
    if (k != options_.placement.index) hosts_[k] = Host{.index = k, .name = rule_.name(k)};
  }
  settle_places();
}

Fleet::~Fleet() { lease_.reset(); }  // its thread asks this

// --- membership ----------------------------------------------------------------------------------------------------

Status Fleet::gather() {
  // With fewer hosts, if that is allowed, the run begins when it would have given up.
  const double start_s = options_.join_s + (rule_.may_change_size() ? 1 : 0);
  if (epoch_.members.empty()) return assemble(membership::Gather{start_s, options_.join_s, cluster::kStartsRun});
  const Status all = assemble(starts_ ? membership::Gather{start_s, options_.join_s, epoch_.reason}
                                      : membership::Gather{.patience_s = options_.wait_s,
                                                           .spare_after_s = options_.spare_after_s,
                                                           .reason = epoch_.reason,
                                                           .fewer_after_s = options_.fewer_after_s,
                                                           .holders = holders_of_copies()});
  // What is left is asked for its memory first: look() says it again.
  return smaller() ? Status() : all;
}

/// Until the rule has what it wants, or has given up.
Status Fleet::assemble(const membership::Event& wish) {
  outcome_.reset();
  take_news();
  feed(membership::AtDoor{door_.joined()});
  feed(heard());
  for (feed(wish); !outcome_; feed(membership::Tick{})) {
    if (callbacks_.stopped() || is_superseded()) feed(membership::Stop{});
    if (outcome_) break;
    door_.serve(kDoorMs);
    take_news();
    show_hosts();
    feed(membership::AtDoor{door_.joined()});
    feed(heard());
  }
  return *std::exchange(outcome_, std::nullopt);
}

membership::Heard Fleet::heard() {
  const std::map<int64_t, double> silent_s = board_.silent_s();
  const int64_t now_ns = cluster::steady_ns();
  membership::Heard out;
  for (const auto& [index, host] : hosts_) {
    if (const auto since = silent_s.find(host.peer); since != silent_s.end())
      out.at_ns[index] = now_ns - static_cast<int64_t>(since->second * 1e9);
  }
  return out;
}

void Fleet::feed(const membership::Event& event) {
  for (const membership::Action& action : rule_.step(event, cluster::steady_ns())) {
    std::visit(hosts::Overloaded{
                   [&](const membership::Say& one) { callbacks_.say(one.text); },
                   [&](const membership::HoldLease& one) { lease_->hold(one.held); },
                   [&](const membership::CheckEpoch&) {
                     const Status leads = check_epoch();
                     feed(membership::Leads{leads.ok() ? std::nullopt : std::optional(leads.error())});
                   },
                   [&](const membership::Claim& one) { claim(one); },
                   [&](const membership::Admit& one) {
                     admit(door_.take([&](int64_t index) { return one.hosts.contains(index); }));
                   },
                   [&](const membership::Rest& one) { board_.send(hosts_.at(one.host).peer, {hosts::Rest{}}); },
                   [&](const membership::Gathered&) { outcome_.emplace(); },
                   [&](const membership::GaveUp& one) { outcome_.emplace(one.error); },
               },
               action);
  }
}

std::optional<int64_t> Fleet::larger() const { return rule_.larger(cluster::steady_ns()); }

Status Fleet::resize(int64_t hosts) {
  segment_.reset();
  feed(generation::Halt{});
  return assemble(membership::Resize{hosts, options_.wait_s});
}

void Fleet::claim(const membership::Claim& next) {
  std::vector<cluster::Joined> joined = door_.take([](int64_t) { return true; });
  Status begun = begin_epoch(next, joined);
  if (!begun.ok()) return feed(membership::Claimed{std::move(begun).error()});
  feed(membership::Claimed{});
  settle_places();
  settle_isa();
  for (auto& [index, host] : hosts_) tell_begin(host);
  admit(std::move(joined));
}

Status Fleet::begin_epoch(const membership::Claim& claim, const std::vector<cluster::Joined>& joined) {
  for (const cluster::Joined& member : joined) {
    if (own_address_.empty()) own_address_ = member.connection.own_address();
    hosts_.at(member.hello.index) = host_of(member);
  }
  cluster::Epoch next = epoch_of(claim);
  const auto loops = [](const cluster::Member& member) { return is_loopback(member.address); };
  if (std::ranges::any_of(next.members, loops) && !std::ranges::all_of(next.members, loops)) {
    std::vector<std::string> texts;
    for (const cluster::Member& member : next.members) texts.push_back(member.name + " " + member.address);
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("some hosts have loopback addresses, which the others cannot reach: {}; give each by a "
                             "name or address that all can reach (--hosts)",
                             fmt::join(texts, ", "))};
  }
  RT_TRY_SET(const bool made, store_->claim(next));
  if (!made) {
    RT_TRY(check_epoch());
    return Error{ErrorCode::kUnavailable, fmt::format("another agent has begun epoch {} of this run", next.number)};
  }
  known_epoch_ = next.number;
  options_.train_with(std::ssize(claim.places));
  epoch_ = std::move(next);
  return {};
}

Fleet::Host Fleet::host_of(const cluster::Joined& member) {
  return {.index = member.hello.index,
          .name = member.hello.name,
          .address = member.address,
          .boot_id = member.hello.boot_id,
          .kernel_level = member.hello.kernel_level};
}

cluster::Epoch Fleet::epoch_of(const membership::Claim& claim) const {
  const cluster::Hello own = hello_of(options_);
  cluster::Epoch out{.number = claim.number,
                     .leader = place(),
                     .port = door_.port(),
                     .incarnation = incarnation_,
                     .ranks_per_host = options_.ranks,
                     .recipe_hash = own.recipe_hash,
                     .build = own.build,
                     .reason = claim.reason};
  for (const int64_t index : claim.places) {
    if (index == options_.placement.index) {
      out.members.push_back({own.name, own_address_, own.boot_id, own.index});
    } else {
      const Host& host = hosts_.at(index);
      out.members.push_back({host.name, host.address, host.boot_id, index});
    }
  }
  return out;
}

/// They are hosts of this epoch from here on.
void Fleet::admit(std::vector<cluster::Joined> joined) {
  if (joined.empty()) return;
  const cluster::Welcome welcome(epoch_, token_);
  for (cluster::Joined& member : joined) {
    welcome.send(member);  // and signs of life from now on
    Host& host = hosts_.at(member.hello.index);
    host = host_of(member);
    host.peer = peers_++;
    feed(membership::Admitted{host.index, host.name});
    if (trains(host)) {
      const std::lock_guard lock(of_peers_);
      host_of_peer_[host.peer] = host.index;
    }
    board_.add(host.peer, host.name, std::move(member.connection));
    if (trains(host)) saves_.back(host.index);
    tell_begin(host);
  }
}

/// After places have changed hands.
void Fleet::settle_places() {
  std::map<int64_t, std::string> names;
  std::map<int64_t, int64_t> peers;
  std::set<int64_t> away;
  for (const auto& [index, host] : hosts_) {
    if (!trains(host)) continue;
    names[index] = host.name;
    if (host.peer >= 0) {
      peers[host.peer] = index;
    } else {
      away.insert(index);
    }
  }
  saves_.set_hosts(std::move(names), epoch_.number, std::move(away));
  const std::lock_guard lock(of_peers_);
  host_of_peer_ = std::move(peers);
}

/// Other instructions add in another order: all hosts use those that each of them has.
void Fleet::settle_isa() {
  const kernels::GemmIsa own = kernels::gemm_isa(), before = isa_;
  int64_t lowest = static_cast<int64_t>(own), highest = lowest;
  std::string which = own_host_name();
  for (const auto& [index, host] : hosts_) {
    if (!trains(host)) continue;
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

HostStatus Fleet::status_of(const Host& host, const std::map<int64_t, double>& silent_s) const {
  HostStatus out{.index = host.index, .place = rule_.place(host.index), .name = host.name, .address = host.address};
  if (host.peer < 0) {
    out.state = "away";
    out.why = rule_.why_away(host.index);
    out.excluded = rule_.is_excluded(host.index);
    return out;
  }
  out.state = out.place < 0 ? "spare" : phase_name(phase());
  if (const auto heard = silent_s.find(host.peer); heard != silent_s.end()) out.heard_s = heard->second;
  return out;
}

/// For the board. Not where another host may lead by now: the file is its own then.
void Fleet::show_hosts() {
  const int64_t now_ns = cluster::steady_ns();
  if (!options_.board || now_ns - shown_ns_ < kShowNs) return;
  shown_ns_ = now_ns;
  options_.board->write_to(leads_surely() ? hosts_file(run_) : fs::path());
  options_.board->set_phase(phase());
  const std::map<int64_t, double> silent_s = board_.silent_s();
  std::vector<HostStatus> all{{.index = options_.placement.index,
                               .place = place(),
                               .name = own_host_name(),
                               .address = own_address_,
                               .state = phase_name(phase())}};
  for (const auto& [index, host] : hosts_) all.push_back(status_of(host, silent_s));
  std::ranges::sort(all, {}, &HostStatus::index);
  options_.board->set_hosts(epoch_.number, options_.placement.index, std::move(all));
}

void Fleet::on_tick() {
  show_hosts();
  door_.serve(0);
  feed(membership::AtDoor{door_.joined()});
}

/// Another agent leads: looked for at most a few times a second.
bool Fleet::is_superseded() {
  const int64_t now_ns = cluster::steady_ns();
  if (now_ns - looked_ns_ < kLookNs) return false;
  looked_ns_ = now_ns;
  const Result<std::optional<cluster::Epoch>> newest = store_->newest();
  return newest.ok() && is_newer(newest.value());
}

bool Fleet::is_newer(const std::optional<cluster::Epoch>& epoch) const {
  return epoch && epoch->number > known_epoch_ && epoch->incarnation != incarnation_;
}

Status Fleet::check_epoch() const {
  RT_TRY_SET(const std::optional<cluster::Epoch> newest, store_->newest());
  if (!is_newer(newest)) return {};
  const cluster::Member& leader = newest->members.at(static_cast<size_t>(newest->leader));
  return Error{ErrorCode::kUnavailable,
               fmt::format("the run is led by {} ({}) now, in epoch {}", leader.name, leader.address, newest->number)};
}

bool Fleet::leads_surely() const {
  const int64_t shown_ns = lease_->shown_ns(), failed_ns = lease_->failed_ns();  // before the time
  const int64_t now_ns = cluster::steady_ns();
  const auto since_s = [&](int64_t then_ns) { return static_cast<double>(now_ns - then_ns) / 1e9; };
  return membership::leads_surely({.since_shown_s = since_s(shown_ns),
                                   .since_failed_s = since_s(failed_ns),
                                   .stood_still_s = lease_->stood_still_s(now_ns, membership::kStoreTriesS),
                                   .claims_after_s = claims_after_s_});
}

void Fleet::lose(Host& host, const std::string& why) {
  if (host.peer < 0) return;
  {
    const std::lock_guard lock(of_peers_);
    host_of_peer_.erase(host.peer);
  }
  host.peer = -1;
  feed(membership::Lost{host.index, why});
  feed(generation::Lost{host.index, why});
  if (trains(host)) saves_.lost(host.index, why);
  if (check_) check_->lost(host.index, why);
}

// --- messages ------------------------------------------------------------------------------------------------------

void Fleet::tell(const Host& host, hosts::Message message) {
  if (host.peer < 0 || !trains(host)) return;
  board_.send(host.peer, {std::move(message), epoch_.number});
}

void Fleet::tell_begin(const Host& host) {
  if (!segment_) return;
  if (!trains(host) && host.peer >= 0) return board_.send(host.peer, {hosts::Prepare{*segment_}});
  tell(host, hosts::Begin{.segment = *segment_, .place = rule_.place(host.index), .leader = place()});
}

/// From any thread.
void Fleet::tell_all(const hosts::Message& message) {
  std::vector<int64_t> peers;
  {
    const std::lock_guard lock(of_peers_);
    for (const auto& [peer, host] : host_of_peer_) peers.push_back(peer);
  }
  for (const int64_t peer : peers) board_.send(peer, {message});
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
  if (news.kind == News::Kind::kMessage) return saves_.take(host, news.message.what);
  saves_.lost(host, news.why);
  return false;
}

void Fleet::take_news() {
  for (const News& news : board_.take()) take(news);
}

void Fleet::take(const News& news) {
  Host* const host = by_peer(news.peer);
  if (host == nullptr) return;
  if (news.kind == News::Kind::kMessage) return take_message(*host, news.message.what);
  // First: where this host stood still, the others have lost it.
  const double still_s = stood_still_s();
  lose(*host, news.why);
  if (!trains(*host)) {
    if (callbacks_.spare_lost) return callbacks_.spare_lost(host->name, news.why);
    return callbacks_.say(fmt::format("{}, a spare, was lost: {}", host->name, news.why));
  }
  if (running_ == kNoneRuns) return;
  agent::Failure failure{.rank = rule_.place(host->index) * options_.ranks, .host = true};
  failure.status.exit_code = Error{ErrorCode::kPeerLost, ""}.exit_code();
  failure.message = fmt::format("{} ({}), host {} of {}, was lost: {}", host->name, host->address, host->index,
                                options_.placement.hosts, news.why);
  failure.failure_class = agent::FailureClass::kHostLost;
  failure.seen_ns = telemetry::trace_clock_ns();
  failure.host_name = host->name;
  int64_t blamed = host->index;
  if (still_s >= options_.beats.dead_after_s) {
    blamed = options_.placement.index;
    failure.rank = place() * options_.ranks;
    failure.host_name = own_host_name();
    failure.message = fmt::format("{}, which leads, stood still for {:.1f} s, and so the others have lost it: {}",
                                  failure.host_name, still_s, failure.message);
  }
  if (callbacks_.error) callbacks_.error(blamed, failure);
  callbacks_.fail(std::move(failure));
}

/// By its agent's clock, corrected to ours.
void Fleet::take_error(const Host& host, const hosts::Failure& failure) {
  agent::Failure error = from_wire(failure);
  error.host_name = host.name;
  const int64_t now_ns = telemetry::trace_clock_ns();
  error.seen_ns = host.clock_round_ns == INT64_MAX ? now_ns : std::min(now_ns, error.seen_ns - host.clock_ahead_ns);
  if (callbacks_.error) callbacks_.error(host.index, std::move(error));
}

void Fleet::take_message(Host& host, const hosts::Message& message) {
  if (check_ && check_->take(host.index, message)) return;
  std::visit(hosts::Overloaded{
                 [&](const hosts::Clock& one) { take_clock(host, one.asked_ns, one.there_ns); },
                 [&](const hosts::Stop& one) { callbacks_.stop(static_cast<int>(one.signal)); },
                 [&](const hosts::AskSave& one) { callbacks_.ask_save(fmt::format("{} on {}", one.by, host.name)); },
                 [&](const hosts::RankError& one) {  // also of ranks that are being stopped: which was first is found
                                                     // out then
                   if (one.incarnation == generation_.incarnation()) take_error(host, one.failure);
                 },
                 [&](const auto&) { take_of_ranks(host, message); },
             },
             message);
  feed(generation::Heard{host.index, message});
}

/// What counts for the ranks that run.
void Fleet::take_of_ranks(Host& host, const hosts::Message& message) {
  const bool of_now = std::visit(
      [&](const auto& one) {
        if constexpr (requires { one.incarnation; }) return runs(one.incarnation);
        return false;
      },
      message);
  if (!of_now) return;
  std::visit(
      hosts::Overloaded{
          [&](const hosts::Failed& one) {
            agent::Failure failure = from_wire(one.failure);
            failure.message += fmt::format(" [{}]", host.name);
            failure.host_name = host.name;
            failure.seen_ns = telemetry::trace_clock_ns();
            callbacks_.fail(std::move(failure));
          },
          [&](const hosts::Ranks& one) { host.states = from_wire(one.ranks); },
          [&](const hosts::Stacks& all) {
            std::vector<agent::RankStacks> stacks;
            for (const json& one : all.stacks) {
              Result<agent::RankStacks> read = agent::rank_stacks_from_json(one);
              if (read.ok() && read.value().rank / options_.ranks == rule_.place(host.index))
                stacks.push_back(std::move(read).value());
            }
            if (callbacks_.stacks) callbacks_.stacks(std::move(stacks));
          },
          [&](const hosts::Copied& one) { copied(rule_.place(host.index), one.incarnation, one.step, one.bytes, ""); },
          [&](const hosts::NotCopied& one) {
            copied(rule_.place(host.index), one.incarnation, one.step, one.bytes,
                   fmt::format("{}: {}", host.name, one.why));
          },
          [&](const hosts::Put& one) {
            callbacks_.put(one.key, one.value);
            for (auto& [index, other] : hosts_) {
              if (index != host.index) tell(other, one);
            }
          },
          [&](const hosts::RankEvent& one) { callbacks_.event(one.rank < options_.world() ? one.rank : 0, one.event); },
          [](const auto&) {},  // a message of a leader, or of a check that is over
      },
      message);
}

/// False: somebody wants to stop.
bool Fleet::wait_for_news(int wait_ms) {
  pollfd ready{board_.fd(), POLLIN, 0};
  ::poll(&ready, 1, wait_ms);
  take_news();
  show_hosts();
  return !(callbacks_.stopped && callbacks_.stopped());
}

// --- from one generation to the next -------------------------------------------------------------------------------

void Fleet::feed(const generation::Event& event) {
  const std::vector<generation::Action> actions = generation_.step(event, cluster::steady_ns());
  running_ = generation_.is_running() ? static_cast<int64_t>(generation_.incarnation()) : kNoneRuns;
  for (const generation::Action& action : actions) perform(action);
}

void Fleet::perform(const generation::Action& action) {
  std::visit(hosts::Overloaded{
                 [&](const generation::Say& one) { callbacks_.say(one.text); },
                 [&](const generation::Gather& one) {
                   if (const Status all = gather_for(one.wants); !all.ok())
                     return feed(generation::GaveUp{all.error()});
                   generation::Gathered gathered{.places = rule_.places(), .names = {}};
                   for (const auto& [index, host] : hosts_) {
                     if (trains(host)) gathered.names[index] = host.name;
                     if (trains(host) && host.peer < 0) gathered.away.insert(index);
                   }
                   feed(gathered);
                 },
                 [&](const generation::Ask& one) { ask(one.number); },
                 [&](const generation::Measure&) {
                   const Status measured = measure_hosts();
                   feed(generation::Measured{measured.ok() ? std::nullopt : std::optional(measured.error())});
                 },
                 [&](const generation::Give& one) { give(one); },
                 [&](const generation::Settle& one) { saves_.settle(from_wire(one.common)); },
                 [&](const generation::Ready& one) {
                   common_ = from_wire(one.common);
                   stage_.emplace();
                 },
                 [&](const generation::Loaded&) { stage_.emplace(); },
                 [&](const generation::Failed& one) { stage_.emplace(one.error); },
                 [&](const generation::Drop& one) {
                   Host& host = hosts_.at(one.host);
                   board_.drop(host.peer);
                   lose(host, one.why);
                 },
             },
             action);
}

/// Until the rule has what it wants, or has failed.
Status Fleet::drive() {
  while (!stage_) {
    if (!wait_for_news(given_here_ ? 1 : 50)) feed(generation::Stop{});
    if (given_here_) {
      std::unique_lock lock(given_here_->mutex);
      if (const std::optional<Status> done = given_here_->done) {
        lock.unlock();
        given_here_.reset();
        feed(generation::Heard{options_.placement.index, done->ok() ? hosts::Given{} : hosts::Given{done->error()}});
      }
    }
    if (!stage_) feed(generation::Tick{});
  }
  return *std::exchange(stage_, std::nullopt);
}

Status Fleet::gather_for(Wants wants) {
  if (wants == Wants::kLeft) return {};
  if (smaller()) return rule_.goes_on_smaller();
  const std::string away = rule_.who_is_away();
  if (wants == Wants::kThere && !rule_.someone_away()) return {};
  if (wants == Wants::kThere)
    return Error{ErrorCode::kUnavailable, fmt::format("{} is away: what its memory holds cannot be saved", away)};
  return assemble(membership::Gather{.patience_s = options_.wait_s,
                                     .spare_after_s = options_.spare_after_s,
                                     .reason = fmt::format("{} was away", away),
                                     .announces = true,
                                     .fewer_after_s = options_.fewer_after_s,
                                     .holders = holders_of_copies()});
}

void Fleet::ask(int64_t number) {
  for (auto& [index, host] : hosts_) tell(host, hosts::Halt{number});
  hosts::Idle own{.ask = number, .memory = {}};
  if (options_.replicas) {
    const Held held = options_.replicas->held();
    own.held = {held.place, held.port, to_wire(held.whole)};
    if (held.port != 0 && callbacks_.own_memory) own.memory = to_wire(callbacks_.own_memory());
  }
  feed(generation::Heard{options_.placement.index, std::move(own)});
}

void Fleet::give(const generation::Give& order) {
  const int64_t to_host = rule_.places().at(static_cast<size_t>(order.place));
  const bool to_own = to_host == options_.placement.index;
  PeerAddress to{to_own ? own_address() : hosts_.at(to_host).address, generation_.held(to_host).port};
  if (order.holder != options_.placement.index)
    return tell(hosts_.at(order.holder), hosts::Give{order.slot, std::move(to)});
  given_here_ = std::make_shared<GivenHere>();
  options_.replicas->give(from_wire(order.slot), std::move(to), [given = given_here_](const Status& done) {
    const std::lock_guard lock(given->mutex);
    given->done = done;
  });
}

Result<ckpt::HostMemory> Fleet::look(Wants wants) {
  stage_.reset();
  given_here_.reset();
  // Not before a save: a measurement may exclude a host.
  feed(generation::Look{wants, wants == Wants::kAll && !check_dtype_.empty() && callbacks_.checked != nullptr});
  RT_TRY(drive());
  return common_;
}

// --- what ranks do -------------------------------------------------------------------------------------------------

void Fleet::begin(HostSegment segment) {
  if (segment_ == segment) return;
  segment_ = std::move(segment);
  for (auto& [index, host] : hosts_) tell_begin(host);
}

/// All are there, and no rank runs.
Status Fleet::measure_hosts() {
  std::vector<CheckedHost> hosts{{options_.placement.index, own_host_name(), own_address()}};
  for (const auto& [index, host] : hosts_) {
    if (trains(host)) hosts.push_back({index, host.name, host.address});
  }
  std::ranges::sort(hosts, {}, &CheckedHost::index);
  std::mutex mutex;
  std::vector<hosts::Message> own;  // what this host has measured
  const auto add = [&](hosts::Message message) {
    const std::lock_guard lock(mutex);
    own.push_back(std::move(message));
  };
  HostChecker checker({.tell = [&](hosts::Measured measured) { add(std::move(measured)); },
                       .publish = [&](hosts::PutMeasured value) { add(std::move(value)); }});
  const auto to = [&](int64_t index, const hosts::Message& message) {
    if (index == options_.placement.index) {
      take_check_message(checker, message, options_.interface_address);
    } else {
      tell(hosts_.at(index), message);
    }
  };
  check_ = std::make_unique<CheckLeader>(std::move(hosts),
                                         CheckOptions{.dtype = check_dtype_,
                                                      .kernel_level = static_cast<int64_t>(isa_),
                                                      .folder = run_ / "cluster",
                                                      .gpus = options_.device == DeviceChoice::kCuda,
                                                      .gpu_size = gpu_size_of_tests()},
                                         to);
  bool stopped = false;
  while (!stopped && !check_->tick()) {
    stopped = !wait_for_news();
    std::vector<hosts::Message> came;
    {
      const std::lock_guard lock(mutex);
      came.swap(own);
    }
    for (const hosts::Message& message : came) check_->take(options_.placement.index, message);
  }
  const CheckReport report = check_->report();
  check_.reset();
  if (stopped) return Error{ErrorCode::kStopped, "asked to stop while the hosts were being measured"};
  check_dtype_.clear();
  return callbacks_.checked(report);
}

void Fleet::copied(int64_t place, uint64_t incarnation, int64_t step, int64_t bytes, const std::string& why) {
  if (!runs(incarnation) || place < 0 || !options_.replicas) return;
  bool complete = false;
  {
    const std::lock_guard lock(of_copies_);
    if (step < copied_step_) return;  // of one that was dropped
    if (step != std::exchange(copied_step_, step)) copied_places_.clear();
    copies_.bytes += bytes;
    if (!why.empty()) {
      ++copies_.failed;
      copies_.why = why;
      copied_step_ = step + 1;
      copied_places_.clear();
    } else {
      copied_places_.insert(place);
      complete = std::ssize(copied_places_) == options_.hosts();
      copies_.steps += complete ? 1 : 0;
      if (!complete) return;
    }
  }
  if (complete) {
    options_.replicas->agreed(step);
  } else {
    options_.replicas->dropped(step);
  }
  if (complete) {
    tell_all(hosts::AllCopied{incarnation, step});
  } else {
    tell_all(hosts::NotAllCopied{incarnation, step});
  }
}

void Fleet::order(const ckpt::RestoreChoice& choice, const ckpt::Arena& memory) {
  hosts::Resume order = to_wire(choice);
  order.starts = ckpt::starts_after(memory, choice);
  order.kernel_level = static_cast<int64_t>(isa_);
  order.epoch = epoch_.number;
  order.peers.resize(static_cast<size_t>(options_.hosts()));
  order.peers.at(static_cast<size_t>(place())) = {own_address(), generation_.held(options_.placement.index).port};
  for (const auto& [index, host] : hosts_) {
    if (trains(host) && host.peer >= 0)
      order.peers.at(static_cast<size_t>(rule_.place(index))) = {host.address, generation_.held(index).port};
  }
  peers_of_places_ = order.peers;
  {
    const std::lock_guard lock(of_copies_);
    copied_step_ = -1;
    copied_places_.clear();
  }
  if (choice.dir.parent_path() == checkpoints_) order.dir = choice.dir.filename();
  const std::set<int64_t> promised = ckpt::promised_after(memory, choice);
  order.promised = {promised.begin(), promised.end()};
  stage_.reset();
  feed(generation::Chosen{choice.incarnation});
  tell_all(order);
}

Status Fleet::carried_out(const Status& own) {
  feed(generation::Heard{options_.placement.index, own.ok() ? hosts::Carried{} : hosts::Carried{own.error()}});
  return drive();
}

void Fleet::promise(const ckpt::WholeSlot& slot) {
  std::vector<Ward> wards;
  for (const hosts::Ward& ward : generation_.wards(to_wire(slot)))
    wards.push_back({ward.host, ward.holder, from_wire(ward.slot)});
  saves_.set_wards(options_.placement.index, std::move(wards),
                   [replicas = options_.replicas](const Ward& ward, ckpt::IoBackend& io, const fs::path& work) {
                     return replicas->write_part(ward.slot, io, work);
                   });
  tell_all(hosts::Promise{to_wire(slot)});
}

void Fleet::go(uint64_t incarnation) {
  feed(generation::Go{incarnation});
  saves_.resumed();
  for (auto& [index, host] : hosts_) {
    host.states.clear();
    tell(host, hosts::Go{incarnation});
  }
}

void Fleet::wait_stopped(int64_t limit_ms) {
  const int64_t until_ns = cluster::steady_after(static_cast<double>(limit_ms) / 1e3);
  take_news();
  while (!generation_.all_stopped() && cluster::steady_ns() < until_ns) {
    if (!wait_for_news(5)) return;
  }
}

int64_t Fleet::round_trip_ns() const {
  int64_t out = 0;
  for (const auto& [index, host] : hosts_) {
    if (host.peer >= 0 && host.clock_round_ns != INT64_MAX) out = std::max(out, host.clock_round_ns);
  }
  return out;
}

int64_t Fleet::index_of_rank(int64_t rank) const {
  for (const auto& [index, host] : hosts_) {
    if (rule_.place(host.index) == rank / options_.ranks) return index;
  }
  return options_.placement.index;
}

std::string Fleet::name_of_rank(int64_t rank) const {
  const auto host = hosts_.find(index_of_rank(rank));
  return host == hosts_.end() ? own_host_name() : host->second.name;
}

std::optional<int64_t> Fleet::place_of(int64_t index) const {
  if (index == options_.placement.index) return place();
  const auto host = hosts_.find(index);
  return host == hosts_.end() || !trains(host->second) ? std::nullopt : std::optional(rule_.place(host->first));
}

Status Fleet::exclude(int64_t place, const std::string& reason, agent::FailureClass why) {
  Exclusion one{.reason = reason, .failure_class = why, .time = SystemClock().unix_s(), .epoch = epoch_.number};
  const auto out = std::ranges::find_if(hosts_, [&](const auto& of) { return rule_.place(of.first) == place; });
  const cluster::Hello own = hello_of(options_);
  one.name = out == hosts_.end() ? own.name : out->second.name;
  one.boot_id = out == hosts_.end() ? own.boot_id : out->second.boot_id;
  one.index = out == hosts_.end() ? own.index : out->first;
  const std::string name = one.name;
  RT_TRY(add_excluded(run_, std::move(one)));
  callbacks_.say(fmt::format("{} is excluded from this run: {}", name, reason));
  if (out == hosts_.end()) {
    resigned_ = reason;
    return {};
  }
  const Error left{ErrorCode::kUnavailable, fmt::format("this host is excluded from the run: {}", reason)};
  Host& host = out->second;
  const int64_t peer = host.peer;
  lose(host, "excluded: " + reason);
  feed(membership::Exclude{host.index, reason});
  host.peer = peer;
  dismiss(host, left.exit_code(), false, left.message, json());
  return {};
}

void Fleet::publish(const std::string& key, const std::string& value) {
  for (auto& [index, host] : hosts_) tell(host, hosts::Put{generation_.incarnation(), key, value});
}

void Fleet::halt(const std::string& why) {
  feed(generation::Halt{});
  for (auto& [index, host] : hosts_) tell(host, hosts::Halt{0, why});
}

void Fleet::ask_where_ranks_are() { tell_all(hosts::Look{}); }

void Fleet::ask_clocks() { tell_all(hosts::AskClock{telemetry::trace_clock_ns()}); }

/// The answer was given half-way between question and now, to half of that.
void Fleet::take_clock(Host& host, int64_t asked_ns, int64_t there_ns) {
  const int64_t now_ns = telemetry::trace_clock_ns(), round_ns = now_ns - asked_ns;
  if (round_ns < 0 || (round_ns > host.clock_round_ns && now_ns - host.clock_at_ns < kClockGoodNs)) return;
  host.clock_ahead_ns = there_ns - (asked_ns + round_ns / 2);
  host.clock_round_ns = round_ns;
  host.clock_at_ns = now_ns;
}

int64_t Fleet::clock_ahead_ns(int64_t rank) const {
  const auto of_rank = [&](const auto& one) { return rule_.place(one.first) == rank / options_.ranks; };
  const auto host = std::ranges::find_if(hosts_, of_rank);
  return host == hosts_.end() ? 0 : host->second.clock_ahead_ns;
}

void Fleet::ask_stacks(const std::vector<int64_t>& first) {
  std::set<int64_t> places;
  for (const int64_t rank : first) places.insert(rank / options_.ranks);
  int64_t asked = 0;  // of the others: who stands where nobody else stands shows among few
  for (auto& [index, host] : hosts_) {
    if (!trains(host) || host.peer < 0) continue;
    if (places.contains(rule_.place(host.index)) || asked++ < kMostAsked) tell(host, hosts::AskStacks{});
  }
}

void Fleet::put_in(std::vector<agent::RankState>& ranks) const {
  for (const auto& [index, host] : hosts_) {
    if (!trains(host)) continue;
    for (int64_t rank = rule_.place(host.index) * options_.ranks; rank < (rule_.place(host.index) + 1) * options_.ranks;
         ++rank) {
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
    if (rule_.place(host.index) == rank / options_.ranks) tell(host, hosts::Kill{rank});
  }
}

void Fleet::end(int code, bool keep, const std::string& text, const json& failure) {
  on_tick();
  feed(generation::End{});
  for (auto& [index, host] : hosts_) dismiss(host, code, keep, text, failure);
}

void Fleet::dismiss(Host& host, int code, bool keep, const std::string& text, const json& failure) {
  if (host.peer < 0) return;
  board_.send(host.peer, {hosts::End{.code = code, .keep = keep, .text = text, .failure = failure}, epoch_.number});
  board_.drop(host.peer);
  {
    const std::lock_guard lock(of_peers_);
    host_of_peer_.erase(host.peer);
  }
  host.peer = -1;
  feed(membership::Lost{host.index, "it has left"});
}

}  // namespace cairn::tools
