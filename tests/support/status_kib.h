#pragma once
// What the kernel says of this process' memory.

#include <cstdint>
#include <fstream>
#include <string>

namespace cairn::testing {

/// A field of /proc/self/status, as "VmRSS:"; -1 where there is none.
inline int64_t status_kib(const std::string& field) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(field)) return std::stoll(line.substr(field.size() + 1));
  }
  return -1;
}

}  // namespace cairn::testing
