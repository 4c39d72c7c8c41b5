#pragma once
// NCCL's environment on a host: what ranks get, and the classic mistakes in it, looked for before ranks start. NCCL
// itself says little of them: it takes another way, which is slow, or waits for a peer that it cannot reach.
//
// Sources: NCCL's documentation, "Environment Variables" (2.x): forms of NCCL_SOCKET_IFNAME and NCCL_IB_HCA, defaults;
// Documentation/ABI/stable/sysfs-class-infiniband of Linux: ports, gids, gid_attrs. Proved on folders in place of /sys;
// not run on a host with InfiniBand or RoCE.

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace cairn::host {

/// By name. Of a run: those of the cluster file over those that its agent has.
using NcclVariables = std::map<std::string, std::string>;

/// `cluster_file`: its field `nccl`, NAME=VALUE each. `environment`: as of a process, NAME=VALUE each, ended by null;
/// what does not begin with NCCL_ is left out.
NcclVariables nccl_variables(const std::vector<std::string>& cluster_file, const char* const* environment);

struct Interface {
  std::string name;
  bool loopback = false, up = false;
  std::vector<std::string> addresses;  // numeric; link-local ones of IPv6 are left out
  std::vector<int64_t> prefixes = {};  // of IPv4 addresses the bits of their network, of others 0; as many
};

/// What a host has of networks.
struct HostNetwork {
  std::vector<Interface> interfaces;
  std::filesystem::path sys = "/sys";  // class/infiniband is looked for below it

  /// Of this host. CAIRN_SYS_ROOT of the environment, for tests: in place of /sys.
  static HostNetwork of_host();
};

/// Interfaces that are up and have an address in the IPv4 network of which `address` is another one: by each of them
/// that address is reached without a gateway.
std::vector<Interface> interfaces_to(const HostNetwork& network, const std::string& address);

struct NcclCheck {
  std::vector<std::string> problems;  // ranks would not reach each other
  std::vector<std::string> warnings;  // slow, or left over
  /// Of the GIDs at NCCL_IB_GID_INDEX: "RoCE v2", or several apart by commas; hosts with others cannot talk to this
  /// one. Empty: the variable is not set, or there is no RoCE device.
  std::string gid_types;
};

/// Each finding is a line: what is set, what is there, what to do. `hosts`: of the run.
NcclCheck check_nccl(const NcclVariables& variables, const HostNetwork& network, int64_t hosts);

/// "NCCL_IB_HCA is mlx5_1 there, mlx5_0 at the leader", for each that differs.
std::vector<std::string> nccl_differences(const NcclVariables& leader, const NcclVariables& there);

}  // namespace cairn::host
