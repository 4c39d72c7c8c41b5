#pragma once
// What the kernel counts of the cgroup that this process, and with it its ranks, is in: memory and processor time.
// Version 2 and version 1 alike. Threads: none of its own; each call reads a small file anew.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace cairn::agent {

class Cgroup {
 public:
  /// `mount`: where cgroups are mounted; `self`: a file as /proc/self/cgroup, which says in which of them we are.
  /// Inside a container that path may be the host's: then the root of the mount is the container's own.
  explicit Cgroup(std::filesystem::path mount = "/sys/fs/cgroup",
                  const std::filesystem::path& self = "/proc/self/cgroup");

  /// Processes that the kernel has killed for lack of memory. nullopt: the kernel does not tell.
  std::optional<int64_t> oom_kills() const;
  /// Bytes; -1: not known, or no limit.
  int64_t memory_peak_bytes() const;
  int64_t memory_limit_bytes() const;
  /// Microseconds in which it was kept from its processors by a limit. nullopt: the kernel does not tell.
  std::optional<int64_t> throttled_us() const;

 private:
  std::optional<std::string> text_of(const char* file_2, const char* controller, const char* file_1) const;

  std::filesystem::path mount_;
  std::filesystem::path path_2_, memory_1_, cpu_1_;  // below the mount, of version 2 and of version 1's controllers
};

}  // namespace cairn::agent
