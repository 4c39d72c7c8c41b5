#pragma once
// Ranks as processes of one host: one shared-memory segment, made by whoever spawns the ranks (the agent) and inherited
// by them as a file descriptor. The memory lives as long as a descriptor or a mapping of it does: nothing to unlink.
// A fresh world is made for each start; after a failure of any rank a world stays aborted.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::comm {

class Segment;

struct ShmWorldConfig {
  int64_t world_size = 1;
  int64_t channel_bytes = 1 << 20;    // capacity of the ring of one directed pair: shm_channel_room() says how much
  int64_t staging_bytes = 768 << 10;  // per member of each group; a payload of any size goes through it in chunks
  int64_t local_ranks = 0;            // how many of the ranks live on this host; 0: all of them
  int64_t groups_per_rank = 16;       // room: groups of more than one rank that a rank belongs to, on average
  int64_t channels_per_rank = 8;      // room: directed pairs that a rank sends on, on average
};

/// Bytes of address space of the segment. Memory is used when it is first touched: see the two below.
/// Errors: kInvalidInput for a field out of range. Threads: pure.
Result<int64_t> shm_world_bytes(const ShmWorldConfig& config);

/// Bytes a group of `size` members takes from the segment once it exists, and a channel once it is used.
int64_t shm_group_bytes(const ShmWorldConfig& config, int64_t size);
int64_t shm_channel_bytes(const ShmWorldConfig& config);

/// `channel_bytes` in which so many messages of so many bytes lie whole. What does not fit waits until the sender is in
/// an operation again, however long it computes before: the receiver waits for that, too.
int64_t shm_channel_room(int64_t messages, int64_t bytes);

/// The operations of one thread of a rank.
struct OperationView {
  bool inside = false;     // within one
  int64_t operations = 0;  // finished so far
  int64_t awaits = -1;     // a rank that it waits for: in shared memory since at least a millisecond
  int64_t since_ms = 0;    // since the last one began
  std::string text;        // "in tp[0,1].all_reduce(attn.out), entered 12 ms ago"; empty before the first
};

/// What a rank is doing, for the agent's hang reports. Its own thread's operations are the base's.
struct RankView : OperationView {
  OperationView beside;  // of the thread that reduces and gathers beside it (comm/lane.h)
  int64_t pid = 0;       // 0: not attached yet
  bool closed = false;
  int64_t step = -1;  // as told through Engine::at
  std::string phase;  // of the step
  std::string
      description;  // both texts, and the place: "in tp[0,1]..., at step 5 (optimizer); beside it in dp[0,1]..."
  /// Of both threads: a rank whose number stands still makes no progress.
  int64_t finished_operations() const { return operations + beside.operations; }
};

/// The creator's side. Movable; dropping it does not disturb the ranks.
class ShmWorld {
 public:
  static Result<ShmWorld> create(const ShmWorldConfig& config);

  /// Close-on-exec is set: clear it in the child (or dup the descriptor there) before it executes the rank program.
  int fd() const { return fd_.get(); }
  int64_t bytes() const { return bytes_; }
  /// Bytes handed out to groups and channels so far.
  int64_t used_bytes() const;

  /// Wakes every rank that waits, with `kStopped` (or `code`) and this reason. Safe from any thread.
  void abort(std::string_view reason, ErrorCode code = ErrorCode::kStopped);
  bool aborted() const;
  /// Why; empty while the world runs.
  std::string abort_reason() const;
  std::vector<RankView> ranks() const;

 private:
  ShmWorld(Fd fd, std::shared_ptr<Segment> segment, int64_t bytes)
      : fd_(std::move(fd)), segment_(std::move(segment)), bytes_(bytes) {}
  Fd fd_;
  std::shared_ptr<Segment> segment_;
  int64_t bytes_;
};

/// The rank's side. The descriptor may be closed afterwards.
/// Errors: kInvalidInput for a descriptor that holds no world, a rank out of range or one that is taken already.
Result<std::unique_ptr<Engine>> attach_shm_engine(int fd, int64_t rank, Options options);

}  // namespace cairn::comm
