#pragma once
// Small values that the ranks of one start publish to each other: where they listen, and why one gave up. A value is
// written once and appears whole. Two ways: files of a directory that all ranks see, and a socket to the rank's agent
// (rendezvous_hub.h), which passes values on to the agents of other hosts. Threads: safe.

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::comm {

class Rendezvous {
 public:
  using Time = std::chrono::steady_clock::time_point;
  virtual ~Rendezvous() = default;

  /// True when this call made it, false when the key has a value already.
  /// Errors: kIo, kPeerLost (the agent is gone), kTimeout (it does not answer by then), kStopped (after close()).
  virtual Result<bool> publish(const std::string& key, const std::string& value, Time until) = 0;

  /// The value of `key`; nothing when there is none by then. Looks at least once, and ends early after close().
  /// Errors: kPeerLost when the agent is gone.
  virtual Result<std::optional<std::string>> await(const std::string& key, Time until) = 0;

  /// How long after a publish elsewhere its value may be missing here, on a healthy network.
  virtual std::chrono::milliseconds lag() const = 0;

  /// Ends all waits, now and later.
  virtual void close() = 0;
};

/// Files below a directory, which is made when missing and must be one start's alone. Who waits looks every millisecond
/// at first, then after each eighth of the time that has passed, at least four times a second.
Result<std::shared_ptr<Rendezvous>> open_file_rendezvous(std::string directory);

/// `socket` is what RendezvousHub::add() gave, inherited from the agent.
std::shared_ptr<Rendezvous> open_agent_rendezvous(Fd socket);

}  // namespace cairn::comm
