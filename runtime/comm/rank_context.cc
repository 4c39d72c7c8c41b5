// Waiting, watching peers and moving pending sends: the part of a rank that its groups share.

#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "runtime/comm/segment_comm.h"
#include "runtime/core/cgroup.h"

namespace cairn::comm {
namespace {

constexpr int64_t kFirstSliceNs = 1'000'000;  // a peer is looked at after a millisecond of waiting
constexpr int64_t kLongestSliceNs = 8'000'000;

}  // namespace

RankContext::RankContext(std::shared_ptr<Segment> segment, int64_t rank, Options options)
    : segment_(std::move(segment)),
      rank_(rank),
      options_(options),
      crowded_(segment_->header().local_ranks > usable_cpus()),
      max_spin_(crowded_ ? kYields : kSpins),
      spin_(max_spin_) {}

RankContext::~RankContext() = default;

void RankContext::linger(int64_t turn) const {
  if (crowded_ || turn % kSpinsPerYield == kSpinsPerYield - 1) {
    ::sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

Error RankContext::fail(Error error) {
  segment_->abort(error.code, fmt::format("rank {}: {}", rank_, error.message));
  return error;
}

Error RankContext::aborted_error(const Site& site) {
  Error reason = segment_->abort_error();
  // A peer that gave up is a lost peer, whatever made it give up; being told to stop is not a failure.
  if (reason.code != ErrorCode::kStopped) reason.code = ErrorCode::kPeerLost;
  return std::move(reason).with(site.text());
}

Status RankContext::wait_asleep(const Site& site, const std::function<bool()>& done,
                                const std::function<void(std::vector<int64_t>&)>& missing) {
  const int64_t start_ns = monotonic_ns();
  const int64_t deadline_ns = start_ns + options_.deadline_ms * 1'000'000;
  int64_t slice_ns = kFirstSliceNs;
  int64_t look_ns = start_ns + kFirstSliceNs;
  RankSlot& me = segment_->slot(rank_);
  std::vector<int64_t> awaited;
  struct Sleeper {
    std::atomic<uint32_t>& count;
    explicit Sleeper(std::atomic<uint32_t>& c) : count(c) { count.fetch_add(1); }
    ~Sleeper() { count.fetch_sub(1); }
  };
  struct Awaits {  // for reports, while the wait lasts
    RankContext& context;
    ~Awaits() { context.segment_->publish_awaits(context.rank_, -1); }
  } awaits{*this};
  for (;;) {
    if (sending_count_.load() > 0) progress();
    {
      const Sleeper sleeper(me.sleepers);
      const uint32_t seen = me.doorbell.load();
      if (sending_count_.load() > 0) progress();
      if (done()) return {};
      if (segment_->aborted()) return aborted_error(site);
      segment_->sleep(rank_, seen, slice_ns);
    }
    if (done()) return {};
    if (segment_->aborted()) return aborted_error(site);
    const int64_t now_ns = monotonic_ns();
    const bool look = now_ns >= look_ns;
    awaited.clear();
    missing(awaited);
    if (!awaited.empty()) segment_->publish_awaits(rank_, awaited.front());
    for (const int64_t peer : awaited) {
      Status alive = check_alive(site, peer, look);
      if (alive.ok()) continue;
      if (done()) return {};  // it did its part before it left
      if (segment_->aborted()) return aborted_error(site);
      return fail(std::move(alive).error());
    }
    if (now_ns >= deadline_ns) {
      if (done()) return {};
      return fail(deadline_error(site, awaited));
    }
    if (look) {
      slice_ns = std::min(slice_ns * 2, kLongestSliceNs);
      look_ns = now_ns + slice_ns;
    }
  }
}

Status RankContext::check_alive(const Site& site, int64_t rank, bool look) {
  RankSlot& slot = segment_->slot(rank);
  const auto state = static_cast<RankState>(slot.state.load());
  if (state == RankState::kAbsent) return {};  // still starting: whoever spawned it knows whether it ever will
  const int32_t pid = slot.pid.load();
  if (state == RankState::kClosed) {
    return Error{ErrorCode::kPeerLost, fmt::format("{}: rank {} (pid {}) has left; it was last seen {}", site.text(),
                                                   rank, pid, segment_->describe_operation(rank))};
  }
  if (!look || pid == ::getpid()) return {};
  const std::lock_guard lock(peers_mutex_);
  auto [it, fresh] = peers_.try_emplace(rank);
  bool dead = false;
  if (fresh) {
    it->second.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    // Opened: is it still the process that attached, not a later one with its number?
    dead = process_start_time(pid) != slot.start_time.load();
  }
  if (!dead && it->second) {
    pollfd poll_fd = {it->second.get(), POLLIN, 0};
    dead = ::poll(&poll_fd, 1, 0) == 1;  // readable: it has ended, reaped or not
  } else if (!dead) {
    dead = process_start_time(pid) != slot.start_time.load();  // no pidfd on this system
  }
  if (!dead) return {};
  return Error{ErrorCode::kPeerLost, fmt::format("{}: rank {} (pid {}) died; it was last seen {}", site.text(), rank,
                                                 pid, segment_->describe_operation(rank))};
}

Error RankContext::deadline_error(const Site& site, const std::vector<int64_t>& missing) {
  std::string message = fmt::format("{}: ", site.text());
  constexpr size_t kNamed = 4;
  for (size_t i = 0; i < std::min(missing.size(), kNamed); ++i) {
    const int32_t pid = segment_->slot(missing[i]).pid.load();
    message += fmt::format("{}rank {} ({}) did not arrive within {} ms, it was last seen {}", i ? "; " : "", missing[i],
                           pid ? fmt::format("pid {}", pid) : "no process", options_.deadline_ms,
                           segment_->describe_operation(missing[i]));
  }
  if (missing.size() > kNamed) message += fmt::format("; and {} ranks more", missing.size() - kNamed);
  return {ErrorCode::kTimeout, std::move(message)};
}

// Writes what fits of the first messages of a queue. Under the mutex. True when the queue is empty.
bool RankContext::advance(SendQueue& queue) {
  Channel& channel = *queue.channel;
  const auto capacity = static_cast<uint64_t>(segment_->header().channel_bytes);
  uint64_t head = channel.head.load(std::memory_order_relaxed);
  const uint64_t before = head;
  uint64_t room = capacity - (head - channel.tail.load());
  auto put = [&](const char* data, int64_t bytes) {
    auto n = static_cast<int64_t>(std::min<uint64_t>(room, static_cast<uint64_t>(bytes)));
    const int64_t written = n;
    while (n > 0) {
      const uint64_t at = head % capacity;
      const auto m = static_cast<int64_t>(std::min<uint64_t>(capacity - at, static_cast<uint64_t>(n)));
      std::memcpy(channel.ring() + at, data, static_cast<size_t>(m));
      data += m, n -= m, head += static_cast<uint64_t>(m), room -= static_cast<uint64_t>(m);
    }
    return written;
  };
  while (!queue.messages.empty()) {
    SendQueue::Message& m = queue.messages.front();
    m.header_sent += put(m.header + m.header_sent, static_cast<int64_t>(sizeof(m.header)) - m.header_sent);
    if (m.bytes > m.sent) m.sent += put(m.data + m.sent, m.bytes - m.sent);
    if (m.header_sent < static_cast<int64_t>(sizeof(m.header)) || m.sent < m.bytes) break;
    queue.messages.pop_front();
  }
  if (head != before) {
    channel.head.store(head);
    if (channel.destination_waits.load()) segment_->ring(queue.destination);
  }
  return queue.messages.empty();
}

void RankContext::push(SendQueue& queue, SendQueue::Message message) {
  const std::lock_guard lock(sends_mutex_);
  const bool was_empty = queue.messages.empty();
  queue.messages.push_back(message);
  if (!was_empty) return;
  if (advance(queue)) return;
  queue.channel->source_waits.store(1);
  sending_.push_back(&queue);
  sending_count_.fetch_add(1);
}

void RankContext::progress() {
  const DeviceAccess inside;  // what is sent may lie there
  const std::lock_guard lock(sends_mutex_);
  std::erase_if(sending_, [&](SendQueue* queue) {
    if (!advance(*queue)) return false;
    queue->channel->source_waits.store(0);
    sending_count_.fetch_sub(1);
    return true;
  });
}

bool RankContext::idle(const std::vector<SendQueue*>& queues) {
  const std::lock_guard lock(sends_mutex_);
  return std::ranges::all_of(queues, [](const SendQueue* q) { return q->messages.empty(); });
}

int64_t RankContext::under_way(const SendQueue& queue) {
  const std::lock_guard lock(sends_mutex_);
  return std::ssize(queue.messages);
}

void RankContext::forget(SendQueue& queue) {
  const std::lock_guard lock(sends_mutex_);
  if (std::erase(sending_, &queue) > 0) sending_count_.fetch_sub(1);
}

}  // namespace cairn::comm
