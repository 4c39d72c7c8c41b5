#include "runtime/comm/queue.h"

#include <utility>

#include "runtime/comm/lane.h"

namespace cairn::comm {

Queue::Queue(bool threaded) {
  if (threaded) thread_ = std::thread([this] { run(); });
}

Queue::~Queue() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  submitted_.notify_one();
  thread_.join();
}

void Queue::run() {
  current_lane() = Lane::kBeside;
  std::unique_lock lock(mutex_);
  for (;;) {
    submitted_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    Status status = failed_;
    if (status.ok()) {
      const std::function<Status()> job = std::move(jobs_.front());
      lock.unlock();
      status = job();
      lock.lock();
    }
    jobs_.pop_front();
    if (failed_.ok()) failed_ = std::move(status);
    ++done_;
    finished_.notify_all();
  }
}

Queue::Ticket Queue::submit(std::function<Status()> job) {
  if (!thread_.joinable()) {
    if (failed_.ok()) failed_ = job();
    return done_ = ++last_;
  }
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    ++last_;
  }
  submitted_.notify_one();
  return last_;
}

Status Queue::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return done_ >= ticket; });
  return failed_;
}

Status Queue::wait_all() { return wait(last_); }

bool Queue::busy() const {
  const std::lock_guard lock(mutex_);
  return done_ < last_;
}

}  // namespace cairn::comm
