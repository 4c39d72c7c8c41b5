#pragma once
// Who keeps the ranks of a run waiting, from the agent's side: found out and told when a wait has taken half of its
// deadline, and when a generation has failed. RUN/reports has where every rank was, with stacks that a process of its
// own reads. Whose fault it is runtime/agent/wait_report.h finds.
//
// Threads: the agent's event loop.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/agent/stacks.h"
#include "runtime/agent/supervisor.h"
#include "runtime/agent/wait_report.h"
#include "runtime/comm/shm_world.h"
#include "tools/run/agent/callbacks.h"

namespace cairn::tools {

/// Of the ranks that have attached to a world of this host; of the others nothing is known.
std::vector<agent::RankState> states_of(const comm::ShmWorld& world);

/// The ranks of other hosts.
struct RanksElsewhere {
  std::function<void()> ask;                                   // their agents where they are
  std::function<void(std::vector<agent::RankState>&)> put_in;  // what those have told
  /// For stacks of their ranks, those of these first; they come by RunWaits::take().
  std::function<void(const std::vector<int64_t>& first)> ask_stacks;
};

class RunWaits {
 public:
  /// `deadline_s`: of an operation of the ranks. `elsewhere`: all or none. `host`: in the names of reports, where they
  /// are of the ranks of one host alone.
  RunWaits(std::filesystem::path run, std::string name, double deadline_s, RunCallbacks callbacks,
           RanksElsewhere elsewhere = {}, std::string host = {});

  /// Now and then. `world`: of the ranks that run; null while there are none.
  void look(const comm::ShmWorld* world);

  /// A person asks where the ranks are: a report with stacks, told when it is written. Training goes on.
  void ask(const comm::ShmWorld* world, const std::string& by);

  /// Stacks of ranks of another host, for the report that is being made, or was made last.
  void take(std::vector<agent::RankStacks> stacks);
  /// The leader asks for the stacks of this host's ranks: `to` gets them in a call of look().
  void send_stacks(const comm::ShmWorld* world, std::function<void(std::vector<agent::RankStacks>)> to);

  /// As SupervisorClient::suspect().
  std::optional<std::pair<int64_t, std::string>> suspect() const;

  /// Nobody has been killed yet: the last chance to see where everybody is. Returns the report; empty when it could not
  /// be written.
  std::filesystem::path report_failure(const agent::Failure& failure, const comm::ShmWorld& world);

 private:
  /// A wait that has taken most of its deadline, until the run goes on or fails.
  struct LongWait {
    int64_t rank = 0, operation = 0;  // who has waited longest, and in which of its operations
    bool beside = false;              // of the thread beside its own
    bool elsewhere = false;  // on another host, for ranks of this one that stand still: `operation` of all here
    bool over = false;       // only its stacks are still being read
    agent::WaitReport report;
    std::filesystem::path path;  // of the report, also when it could not be written
    bool written = false;        // the file is there
    bool told = false;           // that it could not be written
    std::string asked_by;        // no wait, but a person's question
    std::string file() const { return written ? path.string() : std::string(); }
  };
  std::vector<agent::RankState> states(const comm::ShmWorld& world) const;
  bool look_elsewhere(const comm::ShmWorld& world, int64_t limit_ms, bool asked);
  void probe_stacks();
  void finish_sending();
  void ask_others();
  void take_stacks(int64_t limit_ms);
  void tell();
  void tell_asked();
  void write_report();

  std::filesystem::path run_;
  std::string name_;
  double deadline_s_;
  RunCallbacks callbacks_;
  RanksElsewhere elsewhere_;
  std::string host_;
  std::optional<LongWait> wait_;
  std::optional<agent::StackProbe> probe_;
  int64_t probe_until_ns_ = 0, others_until_ns_ = 0;
  int64_t finished_ = -1, still_since_ns_ = 0;  // operations of all ranks here, and since when so many
  /// For the leader.
  struct Sending {
    agent::StackProbe probe;
    int64_t until_ns = 0;
    std::vector<agent::RankState> ranks;
    std::function<void(std::vector<agent::RankStacks>)> to;
  };
  std::optional<Sending> sending_;
  int64_t reports_ = 0;
};

}  // namespace cairn::tools
