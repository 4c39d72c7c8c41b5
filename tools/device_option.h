#pragma once
// Where a run's ranks compute: --device, the recipe's `device`, what the machine has, and where the run trained before.

#include <filesystem>
#include <string>

#include "runtime/config/numbers.h"
#include "runtime/core/result.h"

namespace CLI {
class App;
}

namespace cairn::tools {

/// --device, kAuto where it is not given: the recipe's counts then.
void add_device_option(CLI::App& command, DeviceChoice& device);
/// The same for a model that is there, whose recipe is not asked.
void add_model_device_option(CLI::App& command, DeviceChoice& device);

std::string_view device_word(DeviceChoice device);

struct DeviceQuestion {
  DeviceChoice flag = DeviceChoice::kAuto, recipe = DeviceChoice::kAuto;
  std::filesystem::path run;   // its folder; it need not be there
  const char* what = "train";  // what is to be done there, for messages
  bool here = false;           // by this process, and not by ranks that open the device for themselves
};

/// kCpu or kCuda, and nothing is taken in place of another. Errors, with exit code 2: a device that was asked for, or
/// that is there unasked, cannot be used; the run trained on CUDA, and nobody has asked for the CPU.
Result<DeviceChoice> choose_device(const DeviceQuestion& question);

/// What choose_device() would take of a machine where all works, without asking whether it does.
DeviceChoice likely_device(DeviceChoice wanted);

/// Writes into the run folder where its ranks compute from now on; nothing where it was always the CPU.
Status note_device(const std::filesystem::path& run, DeviceChoice device);

}  // namespace cairn::tools
