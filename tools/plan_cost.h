#pragma once
// How long a step of a plan takes, by part: from what this machine was measured to do (tools/calibration.h), or from a
// data sheet. Pure.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/plan/plan.h"
#include "tools/calibration.h"

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
  double other_ms = 0;      // data, checkpoints, waiting for other ranks
  double total() const {
    return compute_ms + recompute_ms + bubble_ms + tensor_ms + pipeline_ms + reduce_ms + optimizer_ms + gather_ms +
           other_ms;
  }
};
/// Names and members of the parts, for tables.
struct CostPart {
  const char* name;
  double StepCost::*ms;
};
const std::vector<CostPart>& cost_parts();

/// A device and its network, as a data sheet tells.
struct Machine {
  std::string name;
  double peak_tflops = 0;       // dense, in the precision of the recipe
  double gemm_fraction = 0;     // of the peak that large matrix products reach
  int64_t memory_bytes = 0;     // of a device
  double memory_gb_per_s = 0;   // of a device
  int64_t node_devices = 1;     // that share the fast network
  double node_gb_per_s = 0;     // a device sends to others of its node
  double network_gb_per_s = 0;  // a device sends to other nodes
  double latency_us = 0;        // of a collective's step or a message
};

/// "a100-80", ... Errors: kInvalidInput naming those known.
Result<Machine> find_machine(const std::string& name);
std::vector<std::string> machine_names();

/// Model of a step on `machine`: matrix products at gemm_fraction of the peak or at the speed of memory, whatever is
/// slower; everything else at the speed of memory; ring collectives; the schedule's bubble (bubble_fraction). Gradients
/// are reduced and weights gathered beside the computation as far as there is some to hide them: the last micro-batch's
/// backward, with ZeRO-2 all backwards, with ZeRO-3 all of the computation. The parts are what is not hidden.
StepCost data_sheet_cost(const Plan& plan, const Machine& machine);

/// Prediction for this machine; nothing when the calibration lacks the plan's shape.
std::optional<StepCost> calibrated_cost(const Plan& plan, const Calibration& calibration);

}  // namespace cairn::tools
