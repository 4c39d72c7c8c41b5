#include "runtime/agent/failure_class.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>

#include "runtime/core/units.h"

namespace cairn::agent {
namespace {

using enum FailureClass;

// By the number of the class.
constexpr std::array<ClassRule, kFailureClasses> kRules = {{
    {kError, "error", Fault::kRank, Remedy::kInPlace, "an error"},
    {kOutOfMemory, "out_of_memory", Fault::kHost, Remedy::kThenMove, "out of memory"},
    {kKilled, "killed", Fault::kRank, Remedy::kInPlace, "killed by hand, or evicted"},
    {kCrash, "crash", Fault::kRank, Remedy::kInPlace, "a crash"},
    {kShmFull, "shm_full", Fault::kHost, Remedy::kThenMove, "/dev/shm is full"},
    {kAskedToGo, "asked_to_go", Fault::kScheduler, Remedy::kLeave, "asked to go"},
    {kHostSetup, "host_setup", Fault::kHost, Remedy::kMove, "the host is not set up"},
    {kDevice, "device", Fault::kHost, Remedy::kMove, "a device is broken"},
    {kRefused, "refused", Fault::kRun, Remedy::kNever, "refused"},
    {kData, "data", Fault::kRun, Remedy::kNever, "damaged data"},
    {kInternal, "internal", Fault::kRun, Remedy::kNever, "a defect of Cairn"},
    {kDisk, "disk", Fault::kHost, Remedy::kMoveOnce, "disk or memory full, or an I/O error"},
    {kGuard, "guard", Fault::kRun, Remedy::kNever, "stopped by a guard"},
    {kSymptom, "symptom", Fault::kUnknown, Remedy::kInPlace, "a peer went away"},
    {kHang, "hang", Fault::kRank, Remedy::kInPlace, "it hangs"},
    {kHostLost, "host_lost", Fault::kHost, Remedy::kInPlace, "the host was lost"},
}};

constexpr bool in_order() {
  for (size_t k = 0; k < kRules.size(); ++k) {
    if (static_cast<size_t>(kRules[k].which) != k) return false;
  }
  return true;
}
static_assert(in_order());

constexpr int kMostSignals = 64;

FailureClass class_of_signal(int signal, int64_t pid, const Evidence& evidence) {
  switch (signal) {
    case SIGKILL: {
      const bool counted = evidence.oom_kills.value_or(0) > 0;
      // The log names processes by the numbers that they have outside of a container.
      const bool logged = !evidence.oom_kills && evidence.kernel &&
                          evidence.kernel->kind == KernelFinding::Kind::kOutOfMemory && evidence.kernel->pid == pid;
      return counted || logged ? kOutOfMemory : kKilled;
    }
    case SIGBUS:
      return evidence.shm_full ? kShmFull : kCrash;
    case SIGSEGV:
    case SIGABRT:
    case SIGILL:
    case SIGFPE:
      return kCrash;
    case SIGTERM:
      return kAskedToGo;
    default:
      return kKilled;
  }
}

FailureClass class_of_code(int code) {
  switch (code) {
    case 2:
      return kRefused;
    case 14:   // DLRover: the GPU's inforom is damaged
    case 201:  // DLRover: GPU driver
    case 202:  // DLRover: a process that is left on the GPU
      return kDevice;
    case 65:
      return kData;
    case 69:
    case 75:
      return kSymptom;
    case 70:
      return kInternal;
    case 74:
      return kDisk;
    case 76:
      return kGuard;
    case 125:  // containers: could not be created; cannot exec; not found; unknown device
    case 126:
    case 127:
    case 128:
      return kHostSetup;
    default:
      return kError;
  }
}

}  // namespace

const ClassRule& rule_of(FailureClass which) { return kRules.at(static_cast<size_t>(which)); }

std::optional<FailureClass> class_named(std::string_view name) {
  const auto rule = std::ranges::find(kRules, name, &ClassRule::name);
  return rule == kRules.end() ? std::nullopt : std::optional(rule->which);
}

std::string_view fault_name(Fault fault) {
  constexpr std::array<std::string_view, 5> kNames = {"rank", "host", "run", "scheduler", "unknown"};
  return kNames.at(static_cast<size_t>(fault));
}

int signal_of(const ExitStatus& status) {
  if (status.signal != 0) return status.signal;
  const int of_code = status.exit_code - 128;
  return of_code >= 1 && of_code <= kMostSignals ? of_code : 0;
}

FailureClass classify(const ExitStatus& status, int64_t pid, const Evidence& evidence) {
  const int signal = signal_of(status);
  const FailureClass by_status = signal != 0 ? class_of_signal(signal, pid, evidence) : class_of_code(status.exit_code);
  // A device that fails shows as anything: wrong numbers, errors of its driver, peers that went away.
  const bool device = evidence.kernel && evidence.kernel->kind == KernelFinding::Kind::kDevice;
  return device && by_status != kRefused && by_status != kAskedToGo ? kDevice : by_status;
}

std::string evidence_text(FailureClass which, const Evidence& evidence) {
  std::string out;
  if (which == kOutOfMemory) {
    out = evidence.oom_kills ? fmt::format("out of memory: the kernel has killed {} process{} of this cgroup",
                                           *evidence.oom_kills, *evidence.oom_kills == 1 ? "" : "es")
                             : "out of memory, says the kernel's log";
    if (evidence.memory_peak_bytes >= 0) {
      out += fmt::format(
          " ({}{} at the peak)", format_bytes(evidence.memory_peak_bytes),
          evidence.memory_limit_bytes > 0 ? fmt::format(" of {}", format_bytes(evidence.memory_limit_bytes)) : "");
    }
  } else if (which == kKilled && evidence.oom_kills) {
    out = "by hand or by whoever runs this host: the kernel has counted no lack of memory in this cgroup";
  } else if (which == kShmFull) {
    out = "/dev/shm is full: give it more room (docs/operations/memory.md)";
  }
  const bool tells = evidence.kernel && (which == kDevice || evidence.kernel->kind == KernelFinding::Kind::kProgram);
  if (tells) out += fmt::format("{}the kernel's log: {}", out.empty() ? "" : "; ", evidence.kernel->text);
  return out;
}

}  // namespace cairn::agent
