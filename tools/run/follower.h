#pragma once
// The agent's coordinator on a host that follows: it does as the leader says (fleet.h), tells it what happens here, and
// keeps this host's memory while the leader is away. Where the leader lives no more, a host with a place claims the
// lead.
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
#include "runtime/plan/plan.h"
#include "tools/run/check_leader.h"
#include "tools/run/coordinator.h"
#include "tools/run/fleet.h"
#include "tools/run/host_saves.h"
#include "tools/run/host_wire.h"
#include "tools/run/narrator.h"
#include "tools/run/overdue.h"
#include "tools/run/spare_memory.h"

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
  const std::optional<int>& ended() const { return ended_; }
  /// Of what has ended the run (failure_record.h), as the leader has said; null: nothing failed, or it is not known.
  const nlohmann::json& end_failure() const { return end_failure_; }
  /// The leader's own words for it are printed.
  bool end_told() const { return end_told_; }
  /// What the ranks of this host are for follows from the next segment, or this host has lost its place.
  bool goes_on() const { return next_.has_value() || displaced_ || lead_.has_value(); }
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
            .decides = epoch_.leader * options_.ranks,
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
  bool take_early(const cluster::News& news);
  Status join(double patience_s, const std::function<bool()>& stopped);
  Status try_leader(const std::string& leader, int64_t port, cluster::LeaseWatch& lease, int64_t deadline_ns,
                    const std::function<bool()>& stopped);
  /// `newest`: the epoch whose leader lives no more. True: this host leads the next one. False: another was first.
  Result<bool> claim_lead(const cluster::Epoch& newest);
  std::optional<cluster::Epoch> newest_known();
  void take_end_file();
  int64_t first_rank() const { return place_ * options_.ranks; }
  /// The next message; nullopt where there was none for `wait_ms`.
  std::optional<hosts::Message> receive(int wait_ms);
  void tell(hosts::Message message);
  /// What is taken in the same way whether ranks run or not. False: it is something else.
  bool take_common(const hosts::Message& message);
  void take_begin(const hosts::Begin& begin);
  void take_end(const hosts::End& end);
  void remove_old_memory(const std::string& folder);
  void take_place(int64_t place, int64_t hosts);
  void answer_halt();
  void give_copy(const hosts::Give& order);
  bool take_check(const hosts::Message& message);
  Status attach_replicas(const ckpt::RunText& run);
  Result<ckpt::RestoreChoice> carry_out(const hosts::Resume& order);
  void stop_ranks(const std::string& why);
  void tell_stop();
  void tell_asked();
  void tell_stacks(const std::vector<agent::RankStacks>& stacks);
  void tell_paces();

  HostOptions options_;
  const std::filesystem::path run_;
  const std::function<void(const std::string&)> say_;
  std::shared_ptr<cluster::EpochStore> store_;  // null: the run has none yet
  FollowerSaves saves_;
  std::string address_;     // of this host, as the leader sees it
  cluster::Epoch epoch_;    // no members: it has joined none yet
  int64_t place_ = -1;      // of this host; -1: it is a spare
  bool displaced_ = false;  // the memory of the segment that is open is of another place, or of another number of hosts
  std::optional<Lead> lead_;
  const std::string end_before_;   // what the file of the end held when this began
  int64_t peer_ = -1, peers_ = 0;  // the leader, for the switchboard; -1: it is away
  std::string away_;
  std::optional<HostSegment> segment_, next_;  // that this host is at; that follows it
  std::optional<int> ended_;
  nlohmann::json end_failure_;
  bool keep_memory_ = false;  // the leader says so of the end
  bool end_told_ = false;
  FailedSaves failed_saves_;

  std::optional<Segment> parts_;
  std::unique_ptr<ckpt::CheckpointNode> node_;
  std::optional<ckpt::RestoreChoice> choice_;  // carried out, and no rank has been started for it
  std::set<int64_t> leader_promises_;          // to save, when that was decided
  uint64_t incarnation_ = 0;                   // of the ranks that run
  kernels::GemmIsa isa_ = kernels::gemm_isa();
  std::deque<cluster::News> inbox_;
  AgentHooks hooks_;
  bool running_ = false;  // ranks of that incarnation
  bool told_left_ = false, stopped_by_leader_ = false;
  int64_t halt_ = -1;                        // that the leader waits for an answer to; -1: none
  std::map<int64_t, nlohmann::json> paces_;  // of ranks, that the leader has not been told
  int64_t paces_told_ns_ = 0;
  int stop_signal_ = 0;
  bool stop_told_ = false;
  std::string asked_by_;  // a signal that asks for a save, and has to reach the leader yet; empty: none

  std::atomic<int64_t> early_peer_{-1};          // peer_, for other threads
  std::unique_ptr<cluster::Switchboard> board_;  // its thread uses what is above
  SpareMemory spare_memory_;                     // while it has no place
  std::unique_ptr<HostChecker> checker_;         // its thread uses the board; null: nothing was to be measured yet
};

/// Where the leader says that it listens: a file of RUN/cluster. For who joins; the join itself proves who it is.
Status write_leader_port(const std::filesystem::path& run, int64_t port);
std::optional<int64_t> read_leader_port(const std::filesystem::path& run);

/// The leader's last word: a file of RUN/cluster, for hosts that no packet of it reached.
Status write_end(const std::filesystem::path& run, const std::string& incarnation, int code);

/// Null: the run has none yet, or none that can be asked. Makes no folder.
std::shared_ptr<cluster::EpochStore> find_store(const std::filesystem::path& run, const HostOptions& options);
/// nullopt: there is none. Makes no folder. Errors: as of EpochStore::newest().
Result<std::optional<cluster::Epoch>> newest_epoch(const std::filesystem::path& run, const HostOptions& options);
/// Whether an agent of another host leads this run, by its newest epoch, and lives. Waits for a sign of it.
bool is_led_by_another(const std::filesystem::path& run, const HostOptions& options,
                       const std::optional<cluster::Epoch>& newest);

}  // namespace cairn::tools
