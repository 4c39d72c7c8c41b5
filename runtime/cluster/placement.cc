#include "runtime/cluster/placement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "runtime/cluster/node_list.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"

namespace cairn::cluster {
namespace {

using Found = Result<std::optional<Placement>>;

Error invalid(std::string message) { return {ErrorCode::kInvalidInput, std::move(message)}; }

/// `text`, which `what` says. Errors: it is no whole number from `least` to kMostHosts.
Result<int64_t> whole_number(std::string_view what, std::string_view text, int64_t least) {
  int64_t out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error != std::errc() || end != text.data() + text.size() || out < least || out > kMostHosts) {
    return invalid(fmt::format("{} = `{}`, expected a whole number from {} to {}", what, text, least, kMostHosts));
  }
  return out;
}

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const char* name) const {
    std::optional<std::string> out = environment_(name);
    return out && out->empty() ? std::nullopt : out;
  }
  /// Of the names the first that is set.
  std::optional<std::string> text(const char* name, const char* other) const {
    const std::optional<std::string> first = text(name);
    return first ? first : text(other);
  }
  bool has(const char* name) const { return text(name).has_value(); }

  /// Errors: the variable is not set, or whole_number's.
  Result<int64_t> number(const char* name, int64_t least) const {
    const std::optional<std::string> found = text(name);
    if (!found) return invalid(fmt::format("{} is not set", name));
    return whole_number(name, *found, least);
  }
  Result<int64_t> number(const char* name, const char* other, int64_t least) const {
    return number(has(name) ? name : other, least);
  }
  /// A name or an address that is set.
  Result<std::string> host(const char* name) const { return plain_host(*text(name)).with(name); }

 private:
  const Environment& environment_;
};

Status check_index(const Placement& found) {
  if (found.index < found.hosts) return {};
  return invalid(fmt::format("{}: this is host {} of {}; they count from 0", found.from, found.index, found.hosts));
}

/// Variables by which a launcher of MPI programs describes its tasks.
struct MpiVariables {
  const char *name, *rank, *size, *here;  // `here`: tasks on this host
  const char* one_a_host;                 // what starts one task on each
};
constexpr std::array kMpi = {MpiVariables{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                          "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun --map-by ppr:1:node"},
                             MpiVariables{"MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
                                          "MV2_COMM_WORLD_LOCAL_SIZE", "mpirun_rsh with each host once"},
                             MpiVariables{"MPI's Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "mpiexec -ppn 1"}};
/// Launchers of which the number of tasks is enough to be known: an older Open MPI does not count those of a host.
constexpr std::array kOwnSize = {MpiVariables{"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE",
                                              "JSM_NAMESPACE_LOCAL_SIZE", "jsrun --rs_per_host 1 --tasks_per_rs 1"},
                                 MpiVariables{"PALS", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_SIZE", "mpiexec --ppn 1"},
                                 kMpi.front()};
/// Other launchers that speak PMI: Cray's, Flux's, Slurm's own.
constexpr MpiVariables kPmi = {"a launcher with PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_SIZE", "one task a host"};

Found from_mpi(const Variables& of, const MpiVariables& names) {
  Placement out{.from = names.name};
  RT_TRY_SET(out.hosts, of.number(names.size, 1));
  RT_TRY_SET(out.index, of.number(names.rank, 0));
  if (of.has(names.here)) {
    RT_TRY_SET(const int64_t here, of.number(names.here, 1));
    if (here > 1) {
      return invalid(fmt::format("{} started {} tasks on this host; one agent a host, ranks by --nproc: {}", names.name,
                                 here, names.one_a_host));
    }
  }
  out.hosts_min = out.hosts;
  RT_TRY(check_index(out));
  return std::optional(out);
}

/// Launchers whose variables count before Slurm's: each has one that no other sets.
Found from_mpirun(const Variables& of) {
  for (const MpiVariables& names : kMpi) {
    if (of.has(names.rank) && of.has(names.size) && of.has(names.here)) return from_mpi(of, names);
  }
  for (const MpiVariables& names : kOwnSize) {
    if (!of.has(names.size)) continue;
    RT_TRY_SET(const int64_t tasks, of.number(names.size, 1));
    if (tasks > 1 || of.has(names.rank)) return from_mpi(of, names);
  }
  return std::optional<Placement>();
}

Found from_pmi(const Variables& of) {
  if (of.has(kPmi.rank) && of.has(kPmi.size)) return from_mpi(of, kPmi);
  if (!of.has("PMIX_RANK") || !of.has("PMIX_NAMESPACE")) return std::optional<Placement>();
  return invalid(
      fmt::format("a launcher with PMIx started this as its task {}, and its variables say neither how many there are "
                  "nor where: give --hosts, with this host's name as the only one for a run of one host",
                  *of.text("PMIX_RANK")));
}

Found from_slurm(const Variables& of) {
  if (!of.has("SLURM_STEP_ID") || !of.has("SLURM_PROCID")) {            // the batch script itself, or salloc's shell
    for (const char* name : {"SLURM_JOB_NUM_NODES", "SLURM_NNODES"}) {  // the older name is the second
      if (!of.has(name)) continue;
      RT_TRY_SET(const int64_t nodes, of.number(name, 1));
      if (nodes == 1) continue;
      return invalid(
          fmt::format("this is one of {} nodes of a Slurm job ({}), and in no step of it: srun "
                      "--ntasks-per-node=1 starts one agent on each",
                      nodes, name));
    }
    return std::optional<Placement>();
  }
  Placement out{.from =
                    fmt::format("Slurm step {}.{}", of.text("SLURM_JOB_ID").value_or("?"), *of.text("SLURM_STEP_ID"))};
  RT_TRY_SET(out.hosts, of.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", 1));
  RT_TRY_SET(const int64_t tasks, of.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", 1));
  if (tasks != out.hosts) {
    return invalid(
        fmt::format("{} has {} tasks on {}; one agent a host, ranks by --nproc: srun "
                    "--ntasks-per-node=1",
                    out.from, tasks, count_text(out.hosts, "node")));
  }
  RT_TRY_SET(out.index, of.number("SLURM_PROCID", 0));
  const std::optional<std::string> list = of.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
  if (!list) return invalid(fmt::format("{}: SLURM_STEP_NODELIST is not set", out.from));
  RT_TRY_SET(out.names, expand_node_list(*list));
  if (std::ssize(out.names) != out.hosts) {
    return invalid(fmt::format("{}: SLURM_STEP_NODELIST = {} names {} hosts, and {} were started", out.from, *list,
                               out.names.size(), out.hosts));
  }
  // Tasks may be placed in another order than that of the list.
  const std::optional<std::string> own = of.text("SLURMD_NODENAME");
  const auto at = own ? std::ranges::find(out.names, *own) : out.names.end();
  if (at != out.names.end()) out.index = at - out.names.begin();
  RT_TRY(check_index(out));
  out.leader = out.names.front();
  out.hosts_min = out.hosts;
  return std::optional(out);
}

/// torchrun's names for a node, which Kubeflow gives as PET_..., and those of a worker that torchrun started.
Found from_torchrun(const Variables& of) {
  const bool worker = of.has("LOCAL_RANK") && of.has("GROUP_RANK");
  if (!worker && !of.has("PET_NNODES")) return std::optional<Placement>();
  Placement out{.from = worker ? "torchrun" : "PET_NNODES"};
  if (worker) {
    RT_TRY_SET(const int64_t here, of.number("LOCAL_WORLD_SIZE", 1));
    if (here > 1) {
      return invalid(
          fmt::format("torchrun started {} tasks on this host; one agent a host, ranks by --nproc: torchrun "
                      "--nproc-per-node 1",
                      here));
    }
    RT_TRY_SET(out.hosts, of.number("GROUP_WORLD_SIZE", 1));
    RT_TRY_SET(out.index, of.number("GROUP_RANK", 0));
    out.hosts_min = out.hosts;
  } else {
    const std::string range = *of.text("PET_NNODES");  // "4" or "3:4"
    const size_t colon = range.find(':');
    RT_TRY_SET(out.hosts_min, whole_number("PET_NNODES", range.substr(0, colon), 1));
    RT_TRY_SET(out.hosts, whole_number("PET_NNODES", range.substr(colon == range.npos ? 0 : colon + 1), 1));
    if (out.hosts_min > out.hosts) return invalid(fmt::format("PET_NNODES = {}: the fewest come first", range));
    if (out.hosts == 1) return std::optional<Placement>();
    if (!of.has("PET_NODE_RANK") && !of.has("GROUP_RANK")) {
      return invalid(
          fmt::format("PET_NNODES = {}, and PET_NODE_RANK does not say which of these hosts this is: an elastic "
                      "PyTorchJob leaves that to torch's rendezvous, which cairn does not join. Give the job a Master "
                      "and no elasticPolicy, or give --hosts and --host-index",
                      range));
    }
    RT_TRY_SET(out.index, of.number("PET_NODE_RANK", "GROUP_RANK", 0));
  }
  if (out.hosts == 1) return std::optional<Placement>();
  const char* const leader = of.has("PET_MASTER_ADDR") ? "PET_MASTER_ADDR" : "MASTER_ADDR";
  if (!of.has(leader)) {
    return invalid(fmt::format("{}: {} hosts, and no MASTER_ADDR says which leads", out.from, out.hosts));
  }
  RT_TRY_SET(out.leader, of.host(leader));
  RT_TRY(check_index(out));
  return std::optional(out);
}

/// Kubeflow's PyTorchJob: RANK and WORLD_SIZE count pods.
Found from_pods(const Variables& of) {
  if (!of.has("KUBERNETES_SERVICE_HOST") || of.has("LOCAL_RANK")) return std::optional<Placement>();
  if (!of.has("RANK") || !of.has("WORLD_SIZE") || !of.has("MASTER_ADDR")) return std::optional<Placement>();
  Placement out{.from = "the pods of a Kubernetes job"};
  RT_TRY_SET(out.leader, of.host("MASTER_ADDR"));
  RT_TRY_SET(out.hosts, of.number("WORLD_SIZE", 1));
  RT_TRY_SET(out.index, of.number("RANK", 0));
  if (out.hosts == 1) return std::optional<Placement>();
  out.hosts_min = out.hosts;
  RT_TRY(check_index(out));
  return std::optional(out);
}

/// A group of pods of Kubernetes' LeaderWorkerSet.
Found from_leader_worker_set(const Variables& of) {
  if (!of.has("LWS_GROUP_SIZE") || !of.has("LWS_LEADER_ADDRESS")) return std::optional<Placement>();
  Placement out{.from = "a LeaderWorkerSet"};
  RT_TRY_SET(out.hosts, of.number("LWS_GROUP_SIZE", 1));
  if (out.hosts == 1) return std::optional<Placement>();
  RT_TRY_SET(out.leader, of.host("LWS_LEADER_ADDRESS"));
  RT_TRY_SET(out.index, of.number("LWS_WORKER_INDEX", 0));
  out.hosts_min = out.hosts;
  RT_TRY(check_index(out));
  return std::optional(out);
}

/// SM_HOSTS is of its training toolkit; a container without it has a file.
Found from_sagemaker(const Variables& of) {
  constexpr const char* kFile = "/opt/ml/input/config/resourceconfig.json";
  nlohmann::json hosts;
  std::string own, said_by = "SM_HOSTS";
  if (const std::optional<std::string> list = of.text("SM_HOSTS")) {
    RT_TRY_SET(hosts, parse_json_strictly(*list, said_by, 2));
    own = of.text("SM_CURRENT_HOST").value_or("");
  } else if (of.has("TRAINING_JOB_NAME") || of.has("TRAINING_JOB_ARN")) {
    std::ifstream file(kFile);
    if (!file) return std::optional<Placement>();
    said_by = kFile;
    RT_TRY_SET(const nlohmann::json all,
               parse_json_strictly(std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()),
                                   said_by, 16));
    if (all.is_object() && all.contains("hosts")) hosts = all["hosts"];
    if (all.is_object() && all.contains("current_host") && all["current_host"].is_string()) own = all["current_host"];
  } else {
    return std::optional<Placement>();
  }
  Placement out{.from = "SageMaker"};
  if (hosts.is_array()) {
    for (const nlohmann::json& one : hosts) {
      if (one.is_string()) out.names.push_back(one.get<std::string>());
    }
  }
  if (out.names.empty() || out.names.size() != hosts.size()) {
    return invalid(fmt::format("{}: expected a list of hosts' names", said_by));
  }
  out.hosts = out.hosts_min = std::ssize(out.names);
  if (out.hosts == 1) return std::optional<Placement>();
  const auto at = std::ranges::find(out.names, own);
  if (at == out.names.end()) {
    return invalid(fmt::format("{}: {} hosts, and `{}` (SM_CURRENT_HOST) is none of them", said_by, out.hosts, own));
  }
  out.index = at - out.names.begin();
  out.leader = out.names.front();
  return std::optional(out);
}

/// How a batch system says which hosts a job has. It runs the job's script on the first of them.
struct Allocation {
  const char *name, *job;
  const char* pairs;  // "h0 4 h1 4"
  const char* words;  // "h0 h0 h1 h1"
  const char* file;   // its path; a host a line, behind which other words may stand
  const char* count;
  const char* start;  // what starts a command on each
};
constexpr std::array kAllocations = {
    Allocation{"LSF", "LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", nullptr, "blaunch"},
    Allocation{"PBS", "PBS_JOBID", nullptr, nullptr, "PBS_NODEFILE", "PBS_NUM_NODES", "pbsdsh"},
    Allocation{"SGE", "JOB_ID", nullptr, nullptr, "PE_HOSTFILE", "NHOSTS", "qrsh -inherit"},
    Allocation{"OAR", "OAR_JOB_ID", nullptr, nullptr, "OAR_NODEFILE", nullptr, "oarsh"},
    Allocation{"Cobalt", "COBALT_JOBID", nullptr, nullptr, "COBALT_NODEFILE", nullptr, "ssh"},
    Allocation{"Flux", "FLUX_JOB_ID", nullptr, nullptr, nullptr, "FLUX_JOB_NNODES", "flux run --tasks-per-node=1"}};

/// Different hosts in their order, and the variable that names or counts them.
struct JobHosts {
  std::vector<std::string> names;
  int64_t count = 0;
  const char* variable = nullptr;
};

std::string_view short_name(std::string_view name) { return name.substr(0, name.find('.')); }

/// Whether two names may be of one host: one without a domain may be the other's short name.
bool may_be_same(std::string_view a, std::string_view b) {
  const bool plain = a.find('.') == a.npos || b.find('.') == b.npos;
  return a == b || (plain && short_name(a) == short_name(b));
}

/// Errors: the variable that counts the hosts is no number.
Result<JobHosts> hosts_of_job(const Variables& of, const Allocation& job) {
  JobHosts out;
  const auto add = [&](const std::string& name) {
    const auto known = std::ranges::find_if(out.names, [&](const auto& other) { return may_be_same(name, other); });
    if (known == out.names.end()) {
      out.names.push_back(name);
    } else if (known->size() < name.size()) {
      *known = name;  // so that h0, h0.a and h0.b are two
    }
  };
  for (const char* variable : {job.pairs, job.words, job.file}) {
    const std::optional<std::string> value = variable == nullptr ? std::nullopt : of.text(variable);
    if (!value) continue;
    if (variable == job.file) {
      std::error_code unknown;
      if (!std::filesystem::is_regular_file(*value, unknown)) continue;
      std::ifstream file(*value);
      for (std::string line; std::ssize(out.names) <= kMostHosts && std::getline(file, line);) {
        std::istringstream in(line);
        if (std::string name; in >> name) add(name);
      }
    } else {
      std::istringstream in(*value);
      for (std::string name, slots; in >> name && (variable != job.pairs || in >> slots);) add(name);
    }
    if (out.names.empty()) continue;
    out.count = std::ssize(out.names);
    out.variable = variable;
    return out;
  }
  if (job.count == nullptr || !of.has(job.count)) return JobHosts{};
  RT_TRY_SET(const int64_t count, of.number(job.count, 1));
  return JobHosts{{}, count, job.count};
}

/// Variables of scripts and launchers that number hosts, or tasks of which each host may have several.
struct Numbered {
  const char *count, *which, *on_this_host;
};
constexpr std::array kNumbered = {Numbered{"WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"},
                                  Numbered{"NNODES", "NODE_RANK", nullptr}};

/// Errors: variables that no launcher of placement is known by say that this is one of several.
Status check_numbered(const Variables& of) {
  const auto refuse = [](const std::string& said) {
    return invalid(
        fmt::format("{}: this was started as one of several, and they do not say on which hosts: start one agent on "
                    "each host, each with --hosts h0,h1,..., or name the only one that trains (--hosts h0)",
                    said));
  };
  for (const Numbered& names : kNumbered) {
    if (!of.has(names.count) || !of.has(names.which)) continue;
    RT_TRY_SET(const int64_t count, of.number(names.count, 1));
    if (names.on_this_host != nullptr && of.has(names.on_this_host)) {
      RT_TRY_SET(const int64_t here, of.number(names.on_this_host, 1));
      if (here == count) continue;
    }
    if (count > 1)
      return refuse(fmt::format("{} = {}, {} = {}", names.count, count, names.which, *of.text(names.which)));
  }
  if (!of.has("TF_CONFIG")) return {};
  const Result<nlohmann::json> config = parse_json_strictly(*of.text("TF_CONFIG"), "TF_CONFIG", 8);
  if (!config.ok()) return invalid(config.error().message + "; give --hosts, or take the variable away");
  size_t tasks = 0;
  const nlohmann::json& cluster = json_field(config.value(), "cluster");
  for (const nlohmann::json& of_kind : cluster) tasks += of_kind.is_array() ? of_kind.size() : 0;
  return tasks > 1 ? Status(refuse(fmt::format("TF_CONFIG has {} tasks", tasks))) : Status();
}

/// Errors: the job that this runs in has several hosts, and nothing said so far which of them train.
Status check_allocation(const Variables& of) {
  for (const Allocation& job : kAllocations) {
    if (!of.has(job.job)) continue;
    RT_TRY_SET(const JobHosts hosts, hosts_of_job(of, job));
    if (hosts.count < 2) continue;
    const std::string list = std::ssize(hosts.names) > 8
                                 ? fmt::format("{},...", fmt::join(hosts.names.begin(), hosts.names.begin() + 8, ","))
                             : hosts.names.empty() ? "h0,h1,..."
                                                   : fmt::format("{}", fmt::join(hosts.names, ","));
    return invalid(fmt::format(
        "this is one of {} hosts of a job of {} ({}), and nothing says which of them train: start one agent "
        "on each ({}), each with --hosts {}, or name the only one that trains (--hosts {})",
        hosts.count, job.name, hosts.variable, job.start, list, hosts.names.empty() ? "h0" : hosts.names.front()));
  }
  return check_numbered(of);
}

Found from_launcher(const Variables& of) {
  for (const auto& look :
       {from_mpirun, from_slurm, from_torchrun, from_leader_worker_set, from_pods, from_sagemaker, from_pmi}) {
    RT_TRY_SET(const std::optional<Placement> found, look(of));
    if (found) return found;
  }
  return std::optional<Placement>();
}

/// Which of `names` is called `own`: as a whole, else without domains; -1: none, or several.
int64_t index_of(const std::vector<std::string>& names, std::string_view own) {
  for (const bool whole : {true, false}) {
    int64_t at = -1, hits = 0;
    for (size_t k = 0; k < names.size(); ++k) {
      if (whole ? names[k] != own : short_name(names[k]) != short_name(own)) continue;
      at = static_cast<int64_t>(k);
      ++hits;
    }
    if (hits == 1) return at;
  }
  return -1;
}

Found from_flags(const HostFlags& flags, const Variables& of, std::string_view own_name) {
  const std::set<std::string> distinct(flags.hosts.begin(), flags.hosts.end());
  if (distinct.size() != flags.hosts.size()) return invalid("--hosts: a host is named twice; one agent a host");
  Placement out{
      .hosts = std::ssize(flags.hosts), .names = flags.hosts, .leader = flags.hosts.front(), .from = "--hosts"};
  out.hosts_min = out.hosts;
  if (flags.index) {
    out.index = *flags.index;
  } else if (of.has("JOB_COMPLETION_INDEX")) {  // an Indexed Job knows its index and no size
    RT_TRY_SET(out.index, of.number("JOB_COMPLETION_INDEX", 0));
    out.from = "--hosts and JOB_COMPLETION_INDEX";
  } else {
    RT_TRY_SET(const std::optional<Placement> launcher, from_launcher(of));
    if (launcher && launcher->hosts != out.hosts) {
      return invalid(fmt::format("--hosts names {} hosts, and {} says {}", out.hosts, launcher->from, launcher->hosts));
    }
    out.index = launcher ? launcher->index : index_of(flags.hosts, own_name);
    if (launcher) out.from = fmt::format("--hosts and {}", launcher->from);
    if (out.index < 0) {
      return invalid(
          fmt::format("--hosts: which of them this is: give --host-index (this host calls itself {})", own_name));
    }
  }
  if (out.index < 0 || out.index >= out.hosts) {
    return invalid(fmt::format("--host-index = {}; --hosts names {}, which count from 0", out.index, out.hosts));
  }
  return std::optional(out);
}

}  // namespace

Environment process_environment() {
  return [](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
}

Result<std::optional<Placement>> find_placement(const HostFlags& flags, const Environment& environment,
                                                std::string_view own_name) {
  const Variables of(environment);
  if (!flags.hosts.empty()) return from_flags(flags, of, own_name);
  if (flags.index)
    return invalid("--host-index says which of the hosts this is, and no --hosts or --host-file names them");
  RT_TRY_SET(std::optional<Placement> found, from_launcher(of));
  if (!found) RT_TRY(check_allocation(of));
  if (found && found->hosts == 1) found.reset();
  if (found && found->leader.empty()) {
    return invalid(
        fmt::format("{} started {} tasks and tells no host's name: give --hosts or --host-file, in the order of "
                    "its ranks",
                    found->from, found->hosts));
  }
  return found;
}

std::string placement_text(const Placement& placement) {
  const std::string own =
      placement.names.empty() ? "" : fmt::format(" ({})", placement.names.at(static_cast<size_t>(placement.index)));
  return fmt::format("{}, from {}; this is {}{}, leader {}", count_text(placement.hosts, "host"), placement.from,
                     placement.index, own, placement.leader);
}

}  // namespace cairn::cluster
