#pragma once

#include <cstdint>
#include <optional>

namespace cairn {

/// What /proc tells of a process. Its start (field 22, in ticks since that of the machine) tells it from a later one
/// with the same number.
struct ProcessStat {
  char state = '?';  // Z, X: dead, only not yet waited for
  int64_t start = 0;
  bool is_dead() const { return state == 'Z' || state == 'X'; }
};

/// Nothing where that cannot be read: the process is gone, also between the opening of its file and the reading, or is
/// not ours to see.
std::optional<ProcessStat> stat_of_process(int64_t pid);
std::optional<ProcessStat> stat_of_this_process();

}  // namespace cairn
