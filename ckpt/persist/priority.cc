#include "ckpt/persist/priority.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace cairn::ckpt {

void lower_thread_priority(int nice) {
  // Linux applies both to the calling thread alone.
  const auto thread = static_cast<int>(syscall(SYS_gettid));
  setpriority(PRIO_PROCESS, static_cast<id_t>(thread), nice);
  constexpr int kWhoProcess = 1, kBestEffort = 2, kLowest = 7, kClassShift = 13;  // linux/ioprio.h
  syscall(SYS_ioprio_set, kWhoProcess, thread, (kBestEffort << kClassShift) | kLowest);
}

}  // namespace cairn::ckpt
