#pragma once
// What this machine can do, measured: the peak of its matrix product, its memory, and the step time of the
// shapes that were calibrated. Kept in the user's cache ($XDG_CACHE_HOME or ~/.cache, cairn/calibration.json;
// CAIRN_CALIBRATION names another file). `cairn plan` uses it, and `cairn train` for the model FLOP
// utilisation.
//
// A step is timed by running the trainer itself, all ranks of the plan at once as threads, in a shared memory
// like a run's. The model has the same layers but fewer of them, and the step fewer micro-batches. With
// everything else fixed, the time of each part of a step is a + b L + c m + d L m in the layers L and the
// micro-batches m of a replica. Passes take L m, the ends of the model m, updates and reductions L, a
// pipeline's bubble L (from steady_micro_batches() on). Four steps, of two depths and two batches, give all of
// it, including what the ranks cost each other when they share cores, caches and memory.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "runtime/core/result.h"
#include "runtime/plan/plan.h"

namespace cairn::tools {

/// Milliseconds of a step by part.
struct StepParts {
  double forward = 0, backward = 0, pipeline = 0, reduce = 0, optimizer = 0, other = 0;
  double total() const { return forward + backward + pipeline + reduce + optimizer + other; }
};

/// The parts as a function of layers and micro-batches, by two values of each; `at[l][m]`. Equal values: only that one
/// is known. The factors a to d are those, none below zero, that come nearest to all four: each measured time has its
/// error, which a line through two of them would carry on and magnify.
struct StepFit {
  int64_t layers[2] = {0, 0}, micro_batches[2] = {0, 0};
  StepParts at[2][2];
  /// Errors by nothing: a depth or a batch that only one value is known of.
  std::optional<StepParts> parts(int64_t layers_wanted, int64_t micro_batches_wanted) const;
};

struct Calibration {
  std::string cpu;
  int64_t cores = 0;
  double peak_f32_tflops = 0, peak_bf16_tflops = 0;  // of all cores together, the best of some large products
  double copy_gb_per_s = 0;                          // read and written bytes, all cores
  std::map<std::string, StepFit> shapes;             // by shape_key()
  double peak_tflops(Precision precision) const {
    return precision == Precision::kBf16 ? peak_bf16_tflops : peak_f32_tflops;
  }
};

/// What the times of a step depend on but for layers and micro-batches, as text: dimensions, precision, micro-batch,
/// mesh, schedule, ZeRO, recomputation, optimizer, threads.
std::string shape_key(const Plan& plan, int64_t cores);

std::filesystem::path calibration_path();

/// Nothing when there is no file, or it is of another machine. Errors: kCorrupt naming the file.
Result<std::optional<Calibration>> load_calibration();
/// What the file holds.
std::string calibration_text(const Calibration& calibration);

/// The name and core count of this machine.
std::string cpu_name();
int64_t cpu_cores();

}  // namespace cairn::tools
