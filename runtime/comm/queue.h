#pragma once
// A thread that drives some groups of a rank, so that their operations run beside the rank's own work. Jobs run one
// after another in the order they are submitted: members that submit alike call alike. While the thread has jobs, the
// groups that they use are its own.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "runtime/core/result.h"

namespace cairn::comm {

class Queue {
 public:
  /// Which job: they count from 1, and 0 is done from the start.
  using Ticket = int64_t;

  /// Not `threaded`: submit() runs the job itself. Order and results are the same.
  explicit Queue(bool threaded);
  /// Waits for the job that runs; those behind it are dropped. Give up the engine first if peers may not come.
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  Ticket submit(std::function<Status()> job);

  /// Returns when that job and all before it are done: their first error. After one, no later job runs.
  Status wait(Ticket ticket);
  Status wait_all();

  /// Jobs that are not done.
  bool busy() const;

 private:
  void run();

  mutable std::mutex mutex_;
  std::condition_variable submitted_, finished_;
  std::deque<std::function<Status()>> jobs_;  // the front one runs
  Ticket last_ = 0, done_ = 0;
  Status failed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace cairn::comm
