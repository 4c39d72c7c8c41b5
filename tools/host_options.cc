#include "tools/host_options.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <netdb.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "dsl/dsl.h"
#include "runtime/cluster/node_list.h"
#include "runtime/core/count_text.h"
#include "runtime/core/text_encoding.h"
#include "runtime/host/nccl_check.h"
#include "runtime/host/topology.h"
#include "runtime/plan/cluster_rules.h"
#include "tools/number_option.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

Error refused(std::string text) { return {ErrorCode::kInvalidInput, std::move(text)}; }

Result<ClusterConfig> read_cluster(const std::string& file) {
  const dsl::ClusterResult read = dsl::load_cluster(file);
  if (!read.ok()) return refused("--cluster: " + dsl::to_text(read.diagnostics));
  return read.cluster;
}

/// One name a line; empty lines and what follows a # count for nothing.
Result<std::vector<std::string>> read_host_file(const std::string& path) {
  RT_TRY_SET(std::string text, read_text_file(path).with("--host-file"));
  if (const std::string_view other = skip_byte_order_mark(text); !other.empty())
    return refused(fmt::format("--host-file {}: text in {}, expected UTF-8", path, other));
  std::vector<std::string> out;
  int64_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string line = text.substr(at, end - at);
    at = end + 1;
    ++number;
    line.resize(std::min(line.find('#'), line.size()));
    const size_t first = line.find_first_not_of(" \t\r"), last = line.find_last_not_of(" \t\r");
    if (first == std::string::npos) continue;
    line = line.substr(first, last - first + 1);
    if (line.find_first_of(" \t") != std::string::npos) {
      return refused(fmt::format("--host-file {}: line {}: '{}': expected one host name a line", path, number, line));
    }
    RT_TRY_SET(std::string host, cluster::plain_host(line).with(fmt::format("--host-file {}: line {}", path, number)));
    out.push_back(std::move(host));
  }
  if (out.empty()) return refused(fmt::format("--host-file {}: names no host", path));
  return out;
}

/// Numeric; empty where the name has none.
std::string address_of(const std::string& name) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (::getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  char text[NI_MAXHOST] = {};
  if (::getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text;
}

/// Of this host's interface of that name.
Result<std::string> address_of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return os_error(errno, "getifaddrs");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  std::set<std::string> there;
  std::string found;
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr) continue;
    there.insert(at->ifa_name);
    const int family = at->ifa_addr->sa_family;
    if (name != at->ifa_name || (family != AF_INET && family != AF_INET6)) continue;
    if (!found.empty() && family == AF_INET6) continue;  // the older one where there are both
    char text[NI_MAXHOST] = {};
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (::getnameinfo(at->ifa_addr, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0) found = text;
  }
  if (!found.empty()) return found;
  return refused(fmt::format("interface = \"{}\": {} has no address of it; interfaces here: {}", name, own_host_name(),
                             fmt::join(there, ", ")));
}

}  // namespace

void add_host_options(CLI::App& command, HostArgs& args) {
  command
      .add_option("--hosts", args.hosts,
                  "the hosts of the run, one agent on each; the first leads (default: what the launcher says, as Slurm "
                  "or torchrun-like ones do)")
      ->type_name("h0,h1,...");
  command.add_option("--host-file", args.host_file, "the same, one name a line")->type_name("FILE");
  command.add_option("--host-index", args.host_index, "which of them this is, from 0 (default: by its own name)")
      ->type_name("K")
      ->transform(whole_number(0, cluster::kMostHosts - 1));
  command
      .add_option("--cluster", args.cluster,
                  "the file that says where runs run: hosts, ports, times (docs/cluster-file.md)")
      ->type_name("FILE");
  command
      .add_option(
          "--spares", args.spares,
          "of the hosts, so many of the last ones wait until one that trains is lost, and take its place; with mesh.dp "
          "written, those that it does not need")
      ->type_name("N")
      ->transform(whole_number(0, cluster::kMostHosts - 1));
  command
      .add_option("--hosts-min", args.hosts_min,
                  "fewest hosts that the run goes on with, when others are lost and no spare is there (default: all)")
      ->type_name("N")
      ->transform(whole_number(1, cluster::kMostHosts));
}

Result<std::optional<HostOptions>> find_hosts(const HostArgs& args, int64_t ranks) {
  cluster::HostFlags flags;
  if (!args.hosts.empty() && !args.host_file.empty()) return refused("--hosts and --host-file: give one of them");
  if (!args.hosts.empty()) {
    RT_TRY_SET(flags.hosts, cluster::expand_node_list(args.hosts).with("--hosts"));
  }
  if (!args.host_file.empty()) {
    RT_TRY_SET(flags.hosts, read_host_file(args.host_file));
  }
  std::optional<ClusterConfig> cluster;
  if (!args.cluster.empty()) {
    RT_TRY_SET(cluster, read_cluster(args.cluster));
    if (flags.hosts.empty() && cluster->launcher == Launcher::kHosts) flags.hosts = cluster->ssh.names;
  }
  if (args.host_index >= 0) flags.index = args.host_index;
  if (flags.hosts.size() == 1 && args.host_index <= 0) return std::optional<HostOptions>();  // whatever a launcher says
  RT_TRY_SET(const std::optional<cluster::Placement> placement,
             cluster::find_placement(flags, cluster::process_environment(), own_host_name()));
  if (!placement || placement->hosts == 1) return std::optional<HostOptions>();
  HostOptions out{.placement = *placement, .ranks = ranks, .build = {}, .recipe_hash = {}};
  if (cluster) {
    if (ranks == 0) out.ranks = cluster->ranks_per_host;
    out.port_from = cluster->ports.from;
    out.port_to = cluster->ports.to;
    out.beats = {.every_s = cluster->beat_s(), .dead_after_s = cluster->dead_after_s};
    out.join_s = cluster->join_timeout_s;
    out.wait_s = cluster->wait_s;
    out.has_cluster_file = true;
    out.groups_cross_hosts = cluster->groups_cross_hosts;
    out.spare_after_said = cluster->spare_after_s >= 0;
    if (out.spare_after_said) out.spare_after_s = out.fewer_after_s = cluster->spare_after_s;
    if (std::optional<EtcdAddress> etcd = etcd_address(cluster->store)) {
      out.store.endpoints = std::move(etcd->endpoints);
      if (etcd->tls) {
        auto& tls = out.store.tls.emplace();
        tls.ca_file = cluster->store_ca;
        tls.cert_file = cluster->store_cert;
        tls.key_file = cluster->store_key;
        tls.ca_names = "store_ca of the cluster file";
      }
    }
    if (!cluster->interface.empty()) {
      RT_TRY_SET(out.interface_address, address_of_interface(cluster->interface));
    }
  }
  if (cluster) out.check = cluster->check;
  if (args.check == "start") out.check = HostCheck::kStart;
  if (args.check == "after_unknown") out.check = HostCheck::kAfterUnknown;
  if (args.check == "off") out.check = HostCheck::kOff;
  out.exclude_slow = args.exclude_slow || (cluster && cluster->exclude_slow);
  out.spares = args.spares >= 0 ? args.spares : cluster ? cluster->spares : 0;
  if (out.hosts() < 2) {
    return refused(fmt::format("--spares {}: of {} hosts two at least have to train", out.spares, placement->hosts));
  }
  out.hosts_min = args.hosts_min > 0 ? args.hosts_min : cluster ? cluster->hosts_min : placement->hosts_min;
  if (out.hosts_min >= out.hosts()) out.hosts_min = 0;
  if (args.hosts_min > out.hosts()) {
    return refused(fmt::format("--hosts-min {}: {} train", args.hosts_min, count_text(out.hosts(), "host")));
  }
  return std::optional(std::move(out));
}

Result<std::vector<std::string>> nccl_of_cluster(const HostArgs& args) {
  if (args.cluster.empty()) return std::vector<std::string>();
  RT_TRY_SET(const ClusterConfig cluster, read_cluster(args.cluster));
  return cluster.nccl;
}

std::string address_near_gpus(const HostOptions& options, const std::vector<std::string>& gpus) {
  if (!options.interface_address.empty()) return {};
  const std::string leader = address_of(options.placement.leader);
  const std::vector<host::Interface> fit = host::interfaces_to(host::HostNetwork::of_host(), leader);
  const Result<host::Topology> topology = host::Topology::of_host();
  if (fit.size() < 2 || !topology.ok()) return {};
  std::vector<std::string> names;
  for (const host::Interface& one : fit) names.push_back(one.name);
  const std::string nearest = host::nearest_interface(topology.value(), gpus, names);
  const auto found = std::ranges::find(fit, nearest, &host::Interface::name);
  if (found == fit.end()) return {};
  for (size_t k = 0; k < found->addresses.size(); ++k) {
    if (found->prefixes[k] > 0) return found->addresses[k];
  }
  return {};
}

std::string hosts_text(const HostOptions& options, int64_t port) {
  const cluster::Placement& placement = options.placement;
  const std::string address = address_of(placement.leader);
  const std::string own =
      placement.names.empty() ? own_host_name() : placement.names[static_cast<size_t>(placement.index)];
  const std::string spares = options.spares == 0 ? "" : " and " + count_text(options.spares, "spare");
  return fmt::format("{} x {}{}, from {}; this is {} ({}), leader {}{}:{}", count_text(options.hosts(), "host"),
                     count_text(options.ranks, "rank"), spares, placement.from, placement.index, own, placement.leader,
                     address.empty() || address == placement.leader ? "" : " " + address, port);
}

}  // namespace cairn::tools
