#include "runtime/cluster/connection.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "runtime/core/clock.h"
#include "runtime/json/json.h"

namespace cairn::cluster {
namespace {

constexpr size_t kHeader = 4;

constexpr int64_t kAskMs = 50;

Error lost(std::string_view peer, std::string_view why) {
  return {ErrorCode::kPeerLost, fmt::format("{}: {}", peer, why)};
}

std::string numeric(const sockaddr_storage& address, socklen_t size, bool with_port) {
  std::array<char, NI_MAXHOST> host;
  std::array<char, NI_MAXSERV> port;
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host.data(), host.size(), port.data(),
                    port.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  std::string_view text = host.data();
  if (text.starts_with("::ffff:")) text.remove_prefix(7);  // IPv4, seen by a socket of both
  if (!with_port) return std::string(text);
  const bool six = text.find(':') != text.npos;
  return fmt::format("{}{}{}:{}", six ? "[" : "", text, six ? "]" : "", port.data());
}

}  // namespace

int64_t steady_ns() { return SystemClock().now_ns(); }

Connection::Connection(Fd fd) : fd_(std::move(fd)), most_bytes_(kMostUntrusted) {
  const int on = 1;
  ::fcntl(fd_.get(), F_SETFL, ::fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  const bool there = ::getpeername(fd_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0;
  peer_ = there ? numeric(address, size, true) : "a peer that is gone";
  if (there) peer_address_ = numeric(address, size, false);
}

int64_t steady_after(double seconds) { return steady_ns() + static_cast<int64_t>(seconds * 1e9); }

Result<Connection> Connection::connect(const std::string& host, int64_t port, int64_t deadline_ns,
                                       const std::function<bool()>& given_up) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int failed = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list); failed != 0) {
    return Error{ErrorCode::kUnavailable, fmt::format("{}: {}", host, ::gai_strerror(failed))};
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> held(list, ::freeaddrinfo);
  int failed = ECONNREFUSED;
  for (const addrinfo* at = list; at != nullptr; at = at->ai_next) {
    Fd fd(::socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) continue;
    if (::connect(fd.get(), at->ai_addr, at->ai_addrlen) != 0 && errno != EINPROGRESS) {
      failed = errno;
      continue;
    }
    pollfd ready{fd.get(), POLLOUT, 0};
    int answered = 0;
    for (bool over = false; answered != 1 && !over;) {
      const int64_t left_ms = (deadline_ns - steady_ns()) / 1'000'000;
      answered = ::poll(&ready, 1, static_cast<int>(std::clamp<int64_t>(left_ms, 0, kAskMs)));
      over = left_ms <= kAskMs || (given_up && given_up());
    }
    if (answered != 1) {
      failed = ETIMEDOUT;
      continue;
    }
    socklen_t size = sizeof(failed);
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &failed, &size) == 0 && failed == 0)
      return Connection(std::move(fd));
  }
  return Error{ErrorCode::kUnavailable, fmt::format("{}:{}: {}", host, port, std::strerror(failed))};
}

static std::string own_address_of(const Fd& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
  return numeric(address, size, false);
}

std::string Connection::own_address() const { return own_address_of(fd_); }

std::string own_address_towards(const std::string& host) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_DGRAM;  // whose connect() only looks for the way
  if (::getaddrinfo(host.c_str(), "1", &hints, &list) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> held(list, ::freeaddrinfo);
  for (const addrinfo* at = list; at != nullptr; at = at->ai_next) {
    const Fd fd(::socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (fd && ::connect(fd.get(), at->ai_addr, at->ai_addrlen) == 0) return own_address_of(fd);
  }
  return "";
}

namespace {

std::string encoded(const Message& message) {
  return json_text(nlohmann::json{
      {"kind", hosts::kind_of(message.what)}, {"epoch", message.epoch}, {"body", hosts::encode(message.what)}});
}

/// Most messages of a leader of many are signs of life: their text is made once, and known when it comes.
const std::string& beat_text() {
  static const std::string kText = encoded({hosts::Beat{}});
  return kText;
}

}  // namespace

Status Connection::send(const Message& message) {
  const bool is_beat = std::holds_alternative<hosts::Beat>(message.what) && message.epoch == 0;
  const std::string text = is_beat ? beat_text() : encoded(message);
  RT_CHECK(text.size() <= kMostBytes, "a message of {} bytes", text.size());
  for (size_t k = 0; k < kHeader; ++k) out_ += static_cast<char>(text.size() >> (8 * k) & 0xff);
  out_ += text;
  return flush();
}

Status Connection::flush() {
  while (has_unsent()) {
    const ssize_t n = ::send(fd_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
    if (n < 0) return lost(peer(), std::strerror(errno));
    sent_ += static_cast<size_t>(n);
  }
  out_.clear();
  sent_ = 0;
  return {};
}

void Connection::trust() { most_bytes_ = kMostBytes; }

Status Connection::fill(bool* heard) {
  std::array<char, 1 << 16> buffer;
  while (in_.size() <= kHeader + most_bytes_) {  // more is read when this is taken
    const ssize_t n = ::recv(fd_.get(), buffer.data(), buffer.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
    if (n < 0) return lost(peer(), std::strerror(errno));
    if (n == 0) return lost(peer(), "closed the connection");
    in_.append(buffer.data(), static_cast<size_t>(n));
    if (heard != nullptr) *heard = true;
  }
  return {};
}

Result<std::optional<Message>> Connection::next() {
  if (in_.size() < kHeader) return std::optional<Message>();
  size_t size = 0;
  for (size_t k = 0; k < kHeader; ++k) size |= static_cast<size_t>(static_cast<unsigned char>(in_[k])) << (8 * k);
  const auto wrong = [&](std::string_view why) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: not a message of an agent of cairn: {}", peer(), why)};
  };
  if (size == 0 || size > most_bytes_) return wrong(fmt::format("a length of {} bytes", size));
  if (in_.size() < kHeader + size) return std::optional<Message>();
  const std::string_view text = std::string_view(in_).substr(kHeader, size);
  if (text == beat_text()) {
    in_.erase(0, kHeader + size);
    return std::optional(Message{hosts::Beat{}});
  }
  const auto parsed = parse_json_strictly(text, "the message", 16);
  if (!parsed.ok()) return wrong(parsed.error().message);
  const nlohmann::json& from = parsed.value();
  const nlohmann::json &kind = json_field(from, "kind"), &body = json_field(from, "body");
  const std::optional<int64_t> epoch = json_integer(json_field(from, "epoch"), 0, INT64_MAX);
  if (!kind.is_string() || !epoch || !body.is_object() || from.size() != 3)
    return wrong("kind, epoch and body are expected, and nothing else");
  Result<hosts::Message> what = hosts::decode(kind.get_ref<const std::string&>(), body);
  if (!what.ok()) return wrong(what.error().message);
  in_.erase(0, kHeader + size);
  return std::optional(Message{std::move(what).value(), *epoch});
}

Result<Listener> Listener::open(int64_t from, int64_t to) {
  RT_CHECK(from >= 0 && to >= from && to <= 65535, "ports {} to {}", from, to);
  int failed = EADDRINUSE;
  for (int64_t port = from; port <= to; ++port) {
    // Both families where the kernel has them.
    for (const int family : {AF_INET6, AF_INET}) {
      Fd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (!fd) continue;
      const int on = 1, off = 0;
      ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
      sockaddr_storage address{};
      socklen_t size = 0;
      if (family == AF_INET6) {
        ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
        auto& six = reinterpret_cast<sockaddr_in6&>(address);
        six.sin6_family = AF_INET6;
        six.sin6_port = htons(static_cast<uint16_t>(port));
        size = sizeof(six);
      } else {
        auto& four = reinterpret_cast<sockaddr_in&>(address);
        four.sin_family = AF_INET;
        four.sin_port = htons(static_cast<uint16_t>(port));
        size = sizeof(four);
      }
      if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(fd.get(), 1024) != 0) {
        failed = errno;
        if (failed == EADDRINUSE) break;  // of the port, whichever family
        continue;
      }
      socklen_t bound = sizeof(address);
      RT_CHECK(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &bound) == 0, "getsockname: {}", errno);
      const uint16_t at = family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port;
      return Listener(std::move(fd), ntohs(at));
    }
  }
  return Error{ErrorCode::kUnavailable, fmt::format("ports {} to {}: {}", from, to, std::strerror(failed))};
}

Result<std::optional<Connection>> Listener::accept() {
  for (;;) {
    Fd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) return std::optional<Connection>(Connection(std::move(fd)));
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::optional<Connection>();
    // Also what befell the connection that waited: accept(2) passes that on.
    const bool gone = errno == EINTR || errno == ECONNABORTED || errno == EPROTO || errno == ENETDOWN ||
                      errno == ENOPROTOOPT || errno == EHOSTDOWN || errno == ENONET || errno == EHOSTUNREACH ||
                      errno == ENETUNREACH;
    if (!gone) return os_error(errno, fmt::format("port {}", port_));
  }
}

}  // namespace cairn::cluster
