// NCCL's environment against interfaces that are given and a folder in place of /sys.
#include "runtime/host/nccl_check.h"

#include <doctest/doctest.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::host;
using cairn::testing::TempDir;

namespace {

void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text << "\n";
}

/// A device with one port; of RoCE with a GID of v1 at 0, v2 at 1 and 3, none at 2.
void add_device(const std::filesystem::path& sys, const std::string& name, const std::string& layer = "InfiniBand",
                const std::string& state = "4: ACTIVE") {
  const auto port = sys / "class/infiniband" / name / "ports/1";
  write(port / "state", state);
  write(port / "link_layer", layer);
  write(port / "gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001");
  write(port / "gid_attrs/types/0", "IB/RoCE v1");
  if (layer == "InfiniBand") return;
  for (const char* const index : {"1", "3"}) {
    write(port / "gids" / index, "0000:0000:0000:0000:0000:ffff:0a00:0001");
    write(port / "gid_attrs/types" / index, "RoCE v2");
  }
  write(port / "gids/2", "0000:0000:0000:0000:0000:0000:0000:0000");
  std::filesystem::create_directories(port / "gid_attrs/types/2");  // of such the kernel gives an error for the type
}

HostNetwork network(const TempDir& sys) {
  return {.interfaces = {{"lo", true, true, {"127.0.0.1"}},
                         {"eth0", false, true, {"10.0.0.1"}},
                         {"eth1", false, true, {}},
                         {"ib0", false, false, {"10.1.0.1"}},
                         {"docker0", false, true, {"172.17.0.1"}}},
          .sys = sys.path};
}

bool has(const std::vector<std::string>& lines, const std::string& words) {
  for (const std::string& line : lines) {
    if (line.find(words) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

TEST_SUITE("runtime/host/nccl_check") {
  TEST_CASE("nothing set has nothing wrong, and neither has what fits") {
    const TempDir sys;
    add_device(sys.path, "mlx5_0");
    add_device(sys.path, "mlx5_1");
    const std::vector<NcclVariables> fine = {
        {},
        {{"NCCL_SOCKET_IFNAME", "eth0"}},
        {{"NCCL_SOCKET_IFNAME", "eth"}},
        {{"NCCL_SOCKET_IFNAME", "=eth0"}},
        {{"NCCL_SOCKET_IFNAME", "^lo,docker"}},
        {{"NCCL_IB_HCA", "mlx5"}},
        {{"NCCL_IB_HCA", "mlx5_0:1,mlx5_1"}},
        {{"NCCL_IB_HCA", "^mlx5_1"}},
        {{"NCCL_IB_HCA", "=mlx5_0:1"}},
        {{"NCCL_IB_GID_INDEX", "7"}},  // not RoCE
        {{"NCCL_P2P_DISABLE", "0"}, {"NCCL_DEBUG", "INFO"}, {"NCCL_IB_DISABLE", "0"}}};
    for (const NcclVariables& variables : fine) {
      const NcclCheck check = check_nccl(variables, network(sys), 2);
      CHECK(check.problems == std::vector<std::string>());
      CHECK(check.warnings == std::vector<std::string>());
      CHECK(check.gid_types.empty());
    }
  }

  TEST_CASE("an interface that is not there, is down, has no address or reaches no other host is named") {
    const TempDir sys;
    const std::vector<std::pair<std::string, std::string>> rows = {
        {"bond0",
         "NCCL_SOCKET_IFNAME=bond0: no interface begins with bond0; interfaces here: lo, eth0, eth1 (no address), "
         "ib0 (down), docker0. Name one"},
        {"=eth", "no interface is eth;"},
        {"eth0,ens", "no interface begins with ens;"},
        {"eth1", "none of the interfaces that it leaves is up and has an address"},
        {"ib0", "none of the interfaces that it leaves is up and has an address"},
        {"^eth,lo,docker", "none of the interfaces that it leaves is up"},
        {"lo", "lo reaches this host alone, and the run has 2 hosts"},
        {"eth0,docker0", "docker0 is a bridge of this host's containers"}};
    for (const auto& [value, words] : rows) {
      CAPTURE(value);
      const NcclCheck check = check_nccl({{"NCCL_SOCKET_IFNAME", value}}, network(sys), 2);
      CHECK(check.problems.size() == 1);
      CHECK_MESSAGE(has(check.problems, words), check.problems.front());
    }
    CHECK(check_nccl({{"NCCL_SOCKET_IFNAME", "lo"}}, network(sys), 1).problems.empty());
  }

  TEST_CASE("an HCA that is not there, and a port that is not active, is named") {
    const TempDir sys;
    CHECK(has(check_nccl({{"NCCL_IB_HCA", "mlx5_0"}}, network(sys), 2).problems, "devices here: none."));
    add_device(sys.path, "mlx5_0");
    add_device(sys.path, "mlx5_1", "InfiniBand", "1: DOWN");
    const NcclCheck missing = check_nccl({{"NCCL_IB_HCA", "mlx5_0,mlx4_0"}}, network(sys), 2);
    CHECK(missing.problems.size() == 1);
    CHECK(has(missing.problems, "NCCL_IB_HCA=mlx5_0,mlx4_0: no device begins with mlx4_0 in "));
    CHECK(has(missing.problems, "devices here: mlx5_0, mlx5_1."));
    const NcclCheck down = check_nccl({{"NCCL_IB_HCA", "mlx5"}}, network(sys), 2);
    CHECK(down.problems.size() == 1);
    CHECK(has(down.problems, "NCCL_IB_HCA=mlx5: port 1 of mlx5_1 is 1: DOWN;"));
    CHECK(check_nccl({{"NCCL_IB_HCA", "mlx5_0"}}, network(sys), 2).problems.empty());
  }

  TEST_CASE("of RoCE a GID index has a type, which peers must share; an empty one is named with those that are") {
    const TempDir sys;
    add_device(sys.path, "mlx5_0", "Ethernet");
    add_device(sys.path, "mlx5_1", "Ethernet", "1: DOWN");
    CHECK(check_nccl({{"NCCL_IB_GID_INDEX", "3"}}, network(sys), 2).gid_types == "RoCE v2");
    CHECK(check_nccl({{"NCCL_IB_GID_INDEX", "0"}}, network(sys), 2).gid_types == "RoCE v1");
    CHECK(check_nccl({{"NCCL_IB_GID_INDEX", "3"}}, network(sys), 2).problems.empty());
    for (const char* const index : {"2", "9"}) {
      const NcclCheck empty = check_nccl({{"NCCL_IB_GID_INDEX", index}}, network(sys), 2);
      CHECK(empty.problems.size() == 1);
      CHECK_MESSAGE(has(empty.problems,
                        "port 1 of mlx5_0 has no GID there; those that are: 0 (IB/RoCE v1), 1 (RoCE v2), 3 "
                        "(RoCE v2). Choose"),
                    empty.problems.front());
    }
    add_device(sys.path, "mlx5_2", "Ethernet");
    write(sys.path / "class/infiniband/mlx5_2/ports/1/gid_attrs/types/3", "IB/RoCE v1");
    const NcclCheck mixed = check_nccl({{"NCCL_IB_GID_INDEX", "3"}}, network(sys), 2);
    CHECK(has(mixed.problems, "GIDs of several types there: RoCE v1, RoCE v2;"));
    CHECK(check_nccl({{"NCCL_IB_GID_INDEX", "3"}, {"NCCL_IB_HCA", "mlx5_0"}}, network(sys), 2).problems.empty());
  }

  TEST_CASE("what is left over from a search for a fault is a warning") {
    const TempDir sys;
    const auto warns = [&](const NcclVariables& variables) {
      const NcclCheck check = check_nccl(variables, network(sys), 2);
      CHECK(check.problems.empty());
      return check.warnings;
    };
    CHECK(has(warns({{"NCCL_P2P_DISABLE", "1"}}), "NCCL_P2P_DISABLE=1: GPUs of a host exchange through its memory"));
    CHECK(has(warns({{"NCCL_SHM_DISABLE", "1"}}), "NCCL_SHM_DISABLE=1: "));
    CHECK(has(warns({{"NCCL_DEBUG", "trace"}}), "NCCL_DEBUG=trace: each operation"));
    CHECK(warns({{"NCCL_IB_DISABLE", "1"}}).empty());  // there is nothing to disable
    add_device(sys.path, "mlx5_0");
    CHECK(has(warns({{"NCCL_IB_DISABLE", "1"}}), "NCCL_IB_DISABLE=1: mlx5_0 is left unused"));
  }

  TEST_CASE("interfaces that reach an address are those that are up in its network") {
    const HostNetwork host{.interfaces = {{"lo", true, true, {"127.0.0.1"}, {8}},
                                          {"eth0", false, true, {"10.0.0.1"}, {24}},
                                          {"ib0", false, true, {"fd00::1", "10.0.0.2"}, {0, 24}},
                                          {"ib1", false, false, {"10.0.0.3"}, {24}},
                                          {"ib2", false, true, {"10.0.1.3"}, {24}},
                                          {"any", false, true, {"10.0.0.9"}, {0}}}};
    const auto names = [&](const std::string& address) {
      std::string out;
      for (const Interface& one : interfaces_to(host, address)) out += one.name + " ";
      return out;
    };
    CHECK(names("10.0.0.77") == "eth0 ib0 ");
    CHECK(names("10.0.1.1") == "ib2 ");
    CHECK(names("127.0.0.2").empty());
    CHECK(names("fd00::2").empty());
    CHECK(names("h0").empty());
  }

  TEST_CASE("the cluster file comes over the environment, and hosts that differ are told apart") {
    const std::array<const char*, 4> environment = {"NCCL_DEBUG=WARN", "PATH=/bin", "NCCL_IB_HCA=a=b", nullptr};
    const NcclVariables all = nccl_variables({"NCCL_DEBUG=INFO", "NCCL_ALGO=Ring"}, environment.data());
    CHECK(all == NcclVariables{{"NCCL_ALGO", "Ring"}, {"NCCL_DEBUG", "INFO"}, {"NCCL_IB_HCA", "a=b"}});
    CHECK(nccl_differences(all, all).empty());
    CHECK(nccl_differences(all, {{"NCCL_ALGO", "Tree"}, {"NCCL_IB_HCA", "a=b"}}) ==
          std::vector<std::string>{"NCCL_ALGO is Tree there, Ring at the leader",
                                   "NCCL_DEBUG is not set there, INFO at the leader"});
  }
}
