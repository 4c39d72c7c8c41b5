// Objects for kubectl, as JSON, which it takes like YAML. An Indexed Job gives each pod an index, a name in DNS and a
// variable with its index; that it has no size is why --hosts names all. docs/operations/cluster.md has the fields that
// are used, with the versions that have them.
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/json/json.h"
#include "tools/launch/job.h"
#include "tools/launch/pod.h"
#include "tools/launch/quote.h"
#include "tools/launch/train_words.h"

namespace cairn::tools {
namespace fs = std::filesystem;
namespace {

using nlohmann::json;

constexpr size_t kMostConfigBytes = 250 * 1000;    // kubectl apply keeps all of it in an annotation, of 256 KiB
constexpr size_t kMostArgumentBytes = 100 * 1000;  // Linux takes 128 KiB
constexpr int64_t kMostPods = 100 * 1000;          // of an Indexed Job with backoffLimitPerIndex
constexpr size_t kMostLabel = 63;
constexpr std::string_view kVolcano = "volcano";                    // the scheduler's name
constexpr const char *kReplicated = "hosts", *kInSet = "-hosts-0";  // of a JobSet: its Job is called NAME-hosts-0

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

/// The size of a pod's /dev/shm.
Result<int64_t> shm_bytes_of(const KubernetesConfig& pods, const TrainJob& job) {
  const int64_t out = pods.shm_bytes > 0 ? pods.shm_bytes : job.shared_bytes;
  if (pods.resources.memory_bytes == 0 || pods.resources.memory_bytes > out) return out;
  return invalid(
      fmt::format("resources.memory = {} bytes holds no more than /dev/shm, which needs {} of them: give the "
                  "ranks memory besides",
                  pods.resources.memory_bytes, out));
}

/// The names of all pods, as they find each other: "mine-0.mine,mine-1.mine".
Result<std::string> pod_names(const ClusterConfig& cluster, const std::string& name) {
  const std::string job = name + (cluster.kubernetes.jobset ? kInSet : "");
  std::string out;
  for (int64_t k = 0; k < cluster.all_hosts(); ++k) out += fmt::format("{}{}-{}.{}", k == 0 ? "" : ",", job, k, name);
  if (out.size() <= kMostArgumentBytes) return out;
  return invalid(
      fmt::format("the names of {} hosts are {} bytes, and an argument holds {}: a shorter name of the recipe, or "
                  "fewer hosts",
                  cluster.all_hosts(), out.size(), kMostArgumentBytes));
}

json job_spec(const ClusterConfig& cluster, const json& pod, const json& pod_metadata) {
  // Codes after which the same words would end in the same way (docs/operations/exit-codes.md).
  const json hopeless = {{"containerName", "cairn"}, {"operator", "In"}, {"values", {2, 65, 70, 73, 76}}};
  // One pod's TERM (a drain) has the run save and stop, and all others end with this code: no try of theirs.
  const json unfinished = {{"containerName", "cairn"}, {"operator", "In"}, {"values", {kUnfinished}}};
  const json disrupted = {{"type", "DisruptionTarget"}, {"status", "True"}};
  const json rules = {{{"action", "FailJob"}, {"onExitCodes", hopeless}},
                      {{"action", "Ignore"}, {"onExitCodes", unfinished}},
                      {{"action", "Ignore"}, {"onPodConditions", json::array({disrupted})}}};
  return {{"completionMode", "Indexed"},
          {"completions", cluster.all_hosts()},
          {"parallelism", cluster.all_hosts()},
          {"backoffLimitPerIndex", cluster.kubernetes.retries},
          {"podFailurePolicy", {{"rules", rules}}},
          {"template", {{"metadata", pod_metadata}, {"spec", pod}}}};
}

/// A JobSet makes its Service itself, of its own name. A Job of it fails by podFailurePolicy or by an index without
/// retries, and then the set fails too (maxRestarts).
json jobset_of(const json& metadata, const json& job_spec, const json& labels, int64_t remove_after_s) {
  json spec = {
      {"network", {{"enableDNSHostnames", true}, {"publishNotReadyAddresses", true}}},
      {"failurePolicy", {{"maxRestarts", 0}}},
      {"replicatedJobs", json::array({{{"name", kReplicated},
                                       {"replicas", 1},
                                       {"template", {{"metadata", {{"labels", labels}}}, {"spec", job_spec}}}}})}};
  if (remove_after_s > 0) spec["ttlSecondsAfterFinished"] = remove_after_s;
  return {{"apiVersion", "jobset.x-k8s.io/v1alpha2"}, {"kind", "JobSet"}, {"metadata", metadata}, {"spec", spec}};
}

/// Volcano places the pods of a group together: none before all hosts that train have a node. A spare may come later.
json pod_group_of(const ClusterConfig& cluster, const json& metadata) {
  json spec = {{"minMember", cluster.hosts}};
  if (!cluster.kubernetes.queue.empty()) spec["queue"] = cluster.kubernetes.queue;
  if (!cluster.kubernetes.priority_class.empty()) spec["priorityClassName"] = cluster.kubernetes.priority_class;
  return {{"apiVersion", "scheduling.volcano.sh/v1beta1"},
          {"kind", "PodGroup"},
          {"metadata", metadata},
          {"spec", std::move(spec)}};
}

/// "Service", and of a group of kinds "PodGroup.v1beta1.scheduling.volcano.sh": others have kinds of that name too.
std::string kind_for_kubectl(const json& object) {
  const std::string version = object.at("apiVersion"), kind = object.at("kind");
  const size_t slash = version.find('/');
  return slash == version.npos ? kind
                               : fmt::format("{}.{}.{}", kind, version.substr(slash + 1), version.substr(0, slash));
}

}  // namespace

Result<std::string> kubernetes_name(const std::string& run_name, const ClusterConfig& cluster) {
  std::string out;
  for (const char c : run_name) {
    const bool kept = std::isalnum(static_cast<unsigned char>(c)) != 0;
    out += kept ? static_cast<char>(std::tolower(static_cast<unsigned char>(c))) : '-';
  }
  while (!out.empty() && out.back() == '-') out.pop_back();
  while (!out.empty() && out.front() == '-') out.erase(0, 1);
  // A Service begins with a letter, and a pod is called NAME-INDEX; of a JobSet with five letters more behind.
  const size_t in_set = cluster.kubernetes.jobset ? std::string_view(kInSet).size() + 6 : 0;
  const size_t most = kMostLabel - 1 - std::to_string(cluster.all_hosts() - 1).size() - in_set;
  if (out.empty() || std::isdigit(static_cast<unsigned char>(out.front())) != 0 || out.size() > most) {
    return invalid(
        fmt::format("the recipe's name `{}` makes no name for Kubernetes: it takes at most {} letters, digits "
                    "and -, a letter first; give --set name=...",
                    run_name, most));
  }
  return out;
}

std::string kubernetes_owner(const ClusterConfig& cluster, const std::string& name) {
  return (cluster.kubernetes.jobset ? "jobset.jobset.x-k8s.io/" : "job.batch/") + name;
}

Result<json> kubernetes_objects(const ClusterConfig& cluster, const TrainJob& job) {
  const KubernetesConfig& pods = cluster.kubernetes;
  const int64_t hosts = cluster.all_hosts();
  RT_TRY_SET(const std::string name, kubernetes_name(job.name, cluster));
  if (hosts > kMostPods) return invalid(fmt::format("{} hosts; an Indexed Job has at most {} pods", hosts, kMostPods));
  RT_TRY(check_run_folder(pods, job));
  RT_TRY_SET(const int64_t shm_bytes, shm_bytes_of(pods, job));
  const json own_labels = {{"app.kubernetes.io/name", "cairn"}, {"app.kubernetes.io/instance", name}};
  json labels = own_labels;
  for (const auto& one : pods.labels) labels[split_pair(one).first] = split_pair(one).second;
  json metadata = {{"name", name}, {"labels", labels}};
  if (!pods.name_space.empty()) metadata["namespace"] = pods.name_space;
  RT_TRY_SET(const Files files, config_files(job, name, metadata));

  RT_TRY_SET(std::vector<std::string> words,
             train_words(cluster, job, true, [&](const fs::path& path) { return files.in_pod(path); }));
  RT_TRY_SET(const std::string names, pod_names(cluster, name));
  words.insert(words.end(), {"--hosts", names});  // which of them a pod is, JOB_COMPLETION_INDEX says
  for (std::string& word : words) word = pod_word(word);

  json pod = pod_spec(cluster, job, words, {files.name, files.items}, own_labels, shm_bytes);
  json pod_metadata = {{"labels", labels}};
  for (const auto& one : pods.annotations) pod_metadata["annotations"][split_pair(one).first] = split_pair(one).second;
  const bool volcano = pods.scheduler == kVolcano;
  if (volcano) pod_metadata["annotations"]["scheduling.k8s.io/group-name"] = name;
  if (!pods.jobset) pod["subdomain"] = name;
  json spec = job_spec(cluster, pod, pod_metadata);
  const auto remove_after_s = static_cast<int64_t>(std::ceil(pods.remove_after_s));
  json job_metadata = metadata;
  if (!pods.queue.empty() && !volcano) job_metadata["labels"]["kueue.x-k8s.io/queue-name"] = pods.queue;
  json items = json::array({files.config_map});
  if (volcano) items.push_back(pod_group_of(cluster, metadata));
  if (pods.jobset) {
    items.push_back(jobset_of(job_metadata, spec, labels, remove_after_s));
    return json{{"apiVersion", "v1"}, {"kind", "List"}, {"items", std::move(items)}};
  }
  if (remove_after_s > 0) spec["ttlSecondsAfterFinished"] = remove_after_s;
  const json job_object = {
      {"apiVersion", "batch/v1"}, {"kind", "Job"}, {"metadata", job_metadata}, {"spec", std::move(spec)}};
  const json service = {{"apiVersion", "v1"},
                        {"kind", "Service"},
                        {"metadata", metadata},
                        {"spec",
                         {{"clusterIP", "None"},
                          {"publishNotReadyAddresses", true},  // or names would wait for pods that wait for names
                          {"selector", own_labels}}}};
  items.push_back(service);
  items.push_back(job_object);
  return json{{"apiVersion", "v1"}, {"kind", "List"}, {"items", std::move(items)}};
}

std::vector<std::vector<std::string>> kubernetes_adoptions(const json& objects, const std::string& uid) {
  const json& items = objects.at("items");
  const json& owner = items.back();
  const json patch = {{"metadata",
                       {{"ownerReferences", json::array({{{"apiVersion", owner.at("apiVersion")},
                                                          {"kind", owner.at("kind")},
                                                          {"name", owner.at("metadata").at("name")},
                                                          {"uid", uid}}})}}}};
  std::vector<std::vector<std::string>> out;
  for (size_t k = 0; k + 1 < items.size(); ++k) {
    const json& metadata = items[k].at("metadata");
    std::vector<std::string> words = {"kubectl", "patch"};
    if (metadata.contains("namespace")) words.insert(words.end(), {"--namespace", metadata.at("namespace")});
    words.insert(words.end(),
                 {kind_for_kubectl(items[k]), metadata.at("name"), "--type=merge", "--patch=" + json_text(patch)});
    out.push_back(std::move(words));
  }
  return out;
}

}  // namespace cairn::tools
