// What is submitted: the lines that matter, and how words come through.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tools/launch/job.h"
#include "tools/launch/quote.h"

using namespace cairn;
using namespace cairn::tools;
using nlohmann::json;

namespace {

TrainJob job() {
  return {.name = "mine",
          .program = "/opt/cairn",
          .recipe = "/home/recipes/mine.lua",
          .cluster_file = "/home/cluster.lua",
          .run = "/shared/runs/mine",
          .workdir = "/home",
          .sources = {{"/home/recipes/mine.lua", "the recipe"}, {"/home/cluster.lua", "the cluster"}},
          .shared_bytes = int64_t{1} << 30};
}

ClusterConfig cluster(Launcher launcher) {
  ClusterConfig out{.launcher = launcher, .hosts = 4, .ranks_per_host = 8, .spares = 1, .hosts_min = 3};
  out.kubernetes.image = "registry.example/cairn:1";
  out.kubernetes.mounts = {{.path = "/shared", .claim = "shared"}};
  out.ssh.names = {"h0", "h1", "h2", "h3", "h4"};
  return out;
}

std::string slurm(const ClusterConfig& c, const TrainJob& j) { return slurm_script(c, j).value(); }
json pods(const ClusterConfig& c, const TrainJob& j) { return kubernetes_objects(c, j).value().at("items"); }

void check_refused(const Error& error, std::string_view says) {
  CHECK(error.code == ErrorCode::kInvalidInput);
  CHECK_MESSAGE(error.message.find(says) != std::string::npos, error.message);
}

}  // namespace

TEST_SUITE("tools/launch/render") {
  TEST_CASE("the script for Slurm") {
    ClusterConfig c = cluster(Launcher::kSlurm);
    CHECK(slurm(c, job()) == R"sh(#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180

cd /home || exit 2
run=/shared/runs/mine
last_word() { cat "$run/cluster/end.json" 2>/dev/null; }
before=$(last_word)
srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none /opt/cairn train /home/recipes/mine.lua --run /shared/runs/mine --cluster /home/cluster.lua --nproc 8 --spares 1 --hosts-min 3 --exit-when-unfinished 75
code=$?
# srun ends with the highest code of all hosts, also of lost ones. The leader's code is the run's. 73: another run's.
after=$(last_word)
if [ "$code" -ne 73 ] && [ "$after" != "$before" ]; then
  own=$(printf '%s' "$after" | sed -n 's/.*"code":\([0-9]\{1,3\}\)[^0-9].*/\1/p')
  code=${own:-$code}
fi
# 75: stopped with steps left. 69: the next try may go better. At most 5 tries follow without a new checkpoint.
if [ "$code" -eq 75 ] || [ "$code" -eq 69 ]; then
  newest=$(ls "$run/checkpoints" 2>/dev/null | grep '^step-[0-9]*$' | sort -V | tail -n 1)
  this="$SLURM_JOB_ID ${newest:-none}"
  read -r job step tries 2>/dev/null < "$run/requeues"
  case $tries in '' | *[!0-9]* | ????*) tries=0 ;; esac  # others may write there
  if [ "$job $step" = "$this" ]; then tries=$((10#$tries + 1)); else tries=1; fi
  if [ "$tries" -gt 5 ]; then
    echo "not queued again: 5 more tries have saved no step (newest: ${newest:-none})" >&2
  elif { new=$(mktemp "$run/.requeues-XXXXXX") && echo "$this $tries" > "$new" && mv -fT "$new" "$run/requeues"; } || [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
)sh");
    c.spares = 0;
    c.hosts_min = 4;
    c.env = {"A=x y", "B="};
    c.slurm = {.partition = "gpu",
               .account = "a team",
               .time_s = 36 * 3600 + 61,
               .signal_before_s = 0,
               .requeue = false,
               .sbatch = {"--gres=gpu:8", "--comment=\"two words\""}};
    TrainJob j = job();
    j.with_files = {"/home/small.lua"};
    j.recipe_words = {"--set", "optimizer.peak_lr=1e-3 # x"};
    j.train_words = {"--trace", "steps=5..8"};
    j.workdir = "/my work";
    const std::string script = slurm(c, j);
    CHECK(script.find("--signal") == std::string::npos);
    CHECK(script.find("#SBATCH --nodes=4\n") != std::string::npos);
    CHECK(script.find("#SBATCH --no-requeue\n#SBATCH --open-mode=append\n#SBATCH --time=1-12:02:00\n"
                      "#SBATCH --partition=gpu\n#SBATCH --account=\"a team\"\n#SBATCH --gres=gpu:8\n"
                      "#SBATCH --comment=\"two words\"\n\n"
                      "export A='x y'\nexport B=''\ncd '/my work' || exit 2\n") != std::string::npos);
    CHECK(
        script.ends_with("--cpu-bind=none /opt/cairn train /home/recipes/mine.lua --with /home/small.lua --set "
                         "'optimizer.peak_lr=1e-3 # x' --run /shared/runs/mine --cluster /home/cluster.lua --nproc 8 "
                         "--trace steps=5..8\n"));
  }

  TEST_CASE("a command for each host, whose index is its place in the list") {
    ClusterConfig c = cluster(Launcher::kHosts);
    c.env = {"A=it's"};
    c.ssh.options = {"-p", "2222"};
    TrainJob j = job();
    j.run = "/shared/my runs/mine";
    const std::vector<HostCommand> commands = ssh_commands(c, j).value();
    REQUIRE(commands.size() == 5);
    CHECK(commands[3].host == "h3");
    const std::vector<std::string> expected = {
        "ssh",
        "-o",
        "BatchMode=yes",
        "-o",
        "ServerAliveInterval=15",
        "-p",
        "2222",
        "h3",
        R"(cd /home && export A='it'\''s' && { (while read -r s; do kill -s "$s" $$; done <&3 >/dev/null 2>&1 &) 3<&0; )"
        "exec /opt/cairn train /home/recipes/mine.lua --run '/shared/my runs/mine' --cluster "
        "/home/cluster.lua --nproc 8 --spares 1 --hosts-min 3 --hosts h0,h1,h2,h3,h4 --host-index 3 </dev/null; }"};
    CHECK(commands[3].words == expected);
  }

  TEST_CASE("the objects for Kubernetes") {
    ClusterConfig c = cluster(Launcher::kKubernetes);
    c.env = {"A=$(B)"};
    c.kubernetes.name_space = "train";
    c.kubernetes.resources = {.cpu = 7.5, .memory_bytes = int64_t{8} << 30, .others = {"nvidia.com/gpu=8"}};
    c.kubernetes.node_selector = {"pool=big"};
    c.kubernetes.mounts.push_back({.path = "/data/", .host_path = "/srv", .sub_path = "a", .read_only = true});
    TrainJob j = job();
    j.name = "GPT_1.3B";
    j.program = "cairn";
    j.recipe_words = {"--set", "name=$(x)"};
    const json items = pods(c, j);
    REQUIRE(items.size() == 3);
    const json &files = items[0], &service = items[1], &the_job = items[2];
    for (const json& item : items) {
      CHECK(item.at("metadata").at("namespace") == "train");
      CHECK(item.at("metadata").at("labels").at("app.kubernetes.io/instance") == "gpt-1-3b");
    }
    CHECK(files.at("kind") == "ConfigMap");
    const std::string files_name = files.at("metadata").at("name");
    CHECK(files_name.starts_with("gpt-1-3b-"));
    CHECK(files_name.size() == 9 + 16);
    CHECK(files.at("immutable") == true);
    CHECK(files.at("data") == json{{"file-0", "the recipe"}, {"file-1", "the cluster"}});
    CHECK(service.at("kind") == "Service");
    CHECK(service.at("metadata").at("name") == "gpt-1-3b");
    CHECK(service.at("spec").at("clusterIP") == "None");
    CHECK(service.at("spec").at("publishNotReadyAddresses") == true);

    CHECK(the_job.at("apiVersion") == "batch/v1");
    CHECK(the_job.at("kind") == "Job");
    const json& spec = the_job.at("spec");
    CHECK(spec.at("completionMode") == "Indexed");
    CHECK(spec.at("completions") == 5);
    CHECK(spec.at("parallelism") == 5);
    CHECK(spec.at("backoffLimitPerIndex") == 10);
    CHECK(
        spec.at("podFailurePolicy").dump() ==
        R"({"rules":[{"action":"FailJob","onExitCodes":{"containerName":"cairn","operator":"In","values":[2,65,70,73,76]}},)"
        R"({"action":"Ignore","onExitCodes":{"containerName":"cairn","operator":"In","values":[75]}},)"
        R"({"action":"Ignore","onPodConditions":[{"status":"True","type":"DisruptionTarget"}]}]})");
    const json& pod = spec.at("template").at("spec");
    CHECK(pod.at("subdomain") == "gpt-1-3b");
    CHECK(pod.at("restartPolicy") == "Never");
    CHECK(pod.at("terminationGracePeriodSeconds") == 300);
    CHECK(pod.at("nodeSelector") == json{{"pool", "big"}});
    CHECK(service.at("spec").at("selector") == spec.at("template").at("metadata").at("labels"));
    CHECK(pod.at("topologySpreadConstraints").dump() ==
          R"([{"labelSelector":{"matchLabels":{"app.kubernetes.io/instance":"gpt-1-3b",)"
          R"("app.kubernetes.io/name":"cairn"}},"maxSkew":1,"minDomains":5,"topologyKey":"kubernetes.io/hostname",)"
          R"("whenUnsatisfiable":"DoNotSchedule"}])");
    CHECK(
        pod.at("volumes").dump() ==
        R"([{"emptyDir":{"medium":"Memory","sizeLimit":"1073741824"},"name":"shm"},)"
        R"({"configMap":{"items":[{"key":"file-0","path":"recipes/mine.lua"},{"key":"file-1","path":"cluster.lua"}],)"
        R"("name":")" +
            files_name +
            R"("},"name":"files"},)"
            R"({"name":"mount-0","persistentVolumeClaim":{"claimName":"shared"}},{"hostPath":{"path":"/srv"},"name":"mount-1"}])");
    REQUIRE(pod.at("containers").size() == 1);
    const json& container = pod.at("containers")[0];
    CHECK(container.at("image") == "registry.example/cairn:1");
    CHECK(container.at("workingDir") == "/home");
    REQUIRE(container.at("env").size() == 1);
    CHECK(container.at("env")[0] == json{{"name", "A"}, {"value", "$$(B)"}});
    CHECK(container.at("terminationMessagePath") == "/dev/termination-log");
    CHECK(container.at("resources").at("limits") ==
          json{{"cpu", "7500m"}, {"memory", "8589934592"}, {"nvidia.com/gpu", "8"}});
    CHECK(container.at("resources").at("requests") == container.at("resources").at("limits"));
    const auto threads = [&](double cpu, std::vector<std::string> words) {
      ClusterConfig limited = c;
      limited.kubernetes.resources.cpu = cpu;
      TrainJob with = j;
      with.train_words = std::move(words);
      const json at = pods(limited, with)[2].at("spec").at("template").at("spec").at("containers")[0];
      std::string out;
      for (const char* list : {"command", "args"}) {
        if (at.contains(list)) out += at.at(list).dump();
      }
      return out;
    };
    CHECK(threads(7.5, {}).find(R"("--threads","1")") != std::string::npos);
    CHECK(threads(31.5, {}).find(R"("--threads","4")") != std::string::npos);
    CHECK(threads(0.5, {}).find(R"("--threads","1")") != std::string::npos);
    CHECK(threads(0, {}).find("--threads") == std::string::npos);
    CHECK(threads(31.5, {"--threads", "2"}).find(R"("--threads","4")") == std::string::npos);
    CHECK(threads(31.5, {"--threads=2"}).find(R"("--threads","4")") == std::string::npos);
    CHECK(
        container.at("volumeMounts").dump() ==
        R"([{"mountPath":"/dev/shm","name":"shm"},{"mountPath":"/etc/cairn","name":"files","readOnly":true},)"
        R"({"mountPath":"/shared","name":"mount-0"},{"mountPath":"/data","name":"mount-1","readOnly":true,"subPath":"a"}])");
    const json words = {"cairn",
                        "train",
                        "/etc/cairn/recipes/mine.lua",
                        "--set",
                        "name=$$(x)",
                        "--run",
                        "/shared/runs/mine",
                        "--cluster",
                        "/etc/cairn/cluster.lua",
                        "--nproc",
                        "8",
                        "--spares",
                        "1",
                        "--hosts-min",
                        "3",
                        "--exit-when-unfinished",
                        "75",
                        "--threads",
                        "1",
                        "--hosts",
                        "gpt-1-3b-0.gpt-1-3b,gpt-1-3b-1.gpt-1-3b,gpt-1-3b-2.gpt-1-3b,gpt-1-3b-3.gpt-1-3b,"
                        "gpt-1-3b-4.gpt-1-3b"};
    CHECK(container.at("command") == words);

    c.kubernetes.share_nodes = true;
    c.kubernetes.shm_bytes = 12345678;
    c.kubernetes.resources = {};
    c.kubernetes.node_selector.clear();
    c.env.clear();
    const json plain = pods(c, j)[2].at("spec").at("template").at("spec");
    CHECK(!plain.contains("topologySpreadConstraints"));
    CHECK(!plain.contains("nodeSelector"));
    CHECK(!plain.at("containers")[0].contains("resources"));
    CHECK(!plain.at("containers")[0].contains("env"));
    CHECK(plain.at("volumes")[0].at("emptyDir").at("sizeLimit") == "12345678");
  }

  TEST_CASE("a site's demands of a pod stand where Kubernetes has them, and nothing of them where none is made") {
    ClusterConfig c = cluster(Launcher::kKubernetes);
    const auto pod_of = [&] { return pods(c, job()).back().at("spec").at("template").at("spec"); };
    for (const char* field : {"tolerations", "affinity", "imagePullSecrets", "priorityClassName", "schedulerName",
                              "hostNetwork", "dnsPolicy"})
      CHECK_MESSAGE(!pod_of().contains(field), field);
    CHECK(!pods(c, job())[2].at("spec").contains("ttlSecondsAfterFinished"));
    CHECK(pod_of().at("securityContext") == json{{"runAsNonRoot", true},
                                                 {"runAsUser", 1000},
                                                 {"runAsGroup", 1000},
                                                 {"fsGroup", 1000},
                                                 {"fsGroupChangePolicy", "OnRootMismatch"},
                                                 {"seccompProfile", {{"type", "RuntimeDefault"}}}});
    KubernetesConfig& k = c.kubernetes;
    k.tolerations = {"gpu", "team=a:NoExecute", "nvidia.com/gpu:NoSchedule"};
    k.avoid_nodes = {"node-1", "node-2"};
    k.pull_secrets = {"registry"};
    k.labels = {"team=language"};
    k.annotations = {"a/b=c=d"};
    k.priority_class = "training";
    k.scheduler = "mine";
    k.queue = "team-queue";
    k.rdma = "rdma/hca=2";
    k.host_network = true;
    k.user = 1000;
    k.group = 2000;
    k.remove_after_s = 3600;
    const json the_job = pods(c, job())[2], pod = pod_of(), container = pod.at("containers")[0];
    CHECK(pod.at("tolerations").dump() ==
          R"([{"key":"gpu","operator":"Exists"},{"effect":"NoExecute","key":"team","operator":"Equal","value":"a"},)"
          R"({"effect":"NoSchedule","key":"nvidia.com/gpu","operator":"Exists"}])");
    CHECK(
        pod.at("affinity").dump() ==
        R"({"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":)"
        R"([{"key":"kubernetes.io/hostname","operator":"NotIn","values":["node-1","node-2"]}]}]}}})");
    CHECK(pod.at("imagePullSecrets").dump() == R"([{"name":"registry"}])");
    CHECK(pod.at("priorityClassName") == "training");
    CHECK(pod.at("schedulerName") == "mine");
    CHECK(pod.at("hostNetwork") == true);
    CHECK(pod.at("dnsPolicy") == "ClusterFirstWithHostNet");
    CHECK(pod.at("securityContext").at("runAsUser") == 1000);
    CHECK(pod.at("securityContext").at("runAsGroup") == 2000);
    CHECK(pod.at("securityContext").at("fsGroup") == 2000);
    CHECK(container.at("resources").at("limits") == json{{"rdma/hca", "2"}});
    CHECK(container.at("securityContext").at("capabilities") == json{{"add", {"IPC_LOCK"}}, {"drop", {"ALL"}}});
    const json& labels = the_job.at("metadata").at("labels");
    CHECK(labels.at("kueue.x-k8s.io/queue-name") == "team-queue");
    CHECK(labels.at("team") == "language");
    CHECK(the_job.at("spec").at("ttlSecondsAfterFinished") == 3600);
    const json& metadata = the_job.at("spec").at("template").at("metadata");
    CHECK(metadata.at("labels").at("team") == "language");
    CHECK(!metadata.at("labels").contains("kueue.x-k8s.io/queue-name"));
    CHECK(metadata.at("annotations") == json{{"a/b", "c=d"}});
    // Labels may change from one launch to the next; what selects the pods may not.
    CHECK(pods(c, job())[1].at("spec").at("selector").size() == 2);
    k.security = PodSecurity::kImage;
    k.rdma.clear();
    CHECK(pod_of().at("securityContext") == json{{"runAsUser", 1000}, {"runAsGroup", 2000}});
    CHECK(!pod_of().at("containers")[0].contains("securityContext"));
  }

  TEST_CASE("an agent that was killed starts again in its pod, and one whose words are wrong does not") {
    ClusterConfig c = cluster(Launcher::kKubernetes);
    const auto container = [&] { return pods(c, job())[2].at("spec").at("template").at("spec").at("containers")[0]; };
    CHECK(!container().contains("restartPolicyRules"));
    c.kubernetes.restart_in_place = true;
    CHECK(container().at("restartPolicy") == "Never");
    CHECK(container().at("restartPolicyRules").dump() ==
          R"([{"action":"Restart","exitCodes":{"operator":"In","values":[75,132,134,135,136,137,139]}}])");
  }

  TEST_CASE("a JobSet has one Job, names its pods by it, and makes its Service itself") {
    ClusterConfig c = cluster(Launcher::kKubernetes);
    c.kubernetes.jobset = true;
    c.kubernetes.queue = "team-queue";
    c.kubernetes.remove_after_s = 60;
    const json items = pods(c, job());
    REQUIRE(items.size() == 2);
    const json& set = items[1];
    CHECK(set.at("apiVersion") == "jobset.x-k8s.io/v1alpha2");
    CHECK(set.at("kind") == "JobSet");
    CHECK(set.at("metadata").at("labels").at("kueue.x-k8s.io/queue-name") == "team-queue");
    CHECK(set.at("spec").at("ttlSecondsAfterFinished") == 60);
    CHECK(set.at("spec").at("failurePolicy") == json{{"maxRestarts", 0}});
    CHECK(set.at("spec").at("network") == json{{"enableDNSHostnames", true}, {"publishNotReadyAddresses", true}});
    REQUIRE(set.at("spec").at("replicatedJobs").size() == 1);
    const json& one = set.at("spec").at("replicatedJobs")[0];
    CHECK(one.at("name") == "hosts");
    CHECK(one.at("replicas") == 1);
    const json& spec = one.at("template").at("spec");
    CHECK(spec.at("completions") == 5);
    CHECK(!spec.contains("ttlSecondsAfterFinished"));
    const json& pod = spec.at("template").at("spec");
    CHECK(!pod.contains("subdomain"));  // the controller's
    const json& command = pod.at("containers")[0].at("command");
    CHECK(command.back().get<std::string>().starts_with("mine-hosts-0-0.mine,mine-hosts-0-1.mine,"));
    TrainJob j = job();
    j.name = "a23456789012345678901234567890123456789012345678";
    check_refused(kubernetes_objects(c, j).error(), "makes no name for Kubernetes: it takes at most 47 letters");
    j.name.pop_back();
    CHECK(kubernetes_objects(c, j).ok());
  }

  TEST_CASE("Volcano gets a PodGroup of the hosts that train, to which each pod belongs") {
    ClusterConfig c = cluster(Launcher::kKubernetes);
    CHECK(pods(c, job()).size() == 3);
    c.kubernetes.scheduler = "volcano";
    c.kubernetes.name_space = "train";
    c.kubernetes.annotations = {"a/b=c"};
    SUBCASE("a Job has a queue and a priority") {
      c.kubernetes.queue = "team-queue";
      c.kubernetes.priority_class = "high";
    }
    SUBCASE("a JobSet has neither") { c.kubernetes.jobset = true; }
    const json objects = kubernetes_objects(c, job()).value(), items = objects.at("items");
    REQUIRE(items.size() == (c.kubernetes.jobset ? 3 : 4));
    const json& group = items[1];
    CHECK(group.at("apiVersion") == "scheduling.volcano.sh/v1beta1");
    CHECK(group.at("kind") == "PodGroup");
    CHECK(group.at("metadata").at("name") == "mine");
    CHECK(group.at("metadata").at("namespace") == "train");
    CHECK(group.at("spec") == (c.kubernetes.jobset
                                   ? json{{"minMember", 4}}
                                   : json{{"minMember", 4}, {"queue", "team-queue"}, {"priorityClassName", "high"}}));
    const json& owner = items.back();
    CHECK(!owner.at("metadata").at("labels").contains("kueue.x-k8s.io/queue-name"));
    json spec = owner.at("spec");
    if (c.kubernetes.jobset) spec = json(spec.at("replicatedJobs")[0].at("template").at("spec"));
    CHECK(spec.at("template").at("metadata").at("annotations") ==
          json{{"a/b", "c"}, {"scheduling.k8s.io/group-name", "mine"}});
    CHECK(spec.at("template").at("spec").at("schedulerName") == "volcano");
    CHECK(kubernetes_adoptions(objects, "1-2")[1][4] == "PodGroup.v1beta1.scheduling.volcano.sh");
  }

  TEST_CASE("the other objects are made the property of the Job, each in its namespace") {
    ClusterConfig c = cluster(Launcher::kKubernetes);
    c.kubernetes.name_space = "train";
    const json objects = kubernetes_objects(c, job()).value();
    const auto words = kubernetes_adoptions(objects, "1-2");
    REQUIRE(words.size() == 2);
    CHECK(words[1] ==
          std::vector<std::string>{"kubectl", "patch", "--namespace", "train", "Service", "mine", "--type=merge",
                                   R"(--patch={"metadata":{"ownerReferences":[{"apiVersion":"batch/v1","kind":"Job",)"
                                   R"("name":"mine","uid":"1-2"}]}})"});
    CHECK(words[0][4] == "ConfigMap");
    c.kubernetes.jobset = true;
    c.kubernetes.name_space.clear();
    const auto of_set = kubernetes_adoptions(kubernetes_objects(c, job()).value(), "1-2");
    REQUIRE(of_set.size() == 1);
    CHECK(of_set[0][2] == "ConfigMap");
    CHECK(of_set[0].back().find(R"("apiVersion":"jobset.x-k8s.io/v1alpha2","kind":"JobSet")") != std::string::npos);
  }

  TEST_CASE("other files are another ConfigMap, so a Job under way keeps its own") {
    const ClusterConfig c = cluster(Launcher::kKubernetes);
    const auto name_of = [&](const TrainJob& j) { return pods(c, j)[0].at("metadata").at("name").get<std::string>(); };
    TrainJob j = job();
    CHECK(name_of(j) == name_of(job()));
    j.sources[1].second += " changed";
    CHECK(name_of(j) != name_of(job()));
    j = job();
    j.sources[1].first = "/home/other.lua";
    CHECK(name_of(j) != name_of(job()));
  }

  TEST_CASE("files keep their places to each other, wherever they lie") {
    const ClusterConfig c = cluster(Launcher::kKubernetes);
    TrainJob j = job();
    j.recipe = "/a/b/c/mine.lua";
    j.cluster_file = "/a/x/cluster.lua";
    j.sources = {{"/a/b/c/mine.lua", ""}, {"/a/b/base.lua", ""}, {"/a/x/cluster.lua", ""}};
    const json pod = pods(c, j)[2].at("spec").at("template").at("spec");
    CHECK(
        pod.at("volumes")[1].at("configMap").at("items").dump() ==
        R"([{"key":"file-0","path":"b/c/mine.lua"},{"key":"file-1","path":"b/base.lua"},{"key":"file-2","path":"x/cluster.lua"}])");
    CHECK(pod.at("containers")[0].at("command")[2] == "/etc/cairn/b/c/mine.lua");
    j.sources = {{"/mine.lua", ""}};
    j.recipe = j.cluster_file = "/mine.lua";
    CHECK(pods(c, j)[2].at("spec").at("template").at("spec").at("containers")[0].at("command")[2] ==
          "/etc/cairn/mine.lua");
  }

  TEST_CASE("what Kubernetes would not take is refused") {
    const ClusterConfig good = cluster(Launcher::kKubernetes);
    const auto refused = [](const ClusterConfig& c, const TrainJob& j, std::string_view says) {
      const Result<json> found = kubernetes_objects(c, j);
      REQUIRE(!found.ok());
      check_refused(found.error(), says);
    };
    for (const char* name : {"1b", "---", "", "a23456789012345678901234567890123456789012345678901234567890abcd"}) {
      CAPTURE(name);
      TrainJob j = job();
      j.name = name;
      refused(good, j, "makes no name for Kubernetes: it takes at most 61 letters");
    }
    TrainJob j = job();
    j.run = "/elsewhere/runs";
    refused(good, j, "the run folder /elsewhere/runs lies in none of the mounts");
    j.run = "/shared2/runs";
    refused(good, j, "the run folder /shared2/runs lies in none of the mounts");
    j.run = "/shared/../data";
    refused(good, j, "the run folder /data lies in none of the mounts");
    j.run = "runs/a";
    refused(good, j, "the run folder /home/runs/a lies in none of the mounts");
    j.workdir = "/shared/project";
    CHECK(kubernetes_objects(good, j).ok());
    j.workdir = "";
    refused(good, j, "--run runs/a: relative to the working directory of a pod, which no `workdir` names");

    ClusterConfig c = good;
    c.kubernetes.mounts.push_back({.path = "/shared/runs", .claim = "x", .read_only = true});
    refused(c, job(), "the run folder /shared/runs/mine lies in the mount /shared/runs, which is read_only");
    c = good;
    c.kubernetes.resources.memory_bytes = int64_t{1} << 30;
    refused(c, job(),
            "resources.memory = 1073741824 bytes holds no more than /dev/shm, which needs 1073741824 of them");
    c = good;
    c.hosts = 100001;
    refused(c, job(), "an Indexed Job has at most 100000 pods");
    c.hosts = 20000;
    refused(c, job(), "the names of 20001 hosts are");
    j = job();
    j.sources[0].second.assign(300000, 'x');
    refused(good, j, "in 2 files; the ConfigMap that brings them to the pods holds 250000");
  }

  TEST_CASE("words of several lines are submitted nowhere") {
    TrainJob with_set = job(), with_run = job(), in_folder = job();
    with_set.recipe_words = {"--set", "name=\"a\nb\""};
    with_run.run = "/shared/a\nb";
    in_folder.workdir = "/home\n#";
    for (const TrainJob& j : {with_set, with_run, in_folder}) {
      check_refused(slurm_script(cluster(Launcher::kSlurm), j).error(), "has the control character \\x0a");
      check_refused(kubernetes_objects(cluster(Launcher::kKubernetes), j).error(), "has the control character \\x0a");
      check_refused(ssh_commands(cluster(Launcher::kHosts), j).error(), "has the control character \\x0a");
    }
  }
}
