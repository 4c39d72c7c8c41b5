// cairn train, cairn resume: a recipe is checked and planned, a run folder taken, and the agent (train_agent.h)
// started.
#include <fmt/format.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/mirror/place.h"
#include "ckpt/persist/read.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/posix_backend.h"
#include "dsl/dsl.h"
#include "runtime/agent/supervisor.h"
#include "runtime/core/clock.h"
#include "runtime/core/log.h"
#include "runtime/plan/plan.h"
#include "runtime/telemetry/trace.h"
#include "tools/commands.h"
#include "tools/init_options.h"
#include "tools/run_copies.h"
#include "tools/run_folder.h"
#include "tools/train_agent.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

struct TrainArgs {
  RecipeArgs recipe;
  std::string run;
  InitConfig init;  // what the command line says of it; it wins over the recipe
  int64_t nproc = 0, threads = 0;
  std::vector<std::string> kills;  // RANK@STEP
  std::string trace;               // steps=A..B
  double peak_tflops = 0;          // of a rank's device; 0: the calibration of this machine, if there is one
  bool fresh = false, dry_run = false;
};

Result<Kill> parse_kill(const std::string& text, int64_t world) {
  Kill kill;
  char end = 0;
  if (std::sscanf(text.c_str(), "%ld@%ld%c", &kill.rank, &kill.step, &end) != 2 || kill.rank < 0 ||
      kill.rank >= world || kill.step < 1) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--kill {}: expected RANK@STEP with a rank below {} and a step from 1", text, world)};
  }
  return kill;
}

/// `ckpt fetch` into a folder that was not there, or a copy by hand: not to be begun anew beside.
Status check_steps_lie_below(const fs::path& run) {
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Names here, ckpt::list_names(io, run));
  RT_TRY_SET(const ckpt::Names below, ckpt::list_names(io, run / "checkpoints"));
  if (!below.steps.empty() || here.steps.empty()) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{} holds {}, and a run keeps its checkpoints in {}: move them there to go on from them, "
                           "or choose another run folder",
                           run.string(), ckpt::step_dir_name(here.steps.back()), (run / "checkpoints").string())};
}

/// A checkpoint that came by hand from a second place of its run goes on as that run, as one does that a start brings:
/// else the place would refuse what is saved from here on, as a stranger's.
Status take_id_of_place(const std::vector<CopyTo>& places, const std::string& saved_by, RunFolder& folder) {
  for (const CopyTo& to : places) {
    RT_TRY_SET(const std::unique_ptr<ckpt::Place> place, ckpt::open_place(place_options(to, folder.path())));
    RT_TRY_SET(const std::string owner,
               place_owner(*place).with(fmt::format("it is not known whether {} has the copies of run {}, which saved "
                                                    "the checkpoint that is here",
                                                    place->describe(), saved_by)));
    if (owner != saved_by || owner == folder.id()) continue;
    fmt::print("goes on as run {}, whose copies {} has\n", saved_by, place->describe());
    return folder.take_id(saved_by);
  }
  return {};
}

/// Runs a resolved recipe to its end in `run`. `saved_by`: the run of the checkpoint that was brought into a folder
/// which was no run's before.
Result<int> run_agent(const dsl::LoadedRecipe& loaded, const fs::path& run, int64_t world, const TrainArgs& args,
                      const std::string& saved_by = {}) {
  ::signal(SIGPIPE, SIG_IGN);  // a dead reader of this output, or a dead copying process, ends no training
  ::signal(SIGXFSZ, SIG_IGN);  // past `ulimit -f` a write fails, and is told with its file; ranks inherit it
  Recipe recipe = loaded.recipe;
  RT_TRY_SET(recipe.init, effective_init(loaded.recipe.init, args.init, run));
  RT_TRY_SET(const Plan plan, make_plan(recipe, world));
  if (!args.trace.empty()) RT_TRY(telemetry::parse_trace_window(args.trace));
  TrainAgentOptions options{.threads = args.threads,
                            .trace = args.trace,
                            .peak_tflops = args.peak_tflops,
                            .fresh = args.fresh,
                            .init_on_command_line = !args.init.path.empty()};
  for (const std::string& text : args.kills) {
    RT_TRY_SET(const Kill kill, parse_kill(text, world));
    options.kills.push_back(kill);
  }
  fmt::print("{}: {} parameters on {} ranks ({}), {} steps of {} tokens, checkpoint {} each; run folder {}\n",
             loaded.recipe.name, format_count(static_cast<double>(plan.parameters)), world, plan.mesh.describe(),
             plan.steps, format_count(static_cast<double>(plan.tokens_per_step)), format_bytes(plan.checkpoint_bytes),
             run.string());
  if (args.dry_run) {
    fmt::print("--dry-run: nothing was started; `cairn plan` tells the rest\n");
    return 0;
  }
  std::fflush(stdout);
  init_logging("agent");
  if (args.fresh && fs::exists(run / "checkpoints") && !fs::is_empty(run / "checkpoints")) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--fresh: {} already holds checkpoints; choose another run folder, "
                             "or leave --fresh out to go on from them",
                             run.string())};
  }
  if (recipe.init.path.empty() && !fs::exists(run / "world")) RT_TRY(check_steps_lie_below(run));
  RT_TRY_SET(RunFolder folder, RunFolder::open(run, loaded.recipe.name));
  if (!folder.doubt().empty()) fmt::print("warning: {}\n", folder.doubt());
  if (!folder.copied_from().empty()) {
    fmt::print("a copy of {}: a run of its own from here on, which goes on from the checkpoints in it\n",
               folder.copied_from());
  }
  if (!saved_by.empty() && folder.copied_from().empty())
    RT_TRY(take_id_of_place(recipe.checkpoint.copy_to, saved_by, folder));
  RT_TRY(write_text_file(run / "world", std::to_string(world)));  // first: a recipe without it is no training's
  RT_TRY_SET(const bool changed, folder.write_recipe(loaded));
  if (changed) fmt::print("the recipe differs from the one this run had; it goes on with the new one\n");
  std::fflush(stdout);

  TrainAgent agent(plan, folder, std::move(options));
  RT_TRY(agent.prepare_copies());  // may take long, and a signal just ends it: the next start goes on
  RT_TRY(folder.settle());
  const SystemClock clock;
  const RestartConfig& restart = loaded.recipe.restart;
  // Blocks the stop signals before the persist thread starts.
  RT_TRY_SET(const std::unique_ptr<agent::Supervisor> supervisor,
             agent::Supervisor::make({.restart = {restart.max_restarts, restart.backoff_s},
                                      .tick_ms = 200,
                                      // Twice the ranks' own deadline: they know more and speak first.
                                      .hang_deadline_ms = static_cast<int64_t>(2000 * restart.deadline_s)},
                                     agent, clock));
  agent.use(*supervisor);
  if (Status opened = agent.open(loaded); !opened.ok()) {
    agent.close();  // saves what adopted memory holds, and ends the thread that wakes the supervisor
    return std::move(opened).error();
  }
  const Result<agent::Outcome> outcome = supervisor->run();
  Result<int> code = outcome.ok() ? agent.conclude(outcome.value()) : Result<int>(outcome.error());
  agent.close();
  return code;
}

Result<int> train(TrainArgs args, bool json_errors) {
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(const int refused, load_or_tell(args.recipe, args.nproc, json_errors, &loaded));
  if (refused != 0) return refused;
  const MeshConfig& mesh = loaded.recipe.mesh;
  const int64_t world = args.nproc > 0 ? args.nproc : wanted_world(mesh);
  return run_agent(loaded, args.run.empty() ? fs::path("runs") / loaded.recipe.name : fs::path(args.run), world, args);
}

struct RunRecipe {
  std::string json, where;  // where it stands, for people
  std::string saved_by;     // the run that saved the checkpoint which it is of; empty: it is the run folder's own
};

Result<ckpt::Manifest> newest_manifest(const fs::path& run, fs::path* dir = nullptr) {
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::CheckpointInfo newest, ckpt::newest_complete(io, run / "checkpoints"));
  if (dir != nullptr) *dir = newest.dir;
  return ckpt::read_manifest(io, newest.dir);
}

/// The run folder's, or, where checkpoints alone were brought there, that of the newest one.
Result<RunRecipe> recipe_to_resume(const fs::path& run) {
  Result<std::string> own = recipe_of_run(run);
  if (own.ok()) return RunRecipe{.json = std::move(own).value(), .where = (run / "recipe.resolved.json").string()};
  if (!ckpt::is_not_found(own.error())) return std::move(own).error();
  const auto refuse = [&](std::string_view why) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: {}", run.string(), why)};
  };
  RT_TRY_SET(const fs::file_type type, type_of(run));
  if (type != fs::file_type::directory) return refuse("no such folder; expected a run folder");
  const std::string name = (run / "").lexically_normal().parent_path().filename().string();
  if (name == "checkpoints" || ckpt::parse_step_dir_name(name))
    return refuse("is a folder of checkpoints or one of them; give the run's folder");
  RT_TRY(check_steps_lie_below(run));
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Names names, ckpt::list_names(io, run / "checkpoints"));
  if (names.steps.empty()) {
    return refuse("no run to go on with: it has no recipe.resolved.json, and no checkpoint in `checkpoints`");
  }
  fs::path dir;
  RT_TRY_SET(ckpt::Manifest manifest, newest_manifest(run, &dir));
  fmt::print("{} has no recipe.resolved.json; going on with the recipe that {} holds\n", run.string(), dir.string());
  return RunRecipe{
      .json = std::move(manifest.recipe), .where = "recipe in " + dir.string(), .saved_by = std::move(manifest.run.id)};
}

/// The recipe stored with the run, its newest complete checkpoint, any world size.
Result<int> resume(const TrainArgs& args) {
  const fs::path run(args.run);
  RT_TRY_SET(const RunRecipe stored, recipe_to_resume(run));
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(loaded.recipe, dsl::decode_recipe(stored.json).with(stored.where));
  MeshConfig& mesh = loaded.recipe.mesh;
  const int64_t before = wanted_world(mesh);
  // A mesh without dp takes what remains of the world: as many ranks as there last were.
  int64_t last = before;
  const Result<std::string> world_text = read_text_file(run / "world");
  if (world_text.ok()) {
    if (mesh.dp == 0) last = std::atoll(world_text.value().c_str());
  } else {  // every training writes it before it starts; reshard, average and copies of checkpoints do not
    ckpt::PosixBackend io;
    RT_TRY_SET(const ckpt::Names names, ckpt::list_names(io, run / "checkpoints"));
    if (names.steps.empty()) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}: nothing was trained there and it has no checkpoint; a `cairn ckpt reshard` or "
                               "`average` into it was cut off: give that command again",
                               args.run)};
    }
    if (mesh.dp == 0) {
      RT_TRY_SET(const ckpt::Manifest manifest, newest_manifest(run));
      last = manifest.mesh.world;
    }
  }
  const int64_t world = args.nproc > 0 ? args.nproc : std::max(before, last);
  if (world != before) mesh.dp = 0;
  const std::vector<dsl::Diagnostic> problems = dsl::check_recipe(loaded.recipe, world);
  if (!problems.empty()) {
    std::fputs(dsl::to_text(problems).c_str(), stderr);
    return kRefused;
  }
  loaded.canonical_json = dsl::encode_recipe(loaded.recipe);
  loaded.hash_hex = dsl::recipe_hash(loaded.canonical_json);
  return run_agent(loaded, run, world, args, stored.saved_by);
}

void add_run_options(CLI::App& command, TrainArgs& args) {
  command
      .add_option("--nproc", args.nproc, "rank processes on this machine (default: what the recipe's mesh asks for)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  command.add_option("--threads", args.threads, "compute threads a rank (default: cores / ranks, at least 1)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, int64_t{1024}));
  command
      .add_option("--kill", args.kills,
                  "RANK@STEP: SIGKILL that rank after that step, to see the run recover; repeatable")
      ->type_name("RANK@STEP")
      ->expected(1)
      ->take_all();
  command
      .add_option("--trace", args.trace,
                  "steps=A..B: draw these steps as a timeline, RUN/trace/trace.json, for ui.perfetto.dev")
      ->type_name("steps=A..B");
  command
      .add_option("--peak-tflops", args.peak_tflops,
                  "peak of a rank's device, for the model FLOP utilisation (default: this machine's of `cairn plan "
                  "--calibrate`)")
      ->check(CLI::PositiveNumber);
  command.add_flag("--dry-run", args.dry_run, "check and plan; start nothing");
}

}  // namespace

void add_train(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("train", "train a recipe; goes on where the run folder's newest checkpoint stands");
  const auto args = std::make_shared<TrainArgs>();
  add_recipe_options(*command, args->recipe);
  command->add_option("--run", args->run, "the run folder (default: runs/NAME)")->type_name("DIR");
  add_init_options(*command, args->init);
  command->add_flag("--fresh", args->fresh, "refuse a run folder that already holds checkpoints");
  add_run_options(*command, *args);
  add_json_flag(*command, session);
  command->callback([args, &session] { session.action = [args, &session] { return train(*args, session.json); }; });
}

void add_resume(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("resume", "go on with a run: its stored recipe, its newest checkpoint, any world size");
  const auto args = std::make_shared<TrainArgs>();
  command->add_option("RUN", args->run, "the run folder")->required();
  add_run_options(*command, *args);
  command->callback([args, &session] { session.action = [args] { return resume(*args); }; });
}

}  // namespace cairn::tools
