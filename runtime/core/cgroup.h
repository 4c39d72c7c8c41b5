#pragma once
// Memory and processor time that the kernel counts and limits for the cgroup of this process and its ranks. Version 2
// and version 1 alike. Threads: none of its own; each call reads a small file anew.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace cairn {

class Cgroup {
 public:
  /// `mount`: where cgroups are mounted; `self`: a file as /proc/self/cgroup, which says in which of them we are.
  /// Inside a container that path may be the host's: then the root of the mount is the container's own.
  explicit Cgroup(std::filesystem::path mount = "/sys/fs/cgroup",
                  const std::filesystem::path& self = "/proc/self/cgroup");

  /// Processes that the kernel has killed for lack of memory. nullopt: not known.
  std::optional<int64_t> oom_kills() const;
  /// Bytes; -1: not known, or no limit.
  int64_t memory_peak_bytes() const;
  int64_t memory_limit_bytes() const;
  /// Microseconds in which it was kept from its processors by a limit. nullopt: not known.
  std::optional<int64_t> throttled_us() const;
  /// Processors whose time it may use, 0.5 for half of one: the least of its own limit and those of the groups above
  /// it. nullopt: no limit.
  std::optional<double> cpu_limit() const;

 private:
  std::optional<std::string> text_of(const char* file_2, const char* controller, const char* file_1) const;

  std::filesystem::path mount_;
  std::filesystem::path path_2_, memory_1_, cpu_1_;  // below the mount, of version 2 and of version 1's controllers
};

/// Processors for the threads of this process: those that it may run on (affinity, cpusets), but no more than its
/// cgroup's limit of processor time, rounded up. At least 1.
int64_t usable_cpus(const Cgroup& cgroup = Cgroup());

}  // namespace cairn
