#include "runtime/cluster/placement.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include "runtime/cluster/node_list.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using cairn::testing::TempDir;
using namespace cairn::cluster;

namespace {

using Variables = std::map<std::string, std::string>;

Result<std::optional<Placement>> found(const Variables& variables, const HostFlags& flags = {},
                                       std::string_view own = "elsewhere") {
  const Environment environment = [&](const char* name) -> std::optional<std::string> {
    const auto at = variables.find(name);
    return at == variables.end() ? std::nullopt : std::optional(at->second);
  };
  return find_placement(flags, environment, own);
}

std::string text(const Variables& variables, const HostFlags& flags = {}, std::string_view own = "elsewhere") {
  const auto placed = found(variables, flags, own);
  if (!placed.ok()) return placed.error().message;
  return placed.value() ? placement_text(*placed.value()) : "one host";
}

Variables changed(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

const Variables kStep = {{"SLURM_JOB_ID", "12"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "2"},
                         {"SLURM_STEP_NUM_NODES", "4"},
                         {"SLURM_STEP_NUM_TASKS", "4"},
                         {"SLURM_NNODES", "5"},
                         {"SLURM_STEP_NODELIST", "h[0-3]"},
                         {"SLURMD_NODENAME", "h2"}};

}  // namespace

TEST_SUITE("runtime/cluster/placement") {
  TEST_CASE("node lists expand as scontrol expands them") {
    const std::pair<std::string, std::vector<std::string>> lists[] = {
        {"a[001-003,7],b1", {"a001", "a002", "a003", "a7", "b1"}},  // scontrol show hostnames, Slurm 22.05
        {"h0", {"h0"}},
        {"n[9-11]-ib", {"n9-ib", "n10-ib", "n11-ib"}},
        {"r[1-2]n[0-1]", {"r1n0", "r1n1", "r2n0", "r2n1"}},
        {"x[007-009]", {"x007", "x008", "x009"}},
    };
    for (const auto& [list, names] : lists) {
      CAPTURE(list);
      const auto expanded = expand_node_list(list);
      REQUIRE_OK(expanded);
      CHECK(expanded.value() == names);
    }
    const auto refused = [](std::string_view list) { return expand_node_list(list).error().message; };
    CHECK(refused("") == "node list ``: expected a host name at character 1");
    CHECK(refused("a,,b") == "node list `a,,b`: expected a host name at character 3");
    CHECK(refused("a[1-") == "node list `a[1-`: expected a number at character 5");
    CHECK(refused("a[1-3") == "node list `a[1-3`: expected `]` at character 6");
    CHECK(refused("a[3-1]") == "node list `a[3-1]`: 3-1 runs backwards");
    CHECK(refused("a b") == "node list `a b`: expected a host name at character 2");
    for (const char* many : {"a[0-65536]", "a[0-999]b[0-999]", "a[0-99999999999999999999]", "a[0-60000],b[0-60000]"}) {
      CAPTURE(many);
      CHECK_FALSE(expand_node_list(many).ok());
    }
  }

  TEST_CASE(
      "a step of Slurm gives hosts, index and leader; a start outside a step or with several tasks a host is refused") {
    CHECK(text(kStep) == "4 hosts, from Slurm step 12.0; this is 2 (h2), leader h0");
    CHECK(text(changed(kStep, {{"SLURMD_NODENAME", "h1"}})) ==
          "4 hosts, from Slurm step 12.0; this is 1 (h1), leader h0");
    CHECK(text({{"SLURM_JOB_ID", "12"}, {"SLURM_PROCID", "0"}, {"SLURM_JOB_NUM_NODES", "4"}, {"SLURM_NTASKS", "4"}}) ==
          "this is one of 4 nodes of a Slurm job (SLURM_JOB_NUM_NODES), and in no step of it: srun --ntasks-per-node=1 "
          "starts one agent on each");
    CHECK(text({{"SLURM_JOB_ID", "12"}, {"SLURM_JOB_NUM_NODES", "1"}}) == "one host");
    CHECK(text(changed(kStep, {{"SLURM_STEP_NUM_TASKS", "8"}})) ==
          "Slurm step 12.0 has 8 tasks on 4 nodes; one agent a host, ranks by --nproc: srun --ntasks-per-node=1");
    CHECK(text(changed(kStep, {{"SLURM_STEP_NODELIST", "h[0-1]"}})).find("names 2 hosts, and 4 were started") !=
          std::string::npos);
    CHECK(text(changed(kStep, {{"SLURM_PROCID", "4"}, {"SLURMD_NODENAME", ""}})) ==
          "Slurm step 12.0: this is host 4 of 4; they count from 0");
    CHECK(text(changed(kStep, {{"SLURM_PROCID", "two"}})) ==
          "SLURM_PROCID = `two`, expected a whole number from 0 to 65536");
    CHECK(text({{"SLURM_JOB_ID", "12"},
                {"SLURM_STEP_ID", "0"},
                {"SLURM_PROCID", "0"},
                {"SLURM_STEP_NUM_NODES", "1"},
                {"SLURM_STEP_NUM_TASKS", "1"},
                {"SLURM_STEP_NODELIST", "h0"}}) == "one host");
  }

  TEST_CASE("mpirun tells ranks and no names, and inside a Slurm job Slurm's variables describe its daemons") {
    const Variables daemon = changed(kStep, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}});
    const Variables two = changed(
        daemon, {{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}});
    CHECK(text(two).find("Open MPI started 2 tasks and tells no host's name: give --hosts") == 0);
    CHECK(text(two, {.hosts = {"a", "b"}}) == "2 hosts, from --hosts and Open MPI; this is 1 (b), leader a");
    CHECK(text(two, {.hosts = {"a", "b", "c"}}) == "--hosts names 3 hosts, and Open MPI says 2");
    CHECK(text(changed(two, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}})).find("2 tasks on this host; one agent a host") !=
          std::string::npos);
  }

  TEST_CASE("torchrun's names and the pods of a job") {
    const Variables node = {{"PET_NNODES", "3"}, {"PET_NODE_RANK", "1"}, {"PET_MASTER_ADDR", "job-node-0-0.job"}};
    CHECK(text(node) == "3 hosts, from PET_NNODES; this is 1, leader job-node-0-0.job");
    CHECK(found(changed(node, {{"PET_NNODES", "2:3"}})).value()->hosts_min == 2);
    CHECK(found(changed(node, {{"PET_NNODES", "2:3"}})).value()->hosts == 3);
    CHECK(text(changed(node, {{"PET_NNODES", "3:2"}})) == "PET_NNODES = 3:2: the fewest come first");
    CHECK(text(changed(node, {{"PET_NNODES", "3:"}})).find("expected a whole number") != std::string::npos);
    CHECK(text({{"PET_NNODES", "3"}, {"PET_NODE_RANK", "1"}}).find("no MASTER_ADDR") != std::string::npos);
    CHECK(text({{"PET_NNODES", "3"}, {"MASTER_ADDR", "a"}})
              .starts_with("PET_NNODES = 3, and PET_NODE_RANK does not say"));
    const Variables worker = {
        {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}, {"GROUP_RANK", "1"}, {"GROUP_WORLD_SIZE", "2"},
        {"RANK", "1"},       {"WORLD_SIZE", "2"},       {"MASTER_ADDR", "a"}};
    CHECK(text(worker) == "2 hosts, from torchrun; this is 1, leader a");
    CHECK(text(changed(worker, {{"LOCAL_WORLD_SIZE", "8"}})).find("torchrun --nproc-per-node 1") != std::string::npos);
    const Variables pods = {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "job-master-0"}};
    CHECK(text(pods).starts_with("WORLD_SIZE = 4, RANK = 1: this was started as one of several"));
    CHECK(text(changed(pods, {{"KUBERNETES_SERVICE_HOST", "10.0.0.1"}})) ==
          "4 hosts, from the pods of a Kubernetes job; this is 1, leader job-master-0");
  }

  TEST_CASE("an elastic job without ranks is refused with the names of its variables") {
    const std::string said =
        text({{"PET_NNODES", "2:4"}, {"PET_RDZV_BACKEND", "c10d"}, {"PET_RDZV_ENDPOINT", "job-worker-0:23456"}});
    CHECK(said.starts_with("PET_NNODES = 2:4, and PET_NODE_RANK does not say which of these hosts this is"));
    CHECK(said.find("--hosts and --host-index") != std::string::npos);
  }

  TEST_CASE("addresses of IPv6 are read in brackets and without them") {
    CHECK(expand_node_list("[fd00::1],[fe80::2%eth0],h[1-2]").value() ==
          std::vector<std::string>{"fd00::1", "fe80::2%eth0", "h1", "h2"});
    CHECK(expand_node_list("fd00::1,fd00::2").value() == std::vector<std::string>{"fd00::1", "fd00::2"});
    CHECK(expand_node_list("[1-2]x").value() == std::vector<std::string>{"1x", "2x"});
    CHECK(expand_node_list("[fd00::1]:29500").error().message.find("has no port here) at character 10") !=
          std::string::npos);
    CHECK(expand_node_list("[fd00::1").error().message.find("an address of IPv6 in brackets") != std::string::npos);
    CHECK(expand_node_list("[fd00::g]").error().message.find("an address of IPv6 in brackets") != std::string::npos);
    CHECK(plain_host("[::1]").value() == "::1");
    CHECK(plain_host("::1").value() == "::1");
    CHECK(plain_host("h0.example").value() == "h0.example");
    for (const char* bad : {"[::1]:80", "h0:29500", "[h0]", "[::1", "["}) {
      CAPTURE(bad);
      CHECK_FALSE(plain_host(bad).ok());
    }
    const Variables node = {{"PET_NNODES", "2"}, {"PET_NODE_RANK", "1"}, {"PET_MASTER_ADDR", "[fd00::1]"}};
    CHECK(text(node) == "2 hosts, from PET_NNODES; this is 1, leader fd00::1");
    CHECK(text(changed(node, {{"PET_MASTER_ADDR", "[fd00::1]:29500"}})) ==
          "PET_MASTER_ADDR: `[fd00::1]:29500`: expected an address of IPv6 in brackets, without a port");
  }

  TEST_CASE("a job of several hosts that started nothing on them is refused, by its name") {
    const TempDir dir("placement");
    const auto file = [&](const char* name, const std::string& lines) {
      std::ofstream(dir / name) << lines;
      return (dir / name).string();
    };
    const std::string slots = file("slots", "h0\nh0\nh1\nh1\n"),
                      queues = file("queues", "h0 4 all.q@h0 UNDEFINED\nh1 4 all.q@h1 UNDEFINED\n");
    const Variables jobs[] = {
        {{"LSB_JOBID", "7"}, {"LSB_HOSTS", "h0 h0 h1 h1"}},  {{"LSB_JOBID", "7"}, {"LSB_MCPU_HOSTS", "h0 2 h1 2"}},
        {{"LSB_JOBID", "7"}, {"LSB_DJOB_HOSTFILE", slots}},  {{"PBS_JOBID", "7.server"}, {"PBS_NODEFILE", slots}},
        {{"JOB_ID", "7"}, {"PE_HOSTFILE", queues}},          {{"OAR_JOB_ID", "7"}, {"OAR_NODEFILE", slots}},
        {{"COBALT_JOBID", "7"}, {"COBALT_NODEFILE", slots}},
    };
    const char* const names[] = {"LSF", "LSF", "LSF", "PBS", "SGE", "OAR", "Cobalt"};
    for (size_t k = 0; k < std::size(jobs); ++k) {
      CAPTURE(k);
      const std::string said = text(jobs[k]);
      CHECK(said.starts_with(fmt::format("this is one of 2 hosts of a job of {} (", names[k])));
      CHECK(said.find("each with --hosts h0,h1, or name the only one that trains (--hosts h0)") != std::string::npos);
      CHECK(text(jobs[k], {.hosts = {"h0", "h1"}}, "h1") == "2 hosts, from --hosts; this is 1 (h1), leader h0");
    }
    CHECK(text({{"PBS_JOBID", "7"}, {"PBS_NUM_NODES", "2"}}).starts_with("this is one of 2 hosts of a job of PBS"));
    CHECK(text({{"JOB_ID", "7"}, {"NHOSTS", "3"}}).starts_with("this is one of 3 hosts of a job of SGE (NHOSTS)"));
    CHECK(text({{"FLUX_JOB_ID", "f1"}, {"FLUX_JOB_NNODES", "2"}}).find("flux run") != std::string::npos);
    CHECK(text({{"LSB_JOBID", "7"}, {"LSB_HOSTS", "h0 h0"}}) == "one host");
    CHECK(text({{"PBS_JOBID", "7"}, {"PBS_NODEFILE", "/nonexistent"}, {"PBS_NUM_NODES", "1"}}) == "one host");
    CHECK(text({{"PBS_JOBID", "7"}, {"PBS_NODEFILE", "/dev/zero"}}) == "one host");
    CHECK(text({{"JOB_ID", "7"}}) == "one host");
    for (const Variables& absurd : {Variables{{"PBS_JOBID", "7"}, {"PBS_NUM_NODES", "0"}},
                                    {{"SLURM_NNODES", "2x"}},
                                    {{"SLURM_JOB_NUM_NODES", "99999999999999999999"}},
                                    {{"SLURM_JOB_NUM_NODES", "-2"}}})
      CHECK(text(absurd).find("expected a whole number from 1 to") != std::string::npos);
    // One host by two names.
    CHECK(text({{"LSB_JOBID", "7"}, {"LSB_HOSTS", "h0 h0.example.com h0"}}) == "one host");
    CHECK(text({{"LSB_JOBID", "7"}, {"LSB_HOSTS", "h0.example.com h0"}}) == "one host");
    CHECK(text({{"LSB_JOBID", "7"}, {"LSB_HOSTS", "h0 h0.a h0.b"}}).starts_with("this is one of 2 hosts"));
    CHECK(text({{"LSB_JOBID", "7"}, {"LSB_HOSTS", "10.0.0.1 10.0.0.2"}}).starts_with("this is one of 2 hosts"));
    // mpirun in such a job has started a task on each.
    CHECK(text(changed(jobs[0], {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "1"}}))
              .starts_with("MPI's Hydra started 2 tasks and tells no host's name: give --hosts"));
  }

  TEST_CASE("launchers of MPI are recognized by their variables, with PMI and PMIx") {
    CHECK(text({{"PMI_RANK", "0"}, {"PMI_SIZE", "8"}, {"MPI_LOCALNRANKS", "8"}}) ==
          "MPI's Hydra started 8 tasks on this host; one agent a host, ranks by --nproc: mpiexec -ppn 1");
    CHECK(text({{"MV2_COMM_WORLD_RANK", "0"}, {"MV2_COMM_WORLD_SIZE", "2"}, {"MV2_COMM_WORLD_LOCAL_SIZE", "1"}})
              .starts_with("MVAPICH started 2 tasks"));
    CHECK(text({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}).starts_with("a launcher with PMI started 2 tasks"));
    CHECK(text({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}) == "one host");
    CHECK(text({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}, {.hosts = {"a", "b"}}) ==
          "2 hosts, from --hosts and a launcher with PMI; this is 1 (b), leader a");
    CHECK(text({{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "n"}})
              .starts_with("a launcher with PMIx started this as its task 1"));
    CHECK(text(changed(kStep, {{"PMIX_RANK", "2"}, {"PMIX_NAMESPACE", "n"}})) ==
          "4 hosts, from Slurm step 12.0; this is 2 (h2), leader h0");
  }

  TEST_CASE("variables that number tasks or hosts and name none are refused, and --hosts answers them") {
    const Variables several[] = {
        {{"RANK", "0"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "0"}, {"MASTER_ADDR", "a"}},
        {{"NNODES", "2"}, {"NODE_RANK", "1"}},
        {{"TF_CONFIG", R"({"cluster":{"chief":["a:1"],"worker":["b:1"]},"task":{"index":0}})"}}};
    for (const Variables& one : several) {
      const std::string said = text(one);
      CHECK(said.find("started as one of several") != std::string::npos);
      CHECK(said.find("or name the only one that trains (--hosts h0)") != std::string::npos);
      CHECK(text(one, {.hosts = {"h0"}}, "h0") == "1 host, from --hosts; this is 0 (h0), leader h0");
    }
    for (const Variables& one : {Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}},
                                 {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "4"}},
                                 {{"WORLD_SIZE", "4"}},
                                 {{"NNODES", "2"}},
                                 {{"TF_CONFIG", R"({"cluster":{"worker":["a:1"]}})"}},
                                 {{"TF_CONFIG", "{}"}}})
      CHECK(text(one) == "one host");
    CHECK(text({{"TF_CONFIG", "worker"}}).find("TF_CONFIG") != std::string::npos);
    CHECK(text({{"JSM_NAMESPACE_RANK", "1"}, {"JSM_NAMESPACE_SIZE", "2"}, {"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "n"}})
              .starts_with("jsrun started 2 tasks and tells no host's name"));
    CHECK(text({{"PALS_RANKID", "0"}, {"PALS_SIZE", "8"}, {"PALS_LOCAL_SIZE", "4"}})
              .starts_with("PALS started 4 tasks on this host"));
    CHECK(text({{"PALS_SIZE", "2"}}) == "PALS_RANKID is not set");
    CHECK(text({{"PALS_SIZE", "1"}}) == "one host");
  }

  TEST_CASE("a LeaderWorkerSet and SageMaker give hosts, index and leader") {
    const Variables group = {
        {"LWS_GROUP_SIZE", "3"}, {"LWS_WORKER_INDEX", "2"}, {"LWS_LEADER_ADDRESS", "set-0.set.default"}};
    CHECK(text(group) == "3 hosts, from a LeaderWorkerSet; this is 2, leader set-0.set.default");
    CHECK(text(changed(group, {{"LWS_GROUP_SIZE", "1"}})) == "one host");
    CHECK(text(changed(group, {{"LWS_WORKER_INDEX", ""}})) == "LWS_WORKER_INDEX is not set");
    const Variables job = {{"SM_HOSTS", "[\"algo-1\",\"algo-2\"]"}, {"SM_CURRENT_HOST", "algo-2"}};
    CHECK(text(job) == "2 hosts, from SageMaker; this is 1 (algo-2), leader algo-1");
    CHECK(text(changed(job, {{"SM_HOSTS", "[\"algo-1\"]"}})) == "one host");
    CHECK(text(changed(job, {{"SM_HOSTS", "algo-1"}})).find("SM_HOSTS") != std::string::npos);
    CHECK(text(changed(job, {{"SM_HOSTS", "[1, 2]"}})) == "SM_HOSTS: expected a list of hosts' names");
    CHECK(text(changed(job, {{"SM_CURRENT_HOST", "x"}})) ==
          "SM_HOSTS: 2 hosts, and `x` (SM_CURRENT_HOST) is none of them");
  }

  TEST_CASE("flags name the hosts; which one this is comes from a flag, the launcher or the own name") {
    const HostFlags flags{.hosts = {"h0.example", "h1.example", "h2.example"}};
    CHECK(text({}, {.hosts = flags.hosts, .index = 2}) ==
          "3 hosts, from --hosts; this is 2 (h2.example), leader h0.example");
    CHECK(text({}, flags, "h1") == "3 hosts, from --hosts; this is 1 (h1.example), leader h0.example");
    CHECK(text({}, flags, "h1.example") == "3 hosts, from --hosts; this is 1 (h1.example), leader h0.example");
    CHECK(text({}, {.hosts = {"h1.a", "h1.b"}}, "h1").find("give --host-index (this host calls itself h1)") !=
          std::string::npos);
    CHECK(text({{"JOB_COMPLETION_INDEX", "1"}}, flags) ==
          "3 hosts, from --hosts and JOB_COMPLETION_INDEX; this is 1 (h1.example), leader h0.example");
    CHECK(text({}, flags).find("give --host-index") != std::string::npos);
    CHECK(text({}, {.hosts = {"a", "a"}, .index = 0}) == "--hosts: a host is named twice; one agent a host");
    CHECK(text({}, {.hosts = {"a", "b"}, .index = 2}) == "--host-index = 2; --hosts names 2, which count from 0");
    CHECK(text({}, {.index = 1}).find("no --hosts or --host-file names them") != std::string::npos);
    CHECK(text(kStep, {.hosts = {"a", "b"}}) == "--hosts names 2 hosts, and Slurm step 12.0 says 4");
    CHECK(text({}) == "one host");
    CHECK(text({{"JOB_COMPLETION_INDEX", "3"}}) == "one host");  // a job of many single runs
  }
}
