#pragma once
// A double of NCCL over that of the CUDA runtime (stream_double.h) and memory that the ranks share, for tests of code
// that communicates among devices. Ranks are processes, each with a double of the runtime and one of NCCL.
//
// What is asked for is done late: when its stream comes to it, it arrives, and it is done once the others have come
// too. A send waits for its receiver, and reads its buffer then. Operations of a communicator come one after another,
// also on several streams; with an odd seed so do all collectives of a rank, as on a device that has room for one.
// Sums are added as a ring does: another order than that of ranks, the same each time.
// Memory that a communicator has registered is used by what it does there alone: as in NCCL, memory that is not of
// mem_alloc() is taken and never used, a variable of NCCL's turns all of it off, and an abort takes registrations
// along. Calls may be in progress when they return, by the seed. What a program may not do, and NCCL need not notice,
// is in misuses(): other calls on a communicator's ranks than on this one, sizes that differ, a call on a communicator
// that is not ready, memory of some ranks registered and that of others not, registrations of memory that is gone or
// left behind where a communicator is finalized. Such an operation never ends, as NCCL's may not.
//
// Proves the order of calls, and nothing of NCCL, a device or a driver. Threads: any may call.

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/cuda/nccl_api.h"
#include "tests/simt/stream_double.h"

namespace cairn::simt {

constexpr int kNcclInvalidArgument = 4, kNcclInvalidUsage = 5, kNcclRemoteError = 6;

/// What the ranks share; made before they are.
class NcclSegment {
 public:
  NcclSegment();
  /// In a file, for ranks that do not come of one process: made where it is not there.
  explicit NcclSegment(const char* path);
  ~NcclSegment();
  NcclSegment(const NcclSegment&) = delete;
  NcclSegment& operator=(const NcclSegment&) = delete;

  struct Group;
  /// Of a communicator, found or made. Threads and processes: any.
  Group& group(uint64_t id, int size);
  uint64_t next_id();

 private:
  struct Header;
  explicit NcclSegment(int file);
  Header* header_ = nullptr;
};

/// While it lives the device goes on by itself, whatever the host is at: other ranks may wait for it.
class DeviceRuns {
 public:
  explicit DeviceRuns(StreamDouble& cuda);
  ~DeviceRuns();
  DeviceRuns(const DeviceRuns&) = delete;
  DeviceRuns& operator=(const DeviceRuns&) = delete;

 private:
  std::atomic<bool> over_ = false;
  std::thread thread_;
};

/// One at a time in a process.
class NcclDouble {
 public:
  NcclDouble(StreamDouble& cuda, NcclSegment& segment, uint64_t seed, int version = 22809);
  ~NcclDouble();
  NcclDouble(const NcclDouble&) = delete;
  NcclDouble& operator=(const NcclDouble&) = delete;

  const cuda::NcclApi& api() const { return api_; }

  // --- faults of programs, and of what they run on
  /// The collective after so many more is asked for behind the one that follows it.
  void swap_calls(int64_t after) { swap_ = after; }
  /// As NCCL_LAUNCH_ORDER_IMPLICIT=1 in the environment, which counts here too: what a rank asks for begins in that
  /// order, over all communicators.
  void order_launches(bool ordered) { ordered_ = ordered; }
  /// Calls to begin and end a group do nothing.
  void without_groups() { groups_ = false; }
  /// Whoever aborts a communicator never comes back.
  void hang_aborts() { aborts_hang_ = true; }
  /// Whoever aborts one with memory registered dies: NCCL gives it back with what it has freed before.
  void crash_aborts() { aborts_crash_ = true; }
  /// Calls to give a registration back do nothing.
  void without_deregistering() { deregisters_ = false; }
  /// What mem_alloc() gives comes in pieces of this size.
  void allocate_in_pieces_of(int64_t bytes) { piece_ = bytes; }
  /// Each communicator has this error from now on.
  void fail(int code);

  std::vector<std::string> misuses();
  /// Communicators that were neither destroyed nor aborted.
  int64_t left() const;
  int64_t collectives() const { return collectives_; }
  /// Launches: groups that have ended, and calls in none.
  int64_t launches() const { return launches_; }
  /// Communicators made so far by an id, and by splitting another.
  int64_t made() const { return made_; }
  int64_t split() const { return split_; }
  /// The most blocks that each split was asked to take, in the order of the calls; INT_MIN: what NCCL wants.
  std::vector<int> split_blocks() const { return split_blocks_; }
  /// Registrations so far, those that are there, and operations in registered memory.
  int64_t registered() const { return registered_; }
  int64_t registrations_left() const;
  int64_t in_registered() const { return in_registered_; }
  /// Ranks' registered memory that was mapped for another one, by an operation that was not a small one.
  int64_t mapped() const { return mapped_; }

  struct Comm;
  struct Work;

 private:
  friend struct NcclCalls;
  int make(Comm** comm, int size, uint64_t id, int rank);
  int split(Comm* parent, int color, int key, Comm** child);
  int state(Comm* comm, int* error);
  int finalize(Comm* comm);
  int close(Comm* comm, bool aborted);
  int collective(Comm* comm, cuda::StreamHandle stream, std::shared_ptr<Work> work);
  int transfer(Comm* comm, cuda::StreamHandle stream, bool sends, std::byte* data, int64_t bytes, int peer);
  int mem_alloc(void** memory, int64_t bytes);
  int mem_free(void* memory);
  int register_memory(Comm* comm, void* memory, int64_t bytes, void** handle);
  int deregister(Comm* comm, void* handle);
  void use(Work& work);
  int begin_group();
  int end_group();
  int begin_call(Comm* comm, const char* what);
  int issue(cuda::StreamHandle stream, std::shared_ptr<Work> work);
  bool step(Work& work);
  bool arrived(Work& work);
  bool move(Work& work);
  void misuse(std::string what);

  StreamDouble& cuda_;
  NcclSegment& segment_;
  const uint64_t seed_;
  const int version_;
  cuda::NcclApi api_;
  mutable std::recursive_mutex mutex_;
  uint64_t calls_ = 0;
  std::vector<std::unique_ptr<Comm>> comms_;
  std::deque<std::shared_ptr<Work>> device_;   // collectives, as they were asked for, that are not done
  std::deque<std::shared_ptr<Work>> waiting_;  // all, as they were asked for, that have not begun
  struct Held;
  std::unique_ptr<Held> held_;  // that is asked for behind the next one
  std::vector<std::string> misuses_;
  std::atomic<int64_t> launches_ = 0;
  int64_t swap_ = -1, collectives_ = 0, made_ = 0, split_ = 0;
  std::vector<int> split_blocks_;
  int64_t piece_ = cuda::kNcclPiece, registered_ = 0, in_registered_ = 0, mapped_ = 0;
  bool groups_ = true, ordered_, aborts_hang_ = false, aborts_crash_ = false, deregisters_ = true;
};

}  // namespace cairn::simt
