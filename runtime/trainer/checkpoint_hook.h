#pragma once
// The seam between training and checkpoints: the trainer calls it, ckpt/ implements it, tests record it.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::trainer {

enum class StateKind { kWeight, kExpAvg, kExpAvgSq };  // kWeight: the float (master) weight

/// One contiguous run of training state in this rank's memory: float elements of a box of a logical tensor.
struct StateTensor {
  StateKind kind = StateKind::kWeight;
  int64_t tensor = 0;  // index into Plan::tensors
  Box box;
  std::byte* data = nullptr;
  int64_t bytes = 0;
  bool primary = true;  // to be saved by this rank; all are to be loaded
};

/// Where training stands after `step` completed optimizer steps. The same on every rank.
struct TrainPosition {
  int64_t step = 0;
  int64_t samples = 0, tokens = 0;
  double lr = 0, loss = 0;
  uint64_t seed = 0;    // of all counter-based random numbers: initialisation, order
  std::string sampler;  // data::SamplerState as JSON
  std::string metrics;  // telemetry::StepMetrics of this step as JSON, times left out: a kill may come before
                        // they are told, and all ranks hold the same text
};

/// What happens at the end of a step; decided once, on world rank 0, and broadcast.
struct StepOrder {
  bool stop = false;      // leave after this step
  bool snapshot = false;  // copy the state to shared memory
  bool persist = false;   // and write that snapshot to disk
  int64_t slot = 0;       // of the snapshot arena
};

class CheckpointHook {
 public:
  virtual ~CheckpointHook() = default;

  /// Before the first step, on every rank: fills all of `state` from the newest whole snapshot or checkpoint and says
  /// where training stands; nullopt starts a fresh run and leaves the memory alone. All ranks get the same answer.
  virtual Result<std::optional<TrainPosition>> restore(std::span<const StateTensor> state) = 0;

  /// World rank 0 only, after step `position.step`; `last` when no step follows.
  virtual Result<StepOrder> decide(const TrainPosition& position, bool last) = 0;

  /// Every rank, when the order says so; the memory may change as soon as it returns.
  virtual Status snapshot(const StepOrder& order, const TrainPosition& position,
                          std::span<const StateTensor> state) = 0;

  /// Every rank, once, after the last step: returns when everything that was promised is on disk.
  virtual Status finish() = 0;
};

}  // namespace cairn::trainer
