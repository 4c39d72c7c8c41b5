#pragma once
// That the leader lives, as hosts see it that no packet of it reaches: RUN/cluster/lease, which the leader writes anew
// every so often. Who cannot reach the leader looks whether the file still changes, and claims the next epoch
// (epoch_store.h) only where it does not. Clocks of hosts are never compared.
//
// Nothing is decided by it alone: two that lead for a moment are told apart by their epochs.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>

namespace cairn::cluster {

/// Longer than a shared folder's caches show an old file.
inline constexpr double kLeaseStillS = 4;
inline constexpr double kLeaseEveryS = 0.5;

/// Held by who leads, on a thread of its own: a slow event loop, or a folder that hangs, stops nothing else.
class Lease {
 public:
  explicit Lease(const std::filesystem::path& directory);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  /// False: the file stays as it is from here on, for others to take the lead.
  void hold(bool held) { held_ = held; }

 private:
  void run();

  const std::string path_, own_;
  std::atomic<bool> held_ = true;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;
};

class LeaseWatch {
 public:
  explicit LeaseWatch(const std::filesystem::path& directory);

  /// Seconds since this was seen to change, or since the watch began. Looks a few times a second at most.
  double still_s();
  /// Whether it has changed since the watch began.
  bool has_changed() const { return changed_; }

 private:
  const std::string path_;
  std::string seen_;
  int64_t since_ns_, looked_ns_ = 0;
  bool changed_ = false;
};

}  // namespace cairn::cluster
