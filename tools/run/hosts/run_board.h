#pragma once
// The state of a run, as the agent of a host knows it: for people on other machines (RUN/cluster/hosts.json, which
// `cairn hosts` reads) and for monitoring (status_http.h). A leader knows all hosts, another agent its own.
//
// Setters are cheap and never wait. The file is replaced once a second at most, by a thread of its own: a folder that
// does not answer, as on a dead mount, keeps that thread and nothing else.
//
// Threads: any.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/telemetry/metrics.h"

namespace cairn::tools {

/// The state of a run's ranks.
enum class RunPhase : uint8_t { kGathering, kLoading, kTraining, kEnded };
const char* phase_name(RunPhase phase);  // "gathering"

struct HostStatus {
  int64_t index = 0, place = -1;  // of the launcher; of its ranks, -1: it is a spare
  std::string name, address;      // empty: it has not joined
  std::string state;              // "training", "loading", "gathering", "spare", "away"
  std::string why;                // of "away": "it has not joined", "silent for 3.0 s"
  bool excluded = false;          // it may not join until it has booted
  double heard_s = 0;             // since its last byte, when this was written; the leader's own: 0
  bool operator==(const HostStatus&) const = default;
};

struct RunStatus {
  RunPhase phase = RunPhase::kGathering;
  bool leads = true;                // false: the rest is about this host
  double time = 0, phase_time = 0;  // unix seconds: of this; since when that phase is
  int64_t epoch = 0;                // 0: none has begun, or the run is on one host
  int64_t leader = -1;              // index of `hosts`
  std::vector<HostStatus> hosts;    // by index; none: one host
  int64_t step = 0, of = 0;
  telemetry::StepMetrics last;  // step 0: none
  double step_time = 0;         // unix seconds of the last step; 0: none
  int64_t saves = 0, saves_failed = 0, restarts = 0;
  int64_t saved_step = -1;
  double saved_time = 0;  // unix seconds
  std::optional<int> exit_code;
};

/// The file's: epoch, leader, phase, times, step, exit code and hosts.
nlohmann::json to_json(const RunStatus& status);
/// Errors: kCorrupt, naming the field.
Result<RunStatus> run_status_from_json(const nlohmann::json& json);

class RunBoard {
 public:
  RunBoard();
  /// Writes what has changed, unless that takes more than a second.
  ~RunBoard();
  RunBoard(const RunBoard&) = delete;
  RunBoard& operator=(const RunBoard&) = delete;

  /// From here on this host leads, and the file is its own; empty: another host's.
  void write_to(const std::filesystem::path& file);
  void set_phase(RunPhase phase);
  void set_hosts(int64_t epoch, int64_t leader, std::vector<HostStatus> hosts);
  /// On a host that follows.
  void follows(RunPhase phase, int64_t place);
  void step(const telemetry::StepMetrics& metrics, int64_t of);
  /// Ranks train from here on. `again`: they have failed before.
  void begins(int64_t step, int64_t of, bool again);
  void saved(int64_t step, bool well);
  void ended(int exit_code);
  RunStatus now() const;

 private:
  struct Shared;
  template <typename Change>
  void change(const Change& how);
  std::shared_ptr<Shared> shared_;
};

/// RUN/cluster/hosts.json
std::filesystem::path hosts_file(const std::filesystem::path& run);

}  // namespace cairn::tools
