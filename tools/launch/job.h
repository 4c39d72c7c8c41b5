#pragma once
// What `cairn launch` hands to a launcher: a run of `cairn train` with one agent on each host, rendered as a batch
// script, as Kubernetes' objects, or as a command for each host. Pure: what is printed by --dry-run is what is
// submitted.

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "runtime/config/cluster.h"
#include "runtime/core/result.h"

namespace cairn::tools {

/// A file that a run reads at its start, with its text.
using SourceFile = std::pair<std::filesystem::path, std::string>;

struct TrainJob {
  std::string name;              // of the run: letters, digits, - _ and dots
  std::string program;           // cairn on the hosts
  std::filesystem::path recipe;  // absolute
  std::filesystem::path cluster_file;
  std::vector<std::filesystem::path> with_files;
  std::vector<std::string> recipe_words;  // --set and --param
  std::string run;                        // the run folder on the hosts
  std::vector<std::string> train_words;   // further options of `cairn train`
  std::string workdir;                    // on the hosts; empty: Kubernetes: the image's
  std::vector<SourceFile> sources;        // all files of recipe and cluster file, absolute: a pod has no others
  int64_t shared_bytes = 0;               // of /dev/shm that a host needs
};

/// Exit codes that a launcher knows: of a stop with steps left and of what may go better next time, after which it
/// starts the run again; of a run folder that another run uses, after which it never does.
inline constexpr int kUnfinished = 75, kUnavailable = 69, kInUse = 73;

/// The script for sbatch. Errors, of all three: kInvalidInput: a word that is not one line.
Result<std::string> slurm_script(const ClusterConfig& cluster, const TrainJob& job);

/// A List of ConfigMap, Service and Job, or of ConfigMap and JobSet; for Volcano a PodGroup after the ConfigMap.
/// Errors, besides: a name that Kubernetes does not take; a run folder in no volume that all pods can write; files or
/// host names beyond what objects may hold; less memory than /dev/shm.
Result<nlohmann::json> kubernetes_objects(const ClusterConfig& cluster, const TrainJob& job);

/// What the objects are called: of a run "GPT_1.3B" "gpt-1-3b".
Result<std::string> kubernetes_name(const std::string& run_name, const ClusterConfig& cluster);

/// The Job or JobSet of that name, as kubectl names it: "job.batch/mine".
std::string kubernetes_owner(const ClusterConfig& cluster, const std::string& name);

/// Makes the other objects of kubernetes_objects() the owner's, so that they are removed with it: the words of a
/// `kubectl` command for each. `uid`: the owner's.
std::vector<std::vector<std::string>> kubernetes_adoptions(const nlohmann::json& objects, const std::string& uid);

/// One host's command: the words of the local ssh. The agent's signals come in by its standard input, each a line with
/// a signal's name: ssh passes none on.
struct HostCommand {
  std::string host;
  std::vector<std::string> words;
};
Result<std::vector<HostCommand>> ssh_commands(const ClusterConfig& cluster, const TrainJob& job);

}  // namespace cairn::tools
