#include "tools/run/fleet.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <utility>

#include "ckpt/snapshot/arena.h"
#include "runtime/cluster/token.h"
#include "runtime/json/json.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using cluster::Message;
using cluster::News;
using nlohmann::json;

constexpr int kLookMs = 50;  // at least so often somebody's stop is seen

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

cluster::Hello hello_of(const HostOptions& options) {
  return {.index = options.placement.index,
          .name = own_host_name(),
          .boot_id = boot_id(),
          .build = options.build,
          .recipe_hash = options.recipe_hash,
          .ranks = options.ranks,
          .kernel_level = options.kernel_level};
}

Result<std::unique_ptr<Fleet>> Fleet::open(HostOptions options, const fs::path& run) {
  RT_TRY_SET(cluster::Listener listener, cluster::Listener::open(options.port_from, options.port_to));
  RT_TRY_SET(cluster::EpochStore store, cluster::EpochStore::open(run / "cluster"));
  std::unique_ptr<Fleet> fleet(new Fleet(std::move(options), run, std::move(listener), std::move(store)));
  RT_TRY_SET(fleet->token_, cluster::make_token(run / "cluster"));
  return fleet;
}

Fleet::Fleet(HostOptions options, fs::path run, cluster::Listener listener, cluster::EpochStore store)
    : options_(std::move(options)),
      run_(std::move(run)),
      checkpoints_(run_ / "checkpoints"),
      listener_(std::move(listener)),
      store_(std::move(store)),
      incarnation_(cluster::random_hex()),
      saves_([this](Message message) { tell_all(message.kind, message.body); }),
      board_(options_.beats, [this](const News& news) { return take_early(news); }) {
  std::map<int64_t, std::string> names;
  for (int64_t k = 0; k < options_.hosts(); ++k) {
    if (k == options_.placement.index) continue;
    const std::vector<std::string>& known = options_.placement.names;
    Host& host = hosts_[k];
    host.index = k;
    host.name = known.empty() ? fmt::format("host {}", k) : known[static_cast<size_t>(k)];
    host.away = "it has not joined";
    names[k] = host.name;
  }
  saves_.set_hosts(std::move(names));
}

Fleet::~Fleet() = default;

// --- membership ----------------------------------------------------------------------------------------------------

Status Fleet::gather() { return assemble(options_.join_s, "start"); }

bool Fleet::someone_away() const {
  return std::ranges::any_of(hosts_, [](const auto& one) { return one.second.peer < 0; });
}

/// Waits until every host is there, and begins an epoch with them.
Status Fleet::assemble(double patience_s, const std::string& reason) {
  if (!someone_away()) return {};
  cluster::Gathering wanted{.names = options_.placement.names,
                            .hosts = options_.hosts(),
                            .present = {},
                            .token = token_,
                            .stopped = callbacks_.stopped};
  for (const auto& [index, host] : hosts_) {
    if (host.peer >= 0) wanted.present.insert(index);
  }
  RT_TRY_SET(std::vector<cluster::Joined> joined,
             cluster::gather(listener_, wanted, hello_of(options_), cluster::steady_after(patience_s), callbacks_.say));
  for (const cluster::Joined& member : joined) {
    if (member.hello.kernel_level != options_.kernel_level) {
      callbacks_.say(
          fmt::format("warning: the processor of {} has other instructions for products than the leader's "
                      "(level {}, {}): where ranks stand decides the last bits of a run",
                      member.hello.name, member.hello.kernel_level, options_.kernel_level));
    }
    Host& host = hosts_.at(member.hello.index);
    host = Host{.index = member.hello.index,
                .name = member.hello.name,
                .address = member.address,
                .boot_id = member.hello.boot_id};
  }
  const cluster::Hello own = hello_of(options_);
  cluster::Epoch next{.number = epoch_.number,
                      .leader = options_.placement.index,
                      .port = listener_.port(),
                      .incarnation = incarnation_,
                      .members = {},
                      .ranks_per_host = options_.ranks,
                      .recipe_hash = own.recipe_hash,
                      .build = own.build,
                      .reason = reason};
  const std::string own_address =
      epoch_.members.empty() ? joined.front().connection.own_address() : epoch_.members.front().address;
  for (int64_t k = 0; k < options_.hosts(); ++k) {
    if (k == own.index) {
      next.members.push_back({own.name, own_address, own.boot_id});
    } else {
      const Host& host = hosts_.at(k);
      next.members.push_back({host.name, host.address, host.boot_id});
    }
  }
  const auto loops = [](const cluster::Member& member) { return is_loopback(member.address); };
  if (std::ranges::any_of(next.members, loops) && !std::ranges::all_of(next.members, loops)) {
    std::vector<std::string> texts;
    for (const cluster::Member& member : next.members) texts.push_back(member.name + " " + member.address);
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("some hosts have loopback addresses, which the others cannot reach: {}; give each by a "
                             "name or address that all can reach (--hosts)",
                             fmt::join(texts, ", "))};
  }
  RT_TRY_SET(const std::optional<cluster::Epoch> newest, store_.newest());
  if (newest && !epoch_.members.empty() && newest->number != epoch_.number) return check_epoch();
  next.number = newest ? newest->number + 1 : 1;
  RT_TRY_SET(const bool made, store_.claim(next));
  if (!made) {
    return Error{ErrorCode::kUnavailable, fmt::format("another agent has begun epoch {} of this run", next.number)};
  }
  epoch_ = std::move(next);
  RT_TRY(cluster::welcome(joined, epoch_, token_));
  for (cluster::Joined& member : joined) {
    Host& host = hosts_.at(member.hello.index);
    host.peer = peers_++;
    {
      const std::lock_guard lock(of_peers_);
      host_of_peer_[host.peer] = host.index;
    }
    board_.add(host.peer, host.name, std::move(member.connection));
    if (segment_) tell(host, "begin", segment_to_json(*segment_));
  }
  std::map<int64_t, std::string> names;
  for (const auto& [index, host] : hosts_) names[index] = host.name;
  saves_.set_hosts(std::move(names));
  return {};
}

Status Fleet::check_epoch() const {
  RT_TRY_SET(const std::optional<cluster::Epoch> newest, store_.newest());
  if (!newest || newest->incarnation == incarnation_) return {};
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
  host.memory.reset();
  host.carried = Status(Error{ErrorCode::kPeerLost, fmt::format("{} was lost: {}", host.name, why)});
  saves_.lost(host.index, why);
}

// --- messages ------------------------------------------------------------------------------------------------------

void Fleet::tell(Host& host, std::string kind, json body) {
  if (host.peer < 0) return;
  board_.send(host.peer, {.kind = std::move(kind), .epoch = epoch_.number, .body = std::move(body)});
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
  if (!running_) return;
  agent::Failure failure{.rank = host->index * options_.ranks, .host = true};
  failure.status.exit_code = Error{ErrorCode::kPeerLost, ""}.exit_code();
  failure.message = fmt::format("{} ({}), host {} of {}, was lost: {}", host->name, host->address, host->index,
                                options_.hosts(), news.why);
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
  tell_all("begin", segment_to_json(*segment_));
}

Result<ckpt::HostMemory> Fleet::memory() {
  running_ = false;
  for (;;) {
    if (someone_away()) {
      std::vector<std::string> away;
      for (const auto& [index, host] : hosts_) {
        if (host.peer < 0) away.push_back(fmt::format("{} ({})", host.name, host.away));
      }
      if (!waits_) {
        return Error{ErrorCode::kUnavailable,
                     fmt::format("{} is away: what its memory holds cannot be saved", fmt::join(away, ", "))};
      }
      callbacks_.say(fmt::format("waiting up to {:.0f} s for {}", options_.wait_s, fmt::join(away, ", ")));
      RT_TRY(assemble(options_.wait_s, fmt::format("{} came back", fmt::join(away, ", "))));
    }
    ++asks_;
    for (auto& [index, host] : hosts_) tell(host, "halt", {{"ask", asks_}});
    const auto pending = [&] {
      return std::ranges::any_of(hosts_,
                                 [&](const auto& one) { return one.second.peer >= 0 && one.second.asked < asks_; });
    };
    while (pending()) {
      if (!wait_for_news()) return Error{ErrorCode::kStopped, "asked to stop while the hosts were being asked"};
    }
    if (someone_away()) continue;
    std::optional<ckpt::HostMemory> common;
    for (const auto& [index, host] : hosts_) {
      if (!host.memory->ok()) return host.memory->error();
      common = common ? ckpt::common_memory(*common, host.memory->value()) : host.memory->value();
    }
    saves_.settle(common->whole);
    return *std::move(common);
  }
}

void Fleet::carry_out(const ckpt::RestoreChoice& choice, const ckpt::Arena& memory) {
  HostOrder order{.choice = choice, .starts = {memory.starts().begin(), memory.starts().end()}, .promised = {}};
  if (choice.dir.parent_path() == checkpoints_) order.choice.dir = choice.dir.filename();
  for (int64_t slot = 0; slot < memory.slots(); ++slot) {
    const int64_t step = memory.control().reserved[slot].load(std::memory_order_acquire);
    if (step != 0) order.promised.push_back(step > 0 ? step : -step);
  }
  incarnation_of_ranks_ = choice.incarnation;
  const json body = order_to_json(order);
  for (auto& [index, host] : hosts_) {
    if (host.peer >= 0) host.carried.reset();
    tell(host, "resume", body);
  }
}

Status Fleet::carried_out() {
  const auto pending = [&] {
    return std::ranges::any_of(hosts_, [](const auto& one) { return !one.second.carried.has_value(); });
  };
  while (pending()) {
    if (!wait_for_news()) return Error{ErrorCode::kStopped, "asked to stop while the hosts were loading"};
  }
  for (const auto& [index, host] : hosts_) RT_TRY(Status(*host.carried));
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
  return std::ranges::all_of(hosts_, [](const auto& one) { return one.second.left; });
}

void Fleet::ask_where_ranks_are() { tell_all("look", json::object()); }

void Fleet::put_in(std::vector<agent::RankState>& ranks) const {
  for (const auto& [index, host] : hosts_) {
    for (int64_t rank = index * options_.ranks; rank < (index + 1) * options_.ranks; ++rank) {
      if (rank >= std::ssize(ranks)) continue;
      agent::RankState& state = ranks[static_cast<size_t>(rank)];
      const auto told = std::ranges::find(host.states, rank, &agent::RankState::rank);
      state = told != host.states.end() ? *told : agent::RankState{.rank = rank};
      state.host = fmt::format("{} ({})", host.name, host.address);
    }
  }
}

void Fleet::kill(int64_t rank) {
  const auto host = hosts_.find(rank / options_.ranks);
  if (host != hosts_.end()) tell(host->second, "kill", {{"rank", rank}});
}

void Fleet::end(int code, bool keep, const std::string& text) {
  running_ = false;
  for (auto& [index, host] : hosts_) {
    if (host.peer < 0) continue;
    tell(host, "end", {{"code", code}, {"keep", keep}, {"text", text}});
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
