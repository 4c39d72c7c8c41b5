#pragma once
// Work beside a rank's own: jobs that drive some of its groups, one after another in the order they are submitted, so
// members that submit alike call alike. While the lane has jobs, the groups that they use are its own.
//
// What is ordered by events, on streams that do their work later: a job comes behind all that the rank's stream was
// asked for before it was submitted, and what that stream is asked for behind a wait comes behind the job and those
// before it, and behind none that was submitted later. So the device does the work beside, and the rank's own thread
// orders it: all that a rank asks of its device is asked in one order, the program's. Streams that do their work at
// once, as a CPU's, have no events; there a thread makes the lane run beside.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "runtime/core/result.h"
#include "runtime/device/stream.h"

namespace cairn::comm {

class Lane {
 public:
  /// Which job: they count from 1, and 0 is done from the start.
  using Ticket = int64_t;

  /// `compute`: the rank's stream. Not `threaded`: submit() runs the job itself. Order and results are the same.
  /// A device's lane has a thread only in tests: with one, ranks could ask for what they do together in different
  /// orders, and wait for each other for ever (docs/cuda-communication.md).
  Lane(Stream& compute, bool threaded);
  /// Waits for the job that runs; those behind it are dropped. Give up the engine first if peers may not come.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// What jobs order on the device, they order here.
  Stream& stream() { return *stream_; }

  Ticket submit(std::function<Status()> job);

  /// Returns when that job and all before it are ordered, with their first error. After one, no later job runs.
  Status wait(Ticket ticket);
  Status wait_all();

  /// Jobs that are not done.
  bool busy() const;

 private:
  struct Job {
    std::function<Status()> work;
    std::shared_ptr<const Event> behind;  // of the rank's stream
  };
  void run();
  Status run(const Job& job);
  void done(std::shared_ptr<const Event> until);

  Stream& compute_;
  const std::unique_ptr<Stream> stream_;  // of the jobs
  mutable std::mutex mutex_;
  std::condition_variable submitted_, finished_;
  std::deque<Job> jobs_;  // the front one runs
  Ticket last_ = 0, done_ = 0;
  std::deque<std::shared_ptr<const Event>> until_;  // behind each of the last jobs that are done, which no wait was for
  Status failed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace cairn::comm
