#include "runtime/cluster/placement.h"

#include <doctest/doctest.h>

#include <map>
#include <string>

#include "runtime/cluster/node_list.h"
#include "tests/support/ok.h"

using namespace cairn;
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
    CHECK(text({{"PET_NNODES", "3"}, {"MASTER_ADDR", "a"}}) == "GROUP_RANK is not set");
    const Variables worker = {
        {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}, {"GROUP_RANK", "1"}, {"GROUP_WORLD_SIZE", "2"},
        {"RANK", "1"},       {"WORLD_SIZE", "2"},       {"MASTER_ADDR", "a"}};
    CHECK(text(worker) == "2 hosts, from torchrun; this is 1, leader a");
    CHECK(text(changed(worker, {{"LOCAL_WORLD_SIZE", "8"}})).find("torchrun --nproc-per-node 1") != std::string::npos);
    const Variables pods = {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "job-master-0"}};
    CHECK(text(pods) == "one host");  // a shell in which somebody tried torch
    CHECK(text(changed(pods, {{"KUBERNETES_SERVICE_HOST", "10.0.0.1"}})) ==
          "4 hosts, from the pods of a Kubernetes job; this is 1, leader job-master-0");
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
