#pragma once
// The engine of ranks that share a Segment, threads and processes alike: one implementation of each collective.
//
// Collectives. A group has a sequence of barriers t = 0, 1, 2, ... A member writes into its staging slot t % 3 before
// it arrives at barrier t; others may read that slot from then until they arrive at barrier t + 2. So a slot is written
// again (t + 3) only after everybody passed barrier t + 2 and has read it. Hence one barrier a chunk:
//   all_gather, broadcast, reduce_scatter, small all_reduce:  write slot t, barrier t, read slot t
//   large all_reduce, chunk c: write c, barrier t, reduce own slice of c within the own slot and write chunk c + 1,
//                              barrier t + 1, read everybody's slice of c (and reduce c + 1), ...
//
// Waiting. A short spin (or a few yields when there are more ranks than CPUs), then sleep on the rank's doorbell in
// slices. Each wait also moves pending point-to-point sends, and looks at the abort word, the liveness of whom it waits
// for, and the deadline.

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/comm/group.h"
#include "runtime/comm/linked_engine.h"
#include "runtime/comm/segment.h"

namespace cairn::comm {

/// One direction of a pair, at the source.
struct SendQueue {
  struct Message {
    char header[64];
    int64_t header_sent = 0;
    const char* data = nullptr;
    int64_t bytes = 0, sent = 0;
  };
  Channel* channel = nullptr;
  int64_t destination = 0;  // world rank
  uint64_t sequence = 0;
  std::deque<Message> messages;
};

/// What the engine and the groups of one rank share.
class RankContext {
 public:
  RankContext(std::shared_ptr<Segment> segment, int64_t rank, Options options);
  ~RankContext();

  Segment& segment() { return *segment_; }
  int64_t rank() const { return rank_; }

  /// Waits until `done()`. `missing(out)` appends the world ranks still awaited: they are watched, and named at the
  /// deadline. `done` must read shared state with sequentially consistent loads. Any error aborts the world.
  template <typename Done, typename Missing>
  Status wait(const Site& site, const Done& done, const Missing& missing) {
    if (done()) return {};
    const int64_t budget = spin_budget();
    for (int64_t i = 0; i < budget; ++i) {
      linger(i);
      if (done()) {
        spin_.store(max_spin_, std::memory_order_relaxed);
        return {};
      }
    }
    spin_.store(budget / 2, std::memory_order_relaxed);
    return wait_asleep(
        site, [&] { return done(); }, [&](std::vector<int64_t>& out) { missing(out); });
  }

  /// Gives the world up with this error and returns what the caller should return.
  Error fail(Error error);
  /// The error for an operation begun or waiting in an aborted world.
  Error aborted_error(const Site& site);

  void push(SendQueue& queue, SendQueue::Message message);
  /// Moves pending sends as far as the rings take them.
  void progress();
  void progress_if_any() {
    if (sending_count_.load(std::memory_order_relaxed) > 0) progress();
  }
  bool idle(const std::vector<SendQueue*>& queues);
  /// Messages of the queue that have not left completely.
  int64_t under_way(const SendQueue& queue);
  /// The owner of `queue` goes: what it still holds is dropped.
  void forget(SendQueue& queue);

 private:
  // Before it sleeps a rank lingers. With a CPU for each rank it spins, about as long as a sleep and a wake cost, and
  // yields now and then: the scheduler may have put both sides on one CPU. When ranks share CPUs it only yields. In
  // vain, it lingers half as long the next time; each kProbe-th wait lingers in full again, so that one busy phase does
  // not make all later waits slow.
  static constexpr int64_t kProbe = 32;
  static constexpr int64_t kSpins =
      1024;  // of some 40 ns each: waking a sleeper on an idle CPU of a virtual machine was seen to take 28 us
  static constexpr int64_t kSpinsPerYield = 32;
  static constexpr int64_t kYields = 16;

  int64_t spin_budget() {
    const uint64_t n = waits_.load(std::memory_order_relaxed);
    waits_.store(n + 1, std::memory_order_relaxed);
    return n % kProbe == 0 ? max_spin_ : spin_.load(std::memory_order_relaxed);
  }
  void linger(int64_t turn) const;
  Status wait_asleep(const Site& site, const std::function<bool()>& done,
                     const std::function<void(std::vector<int64_t>&)>& missing);
  /// An error if `rank` is gone. `look` also asks the system whether its process lives.
  Status check_alive(const Site& site, int64_t rank, bool look);
  Error deadline_error(const Site& site, const std::vector<int64_t>& missing);
  bool advance(SendQueue& queue);

  const std::shared_ptr<Segment> segment_;
  const int64_t rank_;
  const Options options_;
  const bool crowded_;  // more ranks than CPUs
  const int64_t max_spin_;
  std::atomic<int64_t> spin_;
  std::atomic<uint64_t> waits_ = 0;
  std::mutex sends_mutex_;
  std::vector<SendQueue*> sending_;  // those with messages, under the mutex
  std::atomic<int64_t> sending_count_ = 0;
  std::mutex peers_mutex_;
  std::map<int64_t, Fd> peers_;  // pidfd of each rank watched so far
};

class SegmentEngine final : public LinkedEngine {
 public:
  /// The rank slot must have been claimed.
  SegmentEngine(std::shared_ptr<Segment> segment, int64_t rank, Options options);
  ~SegmentEngine() override;
  int64_t world_rank() const override { return context_->rank(); }
  int64_t world_size() const override { return context_->segment().world_size(); }
  bool keeps_rank_order() const override { return true; }
  Result<std::unique_ptr<Comm>> group(std::string_view axis, const std::vector<int64_t>& world_ranks) override;
  void abort(std::string_view reason) override;
  void at(int64_t step, std::string_view phase) override {
    context_->segment().publish_place(context_->rank(), step, phase);
  }
  void give_up(ErrorCode code, std::string_view reason) override;
  std::optional<Error> dead() override;
  std::optional<Seen> look_at(int64_t rank) override;
  void operation_begins(const Site& site) override {
    context_->segment().publish_begin(world_rank(), site.group, site.op, site.what);
  }
  void operation_ends() override { context_->segment().publish_end(world_rank()); }
  void operation_awaits(int64_t rank) override { context_->segment().publish_awaits(world_rank(), rank); }

 private:
  std::shared_ptr<RankContext> context_;
  std::map<std::string, int64_t> instances_;  // groups made so far, by name
};

/// Claims the slot of `rank` for this process. Errors: kInvalidInput for a rank out of range or taken.
Status claim_rank(Segment& segment, int64_t rank);

}  // namespace cairn::comm
