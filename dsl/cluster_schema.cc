// The schema of cluster files: T.slurm, T.kubernetes and T.hosts, each with the fields of all launchers and its own.
#include "dsl/schema_words.h"
#include "runtime/config/cluster.h"

namespace cairn::dsl {
namespace {

constexpr double kMostHosts = 65536, kWeek = 7 * 86400;

const Block& ports_block() {
  static const Block out{
      .name = "ports",
      .doc = "The TCP ports that agents and ranks listen on, on each host. They have to be open between the hosts.",
      .fields = {bound("from", &PortRange::from).range(1, 65535).otherwise(24512).says("the first one"),
                 bound("to", &PortRange::to).range(1, 65535).otherwise(25535).says("the last one")}};
  return out;
}

Def hosts_field() {
  return bound("hosts", &ClusterConfig::hosts)
      .range(1, kMostHosts)
      .needed()
      .says("hosts that train; `spares` come on top", "hosts x ranks_per_host is the world of the recipe's mesh.")
      .like("4");
}

std::vector<Field> shared_fields() {
  return {
      bound("ranks_per_host", &ClusterConfig::ranks_per_host)
          .range(1, 4096)
          .needed()
          .says("rank processes on each host, as `--nproc` says it on one")
          .like("8"),
      bound("spares", &ClusterConfig::spares)
          .range(0, kMostHosts)
          .otherwise(0)
          .says("further hosts, which wait until one that trains is lost", "See `spare_after`."),
      bound("hosts_min", &ClusterConfig::hosts_min)
          .range(0, kMostHosts)
          .otherwise(0)
          .says("the fewest hosts that training goes on with when others are lost and no spare is there; 0: `hosts`",
                "The global batch stays; see `spare_after`."),
      bound("groups_cross_hosts", &ClusterConfig::groups_cross_hosts)
          .otherwise(false)
          .says("lets groups of mesh.tp and mesh.cp lie on several hosts",
                "They exchange in every layer, so by default each has to lie on one host.")
          .like("true"),
      bound("interface", &ClusterConfig::interface)
          .otherwise("")
          .says("network interface for what hosts send each other", "Default: the one that reaches the leading host.")
          .like("\"ib0\""),
      block("ports", &ClusterConfig::ports, ports_block())
          .says("the TCP ports of a host that the run may listen on")
          .like("{ from = 24512, to = 25535 }"),
      bound("dead_after", &ClusterConfig::dead_after_s, "dead_after_s")
          .range(1, 3600)
          .otherwise(3.0)
          .in(Unit::kSeconds)
          .says("silence after which a host counts as lost", "Each host sends a sign of life twelve times as often.")
          .like("\"5s\""),
      bound("wait", &ClusterConfig::wait_s, "wait_s")
          .range(0, kWeek)
          .otherwise(600.0)
          .in(Unit::kSeconds)
          .says("how long a run that cannot go on without its lost hosts waits for them",
                "Then it ends with exit code 69.")
          .like("\"30min\""),
      bound("spare_after", &ClusterConfig::spare_after_s, "spare_after_s")
          .range(0, kWeek)
          .derived("10 s; a spare takes a place at once where hosts keep replicas")
          .in(Unit::kSeconds)
          .says("how long a host that was lost may take to come back before a spare takes its place, or fewer go on",
                "Its memory counts when it comes back; a spare begins at the newest checkpoint, or with a replica.")
          .like("\"1min\""),
      bound("join_timeout", &ClusterConfig::join_timeout_s, "join_timeout_s")
          .range(1, kWeek)
          .otherwise(600.0)
          .in(Unit::kSeconds)
          .says("how long a start waits for all hosts", "Then it ends with exit code 69 and names those missing.")
          .like("\"10min\""),
      chosen("check", &ClusterConfig::check, {"off", "start", "after_unknown"})
          .otherwise("off")
          .says(
              "when hosts and the links between them are measured, before ranks start",
              "start: at each start of the run, as `--check start` orders it for one. after_unknown: when ranks hung, "
              "ended by "
              "another's end, or a host was lost. What is broken is excluded, where the run can do without it.")
          .like("\"after_unknown\""),
      bound("exclude_slow", &ClusterConfig::exclude_slow)
          .otherwise(false)
          .says("excludes what a check finds slow, too; else it is told alone")
          .like("true"),
      bound("store", &ClusterConfig::store)
          .otherwise("folder")
          .says("what decides which host leads",
                "folder: the run folder, which all hosts share. etcd://HOST:PORT,...: the members of an etcd, by its "
                "JSON "
                "gateway; etcds://: with TLS. Checkpoints stay in the run folder.")
          .like("\"etcd://h0:2379,h1:2379,h2:2379\""),
      bound("store_ca", &ClusterConfig::store_ca)
          .otherwise("")
          .says("PEM file of the authorities that etcds:// believes", "Default: those of each host's system.")
          .like("\"/etc/etcd/ca.pem\""),
      bound("store_cert", &ClusterConfig::store_cert)
          .otherwise("")
          .says("PEM file of the certificate that the hosts show to etcd", "With store_key, and for etcds:// alone.")
          .like("\"/etc/etcd/client.pem\""),
      bound("store_key", &ClusterConfig::store_key)
          .otherwise("")
          .says("PEM file of the key of store_cert")
          .like("\"/etc/etcd/client-key.pem\""),
      bound("program", &ClusterConfig::program)
          .otherwise("")
          .says("cairn, as the hosts find it", "Default: the path of the program that launches; T.kubernetes: cairn.")
          .like("\"/opt/cairn/bin/cairn\""),
      bound("workdir", &ClusterConfig::workdir)
          .otherwise("")
          .says("working directory on the hosts, which paths of data in the recipe are relative to",
                "Default: the current one; T.kubernetes: the image's.")
          .like("\"/shared/project\""),
      bound("env", &ClusterConfig::env)
          .otherwise(Json::array())
          .says("environment variables of the run, as NAME=VALUE")
          .like("{ \"CAIRN_LOG=debug\" }"),
      bound("nccl", &ClusterConfig::nccl)
          .otherwise(Json::array())
          .says("NCCL's environment for ranks on GPUs, as NCCL_NAME=VALUE",
                "It comes over what the agents' own environment says. Each host checks it before ranks start, and the "
                "run "
                "records it.")
          .like("{ \"NCCL_SOCKET_IFNAME=eth0\", \"NCCL_IB_HCA=mlx5_0\" }"),
  };
}

std::vector<Field> joined(std::vector<Field> first, const std::vector<Field>& then) {
  first.insert(first.end(), then.begin(), then.end());
  return first;
}

std::vector<Field> with_hosts() { return joined({hosts_field()}, shared_fields()); }

template <class M>
Def slurm(const char* name, M SlurmConfig::*member, const char* key = "") {
  return inside(&ClusterConfig::slurm, bound(name, member, key));
}

template <class M>
Def kubernetes(const char* name, M KubernetesConfig::*member, const char* key = "") {
  return inside(&ClusterConfig::kubernetes, bound(name, member, key));
}

const Block& slurm_block() {
  static const Block out{
      .name = "slurm",
      .constructors = {"slurm"},
      .doc = "One batch job of Slurm, with a task on each node. `cairn launch` gives its script to sbatch.",
      .fields = joined(
          with_hosts(),
          {slurm("partition", &SlurmConfig::partition).otherwise("").says("partition of the job; default: the site's"),
           slurm("account", &SlurmConfig::account)
               .otherwise("")
               .says("account that the job is charged to; default: the user's"),
           slurm("time", &SlurmConfig::time_s, "time_s")
               .range(0, 86400 * 365)
               .otherwise(0.0)
               .in(Unit::kSeconds)
               .says("time limit of the job; 0: the partition's", "Slurm counts in minutes: it is rounded up.")
               .like("\"12h\""),
           slurm("signal_before", &SlurmConfig::signal_before_s, "signal_before_s")
               .range(0, 65535)
               .otherwise(180.0)
               .in(Unit::kSeconds)
               .says("how long before the time limit the run saves and stops; 0: no signal comes",
                     "Give it two steps and two saves. Slurm may be up to a minute early.")
               .like("\"10min\""),
           slurm("requeue", &SlurmConfig::requeue)
               .otherwise(true)
               .says("queue the job again after a stop with steps left, and after exit code 69",
                     "At most 5 tries follow each other without a new checkpoint.")
               .like("false"),
           slurm("sbatch", &SlurmConfig::sbatch)
               .otherwise(Json::array())
               .says("further options of sbatch, each a line of the script", "They come last, and the last one counts.")
               .like("{ \"--gres=gpu:8\", \"--output=logs/%x-%j.out\" }")})};
  return out;
}

const Block& mount_block() {
  static const Block out{
      .name = "mount",
      .constructors = {"mount"},
      .positional = true,
      .doc = "A volume in each pod: T.mount { \"/data\", claim = \"datasets\", read_only = true }.",
      .fields = {bound("path", &Mount::path).needed().says("the path in the pod").like("\"/data\""),
                 bound("claim", &Mount::claim).otherwise("").says("name of a PersistentVolumeClaim"),
                 bound("host_path", &Mount::host_path).otherwise("").says("a folder of each node, instead of a claim"),
                 bound("sub_path", &Mount::sub_path).otherwise("").says("a folder of the volume; default: all of it"),
                 bound("read_only", &Mount::read_only).otherwise(false).says("nothing is written there").like("true")}};
  return out;
}

const Block& resources_block() {
  static const Block out{
      .name = "resources",
      .doc = "What each pod requests, which is also its limit.",
      .fields = {bound("cpu", &PodResources::cpu).range(0, 4096).otherwise(0.0).says("cores; 0: not said").like("16"),
                 bound("memory", &PodResources::memory_bytes, "memory_bytes")
                     .range(0, 1e15)
                     .otherwise(0)
                     .in(Unit::kBytes)
                     .says("memory, that of /dev/shm included; 0: not said")
                     .like("\"64GiB\""),
                 bound("others", &PodResources::others)
                     .otherwise(Json::array())
                     .says("extended resources, as NAME=QUANTITY")
                     .like("{ \"nvidia.com/gpu=8\" }")}};
  return out;
}

/// Fields for the demands of a site.
std::vector<Field> pod_fields() {
  return {
      inside(&ClusterConfig::kubernetes, chosen("security", &KubernetesConfig::security, {"restricted", "image"}))
          .otherwise("restricted")
          .says("the pods' security context",
                "restricted: what the Pod Security Standard of that name asks for, so the image runs as a user "
                "who is not root. image: nothing, as the image runs.")
          .like("\"image\""),
      kubernetes("user", &KubernetesConfig::user)
          .range(0, 4294967294)
          .otherwise(0)
          .says("number of the user that the pods run as; 0: 1000, with security = \"image\" the image's")
          .like("1000"),
      kubernetes("group", &KubernetesConfig::group)
          .range(0, 4294967294)
          .otherwise(0)
          .says("number of the group that the pods run as, and of fresh volumes; 0: the user's number, with security = "
                "\"image\" the image's")
          .like("1000"),
      kubernetes("tolerations", &KubernetesConfig::tolerations)
          .otherwise(Json::array())
          .says("taints of nodes that the pods tolerate, as KEY, KEY:EFFECT or KEY=VALUE:EFFECT")
          .like("{ \"nvidia.com/gpu:NoSchedule\" }"),
      kubernetes("avoid_nodes", &KubernetesConfig::avoid_nodes)
          .otherwise(Json::array())
          .says("nodes that no pod may run on, by their label kubernetes.io/hostname",
                "Such as the nodes of hosts that the run has excluded.")
          .like("{ \"node-17\" }"),
      kubernetes("pull_secrets", &KubernetesConfig::pull_secrets)
          .otherwise(Json::array())
          .says("names of the Secrets by which the image is pulled")
          .like("{ \"registry\" }"),
      kubernetes("labels", &KubernetesConfig::labels)
          .otherwise(Json::array())
          .says("further labels of all objects and pods, as NAME=VALUE")
          .like("{ \"team=language\" }"),
      kubernetes("annotations", &KubernetesConfig::annotations)
          .otherwise(Json::array())
          .says("annotations of the pods, as NAME=VALUE")
          .like("{ \"kueue.x-k8s.io/podset-required-topology=rack\" }"),
      kubernetes("priority_class", &KubernetesConfig::priority_class)
          .otherwise("")
          .says("name of the pods' PriorityClass; default: the cluster's")
          .like("\"training\""),
      kubernetes("scheduler", &KubernetesConfig::scheduler)
          .otherwise("")
          .says("name of the scheduler that places the pods; default: the cluster's", "`volcano` gets a PodGroup.")
          .like("\"volcano\""),
      kubernetes("queue", &KubernetesConfig::queue)
          .otherwise("")
          .says("Kueue's LocalQueue, or Volcano's queue: it admits all pods at once or none", "Default: no queue.")
          .like("\"team-queue\""),
      kubernetes("rdma", &KubernetesConfig::rdma)
          .otherwise("")
          .says("the pod's RDMA devices, an extended resource as NAME=QUANTITY",
                "The pod may lock memory then (IPC_LOCK), which `restricted` and `baseline` forbid.")
          .like("\"rdma/hca=1\""),
      kubernetes("host_network", &KubernetesConfig::host_network)
          .otherwise(false)
          .says("lets the pods use the node's network, which `restricted` and `baseline` forbid")
          .like("true"),
      kubernetes("jobset", &KubernetesConfig::jobset)
          .otherwise(false)
          .says("submits a JobSet, which needs its controller, in place of a Job and a Service")
          .like("true"),
      kubernetes("restart_in_place", &KubernetesConfig::restart_in_place)
          .otherwise(false)
          .says("starts an agent that was killed again in its pod, where its memory is",
                "It needs Kubernetes 1.35. `retries` does not count such starts.")
          .like("true"),
      kubernetes("remove_after", &KubernetesConfig::remove_after_s, "remove_after_s")
          .range(0, 86400 * 365)
          .otherwise(0.0)
          .in(Unit::kSeconds)
          .says("how long after its end the Job is removed, with the objects that it owns; 0: it stays")
          .like("\"24h\"")};
}

const Block& kubernetes_block() {
  static const Block out{
      .name = "kubernetes",
      .constructors = {"kubernetes"},
      .doc =
          "An Indexed Job of Kubernetes with a pod for each host, a headless Service for their names, and a ConfigMap "
          "with the recipe. `cairn launch` gives them to kubectl.",
      .fields = joined(
          joined(
              with_hosts(),
              {kubernetes("image", &KubernetesConfig::image)
                   .needed()
                   .says("container image with cairn")
                   .like("\"registry.example/cairn:0.1\""),
               kubernetes("namespace", &KubernetesConfig::name_space, "name_space")
                   .otherwise("")
                   .says("of the Job; default: that of kubectl's context"),
               inside(&ClusterConfig::kubernetes, block("resources", &KubernetesConfig::resources, resources_block()))
                   .says("what each pod requests")
                   .like("{ cpu = 16, memory = \"64GiB\" }"),
               kubernetes("shm", &KubernetesConfig::shm_bytes, "shm_bytes")
                   .range(0, 1e15)
                   .otherwise(0)
                   .in(Unit::kBytes)
                   .says("size of /dev/shm, which is memory of the pod; 0: what the plan needs")
                   .like("\"32GiB\""),
               inside(&ClusterConfig::kubernetes, items("mounts", &KubernetesConfig::mounts, mount_block()))
                   .otherwise(Json::array())
                   .written(Form::kPlaces, {&mount_block()})
                   .says("volumes in each pod", "The run folder has to lie in one that all pods share and may write.")
                   .like("{ T.mount { \"/shared\", claim = \"shared\" } }"),
               kubernetes("node_selector", &KubernetesConfig::node_selector)
                   .otherwise(Json::array())
                   .says("labels of the nodes that pods may run on, as LABEL=VALUE")
                   .like("{ \"pool=training\" }"),
               kubernetes("share_nodes", &KubernetesConfig::share_nodes)
                   .otherwise(false)
                   .says("lets two pods of the run lie on one node", "By default a lost node is one lost host.")
                   .like("true"),
               kubernetes("grace", &KubernetesConfig::grace_s, "grace_s")
                   .range(1, 86400)
                   .otherwise(300.0)
                   .in(Unit::kSeconds)
                   .says("from the signal to stop to the kill", "Give it two steps and two saves.")
                   .like("\"10min\""),
               kubernetes("retries", &KubernetesConfig::retries)
                   .range(0, 1e6)
                   .otherwise(10)
                   .says("how often a pod that failed is started again", "Evictions and drained nodes do not count.")}),
          pod_fields())};
  return out;
}

const Block& hosts_block() {
  static const Block out{
      .name = "hosts",
      .constructors = {"hosts"},
      .doc = "Hosts reached by ssh, without a scheduler. `cairn launch` starts an agent on each and stays beside them.",
      .fields = joined({inside(&ClusterConfig::ssh, bound("names", &SshConfig::names))
                            .needed()
                            .says("all hosts, as ssh and the other hosts know them; the last ones are the spares")
                            .like("{ \"h0\", \"h1\", \"h2\" }")},
                       joined(shared_fields(), {inside(&ClusterConfig::ssh, bound("options", &SshConfig::options))
                                                    .otherwise(Json::array())
                                                    .says("options of ssh, each word by itself")
                                                    .like("{ \"-p\", \"2222\" }")}))};
  return out;
}

}  // namespace

const std::vector<const Block*>& cluster_blocks() {
  static const std::vector<const Block*> out = {&slurm_block(), &kubernetes_block(), &hosts_block()};
  return out;
}

}  // namespace cairn::dsl
