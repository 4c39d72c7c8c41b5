#pragma once
// What the end of a rank means, and what may be done about it: one table of classes, and the rules that put an end into
// one of them. Source of the codes: docs/operations/exit-codes.md. Pure.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/agent/child_process.h"

namespace cairn::agent {

enum class FailureClass : uint8_t {
  kError,        // exit 1, and every code that means nothing else
  kOutOfMemory,  // SIGKILL, and the kernel has counted an OOM kill
  kKilled,       // SIGKILL without one, and signals that are no crash
  kCrash,        // SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE
  kShmFull,      // SIGBUS while /dev/shm has no room
  kAskedToGo,    // SIGTERM
  kHostSetup,    // 125 to 128: the container or the program could not be started
  kDevice,       // 14, 201, 202, and what the kernel's log calls a broken device
  kRefused,      // 2
  kData,         // 65
  kInternal,     // 70
  kDisk,         // 74
  kGuard,        // 76
  kSymptom,      // 69, 75: tells of another's end
  kHang,
  kHostLost,
};
inline constexpr size_t kFailureClasses = 16;

/// Whose fault an end is.
enum class Fault : uint8_t { kRank, kHost, kRun, kScheduler, kUnknown };

enum class Remedy : uint8_t {
  kInPlace,   // all ranks start again where they are
  kThenMove,  // once in place, then at another host; in place where there is none
  kMove,      // at another host, never in place
  kMoveOnce,  // once at another host, else never
  kLeave,     // as if a stop had been asked for
  kNever,     // the next try would end in the same way
};

struct ClassRule {
  FailureClass which;
  std::string_view name;  // in events and failure.json
  Fault fault;
  Remedy remedy;
  std::string_view words;  // "out of memory"
};

const ClassRule& rule_of(FailureClass which);
/// nullopt: another build's, or none.
std::optional<FailureClass> class_named(std::string_view name);
std::string_view fault_name(Fault fault);

/// What the kernel has written about this host since the ranks started, that matters to them.
struct KernelFinding {
  enum class Kind : uint8_t { kDevice, kProgram, kOutOfMemory };
  Kind kind = Kind::kDevice;
  int64_t pid = -1;  // of the process that it names; -1: none
  std::string text;  // the line
};

/// What a host shows besides the status of a process.
struct Evidence {
  std::optional<int64_t> oom_kills;  // in the cgroup of the ranks since they started; nullopt: not known
  int64_t memory_peak_bytes = -1, memory_limit_bytes = -1;  // of that cgroup; -1: not known, or no limit
  bool shm_full = false;                                    // /dev/shm has no room
  std::optional<KernelFinding> kernel;
};

/// 11 for SIGSEGV and for exit code 139: a shell between us and the rank tells of signals so. 0: no signal.
int signal_of(const ExitStatus& status);

/// Of an end that is not ok, of the process `pid`.
FailureClass classify(const ExitStatus& status, int64_t pid, const Evidence& evidence);

/// Facts that follow "was killed by signal 9 (Killed)": "out of memory: the kernel has killed 1 process of this cgroup
/// (63.9 MiB of 64.0 MiB at the peak)". Empty where the status says it all.
std::string evidence_text(FailureClass which, const Evidence& evidence);

}  // namespace cairn::agent
