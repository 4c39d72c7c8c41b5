#include "tools/planner/machine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "runtime/plan/plan.h"

namespace cairn::tools {
namespace {

// Data sheets of the makers: dense bf16/fp16 matrix rate, fp32 rate without tensor cores (Cairn's fp32 keeps all
// digits, so TF32's rate is not its own), HBM bandwidth, NVLink a direction (half of the two-way figure), and one 200
// or 400 Gbit/s port a device. The fraction of the peak is what published runs of large dense models reach in their
// matrix products, a little above their whole utilisation (44-52 % on A100, 38-43 % on H100). Assumed, not from a
// sheet: the latencies, the reserve (a CUDA context and NCCL's buffers take 1 to 2 GiB, an allocator's fragments some
// more), and 2 GB/s of storage for a host. docs/planning.md compares the model with published
// steps, which gives the error.
const std::vector<Machine>& machines() {
  static const std::vector<Machine> list = [] {
    constexpr int64_t kGiB = int64_t{1} << 30;
    std::vector<Machine> out;
    const auto add = [&](const char* name, double half, double f32, double gemm, int64_t memory, double hbm,
                         double nvlink, double port) {
      out.push_back({.name = name,
                     .source = fmt::format("the data sheet of {}", name),
                     .peak_half_tflops = half,
                     .peak_f32_tflops = f32,
                     .gemm_fraction = gemm,
                     .memory_bytes = memory * kGiB,
                     .reserve_bytes = kDeviceReserveBytes,
                     .memory_gb_per_s = hbm,
                     .node_devices = 8,
                     .node_gb_per_s = nvlink,
                     .network_gb_per_s = port,
                     .node_latency_us = 4,
                     .network_latency_us = 8,
                     .storage_gb_per_s = 2,
                     .error = 0.3});
    };
    add("a100-40", 312, 19.5, 0.62, 40, 1555, 300, 25);
    add("a100-80", 312, 19.5, 0.62, 80, 2039, 300, 25);
    add("h100-80", 989, 66.9, 0.55, 80, 3350, 450, 50);
    add("h200-141", 989, 66.9, 0.57, 131, 4800, 450, 50);
    add("h800-80", 989, 66.9, 0.55, 80, 3350, 200, 50);
    return out;
  }();
  return list;
}

}  // namespace

std::vector<std::string> machine_names() {
  std::vector<std::string> out;
  for (const Machine& machine : machines()) out.push_back(machine.name);
  return out;
}

Result<Machine> find_machine(const std::string& name) {
  for (const Machine& machine : machines()) {
    if (machine.name == name) return machine;
  }
  return Error{ErrorCode::kInvalidInput,
               fmt::format("--machine {}: not known; there are {}", name, fmt::join(machine_names(), ", "))};
}

Machine host_machine(const Calibration& c, int64_t world, int64_t host_memory_bytes) {
  const auto ranks = static_cast<double>(world);
  return {.name = "a rank of this host",
          .source = fmt::format("this host ({}, {} cores) as measured", c.cpu, c.cores),
          .peak_half_tflops = c.peak_bf16_tflops / ranks,
          .peak_f32_tflops = c.peak_f32_tflops / ranks,
          .gemm_fraction = 0.8,  // of the best of some large products, by products of a layer's size
          .memory_bytes = host_memory_bytes / world,
          .memory_gb_per_s = c.copy_gb_per_s / ranks,
          .node_devices = world,
          .node_gb_per_s = c.copy_gb_per_s / ranks / 2,  // through shared memory: written once and read once
          .network_gb_per_s = c.copy_gb_per_s / ranks / 2,
          .node_latency_us = 5,
          .network_latency_us = 5,
          .error = 0.3};
}

}  // namespace cairn::tools
