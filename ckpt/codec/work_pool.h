#pragma once
// A few threads that take jobs in order. Made for coding chunks: one encoder or decoder per thread, a bounded queue.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::ckpt {

class WorkPool {
 public:
  /// Runs on one of the pool's threads; `thread` is below threads(). What it throws becomes an error.
  using Job = std::function<Status(int64_t thread)>;

  /// `threads` < 1: as many as the process may run on, at most 4. A thread that the system refuses is done without;
  /// with none left, jobs run in submit().
  explicit WorkPool(int64_t threads);
  /// Finishes all jobs.
  ~WorkPool();
  WorkPool(const WorkPool&) = delete;

  int64_t threads() const { return threads_; }
  /// Blocks while more jobs wait than there are threads. The future never throws and may be dropped.
  std::future<Status> submit(Job job);

 private:
  void loop(int64_t thread);

  int64_t threads_ = 1;
  std::mutex mutex_;
  std::condition_variable more_, less_;
  std::deque<std::packaged_task<Status(int64_t)>> queue_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace cairn::ckpt
