// Cluster files: what is read, and what each mistake is answered with.
#include <doctest/doctest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "dsl/schema.h"
#include "runtime/plan/cluster_rules.h"
#include "tests/dsl/recipe_text.h"

using namespace cairn;
using namespace cairn::dsl;

namespace {

const std::string kSlurm = "hosts = 4, ranks_per_host = 2";
const std::string kPods = "hosts = 4, ranks_per_host = 2, image = \"cairn:1\"";
const std::string kHosts = "names = { \"a\", \"b\", \"c\" }, ranks_per_host = 2";

ClusterResult load(const std::string& text) {
  const RecipeFolder folder;
  folder.write("cluster.lua", text);
  return load_cluster("cluster.lua");
}

/// T.`launcher` with these fields, one a line, the first on line 3.
std::string file(const std::string& launcher, const std::string& fields) {
  return "local T = require \"cairn\"\nreturn T." + launcher + " {\n" + fields + "\n}\n";
}

ClusterConfig good(const std::string& launcher, const std::string& fields) {
  const ClusterResult result = load(file(launcher, fields));
  INFO(to_text(result.diagnostics));
  REQUIRE(result.ok());
  return result.cluster;
}

std::string all_of(const ClusterResult& result) {
  CHECK(result.cluster.hosts == 0);  // never both
  return to_text(result.diagnostics);
}

/// The one mistake's line, and what would be accepted.
std::string only(const std::string& launcher, const std::string& fields) {
  const ClusterResult result = load(file(launcher, fields));
  INFO(to_text(result.diagnostics));
  REQUIRE(result.diagnostics.size() == 1);
  const std::string text = all_of(result);
  const std::string& accepted = result.diagnostics[0].accepted;
  return text.substr(0, text.find('\n')) + (accepted.empty() ? "" : " | " + accepted);
}

}  // namespace

TEST_SUITE("dsl/cluster") {
  TEST_CASE("a file for Slurm is read, and what it leaves out has its default") {
    const ClusterConfig c = good("slurm", kSlurm);
    CHECK(c.launcher == Launcher::kSlurm);
    CHECK(c.hosts == 4);
    CHECK(c.world() == 8);
    CHECK(c.all_hosts() == 4);
    CHECK(c.hosts_min == 4);
    CHECK(c.ports.from == 24512);
    CHECK(c.ports.to == 25535);
    CHECK(c.dead_after_s == 3);
    CHECK(c.beat_s() == 0.25);
    CHECK(c.wait_s == 600);
    CHECK(c.join_timeout_s == 600);
    CHECK(c.spare_after_s == -1);  // not said
    CHECK(good("slurm", std::string(kSlurm) + ", spare_after = 0").spare_after_s == 0);
    CHECK(c.store == "folder");
    CHECK(good("slurm", std::string(kSlurm) + ", store = \"etcds://h0:2379,[::1]:2380\", store_ca = \"ca.pem\"")
              .store_ca == "ca.pem");
    CHECK(!c.groups_cross_hosts);
    CHECK(c.slurm.requeue);
    CHECK(c.slurm.signal_before_s == 180);

    const ClusterConfig d = good("slurm", R"(hosts = 100, ranks_per_host = 8, spares = 1, hosts_min = 90,
      interface = "ib0", ports = { from = 30000, to = 30100 }, dead_after = "5s", wait = "1h", join_timeout = 30,
      program = "/opt/cairn", workdir = "/work", env = { "A=1", "B=x y" }, groups_cross_hosts = true,
      nccl = { "NCCL_SOCKET_IFNAME=^lo,docker", "NCCL_IB_HCA=mlx5_0:1" },
      partition = "gpu", account = "team", time = "1d12h", signal_before = "10min", requeue = false,
      sbatch = { "--gres=gpu:8" })");
    CHECK(d.all_hosts() == 101);
    CHECK(d.hosts_min == 90);
    CHECK(d.interface == "ib0");
    CHECK(d.ports.size() == 101);
    CHECK(d.dead_after_s == 5);
    CHECK(d.wait_s == 3600);
    CHECK(d.join_timeout_s == 30);
    CHECK(d.program == "/opt/cairn");
    CHECK(d.workdir == "/work");
    CHECK(d.env == std::vector<std::string>{"A=1", "B=x y"});
    CHECK(d.nccl == std::vector<std::string>{"NCCL_SOCKET_IFNAME=^lo,docker", "NCCL_IB_HCA=mlx5_0:1"});
    CHECK(d.groups_cross_hosts);
    CHECK(d.slurm.partition == "gpu");
    CHECK(d.slurm.account == "team");
    CHECK(d.slurm.time_s == 129600);
    CHECK(d.slurm.signal_before_s == 600);
    CHECK(!d.slurm.requeue);
    CHECK(d.slurm.sbatch == std::vector<std::string>{"--gres=gpu:8"});
  }

  TEST_CASE("a file for Kubernetes is read") {
    const ClusterConfig c = good("kubernetes", kPods + R"(, namespace = "train", shm = "2GiB", grace = "10min",
      retries = 3, share_nodes = true, node_selector = { "pool=big" }, workdir = "/shared/project",
      resources = { cpu = 7.5, memory = "64GiB", others = { "nvidia.com/gpu=8" } },
      mounts = { T.mount { "/shared", claim = "shared" },
                 T.mount { "/data", host_path = "/srv/data", read_only = true, sub_path = "a/b" } })");
    CHECK(c.launcher == Launcher::kKubernetes);
    CHECK(c.kubernetes.image == "cairn:1");
    CHECK(c.kubernetes.name_space == "train");
    CHECK(c.kubernetes.shm_bytes == int64_t{2} << 30);
    CHECK(c.kubernetes.grace_s == 600);
    CHECK(c.kubernetes.retries == 3);
    CHECK(c.kubernetes.share_nodes);
    CHECK(c.kubernetes.node_selector == std::vector<std::string>{"pool=big"});
    CHECK(c.kubernetes.resources.cpu == 7.5);
    CHECK(c.kubernetes.resources.memory_bytes == int64_t{64} << 30);
    CHECK(c.kubernetes.resources.others == std::vector<std::string>{"nvidia.com/gpu=8"});
    REQUIRE(c.kubernetes.mounts.size() == 2);
    CHECK(c.kubernetes.mounts[0].path == "/shared");
    CHECK(c.kubernetes.mounts[0].claim == "shared");
    CHECK(!c.kubernetes.mounts[0].read_only);
    CHECK(c.kubernetes.mounts[1].host_path == "/srv/data");
    CHECK(c.kubernetes.mounts[1].sub_path == "a/b");
    CHECK(c.kubernetes.mounts[1].read_only);
    CHECK(c.kubernetes.security == PodSecurity::kRestricted);
  }

  TEST_CASE("a site's demands of pods are read") {
    const KubernetesConfig c = good("kubernetes", kPods + R"(, security = "image", user = 1000, group = 2000,
      tolerations = { "gpu", "a=b:NoSchedule" }, avoid_nodes = { "node-1" }, pull_secrets = { "registry" },
      labels = { "team=a" }, annotations = { "a/b=c d" }, priority_class = "high", scheduler = "mine",
      queue = "team", rdma = "rdma/hca=1", host_network = true, jobset = true, restart_in_place = true,
      remove_after = "24h")")
                                   .kubernetes;
    CHECK(c.security == PodSecurity::kImage);
    CHECK(c.user == 1000);
    CHECK(c.group == 2000);
    CHECK(c.tolerations == std::vector<std::string>{"gpu", "a=b:NoSchedule"});
    CHECK(c.avoid_nodes == std::vector<std::string>{"node-1"});
    CHECK(c.pull_secrets == std::vector<std::string>{"registry"});
    CHECK(c.labels == std::vector<std::string>{"team=a"});
    CHECK(c.annotations == std::vector<std::string>{"a/b=c d"});
    CHECK(c.priority_class == "high");
    CHECK(c.scheduler == "mine");
    CHECK(c.queue == "team");
    CHECK(c.rdma == "rdma/hca=1");
    CHECK(c.host_network);
    CHECK(c.jobset);
    CHECK(c.restart_in_place);
    CHECK(c.remove_after_s == 86400);
  }

  TEST_CASE("of a list of hosts those train that are no spares") {
    const ClusterConfig c = good("hosts", kHosts + ", spares = 1, options = { \"-p\", \"2222\" }");
    CHECK(c.launcher == Launcher::kHosts);
    CHECK(c.hosts == 2);
    CHECK(c.hosts_min == 2);
    CHECK(c.all_hosts() == 3);
    CHECK(c.ssh.names == std::vector<std::string>{"a", "b", "c"});
    CHECK(c.ssh.options == std::vector<std::string>{"-p", "2222"});
  }

  TEST_CASE("a cluster file is a program like a recipe: functions, require, references") {
    const RecipeFolder folder;
    folder.write("sizes.lua", "return { hosts = 2 + 2 }\n");
    folder.write("cluster.lua", R"(local T = require "cairn"
local sizes = require "sizes"
return T.slurm { hosts = sizes.hosts, ranks_per_host = 2, hosts_min = T.ref "hosts" // 2 })");
    const ClusterResult result = load_cluster("cluster.lua");
    INFO(to_text(result.diagnostics));
    REQUIRE(result.ok());
    CHECK(result.cluster.hosts == 4);
    CHECK(result.cluster.hosts_min == 2);
    REQUIRE(result.sources.size() == 2);
    CHECK(result.sources[0].first == "cluster.lua");
    CHECK(result.sources[1].first == "sizes.lua");
  }

  TEST_CASE("each mistake names its line, what was found and what is accepted") {
    const auto slurm = [](const std::string& more) { return only("slurm", kSlurm + ",\n" + more); };
    const auto pods = [](const std::string& more) { return only("kubernetes", kPods + ",\n" + more); };
    const auto hosts = [](const std::string& more) { return only("hosts", kHosts + ",\n" + more); };
    CHECK(only("slurm", "ranks_per_host = 2") ==
          "cluster.lua:2: hosts is missing; it must be an integer from 1 to 65536");
    CHECK(only("slurm", "hosts = 4") ==
          "cluster.lua:2: ranks_per_host is missing; it must be an integer from 1 to 4096");
    CHECK(only("slurm", "hosts = 0,\nranks_per_host = 2") ==
          "cluster.lua:3: hosts must be an integer from 1 to 65536, got 0");
    CHECK(only("slurm", "hosts = 4,\nranks_per_host = \"two\"") ==
          "cluster.lua:4: ranks_per_host must be an integer from 1 to 4096, got \"two\"");
    CHECK(slurm("spares = -1") == "cluster.lua:4: spares must be an integer from 0 to 65536, got -1");
    CHECK(slurm("spares = 1.5") == "cluster.lua:4: spares must be an integer from 0 to 65536, got 1.5");
    CHECK(slurm("hosts_min = 5") ==
          "cluster.lua:4: hosts_min = 5, but 4 hosts train (cluster.lua:3) | hosts_min from 1 to 4");
    CHECK(slurm("interfaces = \"ib0\"") ==
          "cluster.lua:4: interfaces: no such field in slurm; did you mean `interface`?");
    CHECK(slurm("interface = \"two words\"") ==
          "cluster.lua:4: interface = \"two words\" is no name of a network interface, such as eth0");
    CHECK(slurm("interface = 7") == "cluster.lua:4: interface must be a string, got 7");
    CHECK(slurm("ports = { from = 9,\nto = 8 }") ==
          "cluster.lua:4: ports.from = 9 is above ports.to = 8 (cluster.lua:5)");
    CHECK(slurm("ports = { from = 9, to = 10 }") ==
          "cluster.lua:4: ports.from = 9 to ports.to = 10 are 2 ports; a host needs one for each of its 2 ranks and "
          "one for its agent | at least 3 ports");
    CHECK(slurm("ports = { from = 70000 }") ==
          "cluster.lua:4: ports.from must be an integer from 1 to 65535, got 70000");
    CHECK(slurm("ports = { first = 1 }") == "cluster.lua:4: ports.first: no such field in ports | from, to");
    CHECK(slurm("ports = 24512") == "cluster.lua:4: ports must be a table, got 24512");
    CHECK(slurm("dead_after = \"500ms\"") ==
          "cluster.lua:4: dead_after must be a number from 1 to 3600, in seconds or such as \"30min\", got 0.5");
    CHECK(slurm("dead_after = \"soon\"") ==
          "cluster.lua:4: dead_after must be a number from 1 to 3600, in seconds or such as \"30min\", got \"soon\"");
    CHECK(slurm("wait = -1").find("wait must be a number from 0 to 604800") != std::string::npos);
    CHECK(slurm("join_timeout = 0").find("join_timeout must be a number from 1 to 604800") != std::string::npos);
    for (const char* store : {"disk", "etcd://", "etcd://h0", "etcd://h0:", "etcd://h0:0", "etcd://h0:65536",
                              "etcd://:1", "etcd://h0:1,", "etcd://h0:1,h 1:2", "etcd://fd00::1:2379", "etcd://[h0:1",
                              "etcd://u@h0:1", "etcd://h0:1/x", "http://h0:1"}) {
      CAPTURE(store);
      CHECK(slurm(std::string("store = \"") + store + "\"") ==
            "cluster.lua:4: store names no store that there is | \"folder\", \"etcd://HOST:PORT,...\" or "
            "\"etcds://...\"");
    }
    CHECK(slurm("store = \"etcd://h0:2379\", store_ca = \"ca.pem\"") ==
          "cluster.lua:4: store_ca is for etcd with TLS alone, and store is \"etcd://h0:2379\" | a store "
          "\"etcds://...\", "
          "or leave it out");
    CHECK(slurm("store = \"etcds://h0:2379\", store_cert = \"c.pem\"") ==
          "cluster.lua:4: a certificate and its key are given together | both store_cert and store_key, or neither");
    CHECK(slurm("groups_cross_hosts = 1") == "cluster.lua:4: groups_cross_hosts must be true or false, got 1");
    CHECK(slurm("program = \"a\\nb\"") == "cluster.lua:4: program must be one line without control characters");
    CHECK(slurm("workdir = \"a\\nb\"") == "cluster.lua:4: workdir must be one line without control characters");
    CHECK(slurm("env = { \"A=1\", \"B\" }") ==
          "cluster.lua:4: env[2] = \"B\" is not of the form NAME=VALUE with letters, digits and _ in the name");
    CHECK(slurm("env = { \"A B=1\" }").find("env[1] = \"A B=1\" is not of the form") != std::string::npos);
    CHECK(slurm("env = { \"A=1\\n2\" }").find("env[1] = \"...\" is not of the form") != std::string::npos);
    CHECK(slurm("env = { \"1A=1\" }") == "cluster.lua:4: env[1]: the name of a variable begins with no digit");
    CHECK(slurm("env = { \"NCCL_DEBUG=INFO\" }") ==
          "cluster.lua:4: env[1]: variables of NCCL stand in `nccl`, where they are checked and recorded");
    CHECK(
        slurm("nccl = { \"NCCL_DEBUG\" }") ==
        "cluster.lua:4: nccl[1] = \"NCCL_DEBUG\" is not of the form NCCL_NAME=VALUE with letters, digits and _ in the "
        "name");
    CHECK(slurm("nccl = { \"CUDA_MODULE_LOADING=EAGER\" }") ==
          "cluster.lua:4: nccl[1] = \"CUDA_MODULE_LOADING\": the names of NCCL's variables begin with NCCL_; others "
          "stand "
          "in `env`");
    CHECK(slurm("nccl = { \"NCCL_DEBUG=INFO\", \"NCCL_DEBUG=WARN\" }") ==
          "cluster.lua:4: nccl[2]: NCCL_DEBUG stands there twice");
    CHECK(slurm("env = { A = \"1\" }") == "cluster.lua:4: env must be a list of strings, got { A = \"1\" }");
    CHECK(slurm("image = \"x\"") == "cluster.lua:4: image: no such field in slurm | a field of T.kubernetes");
    CHECK(slurm("partition = \"a\\nb\"") == "cluster.lua:4: partition must be one line without control characters");
    CHECK(slurm("account = \"a\\nb\"") == "cluster.lua:4: account must be one line without control characters");
    CHECK(slurm("signal_before = 600, time = \"5min\"") ==
          "cluster.lua:4: signal_before = 600 s, but the job's time is 300 s | signal_before below 300");
    CHECK(slurm("signal_before = 70000").find("signal_before must be a number from 0 to 65535") != std::string::npos);
    CHECK(slurm("sbatch = { \"gres=gpu:8\" }") ==
          "cluster.lua:4: sbatch[1] must be an option of sbatch on one line | such as \"--gres=gpu:8\"");
    CHECK(slurm("sbatch = { \"--comment=a\\n#SBATCH --nodes=9\" }")
              .find("sbatch[1] must be an option of sbatch on one "
                    "line") != std::string::npos);
    for (const char* counts :
         {"--nodes=9", "-N9", "-N 9", "--ntasks 4", "-n4", "--ntasks-per-node=8", "--tasks-per-node=8"}) {
      CAPTURE(counts);
      CHECK(slurm("sbatch = { \"" + std::string(counts) + "\" }") ==
            "cluster.lua:4: sbatch[1] = \"" + std::string(counts) +
                "\": one agent a host is what `cairn launch` asks for | hosts, spares and ranks_per_host");
    }
    CHECK(slurm("sbatch = { \"--array=1-2\" }") ==
          "cluster.lua:4: sbatch[1] = \"--array=1-2\": a run is one job of one script");
    CHECK(slurm("sbatch = { \"--signal=USR1@9\" }") ==
          "cluster.lua:4: sbatch[1] = \"--signal=USR1@9\": say it by signal_before | signal_before = \"10min\"");
    CHECK(slurm("sbatch = { \"--no-requeue\" }") ==
          "cluster.lua:4: sbatch[1] = \"--no-requeue\": say it by requeue | requeue = true or false");
    CHECK(only("kubernetes", kSlurm) == "cluster.lua:2: image is missing; it must be a string");
    CHECK(only("kubernetes", kSlurm + ",\nimage = \"a b\"") ==
          "cluster.lua:4: image is no name of a container image | such as \"registry.example/cairn:0.1\"");
    CHECK(pods("namespace = \"A\"") ==
          "cluster.lua:4: namespace is no name of a namespace | lower-case letters, digits and -, at most 63, with no "
          "- at either end");
    CHECK(pods("workdir = \"project\"") == "cluster.lua:4: workdir must be an absolute path in the pod");
    CHECK(pods("resources = { cpus = 4 }") ==
          "cluster.lua:4: resources.cpus: no such field in resources; did you mean `cpu`?");
    CHECK(pods("resources = { others = { \"gpu\" } }") ==
          "cluster.lua:4: resources.others[1] = \"gpu\" is not of the form NAME=QUANTITY");
    CHECK(pods("resources = { memory = \"4 pounds\" }").find("resources.memory must be an integer") !=
          std::string::npos);
    CHECK(pods("node_selector = { \"pool\" }") ==
          "cluster.lua:4: node_selector[1] = \"pool\" is not of the form LABEL=VALUE");
    CHECK(pods("shm = \"2GiB\", resources = { memory = \"1GiB\" }") ==
          "cluster.lua:4: shm = 2147483648 bytes, but /dev/shm is part of resources.memory = 1073741824 bytes");
    CHECK(pods("retries = -1").find("retries must be an integer from 0 to 1000000") != std::string::npos);
    CHECK(pods("grace = 0").find("grace must be a number from 1 to 86400") != std::string::npos);
    CHECK(pods("share_nodes = \"yes\"") == "cluster.lua:4: share_nodes must be true or false, got \"yes\"");
    CHECK(pods("security = \"baseline\"") ==
          "cluster.lua:4: security: \"baseline\" is not one of image, restricted | image, restricted");
    for (const char* taint : {"", ":NoSchedule", "a:Never", "a b", "a=b c:NoSchedule", "a:"}) {
      CAPTURE(taint);
      CHECK(pods("tolerations = { \"" + std::string(taint) + "\" }") ==
            "cluster.lua:4: tolerations[1] = \"" + std::string(taint) +
                "\" is no taint | KEY, KEY:EFFECT or KEY=VALUE:EFFECT, with NoSchedule, PreferNoSchedule or NoExecute");
    }
    CHECK(pods("avoid_nodes = { \"\" }") == "cluster.lua:4: avoid_nodes[1] is empty");
    CHECK(pods("pull_secrets = { \"My\" }") ==
          "cluster.lua:4: pull_secrets[1] = \"My\" is no name of Kubernetes | lower-case letters, digits, - and dots");
    CHECK(pods("priority_class = \"a b\"").find("priority_class = \"a b\" is no name of Kubernetes") !=
          std::string::npos);
    CHECK(pods("scheduler = \"A\"").find("scheduler = \"A\" is no name of Kubernetes") != std::string::npos);
    CHECK(pods("queue = \"a.b\"").find("queue = \"a.b\" is no name of Kubernetes") != std::string::npos);
    CHECK(pods("rdma = \"hca\"").find("rdma = \"hca\" is not of the form NAME=QUANTITY") != std::string::npos);
    CHECK(pods("labels = { \"team=a b\" }") ==
          "cluster.lua:4: labels[1] = \"team=a b\": the value of a label is at most 63 letters, digits and ._-");
    CHECK(pods("labels = { \"app.kubernetes.io/name=x\" }") ==
          "cluster.lua:4: labels[1]: the launch sets app.kubernetes.io/name and /instance");
    CHECK(pods("annotations = { \"team\" }") ==
          "cluster.lua:4: annotations[1] = \"team\" is not of the form NAME=VALUE");
    const auto mount = [&](const std::string& words) { return pods("mounts = { T.mount { " + words + " } }"); };
    CHECK(pods("mounts = { \"/data\" }") == "cluster.lua:4: mounts[1] must be a list of T.mount {...}, got \"/data\"");
    CHECK(mount("claim = \"c\"") ==
          "cluster.lua:4: mounts[1]: T.mount must begin with the path in the pod, got T.mount { claim = \"c\" }");
    CHECK(mount("\"/data\"") == "cluster.lua:4: mounts[1] must have either claim or host_path");
    CHECK(mount("\"/data\", claim = \"c\", host_path = \"/d\"") ==
          "cluster.lua:4: mounts[1] must have either claim or host_path");
    CHECK(mount("\"data\", claim = \"c\"") ==
          "cluster.lua:4: mounts[1]: \"data\" must be an absolute path in the pod, without a colon");
    CHECK(mount("\"/dev/shm/\", claim = \"c\"") == "cluster.lua:4: mounts[1]: \"/dev/shm/\" is mounted already");
    CHECK(mount("\"/data\", claim = \"My claim\"") ==
          "cluster.lua:4: mounts[1]: claim is no name of a PersistentVolumeClaim | lower-case letters, digits, - and "
          "dots");
    CHECK(mount("\"/data\", host_path = \"d\"") == "cluster.lua:4: mounts[1]: host_path must be an absolute path");
    CHECK(mount("\"/data\", claim = \"c\", sub_path = \"a/../..\"") ==
          "cluster.lua:4: mounts[1]: sub_path must be relative and stay in the volume");
    CHECK(mount("\"/data\", claim = \"c\", sub_path = \"a\\nb\"") ==
          "cluster.lua:4: mounts[1] must be one line without control characters each");
    CHECK(mount("\"/data\", claims = \"c\"") ==
          "cluster.lua:4: mounts[1].claims: no such field in mount; did you mean `claim`?");
    CHECK(only("hosts", "ranks_per_host = 2") == "cluster.lua:2: names is missing; it must be a list of strings");
    CHECK(hosts("spares = 3") ==
          "cluster.lua:3: names has 3 hosts and spares = 3 (cluster.lua:4): none is left to train");
    CHECK(hosts("hosts_min = 4") ==
          "cluster.lua:4: hosts_min = 4, but 3 hosts train (names without the spares) | hosts_min from 1 to 3");
    CHECK(hosts("hosts = 2") == "cluster.lua:4: hosts: no such field in hosts | a field of T.slurm, T.kubernetes");
    CHECK(only("hosts", "ranks_per_host = 2,\nnames = { \"a\", \"b\", \"a\" }") ==
          "cluster.lua:4: names[3] = \"a\" is named twice; one agent a host");
    CHECK(only("hosts", "ranks_per_host = 2,\nnames = { \"me@a\" }") ==
          "cluster.lua:4: names[1] must be a name or an address of a host, got \"me@a\" | what the other hosts know it "
          "by too; a user stands in options: { \"-l\", \"user\" }");
    CHECK(only("hosts", "ranks_per_host = 2,\nnames = { \"[fd00::1]\" }")
              .find("IPv6 without brackets, as ssh takes it") != std::string::npos);
    CHECK(only("hosts", "ranks_per_host = 2,\nnames = { \"-oProxyCommand=x\" }").find("names[1] must be a name") !=
          std::string::npos);
    CHECK(hosts("options = { \"-p\\n\" }") == "cluster.lua:4: options[1] must be one line without control characters");
  }

  TEST_CASE("all mistakes of a file are told at once, in the order of their lines") {
    const ClusterResult result = load(file("slurm", "hosts = 0,\nspare = 1,\ndead_after = 0.1"));
    const std::string text = all_of(result);
    CHECK(result.diagnostics.size() == 4);
    CHECK(text.find("cluster.lua:2: ranks_per_host is missing") < text.find("cluster.lua:3: hosts must"));
    CHECK(text.find("cluster.lua:3: hosts must") < text.find("cluster.lua:4: spare: no such field"));
    CHECK(text.find("cluster.lua:4: spare: no such field") < text.find("cluster.lua:5: dead_after must"));
    CHECK(text.find("4 errors. Nothing was started.") != std::string::npos);
  }

  TEST_CASE("what is no cluster file is refused with what it is") {
    const auto first = [](const std::string& text) {
      const std::string all = all_of(load(text));
      return all.substr(0, all.find('\n'));
    };
    const std::string must =
        "cluster.lua: must return T.slurm {...}, T.kubernetes {...} or T.hosts {...}, but returns ";
    CHECK(first("return 7") == must + "7");
    CHECK(first("") == must + "nothing");
    CHECK(first("return { hosts = 4 }") == must + "{ hosts = 4 }");
    CHECK(first(kBase) == must + "a recipe");
    CHECK(first("local T = require \"cairn\"\nreturn T.mount { \"/a\", claim = \"b\" }").starts_with(must + "T.mount"));
    CHECK(first("return T.slurm {}").starts_with("cluster.lua:1: undefined name `T`"));
    CHECK(first("local T = require \"cairn\"\nreturn T.slurms { hosts = 1 }") ==
          "cluster.lua:2: T.slurms does not exist; did you mean T.slurm?");
    CHECK(first("local T = require \"cairn\"\nreturn T.slurm {").starts_with("cluster.lua:"));
    CHECK(load_cluster("nowhere.lua").diagnostics.at(0).message == "no such file");
  }

  TEST_CASE("a cluster file has the bounds of recipes") {
    CHECK(load("while true do end").diagnostics.at(0).code == "limit_instructions");
    CHECK(load("local s = \"x\" while true do s = s .. s end").diagnostics.at(0).code == "limit_memory");
    CHECK(load("local t = {} t.t = t\nlocal T = require \"cairn\"\nreturn T.slurm { hosts = t }")
              .diagnostics.at(0)
              .message.find("nested deeper than 32 levels") != std::string::npos);
    CHECK(load("return os.time()").diagnostics.at(0).message.find("`os` does not exist here") != std::string::npos);
  }

  TEST_CASE("a launcher's table in a recipe is no field of it") {
    CHECK(
        only_mistake(with("mesh = T.slurm { hosts = 4 }")).find("mesh must be a table, or T.mesh {...}, got T.slurm") !=
        std::string::npos);
  }

  TEST_CASE("groups of tp and cp lie on one host, or are refused with what fits") {
    ClusterConfig cluster{.hosts = 2, .ranks_per_host = 4};
    const auto found = [&](MeshConfig mesh) { return find_mistakes(cluster, Mesh::make(mesh, 8).value()); };
    CHECK(found({.tp = 4}).empty());
    CHECK(found({.tp = 2, .pp = 2, .cp = 2}).empty());
    CHECK(found({.pp = 8}).empty());
    const std::vector<Mistake> wide = found({.tp = 8});
    REQUIRE(wide.size() == 1);
    CHECK(wide[0].field == "mesh.tp");
    CHECK(wide[0].message ==
          "mesh.tp = 8: ranks 0 to 7 exchange in every layer, and lie on hosts 0 to 1 with ranks_per_host = 4");
    CHECK(found({.tp = 2, .cp = 4}).at(0).field == "mesh.cp");
    CHECK(found({.tp = 2, .order = {MeshAxis::kDp, MeshAxis::kTp, MeshAxis::kPp}}).at(0).field == "mesh.tp");
    cluster.ranks_per_host = 3;  // the first two pairs share a host, the next lies on two
    CHECK(find_mistakes(cluster, Mesh::make({.tp = 2}, 6).value()).at(0).message.find("ranks 2 to 3") !=
          std::string::npos);
    cluster.groups_cross_hosts = true;
    CHECK(found({.tp = 8}).empty());
  }

  TEST_CASE("docs/cluster-file.md is what the schema generates (CAIRN_UPDATE_DOCS=1 rewrites it)") {
    const std::string path = std::string(CAIRN_SOURCE_DIR) + "/docs/cluster-file.md";
    if (std::getenv("CAIRN_UPDATE_DOCS") != nullptr) std::ofstream(path, std::ios::binary) << cluster_markdown();
    std::ifstream in(path, std::ios::binary);
    std::stringstream text;
    text << in.rdbuf();
    CHECK_MESSAGE(text.str() == cluster_markdown(),
                  "run this test with CAIRN_UPDATE_DOCS=1 and commit docs/cluster-file.md");
  }

  TEST_CASE("each field of a cluster file has a line of documentation, help, a place in the page and the editor file") {
    const std::string page = cluster_markdown(), types = editor_types();
    for (const Block* block : cluster_blocks()) {
      CHECK(help_text("T." + block->name).value().find(block->doc) != std::string::npos);
      CHECK(types.find("---@field " + block->name + " fun(") != std::string::npos);
      visit_fields(
          [&](const std::string& field_path, const Field& field) {
            CAPTURE(field_path);
            CHECK(!field.doc.empty());
            CHECK(page.find("| `" + field.name + "` |") != std::string::npos);
            CHECK(types.find("---@field " + field.name + "? ") != std::string::npos);
            if (field_path == field.name) {
              const Result<std::string> help = help_text(block->name + "." + field.name);
              REQUIRE(help.ok());
              CHECK(help.value().find(field.doc) != std::string::npos);
            }
            if (!field.required && !field.fallback.is_null()) CHECK(!check_value(field, field.fallback).has_value());
          },
          *block);
    }
  }

  TEST_CASE("the examples in the reference of cluster files are accepted") {
    for (const Block* block : cluster_blocks()) {
      const std::string base = block->name == "slurm" ? kSlurm : block->name == "kubernetes" ? kPods : kHosts;
      for (const Field& field : block->fields) {
        if (field.example.empty() || field.required) continue;
        CAPTURE(field.name);
        // What belongs to another field comes with it.
        std::string with;
        if (field.name.starts_with("store_")) with = ", store = \"etcds://h0:2379\"";
        if (field.name == "store_cert") with += ", store_key = \"k\"";
        if (field.name == "store_key") with += ", store_cert = \"c\"";
        good(block->name, base + with + ", " + field.name + " = " + field.example);
      }
    }
  }
}
