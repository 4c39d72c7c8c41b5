#include "ckpt/copy/state_copier.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <utility>

#include "runtime/core/check.h"
#include "runtime/core/word_sums.h"

namespace cairn::ckpt {
namespace {

constexpr std::chrono::microseconds kShortestNap(50), kLongestNap(1000);

/// From now on; 0 ms: none.
class Deadline {
 public:
  explicit Deadline(int64_t ms) : allowed_(ms), begun_(std::chrono::steady_clock::now()) {}
  bool is_set() const { return allowed_.count() > 0; }
  bool is_over() const { return is_set() && std::chrono::steady_clock::now() - begun_ >= allowed_; }

 private:
  std::chrono::milliseconds allowed_;
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace

std::vector<CopyPart> parts_of(std::span<const std::vector<CopyArray>> groups, int64_t block_bytes) {
  std::vector<CopyPart> out;
  for (const std::vector<CopyArray>& group : groups) {
    int64_t longest = 0;
    for (const CopyArray& array : group) longest = std::max(longest, array.bytes);
    for (int64_t at = 0; at < longest; at += block_bytes) {
      for (const CopyArray& array : group) {
        if (at >= array.bytes) continue;
        out.push_back(
            {array.from + at, array.offset + at, std::min(block_bytes, array.bytes - at), array.shard, at / 4});
      }
    }
  }
  return out;
}

int64_t fetch_bytes(int64_t copy_bytes) { return std::max(int64_t{8} << 20, copy_bytes / 512 / 4 * 4); }

StateCopier::StateCopier(std::unique_ptr<DeviceLink> link, int nice) : link_(std::move(link)) {
  thread_ = std::thread([this, nice] { run(nice); });
}

StateCopier::~StateCopier() {
  stopping_ = true;
  {
    const std::lock_guard lock(mutex_);
    ordered_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Status StateCopier::cover(std::span<const std::vector<CopyArray>> groups, int64_t shards) {
  RT_CHECK(!under_way_.load(), "other parts while a copy is under way");
  int64_t bytes = 0, together = 1;
  std::vector<DeviceBytes> arrays;
  array_shards_.clear();
  for (const std::vector<CopyArray>& group : groups) {
    together = std::max(together, std::ssize(group));
    for (const CopyArray& array : group) {
      bytes += array.bytes;
      arrays.push_back({array.from, array.bytes});
      array_shards_.push_back(static_cast<size_t>(array.shard));
    }
  }
  const int64_t piece_bytes = link_->at_once() ? 0 : link_->piece_bytes(bytes);
  const int64_t at_once = link_->at_once() ? kCopyBlockBytes : std::min(fetch_bytes(bytes), piece_bytes);
  parts_ = parts_of(groups, at_once);
  shards_ = shards;
  sums_.assign(parts_.size(), 0);
  pieces_ = std::make_unique<Piece[]>(parts_.size());
  piece_of_.resize(parts_.size());
  pieces_count_ = 0;
  int64_t in_piece = 0;
  for (size_t part = 0; part < parts_.size(); ++part) {
    piece_of_[part] = pieces_count_;
    in_piece += parts_[part].bytes;
    if (in_piece < piece_bytes && part + 1 < parts_.size()) continue;
    pieces_[pieces_count_++].end = part + 1;
    in_piece = 0;
  }
  by_address_.resize(parts_.size());
  for (size_t part = 0; part < parts_.size(); ++part) by_address_[part] = part;
  std::sort(by_address_.begin(), by_address_.end(),
            [this](size_t a, size_t b) { return parts_[a].from < parts_[b].from; });
  fetches_.clear();
  if (link_->at_once()) return {};
  join_parts(at_once);
  constexpr int64_t kAlign = 64;  // as arrays are
  block_bytes_ = (piece_bytes + together * kAlign - 1) / (together * kAlign) * kAlign;
  RT_TRY_SET(device_sums_, link_->sum_up(arrays));
  return {};
}

/// Makes as few fetches of each piece as its parts allow.
void StateCopier::join_parts(int64_t most_bytes) {
  constexpr int64_t kLongestGap = 4096;  // arrays of a slot begin at pages, or closer together
  std::vector<size_t> order(parts_.size()), next_in_slot(parts_.size(), parts_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [this](size_t a, size_t b) { return parts_[a].offset < parts_[b].offset; });
  for (size_t k = 1; k < order.size(); ++k) next_in_slot[order[k - 1]] = order[k];
  const auto touch = [&](size_t a, size_t b) {
    const int64_t gap = parts_[b].from - (parts_[a].from + parts_[a].bytes);
    return next_in_slot[a] == b && gap < kLongestGap && gap == parts_[b].offset - (parts_[a].offset + parts_[a].bytes);
  };
  size_t part = 0;
  for (size_t piece = 0; piece < pieces_count_; ++piece) {
    order.clear();
    for (; part < pieces_[piece].end; ++part) order.push_back(part);
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) { return parts_[a].from < parts_[b].from; });
    for (size_t begin = 0, end; begin < order.size(); begin = end) {
      for (end = begin + 1; end < order.size() && touch(order[end - 1], order[end]);) ++end;
      const CopyPart &first = parts_[order[begin]], &last = parts_[order[end - 1]];
      const int64_t bytes = last.from + last.bytes - first.from;
      for (int64_t at = 0; at < bytes; at += most_bytes) {
        fetches_.push_back({first.from + at, first.offset + at, std::min(most_bytes, bytes - at)});
      }
    }
    pieces_[piece].end = fetches_.size();
  }
}

Status StateCopier::start(std::byte* slot, Done done) {
  RT_CHECK(!under_way_.load(), "a copy while another is under way");
  RT_TRY(status());
  RT_TRY(link_->follow_work());
  if (parts_.empty()) return done(std::vector<uint64_t>(static_cast<size_t>(shards_)));
  slot_ = slot;
  done_ = std::move(done);
  follower_ = nullptr;
  left_.store(std::ssize(parts_));
  under_way_.store(true);
  // The thread may still be looking through the last copy: it takes what it finds open. So this comes last.
  for (size_t piece = 0; piece < pieces_count_; ++piece) pieces_[piece].state.store(kOpen, std::memory_order_release);
  {
    const std::lock_guard lock(mutex_);
    ordered_ = true;
  }
  changed_.notify_all();
  return {};
}

Status StateCopier::status() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

Status StateCopier::finish() {
  for (size_t part = 0; link_->at_once() && under_way_.load() && part < parts_.size(); ++part) wait_for(part, kRead);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !under_way_.load(); });
  return failed_;
}

int64_t StateCopier::block_bytes() const {
  if (link_->at_once()) return kCopyBlockBytes;
  return under_way_.load(std::memory_order_acquire) ? block_bytes_ : std::numeric_limits<int64_t>::max();
}

void StateCopier::order_after_copy(Stream& stream, std::span<const DeviceBytes> areas) {
  if (!under_way_.load(std::memory_order_acquire)) return;
  const auto begin = std::chrono::steady_clock::now();
  const bool on_host = link_->at_once() || stream.device().kind == DeviceKind::kCpu;
  size_t pieces = 0;  // that the areas reach into, and all before
  for (const DeviceBytes& area : areas) {
    auto part = std::partition_point(by_address_.begin(), by_address_.end(),
                                     [&](size_t p) { return parts_[p].from + parts_[p].bytes <= area.first; });
    for (; part != by_address_.end() && parts_[*part].from < area.first + area.size; ++part) {
      if (on_host) wait_for(piece_of_[*part], kRead);
      pieces = std::max(pieces, piece_of_[*part] + 1);
    }
  }
  if (!on_host && pieces > 0 && (follower_ != &stream || followed_ < pieces)) {
    wait_for(pieces - 1, kOrdered);
    if (under_way_.load(std::memory_order_acquire)) stream.follow(pieces_[pieces - 1].mark);  // else it needs no more
    follower_ = &stream;
    followed_ = pieces;
  }
  waited_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
}

bool StateCopier::take(size_t part) {
  uint32_t open = kOpen;
  return pieces_[part].state.compare_exchange_strong(open, kTaken);
}

void StateCopier::wait_for(size_t piece, State state) {
  if (link_->at_once() && take(piece)) {
    if (const Status fetched = fetch(piece); !fetched.ok()) fail(fetched.error());
    return;
  }
  const std::atomic<uint32_t>& of = pieces_[piece].state;
  // The copier's thread has a shorter deadline, and says which piece has not arrived.
  const int64_t allowed_ms = 2 * link_->deadline_ms();
  int64_t reached = reached_.load();
  for (Deadline deadline(allowed_ms); of.load(std::memory_order_acquire) < state;) {
    if (allowed_ms == 0) {
      const uint32_t seen = of.load(std::memory_order_acquire);
      if (seen < state) of.wait(seen);
    } else if (const int64_t now = reached_.load(); now != reached) {
      reached = now;
      deadline = Deadline(allowed_ms);
    } else if (deadline.is_over()) {
      fail({ErrorCode::kTimeout,
            fmt::format("copying a snapshot to the host: the copier has come no further for {} ms; piece {} of {} is "
                        "waited for",
                        allowed_ms, piece + 1, pieces_count_)});
    } else {
      std::this_thread::sleep_for(kShortestNap);
    }
  }
}

/// Copies a part that is taken, where the link copies at once.
Status StateCopier::fetch(size_t part) {
  const CopyPart& p = parts_[part];
  RT_TRY_SET(const std::optional<uint64_t> sums, link_->fetch({p.from, p.bytes}, slot_ + p.offset));
  RT_CHECK(sums.has_value(), "a link that copies at once left {} bytes on their way", p.bytes);
  reach(part, kRead);
  note(part, *sums);
  return {};
}

void StateCopier::reach(size_t piece, State state) {
  ++reached_;
  pieces_[piece].state.store(state, std::memory_order_release);
  pieces_[piece].state.notify_all();
}

void StateCopier::note(size_t part, uint64_t sums) {
  sums_[part] = sums;
  if (left_.fetch_sub(1) != 1) return;
  std::vector<uint64_t> of_shards(static_cast<size_t>(shards_));
  for (size_t k = 0; k < parts_.size(); ++k) {
    uint64_t& sum = of_shards[static_cast<size_t>(parts_[k].shard)];
    sum = add_word_sums(sum, shift_word_sums(sums_[k], parts_[k].word));
  }
  complete(of_shards);
}

void StateCopier::complete(std::span<const uint64_t> sums) {
  if (!status().ok()) return;  // an update has given it up
  Status told = done_(sums);
  {
    const std::lock_guard lock(mutex_);
    if (failed_.ok()) failed_ = std::move(told);
    under_way_.store(false);
  }
  changed_.notify_all();
}

/// Nobody needs the parts any more: the update goes on, and the next call returns the error.
void StateCopier::fail(const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.ok()) failed_ = error;
    under_way_.store(false);
  }
  for (size_t piece = 0; piece < pieces_count_; ++piece) reach(piece, kRead);
  changed_.notify_all();
}

Status StateCopier::copy_parts() {
  for (size_t part = 0; part < parts_.size() && !stopping_; ++part) {
    if (take(part)) RT_TRY(fetch(part));
  }
  return {};
}

Status StateCopier::copy_pieces() {
  if (device_sums_) RT_TRY(link_->take_sums());
  size_t fetch = 0, arrived = 0, arrived_fetches = 0;
  const auto arrive_next = [&]() -> Status {
    RT_TRY(arrive(arrived));
    arrived_fetches = pieces_[arrived++].end;
    return {};
  };
  for (size_t piece = 0; piece < pieces_count_ && !stopping_; ++piece) {
    for (; fetch < pieces_[piece].end; ++fetch) {
      while (arrived < piece && static_cast<int64_t>(fetch - arrived_fetches) >= link_->depth()) RT_TRY(arrive_next());
      const Fetch& f = fetches_[fetch];
      RT_TRY(link_->fetch({f.from, f.bytes}, slot_ + f.offset));
    }
    RT_TRY_SET(pieces_[piece].mark, link_->mark());
    reach(piece, kOrdered);
  }
  while (arrived < pieces_count_ && !stopping_) RT_TRY(arrive_next());
  if (device_sums_ && !stopping_) {
    std::vector<uint64_t> of_shards(static_cast<size_t>(shards_));
    const std::span<const uint64_t> of_arrays = link_->sums();
    for (size_t array = 0; array < array_shards_.size(); ++array) of_shards[array_shards_[array]] = of_arrays[array];
    complete(of_shards);
    return {};
  }
  for (size_t k = 0; k < parts_.size() && !stopping_; ++k)
    note(k, word_sums(slot_ + parts_[k].offset, parts_[k].bytes / 4));
  return {};
}

Status StateCopier::arrive(size_t piece) {
  const std::shared_ptr<const Event> mark = pieces_[piece].mark;
  const Deadline deadline(link_->deadline_ms());
  for (auto nap = kShortestNap; mark != nullptr && !stopping_; nap = std::min(2 * nap, kLongestNap)) {
    RT_TRY_SET(const bool there, link_->has_arrived(*mark));
    if (there) break;
    if (deadline.is_over()) {
      return Error{ErrorCode::kTimeout, fmt::format("copying a snapshot to the host: piece {} of {} has not arrived "
                                                    "after {} ms",
                                                    piece + 1, pieces_count_, link_->deadline_ms())};
    }
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, nap, [this] { return stopping_.load(); });
  }
  reach(piece, kRead);
  return {};
}

void StateCopier::run(int nice) {
  // Linux: of this thread alone. A batch thread does not take the core from whoever wakes it.
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), nice);
  const sched_param none{};
  sched_setscheduler(0, SCHED_BATCH, &none);
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return ordered_; });
      ordered_ = false;
    }
    if (stopping_) return;
    const Status copied = link_->at_once() ? copy_parts() : copy_pieces();
    if (!copied.ok()) fail(copied.error());
  }
}

}  // namespace cairn::ckpt
