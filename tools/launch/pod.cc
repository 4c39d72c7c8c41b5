#include "tools/launch/pod.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "tools/launch/quote.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

std::string cpu_text(double cores) { return fmt::format("{:.0f}m", std::ceil(cores * 1000)); }

json resources_of(const KubernetesConfig& pods) {
  json out = json::object();
  if (pods.resources.cpu > 0) out["cpu"] = cpu_text(pods.resources.cpu);
  if (pods.resources.memory_bytes > 0) out["memory"] = std::to_string(pods.resources.memory_bytes);
  std::vector<std::string> others = pods.resources.others;
  if (!pods.rdma.empty()) others.push_back(pods.rdma);
  for (const std::string& other : others) {
    const auto [name, quantity] = split_pair(other);
    out[name] = quantity;
  }
  return out;
}

/// Volumes, and where the container has them.
std::pair<json, json> volumes_of(const KubernetesConfig& pods, const PodFiles& files, int64_t shm_bytes) {
  json volumes = {{{"name", "shm"}, {"emptyDir", {{"medium", "Memory"}, {"sizeLimit", std::to_string(shm_bytes)}}}},
                  {{"name", "files"}, {"configMap", {{"name", files.config_map}, {"items", files.items}}}}};
  json mounts = {{{"name", "shm"}, {"mountPath", "/dev/shm"}},
                 {{"name", "files"}, {"mountPath", kFilesDir}, {"readOnly", true}}};
  for (size_t k = 0; k < pods.mounts.size(); ++k) {
    const Mount& mount = pods.mounts[k];
    const std::string volume = fmt::format("mount-{}", k);
    volumes.push_back({{"name", volume}});
    if (!mount.claim.empty()) volumes.back()["persistentVolumeClaim"] = {{"claimName", mount.claim}};
    if (!mount.host_path.empty()) volumes.back()["hostPath"] = {{"path", mount.host_path}};
    mounts.push_back({{"name", volume}, {"mountPath", without_trailing_slash(mount.path)}});
    if (mount.read_only) mounts.back()["readOnly"] = true;
    if (!mount.sub_path.empty()) mounts.back()["subPath"] = mount.sub_path;
  }
  return {std::move(volumes), std::move(mounts)};
}

constexpr int64_t kPlainUser = 1000;

/// Security contexts of the pod and of its container. RDMA devices work in memory that is locked.
std::pair<json, json> security_of(const KubernetesConfig& pods) {
  json pod = json::object(), container = json::object();
  const bool restricted = pods.security == PodSecurity::kRestricted;
  // An image that says no user runs as root, which `restricted` refuses; a fresh claim belongs to root.
  const int64_t user = pods.user > 0 || !restricted ? pods.user : kPlainUser;
  const int64_t group = pods.group > 0 || !restricted ? pods.group : user;
  if (user > 0) pod["runAsUser"] = user;
  if (group > 0) pod["runAsGroup"] = group;
  if (!pods.rdma.empty()) container["capabilities"]["add"] = {"IPC_LOCK"};
  if (restricted) {
    pod["fsGroup"] = group;
    pod["fsGroupChangePolicy"] = "OnRootMismatch";
    pod["runAsNonRoot"] = true;
    pod["seccompProfile"] = {{"type", "RuntimeDefault"}};
    container["allowPrivilegeEscalation"] = false;
    container["capabilities"]["drop"] = {"ALL"};
  }
  return {std::move(pod), std::move(container)};
}

/// An agent that was killed leaves its memory in the pod's /dev/shm, and one that left with steps to go starts again.
json restarts_in_place() {
  constexpr int kSignalled = 128;
  const json codes = {kUnfinished,    kSignalled + 4, kSignalled + 6, kSignalled + 7,
                      kSignalled + 8, kSignalled + 9, kSignalled + 11};  // ILL, ABRT, BUS, FPE, KILL, SEGV
  return json::array({{{"action", "Restart"}, {"exitCodes", {{"operator", "In"}, {"values", codes}}}}});
}

json toleration_of(const std::string& text) {
  const size_t colon = text.rfind(':');
  const std::string taint = text.substr(0, colon);
  const size_t equals = taint.find('=');
  json out = {{"key", taint.substr(0, equals)}, {"operator", equals == taint.npos ? "Exists" : "Equal"}};
  if (equals != taint.npos) out["value"] = taint.substr(equals + 1);
  if (colon != text.npos) out["effect"] = text.substr(colon + 1);
  return out;
}

json container_of(const ClusterConfig& cluster, const TrainJob& job, const std::vector<std::string>& words) {
  const KubernetesConfig& pods = cluster.kubernetes;
  json out = {{"name", "cairn"},
              {"image", pods.image},
              {"command", words},
              {"terminationMessagePath", "/dev/termination-log"},
              {"terminationMessagePolicy", "FallbackToLogsOnError"}};
  if (!job.workdir.empty()) out["workingDir"] = job.workdir;
  for (const std::string& variable : cluster.env) {
    const auto [name, value] = split_pair(variable);
    out["env"].push_back({{"name", name}, {"value", pod_word(value)}});
  }
  if (const json resources = resources_of(pods); !resources.empty())
    out["resources"] = {{"requests", resources}, {"limits", resources}};
  if (pods.restart_in_place) {
    out["restartPolicy"] = "Never";  // has to stand beside rules
    out["restartPolicyRules"] = restarts_in_place();
  }
  return out;
}

/// On which nodes pods run.
void place(json& spec, const KubernetesConfig& pods, const json& labels, int64_t hosts) {
  if (!pods.scheduler.empty()) spec["schedulerName"] = pods.scheduler;
  if (!pods.priority_class.empty()) spec["priorityClassName"] = pods.priority_class;
  for (const std::string& label : pods.node_selector) {
    const auto [name, value] = split_pair(label);
    spec["nodeSelector"][name] = value;
  }
  for (const std::string& one : pods.tolerations) spec["tolerations"].push_back(toleration_of(one));
  constexpr const char* kNode = "kubernetes.io/hostname";
  if (!pods.avoid_nodes.empty()) {
    const json others = {{"key", kNode}, {"operator", "NotIn"}, {"values", pods.avoid_nodes}};
    spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] =
        json::array({{{"matchExpressions", json::array({others})}}});
  }
  // One pod a node, at a cost that grows with the pods: anti-affinity compares each with all. Fewer nodes than pods
  // count as nodes without one (minDomains), so none gets two.
  if (!pods.share_nodes) {
    spec["topologySpreadConstraints"] = json::array({{{"maxSkew", 1},
                                                      {"minDomains", hosts},
                                                      {"topologyKey", kNode},
                                                      {"whenUnsatisfiable", "DoNotSchedule"},
                                                      {"labelSelector", {{"matchLabels", labels}}}}});
  }
}

}  // namespace

std::string without_trailing_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

json pod_spec(const ClusterConfig& cluster, const TrainJob& job, const std::vector<std::string>& words,
              const PodFiles& files, const json& labels, int64_t shm_bytes) {
  const KubernetesConfig& pods = cluster.kubernetes;
  auto [volumes, mounts] = volumes_of(pods, files, shm_bytes);
  auto [pod_security, container_security] = security_of(pods);
  json container = container_of(cluster, job, words);
  container["volumeMounts"] = std::move(mounts);
  if (!container_security.empty()) container["securityContext"] = std::move(container_security);
  json spec = {{"restartPolicy", "Never"},
               {"terminationGracePeriodSeconds", static_cast<int64_t>(std::ceil(pods.grace_s))},
               {"automountServiceAccountToken", false},
               {"enableServiceLinks", false},
               {"containers", json::array({std::move(container)})},
               {"volumes", std::move(volumes)}};
  if (!pod_security.empty()) spec["securityContext"] = std::move(pod_security);
  for (const std::string& secret : pods.pull_secrets) spec["imagePullSecrets"].push_back({{"name", secret}});
  if (pods.host_network) {
    spec["hostNetwork"] = true;
    spec["dnsPolicy"] = "ClusterFirstWithHostNet";  // or the pods' names would mean nothing
  }
  place(spec, pods, labels, cluster.all_hosts());
  return spec;
}

}  // namespace cairn::tools
