#pragma once
// Looks after what NCCL was asked for, since NCCL has no deadlines: a thread that sees whether operations end, whether
// NCCL has found an error, and whether the other ranks have given up. The first of these ends all communicators of the
// rank together, and the others are told.
//
// Life of an operation: 1. It is ordered on a stream between two marks. 2. The watcher sees that the device has come to
// the first: from then on its time counts. 3. It sees the second: done. Where that does not come within the deadline,
// the rank gives up with the operation's name and place. Operations of a stream end in order, so one of each is looked
// at. While one is waited for, a rank of its group that has died ends it at once; at the deadline it says who is
// stopped, or where the others are. Both of ranks on the same host: of others it knows the host alone.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "runtime/comm/linked_engine.h"
#include "runtime/core/result.h"
#include "runtime/cuda/nccl/communicators.h"
#include "runtime/cuda/stream.h"

namespace cairn::cuda {

struct WatcherHooks {
  /// Why the other ranks have given up; nothing while they go on. Cheap.
  std::function<std::optional<Error>()> others_failed;
  /// Why this rank gives up, once, before anything else: what comes behind may hang.
  std::function<void(const Error&)> failed;
  /// Tells them of the error for which this rank gives up.
  std::function<void(const Error&)> give_up;
  /// A rank of this host. Of one that cannot be seen there is nothing.
  std::function<std::optional<comm::LinkedEngine::Seen>(int64_t world_rank)> look_at;
};

/// Threads: any.
class Watcher {
 public:
  /// `comms` outlives it.
  Watcher(Communicators& comms, int64_t deadline_ms, WatcherHooks hooks);
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  /// One of `stream`, between the two marks. `name`: "dp[0,1].all_reduce(gradients)"; `others`: world ranks that it
  /// waits for.
  void watch(const CudaStream& stream, std::string name, std::shared_ptr<const std::vector<int64_t>> others,
             std::shared_ptr<const Event> begin, std::shared_ptr<const Event> end);
  /// By world rank the host that each is on, and which of them this is: for messages.
  void know(int64_t rank, std::vector<std::string> host_of_rank);
  /// Where the rank is, for messages.
  void at(int64_t step, std::string_view phase);
  /// The rank gives up; the first call is the one that counts. `tell`: the others do not know.
  void fail(Error error, bool tell);
  /// Why it has.
  Status failed() const;
  /// Until no operation is under way, or the rank has given up.
  void wait_for_rest();

 private:
  using Clock = std::chrono::steady_clock;
  struct Operation {
    std::string name;
    std::shared_ptr<const std::vector<int64_t>> others;
    std::shared_ptr<const Event> begin, end;
    int64_t number = 0, step = -1;  // of the stream; -1: before the first
    std::string phase;
    std::optional<Clock::time_point> since;
  };
  struct Line {
    int64_t last = 0;
    std::deque<Operation> operations;
  };
  void run();
  /// An operation that is over its time, or why the device cannot be asked.
  Status look();
  Status look_at(Line& line);
  /// A rank that died; `late`: or else what there is to say of all.
  Status look_at_others(const Operation& operation, bool late) const;

  /// Of what is waited for longest; empty: of nothing.
  std::string longest() const;
  std::string host_of(int64_t rank) const;

  Communicators& comms_;
  const std::chrono::milliseconds deadline_, period_;
  const WatcherHooks hooks_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::map<const CudaStream*, Line> lines_;
  int64_t rank_ = 0;
  std::vector<std::string> host_of_rank_;
  bool several_hosts_ = false;
  int64_t step_ = -1;
  std::string phase_;
  Status failed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace cairn::cuda
