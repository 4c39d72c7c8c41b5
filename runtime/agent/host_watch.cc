#include "runtime/agent/host_watch.h"

#include <sys/statvfs.h>

#include <utility>

namespace cairn::agent {
namespace {

constexpr uint64_t kLittleRoomBytes = 1 << 20;  // others may have given back some since the write that failed

}  // namespace

HostWatchPaths HostWatchPaths::of_host() {
  HostWatchPaths out;
  out.kernel_log = kernel_log_path();
  return out;
}

HostWatch::HostWatch(HostWatchPaths paths)
    : paths_(std::move(paths)), cgroup_(paths_.cgroups, paths_.self_cgroup), log_(paths_.kernel_log) {
  begin();
}

void HostWatch::begin() {
  oom_kills_before_ = cgroup_.oom_kills();
  log_.skip();
}

Evidence HostWatch::look() {
  Evidence out;
  const std::optional<int64_t> oom_kills = cgroup_.oom_kills();
  if (oom_kills) out.oom_kills = *oom_kills - oom_kills_before_.value_or(0);
  out.memory_peak_bytes = cgroup_.memory_peak_bytes();
  out.memory_limit_bytes = cgroup_.memory_limit_bytes();
  struct statvfs room {};
  if (::statvfs(paths_.shm.c_str(), &room) == 0)
    out.shm_full = uint64_t{room.f_bavail} * room.f_frsize < kLittleRoomBytes;
  out.kernel = log_.finding();
  return out;
}

}  // namespace cairn::agent
