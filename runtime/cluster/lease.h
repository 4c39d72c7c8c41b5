#pragma once
// That the leader lives, as hosts see it that no packet of it reaches: a sign in the store, which the leader shows anew
// every so often. Who cannot reach the leader looks whether it still changes, and claims the next epoch
// (epoch_store.h) only where it does not. Clocks of hosts are never compared.
//
// Nothing is decided by it alone: two that lead for a moment are told apart by their epochs. A leader that could not
// show it for as long as others wait (it stood still, or the store did not answer) asks for a newer epoch before it
// shows it again.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "runtime/cluster/epoch_store.h"
#include "runtime/core/result.h"

namespace cairn::cluster {

inline constexpr double kLeaseEveryS = 0.25;

/// Held by who leads, on a thread of its own: a slow event loop, or a store that hangs, stops nothing else.
class Lease {
 public:
  explicit Lease(std::shared_ptr<EpochStore> store);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  /// False: the sign stays as it is from here on, for others to take the lead.
  void hold(bool held) { held_ = held; }
  /// From here on: others claim the lead when the sign has stood still for `claims_after_s`, and `leads` says whether
  /// one has (EpochStore::newest). `leads` lives as long as this.
  void watch(double claims_after_s, std::function<Status()> leads);
  /// When it was shown last, and when the store last failed to take it; 0: never.
  int64_t shown_ns() const { return shown_ns_; }
  int64_t failed_ns() const { return failed_ns_; }
  /// How long this process stood still, where that is no longer ago than `ago_s`; 0: it did not.
  double stood_still_s(int64_t now_ns, double ago_s) const;

 private:
  void run();
  bool may_show(int64_t now_ns);

  const std::shared_ptr<EpochStore> store_;
  const std::string own_;
  std::atomic<bool> held_ = true;
  std::atomic<int64_t> shown_ns_ = 0, failed_ns_ = 0;
  std::atomic<int64_t> waits_since_ns_ = 0;          // the thread, for its next turn; 0: it is at work
  std::atomic<int64_t> still_ns_ = 0, woke_ns_ = 0;  // how long it waited too long last, and until when
  double claims_after_s_ = 0;                        // of watch(); guarded by mutex_
  std::function<Status()> leads_;                    // the same
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;
};

class LeaseWatch {
 public:
  /// Null: there is no store yet, and nobody leads.
  explicit LeaseWatch(std::shared_ptr<EpochStore> store);

  /// Seconds since the sign was seen to change, or since the watch began, as far as the store could be asked: time of
  /// which it tells nothing does not count. Looks a few times a second at most.
  double still_s();
  /// Whether it has changed since the watch began.
  bool has_changed() const { return changed_; }

 private:
  const std::shared_ptr<EpochStore> store_;
  std::string seen_;
  int64_t since_ns_, looked_ns_ = 0;
  bool changed_ = false;
};

}  // namespace cairn::cluster
