#pragma once
// The NVIDIA GPUs of this host as the kernel shows them, without a library of NVIDIA's: the driver's pages in
// /proc/driver/nvidia/gpus, and the nodes /dev/nvidia*. A container may have the pages of all GPUs and the nodes of
// some, or no pages; a device cgroup (Slurm's ConstrainDevices) leaves the nodes and forbids them.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace cairn::host {

struct Gpu {
  std::string model;   // "NVIDIA H100 80GB HBM3"; empty: no page says it
  std::string uuid;    // "GPU-..."; empty: no page says it
  std::string pci;     // "0000:3b:00.0"; empty: there are no pages
  int64_t minor = -1;  // of /dev/nvidiaN; -1: not known
  bool operator==(const Gpu&) const = default;
};

/// Where /dev and /proc are looked for: "/", or CAIRN_NVIDIA_ROOT of the environment, for tests.
std::filesystem::path nvidia_root();

/// By PCI address, as nvidia-smi numbers them. Left out is what this process has no node of, or whose node its cgroup
/// forbids (EPERM); one that this user may not open (EACCES) is there. Pages alone count where there is no node at all.
std::vector<Gpu> gpus_of_machine(const std::filesystem::path& root = nvidia_root());

/// The model, or what else is known of it.
std::string gpu_name(const Gpu& gpu);

}  // namespace cairn::host
