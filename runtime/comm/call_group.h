#pragma once
// Calls of one thread that begin together. A single call of NCCL costs the host a wait until it is
// launched; calls of a group are launched together, and asked about once. An engine of a device's memory may hold
// all_gather() of its groups back until end(). Every other operation of that engine begins what is held first, so the
// order of the program stays. An engine of the host's memory does each call at once.

#include <functional>
#include <utility>

#include "runtime/core/result.h"

namespace cairn::comm {

class CallGroup {
 public:
  CallGroup() : before_(std::exchange(current(), this)) {}
  ~CallGroup() { current() = before_; }
  CallGroup(const CallGroup&) = delete;
  CallGroup& operator=(const CallGroup&) = delete;

  /// The calling thread's; null: none.
  static CallGroup*& current() {
    thread_local CallGroup* group = nullptr;
    return group;
  }
  /// An engine holds calls back, which `begin` begins. One engine a group.
  void hold(std::function<Status()> begin) { begin_ = std::move(begin); }
  /// Begins the held calls. Errors: those of the calls. Without it, after an error, nothing begins.
  Status end() { return begin_ ? std::exchange(begin_, nullptr)() : Status(); }

 private:
  CallGroup* const before_;
  std::function<Status()> begin_;
};

}  // namespace cairn::comm
