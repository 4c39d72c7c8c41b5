#pragma once
// Where the time of a rank goes: always as milliseconds by phase, and for a window of steps as a timeline that Perfetto
// (ui.perfetto.dev) and chrome://tracing open.
//
// A Recorder belongs to one rank. A thread that has attached to it records on a *lane* of its own; on any other thread
// a scope costs one branch. PhaseScope divides the lane's time: each moment belongs to the innermost open phase, so the
// phases of a step sum to its wall time. TraceScope only draws, and only inside the window.
// All ranks of a host read one clock (CLOCK_MONOTONIC), so their timelines are aligned as they are.
// Source of the format: "Trace Event Format" of Chromium: complete events ("X"), flow events ("s", "f"), metadata.

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::telemetry {

enum class Phase : uint8_t {
  kOther,
  kData,        // samples read, micro-batches cut
  kForward,     // of the own stages, tensor-parallel collectives included
  kBackward,    // likewise
  kPipeline,    // waiting for activations and gradients of other stages: bubble and transfer
  kReduce,      // gradients over tp, embedding copies, dp; the norm over the world
  kOptimizer,   // update and gathering of weights
  kValidation,  // evaluation between steps
  kCheckpoint,  // this rank stood still for a snapshot or a save
  kLog,         // telling the agent of a step
};
constexpr size_t kPhases = 10;
/// "data", "forward", ...
std::string_view phase_name(Phase phase);

/// Milliseconds by phase, indexed by Phase.
using StepSplit = std::array<double, kPhases>;

/// Steps to draw; none when last < first.
struct TraceWindow {
  int64_t first = 1, last = 0;
  bool contains(int64_t step) const { return step >= first && step <= last; }
  bool empty() const { return last < first; }
};

/// "5..8" or "5". Errors: kInvalidInput, with what was found and expected.
Result<TraceWindow> parse_trace_window(std::string_view text);

/// What a scope is about; what is not set is left out of the file.
struct TraceArgs {
  int64_t bytes = -1, layer = -1, micro_batch = -1, chunk = -1;
  std::string_view group, what;  // of a collective
  uint64_t flow = 0;             // connects a send with its receive
  bool flow_begins = false;
};

class Recorder {
 public:
  Recorder(TraceWindow window, int64_t rank, std::string process_name);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// The calling thread records on a lane of this name until it detaches or the recorder ends. The recorder must
  /// outlive the attachment.
  void attach(std::string_view lane);
  static void detach();
  /// Of the calling thread; null when it is not attached. To hand on to a thread of its own.
  static Recorder* current();

  /// Drawing is on for the steps of the window.
  void begin_step(int64_t step);
  /// Ends drawing, so that to_json() holds whole events only. True when the window was under way or had passed.
  bool end_window();
  const TraceWindow& window() const { return window_; }
  bool drawing() const { return drawing_.load(std::memory_order_relaxed); }

  /// Time of the calling thread's lane by phase since the last call (or since it attached).
  StepSplit take_split();

  /// A whole trace file. No thread may be recording.
  std::string to_json() const;

 private:
  friend class PhaseScope;
  friend class TraceScope;
  struct Event {
    int64_t begin_ns = 0, end_ns = 0, step = 0;
    int64_t bytes = -1, layer = -1, micro_batch = -1, chunk = -1;
    uint64_t flow = 0;
    bool flow_begins = false;
    const char* category = "";
    char name[24] = {}, group[40] = {}, what[48] = {};
  };
  struct Lane {
    Recorder* recorder = nullptr;
    std::string name;
    std::vector<Event> events;
    Phase phase = Phase::kOther;
    int64_t since_ns = 0;
    std::array<int64_t, kPhases> spent_ns{};
    Phase enter(Phase next, int64_t now_ns);
    void draw(const char* category, std::string_view name, int64_t begin_ns, int64_t end_ns, const TraceArgs& args);
  };
  static thread_local Lane* lane_;

  const TraceWindow window_;
  const int64_t rank_;
  const std::string process_name_;
  std::atomic<bool> drawing_ = false;
  std::atomic<int64_t> step_ = 0;
  mutable std::mutex mutex_;  // of lanes_
  std::vector<std::unique_ptr<Lane>> lanes_;
};

/// Time of this thread belongs to `phase` while it lives, but for phases opened inside. Drawn as category "phase".
class PhaseScope {
 public:
  explicit PhaseScope(Phase phase, const TraceArgs& args = {});
  ~PhaseScope();
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  Recorder::Lane* const lane_;
  Phase phase_, before_ = Phase::kOther;
  int64_t begin_ns_ = 0;  // 0: not drawn
  TraceArgs args_;
};

/// Draws one bar. `category` and `name` must live as long as the recorder: literals.
class TraceScope {
 public:
  TraceScope(const char* category, const char* name, const TraceArgs& args = {})
      : lane_(Recorder::lane_ != nullptr && Recorder::lane_->recorder->drawing() ? Recorder::lane_ : nullptr) {
    if (lane_ != nullptr) begin(category, name, args);
  }
  ~TraceScope() {
    if (lane_ != nullptr) end();
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  void begin(const char* category, const char* name, const TraceArgs& args);
  void end();
  Recorder::Lane* const lane_;
  const char* category_ = nullptr;
  const char* name_ = nullptr;
  int64_t begin_ns_ = 0;
  TraceArgs args_;
};

/// A bar of a process that is not recorded by scopes: the agent's saves.
struct TraceSpan {
  std::string name;
  int64_t begin_ns = 0, end_ns = 0, bytes = -1;
};

/// A rank's file. ahead_ns: its host's clock shows so much more than the agent's.
struct TracePart {
  std::filesystem::path path;
  int64_t ahead_ns = 0;
};

/// One file of the ranks' files and the agent's spans, by the agent's clock; times count from its first event.
/// Errors: kCorrupt naming a file that is no trace; I/O errors.
Status merge_traces(const std::vector<TracePart>& parts, const std::vector<TraceSpan>& agent,
                    const std::filesystem::path& out);

/// CLOCK_MONOTONIC, the clock of all times here: each host has its own.
int64_t trace_clock_ns();

}  // namespace cairn::telemetry
