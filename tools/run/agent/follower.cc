#include "tools/run/agent/follower.h"

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
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using cluster::News;
namespace member = hosts::member;
using nlohmann::json;

constexpr int kLookMs = 50;  // at least so often somebody's stop is seen
constexpr int64_t kPacesEveryNs = 1'000'000'000;
constexpr double kTellS = 5;                      // then the host says whom it waits for
constexpr int64_t kEpochEveryNs = 1'000'000'000;  // between two looks for a newer epoch, at a leader's door
constexpr double kOneTryS = 1;                    // at one port, before the folder is asked again for the leader's

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

Status write_end(const fs::path& run, const std::string& incarnation, int code, bool keep) {
  const json end{{"incarnation", incarnation}, {"code", code}, {"keep", keep}};
  return write_unsynced_text_file(end_file(run), json_text(end) + "\n");
}

std::vector<int64_t> places_with_memory(const fs::path& run, const std::optional<cluster::Epoch>& epoch) {
  const json end = json_or_nothing(text_or_nothing(end_file(run)));
  std::vector<int64_t> out;
  if (!epoch || (json_field(end, "incarnation") == json(epoch->incarnation) && json_field(end, "keep") == json(false)))
    return out;
  for (const cluster::Member& member : epoch->members) out.push_back(member.index);
  return out;
}

bool is_led_by_another(const fs::path& run, const HostOptions& options, const std::optional<cluster::Epoch>& newest) {
  if (!newest || newest->members.at(static_cast<size_t>(newest->leader)).index == options.placement.index) return false;
  const std::shared_ptr<cluster::EpochStore> store = find_store(run, options);
  double wait_s = lease_still_s(options.beats, store.get());
  if (!hosts::membership::first_leads(places_with_memory(run, newest))) {
    wait_s = std::max(wait_s, options.join_s);
    fmt::print(
        "this host did not train last, and the memory of those that did may hold more than the disk: waiting up "
        "to {:.0f} s for one of them to lead\n",
        wait_s);
    std::fflush(stdout);
  }
  cluster::LeaseWatch lease(store);
  while (lease.still_s() < wait_s) {
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
      rule_({.hosts = options_.placement.hosts,
             .train = options_.hosts(),
             .join_s = options_.join_s,
             .wait_s = options_.wait_s}),
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

void Follower::feed(const member::Event& event) {
  const member::Actions actions = rule_.step(event, cluster::steady_ns());
  options_.train_with(rule_.hosts());
  for (const member::Action& action : actions) perform(action);
}

void Follower::perform(const member::Action& action) {
  std::visit(
      hosts::Overloaded{
          [&](const member::Say& one) { say(one.text); },
          [&](const member::Send& one) { tell(one.what); },
          [&](const member::Join&) { search_.emplace(Search{.tell_ns = cluster::steady_after(kTellS)}); },
          [&](const member::Claim&) {
            const Result<bool> leads = claim_lead();
            if (!leads.ok()) return feed(member::JoinFailed{leads.error()});
            feed(member::Claimed{.leads = leads.value(),
                                 .place = lead_ ? lead_->epoch.leader : -1,
                                 .hosts = lead_ ? std::ssize(lead_->epoch.members) : 0});
          },
          [&](const member::Drop& one) {
            board_->drop(std::exchange(peer_, -1));
            saves_.leader_lost(one.why);
            feed(member::LeaderLost{away_ = one.why});
          },
          [&](const member::MakeSpare& one) { spare_memory_.prepare(one.segment, options_.ranks, options_.device); },
          [&](const member::EndCheck&) { checker_.reset(); },
          [&](const member::Open& one) { segment_ = opens_ = one.segment; },
          [&](const member::Answer& one) { tell_memory(one.ask); },
          [&](const member::GiveCopy& one) { give_copy(one.order); },
          [&](const member::Load& one) {
            choice_.reset();
            Result<ckpt::RestoreChoice> loaded = carry_out(one.order);
            if (!loaded.ok()) return feed(member::Loaded{std::move(loaded).error()});
            choice_ = std::move(loaded).value();
            feed(member::Loaded{});
          },
          [&](const member::Run& one) { let_run(one); },
          [&](const member::StopRanks& one) { stop_ranks(one.why); },
          [&](const member::Leave& one) { over_.emplace(one.why); },
          [&](const member::GaveUp& one) { over_ = one.error ? Status(*one.error) : Status(); },
      },
      action);
}

void Follower::follow(cluster::Place place) {
  address_ = place.leader.own_address();
  epoch_ = std::move(place.epoch);
  remove_old_memory(ckpt::kSharedMemory);
  peer_ = peers_++;
  early_peer_ = peer_;
  board_->add(peer_, epoch_.members.at(static_cast<size_t>(epoch_.leader)).name, std::move(place.leader));
  feed(member::Joined{.place = place_in(epoch_, options_.placement.index),
                      .hosts = std::ssize(epoch_.members),
                      .leader = epoch_.leader,
                      .epoch = epoch_.number});
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

/// nullopt: there is none, or none that can be read.
std::optional<cluster::Epoch> Follower::newest_known() {
  if (!store_) store_ = find_store(run_, options_);
  if (!store_) return std::nullopt;
  Result<std::optional<cluster::Epoch>> newest = store_->newest();
  return newest.ok() ? std::move(newest).value() : std::nullopt;
}

/// The code of the end of a start that this host has begun with, where the leader's last word was lost.
std::optional<int64_t> Follower::code_in_end_file() {
  const std::string text = text_or_nothing(end_file(run_));
  if (text == end_before_) return std::nullopt;
  const json end = json_or_nothing(text);
  const std::optional<cluster::Epoch> newest = newest_known();
  if (!newest || !end.is_object() || json_field(end, "incarnation") != json(newest->incarnation)) return std::nullopt;
  return json_integer(json_field(end, "code"), 0, 255).value_or(1);
}

/// A host that has claimed the lead says so in its epoch; host 0, which leads what begins, writes its port first.
std::vector<Follower::Candidate> Follower::leaders() const {
  std::vector<Candidate> out;
  const std::optional<cluster::Epoch>& newest = search_->newest;
  if (newest && newest->leader != place_in(*newest, options_.placement.index)) {
    const cluster::Member& leader = newest->members.at(static_cast<size_t>(newest->leader));
    out.push_back({leader.index, leader.address, newest->port});
  }
  if (options_.placement.index != 0)
    out.push_back({0, options_.placement.leader, read_leader_port(run_).value_or(options_.port_from)});
  return out;
}

/// The lease of the leader that is looked for. A run's first leader may make the store while this host is at its door.
cluster::LeaseWatch& Follower::lease() {
  if (!store_) store_ = find_store(run_, options_);
  if (!search_->lease || search_->watched != store_) search_->lease.emplace(search_->watched = store_);
  return *search_->lease;
}

void Follower::look_for_leader(const std::function<bool()>& stopped) {
  const int64_t deadline_ns = rule_.joins_until_ns().value();
  std::optional<cluster::Epoch> found = newest_known();
  if (found != search_->newest) search_->lease.reset();  // a new leader is judged anew
  search_->newest = std::move(found);
  lease();  // it counts from here on
  const std::vector<Candidate> all = leaders();
  for (const Candidate& leader : all) {
    int64_t looked_ns = cluster::steady_ns();
    bool led_by_another = false;
    const auto lives = [&] {
      if (cluster::steady_ns() - looked_ns >= kEpochEveryNs) {
        looked_ns = cluster::steady_ns();
        const std::optional<cluster::Epoch> newest = newest_known();
        led_by_another = newest && newest != search_->newest &&
                         newest->members.at(static_cast<size_t>(newest->leader)).index != leader.index;
      }
      return !led_by_another && lease_moves();
    };
    Result<cluster::Place> place =
        cluster::join(leader.address, leader.port, run_ / "cluster", hello_of(options_), deadline_ns, stopped,
                      std::min(deadline_ns, cluster::steady_after(kOneTryS)), lives, [&] {
                        feed(member::AtDoor{});
                        return rule_.joins_until_ns().value();
                      });
    if (place.ok()) return follow(std::move(place).value());
    Error error = std::move(place).error();
    if (error.code == ErrorCode::kTimeout && cluster::steady_ns() < deadline_ns) {
      if (!search_->told && cluster::steady_ns() >= search_->tell_ns) {
        search_->told = true;
        say_("still waits: " + error.message);
      }
      continue;
    }
    // An address of before may be anybody's now.
    if (leader != all.back() && !lease().has_changed() && error.code != ErrorCode::kStopped) continue;
    if (error.code == ErrorCode::kTimeout) error.code = ErrorCode::kUnavailable;
    return feed(member::JoinFailed{std::move(error)});
  }
  if (all.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(kLookMs));
  if (const std::optional<int64_t> code = code_in_end_file()) return feed(member::EndFound{*code});
  const std::optional<cluster::Epoch>& newest = search_->newest;
  feed(member::Silent{
      .still_s = lease().still_s(),
      .claims_after_s = lease_still_s(options_.beats, store_.get()),
      .place_in_newest = newest ? place_in(*newest, options_.placement.index) : -1,
      .starts = epoch_.members.empty() && !hosts::membership::first_leads(places_with_memory(run_, newest))});
}

Result<bool> Follower::claim_lead() {
  const cluster::Epoch& newest = search_->newest.value();
  const int64_t place = place_in(newest, options_.placement.index);
  RT_TRY_SET(cluster::Listener listener, cluster::Listener::open(options_.port_from, options_.port_to));
  const cluster::Hello own = hello_of(options_);
  cluster::Epoch next = newest;
  const cluster::Member& before = newest.members.at(static_cast<size_t>(newest.leader));
  const bool starts = epoch_.members.empty();
  next.reason = starts ? fmt::format("a start, led by {}, which trained last", own.name)
                       : fmt::format("{}, which led, is lost: {}", before.name, away_);
  next.number = newest.number + 1;
  next.leader = place;
  next.port = listener.port();
  next.incarnation = cluster::random_hex();
  cluster::Member& self = next.members.at(static_cast<size_t>(place));
  if (starts) address_ = cluster::own_address_towards(options_.placement.leader);
  self = {own.name, address_.empty() ? self.address : address_, own.boot_id, own.index};
  RT_TRY_SET(const bool made, store_->claim(next));
  if (!made) return false;
  say_(fmt::format("this host leads from here on, in epoch {}: {}", next.number, next.reason));
  lead_ =
      Lead{std::move(listener), std::move(next), std::make_unique<cluster::Lease>(store_), starts ? -1 : before.index};
  return true;
}

bool Follower::take_next(int wait_ms) {
  if (inbox_.empty() && wait_ms > 0) {
    pollfd ready{board_->fd(), POLLIN, 0};
    ::poll(&ready, 1, wait_ms);
  }
  for (News& news : board_->take()) inbox_.push_back(std::move(news));
  while (!inbox_.empty()) {
    News first = std::move(inbox_.front());
    inbox_.pop_front();
    if (first.peer != peer_) continue;
    if (first.kind == News::Kind::kMessage) {
      take(first.message.what);
    } else {
      peer_ = -1;  // what it said before counts: `end` is its last word
      away_ = std::move(first.why);
      feed(member::LeaderLost{away_});
    }
    return true;
  }
  return false;
}

void Follower::show_phase() {
  if (!options_.board) return;
  const RunPhase phase = rule_.is_running()   ? RunPhase::kTraining
                         : !rule_.is_joined() ? RunPhase::kGathering
                                              : RunPhase::kLoading;
  options_.board->follows(phase, rule_.place());
}

void Follower::turn(const std::function<bool()>& stopped) {
  show_phase();
  if (rule_.joins_until_ns()) {
    look_for_leader(stopped);
  } else {
    take_next(kLookMs);
  }
  feed(member::Tick{});
}

Result<std::optional<HostSegment>> Follower::next_segment(const std::function<bool()>& stopped) {
  over_.reset();
  feed(member::Closed{});
  while (!opens_ && !over_) {
    turn(stopped);
    if (!opens_ && !over_ && stopped()) feed(member::LeaveNow{});
  }
  if (over_) RT_TRY(*std::exchange(over_, std::nullopt));
  return std::exchange(opens_, std::nullopt);
}

/// What ranks and saves need of it, then what the rule does.
void Follower::take(const hosts::Message& message) {
  const auto runs = [this](uint64_t incarnation) { return rule_.is_running() && incarnation == rule_.incarnation(); };
  const auto take_copied = [&](uint64_t incarnation, int64_t step, auto how) {
    if (options_.replicas && runs(incarnation)) (*options_.replicas.*how)(step);
  };
  std::visit(hosts::Overloaded{
                 [&](const hosts::Promise& one) {
                   saves_.promised(one.slot.step);
                   if (node_)
                     static_cast<void>(node_->promise(from_wire(one.slot)));  // if not, FollowerSaves refuses the save
                 },
                 [&](const hosts::AllCopied& one) { take_copied(one.incarnation, one.step, &Replicas::agreed); },
                 [&](const hosts::NotAllCopied& one) { take_copied(one.incarnation, one.step, &Replicas::dropped); },
                 [&](const hosts::AskClock& one) {
                   tell(hosts::Clock{one.asked_ns, telemetry::trace_clock_ns()});
                 },
                 [&](const hosts::Kill& one) {
                   if (one.rank < options_.world() && rule_.is_running()) hooks_.kill(one.rank);
                 },
                 [&](const hosts::Put& one) {
                   if (runs(one.incarnation)) hooks_.put(one.key, one.value);
                 },
                 [&](const hosts::Look&) {
                   if (!rule_.is_running()) return;
                   std::vector<agent::RankState> states = hooks_.states();
                   std::erase_if(states, [&](const agent::RankState& rank) {
                     return !node_->arena().ranks().contains(rank.rank);
                   });
                   tell(hosts::Ranks{rule_.incarnation(), to_wire(states)});
                 },
                 [&](const hosts::AskStacks&) {
                   if (rule_.is_running()) hooks_.read_stacks([this](auto stacks) { tell_stacks(stacks); });
                 },
                 [&](const auto&) { take_check(message); },
             },
             message);
  feed(member::Told{message});
}

json Follower::end_failure() const {
  if (!rule_.end()) return {};
  const json failure = rule_.end()->failure.value_or(json());
  return failure.is_object() || !end_told() ? failure : json{{"message", rule_.end()->text}};
}

/// A check of hosts, for which no rank runs.
void Follower::take_check(const hosts::Message& message) {
  const bool of_check = std::holds_alternative<hosts::Measure>(message) ||
                        std::holds_alternative<hosts::PutMeasured>(message) ||
                        std::holds_alternative<hosts::EndMeasure>(message);
  if (!of_check || rule_.is_running()) return;
  if (!checker_) {
    checker_ = std::make_unique<HostChecker>(
        HostChecker::Callbacks{.tell = [this](hosts::Measured measured) { tell(std::move(measured)); },
                               .publish = [this](hosts::PutMeasured value) { tell(std::move(value)); }});
  }
  take_check_message(*checker_, message, options_.interface_address);
}

// --- a segment -----------------------------------------------------------------------------------------------------

Status Follower::open(Segment parts) {
  RT_CHECK(segment_ && !node_, "a segment is open already, or none has begun");
  parts_.emplace(std::move(parts));
  stop_passed_on_ = false;
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
                                    .place = rule_.place(),
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
  const bool needless = rule_.end() && !rule_.end()->keep.value_or(false);
  if (node_ && (needless || rule_.is_displaced())) node_->keep_memory(false);
  node_.reset();
  parts_.reset();
}

Status Follower::refuse(const Error& why, const std::function<bool()>& stopped) {
  over_.reset();
  for (feed(member::Refused{why}); !over_; feed(member::Tick{})) {
    take_next(kLookMs);
    if (!over_ && stopped()) feed(member::LeaveNow{});
  }
  return *std::exchange(over_, std::nullopt);
}

Result<ckpt::RestoreChoice> Follower::next_generation(int64_t) {
  over_.reset();
  lets_run_ = false;
  if (options_.replicas) options_.replicas->halt();
  const auto leaves = [this] { return parts_->control.leave_signal() != 0; };
  const auto stopped = [&] { return leaves() || parts_->control.stop_asked(); };
  for (feed(member::Idled{}); !over_ && !lets_run_; saves_.look(memory().promised())) {
    pass_on_stop();
    if (!over_ && leaves()) feed(member::LeaveNow{});
    if (!over_) turn(stopped);
  }
  if (over_) RT_TRY(*std::exchange(over_, std::nullopt));
  return *std::exchange(choice_, std::nullopt);
}

/// The ranks of what was loaded last.
void Follower::let_run(const member::Run& run) {
  RT_CHECK(choice_ && choice_->incarnation == rule_.incarnation(), "ranks start, and nothing was loaded for them");
  saves_.resumed(choice_->step, memory().promised(), run.promised);
  if (checker_) checker_->stop();  // of a leader that was lost over it
  paces_.clear();
  lets_run_ = true;
}

/// No rank runs here.
void Follower::tell_memory(int64_t ask) {
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
  if (options_.replicas && std::ssize(order.peers) == options_.hosts()) {
    options_.replicas->begin(order.epoch, order.peers[static_cast<size_t>(buddy_of(rule_.place(), options_.hosts()))],
                             slot_of(choice));
  }
  return choice;
}

void Follower::publish(const std::string& key, const std::string& value) {
  tell(hosts::Put{rule_.incarnation(), key, value});
}

bool Follower::save_under_way() {
  const std::vector<ckpt::SlotView> views = node_->arena().views();
  return std::ranges::any_of(views, [](const ckpt::SlotView& slot) { return slot.saving && slot.whole; });
}

void Follower::on_readable() {
  while (take_next(0)) {
  }
}

/// As if one of them had failed.
void Follower::stop_ranks(const std::string& why) {
  agent::Failure failure{.rank = first_rank(), .host = true};
  failure.status.exit_code = Error{ErrorCode::kPeerLost, ""}.exit_code();
  failure.message = why;
  parts_->control.fail(std::move(failure));
}

void Follower::on_failing(const agent::Failure& failure) { feed(member::Failing{to_wire(failure)}); }

void Follower::on_rank_error(const agent::Failure& error) {
  tell(hosts::RankError{rule_.incarnation(), to_wire(error)});
}

void Follower::tell_stacks(const std::vector<agent::RankStacks>& stacks) {
  hosts::Stacks all{rule_.incarnation(), {}};
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
  for (const auto& [rank, event] : std::exchange(paces_, {})) tell(hosts::RankEvent{rule_.incarnation(), rank, event});
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
  tell(hosts::RankEvent{rule_.incarnation(), rank, event});
}

void Follower::on_rank_exit(const agent::ExitStatus& status) {
  if (lies_behind_a_wild_write(status)) node_->distrust_memory();
}

bool Follower::all_finished() {
  feed(member::AllLeft{});
  return rule_.end() || rule_.goes_on();
}

void Follower::on_tick() {
  show_phase();
  const double now_s = static_cast<double>(cluster::steady_ns()) / 1e9;
  for (const ckpt::PersistEvent& event : node_->take_events()) {
    if (event.status.ok()) continue;
    const std::string& why = event.status.error().message;
    if (const auto line = failed_saves_.failed(event.step, why, now_s)) parts_->narrator.say(*line);
  }
  if (const auto line = failed_saves_.due(now_s)) parts_->narrator.say(*line);
  saves_.look(memory().promised());
  tell_paces();
  feed(member::Tick{});
}

void Follower::stop(int signal) {
  stop_passed_on_ = true;
  feed(member::WantsStop{signal});
}

/// One that came while a callback kept the loop.
void Follower::pass_on_stop() {
  if (!stop_passed_on_ && parts_->control.stop_asked()) stop(SIGTERM);
}

void Follower::ask_save(const std::string& by) { feed(member::WantsSave{by}); }

Result<int> Follower::conclude(const agent::Outcome& outcome) {
  if (outcome.kind == agent::EndKind::kLeftBySignal) return outcome.exit_code;
  if (ended()) return *ended();
  return Error{ErrorCode::kUnavailable, "the leader has not said how the run ended"};
}

}  // namespace cairn::tools
