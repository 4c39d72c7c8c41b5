#include "ckpt/persist/priority.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace cairn::ckpt {

void lower_thread_priority() {
  // Linux applies both to the calling thread alone.
  const auto thread = static_cast<int>(syscall(SYS_gettid));
  setpriority(PRIO_PROCESS, static_cast<id_t>(thread), 19);
  constexpr int kWhoProcess = 1, kIdle = 3, kClassShift = 13;  // linux/ioprio.h
  syscall(SYS_ioprio_set, kWhoProcess, thread, kIdle << kClassShift);
}

}  // namespace cairn::ckpt
