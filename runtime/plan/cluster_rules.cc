#include "runtime/plan/cluster_rules.h"
#include "runtime/core/count_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>

namespace cairn {
namespace {

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool made_of(std::string_view text, std::string_view others) {
  return std::ranges::all_of(text,
                             [&](char c) { return is_letter(c) || is_digit(c) || others.find(c) != others.npos; });
}

/// One line without control characters.
bool is_line(std::string_view text) {
  return std::ranges::none_of(text, [](char c) { return (c >= '\0' && c < ' ') || c == '\x7f'; });
}

/// A label of RFC 1123, as Kubernetes names namespaces; with `dots`, several.
bool is_dns(std::string_view text, bool dots) {
  if (text.empty() || text.size() > (dots ? 253 : 63)) return false;
  const auto end = [](char c) { return is_digit(c) || (c >= 'a' && c <= 'z'); };
  return end(text.front()) && end(text.back()) &&
         std::ranges::all_of(text, [&](char c) { return end(c) || c == '-' || (dots && c == '.'); });
}

class Rules {
 public:
  Rules(const ClusterConfig& cluster, const FieldNotes& notes) : cluster_(cluster), notes_(notes) {}

  std::vector<Mistake> find() {
    counts();
    network();
    words();
    if (cluster_.launcher == Launcher::kSlurm) slurm();
    if (cluster_.launcher == Launcher::kKubernetes) kubernetes();
    if (cluster_.launcher == Launcher::kHosts) ssh();
    return std::move(found_);
  }

 private:
  bool known(std::initializer_list<const char*> fields) const {
    return std::ranges::all_of(fields, [&](const char* field) { return !notes_.known || notes_.known(field); });
  }
  std::string where(const std::string& from, const std::string& field) const {
    return notes_.where ? notes_.where(from, field) : "";
  }
  void fail(std::string field, std::string message, std::string accepted = "") {
    found_.push_back({.field = std::move(field), .message = std::move(message), .accepted = std::move(accepted)});
  }
  /// An empty text says nothing and is fine.
  void one_line(const std::string& field, const std::string& text) {
    if (!is_line(text)) fail(field, field + " must be one line without control characters");
  }
  /// NAME=VALUE; `others`: what a name may have besides letters and digits.
  static bool is_pair(const std::string& text, std::string_view others) {
    const std::string name = text.substr(0, text.find('='));
    return name.size() < text.size() && !name.empty() && made_of(name, others) && is_line(text);
  }
  /// Each is such a pair.
  void pairs(const std::string& field, const std::vector<std::string>& values, std::string_view others,
             const char* accepted) {
    for (size_t k = 0; k < values.size(); ++k) {
      const std::string element = fmt::format("{}[{}]", field, k + 1);
      if (!is_pair(values[k], others)) {
        fail(element, fmt::format("{} = \"{}\" is not of the form {}", element, is_line(values[k]) ? values[k] : "...",
                                  accepted));
      }
    }
  }

  void counts() {
    const bool listed = cluster_.launcher == Launcher::kHosts;
    if (known({"hosts_min", listed ? "names" : "hosts"}) && cluster_.hosts_min > cluster_.hosts && cluster_.hosts > 0) {
      fail("hosts_min",
           fmt::format("hosts_min = {}, but {} train{}", cluster_.hosts_min, count_text(cluster_.hosts, "host"),
                       listed ? " (names without the spares)" : where("hosts_min", "hosts")),
           fmt::format("hosts_min from 1 to {}", cluster_.hosts));
    }
  }

  void network() {
    const PortRange& ports = cluster_.ports;
    if (known({"ports.from", "ports.to"})) {
      if (ports.from > ports.to) {
        fail("ports.from", fmt::format("ports.from = {} is above ports.to = {}{}", ports.from, ports.to,
                                       where("ports.from", "ports.to")));
      } else if (known({"ranks_per_host"}) && ports.size() < cluster_.ranks_per_host + 1) {
        fail("ports.to",
             fmt::format("ports.from = {} to ports.to = {} are {} ports; a host needs one for each of its {} ranks "
                         "and one for its agent",
                         ports.from, ports.to, ports.size(), cluster_.ranks_per_host),
             fmt::format("at least {} ports", cluster_.ranks_per_host + 1));
      }
    }
    if (!made_of(cluster_.interface, "._:-@") || cluster_.interface.size() > 15)
      fail("interface", fmt::format("interface = \"{}\" is no name of a network interface, such as eth0",
                                    is_line(cluster_.interface) ? cluster_.interface : "..."));
    if (!known({"store"})) return;
    const std::optional<EtcdAddress> etcd = etcd_address(cluster_.store);
    if (!etcd && cluster_.store != "folder")
      fail("store", "store names no store that there is", "\"folder\", \"etcd://HOST:PORT,...\" or \"etcds://...\"");
    for (const auto& [name, file] :
         {std::pair("store_ca", &cluster_.store_ca), std::pair("store_cert", &cluster_.store_cert),
          std::pair("store_key", &cluster_.store_key)}) {
      if (file->empty() || (etcd && etcd->tls)) continue;
      fail(name,
           fmt::format("{} is for etcd with TLS alone, and store is \"{}\"", name,
                       is_line(cluster_.store) ? cluster_.store : "..."),
           "a store \"etcds://...\", or leave it out");
    }
    if (cluster_.store_cert.empty() != cluster_.store_key.empty()) {
      fail(cluster_.store_cert.empty() ? "store_key" : "store_cert", "a certificate and its key are given together",
           "both store_cert and store_key, or neither");
    }
  }

  void words() {
    one_line("program", cluster_.program);
    one_line("workdir", cluster_.workdir);
    pairs("env", cluster_.env, "_", "NAME=VALUE with letters, digits and _ in the name");
    for (size_t k = 0; k < cluster_.env.size(); ++k) {
      if (!cluster_.env[k].empty() && is_digit(cluster_.env[k].front())) {
        const std::string element = fmt::format("env[{}]", k + 1);
        fail(element, fmt::format("{}: the name of a variable begins with no digit", element));
      }
      if (cluster_.env[k].starts_with("NCCL_")) {
        const std::string element = fmt::format("env[{}]", k + 1);
        fail(element,
             fmt::format("{}: variables of NCCL stand in `nccl`, where they are checked and recorded", element));
      }
    }
    pairs("nccl", cluster_.nccl, "_", "NCCL_NAME=VALUE with letters, digits and _ in the name");
    std::set<std::string> names;
    for (size_t k = 0; k < cluster_.nccl.size(); ++k) {
      const std::string element = fmt::format("nccl[{}]", k + 1);
      const std::string name = cluster_.nccl[k].substr(0, cluster_.nccl[k].find('='));
      if (!name.starts_with("NCCL_") && is_line(name)) {
        fail(element, fmt::format("{} = \"{}\": the names of NCCL's variables begin with NCCL_; others stand in `env`",
                                  element, name));
      } else if (!names.insert(name).second) {
        fail(element, fmt::format("{}: {} stands there twice", element, is_line(name) ? name : "..."));
      }
    }
  }

  void slurm() {
    const SlurmConfig& slurm = cluster_.slurm;
    one_line("partition", slurm.partition);
    one_line("account", slurm.account);
    if (known({"time", "signal_before"}) && slurm.time_s > 0 && slurm.signal_before_s >= slurm.time_s) {
      fail("signal_before",
           fmt::format("signal_before = {:.15g} s, but the job's time is {:.15g} s{}", slurm.signal_before_s,
                       slurm.time_s, where("signal_before", "time")),
           fmt::format("signal_before below {:.15g}", slurm.time_s));
    }
    for (size_t k = 0; k < slurm.sbatch.size(); ++k) {
      const std::string& option = slurm.sbatch[k];
      const std::string element = fmt::format("sbatch[{}]", k + 1);
      if (!is_line(option) || option.size() < 2 || option[0] != '-') {
        fail(element, fmt::format("{} must be an option of sbatch on one line", element), "such as \"--gres=gpu:8\"");
        continue;
      }
      const std::string name = option.substr(0, option.find_first_of("= \t"));
      const auto is = [&](const char* other) { return name == other; };
      // Short ones may have their value behind them: -N4.
      const auto is_short = [&](const char* other) { return name.starts_with(other) && !name.starts_with("--"); };
      if (is("--nodes") || is_short("-N") || is("--ntasks") || is_short("-n") || is("--ntasks-per-node") ||
          is("--tasks-per-node")) {
        fail(element, fmt::format("{} = \"{}\": one agent a host is what `cairn launch` asks for", element, option),
             "hosts, spares and ranks_per_host");
      } else if (is("--array") || is_short("-a") || is("--wrap")) {
        fail(element, fmt::format("{} = \"{}\": a run is one job of one script", element, option));
      } else if (is("--signal")) {
        fail(element, fmt::format("{} = \"{}\": say it by signal_before", element, option),
             "signal_before = \"10min\"");
      } else if (is("--requeue") || is("--no-requeue")) {
        fail(element, fmt::format("{} = \"{}\": say it by requeue", element, option), "requeue = true or false");
      }
    }
  }

  void kubernetes() {
    const KubernetesConfig& pods = cluster_.kubernetes;
    if (known({"image"}) && (pods.image.empty() || !made_of(pods.image, "._-/:@")))
      fail("image", "image is no name of a container image", "such as \"registry.example/cairn:0.1\"");
    if (!pods.name_space.empty() && !is_dns(pods.name_space, false)) {
      fail("namespace", "namespace is no name of a namespace",
           "lower-case letters, digits and -, at most 63, with no - at either end");
    }
    if (!cluster_.workdir.empty() && cluster_.workdir[0] != '/')
      fail("workdir", "workdir must be an absolute path in the pod");
    pairs("resources.others", pods.resources.others, "._-/", "NAME=QUANTITY");
    pairs("node_selector", pods.node_selector, "._-/", "LABEL=VALUE");
    if (known({"shm", "resources.memory"}) && pods.resources.memory_bytes > 0 &&
        pods.shm_bytes > pods.resources.memory_bytes) {
      fail("shm", fmt::format("shm = {} bytes, but /dev/shm is part of resources.memory = {} bytes{}", pods.shm_bytes,
                              pods.resources.memory_bytes, where("shm", "resources.memory")));
    }
    pod_names();
    std::set<std::string> paths = {"/dev/shm", "/dev/termination-log"};
    for (size_t k = 0; k < pods.mounts.size(); ++k) mount(pods.mounts[k], fmt::format("mounts[{}]", k + 1), paths);
  }

  /// A name in `field`, of several parts with `dots`; empty: none.
  void name(const std::string& field, const std::string& text, bool dots = true) {
    if (text.empty() || is_dns(text, dots)) return;
    fail(field, fmt::format("{} = \"{}\" is no name of Kubernetes", field, is_line(text) ? text : "..."),
         dots ? "lower-case letters, digits, - and dots"
              : "lower-case letters, digits and -, at most 63, with no - at either end");
  }

  void pod_names() {
    const KubernetesConfig& pods = cluster_.kubernetes;
    name("priority_class", pods.priority_class);
    name("scheduler", pods.scheduler);
    name("queue", pods.queue, false);
    for (const auto& [field, names] :
         {std::pair("avoid_nodes", &pods.avoid_nodes), std::pair("pull_secrets", &pods.pull_secrets)}) {
      for (size_t k = 0; k < names->size(); ++k) {
        const std::string element = fmt::format("{}[{}]", field, k + 1);
        if ((*names)[k].empty()) fail(element, element + " is empty");
        name(element, (*names)[k]);
      }
    }
    pairs("labels", pods.labels, "._-/", "NAME=VALUE");
    pairs("annotations", pods.annotations, "._-/", "NAME=VALUE");
    for (size_t k = 0; k < pods.labels.size(); ++k) {
      const std::string element = fmt::format("labels[{}]", k + 1), &label = pods.labels[k];
      const std::string value = label.substr(std::min(label.size(), label.find('=') + 1));
      if (label.starts_with("app.kubernetes.io/name=") || label.starts_with("app.kubernetes.io/instance=")) {
        fail(element, fmt::format("{}: the launch sets app.kubernetes.io/name and /instance", element));
      } else if (is_line(label) && (value.size() > 63 || !made_of(value, "._-"))) {
        fail(element,
             fmt::format("{} = \"{}\": the value of a label is at most 63 letters, digits and ._-", element, label));
      }
    }
    if (!pods.rdma.empty() && !is_pair(pods.rdma, "._-/"))
      fail("rdma",
           fmt::format("rdma = \"{}\" is not of the form NAME=QUANTITY", is_line(pods.rdma) ? pods.rdma : "..."));
    for (size_t k = 0; k < pods.tolerations.size(); ++k) toleration(pods.tolerations[k], k);
  }

  void toleration(const std::string& text, size_t k) {
    const std::string element = fmt::format("tolerations[{}]", k + 1);
    const size_t colon = text.rfind(':');
    const std::string taint = text.substr(0, colon), effect = colon == text.npos ? "" : text.substr(colon + 1);
    const bool known_effect =
        colon == text.npos || effect == "NoSchedule" || effect == "PreferNoSchedule" || effect == "NoExecute";
    const size_t equals = taint.find('=');
    const std::string key = taint.substr(0, equals);
    if (!key.empty() && made_of(key, "._-/") && made_of(taint.substr(key.size()), "=._-") && known_effect) return;
    fail(element, fmt::format("{} = \"{}\" is no taint", element, is_line(text) ? text : "..."),
         "KEY, KEY:EFFECT or KEY=VALUE:EFFECT, with NoSchedule, PreferNoSchedule or NoExecute");
  }

  void mount(const Mount& mount, const std::string& element, std::set<std::string>& paths) {
    for (const std::string* text : {&mount.path, &mount.claim, &mount.host_path, &mount.sub_path})
      if (!is_line(*text)) return fail(element, element + " must be one line without control characters each");
    std::string path = mount.path;
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    if (path.size() < 2 || path[0] != '/' || path.find(':') != path.npos) {
      fail(element,
           fmt::format("{}: \"{}\" must be an absolute path in the pod, without a colon", element, mount.path));
    } else if (!paths.insert(path).second) {
      fail(element, fmt::format("{}: \"{}\" is mounted already", element, mount.path));
    }
    if (mount.claim.empty() == mount.host_path.empty()) {
      fail(element, fmt::format("{} must have either claim or host_path", element));
    } else if (!mount.claim.empty() && !is_dns(mount.claim, true)) {
      fail(element, fmt::format("{}: claim is no name of a PersistentVolumeClaim", element),
           "lower-case letters, digits, - and dots");
    } else if (!mount.host_path.empty() && mount.host_path[0] != '/') {
      fail(element, fmt::format("{}: host_path must be an absolute path", element));
    }
    if (mount.sub_path.starts_with('/') || ("/" + mount.sub_path + "/").find("/../") != std::string::npos)
      fail(element, fmt::format("{}: sub_path must be relative and stay in the volume", element));
  }

  void ssh() {
    const std::vector<std::string>& names = cluster_.ssh.names;
    if (known({"names", "spares"}) && std::ssize(names) <= cluster_.spares) {
      fail("names", fmt::format("names has {} and spares = {}{}: none is left to train",
                                count_text(std::ssize(names), "host"), cluster_.spares, where("names", "spares")));
    }
    std::set<std::string> seen;
    for (size_t k = 0; k < names.size(); ++k) {
      const std::string element = fmt::format("names[{}]", k + 1);
      if (names[k].empty() || names[k][0] == '-' || !made_of(names[k], "._-:")) {
        fail(element,
             fmt::format("{} must be a name or an address of a host, got \"{}\"", element,
                         is_line(names[k]) ? names[k] : "..."),
             names[k].starts_with('[') ? "an address of IPv6 without brackets, as ssh takes it"
                                       : "what the other hosts know it by too; a user stands in options: { \"-l\", "
                                         "\"user\" }");
      } else if (!seen.insert(names[k]).second) {
        fail(element, fmt::format("{} = \"{}\" is named twice; one agent a host", element, names[k]));
      }
    }
    for (size_t k = 0; k < cluster_.ssh.options.size(); ++k)
      one_line(fmt::format("options[{}]", k + 1), cluster_.ssh.options[k]);
  }

  const ClusterConfig& cluster_;
  const FieldNotes& notes_;
  std::vector<Mistake> found_;
};

}  // namespace

std::optional<EtcdAddress> etcd_address(const std::string& store) {
  constexpr std::string_view kPlain = "etcd://", kTls = "etcds://";
  EtcdAddress out{.endpoints = {}, .tls = store.starts_with(kTls)};
  if (!out.tls && !store.starts_with(kPlain)) return std::nullopt;
  for (size_t at = out.tls ? kTls.size() : kPlain.size(); at <= store.size();) {
    const size_t end = std::min(store.find(',', at), store.size());
    const std::string one = store.substr(at, end - at);
    at = end + 1;
    const size_t colon = one.rfind(':');
    if (colon == std::string::npos || colon == 0) return std::nullopt;
    const std::string_view host = std::string_view(one).substr(0, colon);
    const bool six = host.starts_with('[') && host.ends_with(']');  // an address of IPv6: its colons are no port's
    if (!made_of(six ? host.substr(1, host.size() - 2) : host, six ? ".:" : ".-_")) return std::nullopt;
    const std::string digits = one.substr(colon + 1);
    if (digits.empty() || digits.size() > 5 || digits.find_first_not_of("0123456789") != std::string::npos)
      return std::nullopt;
    if (const int port = std::stoi(digits); port < 1 || port > 65535) return std::nullopt;
    out.endpoints.push_back(one);
  }
  return out;
}

std::vector<Mistake> find_mistakes(const ClusterConfig& cluster, const FieldNotes& notes) {
  return Rules(cluster, notes).find();
}

std::vector<Mistake> find_mistakes(const ClusterConfig& cluster, const Mesh& mesh) {
  std::vector<Mistake> out;
  if (cluster.groups_cross_hosts) return out;
  const auto host_of = [&](int64_t rank) { return rank / cluster.ranks_per_host; };
  for (const MeshAxis axis : {MeshAxis::kTp, MeshAxis::kCp}) {
    for (int64_t rank = 0; rank < mesh.world(); ++rank) {
      const std::vector<int64_t> group = mesh.group(axis, rank);
      if (host_of(group.front()) == host_of(group.back())) continue;
      out.push_back({.field = fmt::format("mesh.{}", axis_name(axis)),
                     .message = fmt::format("mesh.{} = {}: ranks {} to {} exchange in every layer, and lie on hosts {} "
                                            "to {} with ranks_per_host = {}",
                                            axis_name(axis), group.size(), group.front(), group.back(),
                                            host_of(group.front()), host_of(group.back()), cluster.ranks_per_host),
                     .accepted = fmt::format("mesh.tp x mesh.cp that divides {}, with both first in mesh.order; or "
                                             "groups_cross_hosts = true",
                                             cluster.ranks_per_host)});
      break;
    }
  }
  return out;
}

}  // namespace cairn
