#include "runtime/comm/rendezvous_hub.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

namespace cairn::comm {

Result<RendezvousHub> RendezvousHub::make(OnPublish on_publish) {
  Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) return os_error(errno, "rendezvous of the ranks");
  return RendezvousHub(std::move(epoll), std::move(on_publish));
}

Result<Fd> RendezvousHub::add(int64_t rank) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return os_error(errno, fmt::format("rendezvous of rank {}: a socket (ulimit -n bounds them)", rank));
  }
  Fd theirs(ends[1]);
  Peer peer{.socket = Fd(ends[0])};
  epoll_event event{.events = EPOLLIN, .data = {.u64 = static_cast<uint64_t>(rank)}};
  peers_.erase(rank);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, ends[0], &event) != 0) {
    return os_error(errno, fmt::format("rendezvous of rank {}", rank));
  }
  peers_.emplace(rank, std::move(peer));
  return theirs;
}

void RendezvousHub::poll() {
  std::array<epoll_event, 64> events;
  const int n = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < n; ++i) {
    const auto rank = static_cast<int64_t>(events[i].data.u64);
    const auto peer = peers_.find(rank);
    if (peer == peers_.end()) continue;  // gone since
    const bool lives = receive(rank, peer->second) && flush(rank, peer->second);
    if (!lives) peers_.erase(rank);
  }
}

bool RendezvousHub::receive(int64_t rank, Peer& peer) {
  std::array<char, 1 << 16> buffer;
  const ssize_t n = ::recv(peer.socket.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  if (n == 0) return false;
  peer.in.feed({buffer.data(), static_cast<size_t>(n)});
  for (;;) {
    Result<std::optional<Frame>> frame = peer.in.next();
    if (!frame.ok()) return false;
    if (!frame.value()) return true;
    serve(rank, peer, *std::move(frame).value());
  }
}

void RendezvousHub::serve(int64_t rank, Peer& peer, Frame frame) {
  if (frame.kind == FrameKind::kPublish) {
    const bool made = keep(frame.key, frame.value);
    FrameReader::append(peer.out, made ? FrameKind::kMade : FrameKind::kTaken, frame.key, {});
    if (made && on_publish_) on_publish_(frame.key, frame.value);
  } else if (const auto value = values_.find(frame.key); value != values_.end()) {
    FrameReader::append(peer.out, FrameKind::kValue, frame.key, value->second);
  } else {
    waiting_[frame.key].push_back(rank);
  }
}

bool RendezvousHub::keep(const std::string& key, const std::string& value) {
  if (!values_.emplace(key, value).second) return false;
  const auto waiting = waiting_.find(key);
  if (waiting == waiting_.end()) return true;
  const std::vector<int64_t> ranks = std::move(waiting->second);
  waiting_.erase(waiting);
  for (const int64_t rank : ranks) answer(rank, FrameKind::kValue, key, value);
  return true;
}

void RendezvousHub::answer(int64_t rank, FrameKind kind, const std::string& key, const std::string& value) {
  const auto peer = peers_.find(rank);
  if (peer == peers_.end()) return;
  FrameReader::append(peer->second.out, kind, key, value);
  flush(rank, peer->second);  // one that is gone is seen by the next poll()
}

bool RendezvousHub::flush(int64_t rank, Peer& peer) {
  while (peer.sent < peer.out.size()) {
    const ssize_t n = ::send(peer.socket.get(), peer.out.data() + peer.sent, peer.out.size() - peer.sent,
                             MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return false;
    if (n < 0) break;
    peer.sent += static_cast<size_t>(n);
  }
  const bool unsent = peer.sent < peer.out.size();
  if (!unsent) {
    peer.out.clear();
    peer.sent = 0;
  }
  if (std::exchange(peer.waits_to_send, unsent) != unsent) {
    epoll_event event{.events = unsent ? EPOLLIN | EPOLLOUT : EPOLLIN, .data = {.u64 = static_cast<uint64_t>(rank)}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, peer.socket.get(), &event);
  }
  return true;
}

void RendezvousHub::put(const std::string& key, const std::string& value) { keep(key, value); }

void RendezvousHub::clear() {
  peers_.clear();
  values_.clear();
  waiting_.clear();
}

}  // namespace cairn::comm
