#pragma once
// Messages of agents over TCP. A frame is its length (four bytes, little endian) and a JSON object with the message's
// kind, the sender's epoch and a body (runtime/hosts/message.h). Nothing is kept over a reconnect: a host that
// reconnects joins anew.
//
// A length above the bound is refused once its four bytes have come, and a connection never reads further ahead than a
// message of that bound: kMostUntrusted before the peer has proved the run's token, kMostBytes from then on.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"
#include "runtime/hosts/message.h"

namespace cairn::cluster {

inline constexpr size_t kMostBytes = size_t{16} << 20, kMostUntrusted = size_t{16} << 10;  // of a message

struct Message {
  hosts::Message what;
  int64_t epoch = 0;
};

/// One end. Never blocks; one thread at a time.
class Connection {
 public:
  /// `fd` is a connected socket.
  explicit Connection(Fd fd);
  /// To a host by name or address. `given_up` is asked a few times a second; may be empty. Errors: kUnavailable: it
  /// does not answer, or not before the deadline (steady clock), or that says yes.
  static Result<Connection> connect(const std::string& host, int64_t port, int64_t deadline_ns,
                                    const std::function<bool()>& given_up = {});

  int fd() const { return fd_.get(); }
  /// "10.77.0.10:24512"
  const std::string& peer() const { return peer_; }
  /// "10.77.0.10", "fd00::10": as connect() takes it.
  const std::string& peer_address() const { return peer_address_; }
  std::string own_address() const;  // numeric, without the port: what the peer sees

  /// Sends what the socket takes now, the rest with flush(). Errors: kPeerLost.
  Status send(const Message& message);
  Status flush();
  bool has_unsent() const { return sent_ < out_.size(); }

  /// The peer has proved who it is: its messages may be long.
  void trust();

  /// Reads what has come; `heard` says whether anything had. Errors: kPeerLost: the peer is gone.
  Status fill(bool* heard = nullptr);
  /// The next complete message; nullopt: none yet. Errors: kCorrupt: not a frame of ours, or hosts::decode()'s.
  Result<std::optional<Message>> next();

 private:
  Fd fd_;
  std::string peer_, peer_address_;  // as they were at first: a dead socket has none
  std::string in_, out_;
  size_t sent_ = 0, most_bytes_;  // of a message that comes
};

/// Accepts agents' connections. Never blocks.
class Listener {
 public:
  /// On the first free port of [from, to], all addresses. Errors: kUnavailable: none is free.
  static Result<Listener> open(int64_t from, int64_t to);
  int fd() const { return fd_.get(); }
  int64_t port() const { return port_; }
  /// nullopt: no connection waits. Errors: no file, or no memory, is left for one.
  Result<std::optional<Connection>> accept();

 private:
  Listener(Fd fd, int64_t port) : fd_(std::move(fd)), port_(port) {}
  Fd fd_;
  int64_t port_ = 0;
};

/// The numeric address by which this host reaches another, given by name or address; empty: no way. Sends nothing.
std::string own_address_towards(const std::string& host);

int64_t steady_ns();
int64_t steady_after(double seconds);  // so long from now

}  // namespace cairn::cluster
