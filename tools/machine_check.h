#pragma once
// What this machine has of what runs need: `cairn doctor`, and before a start the part about its devices.

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace cairn::tools {

struct MachineCheck {
  enum class Verdict { kFine, kNote, kProblem };
  std::string what;    // "NVIDIA driver"
  std::string found;   // "580.65.06, /proc/driver/nvidia/version"
  std::string needed;  // "580 or newer, for CUDA 13"
  Verdict verdict = Verdict::kFine;
  std::string todo;  // empty where there is nothing to do
};

/// NVIDIA devices that the kernel shows, whether they can be used or not, by name. Looks at /dev and /proc alone; with
/// CAIRN_NVIDIA_ROOT in the environment at what lies below that folder, for tests.
std::vector<std::string> nvidia_devices();

/// Devices, driver, kernels, libraries. Without a device nothing of it is a problem. Loads what a run on CUDA loads.
/// `opens`: opens the first device, too, which takes half a GiB of it until this process ends.
std::vector<MachineCheck> check_cuda(bool opens);
/// Shared memory, io_uring, the disk of `folder`, Gloo and its addresses, processors and memory.
std::vector<MachineCheck> check_host(const std::filesystem::path& folder);

bool any_problem(const std::vector<MachineCheck>& checks);
/// A line for each, what to do below it.
std::string machine_text(const std::vector<MachineCheck>& checks);
nlohmann::json machine_json(const std::vector<MachineCheck>& checks);

}  // namespace cairn::tools
