// Objects for kubectl, as JSON, which it takes like YAML. An Indexed Job gives each pod an index, a name in DNS and a
// variable with its index; that it has no size is why --hosts names all. podFailurePolicy is stable since 1.31,
// backoffLimitPerIndex since 1.33.
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/json/json.h"
#include "tools/launch/job.h"
#include "tools/launch/quote.h"
#include "tools/launch/train_words.h"

namespace cairn::tools {
namespace fs = std::filesystem;
namespace {

using nlohmann::json;

constexpr const char* kFilesDir = "/etc/cairn";    // where a pod finds recipe and cluster file
constexpr size_t kMostConfigBytes = 250 * 1000;    // kubectl apply keeps all of it in an annotation, of 256 KiB
constexpr size_t kMostArgumentBytes = 100 * 1000;  // Linux takes 128 KiB
constexpr int64_t kMostPods = 100 * 1000;          // of an Indexed Job with backoffLimitPerIndex
constexpr size_t kMostLabel = 63;

Error invalid(std::string message) { return {ErrorCode::kInvalidInput, std::move(message)}; }

/// The folder above all of them.
fs::path common_folder(const std::vector<SourceFile>& files) {
  fs::path out = files.front().first.parent_path();
  for (const auto& [path, text] : files) {
    const auto inside = [&] {
      const auto [end, unused] = std::mismatch(out.begin(), out.end(), path.begin(), path.end());
      return end == out.end();
    };
    while (out.has_relative_path() && !inside()) out = out.parent_path();
  }
  return out;
}

struct Files {
  std::string name;
  json config_map;
  json items = json::array();  // of the volume: which key is which path
  fs::path folder;             // on this host, which kFilesDir is in a pod

  std::string in_pod(const fs::path& path) const { return (kFilesDir / path.lexically_relative(folder)).string(); }
};

/// Keys of a ConfigMap have no slashes: files are numbered, and the volume gives them their names. Its own name has a
/// hash of them: where they have changed it is another one, and a Job under way keeps what it began with.
Result<Files> config_files(const TrainJob& job, const std::string& job_name, const json& metadata) {
  Files out{.folder = common_folder(job.sources)};
  json data = json::object();
  for (size_t k = 0; k < job.sources.size(); ++k) {
    const auto& [path, text] = job.sources[k];
    const std::string key = fmt::format("file-{}", k);
    data[key] = text;
    out.items.push_back({{"key", key}, {"path", path.lexically_relative(out.folder).string()}});
  }
  const std::string all = json_text(out.items) + json_text(data);
  const size_t bytes = all.size();
  if (bytes > kMostConfigBytes) {
    return invalid(
        fmt::format("the recipe and what it reads are {} bytes in {} files; the ConfigMap that brings them to "
                    "the pods holds {}: make smaller what T.read_json reads",
                    bytes, job.sources.size(), kMostConfigBytes));
  }
  out.name = fmt::format("{}-{:016x}", job_name, XXH3_64bits(all.data(), all.size()));
  out.config_map = {{"apiVersion", "v1"},
                    {"kind", "ConfigMap"},
                    {"metadata", metadata},
                    {"immutable", true},
                    {"data", std::move(data)}};
  out.config_map["metadata"]["name"] = out.name;
  return out;
}

std::string without_trailing_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

/// Where the run folder lies has to outlive a pod, and be the same for all.
Status check_run_folder(const KubernetesConfig& pods, const TrainJob& job) {
  if (!job.run.starts_with('/') && job.workdir.empty()) {
    return invalid(
        fmt::format("--run {}: relative to the working directory of a pod, which no `workdir` names; give "
                    "workdir, or an absolute path",
                    job.run));
  }
  const fs::path run = (fs::path(job.workdir) / job.run).lexically_normal();
  const Mount* in = nullptr;  // the deepest that holds it
  for (const Mount& mount : pods.mounts) {
    const fs::path at(without_trailing_slash(mount.path));
    const auto [end, unused] = std::mismatch(at.begin(), at.end(), run.begin(), run.end());
    if (end == at.end() && (in == nullptr || mount.path.size() > in->path.size())) in = &mount;
  }
  if (in == nullptr) {
    return invalid(
        fmt::format("the run folder {} lies in none of the mounts, so it would be gone with its pod: mount a "
                    "volume that all pods share, or give --run a path in one",
                    run.string()));
  }
  if (!in->read_only) return {};
  return invalid(fmt::format("the run folder {} lies in the mount {}, which is read_only", run.string(), in->path));
}

std::string cpu_text(double cores) { return fmt::format("{:.0f}m", std::ceil(cores * 1000)); }

json pod_resources(const PodResources& resources) {
  json out = json::object();
  if (resources.cpu > 0) out["cpu"] = cpu_text(resources.cpu);
  if (resources.memory_bytes > 0) out["memory"] = std::to_string(resources.memory_bytes);
  for (const std::string& other : resources.others) {
    const auto [name, quantity] = split_pair(other);
    out[name] = quantity;
  }
  return out;
}

}  // namespace

Result<std::string> kubernetes_name(const std::string& run_name, int64_t hosts) {
  std::string out;
  for (const char c : run_name) {
    const bool kept = std::isalnum(static_cast<unsigned char>(c)) != 0;
    out += kept ? static_cast<char>(std::tolower(static_cast<unsigned char>(c))) : '-';
  }
  while (!out.empty() && out.back() == '-') out.pop_back();
  while (!out.empty() && out.front() == '-') out.erase(0, 1);
  // A Service begins with a letter, and a pod is called NAME-INDEX.
  const size_t most = kMostLabel - 1 - std::to_string(hosts - 1).size();
  if (out.empty() || std::isdigit(static_cast<unsigned char>(out.front())) != 0 || out.size() > most) {
    return invalid(
        fmt::format("the recipe's name `{}` makes no name for Kubernetes: it takes at most {} letters, digits "
                    "and -, a letter first; give --set name=...",
                    run_name, most));
  }
  return out;
}

Result<json> kubernetes_objects(const ClusterConfig& cluster, const TrainJob& job) {
  const KubernetesConfig& pods = cluster.kubernetes;
  const int64_t hosts = cluster.all_hosts();
  RT_TRY_SET(const std::string name, kubernetes_name(job.name, hosts));
  if (hosts > kMostPods) return invalid(fmt::format("{} hosts; an Indexed Job has at most {} pods", hosts, kMostPods));
  RT_TRY(check_run_folder(pods, job));
  const int64_t shm_bytes = pods.shm_bytes > 0 ? pods.shm_bytes : job.shared_bytes;
  if (pods.resources.memory_bytes > 0 && pods.resources.memory_bytes <= shm_bytes) {
    return invalid(
        fmt::format("resources.memory = {} bytes holds no more than /dev/shm, which needs {} of them: give the "
                    "ranks memory besides",
                    pods.resources.memory_bytes, shm_bytes));
  }
  const json labels = {{"app.kubernetes.io/name", "cairn"}, {"app.kubernetes.io/instance", name}};
  json metadata = {{"name", name}, {"labels", labels}};
  if (!pods.name_space.empty()) metadata["namespace"] = pods.name_space;
  RT_TRY_SET(const Files files, config_files(job, name, metadata));

  RT_TRY_SET(std::vector<std::string> words,
             train_words(cluster, job, true, [&](const fs::path& path) { return files.in_pod(path); }));
  std::string names;
  for (int64_t k = 0; k < hosts; ++k) names += fmt::format("{}{}-{}.{}", k == 0 ? "" : ",", name, k, name);
  if (names.size() > kMostArgumentBytes) {
    return invalid(
        fmt::format("the names of {} hosts are {} bytes, and an argument holds {}: a shorter name of the "
                    "recipe, or fewer hosts",
                    hosts, names.size(), kMostArgumentBytes));
  }
  words.insert(words.end(), {"--hosts", names});  // which of them a pod is, JOB_COMPLETION_INDEX says
  for (std::string& word : words) word = pod_word(word);

  json volumes = {{{"name", "shm"}, {"emptyDir", {{"medium", "Memory"}, {"sizeLimit", std::to_string(shm_bytes)}}}},
                  {{"name", "files"}, {"configMap", {{"name", files.name}, {"items", files.items}}}}};
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

  json container = {{"name", "cairn"},
                    {"image", pods.image},
                    {"command", words},
                    {"volumeMounts", mounts},
                    {"terminationMessagePath", "/dev/termination-log"},
                    {"terminationMessagePolicy", "FallbackToLogsOnError"}};
  if (!job.workdir.empty()) container["workingDir"] = job.workdir;
  for (const std::string& variable : cluster.env) {
    const auto [variable_name, value] = split_pair(variable);
    container["env"].push_back({{"name", variable_name}, {"value", pod_word(value)}});
  }
  if (const json resources = pod_resources(pods.resources); !resources.empty())
    container["resources"] = {{"requests", resources}, {"limits", resources}};

  json spec = {{"subdomain", name},
               {"restartPolicy", "Never"},
               {"terminationGracePeriodSeconds", static_cast<int64_t>(std::ceil(pods.grace_s))},
               {"automountServiceAccountToken", false},
               {"enableServiceLinks", false},
               {"containers", json::array({container})},
               {"volumes", volumes}};
  for (const std::string& label : pods.node_selector) {
    const auto [label_name, value] = split_pair(label);
    spec["nodeSelector"][label_name] = value;
  }
  if (!pods.share_nodes) {
    const json apart = {{"topologyKey", "kubernetes.io/hostname"}, {"labelSelector", {{"matchLabels", labels}}}};
    spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] = json::array({apart});
  }

  // Codes after which the same words would end in the same way (docs/operations/exit-codes.md).
  const json hopeless = {{"containerName", "cairn"}, {"operator", "In"}, {"values", {2, 65, 70, 73, 76}}};
  // One pod's TERM (a drain) has the run save and stop, and all others end with this code: no try of theirs.
  const json unfinished = {{"containerName", "cairn"}, {"operator", "In"}, {"values", {kUnfinished}}};
  const json disrupted = {{"type", "DisruptionTarget"}, {"status", "True"}};
  const json failure_policy = {{{"action", "FailJob"}, {"onExitCodes", hopeless}},
                               {{"action", "Ignore"}, {"onExitCodes", unfinished}},
                               {{"action", "Ignore"}, {"onPodConditions", json::array({disrupted})}}};
  const json job_object = {{"apiVersion", "batch/v1"},
                           {"kind", "Job"},
                           {"metadata", metadata},
                           {"spec",
                            {{"completionMode", "Indexed"},
                             {"completions", hosts},
                             {"parallelism", hosts},
                             {"backoffLimitPerIndex", pods.retries},
                             {"podFailurePolicy", {{"rules", failure_policy}}},
                             {"template", {{"metadata", {{"labels", labels}}}, {"spec", spec}}}}}};
  const json service = {{"apiVersion", "v1"},
                        {"kind", "Service"},
                        {"metadata", metadata},
                        {"spec",
                         {{"clusterIP", "None"},
                          {"publishNotReadyAddresses", true},  // or names would wait for pods that wait for names
                          {"selector", labels}}}};
  return json{{"apiVersion", "v1"}, {"kind", "List"}, {"items", {files.config_map, service, job_object}}};
}

}  // namespace cairn::tools
