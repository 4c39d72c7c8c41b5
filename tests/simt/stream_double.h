#pragma once
// A deterministic double of the CUDA runtime, for tests of code that orders work on a device. Streams are queues. Work
// is done late: when the host waits, asks, or a queue is long; one piece at a time, of a stream that a seed chooses
// among those whose next piece waits for no event: with an even seed each time anew, with an odd one always the first
// in an order of all streams, so that some come very late. So an edge that is missing shows in the results under some
// seed, and a failure comes again with it. While host code runs, device memory cannot be touched (device_memory.h).
//
// A call gives 0 or a cudaError_t. What a program may not do, and a real runtime need not notice, is in misuses().
// The default stream is refused: it waits for others, and others for it, without a word.
//
// Proves the order of calls, and nothing of a device or a driver. Threads: any may call; work is done by one that
// waits.
//
// With Backing::kNone it is a recorder, for steps of real models. It does no work, reserves addresses without memory
// for the device, and gives zeros to the host. Callers order the same work, and on_order() reports it in either case.

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "runtime/kernels/cuda/queue.h"

namespace cairn::simt {

// Those of cudaError_t that the double gives by itself.
constexpr int kInvalidValue = 1, kNoMemory = 2, kNoDevice = 100, kInvalidDevice = 101, kInvalidHandle = 400,
              kNotReady = 600, kNotInCapture = 900, kCaptureInvalid = 901, kCaptureUnjoined = 904,
              kCaptureIsolation = 905;

struct Launch;

/// A piece of work as a stream is asked for it.
struct Ordered {
  enum class Kind { kOther, kKernel, kProduct, kFill, kCopy };
  Kind kind = Kind::kOther;
  const void* kernel = nullptr;
  /// kKernel: blocks, threads (x, y, z each), bytes of shared memory. kProduct: rows, columns, depth, types of factors
  /// and result, transposes, epilogue, whether it adds. kFill, kCopy: bytes; of a copy too whether it is to the device,
  /// from the device.
  std::array<int64_t, 9> numbers = {};
  int64_t stream = 0;  // by the order in which streams were made
  bool operator==(const Ordered&) const = default;
};
Ordered ordered_kernel(const Launch& launch);

enum class Backing { kMemory, kNone };

class StreamDouble {
 public:
  using Stream = CUstream_st*;
  struct Event;
  struct Graph;

  explicit StreamDouble(uint64_t seed, int64_t memory_bytes = int64_t{1} << 30, Backing backing = Backing::kMemory);
  ~StreamDouble();
  StreamDouble(const StreamDouble&) = delete;
  StreamDouble& operator=(const StreamDouble&) = delete;

  int allocate(void** memory, int64_t bytes);
  int free(void* memory);
  /// The same of virtual memory, which the runtime knows nothing of: to unmap it waits for nothing.
  int map(void** memory, int64_t bytes);
  int unmap(void* memory);
  int pin(void* host, int64_t bytes);
  int unpin(void* host);

  int create_stream(Stream* stream);
  int destroy_stream(Stream stream);  // what is in it is still done
  /// `timed`: it keeps when it was reached.
  int create_event(Event** event, bool timed = false);
  int destroy_event(Event* event);

  int record(Event* event, Stream stream);
  int wait_event(Stream stream, Event* event);
  /// What comes next in the stream comes when the host has raised `word`, which is pinned, to `value`, counted round.
  int wait_word(Stream stream, const std::atomic<uint32_t>* word, uint32_t value);
  /// Host memory that is not pinned is read before the call returns; written too, which waits for the stream.
  int copy(void* to, const void* from, int64_t bytes, Stream stream);
  int set(void* memory, int value, int64_t bytes, Stream stream);
  int host_function(Stream stream, std::function<void()> work);
  /// Launches of kernels come here while the double lives.
  int launch(Stream stream, std::function<void()> work, const Ordered& as = {});
  /// From now on each piece that is launched takes longer, by `more` empty ones behind it.
  void slow(std::function<int64_t(const Ordered&)> more) { more_ = std::move(more); }
  /// Work that waits for other processes: it is tried until it says that it is over. No part of a capture.
  int launch_waiting(Stream stream, std::function<bool()> work);

  int query(Event* event);
  int synchronize(Event* event);
  /// Between two timed events that were reached. A piece of work of any stream takes a microsecond, a wait and an event
  /// take nothing.
  int elapsed(float* ms, Event* from, Event* to);
  int synchronize(Stream stream);
  int synchronize();

  int begin_capture(Stream stream);
  /// Of the stream, and of those that follow its events. All must have come back to it.
  int end_capture(Stream stream, Graph** graph);
  int launch(Graph* graph, Stream stream);
  int destroy_graph(Graph* graph);

  /// Bytes that may be allocated, on all its devices together.
  int64_t memory_bytes() const { return memory_bytes_; }
  struct Range {
    const void* first = nullptr;  // null: no allocation
    int64_t bytes = 0;
    bool is_mapped = false;
  };
  /// The allocation that it lies in.
  Range range_of(const void* at) const;
  /// Whether it is all of an allocation, or of a part of one.
  bool holds(const void* at, int64_t bytes) const;
  /// Whether a capture goes on.
  bool captures() const;

  /// Copies to pinned memory of the host are done once this says so of where they go: a link that is as slow as a test
  /// wants. Asked from the thread that does the work.
  void gate_copies(std::function<bool(const void* host)> passes);

  /// Any other call: counted, and refused as all are.
  int plain_call(const std::function<int()>& body);

  /// The call after `calls` more is refused with `error`; `from_then_on`: and all after it. What gives something back
  /// gives it back all the same, and what waits has waited: a device that is dead copies no more.
  void refuse_call(int64_t calls, int error, bool from_then_on);
  /// No longer. Whether a call was refused.
  bool refuse_no_more();

  /// Called for each piece that is ordered, in order, by the thread that orders it, which calls nothing here meanwhile.
  void on_order(std::function<void(const Ordered&)> hear) { hear_ = std::move(hear); }

  // --- for a recorder
  /// Copies to this host memory write nothing. While they are held, none of them arrives.
  void leave_alone(std::span<const std::byte> host) { left_alone_.push_back(host); }
  /// Until let_arrive(), or until `thread` waits for the device in vain.
  void hold_copies(std::thread::id thread);
  /// Whether they were held.
  bool let_arrive();
  /// How many copies to such memory were ordered.
  int64_t copies_left_alone() const;
  /// How often they came because that thread waited.
  int64_t waited_for_held() const;
  /// Bytes that the last copy of at most 64 KiB has brought to this address; empty: none has.
  std::span<const std::byte> given(const void* at) const;

  struct Counts {
    int64_t calls = 0, allocations = 0, waits = 0, launches = 0, copies = 0, graph_launches = 0, pins = 0;
  };
  /// Since the last time. waits: of the host, copies to memory that is not pinned among them.
  Counts take_counts();
  /// Waits of the calling thread, of any double, since the last time.
  static int64_t take_own_waits();
  static int64_t own_waits_so_far();
  std::vector<std::string> misuses();
  /// What has not been given back, in words.
  std::vector<std::string> left() const;

 private:
  struct Mark;
  struct Piece;
  struct Lane;
  struct Capture;
  struct Area;
  struct Door;

  int begin_call();
  template <typename Body>
  int call(const Body& body);
  template <typename Body>
  int call_outside_capture(const Body& body);
  template <typename Body>
  int give_back(const Body& body);
  template <typename Body>
  int wait(const Body& body);
  Lane* lane_of(Stream stream);
  int add(Lane& lane, std::function<void()> work);
  int copy_recorded(Lane& lane, void* to, const void* from, int64_t bytes, bool to_device);
  void tell(const Lane& lane, Ordered ordered) const;
  int record_on(Lane& lane, Event& event);
  void run_until(const std::function<bool()>& done);
  bool run_one();
  void release(void* memory, int64_t bytes) const;
  bool is_pinned(const void* at, int64_t bytes) const;
  bool is_allocated(const void* at, int64_t bytes) const;
  bool touches_device(const void* at, int64_t bytes) const;
  void misuse(std::string what);
  void count_wait();

  mutable std::recursive_mutex mutex_;
  const uint64_t seed_;
  std::mt19937_64 random_;
  int64_t memory_bytes_, allocated_bytes_ = 0, streams_made_ = 0;
  std::vector<std::unique_ptr<Lane>> lanes_;  // streams, also such as are destroyed, and branches of graphs
  std::vector<std::unique_ptr<Event>> events_;
  std::vector<std::unique_ptr<Graph>> graphs_;
  std::map<const void*, int64_t> memory_, pinned_;
  std::set<const void*> mapped_;                     // of memory_
  std::multimap<const std::byte*, int64_t> coming_;  // host memory of copies on their way
  std::function<bool(const void* host)> passes_;
  std::unique_ptr<Capture> capture_;
  Counts counts_;
  std::vector<std::string> misuses_;
  struct {
    int64_t calls = -1;
    int error = 0;
    bool from_then_on = false, done = false;
  } refusal_;
  bool running_ = false;
  int doors_ = 0;
  int64_t now_us_ = 0;  // pieces of work that were done
  std::function<void(const Ordered&)> hear_;
  std::function<int64_t(const Ordered&)> more_;

  const bool records_;
  std::vector<std::span<const std::byte>> left_alone_;
  std::map<const void*, std::vector<std::byte>> given_;
  std::thread::id held_for_;  // no thread: nothing is held
  int64_t waited_for_held_ = 0, copies_left_alone_ = 0;
};

}  // namespace cairn::simt
