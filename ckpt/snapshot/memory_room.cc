#include "ckpt/snapshot/memory_room.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <string_view>

namespace cairn::ckpt {
namespace {

namespace fs = std::filesystem;

/// Of one group; INT64_MAX without a limit.
int64_t left_in_group(const fs::path& group, int64_t freed) {
  int64_t limit = 0, used = 0;
  const bool v2 = static_cast<bool>(std::ifstream(group / "memory.max") >> limit) &&
                  static_cast<bool>(std::ifstream(group / "memory.current") >> used);
  if (!v2 && !(std::ifstream(group / "memory.limit_in_bytes") >> limit &&
               std::ifstream(group / "memory.usage_in_bytes") >> used)) {
    return INT64_MAX;  // no group, or a limit of "max"
  }
  const std::string prefix = v2 ? "" : "total_";  // v1: with the groups below
  std::ifstream stat(group / "memory.stat");
  std::string word;
  for (int64_t bytes = 0; stat >> word >> bytes;) {
    if (word == prefix + "inactive_file" || word == prefix + "active_file") used -= bytes;
    if (word == prefix + "shmem") used -= std::min(freed, bytes);
  }
  // The files are read one after the other: cache that came meanwhile was not in what was used.
  return std::max<int64_t>(0, limit - std::max<int64_t>(0, used));
}

}  // namespace

int64_t available_memory(int64_t freed, const fs::path& proc, const fs::path& groups) {
  std::string word;
  int64_t kib = 0, sum = 0;
  bool found = false;
  for (std::ifstream in(proc / "meminfo"); in >> word;) {
    if ((word == "MemAvailable:" || word == "SwapFree:") && in >> kib) {
      sum += kib << 10;
      found = true;
    }
  }
  int64_t least = found ? sum + freed : INT64_MAX;
  std::ifstream lines(proc / "self" / "cgroup");
  for (std::string line; std::getline(lines, line);) {  // "0::/a/b" (v2) or "4:memory:/a/b"
    const size_t name = line.find(':') + 1, path = line.find(':', name) + 1;
    if (name == 0 || path == 0) continue;
    const std::string_view controller = std::string_view(line).substr(name, path - 1 - name);
    if (!controller.empty() && controller != "memory") continue;
    // A limit counts for all groups below. In a container the path may begin above what is mounted here.
    const fs::path top = groups / controller;
    for (fs::path group = fs::path(line.substr(path)).relative_path();; group = group.parent_path()) {
      least = std::min(least, left_in_group(top / group, freed));
      if (group.empty()) break;
    }
  }
  return least;
}

}  // namespace cairn::ckpt
