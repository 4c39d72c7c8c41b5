#pragma once
// The agent of a host, as the supervisor's client: what its ranks are, how they are started, watched and killed. What
// they resume from and when they stop the coordinator decides; people read of it through the narrator.
//
// Threads: the supervisor's loop.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/agent/host_load.h"
#include "runtime/agent/host_watch.h"
#include "runtime/agent/supervisor.h"
#include "runtime/comm/rendezvous_hub.h"
#include "runtime/comm/shm_world.h"
#include "runtime/core/unique_handle.h"
#include "runtime/host/topology.h"
#include "runtime/host/visible_gpus.h"
#include "runtime/plan/plan.h"
#include "tools/run/agent/coordinator.h"
#include "tools/run/agent/narrator.h"
#include "tools/run/agent/waits.h"

namespace cairn::tools {

/// A rank that is killed after a step, to see the run recover.
struct Kill {
  int64_t rank = 0, step = 0;
};

struct AgentOptions {
  std::string program = "/proc/self/exe";                // is started as `program _rank --rank K ...`
  std::filesystem::path recipe;                          // of the segment
  std::string recipe_text;                               // instead of that file, where another host has written it
  std::string init;                                      // init_to_json() of what the run begins with
  std::function<std::filesystem::path(int64_t)> log_of;  // by rank
  int64_t threads = 0;                                   // of a rank; 0: cores / ranks of this host, at least 1
  std::string trace;                                     // steps=A..B; empty: none
  bool time_kernels = false;
  int64_t token_losses = 0;  // of this step each token's loss goes to RUN/token_losses; 0: of none
  std::vector<Kill> kills;
  std::string comm;                                              // of ranks on CUDA: `_rank --comm`
  std::string attention = "own";                                 // the same: `_rank --attention`
  std::string tuning = "kept", tuning_given;                     // the same: `_rank --tuning`, `--tuning-given`
  std::vector<std::pair<std::string, std::string>> environment;  // of ranks, beside the agent's own
};

class Agent final : public agent::SupervisorClient {
 public:
  /// `plan`, `coordinator` and `narrator` outlive it. `run`: the folder, for reports.
  Agent(const Plan& plan, const std::filesystem::path& run, Coordinator& coordinator, Narrator& narrator,
        AgentOptions options);

  Result<std::vector<agent::ChildSpec>> prepare_generation(int64_t generation) override;
  void on_generation_started(int64_t generation, const agent::Recovery* recovery) override;
  void on_event(int64_t rank, const nlohmann::json& event) override;
  void on_child_exit(int64_t, const agent::ExitStatus& status, bool) override { coordinator_.on_rank_exit(status); }
  void on_readable(int fd) override;
  bool all_finished() override { return coordinator_.all_finished(); }
  void on_failure(const agent::RestartInfo& info, bool restarting, double backoff_s) override {
    if (!info.failure.message.empty()) narrator_.failed(info, restarting, backoff_s, report_);
  }
  void on_stop_requested(int signal) override { coordinator_.stop(signal); }
  void on_signal(int signal) override;
  void on_tick() override {
    coordinator_.on_tick();
    // Else for reports that the leader asks for.
    waits_.look(world_ && coordinator_.watches_waits() ? &*world_ : nullptr);
  }
  /// Ranks that have trained to their end stand still until the last checkpoint is on disk, within the hook's own
  /// deadline.
  bool on_hang(const std::vector<agent::Silence>&) override { return !coordinator_.save_under_way(); }
  std::optional<std::pair<int64_t, std::string>> suspect() override { return waits_.suspect(); }
  void on_failing(const agent::Failure& failure) override {
    coordinator_.on_failing(failure);  // first: the others' ranks end meanwhile
    // Of ranks that are stopped for another host's sake nothing is to be found out here.
    report_ = world_ && !failure.host ? waits_.report_failure(failure, *world_) : std::filesystem::path();
  }
  agent::Evidence evidence() override { return host_.look(); }
  void on_rank_error(const agent::Failure& error) override { coordinator_.on_rank_error(here(error)); }
  void settle(agent::Failure& failure) override { coordinator_.settle(failure); }
  agent::Restart restart_of(const agent::Failure& failure) override { return coordinator_.restart_of(failure); }
  int64_t extra_grace_ms() override { return coordinator_.extra_grace_ms(); }
  void on_notice(const std::string& text) override { narrator_.say(text); }
  uint64_t heartbeat(int64_t rank) override { return static_cast<uint64_t>(view_of(rank).finished_operations()); }
  std::string place(int64_t rank) override { return view_of(rank).description; }

  /// Before run(): what comes of other hosts, and of ranks that meet theirs, wakes the loop.
  Status use(agent::RunControl& control);
  /// A rank of this host, to see the run recover.
  void kill(int64_t rank);

 private:
  comm::RankView view_of(int64_t rank) const;
  Result<agent::ChildSpec> spec_of(int64_t rank, uint64_t generation_of_ranks);
  Status place_ranks();
  void kill_as_asked(int64_t step);
  const agent::HostLoad& load_of(int64_t rank);
  static agent::Failure here(agent::Failure error);

  const Plan& plan_;
  const std::filesystem::path run_;
  Coordinator& coordinator_;
  Narrator& narrator_;
  AgentOptions options_;
  RunWaits waits_;
  agent::HostWatch host_;
  agent::HostLoadMeter load_meter_;
  struct Measured {
    agent::HostLoad load;
    int64_t at_ns = 0;
  };
  std::map<int64_t, Measured> loads_;   // by rank
  host::VisibleGpus gpus_;              // of runs on CUDA
  std::vector<host::RankCores> cores_;  // of this host's ranks; empty: none is bound
  std::optional<comm::ShmWorld> world_;
  Fd memory_, ward_;                        // of the arena, for ranks; for copies, if they make any
  Fd recipe_;                               // AgentOptions::recipe_text, for ranks
  std::optional<comm::RendezvousHub> hub_;  // where there are other hosts
  std::vector<Fd> sockets_;                 // of ranks that are being started
  std::filesystem::path report_;            // of the last failure
};

}  // namespace cairn::tools
