#pragma once
// The devices that a step is reckoned for: by a maker's data sheet, or this host as it was measured. Pure.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/numbers.h"
#include "runtime/core/result.h"
#include "tools/planner/calibration.h"

namespace cairn::tools {

/// A device and its network. GB is 10^9 bytes.
struct Machine {
  std::string name;
  std::string source;             // "the data sheet of a100-80", "this host (...) as measured"
  double peak_half_tflops = 0;    // dense matrix products in bf16 or fp16
  double peak_f32_tflops = 0;     // in fp32, with all of its digits
  double gemm_fraction = 0;       // of the peak that large matrix products reach
  int64_t memory_bytes = 0;       // of a device
  int64_t reserve_bytes = 0;      // of those, for the driver's context, communication buffers and fragmentation
  double memory_gb_per_s = 0;     // of a device
  int64_t node_devices = 1;       // that share the fast network and a host's storage
  double node_gb_per_s = 0;       // a device sends to others of its node
  double network_gb_per_s = 0;    // a device sends to other nodes
  double node_latency_us = 0;     // of a collective's step or a message inside a node
  double network_latency_us = 0;  // and between nodes
  double storage_gb_per_s = 0;    // a host writes or reads; an assumption unless --storage states it
  double error = 0;               // relative: a time lies within so much of the model's

  double peak_tflops(Precision precision) const {
    return precision == Precision::kF32 ? peak_f32_tflops : peak_half_tflops;
  }
  int64_t usable_bytes() const { return memory_bytes - reserve_bytes; }
};

/// "a100-80", ... Errors: kInvalidInput naming those known.
Result<Machine> find_machine(const std::string& name);
std::vector<std::string> machine_names();

/// This host for `world` ranks that share its cores and memory: each has an equal part.
Machine host_machine(const Calibration& calibration, int64_t world, int64_t host_memory_bytes);

}  // namespace cairn::tools
