#pragma once
// A host's part in a check of hosts: measures as it is told, in a process of its own (`cairn _measure`), so that what
// hangs or crashes there harms no agent. What the process publishes for its partner goes by the leader, as ranks'
// values do.
//
// The process gets the order as its message has it, and sends the bodies of hosts::Measured, without their round. An
// Ended comes last.
//
// Threads: its own, which calls the two functions.

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "runtime/core/unique_handle.h"
#include "runtime/hosts/message.h"

namespace cairn::tools {

class HostChecker {
 public:
  struct Callbacks {
    std::function<void(hosts::Measured result)> tell;
    std::function<void(hosts::PutMeasured value)> publish;
  };
  /// `program` is started as `program _measure ...`.
  explicit HostChecker(Callbacks callbacks, std::string program = "/proc/self/exe");
  ~HostChecker();  // ends what is measured
  HostChecker(const HostChecker&) = delete;
  HostChecker& operator=(const HostChecker&) = delete;

  // Any thread.
  /// What was measured before ends.
  void start(hosts::Measure order);
  void put(hosts::PutMeasured value);
  void stop();

 private:
  struct Measurement;
  void run();
  void wake();

  const Callbacks callbacks_;
  const std::string program_;
  Fd wake_;
  std::mutex mutex_;
  std::vector<std::variant<hosts::Measure, hosts::PutMeasured, hosts::EndMeasure>> todo_;
  bool ends_ = false;
  std::thread thread_;  // last: it uses what is above
};

}  // namespace cairn::tools
