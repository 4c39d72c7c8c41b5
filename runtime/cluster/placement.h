#pragma once
// How many hosts a launcher started, which of them this is, and which leads at first: from flags, or from the variables
// of MPI's launchers, Slurm, torchrun-like launchers, Kubernetes and SageMaker. Cairn has one agent a host, so a
// launcher's unit is a task a host; launches that start another number are refused with what to change. A job that has
// several hosts and started nothing on them (LSF, PBS, SGE, OAR) is refused too. Sources: man srun and sbatch (Slurm
// 22.05), torch/distributed/run.py, the variables of Kubeflow's PyTorchJob, Kubernetes' Indexed Job and
// LeaderWorkerSet, SageMaker's training toolkit, IBM's list of LSF's variables, man qsub of OpenPBS and of Grid Engine.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::cluster {

/// The value of a variable; nullopt where it is not set. An empty value counts as none.
using Environment = std::function<std::optional<std::string>(const char* name)>;
Environment process_environment();

/// What the command line says of hosts.
struct HostFlags {
  std::vector<std::string> hosts;  // --hosts, or the lines of --host-file
  std::optional<int64_t> index;    // --host-index
};

struct Placement {
  int64_t hosts = 1, index = 0;
  int64_t hosts_min = 1;           // fewest that the launcher goes on with (PET_NNODES = min:max); else `hosts`
  std::vector<std::string> names;  // of all hosts in order; empty where the launcher tells the leader alone
  std::string leader;              // name or address of host 0
  std::string from;                // "Slurm step 12.0"
};

/// nullopt: no launcher of several hosts is at work, nor does a flag name any: one host. Flags come first, then the
/// nearest launcher: MPI's (inside a Slurm job the variables of Slurm describe its daemons), Slurm, torchrun's names,
/// those of pods, SageMaker's; last the job that all this runs in.
/// With `hosts` and no `index` the launcher says which this is, or `own_name`.
/// Errors: kInvalidInput: variables or flags that contradict each other, several tasks on a host, or a job of several
/// hosts on which nothing was started, with the fix.
Result<std::optional<Placement>> find_placement(const HostFlags& flags, const Environment& environment,
                                                std::string_view own_name);

/// "4 hosts, from Slurm step 12.0; this is 2 (h2), leader h0"
std::string placement_text(const Placement& placement);

}  // namespace cairn::cluster
