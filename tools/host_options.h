#pragma once
// The hosts of a run as the command line, the cluster file and the launcher say them.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "tools/run/hosts/fleet.h"

namespace CLI {
class App;
}

namespace cairn::tools {

struct HostArgs {
  std::string hosts, host_file, cluster;
  int64_t host_index = -1;             // -1: the launcher says, or the machine's own name
  int64_t spares = -1, hosts_min = 0;  // -1: the cluster file says
  std::string check;                   // HostCheck; empty: the cluster file says
  bool exclude_slow = false;
};

void add_host_options(CLI::App& command, HostArgs& args);

/// nullopt: one host. With `ranks` (--nproc, 0: not given) of each host. Without build and recipe, which are known
/// later. Errors: kInvalidInput: flags, a cluster file or a launcher's variables that contradict each other, with the
/// fix.
Result<std::optional<HostOptions>> find_hosts(const HostArgs& args, int64_t ranks);

/// `nccl` of the cluster file; empty where none is given.
Result<std::vector<std::string>> nccl_of_cluster(const HostArgs& args);

/// Where nothing was said of an interface, and several of this host's reach the leader without a gateway: the address
/// of the one next to most of the GPUs at these PCI addresses. Else empty.
std::string address_near_gpus(const HostOptions& options, const std::vector<std::string>& gpus);

/// "4 hosts x 2 ranks, from Slurm step 12.0; this is 2 (h2), leader h0 10.77.0.10:24512"
std::string hosts_text(const HostOptions& options, int64_t port);

}  // namespace cairn::tools
