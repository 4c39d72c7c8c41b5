#include "runtime/kernels/team.h"

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "runtime/core/cgroup.h"
#include "runtime/kernels/scratch.h"

namespace cairn::kernels {
namespace {

thread_local bool inside_task = false;

/// Waits awake until done() or for a millisecond or two; returns done(). A sleeping core takes tens of microseconds to
/// wake in a virtual machine, a hundred times a step; whoever else wants the core gets it.
template <typename Done>
bool linger(const Done& done) {
  constexpr int kTurns = 1000, kPauses = 32;
  for (int turn = 0; turn < kTurns; ++turn) {
    for (int i = 0; i < kPauses; ++i) {
      if (done()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    ::sched_yield();
  }
  return done();
}

class Team {
 public:
  explicit Team(int64_t threads) {
    TeamScratch& scratch = scratch_of_this_team();
    for (int64_t i = 1; i < threads; ++i) {
      helpers_.emplace_back([this, &scratch] {
        join_scratch(scratch);
        help();
      });
    }
  }

  ~Team() {
    stop_.store(true);
    jobs_.fetch_add(1);
    jobs_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  int64_t threads() const { return static_cast<int64_t>(helpers_.size()) + 1; }

  void run(int64_t count, void (*task)(const void*, int64_t), const void* context) {
    task_ = task;
    context_ = context;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    open_.store(true);
    jobs_.fetch_add(1);
    if (asleep_.load() > 0) jobs_.notify_all();
    work();
    // Either a helper that has come in sees the job closed, or this thread sees it inside: both orders are total.
    open_.store(false);
    const auto all_out = [this] { return inside_.load() == 0; };
    while (!linger(all_out)) {
      const uint32_t seen = inside_.load();
      if (seen != 0) inside_.wait(seen);
    }
  }

 private:
  void work() {
    inside_task = true;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) task_(context_, i);
    inside_task = false;
  }

  void help() {
    for (uint32_t seen = 0;;) {
      const auto called = [&] { return jobs_.load() != seen; };
      if (!linger(called)) {
        asleep_.fetch_add(1);
        jobs_.wait(seen);
        asleep_.fetch_sub(1);
      }
      seen = jobs_.load();
      if (stop_.load()) return;
      inside_.fetch_add(1);
      if (open_.load()) work();
      if (inside_.fetch_sub(1) == 1) inside_.notify_one();
    }
  }

  // Written by the caller while nobody is inside.
  void (*task_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<int64_t> next_ = 0;   // the task to take
  alignas(64) std::atomic<uint32_t> jobs_ = 0;  // opened so far
  std::atomic<bool> open_ = false, stop_ = false;
  std::atomic<uint32_t> asleep_ = 0;
  alignas(64) std::atomic<uint32_t> inside_ = 0;  // helpers that may be at a task
  std::vector<std::thread> helpers_;              // last: they use all above
};

}  // namespace

int64_t team_threads() {
  // OpenMP counts the cores that it may run on, and knows no limit of a container's time on them.
  static const double limit = std::getenv("OMP_NUM_THREADS") ? HUGE_VAL : Cgroup().cpu_limit().value_or(HUGE_VAL);
  const int64_t threads = inside_task ? 1 : omp_get_max_threads();
  return static_cast<double>(threads) <= limit ? threads : static_cast<int64_t>(std::ceil(limit));
}

void run_on_team(int64_t count, void (*task)(const void*, int64_t), const void* context) {
  thread_local std::unique_ptr<Team> team;
  const int64_t threads = team_threads();
  if (threads > 1 && count > 1) {
    if (team == nullptr || team->threads() != threads) {
      team.reset();
      team = std::make_unique<Team>(threads);
    }
    return team->run(count, task, context);
  }
  for (int64_t i = 0; i < count; ++i) task(context, i);
}

}  // namespace cairn::kernels
