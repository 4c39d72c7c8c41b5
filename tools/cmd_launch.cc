// cairn launch: a run over several hosts, handed to Slurm, to Kubernetes or to ssh as a cluster file says.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ckpt/run_memory.h"
#include "dsl/dsl.h"
#include "runtime/json/json.h"
#include "runtime/plan/cluster_rules.h"
#include "runtime/plan/plan.h"
#include "tools/commands.h"
#include "tools/launch/job.h"
#include "tools/launch/quote.h"
#include "tools/launch/submit.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

struct LaunchArgs {
  RecipeArgs recipe;
  std::string cluster, run;
  std::vector<std::string> train_words;
  bool dry_run = false;
};

/// Of a host's /dev/shm: slots and weights of its ranks when as few hosts train as may, and an eighth more; 64 MiB at
/// least. Segments for communication do not lie there.
Result<int64_t> shared_bytes(const dsl::LoadedRecipe& loaded, const Plan& plan, const ClusterConfig& cluster) {
  const int64_t ranks = cluster.ranks_per_host;
  constexpr int64_t kMiB = 1 << 20, kLeast = 64 * kMiB;
  if (!plan.recipe.optimizer.offload.empty()) return kLeast;
  int64_t most = 0;
  for (const int64_t host : {int64_t{0}, cluster.hosts / 2, cluster.hosts - 1}) {
    const ckpt::RankRange here{.first = host * ranks, .end = (host + 1) * ranks};
    RT_TRY_SET(const ckpt::ArenaSpec spec, ckpt::arena_spec(plan,
                                                            {.run_name = loaded.recipe.name,
                                                             .run_id = loaded.recipe.name + "-0000000000000000",
                                                             .recipe_json = loaded.canonical_json,
                                                             .recipe_hash = loaded.hash_hex},
                                                            here));
    most = std::max(most, ckpt::Arena::total_bytes(spec));
  }
  const auto crowded = static_cast<int64_t>(static_cast<double>(most) * static_cast<double>(cluster.hosts) /
                                            static_cast<double>(cluster.hosts_min));
  return std::max(kLeast, (crowded + crowded / 8 + kMiB - 1) / kMiB * kMiB);
}

/// What stands behind `--` has to be words of `cairn train` that are not said in another place.
Status check_train_words(const LaunchArgs& args, const ClusterConfig& cluster) {
  CLI::App app;
  Session unused;
  add_train(app, unused);
  std::vector<std::string> words(args.train_words.rbegin(), args.train_words.rend());  // CLI11 takes the last one first
  words.insert(words.end(), {args.recipe.path, "train"});
  try {
    app.parse(std::move(words));
  } catch (const CLI::Success& help) {
    return Error{ErrorCode::kInvalidInput, "behind -- stand options of the run; see: cairn train --help"};
  } catch (const CLI::ParseError& error) {
    return Error{ErrorCode::kInvalidInput, fmt::format("behind --, as `cairn train` sees it: {}", error.what())};
  }
  const CLI::App* train = app.get_subcommand("train");
  const auto given = [&](const char* option) {
    return train->get_option_no_throw(option) != nullptr && train->count(option) > 0;
  };
  for (const char* option : {"--run", "--set", "--param", "--with"}) {
    if (given(option)) {
      return Error{ErrorCode::kInvalidInput, fmt::format("{} stands before --, where it is checked", option)};
    }
  }
  for (const char* option :
       {"--nproc", "--cluster", "--hosts", "--host-file", "--host-index", "--spares", "--hosts-min"}) {
    if (given(option)) return Error{ErrorCode::kInvalidInput, fmt::format("{}: the cluster file says it", option)};
  }
  const bool restarts =
      cluster.launcher == Launcher::kKubernetes || (cluster.launcher == Launcher::kSlurm && cluster.slurm.requeue);
  if (restarts && given("--exit-when-unfinished")) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--exit-when-unfinished: the launcher starts the run again by code {}", kUnfinished)};
  }
  return {};
}

fs::path absolute(const fs::path& path) { return fs::absolute(path).lexically_normal(); }

void add_sources(std::vector<SourceFile>& to, const std::vector<std::pair<std::string, std::string>>& from) {
  for (const auto& [name, text] : from) {
    const fs::path path = absolute(name);
    const bool known = std::ranges::any_of(to, [&](const SourceFile& file) { return file.first == path; });
    if (!known) to.emplace_back(path, text);
  }
}

Result<TrainJob> job_of(const LaunchArgs& args, const dsl::ClusterResult& where, const dsl::LoadedRecipe& loaded) {
  const ClusterConfig& cluster = where.cluster;
  const bool pods = cluster.launcher == Launcher::kKubernetes;
  TrainJob job{.name = loaded.recipe.name,
               .program = cluster.program,
               .recipe = absolute(args.recipe.path),
               .cluster_file = absolute(args.cluster),
               .run = args.run.empty() || pods ? args.run : absolute(args.run).string(),
               .train_words = args.train_words,
               .workdir = cluster.workdir};
  if (job.program.empty()) job.program = pods ? "cairn" : fs::read_symlink("/proc/self/exe").string();
  if (job.run.empty()) job.run = "runs/" + job.name;
  if (job.workdir.empty() && !pods) job.workdir = fs::current_path().string();
  for (const std::string& file : args.recipe.with_files) job.with_files.push_back(absolute(file));
  for (const auto& [flag, values] :
       {std::pair("--param", &args.recipe.params), std::pair("--set", &args.recipe.sets)}) {
    for (const std::string& value : *values) job.recipe_words.insert(job.recipe_words.end(), {flag, value});
  }
  add_sources(job.sources, loaded.sources);
  add_sources(job.sources, where.sources);
  RT_TRY_SET(const Plan plan, make_plan(loaded.recipe, cluster.world()));
  if (const std::vector<Mistake> mistakes = find_mistakes(cluster, plan.mesh); !mistakes.empty())
    return to_error(mistakes.front()).with(args.cluster);
  RT_TRY_SET(job.shared_bytes, shared_bytes(loaded, plan, cluster));
  return job;
}

/// What sbatch or kubectl says, and whether it took the job.
Result<int> submit(const std::vector<std::string>& words, std::string_view input, std::string* output = nullptr) {
  RT_TRY_SET(Submitted done, run_with_input(words, input));
  if (output != nullptr) *output = std::move(done.output);
  if (done.code == 0) return 0;
  return Error{ErrorCode::kUnavailable,
               fmt::format("{} ended with {}; what it says stands above", words[0], done.code)};
}

/// The Job owns what it needs, so that its end, however it comes, removes that too. False: it does not own all.
bool adopt(const ClusterConfig& cluster, const nlohmann::json& objects, const std::string& owner) {
  std::vector<std::string> ask = {"kubectl", "get", owner, "--output=jsonpath={.metadata.uid}"};
  if (!cluster.kubernetes.name_space.empty()) ask.insert(ask.end(), {"--namespace", cluster.kubernetes.name_space});
  const auto done = [](const Result<Submitted>& one) { return one.ok() && one.value().code == 0; };
  const Result<Submitted> uid = run_with_input(ask, "", Echo::kNo);
  bool adopted = done(uid) && !uid.value().output.empty();
  if (adopted) {
    for (const std::vector<std::string>& words : kubernetes_adoptions(objects, uid.value().output))
      adopted = done(run_with_input(words, "", Echo::kNo)) && adopted;
  }
  return adopted;
}

Result<int> launch_pods(const ClusterConfig& cluster, const TrainJob& job, bool dry_run) {
  RT_TRY_SET(const nlohmann::json objects, kubernetes_objects(cluster, job));
  const std::string text = json_text(objects, 2) + "\n";
  if (dry_run) {
    fmt::print("{}", text);
    return 0;
  }
  std::string said;
  RT_TRY_SET(const int code, submit({"kubectl", "apply", "-f", "-"}, text, &said));
  RT_TRY_SET(const std::string name, kubernetes_name(job.name, cluster));
  const std::string owner = kubernetes_owner(cluster, name);
  if (said.find(owner + " unchanged") == std::string::npos) {
    // A Job that was deleted just now owned objects of the same names. kubectl found them unchanged, and Kubernetes
    // removes each that is not yet this Job's: what is gone is applied once more. An adopted one stays.
    const auto again = [&] {
      const Result<Submitted> applied = run_with_input({"kubectl", "apply", "-f", "-"}, text, Echo::kNo);
      return applied.ok() && applied.value().code == 0 && adopt(cluster, objects, owner);
    };
    // A cluster where the patch is not allowed keeps them until a person removes them.
    if (!adopt(cluster, objects, owner) && !again())
      fmt::print(stderr, "warning: {} was submitted, and does not own its other objects: they stay after it\n", owner);
    return code;
  }
  return Error{
      ErrorCode::kUnavailable,
      fmt::format("the {0} {1} was there already, so nothing was started; where it has ended, remove it first: "
                  "kubectl delete {2} {1}",
                  cluster.kubernetes.jobset ? "JobSet" : "Job", name, cluster.kubernetes.jobset ? "jobset" : "job")};
}

Result<int> launch(const LaunchArgs& args) {
  const dsl::ClusterResult where = dsl::load_cluster(args.cluster);
  if (!where.ok()) {
    std::fputs(dsl::to_text(where.diagnostics).c_str(), stderr);
    return kRefused;
  }
  const ClusterConfig& cluster = where.cluster;
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(const int refused, load_or_tell(args.recipe, cluster.world(), false, &loaded));
  if (refused != 0) return refused;
  RT_TRY(check_train_words(args, cluster));
  RT_TRY_SET(const TrainJob job, job_of(args, where, loaded));
  if (cluster.launcher == Launcher::kKubernetes) return launch_pods(cluster, job, args.dry_run);
  if (cluster.launcher == Launcher::kSlurm) {
    RT_TRY_SET(const std::string script, slurm_script(cluster, job));
    if (!args.dry_run) return submit({"sbatch"}, script);
    fmt::print("{}", script);
    return 0;
  }
  RT_TRY_SET(const std::vector<HostCommand> commands, ssh_commands(cluster, job));
  if (!args.dry_run) return run_on_hosts(commands);
  for (const HostCommand& command : commands) fmt::print("{}\n", shell_words(command.words));
  return 0;
}

}  // namespace

void add_launch(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("launch", "start a run over several hosts: by Slurm, by Kubernetes or by ssh");
  const auto args = std::make_shared<LaunchArgs>();
  add_recipe_options(*command, args->recipe);
  // Of a list that could go on CLI11 takes a -- as the end, and would look for options of this command behind it.
  for (const char* list : {"--set", "--param", "--with"}) command->get_option(list)->allow_extra_args(false);
  command->add_option(
      "TRAIN_OPTIONS", args->train_words,
      "behind --: further options of `cairn train`, for all hosts; paths in them are relative to workdir");
  command->add_option("--cluster", args->cluster, "the cluster file: where it runs (docs/cluster-file.md)")
      ->type_name("FILE")
      ->required();
  command
      ->add_option("--run", args->run,
                   "the run folder, which all hosts share (default: runs/NAME in workdir); with T.kubernetes a path in "
                   "the pods")
      ->type_name("DIR");
  command->add_flag("--dry-run", args->dry_run,
                    "print what would be submitted: the script, the objects, or the commands; submit nothing");
  command->footer(
      "Recipe and cluster file are checked first; a refused launch submits nothing.\n"
      "Exit codes: 0 submitted, 2 refused, 69 the launcher is not there or took nothing. T.hosts stays beside the run "
      "and\n"
      "has the code of `cairn train` on the first host, or, where its connection was lost, of the next that has one.\n"
      "Examples:\n"
      "  cairn launch recipes/mine.lua --cluster cluster.lua --dry-run\n"
      "  cairn launch recipes/mine.lua --cluster cluster.lua --run /shared/runs/mine\n"
      "  cairn launch recipes/mine.lua --cluster cluster.lua -- --fresh --trace steps=5..8");
  command->callback([args, &session] { session.action = [args] { return launch(*args); }; });
}

}  // namespace cairn::tools
