#pragma once
// The connections of an agent that has joined, on a thread of their own: it sends and hears beats, so that a slow event
// loop (a checkpoint that is read, a recipe that is parsed) is never taken for a dead host. A peer is lost at once when
// its connection closes or is reset, and `dead_after` seconds after its last byte when it says nothing: a host without
// power sends no FIN.
//
// What it does is proportional to what comes: of a thousand peers those that have said nothing cost a look at their
// times every eighth of a beat, and no call of the kernel.
//
// Threads: the switchboard's own, and one that calls the functions below. News comes in the order in which it happened
// to each peer; after `lost` nothing comes of that peer any more.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "runtime/cluster/connection.h"

namespace cairn::cluster {

struct Beats {
  double every_s = 0.25, dead_after_s = 3;
};

struct News {
  enum class Kind { kMessage, kLost } kind = Kind::kMessage;
  int64_t peer = 0;
  Message message;      // kMessage
  std::string why;      // kLost: "10.77.0.12:24512: closed the connection", "h2: silent for 3.0 s"
  double silent_s = 0;  // kLost: since its last byte
};

class Switchboard {
 public:
  /// `first` sees what comes before anybody else, on the switchboard's thread, and may not call back: what it answers
  /// with true is no news. For what must not wait for an event loop. May be empty.
  explicit Switchboard(Beats beats, std::function<bool(const News&)> first = {});
  ~Switchboard();  // closes all connections
  Switchboard(const Switchboard&) = delete;
  Switchboard& operator=(const Switchboard&) = delete;

  /// `peer` is the caller's number for it, used once; `name` is for messages.
  void add(int64_t peer, std::string name, Connection connection);
  /// From any thread. Nothing happens for a peer that is lost: its news says so.
  void send(int64_t peer, Message message);
  /// Closes the connection once what was sent is out, or at once after dead_after. No news comes of it.
  void drop(int64_t peer);

  /// Seconds since the last byte of each peer.
  std::map<int64_t, double> silent_s();

  /// What has come since the last call.
  std::vector<News> take();
  /// Readable while there is news: for an event loop.
  int fd() const { return news_fd_.get(); }

 private:
  struct Peer {
    std::string name;
    Connection connection;
    int64_t heard_ns = 0, beaten_ns = 0;
    int64_t dropped_ns = 0;  // 0: it is not
    uint32_t polled = 0;     // what epoll_ waits for; 0: nothing yet
  };
  void run();
  void serve_and_poll(int64_t number, bool readable, int64_t now_ns);
  /// False: the peer is to be forgotten. Called with the lock held.
  bool serve(int64_t number, Peer& peer, bool readable, int64_t now_ns);
  void add_news(News news);
  void wake();

  const int64_t every_ns_, dead_after_ns_;
  const std::function<bool(const News&)> first_;
  Fd news_fd_, wake_fd_, epoll_;
  std::mutex mutex_;
  std::map<int64_t, Peer> peers_;
  std::set<int64_t> touched_;  // peers that have come, have something to send, or are to be dropped
  std::vector<News> news_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace cairn::cluster
