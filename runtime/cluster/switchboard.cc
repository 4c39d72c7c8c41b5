#include "runtime/cluster/switchboard.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace cairn::cluster {
namespace {

constexpr double kNsPerS = 1e9;
constexpr int64_t kLooksABeat = 8;  // at the times of all peers
constexpr int64_t kWake = -1;       // in epoll_, beside the peers' numbers

int64_t ns(double seconds) { return static_cast<int64_t>(seconds * kNsPerS); }

Fd event_fd() {
  Fd out(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  RT_CHECK(static_cast<bool>(out), "eventfd: errno {}", errno);
  return out;
}

void raise(const Fd& fd) { [[maybe_unused]] const int full = ::eventfd_write(fd.get(), 1); }  // it stays readable
void clear(const Fd& fd) {
  eventfd_t count = 0;
  [[maybe_unused]] const int empty = ::eventfd_read(fd.get(), &count);
}

}  // namespace

Switchboard::Switchboard(Beats beats, std::function<bool(const News&)> first)
    : every_ns_(ns(beats.every_s)),
      dead_after_ns_(ns(beats.dead_after_s)),
      first_(std::move(first)),
      news_fd_(event_fd()),
      wake_fd_(event_fd()),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  epoll_event wake{.events = EPOLLIN, .data = {.u64 = static_cast<uint64_t>(kWake)}};
  RT_CHECK(epoll_ && ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_fd_.get(), &wake) == 0, "epoll: errno {}", errno);
  RT_CHECK(every_ns_ > 0 && dead_after_ns_ >= 2 * every_ns_, "beats every {} s, dead after {} s", beats.every_s,
           beats.dead_after_s);
  thread_ = std::thread([this] { run(); });
}

Switchboard::~Switchboard() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wake();
  thread_.join();
}

void Switchboard::wake() { raise(wake_fd_); }

void Switchboard::add(int64_t peer, std::string name, Connection connection) {
  {
    const std::lock_guard lock(mutex_);
    const auto [at, added] = peers_.emplace(peer, Peer{std::move(name), std::move(connection), steady_ns()});
    RT_CHECK(added, "peer {} twice", peer);
    touched_.insert(peer);
  }
  wake();
}

void Switchboard::send(int64_t peer, Message message) {
  {
    const std::lock_guard lock(mutex_);
    const auto at = peers_.find(peer);
    if (at == peers_.end() || at->second.dropped_ns != 0) return;
    const Status sent = at->second.connection.send(message);
    if (sent.ok() && !at->second.connection.has_unsent()) return;
    ignore(sent, "the thread finds it lost, and says so");
    touched_.insert(peer);
  }
  wake();
}

void Switchboard::drop(int64_t peer) {
  {
    const std::lock_guard lock(mutex_);
    const auto at = peers_.find(peer);
    if (at == peers_.end()) return;
    at->second.dropped_ns = steady_ns();
    std::erase_if(news_, [&](const News& one) { return one.peer == peer; });
    touched_.insert(peer);
  }
  wake();
}

std::map<int64_t, double> Switchboard::silent_s() {
  const std::lock_guard lock(mutex_);
  const int64_t now_ns = steady_ns();
  std::map<int64_t, double> out;
  for (const auto& [number, peer] : peers_) out[number] = static_cast<double>(now_ns - peer.heard_ns) / 1e9;
  return out;
}

std::vector<News> Switchboard::take() {
  const std::lock_guard lock(mutex_);
  clear(news_fd_);
  return std::exchange(news_, {});
}

void Switchboard::add_news(News news) {
  if (first_ && first_(news)) return;
  news_.push_back(std::move(news));
  raise(news_fd_);
}

bool Switchboard::serve(int64_t number, Peer& peer, bool readable, int64_t now_ns) {
  if (peer.dropped_ns != 0) {
    return peer.connection.flush().ok() && peer.connection.has_unsent() && now_ns - peer.dropped_ns < dead_after_ns_;
  }
  const auto lost = [&](std::string why) {
    add_news({.kind = News::Kind::kLost,
              .peer = number,
              .why = std::move(why),
              .silent_s = static_cast<double>(now_ns - peer.heard_ns) / kNsPerS});
    return false;
  };
  bool heard = false;
  const Status filled = readable ? peer.connection.fill(&heard) : Status();
  if (heard) peer.heard_ns = now_ns;
  while (readable) {  // what a peer said before it closed counts
    auto message = peer.connection.next();
    if (!message.ok()) return lost(message.error().message);
    if (!message.value()) break;
    if (!std::holds_alternative<hosts::Beat>(message.value()->what))
      add_news({.peer = number, .message = *std::move(message).value()});
  }
  if (!filled.ok()) return lost(filled.error().message);
  if (now_ns - peer.heard_ns >= dead_after_ns_) {
    return lost(
        fmt::format("{}: silent for {:.1f} s", peer.name, static_cast<double>(now_ns - peer.heard_ns) / kNsPerS));
  }
  Status sent = peer.connection.flush();
  // Beats are not piled up before a peer that takes nothing.
  if (sent.ok() && now_ns - peer.beaten_ns >= every_ns_ && !peer.connection.has_unsent()) {
    sent = peer.connection.send({hosts::Beat{}});
    peer.beaten_ns = now_ns;
  }
  return sent.ok() ? true : lost(sent.error().message);
}

void Switchboard::serve_and_poll(int64_t number, bool readable, int64_t now_ns) {
  const auto at = peers_.find(number);
  if (at == peers_.end()) return;
  Peer& peer = at->second;
  if (!serve(number, peer, readable, now_ns)) {
    peers_.erase(at);  // its socket leaves epoll_ as it is closed
    return;
  }
  // What one says that is dropped does not matter any more.
  const uint32_t wanted = (peer.dropped_ns == 0 ? EPOLLIN : 0U) | (peer.connection.has_unsent() ? EPOLLOUT : 0U);
  if (wanted == peer.polled) return;
  epoll_event event{.events = wanted, .data = {.u64 = static_cast<uint64_t>(number)}};
  const int how = peer.polled == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  RT_CHECK(::epoll_ctl(epoll_.get(), how, peer.connection.fd(), &event) == 0, "epoll_ctl: errno {}", errno);
  peer.polled = wanted;
}

void Switchboard::run() {
  std::array<epoll_event, 256> ready{};
  const int64_t look_every_ns = std::max<int64_t>(1'000'000, every_ns_ / kLooksABeat);
  int64_t looked_ns = 0;
  for (;;) {
    const int64_t left_ms = (looked_ns + look_every_ns - steady_ns() + 999'999) / 1'000'000;
    const int count = ::epoll_wait(epoll_.get(), ready.data(), static_cast<int>(ready.size()),
                                   static_cast<int>(std::clamp<int64_t>(left_ms, 0, 1000)));
    const std::lock_guard lock(mutex_);
    if (ends_) return;
    const int64_t now_ns = steady_ns();
    for (int k = 0; k < count; ++k) {
      const auto number = static_cast<int64_t>(ready[static_cast<size_t>(k)].data.u64);
      if (number == kWake) {
        clear(wake_fd_);
      } else {
        serve_and_poll(number, true, now_ns);
      }
    }
    // Of one that has come something may be there already, from before.
    for (const int64_t number : std::exchange(touched_, {})) serve_and_poll(number, true, now_ns);
    if (now_ns - looked_ns < look_every_ns) continue;
    looked_ns = now_ns;
    for (auto at = peers_.begin(); at != peers_.end();) {
      const auto one = at++;
      const Peer& peer = one->second;
      if (peer.dropped_ns == 0 && now_ns - peer.beaten_ns < every_ns_ && now_ns - peer.heard_ns < dead_after_ns_)
        continue;
      // A peer that seems silent may have said something that was not taken yet.
      serve_and_poll(one->first, peer.dropped_ns == 0 && now_ns - peer.heard_ns >= dead_after_ns_, now_ns);
    }
  }
}

}  // namespace cairn::cluster
