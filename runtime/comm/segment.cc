#include "runtime/comm/segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <optional>

#include "runtime/comm/call.h"
#include "runtime/core/process.h"
#include "runtime/telemetry/pace.h"

namespace cairn::comm {
namespace {

constexpr uint64_t kMagic = 0x31306D6873637263;  // "crcshm01"
constexpr int64_t kMaxWorld = 1 << 20;
constexpr int64_t kMaxBytes = int64_t{1} << 46;

int64_t local_ranks(const ShmWorldConfig& c) { return c.local_ranks > 0 ? c.local_ranks : c.world_size; }

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int64_t ring_capacity(const ShmWorldConfig& c) { return round_up(c.channel_bytes, kLine); }
int64_t stage_capacity(const ShmWorldConfig& c) { return c.staging_bytes / kStages / kLine * kLine; }

int64_t slots_offset() { return round_up(sizeof(SegmentHeader), kLine); }
int64_t groups_offset(const ShmWorldConfig& c) { return slots_offset() + c.world_size * int64_t{sizeof(RankSlot)}; }
int64_t channels_offset(const ShmWorldConfig& c) {
  return round_up(groups_offset(c) + local_ranks(c) * c.groups_per_rank * int64_t{sizeof(GroupEntry)}, kLine);
}
int64_t heap_offset(const ShmWorldConfig& c) {
  return round_up(channels_offset(c) + local_ranks(c) * c.channels_per_rank * int64_t{sizeof(ChannelEntry)}, 4096);
}

Status check_range(std::string_view field, int64_t value, int64_t lo, int64_t hi) {
  if (value >= lo && value <= hi) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("shared-memory world: {} must be {} to {}, got {}", field, lo, hi, value)};
}

Status check_config(const ShmWorldConfig& c) {
  RT_TRY(check_range("world_size", c.world_size, 1, kMaxWorld));
  RT_TRY(check_range("local_ranks", c.local_ranks, 0, c.world_size));
  RT_TRY(check_range("channel_bytes", c.channel_bytes, 256, int64_t{1} << 32));
  // A stage must hold one cache line for each member: the smallest chunk of a reduce-scatter.
  RT_TRY(check_range("staging_bytes", c.staging_bytes, kStages * kLine * local_ranks(c), int64_t{1} << 32));
  RT_TRY(check_range("groups_per_rank", c.groups_per_rank, 1, 1024));
  RT_TRY(check_range("channels_per_rank", c.channels_per_rank, 1, 4096));
  return {};
}

}  // namespace

Result<int64_t> shm_world_bytes(const ShmWorldConfig& config) {
  RT_TRY(check_config(config));
  // The dearest way to spend the groups is pairs: half as many groups as memberships.
  const int64_t memberships = local_ranks(config) * config.groups_per_rank;
  const int64_t groups = (memberships + 1) / 2 * shm_group_bytes(config, 2);
  const int64_t channels = local_ranks(config) * config.channels_per_rank * shm_channel_bytes(config);
  const int64_t bytes = round_up(heap_offset(config) + groups + channels, 4096);
  if (bytes > kMaxBytes) {
    return Error{ErrorCode::kInvalidInput, fmt::format("shared-memory world: {} bytes are more than the limit of {}; "
                                                       "lower staging_bytes or channel_bytes",
                                                       bytes, kMaxBytes)};
  }
  return bytes;
}

int64_t shm_group_bytes(const ShmWorldConfig& config, int64_t size) {
  return round_up(size * int64_t{sizeof(int64_t)}, kLine) +
         round_up(sizeof(GroupState) + size * int64_t{sizeof(MemberState)}, kLine) +
         size * kStages * stage_capacity(config);
}

int64_t shm_channel_bytes(const ShmWorldConfig& config) { return int64_t{sizeof(Channel)} + ring_capacity(config); }

int64_t shm_channel_room(int64_t messages, int64_t bytes) {
  return messages * (int64_t{sizeof(MessageHeader)} + bytes);
}

Result<std::shared_ptr<Segment>> Segment::map(int fd, int64_t bytes) {
  const int flags = fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
  void* base = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    return os_error(errno, fmt::format("map {} bytes of shared memory for communication", bytes));
  }
  return std::shared_ptr<Segment>(new Segment(static_cast<std::byte*>(base), bytes));
}

Result<std::shared_ptr<Segment>> Segment::create_anonymous(const ShmWorldConfig& config) {
  RT_TRY_SET(const int64_t bytes, shm_world_bytes(config));
  RT_TRY_SET(auto segment, map(-1, bytes));
  segment->format(config);
  return segment;
}

Result<std::shared_ptr<Segment>> Segment::create_memfd(const ShmWorldConfig& config, Fd* fd) {
  RT_TRY_SET(const int64_t bytes, shm_world_bytes(config));
  fd->reset(::memfd_create("cairn-comm", MFD_CLOEXEC));
  if (!*fd) return os_error(errno, "memfd_create for communication");
  if (::ftruncate(fd->get(), bytes) != 0) {
    return os_error(errno, fmt::format("size the communication segment to {} bytes", bytes));
  }
  RT_TRY_SET(auto segment, map(fd->get(), bytes));
  segment->format(config);
  return segment;
}

Result<std::shared_ptr<Segment>> Segment::attach(int fd) {
  struct stat st = {};
  if (::fstat(fd, &st) != 0) return os_error(errno, fmt::format("communication segment, descriptor {}", fd));
  if (st.st_size < static_cast<int64_t>(sizeof(SegmentHeader))) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("descriptor {} holds {} bytes: not a communication segment", fd, st.st_size)};
  }
  RT_TRY_SET(auto segment, map(fd, st.st_size));
  const SegmentHeader& h = segment->header();
  if (h.magic != kMagic || h.total_bytes != st.st_size) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("descriptor {} is not a communication segment of this build: magic {:#x}, expected {:#x}; "
                             "{} bytes, {} recorded",
                             fd, h.magic, kMagic, st.st_size, h.total_bytes)};
  }
  return segment;
}

Segment::~Segment() { ::munmap(base_, static_cast<size_t>(bytes_)); }

// Fresh shared memory is zero, which is the right start of every atomic here.
void Segment::format(const ShmWorldConfig& config) {
  SegmentHeader& h = header();
  h.world_size = config.world_size;
  h.local_ranks = local_ranks(config);
  h.total_bytes = bytes_;
  h.stage_bytes = stage_capacity(config);
  h.channel_bytes = ring_capacity(config);
  h.slots_offset = slots_offset();
  h.groups_offset = groups_offset(config);
  h.max_groups = local_ranks(config) * config.groups_per_rank;
  h.channels_offset = channels_offset(config);
  h.max_channels = local_ranks(config) * config.channels_per_rank;
  h.heap_offset = heap_offset(config);
  pthread_mutexattr_t attr;
  pthread_mutexattr_init(&attr);
  pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
  RT_CHECK(pthread_mutex_init(&h.lock, &attr) == 0);
  pthread_mutexattr_destroy(&attr);
  h.magic = kMagic;
}

Status Segment::lock() {
  const int rc = pthread_mutex_lock(&header().lock);
  if (rc == 0) return {};
  if (rc ==
      EOWNERDEAD) {  // killed half-way through an entry: the tables are not to be trusted, the world is lost anyway
    pthread_mutex_consistent(&header().lock);
    pthread_mutex_unlock(&header().lock);
    abort(ErrorCode::kPeerLost, "a rank died while it made a group");
    return abort_error();
  }
  return os_error(rc, "lock of the communication segment");
}

void Segment::unlock() { pthread_mutex_unlock(&header().lock); }

// Under the lock.
Result<int64_t> Segment::take(int64_t bytes, std::string_view what) {
  SegmentHeader& h = header();
  const int64_t start = h.heap_offset + h.heap_used;
  if (start + bytes > h.total_bytes) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("communication segment is full: {} needs {} bytes, {} are left; raise groups_per_rank or "
                             "channels_per_rank of the world",
                             what, bytes, h.total_bytes - start)};
  }
  h.heap_used += bytes;
  return start;
}

Result<int64_t> Segment::find_or_make_group(std::string_view axis, const std::vector<int64_t>& world_ranks,
                                            int64_t instance) {
  if (axis.size() >= kAxisBytes) {
    return Error{ErrorCode::kInvalidInput, fmt::format("axis name '{}' is longer than {} bytes", axis, kAxisBytes - 1)};
  }
  RT_TRY(lock());
  SegmentHeader& h = header();
  const auto size = static_cast<int64_t>(world_ranks.size());
  for (int64_t i = 0; i < h.group_count; ++i) {
    const GroupEntry& e = group(i);
    if (e.size == size && e.instance == instance && axis == e.axis &&
        std::equal(world_ranks.begin(), world_ranks.end(), at<int64_t>(e.ranks_offset))) {
      unlock();
      return i;
    }
  }
  auto make = [&]() -> Result<int64_t> {
    if (h.group_count == h.max_groups) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("communication segment has room for {} groups, '{}' is one more; raise groups_per_rank "
                               "of the world",
                               h.max_groups, axis)};
    }
    const int64_t ranks_bytes = round_up(size * int64_t{sizeof(int64_t)}, kLine);
    const int64_t state_bytes = round_up(sizeof(GroupState) + size * int64_t{sizeof(MemberState)}, kLine);
    const int64_t staging_bytes = size * kStages * h.stage_bytes;
    RT_TRY_SET(const int64_t start, take(ranks_bytes + state_bytes + staging_bytes, axis));
    GroupEntry& e = group(h.group_count);
    std::memcpy(e.axis, axis.data(), axis.size());
    e.size = static_cast<int32_t>(size);
    e.instance = static_cast<int32_t>(instance);
    e.ranks_offset = start;
    e.state_offset = start + ranks_bytes;
    e.staging_offset = start + ranks_bytes + state_bytes;
    std::copy(world_ranks.begin(), world_ranks.end(), at<int64_t>(start));
    return h.group_count++;
  };
  auto made = make();
  unlock();
  return made;
}

Result<Channel*> Segment::find_or_make_channel(int64_t group, int64_t src, int64_t dst) {
  RT_TRY(lock());
  SegmentHeader& h = header();
  auto* entries = at<ChannelEntry>(h.channels_offset);
  for (int64_t i = 0; i < h.channel_count; ++i) {
    if (entries[i].group == group && entries[i].src == src && entries[i].dst == dst) {
      auto* found = at<Channel>(entries[i].offset);
      unlock();
      return found;
    }
  }
  auto make = [&]() -> Result<Channel*> {
    if (h.channel_count == h.max_channels) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("communication segment has room for {} point-to-point channels, this is one more; raise "
                               "channels_per_rank of the world",
                               h.max_channels)};
    }
    RT_TRY_SET(const int64_t offset, take(int64_t{sizeof(Channel)} + h.channel_bytes, "a channel"));
    entries[h.channel_count++] = {static_cast<int32_t>(group), static_cast<int32_t>(src), static_cast<int32_t>(dst),
                                  offset};
    return at<Channel>(offset);
  };
  auto made = make();
  unlock();
  return made;
}

int64_t Segment::used_bytes() {
  if (!lock().ok()) return 0;
  const int64_t used = header().heap_used;
  unlock();
  return used;
}

bool Segment::abort(ErrorCode code, std::string_view reason) {
  SegmentHeader& h = header();
  uint32_t expected = static_cast<uint32_t>(AbortState::kRunning);
  if (!h.abort_state.compare_exchange_strong(expected, static_cast<uint32_t>(AbortState::kWriting))) return false;
  h.abort_code = static_cast<int32_t>(code);
  const size_t n = std::min(reason.size(), static_cast<size_t>(kReasonBytes - 1));
  std::memcpy(h.abort_reason, reason.data(), n);
  h.abort_reason[n] = '\0';
  h.abort_state.store(static_cast<uint32_t>(AbortState::kSet));
  for (int64_t r = 0; r < h.world_size; ++r) ring(r);
  return true;
}

Error Segment::abort_error() {
  SegmentHeader& h = header();
  // The writer may have been killed between claiming the word and finishing the text.
  const int64_t give_up_ns = monotonic_ns() + 20'000'000;
  while (h.abort_state.load(std::memory_order_acquire) != static_cast<uint32_t>(AbortState::kSet)) {
    if (monotonic_ns() > give_up_ns) return {ErrorCode::kPeerLost, "a rank died while it gave up"};
    ::sched_yield();
  }
  return {static_cast<ErrorCode>(h.abort_code), h.abort_reason};
}

void Segment::ring(int64_t rank) {
  RankSlot& s = slot(rank);
  if (s.sleepers.load() == 0) return;
  s.doorbell.fetch_add(1);
  ::syscall(SYS_futex, &s.doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Segment::sleep(int64_t rank, uint32_t seen, int64_t timeout_ns) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  const timespec timeout = {timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  ::syscall(SYS_futex, &slot(rank).doorbell, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void Segment::publish_begin(int64_t rank, std::string_view group, std::string_view op, std::string_view what) {
  char text[kOpWords * sizeof(uint64_t)] = {};
  size_t at = 0;
  auto put = [&](std::string_view piece) {
    const size_t n = std::min(piece.size(), sizeof(text) - 1 - at);
    std::memcpy(text + at, piece.data(), n);
    at += n;
  };
  put(group);
  put(".");
  put(op);
  put("(");
  put(what);
  put(")");
  OperationSlot& s = operations(rank);
  for (size_t i = 0; i * sizeof(uint64_t) < at + 1; ++i) {
    uint64_t word;
    std::memcpy(&word, text + i * sizeof(word), sizeof(word));
    s.text[i].store(word, std::memory_order_relaxed);
  }
  s.since_ns.store(monotonic_ns(), std::memory_order_relaxed);
  s.begun.fetch_add(1, std::memory_order_release);
}

void Segment::publish_place(int64_t rank, int64_t step, std::string_view phase) {
  char text[kPhaseWords * sizeof(uint64_t)] = {};
  std::memcpy(text, phase.data(), std::min(phase.size(), sizeof(text) - 1));
  RankSlot& s = slot(rank);
  for (int64_t i = 0; i < kPhaseWords; ++i) {
    uint64_t word;
    std::memcpy(&word, text + i * sizeof(word), sizeof(word));
    s.phase_text[i].store(word, std::memory_order_relaxed);
  }
  s.step.store(step, std::memory_order_relaxed);
  s.placed.store(1, std::memory_order_release);
}

std::string Segment::phase(int64_t rank) {
  RankSlot& s = slot(rank);
  if (s.placed.load(std::memory_order_acquire) == 0) return {};
  char text[kPhaseWords * sizeof(uint64_t)];
  for (int64_t i = 0; i < kPhaseWords; ++i) {
    const uint64_t word = s.phase_text[i].load(std::memory_order_relaxed);
    std::memcpy(text + i * sizeof(word), &word, sizeof(word));
  }
  text[sizeof(text) - 1] = '\0';
  return text;
}

void Segment::publish_end(int64_t rank) {
  OperationSlot& s = operations(rank);
  telemetry::waited_ns += monotonic_ns() - s.since_ns.load(std::memory_order_relaxed);
  s.ended.fetch_add(1, std::memory_order_release);
}

std::string Segment::describe(const OperationSlot& s) {
  const uint64_t ended = s.ended.load(std::memory_order_acquire);
  const uint64_t begun = s.begun.load(std::memory_order_acquire);
  if (begun == 0) return {};
  char text[kOpWords * sizeof(uint64_t)];
  for (int64_t i = 0; i < kOpWords; ++i) {
    const uint64_t word = s.text[i].load(std::memory_order_relaxed);
    std::memcpy(text + i * sizeof(word), &word, sizeof(word));
  }
  text[sizeof(text) - 1] = '\0';
  const int64_t ms = (monotonic_ns() - s.since_ns.load(std::memory_order_relaxed)) / 1'000'000;
  return fmt::format("{} {}, entered {} ms ago", begun > ended ? "in" : "outside of any operation, after", text, ms);
}

OperationView Segment::view(const OperationSlot& s) {
  const uint64_t ended = s.ended.load(std::memory_order_acquire);
  return {.inside = s.begun.load(std::memory_order_acquire) > ended,
          .operations = static_cast<int64_t>(ended),
          .awaits = s.awaits.load(std::memory_order_relaxed) - 1,
          .since_ms = (monotonic_ns() - s.since_ns.load(std::memory_order_relaxed)) / 1'000'000,
          .text = describe(s)};
}

std::string Segment::describe_operation(int64_t rank) {
  RankSlot& s = slot(rank);
  std::string out = describe(s.operations[static_cast<int>(RankThread::kMain)]);
  const std::string beside = describe(s.operations[static_cast<int>(RankThread::kLane)]);
  if (out.empty() && beside.empty() && s.state.load() == static_cast<uint32_t>(RankState::kAbsent)) {
    return "not started yet";
  }
  if (out.empty()) out = "before its first operation";
  if (const std::string where = phase(rank); !where.empty()) {
    out += fmt::format(", at step {} ({})", s.step.load(std::memory_order_relaxed), where);
  }
  if (!beside.empty()) out += "; beside it " + beside;
  return out;
}

uint64_t process_start_time(int64_t pid) {
  const std::optional<ProcessStat> stat = process_stat(pid);
  return stat && !stat->ended() ? static_cast<uint64_t>(stat->start) : 0;
}

int64_t monotonic_ns() {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace cairn::comm
