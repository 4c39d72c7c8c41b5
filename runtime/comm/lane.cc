#include "runtime/comm/lane.h"

#include <chrono>
#include <utility>

#include "runtime/comm/ordered_on.h"
#include "runtime/comm/rank_thread.h"
#include "runtime/telemetry/pace.h"

namespace cairn::comm {

Lane::Lane(Stream& compute, bool threaded) : compute_(compute), stream_(compute.beside()) {
  if (threaded) thread_ = std::thread([this] { run(); });
}

Lane::~Lane() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  submitted_.notify_one();
  thread_.join();
}

Status Lane::run(const Job& job) {
  stream_->follow(job.behind);
  const OrderedOn here(*stream_);
  return job.work();
}

void Lane::run() {
  current_rank_thread() = RankThread::kLane;
  std::unique_lock lock(mutex_);
  for (;;) {
    submitted_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    Status status = failed_;
    std::shared_ptr<const Event> until;
    if (status.ok()) {
      const Job job = std::move(jobs_.front());
      lock.unlock();
      status = run(job);
      until = stream_->mark();
      lock.lock();
    }
    jobs_.pop_front();
    if (failed_.ok()) failed_ = std::move(status);
    done(std::move(until));
    finished_.notify_all();
  }
}

void Lane::done(std::shared_ptr<const Event> until) {
  ++done_;
  until_.push_back(std::move(until));
}

Lane::Ticket Lane::submit(std::function<Status()> work) {
  Job job{std::move(work), compute_.mark()};
  if (!thread_.joinable()) {
    if (failed_.ok()) failed_ = run(job);
    done(stream_->mark());
    return last_ = done_;
  }
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    ++last_;
  }
  submitted_.notify_one();
  return last_;
}

Status Lane::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  if (done_ < ticket) {
    const auto begin = std::chrono::steady_clock::now();
    finished_.wait(lock, [&] { return done_ >= ticket; });
    telemetry::waited_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
  }
  // Who has come behind a job has come behind those before it.
  const auto known = static_cast<Ticket>(until_.size()) - (done_ - ticket);
  if (known > 0) {
    compute_.follow(until_[static_cast<size_t>(known - 1)]);
    until_.erase(until_.begin(), until_.begin() + known);
  }
  return failed_;
}

Status Lane::wait_all() { return wait(last_); }

bool Lane::busy() const {
  const std::lock_guard lock(mutex_);
  return done_ < last_;
}

}  // namespace cairn::comm
