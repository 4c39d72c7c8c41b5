#pragma once
// How long a step of a plan takes, by part: as its shape was measured on this host (calibration.h), or by a model of a
// machine (machine.h). Pure.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/plan/plan.h"
#include "tools/planner/calibration.h"
#include "tools/planner/machine.h"
#include "tools/planner/memory.h"
#include "tools/planner/placement.h"

namespace cairn::tools {

/// Milliseconds of one step of the slowest rank by part; what runs beside something else counts where it is waited for.
/// A measured step's compute holds its tensor-parallel collectives, its bubble all waiting for other stages.
struct StepCost {
  double compute_ms = 0;    // forward and backward of a rank's own stages
  double recompute_ms = 0;  // activations computed again, their collectives included
  double bubble_ms = 0;     // waiting for other stages
  double tensor_ms = 0;     // collectives inside layers
  double pipeline_ms = 0;   // messages between stages
  double reduce_ms = 0;     // gradients over replicas, tied embeddings
  double optimizer_ms = 0;  // update, gradients set to zero, norm
  double gather_ms = 0;     // weights after the update
  double offload_ms = 0;    // optimizer state read from a disk and written there
  double other_ms = 0;      // data, checkpoints, waiting for other ranks
  double total() const {
    return compute_ms + recompute_ms + bubble_ms + tensor_ms + pipeline_ms + reduce_ms + optimizer_ms + gather_ms +
           offload_ms + other_ms;
  }
};
/// Names and members of the parts, for tables.
struct CostPart {
  const char* name;
  double StepCost::*ms;
};
const std::vector<CostPart>& cost_parts();

/// Model of a step of `plan`'s batch on `machine`: matrix products at gemm_fraction of the peak of the recipe's
/// precision or at the speed of memory, whatever is slower; everything else at the speed of memory; ring collectives,
/// each with one latency a hop, over the slower network where a group crosses nodes; the schedule's bubble
/// (bubble_fraction). Gradients are reduced and weights gathered beside the computation as far as there is some to hide
/// them: the last micro-batch's backward, with ZeRO-2 all backwards, with ZeRO-3 all of the computation. State on a
/// disk is read and written with nothing beside it. The parts are what is not hidden.
StepCost machine_cost(const Plan& plan, const Machine& machine, const Placement& placement);
StepCost machine_cost(const Plan& plan, const Machine& machine);

/// Collectives of a step that move weights and gradients of a rank, for their latencies.
struct StateCalls {
  double reduces = 0, gathers = 0;
};
StateCalls state_calls(const Plan& plan);

/// A time with what is behind it.
struct StepEstimate {
  StepCost cost;
  double error = 0;        // relative: the time lies within so much of cost.total()
  double utilisation = 0;  // MFU: model FLOPs over the peak of all ranks; 0: no peak is known
  std::string source;
  std::string assumes;  // efficiency, and what runs beside what
  double low_ms() const { return cost.total() * (1 - error); }
  double high_ms() const { return cost.total() * (1 + error); }
};
StepEstimate estimate(const Plan& plan, const Machine& machine, const Placement& placement);
/// Whether one is not faster than the other by this model: their difference lies within its error.
bool even(const StepEstimate& a, const StepEstimate& b);

/// Seconds to save or load a checkpoint, every host at `storage_gb_per_s`: the hosts work side by side.
struct StorageTime {
  double gb_per_s = 0;  // of a host
  int64_t hosts = 1;
  double save_s = 0;
  double load_s = 0;  // also reads, for each rank, state that other ranks save
};
StorageTime storage_time(const Plan& plan, std::span<const StageMemory> stages, int64_t node_devices, double gb_per_s);

/// A step of this host, by the plan's shape as it was measured; nothing when the calibration lacks it.
std::optional<StepEstimate> calibrated_estimate(const Plan& plan, const Calibration& calibration);

}  // namespace cairn::tools
