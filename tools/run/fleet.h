#pragma once
// The other hosts of a run, as the leader's agent has them: who is there, what their ranks do, and what they are told.
// It gathers them, names who is away and waits for it, and gives each membership an epoch of its own.
//
// Threads: the agent's loop; LeaderSaves has those of the persisters.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "ckpt/other_hosts.h"
#include "runtime/agent/supervisor.h"
#include "runtime/agent/wait_report.h"
#include "runtime/cluster/connection.h"
#include "runtime/cluster/epoch_store.h"
#include "runtime/cluster/join.h"
#include "runtime/cluster/placement.h"
#include "runtime/cluster/switchboard.h"
#include "runtime/core/result.h"
#include "tools/run/host_saves.h"
#include "tools/run/host_wire.h"

namespace cairn::tools {

/// Of this host among those of its run; the same for a leader and for who follows.
struct HostOptions {
  cluster::Placement placement;
  int64_t spares = 0;  // of the placement's hosts, the last ones: they train nothing now
  int64_t ranks = 0;   // of each host
  std::string build, recipe_hash;
  int64_t kernel_level = 0;  // of this processor: kernels::GemmIsa
  int64_t port_from = 24512, port_to = 25535;
  cluster::Beats beats;
  double join_s = 300;  // for all hosts to come, at the start
  double wait_s = 600;  // for a host that was lost to come back

  std::string interface_address;  // of this host, for its ranks; empty: the one that the leader is reached by

  int64_t hosts() const { return placement.hosts - spares; }  // that train
  int64_t world() const { return hosts() * ranks; }
};

cluster::Hello hello_of(const HostOptions& options);
/// This machine's name.
std::string own_host_name();

class Fleet final : public ckpt::OtherHosts {
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
  };

  /// Listens, on the first free port of the range. `run`: the folder, which is this process's. Errors: kUnavailable: no
  /// port is free.
  static Result<std::unique_ptr<Fleet>> open(HostOptions options, const std::filesystem::path& run);
  ~Fleet() override;

  int64_t port() const { return listener_.port(); }
  /// All hosts are there, and the epoch begins. `say` and `stopped` of the callbacks count already.
  Status gather();
  void use(Callbacks callbacks) { callbacks_ = std::move(callbacks); }

  /// What is trained from here on, on all hosts.
  void begin(HostSegment segment);
  LeaderSaves& saves() { return saves_; }
  const cluster::Epoch& epoch() const { return epoch_; }
  /// That no later epoch than this one has begun. Any thread. Errors: kUnavailable, naming who leads now.
  Status check_epoch() const;
  /// Of this host, as its ranks publish it.
  const std::string& own_address() const {
    return options_.interface_address.empty() ? epoch_.members.front().address : options_.interface_address;
  }
  const HostOptions& options() const { return options_; }

  /// Readable when there is news: take_news() then.
  int fd() const { return board_.fd(); }
  void take_news();

  // --- ckpt::OtherHosts
  Result<ckpt::HostMemory> memory() override;
  void carry_out(const ckpt::RestoreChoice& choice, const ckpt::Arena& memory) override;
  Status carried_out() override;
  void save(const ckpt::WholeSlot& slot) override;

  /// The ranks of the incarnation that was carried out start.
  void go(uint64_t incarnation);
  /// What a rank of this host has published, for those of the others.
  void publish(const std::string& key, const std::string& value);
  /// From here on a host that is away is not waited for: memory() fails.
  void wait_no_more() { waits_ = false; }
  /// The ranks that run are being stopped, on this host too: those of the others at once.
  void halt(const std::string& why);
  /// All ranks of the others have ended with 0.
  bool all_left() const;
  /// Where ranks are, and what they wait for: asked for, and what has been told last.
  void ask_where_ranks_are();
  void put_in(std::vector<agent::RankState>& ranks) const;
  /// Of a rank of another host: it is killed, to see the run recover.
  void kill(int64_t rank);
  /// The run is over, also for them: they leave with this code. `keep`: their memory stays.
  void end(int code, bool keep, const std::string& text);

 private:
  struct Host {
    int64_t index = 0;
    std::string name, address, boot_id;
    int64_t peer = -1;  // of the switchboard; -1: it is away
    std::string away;   // why
    bool left = false;
    std::vector<agent::RankState> states;  // as told last by the ranks that run
    int64_t asked = 0;                     // number of the last halt that it has answered
    std::optional<Result<ckpt::HostMemory>> memory;
    std::optional<Status> carried;
  };

  Fleet(HostOptions options, std::filesystem::path run, cluster::Listener listener, cluster::EpochStore store);
  Status assemble(double patience_s, const std::string& reason);
  void take(const cluster::News& news);
  void take_message(Host& host, const cluster::Message& message);
  void lose(Host& host, const std::string& why);
  bool take_early(const cluster::News& news);
  Host* by_peer(int64_t peer);
  void tell(Host& host, std::string kind, nlohmann::json body = nlohmann::json::object());
  void tell_all(const std::string& kind, const nlohmann::json& body);
  bool wait_for_news();
  bool someone_away() const;

  const HostOptions options_;
  const std::filesystem::path run_, checkpoints_;
  cluster::Listener listener_;
  cluster::EpochStore store_;
  std::string token_, incarnation_;
  Callbacks callbacks_;
  cluster::Epoch epoch_;
  std::optional<HostSegment> segment_;
  std::map<int64_t, Host> hosts_;  // the others by index
  uint64_t incarnation_of_ranks_ = 0;
  bool running_ = false;  // ranks of that incarnation may run
  bool waits_ = true;     // for hosts that are away
  int64_t asks_ = 0, peers_ = 0;
  std::mutex of_peers_;
  std::map<int64_t, int64_t> host_of_peer_;  // guarded by of_peers_: for the switchboard's thread
  LeaderSaves saves_;
  cluster::Switchboard board_;  // last: its thread uses what is above
};

}  // namespace cairn::tools
