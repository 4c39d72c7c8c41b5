#pragma once
// Why ranks of this host compute slowly: what the kernel counts of a period. Threads: one.

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "runtime/core/cgroup.h"

namespace cairn::agent {

/// Of the time since the measurement before.
struct HostLoad {
  double throttled = 0;  // share in which a limit kept this cgroup from its processors (can exceed 1: of each of them)
  double delayed = 0;    // share in which the rank's thread that waited most was ready, and had no processor
  double runnable = 0;   // processes and threads of the host that were, as its load average of a minute
  int64_t cores = 0;
  double mhz = 0, full_mhz = 0;  // mean of the processors; 0: not known
};

nlohmann::json to_json(const HostLoad& load);
HostLoad host_load_from_json(const nlohmann::json& from);

/// The weightier the later.
enum class SlowCause : uint8_t { kUnknown, kLoad, kClock, kThrottled };
SlowCause cause_of(const HostLoad& load);
/// In events: "unknown", "load", "clock", "throttled".
const char* slow_cause_name(SlowCause cause);
/// "a CPU limit stopped its cgroup for 58% of the time"
std::string cause_text(const HostLoad& load);

class HostLoadMeter {
 public:
  explicit HostLoadMeter(Cgroup cgroup, std::filesystem::path proc = "/proc", std::filesystem::path sys = "/sys");

  /// Of this rank's process, at `now_ns` of any clock that goes on. The first one of a process tells nothing.
  HostLoad measure(int64_t pid, int64_t now_ns);
  /// Processes that are gone.
  void clear() { before_.clear(); }

 private:
  struct Before {
    int64_t at_ns = 0, throttled_us = 0;
    std::map<int64_t, int64_t> delayed_ns;  // by thread
  };
  std::map<int64_t, int64_t> delays_of(int64_t pid) const;

  Cgroup cgroup_;
  std::filesystem::path proc_, sys_;
  std::map<int64_t, Before> before_;  // by process
};

}  // namespace cairn::agent
