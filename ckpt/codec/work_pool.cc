#include "ckpt/codec/work_pool.h"

#include <algorithm>
#include <exception>
#include <system_error>

#include "runtime/core/cgroup.h"

namespace cairn::ckpt {
namespace {

constexpr int64_t kMostThreads = 4;  // what is left over beside a training

}  // namespace

WorkPool::WorkPool(int64_t threads) {
  if (threads < 1) threads = std::min(kMostThreads, usable_cpus());
  for (int64_t i = 0; i < threads; ++i) {
    try {
      workers_.emplace_back([this, i] { loop(i); });
    } catch (const std::system_error&) {
      break;
    }
  }
  threads_ = std::max<int64_t>(1, static_cast<int64_t>(workers_.size()));
}

WorkPool::~WorkPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  more_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

std::future<Status> WorkPool::submit(Job job) {
  std::packaged_task<Status(int64_t)> task([job = std::move(job)](int64_t thread) -> Status {
    try {
      return job(thread);
    } catch (const std::bad_alloc&) {
      return Error{ErrorCode::kUnavailable, "out of memory while coding chunks"};
    } catch (const std::exception& error) {
      return Error{ErrorCode::kInternal, error.what()};
    }
  });
  std::future<Status> result = task.get_future();
  if (workers_.empty()) {
    task(0);
    return result;
  }
  std::unique_lock lock(mutex_);
  less_.wait(lock, [this] { return static_cast<int64_t>(queue_.size()) <= threads_; });
  queue_.push_back(std::move(task));
  lock.unlock();
  more_.notify_one();
  return result;
}

void WorkPool::loop(int64_t thread) {
  std::unique_lock lock(mutex_);
  while (true) {
    more_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::packaged_task<Status(int64_t)> task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    less_.notify_one();
    task(thread);
    lock.lock();
  }
}

}  // namespace cairn::ckpt
