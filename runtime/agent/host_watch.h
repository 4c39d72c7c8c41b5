#pragma once
// What a host shows when one of its ranks ends: Evidence for classify(). Threads: one.

#include <cstdint>
#include <filesystem>
#include <optional>

#include "runtime/agent/failure_class.h"
#include "runtime/agent/kernel_log.h"
#include "runtime/core/cgroup.h"

namespace cairn::agent {

struct HostWatchPaths {
  std::filesystem::path cgroups = "/sys/fs/cgroup", self_cgroup = "/proc/self/cgroup";
  std::filesystem::path kernel_log = "/dev/kmsg";
  std::filesystem::path shm = "/dev/shm";

  /// These, but for the log kernel_log_path().
  static HostWatchPaths of_host();
};

class HostWatch {
 public:
  explicit HostWatch(HostWatchPaths paths = HostWatchPaths::of_host());

  /// Ranks are about to start: what was counted before is none of theirs.
  void begin();
  Evidence look();
  const Cgroup& cgroup() const { return cgroup_; }

 private:
  HostWatchPaths paths_;
  Cgroup cgroup_;
  KernelLog log_;
  std::optional<int64_t> oom_kills_before_;
};

}  // namespace cairn::agent
