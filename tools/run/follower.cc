#include "tools/run/follower.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "ckpt/run_memory.h"
#include "ckpt/snapshot/arena.h"
#include "runtime/cluster/epoch_store.h"
#include "runtime/cluster/join.h"
#include "runtime/cluster/lease.h"
#include "runtime/cluster/token.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/trace.h"
#include "tools/run/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using cluster::News;
using nlohmann::json;

constexpr int kLookMs = 50;  // at least so often somebody's stop is seen
constexpr const char* kSpare = "a spare: waits to take the place of a host that is lost";
constexpr int64_t kPacesEveryNs = 1'000'000'000;
constexpr double kTellS = 5;    // then the host says whom it waits for
constexpr double kOneTryS = 1;  // at one port, before the folder is asked again for the leader's

fs::path port_file(const fs::path& run) { return run / "cluster" / "leader-port"; }
fs::path end_file(const fs::path& run) { return run / "cluster" / "end.json"; }

std::string text_or_nothing(const fs::path& path) {
  Result<std::string> text = read_text_file(path);
  return text.ok() ? std::move(text).value() : std::string();
}

/// Of this host in an epoch; -1: it has none.
int64_t place_in(const cluster::Epoch& epoch, int64_t index) {
  const auto at = std::ranges::find(epoch.members, index, &cluster::Member::index);
  return at == epoch.members.end() ? -1 : at - epoch.members.begin();
}

Error asked_to_stop() { return {ErrorCode::kStopped, "asked to stop while the leader was waited for"}; }

}  // namespace

Status write_leader_port(const fs::path& run, int64_t port) {
  return write_unsynced_text_file(port_file(run), std::to_string(port) + "\n");
}

std::optional<int64_t> read_leader_port(const fs::path& run) {
  const Result<std::string> text = read_text_file(port_file(run));
  if (!text.ok()) return std::nullopt;
  const int64_t port = std::atoll(text.value().c_str());
  return port > 0 && port < 65536 ? std::optional(port) : std::nullopt;
}

std::shared_ptr<cluster::EpochStore> find_store(const fs::path& run, const HostOptions& options) {
  // The token comes first, and tells runs apart: without one nobody has led this one.
  if (is_gone(run / "cluster" / "token")) return nullptr;
  Result<std::shared_ptr<cluster::EpochStore>> store = cluster::open_store(options.store, run / "cluster");
  return store.ok() ? std::move(store).value() : nullptr;
}

Result<std::optional<cluster::Epoch>> newest_epoch(const fs::path& run, const HostOptions& options) {
  const std::shared_ptr<cluster::EpochStore> store = find_store(run, options);
  if (!store) return std::optional<cluster::Epoch>();
  return store->newest();
}

Status write_end(const fs::path& run, const std::string& incarnation, int code) {
  return write_unsynced_text_file(end_file(run), json_text(json{{"incarnation", incarnation}, {"code", code}}) + "\n");
}

bool is_led_by_another(const fs::path& run, const HostOptions& options, const std::optional<cluster::Epoch>& newest) {
  if (!newest || newest->members.at(static_cast<size_t>(newest->leader)).index == options.placement.index) return false;
  const std::shared_ptr<cluster::EpochStore> store = find_store(run, options);
  cluster::LeaseWatch lease(store);
  while (lease.still_s() < lease_still_s(options.beats, store.get())) {
    if (lease.has_changed()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(kLookMs));
  }
  return false;
}

Follower::Follower(HostOptions options, fs::path run, std::function<void(const std::string&)> say)
    : options_(std::move(options)),
      run_(std::move(run)),
      say_(std::move(say)),
      saves_(options_.placement.index, [this](hosts::Message message) { tell(std::move(message)); }),
      end_before_(text_or_nothing(end_file(run_))),
      board_(std::make_unique<cluster::Switchboard>(options_.beats,
                                                    [this](const News& news) { return take_early(news); })),
      spare_memory_(say_) {
  saves_.use([replicas = options_.replicas](const Ward& ward, ckpt::IoBackend& io,
                                            const fs::path& work) -> Result<ckpt::PartSet> {
    if (!replicas) return Error{ErrorCode::kUnavailable, "no copies are held here"};
    return replicas->write_part(ward.slot, io, work);
  });
}

Follower::~Follower() { close(); }

// --- the leader ----------------------------------------------------------------------------------------------------

/// On the switchboard's thread: a save goes on while the loop reads a checkpoint.
bool Follower::take_early(const News& news) {
  if (news.peer != early_peer_) return false;
  if (news.kind == News::Kind::kMessage) return saves_.take(news.message.what, run_ / "checkpoints");
  saves_.leader_lost(news.why);
  return false;
}

/// Of the loop and of persisters.
void Follower::tell(hosts::Message message) { board_->send(early_peer_, {std::move(message)}); }

/// One try. Errors: kTimeout: nobody leads there, or it is not known yet.
Status Follower::try_leader(const std::string& leader, int64_t port, cluster::LeaseWatch& lease, int64_t deadline_ns,
                            const std::function<bool()>& stopped) {
  const auto lives = [&] { return lease.still_s() < lease_still_s(options_.beats, store_.get()); };
  RT_TRY_SET(cluster::Place place,
             cluster::join(leader, port, run_ / "cluster", hello_of(options_), deadline_ns, stopped,
                           std::min(deadline_ns, cluster::steady_after(kOneTryS)), lives));
  address_ = place.leader.own_address();
  epoch_ = std::move(place.epoch);
  take_place(place_in(epoch_, options_.placement.index), std::ssize(epoch_.members));
  remove_old_memory(ckpt::kSharedMemory);
  if (place_ < 0) say_(kSpare);
  peer_ = peers_++;
  early_peer_ = peer_;
  const cluster::Member& leads = epoch_.members.at(static_cast<size_t>(epoch_.leader));
  board_->add(peer_, leads.name, std::move(place.leader));
  return {};
}

/// An agent of this host may have died alone, and its memory have stayed. Where the run has gone on without it, it is
/// in the way of the memory that this host is to have, and nobody would take it over any more.
void Follower::remove_old_memory(const std::string& folder) {
  const std::string boot_id = hello_of(options_).boot_id;
  const auto without = [&](const ckpt::RankRange& ranks, int64_t world) {
    return epoch_.goes_on_without(ranks.first, world, boot_id);
  };
  for (const std::string& line : ckpt::remove_memory_gone_on_without(folder, run_id_of(run_), without)) say_(line);
}

/// What this host's memory holds is of its place among as many as there were.
void Follower::take_place(int64_t place, int64_t hosts) {
  const bool same = place == place_ && hosts == options_.hosts();
  place_ = place;
  options_.train_with(hosts);
  if (same || !segment_) return;
  displaced_ = true;
  next_.reset();
}

/// nullopt: there is none, or none that can be read.
std::optional<cluster::Epoch> Follower::newest_known() {
  if (!store_) store_ = find_store(run_, options_);
  if (!store_) return std::nullopt;
  Result<std::optional<cluster::Epoch>> newest = store_->newest();
  return newest.ok() ? std::move(newest).value() : std::nullopt;
}

/// Its end, of a start that this host has begun with, where the leader's last word was lost.
void Follower::take_end_file() {
  const std::string text = text_or_nothing(end_file(run_));
  if (text == end_before_) return;
  const json end = json_or_nothing(text);
  const std::optional<cluster::Epoch> newest = newest_known();
  if (!newest || !end.is_object() || json_field(end, "incarnation") != json(newest->incarnation)) return;
  ended_ = static_cast<int>(json_integer(json_field(end, "code"), 0, 255).value_or(1));
  keep_memory_ = true;  // it is not known whether it is needed
}

Status Follower::join(double patience_s, const std::function<bool()>& stopped) {
  const int64_t deadline_ns = cluster::steady_after(patience_s), tell_ns = cluster::steady_after(kTellS);
  bool told = false;
  std::optional<cluster::Epoch> newest;
  std::optional<cluster::LeaseWatch> lease;
  for (;;) {
    // Who has taken the lead says so in its epoch. Host 0, which leads what begins, tells its port first.
    const bool had_store = store_ != nullptr;
    std::optional<cluster::Epoch> found = newest_known();
    // A new leader is judged anew.
    if (!lease || found != newest || (!had_store && store_)) lease.emplace(store_);
    newest = std::move(found);
    std::vector<std::pair<std::string, int64_t>> leaders;
    if (newest && newest->leader != place_in(*newest, options_.placement.index)) {
      leaders.emplace_back(newest->members.at(static_cast<size_t>(newest->leader)).address, newest->port);
    }
    if (options_.placement.index != 0)
      leaders.emplace_back(options_.placement.leader, read_leader_port(run_).value_or(options_.port_from));
    for (const auto& [leader, port] : leaders) {
      Status joined = try_leader(leader, port, *lease, deadline_ns, stopped);
      if (joined.ok()) return joined;
      const bool last = leader == leaders.back().first && port == leaders.back().second;
      Error error = std::move(joined).error();
      if (error.code == ErrorCode::kTimeout && cluster::steady_ns() < deadline_ns) {
        if (!std::exchange(told, cluster::steady_ns() >= tell_ns) && told) say_("still waits: " + error.message);
        continue;
      }
      // An address of before may be anybody's now.
      if (!last && !lease->has_changed() && error.code != ErrorCode::kStopped) continue;
      if (error.code == ErrorCode::kTimeout) error.code = ErrorCode::kUnavailable;
      return error;
    }
    if (leaders.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(kLookMs));
    if (cluster::steady_ns() >= deadline_ns) return Error{ErrorCode::kUnavailable, "no leader can be joined"};
    if (stopped()) return asked_to_stop();
    take_end_file();
    if (ended_) return Error{ErrorCode::kStopped, "the run has ended"};
    if (!newest || !hosts::membership::claims_lead({.still_s = lease->still_s(),
                                                    .claims_after_s = lease_still_s(options_.beats, store_.get()),
                                                    .has_joined = !epoch_.members.empty(),
                                                    .place = place_,
                                                    .place_in_newest = place_in(*newest, options_.placement.index)}))
      continue;
    RT_TRY_SET(const bool leads, claim_lead(*newest));
    if (leads) return Error{ErrorCode::kStopped, "this host leads"};
  }
}

Result<bool> Follower::claim_lead(const cluster::Epoch& newest) {
  const int64_t place = place_in(newest, options_.placement.index);
  RT_TRY_SET(cluster::Listener listener, cluster::Listener::open(options_.port_from, options_.port_to));
  const cluster::Hello own = hello_of(options_);
  cluster::Epoch next = newest;
  const cluster::Member& before = newest.members.at(static_cast<size_t>(newest.leader));
  next.reason = fmt::format("{}, which led, is lost: {}", before.name, away_);
  next.number = newest.number + 1;
  next.leader = place;
  next.port = listener.port();
  next.incarnation = cluster::random_hex();
  next.members.at(static_cast<size_t>(place)) = {own.name, address_, own.boot_id, own.index};
  RT_TRY_SET(const bool made, store_->claim(next));
  if (!made) return false;
  say_(fmt::format("this host leads from here on, in epoch {}: {}", next.number, next.reason));
  take_place(place, std::ssize(next.members));
  lead_ = Lead{std::move(listener), std::move(next), std::make_unique<cluster::Lease>(store_), before.index};
  return true;
}

std::optional<hosts::Message> Follower::receive(int wait_ms) {
  if (inbox_.empty() && wait_ms > 0) {
    pollfd ready{board_->fd(), POLLIN, 0};
    ::poll(&ready, 1, wait_ms);
  }
  for (News& news : board_->take()) inbox_.push_back(std::move(news));
  while (!inbox_.empty()) {
    News first = std::move(inbox_.front());
    inbox_.pop_front();
    if (first.peer != peer_) continue;
    if (first.kind == News::Kind::kMessage) return std::move(first.message.what);
    peer_ = -1;  // what it said before counts: `end` is its last word
    away_ = std::move(first.why);
  }
  return std::nullopt;
}

Result<std::optional<HostSegment>> Follower::next_segment(const std::function<bool()>& stopped) {
  double patience_s = options_.join_s;
  for (;;) {
    if (std::exchange(displaced_, false)) segment_.reset();
    if (ended_ || lead_) return std::optional<HostSegment>();
    if (next_) {
      segment_ = std::exchange(next_, std::nullopt);
      return segment_;
    }
    if (peer_ < 0) {
      halt_ = -1;
      if (Status joined = join(patience_s, stopped); !joined.ok() && !ended_ && !lead_)
        return std::move(joined).error();
      continue;
    }
    patience_s = options_.wait_s;
    if (const std::optional<hosts::Message> message = receive(kLookMs); message && !take_common(*message)) {
      if (const auto* const halt = std::get_if<hosts::Halt>(&*message)) halt_ = halt->ask;  // right behind the segment
    }
    if (stopped()) return asked_to_stop();
  }
}

bool Follower::take_common(const hosts::Message& message) {
  const auto take_copied = [&](uint64_t incarnation, int64_t step, auto how) {
    if (running_ && options_.replicas && incarnation == incarnation_) (*options_.replicas.*how)(step);
    return true;
  };
  return std::visit(
      hosts::Overloaded{
          [&](const hosts::Begin& one) { return take_begin(one), true; },
          [&](const hosts::Prepare& one) {
            if (place_ < 0 && !node_) spare_memory_.prepare(one.segment, options_.ranks, options_.device);
            return true;
          },
          [&](const hosts::Rest&) {
            checker_.reset();
            take_place(-1, options_.hosts());
            say_(kSpare);
            return true;
          },
          [&](const hosts::End& one) { return take_end(one), true; },
          [&](const hosts::Promise& one) {
            saves_.promised(one.slot.step);
            if (node_)
              static_cast<void>(node_->promise(from_wire(one.slot)));  // if not, FollowerSaves refuses the save
            return true;
          },
          [&](const hosts::AllCopied& one) { return take_copied(one.incarnation, one.step, &Replicas::agreed); },
          [&](const hosts::NotAllCopied& one) { return take_copied(one.incarnation, one.step, &Replicas::dropped); },
          [&](const hosts::AskClock& one) {
            tell(hosts::Clock{one.asked_ns, telemetry::trace_clock_ns()});
            return true;
          },
          [&](const hosts::Kill& one) {
            if (one.rank < options_.world() && parts_ && running_) hooks_.kill(one.rank);
            return true;
          },
          [&](const auto&) { return take_check(message); },
      },
      message);
}

void Follower::take_end(const hosts::End& end) {
  ended_ = static_cast<int>(end.code);
  keep_memory_ = end.keep.value_or(false);
  end_failure_ = end.failure.value_or(json());
  if (end.text.empty()) return;
  say_(end.text);
  end_told_ = true;
  if (!end_failure_.is_object()) end_failure_ = {{"message", end.text}};
}

/// A check of hosts, for which no rank runs.
bool Follower::take_check(const hosts::Message& message) {
  if (!std::holds_alternative<hosts::Measure>(message) && !std::holds_alternative<hosts::PutMeasured>(message) &&
      !std::holds_alternative<hosts::EndMeasure>(message))
    return false;
  if (running_) return true;
  if (!checker_) {
    checker_ = std::make_unique<HostChecker>(
        HostChecker::Callbacks{.tell = [this](hosts::Measured measured) { tell(std::move(measured)); },
                               .publish = [this](hosts::PutMeasured value) { tell(std::move(value)); }});
  }
  return take_check_message(*checker_, message, options_.interface_address);
}

void Follower::take_begin(const hosts::Begin& begin) {
  const HostSegment& segment = begin.segment;
  if (begin.place >= segment.hosts || segment.hosts > options_.placement.hosts) return;
  take_place(begin.place, segment.hosts);
  if (begin.leader < segment.hosts) epoch_.leader = begin.leader;
  if (displaced_ || segment_ != segment) next_ = segment;
}

// --- a segment -----------------------------------------------------------------------------------------------------

Status Follower::open(Segment parts) {
  RT_CHECK(segment_ && !node_, "a segment is open already, or none has begun");
  parts_.emplace(std::move(parts));
  running_ = told_left_ = stop_told_ = false;
  const int64_t first = first_rank();
  agent::RunControl& control = parts_->control;
  ckpt::NodeOptions options{
      .checkpoints_dir = run_ / "checkpoints",
      .run = {.run_name = segment_->run_name,
              .run_id = segment_->run_id,
              .recipe_json = segment_->recipe_json,
              .recipe_hash = segment_->recipe_hash,
              .lineage = segment_->lineage},
      .stop = [&control] { return control.leave_signal() != 0; },
      .leave = [&control] { return control.leave_signal() != 0; },
      .on_persisted = [&control] { control.wake(); },
      .ranks = ckpt::RankRange{first, first + options_.ranks},
      .save_step = [this](ckpt::IoBackend& io, const fs::path& dir, ckpt::Manifest skeleton,
                          std::span<const ckpt::WriterPart> of,
                          const ckpt::SaveOptions& how) { return saves_.save(io, dir, skeleton, of, how); },
      .is_due = [this](int64_t step) { return saves_.is_due(step); },
      .prepared = spare_memory_.take(),
      .follows = true};
  if (const std::string& init = parts_->plan.recipe.init.path; !init.empty()) {
    options.init_from = init;
    options.open_foreign = parts_->open_foreign;
  }
  const ckpt::RunText run = options.run;
  if (const std::string& offload = parts_->plan.recipe.optimizer.offload; !offload.empty()) remove_old_memory(offload);
  std::vector<std::string> notices;
  Result<std::unique_ptr<ckpt::CheckpointNode>> node =
      ckpt::CheckpointNode::open(parts_->plan, std::move(options), &notices);
  for (const std::string& notice : notices) say_(notice);
  if (!node.ok()) return std::move(node).error();
  node_ = std::move(node).value();
  node_->keep_memory();  // until the leader says that it is not needed
  return attach_replicas(run);
}

Status Follower::attach_replicas(const ckpt::RunText& run) {
  if (!options_.replicas) return {};
  RT_TRY_SET(const std::optional<std::string> token, cluster::read_token(run_ / "cluster"));
  const ckpt::Arena& arena = node_->arena();
  return options_.replicas->attach({.plan = parts_->plan,
                                    .run = run,
                                    .arena = node_->arena(),
                                    .place = place_,
                                    .hosts = options_.hosts(),
                                    .token = token.value_or(std::string()),
                                    .sent =
                                        [this, &arena](int64_t step, int64_t bytes, const std::string& why) {
                                          const uint64_t incarnation = arena.control().incarnation.load();
                                          if (why.empty()) {
                                            tell(hosts::Copied{incarnation, step, bytes});
                                          } else {
                                            tell(hosts::NotCopied{incarnation, step, bytes, why});
                                          }
                                        },
                                    .warn = [this](const std::string& text) { say_("warning: " + text); }});
}

void Follower::close() {
  saves_.finish_wards();
  if (options_.replicas) options_.replicas->detach();
  if (node_ && ((ended_ && !keep_memory_) || displaced_)) node_->keep_memory(false);
  node_.reset();
  parts_.reset();
  running_ = false;
}

Status Follower::refuse(const Error& why, const std::function<bool()>& stopped) {
  while (!ended_ && peer_ >= 0) {
    const int64_t ask = std::exchange(halt_, -1);
    if (ask > 0) tell(hosts::CannotIdle{ask, why});
    if (const std::optional<hosts::Message> message = receive(kLookMs); message && !take_common(*message)) {
      if (const auto* const halt = std::get_if<hosts::Halt>(&*message)) halt_ = halt->ask;
    }
    if (stopped()) return asked_to_stop();
  }
  return why;
}

Result<ckpt::RestoreChoice> Follower::next_generation(int64_t) {
  running_ = false;
  if (options_.replicas) options_.replicas->halt();
  tell(hosts::Stopped{incarnation_});
  for (;;) {
    if (parts_->control.leave_signal() != 0) return asked_to_stop();
    if (ended_ || next_ || displaced_) return Error{ErrorCode::kStopped, "the leader has ended this"};
    if (peer_ < 0) {
      // Nobody is there who could be told of a stop: this host leaves by itself.
      const auto stopped = [this] { return parts_->control.leave_signal() != 0 || parts_->control.stop_asked(); };
      if (stopped()) return asked_to_stop();
      halt_ = -1;
      parts_->narrator.say(
          fmt::format("the leader is away ({}): the ranks are stopped and their memory stays; joining "
                      "it again for {:.0f} s",
                      away_, options_.wait_s));
      RT_TRY(join(options_.wait_s, stopped));
      if (displaced_) return Error{ErrorCode::kStopped, "another host has taken this one's place"};
      parts_->narrator.say(fmt::format("joined again, in epoch {}", epoch_.number));
    }
    if (halt_ >= 0) answer_halt();
    if (const std::optional<hosts::Message> message = receive(kLookMs); message && !take_common(*message)) {
      if (const auto* const halt = std::get_if<hosts::Halt>(&*message)) {
        halt_ = halt->ask;
        answer_halt();
      } else if (const auto* const give = std::get_if<hosts::Give>(&*message)) {
        give_copy(*give);
      } else if (const auto* const resume = std::get_if<hosts::Resume>(&*message)) {
        Result<ckpt::RestoreChoice> chosen = carry_out(*resume);
        if (chosen.ok()) {
          choice_ = std::move(chosen).value();
          tell(hosts::Carried{});
        } else {
          choice_.reset();
          tell(hosts::Carried{chosen.error()});
        }
      } else if (const auto* const go = std::get_if<hosts::Go>(&*message);
                 go != nullptr && choice_ && go->incarnation == choice_->incarnation) {
        incarnation_ = choice_->incarnation;
        saves_.resumed(choice_->step, memory().promised(), std::exchange(leader_promises_, {}));
        running_ = true;
        told_left_ = false;
        if (checker_) checker_->stop();  // of a leader that was lost over it
        paces_.clear();
        return *std::exchange(choice_, std::nullopt);
      }
    }
    tell_stop();
    saves_.look(memory().promised());
  }
}

/// No rank runs here.
void Follower::answer_halt() {
  const int64_t ask = std::exchange(halt_, -1);
  if (ask == 0) return;  // it only wanted them stopped
  choice_.reset();
  hosts::Idle idle{.ask = ask, .memory = to_wire(node_->memory())};
  if (options_.replicas) {
    const Held held = options_.replicas->held();
    idle.held = {held.place, held.port, to_wire(held.whole)};
  }
  tell(std::move(idle));
}

/// To the host that has taken a lost one's place.
void Follower::give_copy(const hosts::Give& order) {
  if (!options_.replicas) return;
  options_.replicas->give(from_wire(order.slot), order.to, [this](const Status& given) {
    tell(given.ok() ? hosts::Given{} : hosts::Given{given.error()});
  });
}

Result<ckpt::RestoreChoice> Follower::carry_out(const hosts::Resume& order) {
  RT_TRY_SET(ckpt::RestoreChoice choice, from_wire(order));
  isa_ = static_cast<kernels::GemmIsa>(order.kernel_level);
  if (isa_ > kernels::gemm_isa()) {
    return Error{ErrorCode::kInternal, fmt::format("the leader orders the instructions {}, which {} lacks",
                                                   kernels::gemm_isa_name(isa_), own_host_name())};
  }
  if (choice.dir.is_relative() && !choice.dir.empty()) choice.dir = run_ / "checkpoints" / choice.dir;
  RT_TRY(node_->follow(choice, order.starts));
  leader_promises_ = {order.promised.begin(), order.promised.end()};
  if (options_.replicas && std::ssize(order.peers) == options_.hosts()) {
    options_.replicas->begin(order.epoch, order.peers[static_cast<size_t>(buddy_of(place_, options_.hosts()))],
                             slot_of(choice));
  }
  return choice;
}

void Follower::publish(const std::string& key, const std::string& value) { tell(hosts::Put{incarnation_, key, value}); }

bool Follower::save_under_way() {
  const std::vector<ckpt::SlotView> views = node_->arena().views();
  return std::ranges::any_of(views, [](const ckpt::SlotView& slot) { return slot.saving && slot.whole; });
}

void Follower::on_readable() {
  for (std::optional<hosts::Message> message = receive(0); message; message = receive(0)) {
    if (take_common(*message)) continue;
    const auto* const put = std::get_if<hosts::Put>(&*message);
    if (put != nullptr && put->incarnation == incarnation_ && running_) hooks_.put(put->key, put->value);
    if (std::holds_alternative<hosts::Look>(*message) && running_) {
      std::vector<agent::RankState> states = hooks_.states();
      std::erase_if(states, [&](const agent::RankState& rank) { return !node_->arena().ranks().contains(rank.rank); });
      tell(hosts::Ranks{incarnation_, to_wire(states)});
    }
    if (std::holds_alternative<hosts::AskStacks>(*message) && running_)
      hooks_.read_stacks([this](auto stacks) { tell_stacks(stacks); });
    const auto* const halt = std::get_if<hosts::Halt>(&*message);
    if (halt == nullptr) continue;
    halt_ = halt->ask;
    stop_ranks(halt->why.value_or(""));
    break;  // what follows is for next_generation()
  }
  if (peer_ < 0) stop_ranks("the leader was lost: " + away_);
  if (ended_ && !told_left_) stop_ranks("the run has ended");
}

/// As if one of them had failed.
void Follower::stop_ranks(const std::string& why) {
  if (!running_) return;
  stopped_by_leader_ = true;
  agent::Failure failure{.rank = first_rank(), .host = true};
  failure.status.exit_code = Error{ErrorCode::kPeerLost, ""}.exit_code();
  failure.message = why;
  parts_->control.fail(std::move(failure));
}

void Follower::on_failing(const agent::Failure& failure) {
  if (!std::exchange(stopped_by_leader_, false)) tell(hosts::Failed{incarnation_, to_wire(failure)});
  running_ = false;
}

void Follower::on_rank_error(const agent::Failure& error) { tell(hosts::RankError{incarnation_, to_wire(error)}); }

void Follower::tell_stacks(const std::vector<agent::RankStacks>& stacks) {
  hosts::Stacks all{incarnation_, {}};
  for (const agent::RankStacks& one : stacks) {
    if (node_ && node_->arena().ranks().contains(one.rank)) all.stacks.push_back(agent::to_json(one));
  }
  tell(std::move(all));
}

/// Fast steps make many: together once a second.
void Follower::tell_paces() {
  const int64_t now_ns = cluster::steady_ns();
  if (paces_.empty() || now_ns - paces_told_ns_ < kPacesEveryNs) return;
  paces_told_ns_ = now_ns;
  for (const auto& [rank, event] : std::exchange(paces_, {})) tell(hosts::RankEvent{incarnation_, rank, event});
}

void Follower::on_rank_event(int64_t rank, const json& event) {
  if (json_field(event, "event") == "pace") {
    json& pace = paces_[rank];
    json blocks = pace.is_object() ? std::move(pace["blocks"]) : json::array();
    for (const json& block : json_field(event, "blocks")) blocks.push_back(block);
    pace = event;
    pace["blocks"] = std::move(blocks);
    return;
  }
  tell(hosts::RankEvent{incarnation_, rank, event});
}

void Follower::on_rank_exit(const agent::ExitStatus& status) {
  if (lies_behind_a_wild_write(status)) node_->distrust_memory();
}

bool Follower::all_finished() {
  if (!std::exchange(told_left_, true)) tell(hosts::Left{incarnation_});
  return ended_ || next_ || displaced_;
}

void Follower::on_tick() {
  const double now_s = static_cast<double>(cluster::steady_ns()) / 1e9;
  for (const ckpt::PersistEvent& event : node_->take_events()) {
    if (event.status.ok()) continue;
    const std::string& why = event.status.error().message;
    if (const auto line = failed_saves_.failed(event.step, why, now_s)) parts_->narrator.say(*line);
  }
  if (const auto line = failed_saves_.due(now_s)) parts_->narrator.say(*line);
  saves_.look(memory().promised());
  tell_paces();
  tell_asked();
}

void Follower::stop(int signal) {
  stop_signal_ = signal;
  stop_told_ = false;
  tell_stop();
}

/// Also one that came while the leader was away, or a callback kept the loop.
void Follower::tell_stop() {
  if (stop_signal_ == 0 && parts_->control.stop_asked()) stop_signal_ = SIGTERM;
  if (stop_signal_ == 0 || stop_told_ || peer_ < 0) return;
  stop_told_ = true;
  parts_->narrator.say("asked to stop: the leader is told");
  tell(hosts::Stop{stop_signal_});
}

void Follower::ask_save(const std::string& by) {
  asked_by_ = by;
  tell_asked();
}

/// Also a save that was asked for while the leader was away.
void Follower::tell_asked() {
  if (asked_by_.empty() || peer_ < 0 || !running_) return;
  tell(hosts::AskSave{std::exchange(asked_by_, {})});
}

Result<int> Follower::conclude(const agent::Outcome& outcome) {
  if (outcome.kind == agent::EndKind::kLeftBySignal) return outcome.exit_code;
  if (ended_) return *ended_;
  return Error{ErrorCode::kUnavailable, "the leader has not said how the run ended"};
}

}  // namespace cairn::tools
