#pragma once
// What this machine can do, measured: the peak of its matrix product, its memory, and for the shapes of the recipes
// that were calibrated what a layer, the ends of the model, the optimizer and each collective take. Kept in the user's
// cache ($XDG_CACHE_HOME or ~/.cache, cairn/calibration.json; CAIRN_CALIBRATION names another file), for `cairn plan`
// and for the model FLOP utilisation that `cairn train` reports.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "runtime/comm/comm.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"

namespace cairn::tools {

/// A collective of one group: latency and bytes a second of payload (Comm::Traffic says what payload is).
struct CommSpeed {
  double latency_ms = 0, bytes_per_ms = 0;
  double ms(int64_t bytes, int64_t calls = 1) const {
    return latency_ms * static_cast<double>(calls) + static_cast<double>(bytes) / bytes_per_ms;
  }
};

/// What one shape takes here. Times of one micro-batch on one rank while the other ranks work too.
struct ShapeTimes {
  double layer_forward_ms = 0, layer_backward_ms = 0;
  double ends_forward_ms = 0, ends_backward_ms = 0;  // embedding and head together
  // What tensor parallelism moves, as counted while measuring: a layer, and the ends.
  comm::Comm::Traffic layer_traffic, ends_traffic;
  double adamw_ns = 0, clear_ns = 0, norm_ns = 0;  // an element: update, gradient set to zero, squared norm
  std::map<std::string, CommSpeed> comm;           // "all_reduce x 4": by operation and size of the group
};

struct Calibration {
  std::string cpu;
  int64_t cores = 0;
  double peak_f32_tflops = 0, peak_bf16_tflops = 0;  // of all cores together, the best of some large products
  double copy_gb_per_s = 0;                          // read and written bytes, all cores
  std::map<std::string, ShapeTimes> shapes;          // by shape_key()
  double peak_tflops(Precision precision) const {
    return precision == Precision::kBf16 ? peak_bf16_tflops : peak_f32_tflops;
  }
};

/// What the times of a shape depend on, as text: dimensions, precision, micro-batch, tp, threads, ranks at work.
std::string shape_key(const Plan& plan, int64_t cores);

std::filesystem::path calibration_path();

/// Nothing when there is no file, or it is of another machine. Errors: kCorrupt naming the file.
Result<std::optional<Calibration>> load_calibration();
Status save_calibration(const Calibration& calibration);

/// Measures what `calibration` lacks for this plan, some seconds. Errors: kInvalidInput for a model too large for this
/// machine.
Status calibrate(const Plan& plan, Calibration* calibration);

/// The name and core count of this machine.
std::string cpu_name();
int64_t cpu_cores();

}  // namespace cairn::tools
