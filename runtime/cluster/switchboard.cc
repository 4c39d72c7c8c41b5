#include "runtime/cluster/switchboard.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace cairn::cluster {
namespace {

constexpr double kNsPerS = 1e9;
constexpr std::string_view kBeat = "beat";

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
      wake_fd_(event_fd()) {
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
  }
  wake();
}

void Switchboard::send(int64_t peer, Message message) {
  {
    const std::lock_guard lock(mutex_);
    const auto at = peers_.find(peer);
    if (at == peers_.end() || at->second.dropped_ns != 0) return;
    ignore(at->second.connection.send(message), "the thread finds it lost, and says so");
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
  }
  wake();
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

bool Switchboard::serve(int64_t number, Peer& peer, int64_t now_ns) {
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
  const Status filled = peer.connection.fill(&heard);
  if (heard) peer.heard_ns = now_ns;
  for (;;) {  // what a peer said before it closed counts
    auto message = peer.connection.next();
    if (!message.ok()) return lost(message.error().message);
    if (!message.value()) break;
    if (message.value()->kind != kBeat) add_news({.peer = number, .message = *std::move(message).value()});
  }
  if (!filled.ok()) return lost(filled.error().message);
  if (now_ns - peer.heard_ns >= dead_after_ns_) {
    return lost(
        fmt::format("{}: silent for {:.1f} s", peer.name, static_cast<double>(now_ns - peer.heard_ns) / kNsPerS));
  }
  Status sent = peer.connection.flush();
  // Beats are not piled up before a peer that takes nothing.
  if (sent.ok() && now_ns - peer.beaten_ns >= every_ns_ && !peer.connection.has_unsent()) {
    sent = peer.connection.send({.kind = std::string(kBeat)});
    peer.beaten_ns = now_ns;
  }
  return sent.ok() ? true : lost(sent.error().message);
}

void Switchboard::run() {
  std::vector<pollfd> ready;
  for (;;) {
    int64_t next_ns = steady_ns() + dead_after_ns_;
    ready = {{wake_fd_.get(), POLLIN, 0}};
    {
      const std::lock_guard lock(mutex_);
      if (ends_) return;
      const int64_t now_ns = steady_ns();
      for (auto at = peers_.begin(); at != peers_.end();) {
        const auto one = at++;
        if (!serve(one->first, one->second, now_ns)) {
          peers_.erase(one);
          continue;
        }
        const Peer& peer = one->second;
        next_ns = std::min({next_ns, peer.beaten_ns + every_ns_, peer.heard_ns + dead_after_ns_});
        ready.push_back(
            {peer.connection.fd(),
             static_cast<short>((peer.dropped_ns == 0 ? POLLIN : 0) | (peer.connection.has_unsent() ? POLLOUT : 0)),
             0});
      }
    }
    const int64_t left_ms = (next_ns - steady_ns() + 999'999) / 1'000'000;
    ::poll(ready.data(), ready.size(), static_cast<int>(std::clamp<int64_t>(left_ms, 1, 1000)));
    if ((ready.front().revents & POLLIN) != 0) clear(wake_fd_);
  }
}

}  // namespace cairn::cluster
