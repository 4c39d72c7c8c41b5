#pragma once
// How long each op of a step takes, on the clock of the device that does it. The tables mark where each op of a stream
// with a clock begins and ends (runtime/kernels/table.h); the clock adds times up by the op's name and sizes. Between
// two ops lies a gap: the device waits for the host, for other ranks, or does what is no op (copies, collectives). Ops
// and gaps of a step add up to the step.
//
// 1. begin_step(), ops, end_step(): moments are marked in the stream, and nothing waits.
// 2. When the stream has been settled behind them, the next end_step() reads them: the device has work then.
// 3. times() reads the rest, behind a last settle.

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/core/clock.h"
#include "runtime/core/result.h"
#include "runtime/device/op_dims.h"
#include "runtime/device/stream.h"

namespace cairn {

/// Moments of a stream's work, on the clock of the device that does it.
class StreamTimer {
 public:
  virtual ~StreamTimer() = default;
  /// One more moment, behind all that the stream was asked for so far.
  virtual void mark() = 0;
  /// Reads the next moments, in the order of their marks: milliseconds since the moment before, 0 for the first of all.
  /// The stream has been settled behind them. Errors: those of the stream.
  virtual Status read(std::span<double> ms) = 0;
};

/// For streams whose work is done when the host has asked for it.
class HostTimer final : public StreamTimer {
 public:
  /// `clock` outlives it.
  explicit HostTimer(const Clock& clock) : clock_(clock) {}
  void mark() override { marked_ns_.push_back(clock_.now_ns()); }
  Status read(std::span<double> ms) override;

 private:
  const Clock& clock_;
  std::vector<int64_t> marked_ns_;  // not read
  int64_t last_ns_ = -1;            // read last; below 0: none
};

struct OpTime {
  std::string name;
  std::vector<int64_t> sizes;
  std::vector<std::string> words;  // what it does beside its name
  int64_t calls = 0;
  double ms = 0;
};

/// The sums over all steps that count.
struct OpTimes {
  int64_t steps = 0;
  int64_t left_out = 0;     // first steps, which do not count
  std::vector<OpTime> ops;  // the longest first
  double gaps_ms = 0;
  /// The time of the ops and the gaps.
  double steps_ms() const;
};

/// Threads: the stream's.
class OpClock {
 public:
  /// First steps that do not count: in them kernels are loaded, and memory is touched for the first time.
  static constexpr int64_t kWarmUpSteps = 2;
  /// Kinds of ops, by name and sizes. Further ones are added up without their sizes.
  static constexpr size_t kMostKinds = 1024;

  /// The stream outlives it.
  explicit OpClock(Stream& stream) : OpClock(stream, stream.make_timer()) {}
  OpClock(Stream& stream, std::unique_ptr<StreamTimer> timer);
  ~OpClock();
  OpClock(const OpClock&) = delete;
  OpClock& operator=(const OpClock&) = delete;

  void begin_step();
  void end_step();
  /// An op that begins inside another is a part of it. `name` lives as long as the program.
  void begin(std::string_view name, const OpDims& dims);
  void end();

  /// Behind a settle of the stream, outside of a step. Errors: those of the stream.
  Result<OpTimes> times();

 private:
  struct Sum {
    int64_t calls = 0;
    double ms = 0;
  };
  enum class Kind { kStepBegins, kOpBegins, kOpEnds, kStepEnds };
  struct Moment {
    Kind kind;
    Sum* sum;  // of the op
    int64_t settled;
  };
  void mark(Kind kind, Sum* sum = nullptr);
  /// Reads the moments behind which the stream has been settled.
  Status read_settled();
  void add(Kind kind, Sum* sum, double ms);

  Stream& stream_;
  std::unique_ptr<StreamTimer> timer_;
  std::map<std::pair<std::string_view, OpDims>, Sum> sums_;
  bool in_step_ = false;
  int64_t depth_ = 0;   // ops in each other
  Sum* now_ = nullptr;  // of the outermost
  std::vector<Moment> marked_;
  std::vector<double> ms_;
  Status failed_;
  // The sums of the moments that were read.
  int64_t steps_begun_ = 0, steps_ended_ = 0;
  double gaps_ms_ = 0;
};

}  // namespace cairn
