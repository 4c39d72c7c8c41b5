#include "ckpt/copy/state_copier.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "runtime/core/check.h"
#include "runtime/core/word_sums.h"

namespace cairn::ckpt {

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

int64_t StateCopier::block_bytes() const {
  if (link_->at_once()) return kCopyBlockBytes;
  if (!under_way_.load()) return std::numeric_limits<int64_t>::max();
  return std::max(int64_t{64} << 20, bytes_ / kMostGateCalls);
}

void StateCopier::cover(std::vector<CopyPart> parts, int64_t shards) {
  RT_CHECK(!under_way_.load(), "other parts while a copy is under way");
  parts_ = std::move(parts);
  shards_ = shards;
  bytes_ = 0;
  for (const CopyPart& part : parts_) bytes_ += part.bytes;
  sums_.assign(parts_.size(), 0);
  states_ = std::make_unique<std::atomic<uint32_t>[]>(parts_.size());
  for (size_t part = 0; part < parts_.size(); ++part) states_[part].store(kRead);
  by_address_.resize(parts_.size());
  for (size_t part = 0; part < parts_.size(); ++part) by_address_[part] = part;
  std::sort(by_address_.begin(), by_address_.end(),
            [this](size_t a, size_t b) { return parts_[a].from < parts_[b].from; });
}

Status StateCopier::start(std::byte* slot, Done done) {
  RT_CHECK(!under_way_.load(), "a copy while another is under way");
  RT_TRY(status());
  RT_TRY(link_->follow_work());
  if (parts_.empty()) return done(std::vector<uint64_t>(static_cast<size_t>(shards_)));
  slot_ = slot;
  done_ = std::move(done);
  left_.store(std::ssize(parts_));
  under_way_.store(true);
  // The thread may still be looking through the last copy: it takes what it finds open. So this comes last.
  for (size_t part = 0; part < parts_.size(); ++part) states_[part].store(kOpen, std::memory_order_release);
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
  for (size_t part = 0; under_way_.load() && part < parts_.size(); ++part) wait_for(part);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !under_way_.load(); });
  return failed_;
}

// Whatever the stream: a part that is on its way has no event that a stream could follow, since the copier's thread
// asks for parts as they come.
void StateCopier::order_after_copy(Stream& /*stream*/, std::span<const DeviceBytes> areas) {
  if (!under_way_.load(std::memory_order_acquire)) return;
  const auto begin = std::chrono::steady_clock::now();
  for (const DeviceBytes& area : areas) {
    auto part = std::partition_point(by_address_.begin(), by_address_.end(),
                                     [&](size_t p) { return parts_[p].from + parts_[p].bytes <= area.first; });
    for (; part != by_address_.end() && parts_[*part].from < area.first + area.size; ++part) wait_for(*part);
  }
  waited_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
}

bool StateCopier::take(size_t part) {
  uint32_t open = kOpen;
  return states_[part].compare_exchange_strong(open, kTaken);
}

void StateCopier::wait_for(size_t part) {
  if (link_->at_once() && take(part)) {
    const Result<bool> fetched = fetch(part);
    if (!fetched.ok()) fail(fetched.error());
    return;
  }
  for (uint32_t seen; (seen = states_[part].load(std::memory_order_acquire)) != kRead;) states_[part].wait(seen);
}

Result<bool> StateCopier::fetch(size_t part) {
  const CopyPart& p = parts_[part];
  RT_TRY_SET(const std::optional<uint64_t> sums, link_->fetch({p.from, p.bytes}, slot_ + p.offset));
  if (!sums) return false;
  let_overwrite(part);
  note(part, *sums);
  return true;
}

void StateCopier::let_overwrite(size_t part) {
  states_[part].store(kRead, std::memory_order_release);
  states_[part].notify_all();
}

void StateCopier::note(size_t part, uint64_t sums) {
  sums_[part] = sums;
  if (left_.fetch_sub(1) != 1) return;
  std::vector<uint64_t> of_shards(static_cast<size_t>(shards_));
  for (size_t k = 0; k < parts_.size(); ++k) {
    uint64_t& sum = of_shards[static_cast<size_t>(parts_[k].shard)];
    sum = add_word_sums(sum, shift_word_sums(sums_[k], parts_[k].word));
  }
  Status told = done_(of_shards);
  {
    const std::lock_guard lock(mutex_);
    if (failed_.ok()) failed_ = std::move(told);
    under_way_.store(false);
  }
  changed_.notify_all();
}

/// Nobody needs the parts any more: who waits goes on, and is told by the next call.
void StateCopier::fail(const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.ok()) failed_ = error;
    failing_ = true;
    under_way_.store(false);
  }
  for (size_t part = 0; part < parts_.size(); ++part) let_overwrite(part);
  changed_.notify_all();
}

void StateCopier::copy_all() {
  std::deque<size_t> coming, there;  // on their way; on the host, without sums
  const auto arrive = [&]() -> Status {
    RT_TRY(link_->arrive());
    let_overwrite(coming.front());
    there.push_back(coming.front());
    coming.pop_front();
    return {};
  };
  const auto attempt = [&]() -> Status {
    for (size_t part = 0;;) {
      // Before a sum is taken, which is slower than a device copies: neither it nor the update waits for sums.
      while (!coming.empty()) {
        RT_TRY_SET(const bool is_there, link_->has_arrived());
        if (!is_there) break;
        RT_TRY(arrive());
      }
      for (; std::ssize(coming) < link_->depth() && part < parts_.size() && !stopping_ && !failing_; ++part) {
        if (!take(part)) continue;
        RT_TRY_SET(const bool is_there, fetch(part));
        if (!is_there) coming.push_back(part);
      }
      if (stopping_) there.clear();  // nobody wants their sums
      if (!there.empty()) {
        const size_t summed = there.front();
        there.pop_front();
        note(summed, word_sums(slot_ + parts_[summed].offset, parts_[summed].bytes / 4));
      } else if (!coming.empty()) {
        RT_TRY(arrive());
      } else {
        return {};
      }
    }
  };
  if (const Status copied = attempt(); !copied.ok()) fail(copied.error());
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
    copy_all();
  }
}

}  // namespace cairn::ckpt
