#pragma once
// Threads that help the calling one with a kernel's tasks. Each thread that calls kernels has a team of its own (ranks
// may be threads), of omp_get_max_threads() members with itself; it lives as long as the thread.
//
// Life of a job: the caller opens it and wakes who sleeps; everyone takes task after task until none is left; the
// caller closes it and waits for those that are inside. A helper that has no core in the meantime is never inside and
// never waited for, and one that loses its core delays the caller by one task. Helpers wait awake for the next job for
// a millisecond or two, giving the core away in between, then asleep.

#include <cstdint>

namespace cairn::kernels {

/// Of the calling thread's team; 1 inside a task.
int64_t team_threads();

/// Calls task(context, i) for each i in [0, count) on this thread and its helpers, in any order; returns when all are
/// done. Tasks must not throw, nor depend on who runs them.
void run_on_team(int64_t count, void (*task)(const void* context, int64_t i), const void* context);

}  // namespace cairn::kernels
