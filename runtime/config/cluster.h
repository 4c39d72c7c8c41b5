#pragma once
// Where a run runs: the resolved cluster file as plain structs. It is no part of the recipe and changes no recipe hash.
// dsl/cluster_schema.cc says what each field means; dsl/dsl.h reads the file; runtime/plan/cluster_rules.h has what
// its fields demand of each other and of a mesh.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn {

enum class Launcher { kSlurm, kKubernetes, kHosts };

/// When hosts and the links between them are measured, before ranks run.
enum class HostCheck { kOff, kStart, kAfterUnknown };

/// On each host, both ends included.
struct PortRange {
  int64_t from = 24512, to = 25535;  // below the ports that Linux gives to connections, and those of Kubernetes' nodes
  int64_t size() const { return to - from + 1; }
};

struct SlurmConfig {
  std::string partition, account;   // empty: the site's default
  double time_s = 0;                // 0: the partition's limit
  double signal_before_s = 180;     // before the time limit; 0: no signal
  bool requeue = true;              // of a stop with steps left, and where the first node is lost
  std::vector<std::string> sbatch;  // further options of sbatch, each as a line: "--gres=gpu:8"
};

/// A volume in a pod.
struct Mount {
  std::string path;              // in the pod
  std::string claim, host_path;  // one of them: a PersistentVolumeClaim, or a folder of the node
  std::string sub_path;          // of the volume; empty: all of it
  bool read_only = false;
};

struct PodResources {
  double cpu = 0;                   // 0: not said
  int64_t memory_bytes = 0;         // 0: not said
  std::vector<std::string> others;  // "NAME=QUANTITY"
};

/// The security context of pods says all that the Pod Security Standard `restricted` asks for, or nothing.
enum class PodSecurity { kRestricted, kImage };

struct KubernetesConfig {
  std::string image, name_space;  // empty name_space: that of kubectl's context
  PodResources resources;         // requests and limits of a pod
  int64_t shm_bytes = 0;          // of /dev/shm; 0: what the plan needs
  std::vector<Mount> mounts;
  std::vector<std::string> node_selector;  // "LABEL=VALUE"
  bool share_nodes = false;                // two pods of the run may lie on a node
  double grace_s = 300;                    // from TERM to KILL
  int64_t retries = 10;                    // of a pod, not counting disruptions
  PodSecurity security = PodSecurity::kRestricted;
  int64_t user = 0, group = 0;                   // that the ranks run as; 0: the image's
  std::vector<std::string> tolerations;          // "KEY[=VALUE][:EFFECT]"
  std::vector<std::string> avoid_nodes;          // by the label kubernetes.io/hostname
  std::vector<std::string> pull_secrets;         // names of Secrets
  std::vector<std::string> labels, annotations;  // "NAME=VALUE": of all objects; of the pods
  std::string priority_class, scheduler;         // empty: the cluster's default
  std::string queue;                             // Kueue's LocalQueue; empty: none
  std::string rdma;                              // "NAME=QUANTITY" of an extended resource; empty: none
  bool host_network = false;
  bool jobset = false;            // a JobSet in place of a Job and a Service
  bool restart_in_place = false;  // of an agent that was killed, in its pod
  double remove_after_s = 0;      // of a Job that has ended; 0: it stays
};

struct SshConfig {
  std::vector<std::string> names;    // of all hosts, spares last
  std::vector<std::string> options;  // of ssh
};

struct ClusterConfig {
  Launcher launcher = Launcher::kHosts;
  int64_t hosts = 0;                // that train; spares not counted
  int64_t ranks_per_host = 0;       // --nproc
  int64_t spares = 0;               // hosts that wait until one is lost
  int64_t hosts_min = 0;            // fewest that training goes on with
  bool groups_cross_hosts = false;  // groups of tp and cp may lie on several hosts
  std::string interface;            // of the network between hosts; empty: the one that reaches the leader
  PortRange ports;
  double dead_after_s = 3;      // a host that was silent so long counts as lost
  double wait_s = 600;          // for hosts, when fewer than hosts_min are left
  double spare_after_s = -1;    // a spare takes the place of a host that was lost; -1: not said
  double join_timeout_s = 600;  // for all hosts, at the start
  HostCheck check = HostCheck::kOff;
  bool exclude_slow = false;     // what a check finds slow; what it finds broken always is
  std::string store = "folder";  // who decides which host leads: the run folder, or etcd
  std::string store_ca, store_cert,
      store_key;                  // of etcds://: files on the hosts; empty: what the system trusts, nobody
  std::string program;            // cairn on the hosts; empty: Kubernetes: of the image; else this program
  std::string workdir;            // on the hosts; empty: the current directory
  std::vector<std::string> env;   // "NAME=VALUE"
  std::vector<std::string> nccl;  // "NCCL_NAME=VALUE", of ranks on GPUs
  SlurmConfig slurm;              // with its launcher alone, as the next two
  KubernetesConfig kubernetes;
  SshConfig ssh;

  int64_t world() const { return hosts * ranks_per_host; }
  int64_t all_hosts() const { return hosts + spares; }
  double beat_s() const { return dead_after_s / 12; }
};

}  // namespace cairn
