#pragma once
// Connections that have proved nothing yet, of one listener. Strangers can fill this pool only: a connection that has
// proved the run's token leaves it at once, and its places are for strangers only.
//
//   - The pool is small against the process's limit of files. A newcomer to a full pool takes the place of the oldest
//     connection of the address that has the most.
//   - Each connection has a few kilobytes and a deadline for its one message.
//   - An accept that fails (no file is left) gives half of the pool back and rests; it never ends the listener.
//   - Lines about strangers are bounded in number; the rest is counted.
//
// Threads: one at a time.

#include <poll.h>

#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "runtime/cluster/connection.h"

namespace cairn::cluster {

/// Most connections of strangers at a time: a quarter of the files that the process may have, 256 at most.
int64_t most_guests();

/// The connection whose place a newcomer to a full pool takes: the oldest of the address that has the most, so a flood
/// from one host costs its own connections only. `addresses`: the oldest first; not empty.
size_t place_to_give(const std::vector<std::string>& addresses);

struct Guest {
  Connection connection;
  std::string nonce;    // which its first message has to answer
  std::string address;  // of the peer, without the port
  int64_t deadline_ns = 0;
};

class Guests {
 public:
  /// `greeting` makes the first message to a guest, of its nonce. `say` takes lines about strangers; empty: none.
  Guests(Listener listener, double patience_s, std::function<Message(const std::string& nonce)> greeting,
         std::function<void(std::string)> say = {});

  int64_t port() const { return listener_.port(); }
  int64_t count() const { return static_cast<int64_t>(guests_.size()); }
  /// Adds what serve() waits for.
  void watch(std::vector<pollfd>& ready) const;
  /// Takes what has come. A guest leaves the pool with its first message, which `first` gets.
  void serve(const std::function<void(Guest guest, const Message& message)>& first);
  /// Says a line about a stranger, while there are few of them.
  void complain(std::string line);

 private:
  void take();
  void evict();

  Listener listener_;
  const double patience_s_;
  const int64_t most_;
  const std::function<Message(const std::string& nonce)> greeting_;
  const std::function<void(std::string)> say_;
  std::list<Guest> guests_;  // the oldest first
  int64_t rests_until_ns_ = 0;
  int64_t window_ns_ = 0, lines_ = 0;  // lines since then
};

}  // namespace cairn::cluster
