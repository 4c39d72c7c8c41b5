#include "runtime/cluster/lease.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "runtime/cluster/connection.h"
#include "runtime/cluster/token.h"
#include "runtime/hosts/membership.h"

namespace cairn::cluster {
namespace {

constexpr int64_t kStillNs = 1'000'000'000;  // of waiting for a quarter of a second: the process stood still
constexpr int64_t kLookNs = 200'000'000;     // a store that many hosts share is not asked more often

/// A failure counts behind a sign or another failure only: a process that stood still does not know what it missed.
bool is_unbroken(int64_t shown_ns, int64_t failed_ns, double claims_after_s, int64_t now_ns) {
  const bool fails = failed_ns > shown_ns;
  const double since_s = static_cast<double>(now_ns - std::max(shown_ns, failed_ns)) / 1e9;
  return since_s < (fails ? std::max(claims_after_s, hosts::membership::kStoreTriesS) : claims_after_s);
}

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

void Lease::watch(double claims_after_s, std::function<Status()> leads) {
  const std::lock_guard lock(mutex_);
  claims_after_s_ = claims_after_s;
  leads_ = std::move(leads);
}

/// Not where another host may have taken the lead for want of it. False: it is not shown.
bool Lease::may_show(int64_t now_ns) {
  std::function<Status()> leads;
  {
    const std::lock_guard lock(mutex_);
    if (!leads_ || static_cast<double>(now_ns - shown_ns_) / 1e9 < claims_after_s_) return true;
    leads = leads_;
  }
  const Status leading = leads();
  if (!leading.ok() && leading.error().code == ErrorCode::kUnavailable) shown_ns_ = failed_ns_ = 0;
  return leading.ok();
}

void Lease::run() {
  std::unique_lock lock(mutex_);
  for (int64_t count = 0; !ends_; ++count) {
    const double claims_after_s = claims_after_s_;
    lock.unlock();
    const int64_t now_ns = steady_ns();  // first: it is old by the time that others see it
    const bool asks = held_;
    if (asks && may_show(now_ns) && store_->show(fmt::format("{} {:012}\n", own_, count)).ok()) {
      shown_ns_ = now_ns;
    } else if (asks && is_unbroken(shown_ns_, failed_ns_, claims_after_s, now_ns)) {
      failed_ns_ = now_ns;
    }
    lock.lock();
    waits_since_ns_ = steady_ns();
    changed_.wait_for(lock, std::chrono::duration<double>(kLeaseEveryS), [this] { return ends_; });
    const int64_t woke_ns = steady_ns(), waited_ns = woke_ns - waits_since_ns_;
    if (waited_ns >= kStillNs) {
      still_ns_ = waited_ns;
      woke_ns_ = woke_ns;
    }
    waits_since_ns_ = 0;  // last: stood_still_s() reads it first
  }
}

double Lease::stood_still_s(int64_t now_ns, double ago_s) const {
  const int64_t since_ns = waits_since_ns_;
  int64_t still_ns = since_ns != 0 ? now_ns - since_ns : 0;
  if (static_cast<double>(now_ns - woke_ns_) / 1e9 <= ago_s) still_ns = std::max(still_ns, still_ns_.load());
  return still_ns >= kStillNs ? static_cast<double>(still_ns) / 1e9 : 0;
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
