#pragma once
// The agent's coordinator on a host that follows: it feeds the rule of members (runtime/hosts/member.h) with what the
// leader says (fleet.h) and what happens here, and carries out what the rule decides. Where the leader's lease has
// expired, a host with a place claims the lead.
//
// Threads: the agent's loop; FollowerSaves has those of the persister.

#include <atomic>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ckpt/foreign.h"
#include "ckpt/node.h"
#include "runtime/cluster/epoch_store.h"
#include "runtime/cluster/lease.h"
#include "runtime/cluster/switchboard.h"
#include "runtime/core/result.h"
#include "runtime/hosts/member.h"
#include "runtime/plan/plan.h"
#include "tools/run/agent/coordinator.h"
#include "tools/run/agent/narrator.h"
#include "tools/run/agent/overdue.h"
#include "tools/run/check/check_leader.h"
#include "tools/run/hosts/fleet.h"
#include "tools/run/hosts/host_saves.h"
#include "tools/run/hosts/host_wire.h"
#include "tools/run/hosts/spare_memory.h"

namespace cairn::tools {

class Follower final : public Coordinator {
 public:
  /// `say`: to this host's console.
  Follower(HostOptions options, std::filesystem::path run, std::function<void(const std::string&)> say);
  ~Follower() override;

  /// Joins the leader and waits for what is to be trained. nullopt: the run has ended, or this host leads from here on
  /// (take_lead). `stopped` is asked all the while.
  Result<std::optional<HostSegment>> next_segment(const std::function<bool()>& stopped);

  struct Segment {
    const Plan& plan;
    Narrator& narrator;
    agent::RunControl& control;
    ckpt::OpenForeign open_foreign;
  };
  /// Takes the memory of this host's ranks for the segment, or makes it. The parts outlive close().
  Status open(Segment parts);
  /// open() has failed: the leader is told, which ends the run. Returns `why`.
  Status refuse(const Error& why, const std::function<bool()>& stopped);
  void close() override;
  /// How this process leaves, as the leader has said.
  std::optional<int> ended() const {
    return rule_.end() ? std::optional(static_cast<int>(rule_.end()->code)) : std::nullopt;
  }
  /// Of what has ended the run (failure_record.h), as the leader has said; null: nothing failed, or it is not known.
  nlohmann::json end_failure() const;
  /// The leader's own words for it are printed.
  bool end_told() const { return rule_.end() && !rule_.end()->text.empty(); }
  /// What the ranks of this host are for follows from the next segment, or this host has lost its place.
  bool goes_on() const { return rule_.goes_on(); }
  /// Of all ranks now.
  int64_t world() const { return options_.world(); }
  /// The lead that this host has claimed. nullopt: none.
  std::optional<Lead> take_lead() { return std::exchange(lead_, std::nullopt); }

  Result<ckpt::RestoreChoice> next_generation(int64_t generation) override;
  ckpt::Arena& memory() override { return node_->arena(); }
  Result<Fd> ward() override { return options_.replicas ? options_.replicas->descriptor() : Result<Fd>(Fd()); }
  HostPlace place() const override {
    return {.hosts = options_.hosts(),
            .address = options_.interface_address.empty() ? address_ : options_.interface_address,
            .decides = rule_.leader_place() * options_.ranks,
            .isa = isa_};
  }
  void publish(const std::string& key, const std::string& value) override;
  void use(AgentHooks hooks) override { hooks_ = std::move(hooks); }
  bool watches_waits() const override { return false; }
  void part_complete() override { node_->notify(); }
  bool save_under_way() override;
  void stop(int signal) override;
  void ask_save(const std::string& by) override;
  Result<int> conclude(const agent::Outcome& outcome) override;
  void on_rank_event(int64_t rank, const nlohmann::json& event) override;
  void on_rank_exit(const agent::ExitStatus& status) override;
  void on_rank_error(const agent::Failure& error) override;
  void on_failing(const agent::Failure& failure) override;
  void on_readable() override;
  void on_tick() override;
  bool all_finished() override;
  int news_fd() const override { return board_->fd(); }

 private:
  /// For a leader: since it was lost, or since the start.
  struct Search {
    int64_t tell_ns = 0;  // then this host says what it waits for
    bool told = false;
    std::optional<cluster::Epoch> newest;
    std::shared_ptr<cluster::EpochStore> watched;  // by `lease`
    std::optional<cluster::LeaseWatch> lease;
  };

  bool take_early(const cluster::News& news);
  void feed(const hosts::member::Event& event);
  void perform(const hosts::member::Action& action);
  void say(const std::string& text) { parts_ ? parts_->narrator.say(text) : say_(text); }
  /// One look for a leader, or the next message of the one that is there, which is waited for a moment.
  void turn(const std::function<bool()>& stopped);
  void show_phase();
  cluster::LeaseWatch& lease();
  bool lease_moves() { return lease().still_s() < lease_still_s(options_.beats, store_.get()); }
  void look_for_leader(const std::function<bool()>& stopped);
  /// A host that may lead.
  struct Candidate {
    int64_t index = 0;
    std::string address;
    int64_t port = 0;
    bool operator==(const Candidate&) const = default;
  };
  std::vector<Candidate> leaders() const;
  void follow(cluster::Place place);
  /// The epoch after search_->newest. True: this host leads it. False: another was first.
  Result<bool> claim_lead();
  std::optional<cluster::Epoch> newest_known();
  std::optional<int64_t> code_in_end_file();
  int64_t first_rank() const { return rule_.place() * options_.ranks; }
  /// False: nothing has come in `wait_ms`.
  bool take_next(int wait_ms);
  void take(const hosts::Message& message);
  void tell(hosts::Message message);
  void remove_old_memory(const std::string& folder);
  void tell_memory(int64_t ask);
  void give_copy(const hosts::Give& order);
  void take_check(const hosts::Message& message);
  Status attach_replicas(const ckpt::RunText& run);
  Result<ckpt::RestoreChoice> carry_out(const hosts::Resume& order);
  void let_run(const hosts::member::Run& run);
  void stop_ranks(const std::string& why);
  void pass_on_stop();
  void tell_stacks(const std::vector<agent::RankStacks>& stacks);
  void tell_paces();

  HostOptions options_;
  const std::filesystem::path run_;
  const std::function<void(const std::string&)> say_;
  std::shared_ptr<cluster::EpochStore> store_;  // null: the run has none yet
  FollowerSaves saves_;
  hosts::member::Member rule_;
  std::optional<HostSegment> opens_;  // that the rule wants memory for, in next_segment()
  std::optional<Status> over_;        // the rule ends next_segment(), refuse() or next_generation() so
  bool lets_run_ = false;             // or that one with choice_
  std::optional<Search> search_;      // for a leader
  std::string address_;               // of this host, as the leader sees it
  cluster::Epoch epoch_;              // no members: it has joined none yet
  std::optional<Lead> lead_;
  const std::string end_before_;   // what the file of the end held when this began
  int64_t peer_ = -1, peers_ = 0;  // the leader, for the switchboard; -1: it is away
  std::string away_;
  std::optional<HostSegment> segment_;  // that memory was asked for last
  FailedSaves failed_saves_;

  std::optional<Segment> parts_;
  std::unique_ptr<ckpt::CheckpointNode> node_;
  std::optional<ckpt::RestoreChoice> choice_;  // carried out, and no rank has been started for it
  kernels::GemmIsa isa_ = kernels::gemm_isa();
  std::deque<cluster::News> inbox_;
  AgentHooks hooks_;
  std::map<int64_t, nlohmann::json> paces_;  // of ranks, that the leader has not been told
  int64_t paces_told_ns_ = 0;
  bool stop_passed_on_ = false;  // to the rule

  std::atomic<int64_t> early_peer_{-1};          // peer_, for other threads
  std::unique_ptr<cluster::Switchboard> board_;  // its thread uses what is above
  SpareMemory spare_memory_;                     // while it has no place
  std::unique_ptr<HostChecker> checker_;         // its thread uses the board; null: nothing was to be measured yet
};

/// Where the leader says that it listens: a file of RUN/cluster. For who joins; the join itself proves who it is.
Status write_leader_port(const std::filesystem::path& run, int64_t port);
std::optional<int64_t> read_leader_port(const std::filesystem::path& run);

/// The leader's last word: a file of RUN/cluster, for hosts that no packet of it reached. `keep`: their memory stays.
Status write_end(const std::filesystem::path& run, const std::string& incarnation, int code, bool keep);
/// The index of each place's host in an epoch, whose memory may hold what nothing else does; none where its leader has
/// ended the run and no memory has stayed.
std::vector<int64_t> places_with_memory(const std::filesystem::path& run, const std::optional<cluster::Epoch>& epoch);

/// Null: the run has none yet, or none that can be asked. Makes no folder.
std::shared_ptr<cluster::EpochStore> find_store(const std::filesystem::path& run, const HostOptions& options);
/// nullopt: there is none. Makes no folder. Errors: as of EpochStore::newest().
Result<std::optional<cluster::Epoch>> newest_epoch(const std::filesystem::path& run, const HostOptions& options);
/// Whether this host, which leads what begins, follows: an agent of another host leads this run, by its newest epoch,
/// and lives, or is to lead (membership::first_leads). Waits for a sign of it; prints what for where that takes long.
bool is_led_by_another(const std::filesystem::path& run, const HostOptions& options,
                       const std::optional<cluster::Epoch>& newest);

}  // namespace cairn::tools
