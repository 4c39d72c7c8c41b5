#pragma once
// One piece of shared memory through which the ranks of a host communicate, as threads (anonymous memory) or as
// processes (a memfd that the ranks inherit). It holds everything the ranks share; nothing in it is a pointer.
//
//   header          sizes, the abort word with its reason, the lock of the tables
//   rank slots      liveness (state, pid, start time), doorbell, the operations the rank is in, one a thread
//   group table     one entry per communicator group, made by whichever member comes first
//   channel table   one entry per directed pair of a group that talks point to point, made likewise
//   heap            barrier state and staging areas of the groups, rings of the channels; handed out, never taken back
//
// A world is made once and thrown away as a whole: after any failure it stays aborted.
//
// Sleeping and waking. Each rank has one doorbell, a futex word. Who waits announces it in `sleepers`, reads the
// doorbell, looks at its condition once more and sleeps; who changes something looks at `sleepers` after the change and
// rings. Both sides use sequentially consistent accesses, so one of them sees the other.

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/rank_thread.h"
#include "runtime/comm/shm_world.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::comm {

constexpr int64_t kStages = 3;          // staging slots of a member; see segment_comm.h for why three suffice
constexpr int64_t kOpWords = 16;        // 128 bytes of text: the operation a rank is in
constexpr int64_t kPhaseWords = 4;      // 32 bytes of text: the part of a step that a rank is in
constexpr int64_t kAxisBytes = 40;      // longest axis name, with its terminating zero
constexpr int64_t kReasonBytes = 1024;  // longest abort reason
constexpr int64_t kLine = 64;           // alignment of everything that two ranks write

enum class RankState : uint32_t { kAbsent, kAttached, kClosed };
enum class AbortState : uint32_t { kRunning, kWriting, kSet };

/// The operations of one of a rank's two threads.
struct alignas(kLine) OperationSlot {
  std::atomic<uint64_t> begun, ended;    // inside an operation while they differ
  std::atomic<int64_t> since_ns;         // monotonic, when the last operation began
  std::atomic<uint64_t> text[kOpWords];  // of the last operation begun
  std::atomic<int32_t> awaits;  // 1 + the first rank that it waits for; 0: none, or not for long (in shared memory)
};

struct alignas(kLine) RankSlot {
  std::atomic<uint32_t> state;
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> start_time;  // of the process, in clock ticks since boot: tells a recycled pid
  alignas(kLine) std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleepers;
  OperationSlot operations[kRankThreads];
  std::atomic<int32_t> placed;  // whether step and phase were told
  std::atomic<int64_t> step;
  std::atomic<uint64_t> phase_text[kPhaseWords];
};

struct GroupEntry {
  char axis[kAxisBytes];
  int32_t size;
  int32_t instance;  // 0 for the first group that a rank makes with this axis and these ranks, then 1, ...
  int64_t ranks_offset, state_offset, staging_offset;
};

struct ChannelEntry {
  int32_t group, src, dst;  // group ranks
  int64_t offset;
};

/// What a member says of its call before a barrier, so that members who disagree find out.
struct CallMark {
  std::atomic<uint64_t> call;  // kind, dtype, op, root
  std::atomic<uint64_t> bytes;
};

struct alignas(kLine) MemberState {
  std::atomic<uint64_t> arrived;  // barriers arrived at; for messages about who is missing
  CallMark marks[kStages];
};

struct alignas(kLine) GroupState {
  std::atomic<uint64_t> count;  // arrivals of all members; barrier t is complete at size * (t + 1)
  MemberState* members() { return reinterpret_cast<MemberState*>(this + 1); }
};

/// A byte ring from one rank to another. head and tail count bytes since creation.
struct alignas(kLine) Channel {
  std::atomic<uint64_t> head;  // written by the source
  std::atomic<uint32_t> source_waits;
  alignas(kLine) std::atomic<uint64_t> tail;  // written by the destination
  std::atomic<uint32_t> destination_waits;
  char* ring() { return reinterpret_cast<char*>(this + 1); }
};

struct SegmentHeader {
  uint64_t magic;
  int64_t world_size, local_ranks, total_bytes;
  int64_t stage_bytes;    // one of a member's kStages slots
  int64_t channel_bytes;  // capacity of a ring
  int64_t slots_offset, groups_offset, max_groups, channels_offset, max_channels, heap_offset;
  pthread_mutex_t lock;  // of the tables and the heap; robust: a holder may be killed
  int64_t heap_used, group_count, channel_count;
  alignas(kLine) std::atomic<uint32_t> abort_state;
  int32_t abort_code;
  char abort_reason[kReasonBytes];
};

/// Owner of the mapping.
class Segment {
 public:
  static Result<std::shared_ptr<Segment>> create_anonymous(const ShmWorldConfig& config);
  static Result<std::shared_ptr<Segment>> create_memfd(const ShmWorldConfig& config, Fd* fd);
  static Result<std::shared_ptr<Segment>> attach(int fd);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(base_); }
  int64_t world_size() { return header().world_size; }
  RankSlot& slot(int64_t rank) { return at<RankSlot>(header().slots_offset)[rank]; }
  /// Of the calling thread.
  OperationSlot& operations(int64_t rank) { return slot(rank).operations[static_cast<int>(current_rank_thread())]; }
  template <typename T>
  T* at(int64_t offset) {
    return reinterpret_cast<T*>(base_ + offset);
  }

  /// Finds the group or makes it. Errors: kInvalidInput when the table or the heap is full.
  Result<int64_t> find_or_make_group(std::string_view axis, const std::vector<int64_t>& world_ranks, int64_t instance);
  GroupEntry& group(int64_t index) { return at<GroupEntry>(header().groups_offset)[index]; }
  /// `group` is an index; `src` and `dst` are group ranks.
  Result<Channel*> find_or_make_channel(int64_t group, int64_t src, int64_t dst);

  /// Bytes of the heap handed out so far.
  int64_t used_bytes();

  /// The first reason wins; rings everybody. True if this call was the first.
  bool abort(ErrorCode code, std::string_view reason);
  bool aborted() { return header().abort_state.load(std::memory_order_relaxed) != 0; }
  /// The error of an aborted world.
  Error abort_error();

  /// Wakes `rank` if it sleeps. The change it waits for must have been made with a sequentially consistent store.
  void ring(int64_t rank);
  /// Sleeps until the doorbell of `rank` is no longer `seen`, or `timeout_ns` pass. Spurious returns happen.
  void sleep(int64_t rank, uint32_t seen, int64_t timeout_ns);

  void publish_begin(int64_t rank, std::string_view group, std::string_view op, std::string_view what);
  void publish_end(int64_t rank);
  /// -1: nobody.
  void publish_awaits(int64_t rank, int64_t awaited) {
    operations(rank).awaits.store(static_cast<int32_t>(awaited + 1), std::memory_order_relaxed);
  }
  void publish_place(int64_t rank, int64_t step, std::string_view phase);
  static OperationView view(const OperationSlot& operations);
  /// "forward and backward"; empty before the first place.
  std::string phase(int64_t rank);
  /// "in tp[0,1].all_reduce(attn.out), entered 12 ms ago, at step 5 (optimizer)", "outside of any operation, after
  /// ...", "not started yet"; then that of the other thread, if it has begun any: "; beside it in dp[0,1]...".
  std::string describe_operation(int64_t rank);

 private:
  Segment(std::byte* base, int64_t bytes) : base_(base), bytes_(bytes) {}
  /// "in tp[0,1].all_reduce(attn.out), entered 12 ms ago"; empty before the first.
  static std::string describe(const OperationSlot& operations);
  static Result<std::shared_ptr<Segment>> map(int fd, int64_t bytes);
  void format(const ShmWorldConfig& config);
  Status lock();
  void unlock();
  Result<int64_t> take(int64_t bytes, std::string_view what);

  std::byte* base_;
  int64_t bytes_;
};

/// Start time of a process in clock ticks since boot, 0 if there is no such process or it has ended.
uint64_t process_start_time(int64_t pid);

int64_t monotonic_ns();

}  // namespace cairn::comm
