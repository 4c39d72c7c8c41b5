#pragma once
// A host's part in a check of hosts: measures as it is told, in a process of its own (`cairn _measure`), so that what
// hangs or crashes there harms no agent. What the process publishes for its partner goes by the leader, as ranks'
// values do.
//
// Orders (JSON): { round, self, address, kernel_level, dtype, folder, limit_s, alone?, partner?, reach? [host] }.
// Results: what the process has sent ({"event": "alone"}, {"event": "pair"}, {"event": "reach"}, {"event": "reached"}),
// and {"event": "ended", "failed"} last, each with its round.
//
// Threads: its own, which calls the two functions.

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/core/unique_handle.h"

namespace cairn::tools {

class HostChecker {
 public:
  struct Callbacks {
    std::function<void(nlohmann::json result)> tell;
    std::function<void(int64_t round, const std::string& key, const std::string& value)> publish;
  };
  /// `program` is started as `program _measure ...`.
  explicit HostChecker(Callbacks callbacks, std::string program = "/proc/self/exe");
  ~HostChecker();  // ends what is measured
  HostChecker(const HostChecker&) = delete;
  HostChecker& operator=(const HostChecker&) = delete;

  // Any thread.
  /// What was measured before ends.
  void start(nlohmann::json order);
  void put(int64_t round, std::string key, std::string value);
  void stop();

 private:
  struct Measurement;
  void run();
  void wake();

  const Callbacks callbacks_;
  const std::string program_;
  Fd wake_;
  std::mutex mutex_;
  std::vector<nlohmann::json> todo_;  // orders, {"put"}, {"stop"}
  bool ends_ = false;
  std::thread thread_;  // last: it uses what is above
};

}  // namespace cairn::tools
