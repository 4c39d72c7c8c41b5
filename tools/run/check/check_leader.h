#pragma once
// The leader's part in a check of hosts: orders rounds of measurements (check_judge.h says which), gathers what comes
// of them, and ends each round in time, whatever hosts do. Its messages stand in runtime/hosts/message.h, under "checks
// of hosts".
//
// Threads: none of its own.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/hosts/message.h"
#include "tools/run/check/check_judge.h"
#include "tools/run/check/host_checker.h"

namespace cairn::tools {

struct CheckedHost {
  int64_t index = 0;  // of the hosts; the caller's
  std::string name, address;
};

struct CheckOptions {
  std::string dtype = "fp32";        // or bf16: of matrix products
  int64_t kernel_level = 0;          // kernels::GemmIsa, that all hosts have
  std::filesystem::path folder;      // which all hosts share
  bool gpus = false;                 // of hosts that train there
  int64_t gpu_size = 0;              // of their product; 0: what a GPU takes
  double limit_s = 20, grace_s = 5;  // of a round; behind that, for the hosts' last word
};

/// What a check has found, for people and programs.
struct CheckReport {
  struct Finding {
    CheckFinding::Kind kind = CheckFinding::Kind::kHost;
    int64_t index = -1, other = -1;  // of the hosts; -1: none
    std::string host, with;          // their names
    std::string why;
    GpuFault gpu;       // of kGpu and kSlowGpu
    bool lost = false;  // it has gone while it was measured
  };
  std::vector<Finding> findings;
  std::vector<std::string> notes;                            // what is no finding
  std::vector<std::pair<std::string, HostFigures>> figures;  // of each host, as first measured
  int64_t hosts = 0, rounds = 0;
  double seconds = 0;
};
/// "h2 is broken: its network: ...", "the link between h1 and h2 is bad: ..."
std::string finding_text(const CheckReport::Finding& finding);
/// "host", "slow_host", "link", "gpu", "slow_gpu", "network"
const char* finding_name(CheckFinding::Kind kind);
nlohmann::json to_json(const CheckReport& report);

class CheckLeader {
 public:
  using Tell = std::function<void(int64_t index, const hosts::Message& message)>;
  CheckLeader(std::vector<CheckedHost> hosts, CheckOptions options, Tell tell);

  /// Of a host: its message, or that it is lost. What is no message of a check is not taken.
  bool take(int64_t index, const hosts::Message& message);
  void lost(int64_t index, const std::string& why);
  /// Now and then. True: the check is over.
  bool tick();
  CheckReport report() const;

 private:
  struct Part {  // of a host in the round
    bool alone = false, reach = false;
    int64_t partner = -1;  // number
    bool ended = false, reached = false;
    std::string failed;  // as it ended
    bool asks_gpus = false;
    std::optional<HostFigures> figures;
    std::optional<HostGpus> gpus;
    std::optional<PairFigures> pair;
    std::map<int64_t, std::string> reaches;
    bool answered() const {
      return ended || ((!alone || figures) && (!asks_gpus || gpus) && (!reach || reached) && (partner < 0 || pair));
    }
  };
  void begin_round();
  void end_round();
  int64_t number_of(int64_t index) const;
  void take_result(int64_t host, const hosts::Measured& message);

  const std::vector<CheckedHost> hosts_;
  const CheckOptions options_;
  const Tell tell_;
  CheckJudge judge_;
  int64_t round_id_ = 0, deadline_ns_ = 0;
  const int64_t begun_ns_;
  int64_t ended_ns_ = 0;
  std::map<int64_t, Part> parts_;        // by number
  std::map<int64_t, std::string> lost_;  // by number
  bool over_ = false;
};

/// CAIRN_CHECK_GPU_SIZE of the environment, for doubles of a GPU; 0: it is not set.
int64_t gpu_size_of_tests();

/// A host's side of those messages. `address`: that it uses between hosts; empty: the one that the leader sees. False:
/// it is none of them.
bool take_check_message(HostChecker& checker, const hosts::Message& message, const std::string& address);

}  // namespace cairn::tools
