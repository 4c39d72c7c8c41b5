// The rank's end of the socket to its agent. It has no thread of its own: one of those that wait reads for all.
#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "runtime/comm/rendezvous.h"
#include "runtime/comm/rendezvous_frame.h"

namespace cairn::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Two agents and a network lie between a publish and its value.
constexpr milliseconds kLag(200);

Error lost(std::string_view why) {
  return {ErrorCode::kPeerLost, fmt::format("rendezvous with the agent of this host: {}", why)};
}

/// For poll(): rounded up, so that it does not return before its time.
int left_ms(Rendezvous::Time until) {
  const auto left = std::chrono::ceil<milliseconds>(until - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
}

class AgentRendezvous final : public Rendezvous {
 public:
  explicit AgentRendezvous(Fd socket) : socket_(std::move(socket)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  Result<bool> publish(const std::string& key, const std::string& value, Time until) override {
    RT_TRY(send(FrameKind::kPublish, key, value, until));
    std::unique_lock lock(mutex_);
    RT_TRY(wait(lock, until, [&] { return answers_.contains(key); }));
    const auto answer = answers_.find(key);
    if (answer == answers_.end()) {
      if (closed_) return Error{ErrorCode::kStopped, "rendezvous: closed"};
      return Error{ErrorCode::kTimeout, "rendezvous: the agent of this host does not answer"};
    }
    const bool made = answer->second.front() == FrameKind::kMade;
    answer->second.pop_front();
    if (answer->second.empty()) answers_.erase(answer);
    return made;
  }

  Result<std::optional<std::string>> await(const std::string& key, Time until) override {
    std::unique_lock lock(mutex_);
    if (wanted_.insert(key).second) {
      lock.unlock();
      const Status sent = send(FrameKind::kWant, key, {}, until);
      lock.lock();
      if (!sent.ok()) {
        wanted_.erase(key);
        if (sent.error().code == ErrorCode::kTimeout) return std::optional<std::string>();
        return sent.error();
      }
    }
    RT_TRY(wait(lock, until, [&] { return values_.contains(key); }));
    const auto value = values_.find(key);
    return value == values_.end() ? std::optional<std::string>() : std::optional(value->second);
  }

  milliseconds lag() const override { return kLag; }

  void close() override {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    const uint64_t one = 1;
    if (::write(wake_.get(), &one, sizeof(one)) < 0) return;  // it is awake already
  }

 private:
  /// A frame leaves whole before another thread's begins.
  Status send(FrameKind kind, const std::string& key, const std::string& value, Time until) {
    std::string frame;
    FrameReader::append(frame, kind, key, value);
    const std::lock_guard lock(sending_);
    if (torn_) return lost("a frame was cut off");
    for (size_t at = 0; at < frame.size();) {
      const ssize_t n = ::send(socket_.get(), frame.data() + at, frame.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n >= 0) {
        at += static_cast<size_t>(n);
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        pollfd ready{socket_.get(), POLLOUT, 0};
        if (::poll(&ready, 1, left_ms(until)) == 0) {
          torn_ = at > 0;
          return Error{ErrorCode::kTimeout, "rendezvous: the agent of this host does not take what it is told"};
        }
      } else if (errno != EINTR) {
        torn_ = true;
        return lost(os_error(errno, "send").message);
      }
    }
    return {};
  }

  /// Returns when `done`, at `until`, or after close(). The error is the lost connection's.
  template <typename Done>
  Status wait(std::unique_lock<std::mutex>& lock, Time until, const Done& done) {
    for (bool looked = false;;) {
      if (done() || closed_) return {};
      if (lost_) return *lost_;
      if (looked && Clock::now() >= until) return {};
      if (reading_) {
        changed_.wait_until(lock, until);
        looked = true;
        continue;
      }
      reading_ = true;
      lock.unlock();
      std::string bytes;
      Status read = receive(until, &bytes);
      lock.lock();
      reading_ = false;
      looked = true;
      if (read.ok()) read = take(bytes);
      if (!read.ok() && !lost_) lost_ = std::move(read).error();
      changed_.notify_all();  // also: another one that waits reads from here on
    }
  }

  /// What the socket has, at the latest at `until` or close().
  Status receive(Time until, std::string* bytes) const {
    pollfd ready[] = {{socket_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    if (::poll(ready, 2, left_ms(until)) <= 0 || ready[0].revents == 0) return {};
    std::array<char, 1 << 16> buffer;
    for (;;) {
      const ssize_t n = ::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
      if (n == 0) return lost("it has closed the connection");
      if (n < 0) return lost(os_error(errno, "receive").message);
      bytes->append(buffer.data(), static_cast<size_t>(n));
      if (n < std::ssize(buffer)) return {};
    }
  }

  /// Under the mutex.
  Status take(const std::string& bytes) {
    reader_.feed(bytes);
    for (;;) {
      RT_TRY_SET(std::optional<Frame> frame, reader_.next());
      if (!frame) return {};
      if (frame->kind == FrameKind::kValue) {
        values_[frame->key] = std::move(frame->value);
      } else {
        answers_[frame->key].push_back(frame->kind);
      }
    }
  }

  const Fd socket_, wake_;
  std::mutex sending_;
  bool torn_ = false;  // guarded by sending_
  std::mutex mutex_;   // guards what follows
  std::condition_variable changed_;
  bool reading_ = false, closed_ = false;
  std::optional<Error> lost_;
  FrameReader reader_;
  std::set<std::string> wanted_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::deque<FrameKind>> answers_;  // to publish(); two threads may have published one key
};

}  // namespace

std::shared_ptr<Rendezvous> open_agent_rendezvous(Fd socket) {
  return std::make_shared<AgentRendezvous>(std::move(socket));
}

}  // namespace cairn::comm
