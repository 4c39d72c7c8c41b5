#include "tools/host_options.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/cluster/node_list.h"
#include "tools/run/folder.h"

namespace cairn::tools {
namespace {

Error refused(std::string text) { return {ErrorCode::kInvalidInput, std::move(text)}; }

/// One name a line; empty lines and what follows a # count for nothing.
Result<std::vector<std::string>> read_host_file(const std::string& path) {
  RT_TRY_SET(const std::string text, read_text_file(path).with("--host-file"));
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
    out.push_back(std::move(line));
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
      ->check(CLI::Range(int64_t{0}, cluster::kMostHosts - 1));
  command.add_option("--spares", args.spares, "hosts that wait for another one to be lost (only 0 now)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{0}, cluster::kMostHosts - 1));
  command
      .add_option("--hosts-min", args.hosts_min,
                  "fewest hosts that the run trains with (only all of them now: it waits for who is lost)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, cluster::kMostHosts));
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
  if (args.host_index >= 0) flags.index = args.host_index;
  RT_TRY_SET(const std::optional<cluster::Placement> placement,
             cluster::find_placement(flags, cluster::process_environment(), own_host_name()));
  if (args.spares > 0)
    return refused(
        "--spares: hosts that wait for a lost one are not there yet; leave it out, and the run waits until "
        "the lost host is there again");
  if (!placement || placement->hosts == 1) return std::optional<HostOptions>();
  if (args.hosts_min > 0 && args.hosts_min != placement->hosts) {
    return refused(
        fmt::format("--hosts-min {}: a run over {} hosts trains with all of them; with fewer it cannot yet, "
                    "and waits until the lost one is there again",
                    args.hosts_min, placement->hosts));
  }
  return std::optional(HostOptions{.placement = *placement, .ranks = ranks, .build = {}, .recipe_hash = {}});
}

std::string hosts_text(const HostOptions& options, int64_t port) {
  const cluster::Placement& placement = options.placement;
  const std::string address = address_of(placement.leader);
  const std::string own =
      placement.names.empty() ? own_host_name() : placement.names[static_cast<size_t>(placement.index)];
  return fmt::format("{} hosts x {} ranks, from {}; this is {} ({}), leader {}{}:{}", placement.hosts, options.ranks,
                     placement.from, placement.index, own, placement.leader,
                     address.empty() || address == placement.leader ? "" : " " + address, port);
}

}  // namespace cairn::tools
