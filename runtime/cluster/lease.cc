#include "runtime/cluster/lease.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "runtime/cluster/connection.h"
#include "runtime/cluster/token.h"

namespace cairn::cluster {
namespace {

constexpr int64_t kLookNs = 200'000'000;  // a store that many hosts share is not asked more often

}  // namespace

Lease::Lease(std::shared_ptr<EpochStore> store)
    : store_(std::move(store)), own_(random_hex().substr(0, 16)), thread_([this] { run(); }) {}

Lease::~Lease() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Lease::run() {
  std::unique_lock lock(mutex_);
  for (int64_t count = 0; !ends_; ++count) {
    lock.unlock();
    if (held_) ignore(store_->show(fmt::format("{} {:012}\n", own_, count)), "what cannot be shown is not held");
    lock.lock();
    changed_.wait_for(lock, std::chrono::duration<double>(kLeaseEveryS), [this] { return ends_; });
  }
}

LeaseWatch::LeaseWatch(std::shared_ptr<EpochStore> store) : store_(std::move(store)), since_ns_(steady_ns()) {
  if (!store_) return;
  Result<std::string> now = store_->shown();
  if (now.ok()) seen_ = std::move(now).value();
}

double LeaseWatch::still_s() {
  const int64_t now_ns = steady_ns();
  if (store_ && now_ns - looked_ns_ >= kLookNs) {
    const int64_t before_ns = std::exchange(looked_ns_, now_ns);
    Result<std::string> now = store_->shown();
    if (!now.ok()) {
      since_ns_ += now_ns - std::max(before_ns, since_ns_);  // of this time nothing is known
    } else if (!now.value().empty() && now.value() != seen_) {
      seen_ = std::move(now).value();
      since_ns_ = now_ns;
      changed_ = true;
    }
  }
  return static_cast<double>(now_ns - since_ns_) / 1e9;
}

}  // namespace cairn::cluster
