#pragma once
// How cores, memory, GPUs and network devices of a host hang together, by hwloc (2.x), and from that the cores of each
// rank. Cores that a scheduler's cpuset, or this process's affinity, leaves out are not there.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::host {

/// A core's processing units (hardware threads) by the system's numbers, those that may be used, ascending.
using Core = std::vector<int64_t>;

/// What lies next to a device.
struct Near {
  bool known = false;       // else `cores` are all, since nothing tells where it is
  std::vector<Core> cores;  // of its NUMA node, or whatever the host's tables say; in the system's order
  int64_t numa = -1;        // the system's number of the memory node; -1: several, or not known
  bool operator==(const Near&) const = default;
};

struct Nic {
  std::string interface;  // "eth0"; empty: it has none
  std::string hca;        // "mlx5_0"; empty: no InfiniBand or RoCE
  std::string pci;
  bool operator==(const Nic&) const = default;
};

class Topology {
 public:
  /// Of this host. Errors: kUnavailable where hwloc cannot read it.
  static Result<Topology> of_host();
  /// As `lstopo --of xml` writes it. Cores that its root does not allow are left out. Errors: kInvalidInput.
  static Result<Topology> from_xml(const std::string& xml);
  ~Topology();
  Topology(Topology&&) noexcept;
  Topology& operator=(Topology&&) noexcept;

  /// All that may be used.
  std::vector<Core> cores() const;
  /// `pci`: "0000:3b:00.0". Where none of the cores next to it may be used `cores` are all, and `numa` is -1.
  Near near(const std::string& pci) const;
  /// Network devices with the fewest steps up and down the tree between them and the GPU, by PCI address: those behind
  /// its switch, else of its root complex, its socket, the host. Empty: `pci` is not there.
  std::vector<Nic> nics_near(const std::string& pci) const;

 private:
  class Impl;
  explicit Topology(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// What a rank is bound to.
struct RankCores {
  std::vector<int64_t> cpus;  // the system's numbers, ascending; empty: not bound
  int64_t numa = -1;          // where its memory comes from, as long as there is some; -1: not bound
  bool operator==(const RankCores&) const = default;
};

/// Cores for ranks, each next to its device: as many for each as can be, none for two ranks, in one piece where ranks
/// have the same neighbourhood. Neighbourhoods lie inside each other or apart, as in a tree. Where ranks outnumber the
/// cores next to their devices, those ranks share what lies there. Nothing is bound where no device's place is known.
/// Pure.
std::vector<RankCores> share_cores(std::span<const Near> of_ranks);

/// The same for ranks on these GPUs by PCI address; "": not known.
std::vector<RankCores> cores_of_ranks(const Topology& topology, std::span<const std::string> gpu_of_rank);

/// Of interfaces that all would do the one nearest to these GPUs: with the fewest ranks' GPUs that have others nearer;
/// the first of equal ones. Empty: there are none, or no device says where they are.
std::string nearest_interface(const Topology& topology, std::span<const std::string> gpu_of_rank,
                              std::span<const std::string> interfaces);

}  // namespace cairn::host
