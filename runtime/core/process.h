#pragma once
// Which process it is, and whether it still lives, as /proc tells.

#include <cstdint>
#include <optional>

namespace cairn {

/// Of /proc/PID/stat.
struct ProcessStat {
  char state = '?';      // R, S, D, T (stopped), Z (ended, not yet waited for) ...
  int64_t start = 0;     // field 22: clock ticks since the machine's start
  bool exiting = false;  // field 9, PF_EXITING: killed or done, it gives back its memory, then its files
  bool ended() const { return state == 'Z' || state == 'X'; }
};
/// nullopt: it is gone, or not ours to see.
std::optional<ProcessStat> process_stat(int64_t pid);

/// A process, told apart from a later one with the same pid by its start time.
struct ProcessId {
  int64_t pid = 0, start = 0;
  bool operator==(const ProcessId&) const = default;
};
ProcessId this_process();
/// False also of one that has ended and is only not yet waited for, as it stays where process 1 of a container is no
/// init.
bool is_alive(const ProcessId& process);

}  // namespace cairn
