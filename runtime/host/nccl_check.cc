#include "runtime/host/nccl_check.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>

namespace cairn::host {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "NCCL_";

/// A list of names as NCCL reads it: "^": none of them; "=": whole names, else beginnings.
struct NameList {
  bool excludes = false, whole = false;
  std::vector<std::string> names;

  explicit NameList(std::string_view text) {
    if (text.starts_with('^')) excludes = true, text.remove_prefix(1);
    if (text.starts_with('=')) whole = true, text.remove_prefix(1);
    std::istringstream words{std::string(text)};
    for (std::string word; std::getline(words, word, ',');) {
      if (!word.empty()) names.push_back(word);
    }
  }
  bool matches(const std::string& name, const std::string& found) const {
    return whole ? found == name : found.starts_with(name);
  }
  /// Whether it leaves the device.
  bool takes(const std::string& found) const {
    return excludes != std::ranges::any_of(names, [&](const std::string& name) { return matches(name, found); });
  }
};

std::string line_of(const fs::path& path) {
  std::ifstream in(path);
  std::string out;
  std::getline(in, out);
  return out;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> out;
  std::error_code failed;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, failed))
    out.push_back(entry.path().filename().string());
  std::ranges::sort(out);
  return out;
}

/// "eth0, ib0", or "none".
std::string listed(const std::vector<std::string>& names) {
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

bool is_of_containers(const std::string& name) {
  constexpr std::string_view kBeginnings[] = {"docker", "virbr", "veth", "br-", "cni", "flannel", "podman"};
  return std::ranges::any_of(kBeginnings, [&](std::string_view beginning) { return name.starts_with(beginning); });
}

class Checks {
 public:
  Checks(const NcclVariables& variables, const HostNetwork& network, int64_t hosts)
      : variables_(variables), network_(network), hosts_(hosts) {}

  NcclCheck look() {
    interfaces();
    devices();
    left_over();
    return std::move(out_);
  }

 private:
  std::string value(const char* name) const {
    const auto found = variables_.find(name);
    return found == variables_.end() ? std::string() : found->second;
  }
  bool is_on(const char* name) const { return std::strtoll(value(name).c_str(), nullptr, 0) != 0; }
  template <typename... Words>
  void problem(fmt::format_string<Words...> text, Words&&... words) {
    out_.problems.push_back(fmt::format(text, std::forward<Words>(words)...));
  }
  template <typename... Words>
  void warning(fmt::format_string<Words...> text, Words&&... words) {
    out_.warnings.push_back(fmt::format(text, std::forward<Words>(words)...));
  }

  void interfaces() {
    const std::string text = value("NCCL_SOCKET_IFNAME");
    if (text.empty()) return;
    const NameList wanted(text);
    std::vector<std::string> there, with_address, taken;
    for (const Interface& one : network_.interfaces) {
      const bool usable = one.up && !one.addresses.empty();
      there.push_back(usable ? one.name : fmt::format("{} ({})", one.name, one.up ? "no address" : "down"));
      if (!wanted.takes(one.name)) continue;
      taken.push_back(one.name);
      if (usable) with_address.push_back(one.name);
    }
    const std::string here = listed(there);
    if (!wanted.excludes) {
      for (const std::string& name : wanted.names) {
        if (std::ranges::none_of(network_.interfaces,
                                 [&](const Interface& one) { return wanted.matches(name, one.name); }))
          problem(
              "NCCL_SOCKET_IFNAME={}: no interface {} {}; interfaces here: {}. Name one that all hosts have, or leave "
              "it out",
              text, wanted.whole ? "is" : "begins with", name, here);
      }
    }
    if (with_address.empty() && (!taken.empty() || wanted.excludes)) {
      problem(
          "NCCL_SOCKET_IFNAME={}: none of the interfaces that it leaves is up and has an address; interfaces here: {}",
          text, here);
    }
    for (const Interface& one : network_.interfaces) {
      if (wanted.excludes || hosts_ < 2 || std::ranges::count(with_address, one.name) == 0) continue;
      if (one.loopback) {
        problem("NCCL_SOCKET_IFNAME={}: {} reaches this host alone, and the run has {} hosts; interfaces here: {}",
                text, one.name, hosts_, here);
      } else if (is_of_containers(one.name)) {
        problem(
            "NCCL_SOCKET_IFNAME={}: {} is a bridge of this host's containers, which other hosts do not reach; "
            "interfaces here: {}",
            text, one.name, here);
      }
    }
  }

  void devices() {
    const fs::path infiniband = network_.sys / "class/infiniband";
    const std::vector<std::string> there = names_in(infiniband);
    const std::string text = value("NCCL_IB_HCA"), gid = value("NCCL_IB_GID_INDEX");
    if (is_on("NCCL_IB_DISABLE")) {
      if (!there.empty())
        warning("NCCL_IB_DISABLE={}: {} is left unused, and hosts exchange by TCP; unset it unless that is meant",
                value("NCCL_IB_DISABLE"), listed(there));
      return;
    }
    const NameList wanted(text);
    if (!text.empty() && !wanted.excludes) {
      for (const std::string& one : wanted.names) {
        const std::string name = one.substr(0, one.find(':'));
        if (std::ranges::none_of(there, [&](const std::string& found) { return wanted.matches(name, found); }))
          problem("NCCL_IB_HCA={}: no device {} {} in {}; devices here: {}. Name those of this host, or leave it out",
                  text, wanted.whole ? "is" : "begins with", name, infiniband.string(), listed(there));
      }
    }
    std::set<std::string> types;
    for (const std::string& device : there) {
      for (const std::string& port : names_in(infiniband / device / "ports")) {
        if (!text.empty() && !uses(wanted, device, port)) continue;
        const fs::path at = infiniband / device / "ports" / port;
        const std::string state = line_of(at / "state");  // "4: ACTIVE"
        if (!text.empty() && !wanted.excludes && !state.starts_with("4:")) {
          problem("NCCL_IB_HCA={}: port {} of {} is {}; see its cable and `ibstat`, or name another device", text, port,
                  device, state.empty() ? "in no known state" : state);
          continue;
        }
        if (!gid.empty() && state.starts_with("4:")) look_at_gid(at, device, port, gid, types);
      }
    }
    out_.gid_types = fmt::format("{}", fmt::join(types, ", "));
    if (types.size() > 1) {
      problem(
          "NCCL_IB_GID_INDEX={}: this host's devices have GIDs of several types there: {}; choose an index of one "
          "type, which `show_gids` lists",
          gid, out_.gid_types);
    }
  }

  /// "mlx5_0", "mlx5_0:1", and their like.
  static bool uses(const NameList& wanted, const std::string& device, const std::string& port) {
    const bool named = std::ranges::any_of(wanted.names, [&](const std::string& one) {
      const size_t colon = one.find(':');
      return wanted.matches(one.substr(0, colon), device) &&
             (colon == std::string::npos || one.substr(colon + 1) == port);
    });
    return named != wanted.excludes;
  }

  void look_at_gid(const fs::path& at, const std::string& device, const std::string& port, const std::string& gid,
                   std::set<std::string>& types) {
    if (line_of(at / "link_layer") != "Ethernet") return;  // of InfiniBand every index that is there has one type
    const auto is_empty = [&](const std::string& index) {
      const std::string found = line_of(at / "gids" / index);
      return std::ranges::all_of(found, [](char c) { return c == '0' || c == ':'; });
    };
    if (const std::string type = line_of(at / "gid_attrs/types" / gid); !is_empty(gid) && !type.empty()) {
      types.insert(type == "IB/RoCE v1" ? "RoCE v1" : type);
      return;
    }
    std::vector<std::string> usable;
    for (const std::string& index : names_in(at / "gids")) {
      if (!is_empty(index)) usable.push_back(fmt::format("{} ({})", index, line_of(at / "gid_attrs/types" / index)));
    }
    problem(
        "NCCL_IB_GID_INDEX={}: port {} of {} has no GID there; those that are: {}. Choose one of RoCE v2 with the "
        "host's address, the same on all hosts, or leave it out: NCCL then chooses",
        gid, port, device, listed(usable));
  }

  void left_over() {
    if (is_on("NCCL_P2P_DISABLE"))
      warning(
          "NCCL_P2P_DISABLE={}: GPUs of a host exchange through its memory, and not by NVLink or PCIe; unset it "
          "unless that is meant",
          value("NCCL_P2P_DISABLE"));
    if (is_on("NCCL_SHM_DISABLE"))
      warning(
          "NCCL_SHM_DISABLE={}: GPUs of a host without a direct way exchange over its network; unset it unless that "
          "is meant",
          value("NCCL_SHM_DISABLE"));
    std::string level = value("NCCL_DEBUG");
    std::ranges::transform(level, level.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    if (level == "TRACE")
      warning(
          "NCCL_DEBUG={}: each operation of each rank is written down, which slows the run and fills its logs; INFO "
          "says what NCCL has chosen",
          value("NCCL_DEBUG"));
  }

  const NcclVariables& variables_;
  const HostNetwork& network_;
  const int64_t hosts_;
  NcclCheck out_;
};

}  // namespace

NcclVariables nccl_variables(const std::vector<std::string>& cluster_file, const char* const* environment) {
  NcclVariables out;
  const auto take = [&](std::string_view pair) {
    const size_t equals = pair.find('=');
    if (pair.starts_with(kPrefix) && equals != std::string_view::npos)
      out[std::string(pair.substr(0, equals))] = std::string(pair.substr(equals + 1));
  };
  for (; *environment != nullptr; ++environment) take(*environment);
  for (const std::string& pair : cluster_file) take(pair);
  return out;
}

HostNetwork HostNetwork::of_host() {
  HostNetwork out;
  if (const char* const root = std::getenv("CAIRN_SYS_ROOT"); root != nullptr) out.sys = root;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return out;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    const std::string name = at->ifa_name;
    auto one = std::ranges::find(out.interfaces, name, &Interface::name);
    if (one == out.interfaces.end()) {
      one = out.interfaces.insert(one, Interface{.name = name, .addresses = {}});
      one->loopback = (at->ifa_flags & IFF_LOOPBACK) != 0;
      one->up = (at->ifa_flags & IFF_UP) != 0;
    }
    const int family = at->ifa_addr == nullptr ? AF_UNSPEC : at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    char text[NI_MAXHOST] = {};
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (::getnameinfo(at->ifa_addr, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) continue;
    if (std::string_view(text).starts_with("fe80:")) continue;
    one->addresses.emplace_back(text);
    const auto* const mask = reinterpret_cast<const sockaddr_in*>(at->ifa_netmask);
    one->prefixes.push_back(family == AF_INET && mask != nullptr ? std::popcount(mask->sin_addr.s_addr) : 0);
  }
  return out;
}

std::vector<Interface> interfaces_to(const HostNetwork& network, const std::string& address) {
  std::vector<Interface> out;
  const auto bits = [](const std::string& text) -> std::optional<uint32_t> {
    in_addr found{};
    return ::inet_pton(AF_INET, text.c_str(), &found) == 1 ? std::optional(ntohl(found.s_addr)) : std::nullopt;
  };
  const std::optional<uint32_t> to = bits(address);
  for (const Interface& one : network.interfaces) {
    bool reaches = false;
    for (size_t k = 0; to && k < std::min(one.addresses.size(), one.prefixes.size()); ++k) {
      const std::optional<uint32_t> own = bits(one.addresses[k]);
      const int64_t prefix = one.prefixes[k];
      reaches |= own && prefix > 0 && ((*own ^ *to) >> (32 - prefix)) == 0;
    }
    if (reaches && one.up && !one.loopback) out.push_back(one);
  }
  return out;
}

NcclCheck check_nccl(const NcclVariables& variables, const HostNetwork& network, int64_t hosts) {
  return Checks(variables, network, hosts).look();
}

std::vector<std::string> nccl_differences(const NcclVariables& leader, const NcclVariables& there) {
  std::vector<std::string> out;
  const auto word = [](const NcclVariables& of, const std::string& name) {
    const auto found = of.find(name);
    return found == of.end() ? std::string("not set") : found->second;
  };
  std::set<std::string> names;
  for (const NcclVariables* const of : {&leader, &there}) {
    for (const auto& [name, value] : *of) names.insert(name);
  }
  for (const std::string& name : names) {
    if (word(leader, name) != word(there, name))
      out.push_back(fmt::format("{} is {} there, {} at the leader", name, word(there, name), word(leader, name)));
  }
  return out;
}

}  // namespace cairn::host
