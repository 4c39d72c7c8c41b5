#pragma once
// That the leader lives, as hosts see it that no packet of it reaches: a sign in the store, which the leader shows anew
// every so often. Who cannot reach the leader looks whether it still changes, and claims the next epoch
// (epoch_store.h) only where it does not. Clocks of hosts are never compared.
//
// Nothing is decided by it alone: two that lead for a moment are told apart by their epochs.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "runtime/cluster/epoch_store.h"

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

 private:
  void run();

  const std::shared_ptr<EpochStore> store_;
  const std::string own_;
  std::atomic<bool> held_ = true;
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
