#pragma once
// The other hosts of a run, as the leader's agent has them: who is there, what their ranks do, and what they are told.
// It gathers them, names who is away and waits for it, gives its place to a spare, or counts the places anew where
// fewer hosts may train (resize), and gives each membership an epoch of its own. It shows in the run folder that it
// lives (cluster::Lease), for as long as it has not lost more than half of its hosts; another one may lead after that,
// and this one is told (check_epoch).
//
// A host's index is the launcher's. Its place is that of its ranks in the world; a spare has none.
//
// Threads: the agent's loop; LeaderSaves has those of the persisters.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ckpt/host_memory.h"
#include "runtime/agent/supervisor.h"
#include "runtime/agent/wait_report.h"
#include "runtime/cluster/connection.h"
#include "runtime/cluster/epoch_store.h"
#include "runtime/cluster/join.h"
#include "runtime/cluster/lease.h"
#include "runtime/cluster/placement.h"
#include "runtime/cluster/switchboard.h"
#include "runtime/config/cluster.h"
#include "runtime/config/numbers.h"
#include "runtime/core/result.h"
#include "runtime/host/nccl_check.h"
#include "runtime/hosts/generation.h"
#include "runtime/hosts/membership.h"
#include "runtime/kernels/isa.h"
#include "tools/run/check/check_leader.h"
#include "tools/run/hosts/host_saves.h"
#include "tools/run/hosts/host_wire.h"
#include "tools/run/hosts/replicas.h"
#include "tools/run/hosts/run_board.h"

namespace cairn::tools {

/// Of this host among those of its run; the same for a leader and for who follows.
struct HostOptions {
  cluster::Placement placement;
  int64_t spares = 0;     // of the placement's hosts, as many as train nothing now
  int64_t hosts_min = 0;  // fewest that the run goes on with; 0: as many as train at the start
  int64_t ranks = 0;      // of each host
  std::string build, recipe_hash;
  DeviceChoice device = DeviceChoice::kCpu;  // where its ranks compute
  std::string comm;                          // by what they communicate there: CommChoice::word(); empty on CPUs
  std::string attention;                     // whose kernels it has there: AttentionChoice::word()
  bool has_cluster_file = false, groups_cross_hosts = false;  // ClusterConfig::groups_cross_hosts
  int64_t port_from = 24512, port_to = 25535;
  cluster::Beats beats;
  double join_s = 300;        // for all hosts to come, at the start
  double wait_s = 600;        // for a host that was lost to come back
  double spare_after_s = 10;  // then a spare takes the place of a host that was lost
  double fewer_after_s = 10;  // then fewer hosts train where no spare is left
  bool spare_after_said = false;
  double answer_s = 600;  // for a connected host to answer the leader, while no rank runs

  HostCheck check = HostCheck::kOff;
  bool exclude_slow = false;  // what a check finds slow, too

  cluster::StoreOptions store;  // who decides which host leads

  std::shared_ptr<Replicas> replicas;  // of this host, for the life of its agent; null: it keeps none

  std::shared_ptr<RunBoard> board;  // for the life of this agent; null: nothing is shown

  host::NcclVariables nccl;  // of this host's ranks, where they compute on GPUs
  std::string gid_types;     // host::NcclCheck::gid_types

  std::string interface_address;  // of this host, for its ranks; empty: the one that the leader is reached by

  int64_t hosts() const { return placement.hosts - spares; }  // that train: so many places
  int64_t world() const { return hosts() * ranks; }
  /// From here on so many do.
  void train_with(int64_t hosts) { spares = placement.hosts - hosts; }
};

cluster::Hello hello_of(const HostOptions& options);
/// This machine's name.
std::string own_host_name();

/// So long the lease of a leader stands still before another host claims the lead. `store` may be null: there is none.
double lease_still_s(const cluster::Beats& beats, const cluster::EpochStore* store);

/// The lead of an epoch, claimed before its hosts have gathered: where they find the new leader.
struct Lead {
  cluster::Listener listener;
  cluster::Epoch epoch;
  std::unique_ptr<cluster::Lease> lease;  // from the claim on: what comes until they gather may take its time
  int64_t led_before = -1;                // the host that is lost; -1: none is, all agents start
};

class Fleet final {
 public:
  /// What the leader does with what comes from the hosts. All but `say` within take_news().
  struct Callbacks {
    std::function<void(const std::string&)> say;
    std::function<bool()> stopped;  // asked while this waits
    std::function<void(agent::Failure)> fail;
    std::function<void(const std::string& key, const std::string& value)> put;  // of a rank that meets others
    std::function<void(int64_t rank, const nlohmann::json& event)> event;
    std::function<void(int signal)> stop;
    std::function<void(const std::string& by)> ask_save;
    /// Empty where no segment of the run records events: `say` has it then.
    std::function<void(const std::string& host, const std::string& why)> spare_lost;
    std::function<ckpt::HostMemory()> own_memory;  // of this host; no rank runs
    /// A rank of a host has failed by itself, or the host was lost; its time is by this host's clock.
    std::function<void(int64_t host, agent::Failure)> error;
    std::function<void(std::vector<agent::RankStacks>)> stacks;  // as asked for
    std::function<Status(const CheckReport&)> checked;           // as asked for; it may exclude hosts
  };

  /// Listens, on the first free port of the range. `run`: the folder, which is this process's. `before`: the newest
  /// epoch when this start began; one that has begun since wins. Errors: kUnavailable: no port is free; the store's.
  static Result<std::unique_ptr<Fleet>> open(HostOptions options, const std::filesystem::path& run,
                                             const std::optional<cluster::Epoch>& before);
  /// As a host does that has claimed the lead.
  static Result<std::unique_ptr<Fleet>> open(HostOptions options, const std::filesystem::path& run, Lead lead);
  ~Fleet();

  int64_t port() const { return door_.port(); }
  /// The place of this host.
  int64_t place() const { return rule_.own_place(); }
  /// Passed on to the rule. Before gather().
  void allow_sizes(std::set<int64_t> sizes) { rule_.allow_sizes(std::move(sizes)); }
  /// All places are taken by hosts that are there, and the epoch begins. `say` and `stopped` of the callbacks count
  /// already. Errors: among others kUnavailable where smaller() says how to go on.
  Status gather();
  /// Set when lost hosts have no replacement: the number of hosts for resize(). look() fails with that.
  std::optional<int64_t> smaller() const { return rule_.smaller(); }
  /// Hosts without a place are there, and the run could go on with so many.
  std::optional<int64_t> larger() const;
  /// The next epoch: this many places, or another number where a host was lost since (options().hosts()). The segment
  /// ends; begin() follows.
  Status resize(int64_t hosts);
  void use(Callbacks callbacks) { callbacks_ = std::move(callbacks); }

  /// What is trained from here on, on all hosts.
  void begin(HostSegment segment);
  LeaderSaves& saves() { return saves_; }
  const std::string& token() const { return token_; }
  /// The copy of this step of a place is complete; or not, and why. Any thread.
  void copied(int64_t place, uint64_t incarnation, int64_t step, int64_t bytes, const std::string& why);
  /// Of carry_out(): where each place's host takes copies.
  const std::vector<PeerAddress>& peers() const { return peers_of_places_; }
  /// Of all hosts, so far: steps that were copied, and bytes of banks that went over the network for them.
  struct Copies {
    int64_t steps = 0, bytes = 0, failed = 0;
    std::string why;  // the last one failed
  };
  Copies copies() const {
    const std::lock_guard lock(of_copies_);
    return copies_;
  }
  const cluster::Epoch& epoch() const { return epoch_; }
  /// That no later epoch than this one has begun. Any thread. Errors: kUnavailable, naming who leads now; kTimeout: the
  /// store does not answer, and it is not known.
  Status check_epoch() const;
  /// Whether no other host can lead by now: its lease is fresh. Else check_epoch() says it. Any thread.
  bool leads_surely() const;
  /// Of this host, as its ranks publish it.
  const std::string& own_address() const {
    return options_.interface_address.empty() ? epoch_.members.at(static_cast<size_t>(place())).address
                                              : options_.interface_address;
  }
  const HostOptions& options() const { return options_; }
  /// That the ranks of all hosts use: the lowest of those with a place.
  kernels::GemmIsa isa() const { return isa_; }

  /// Readable when there is news: take_news() then.
  int fd() const { return board_.fd(); }
  void take_news();
  /// Now and then: hosts that come while ranks run become spares.
  void on_tick();

  using Wants = hosts::generation::Wants;
  /// What all other hosts hold in memory; no rank runs on any. Waits for hosts that are away, as `wants` says. Errors:
  /// kStopped; kUnavailable: it has waited in vain, or smaller() is set.
  Result<ckpt::HostMemory> look(Wants wants);
  /// After look(): all other hosts begin to carry this out. `memory`: of this host.
  void order(const ckpt::RestoreChoice& choice, const ckpt::Arena& memory);
  /// This host has (`own`): waits until all have. Errors: what went wrong, with its host's name; kPeerLost: a host was
  /// lost, and look() finds out what is left.
  Status carried_out(const Status& own);
  /// After look(): each other host promises to save its part of what is whole in this slot, some that of a lost host.
  void promise(const ckpt::WholeSlot& slot);

  /// The ranks of the incarnation that was carried out start.
  void go(uint64_t incarnation);
  /// What a rank of this host has published, for those of the others.
  void publish(const std::string& key, const std::string& value);
  /// The ranks that run are being stopped, on this host too: those of the others at once.
  void halt(const std::string& why);
  /// Waits until the ranks of all hosts that are there have stopped, and their errors are known; up to `limit_ms`.
  void wait_stopped(int64_t limit_ms);
  /// The longest of the hosts that are there, as far as it is known.
  int64_t round_trip_ns() const;
  /// Of a rank's host.
  int64_t index_of_rank(int64_t rank) const;
  std::string name_of_rank(int64_t rank) const;
  /// nullopt: it has none.
  std::optional<int64_t> place_of(int64_t index) const;
  /// Another host can take a place at once, or one fewer may train.
  bool can_spare_one() const { return rule_.can_spare_one(); }
  /// Before ranks start again all hosts are measured, and the links between them: Callbacks::checked.
  void check_hosts(std::string dtype) { check_dtype_ = std::move(dtype); }
  /// The host of this place leaves the run and is not let in again: a spare takes its place. Where it is this one it
  /// resigns: it is to end, and another host leads. Errors: what has to be written could not be.
  Status exclude(int64_t place, const std::string& reason, agent::FailureClass why);
  /// Why this host, which led, is excluded; empty: it is not.
  const std::string& resigned() const { return resigned_; }

  /// All ranks of the others have ended with 0.
  bool all_left() const { return generation_.all_left(); }
  /// Where ranks are, and what they wait for: asked for, and what has been told last.
  void ask_where_ranks_are();
  /// Of the ranks of all others, or of some: those of the hosts of `first` at least. Callbacks::stacks.
  void ask_stacks(const std::vector<int64_t>& first);
  /// How far the clock of a rank's host (telemetry::trace_clock_ns) is ahead of this one's: asked for, and as well as
  /// it is known.
  void ask_clocks();
  int64_t clock_ahead_ns(int64_t rank) const;
  void put_in(std::vector<agent::RankState>& ranks) const;
  /// Of a rank of another host: it is killed, to see the run recover.
  void kill(int64_t rank);
  /// The run is over, also for them: they leave with this code. `keep`: their memory stays. `failure`: failure_record()
  /// of what ended it, for their launchers; null: nothing failed.
  void end(int code, bool keep, const std::string& text, const nlohmann::json& failure = {});

 private:
  struct Host {
    int64_t index = 0;
    std::string name, address, boot_id;
    int64_t kernel_level = 0;
    int64_t peer = -1;                                                        // of the switchboard; -1: it is away
    std::vector<agent::RankState> states;                                     // as reported last by the ranks that run
    int64_t clock_ahead_ns = 0, clock_round_ns = INT64_MAX, clock_at_ns = 0;  // of the answer that came soonest
  };

  static constexpr int64_t kNoneRuns = -1;
  /// A copy that this host gives, on another thread.
  struct GivenHere {
    std::mutex mutex;
    std::optional<Status> done;
  };

  Fleet(HostOptions options, hosts::membership::Options rule, std::filesystem::path run, cluster::Listener listener,
        std::shared_ptr<cluster::EpochStore> store, std::string token, std::unique_ptr<cluster::Lease> lease);
  /// `wish`: Gather or Resize.
  Status assemble(const hosts::membership::Event& wish);
  void feed(const hosts::membership::Event& event);
  hosts::membership::Heard heard();
  void claim(const hosts::membership::Claim& next);
  Status begin_epoch(const hosts::membership::Claim& claim, const std::vector<cluster::Joined>& joined);
  cluster::Epoch epoch_of(const hosts::membership::Claim& claim) const;
  static Host host_of(const cluster::Joined& member);
  bool trains(const Host& host) const { return rule_.place(host.index) >= 0; }
  RunPhase phase() const {
    return generation_.is_running()   ? RunPhase::kTraining
           : generation_.is_loading() ? RunPhase::kLoading
                                      : RunPhase::kGathering;
  }
  void admit(std::vector<cluster::Joined> joined);
  void settle_places();
  void settle_isa();
  void tell_begin(const Host& host);
  void take(const cluster::News& news);
  void take_message(Host& host, const hosts::Message& message);
  void take_of_ranks(Host& host, const hosts::Message& message);
  static void take_clock(Host& host, int64_t asked_ns, int64_t there_ns);
  void lose(Host& host, const std::string& why);
  void dismiss(Host& host, int code, bool keep, const std::string& text, const nlohmann::json& failure);
  void take_error(const Host& host, const hosts::Failure& failure);
  bool take_early(const cluster::News& news);
  Host* by_peer(int64_t peer);
  void tell(const Host& host, hosts::Message message);
  void tell_all(const hosts::Message& message);
  /// So often at least somebody's stop is seen.
  bool wait_for_news(int wait_ms = 50);
  bool runs(uint64_t incarnation) const { return running_ == static_cast<int64_t>(incarnation); }
  void feed(const hosts::generation::Event& event);
  void perform(const hosts::generation::Action& action);
  Status drive();
  Status gather_for(Wants wants);
  std::vector<int64_t> holders_of_copies() const {
    return options_.replicas ? options_.replicas->holders() : std::vector<int64_t>();
  }
  void ask(int64_t number);
  void give(const hosts::generation::Give& order);
  Status measure_hosts();
  void watch_lease();
  void show_hosts();
  HostStatus status_of(const Host& host, const std::map<int64_t, double>& silent_s) const;
  bool is_superseded();
  /// How long this process stood still just now; 0: it did not.
  double stood_still_s() const { return lease_->stood_still_s(cluster::steady_ns(), options_.beats.dead_after_s); }
  bool is_newer(const std::optional<cluster::Epoch>& epoch) const;

  HostOptions options_;
  const std::filesystem::path run_, checkpoints_;
  const std::shared_ptr<cluster::EpochStore> store_;
  const double claims_after_s_;  // of membership::claims_after_s
  const std::string token_;
  std::string incarnation_;
  Callbacks callbacks_;
  cluster::Epoch epoch_;                  // no members: none has begun
  std::atomic<int64_t> known_epoch_ = 0;  // the newest one that was there when this began, or its own
  int64_t looked_ns_ = 0;                 // for a newer one
  bool starts_ = false;                   // with all agents, and this host has claimed the lead of that
  int64_t shown_ns_ = 0;                  // when the board got the hosts last
  hosts::membership::Leader rule_;
  std::optional<Status> outcome_;  // of assemble()
  hosts::generation::Leader generation_;
  std::optional<Status> stage_;  // of drive()
  ckpt::HostMemory common_;      // of look()
  kernels::GemmIsa isa_ = kernels::gemm_isa();
  std::string own_address_;  // as the others reach it; empty: not known yet
  std::optional<HostSegment> segment_;
  std::map<int64_t, Host> hosts_;             // the others by index
  std::atomic<int64_t> running_ = kNoneRuns;  // the incarnation of the ranks that run
  int64_t peers_ = 0;
  std::string resigned_;
  std::string check_dtype_;                // of check_hosts(); empty: none is asked for
  std::unique_ptr<CheckLeader> check_;     // under way
  std::shared_ptr<GivenHere> given_here_;  // by this host, under way
  std::vector<PeerAddress> peers_of_places_;
  mutable std::mutex of_copies_;     // of what follows
  int64_t copied_step_ = -1;         // that is being copied
  std::set<int64_t> copied_places_;  // whose copies of it are complete
  Copies copies_;
  std::mutex of_peers_;
  std::map<int64_t, int64_t> host_of_peer_;  // those with a place; guarded by of_peers_: for the switchboard's thread
  LeaderSaves saves_;
  cluster::Door door_;
  std::unique_ptr<cluster::Lease> lease_;
  cluster::Switchboard board_;  // last: its thread uses what is above
};

}  // namespace cairn::tools
