#pragma once
// The agent's end of its ranks' rendezvous (rendezvous.h): keeps what they publish, answers who waits as soon as a
// value is there, and joins the hosts. What a rank of this host publishes goes to `on_publish`, for the agents of the
// others; what comes from them is put(). Values live until clear().
//
// One thread, the agent's event loop, which calls poll() when fd() is readable. Nothing here blocks: a rank that does
// not read has what it asked for kept here, and one that dies is forgotten.

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/comm/rendezvous_frame.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::comm {

class RendezvousHub {
 public:
  using OnPublish = std::function<void(const std::string& key, const std::string& value)>;

  /// `on_publish` is called from poll(), once for each new key; it may put(), and nothing else of this hub.
  static Result<RendezvousHub> make(OnPublish on_publish);

  /// The descriptor for a rank to inherit; the caller closes its own copy when the rank has started, or this hub does
  /// not see it go. It is close-on-exec. An earlier connection of that rank ends.
  /// Errors: out of descriptors; a rank takes one here.
  Result<Fd> add(int64_t rank);

  int fd() const { return epoll_.get(); }
  /// Serves what has come.
  void poll();

  /// A value of another host. The first value of a key stays.
  void put(const std::string& key, const std::string& value);

  /// For a new generation: forgets all values and ends all connections, so that ranks of the old one reach nobody.
  /// The caller sees to it that no put() of the old generation comes later.
  void clear();

  /// Ranks that are connected.
  int64_t ranks() const { return static_cast<int64_t>(peers_.size()); }

 private:
  struct Peer {
    Fd socket;
    FrameReader in;
    std::string out;  // what its socket has not taken yet, from `sent` on
    size_t sent = 0;
    bool waits_to_send = false;
  };

  RendezvousHub(Fd epoll, OnPublish on_publish) : epoll_(std::move(epoll)), on_publish_(std::move(on_publish)) {}
  /// False when the peer is gone.
  bool receive(int64_t rank, Peer& peer);
  bool flush(int64_t rank, Peer& peer);
  void serve(int64_t rank, Peer& peer, Frame frame);
  /// True when the key is new; ranks that wait for it have it then.
  bool keep(const std::string& key, const std::string& value);
  void answer(int64_t rank, FrameKind kind, const std::string& key, const std::string& value);

  Fd epoll_;
  OnPublish on_publish_;
  std::unordered_map<int64_t, Peer> peers_;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::vector<int64_t>> waiting_;  // ranks, by the key that has no value yet
};

}  // namespace cairn::comm
