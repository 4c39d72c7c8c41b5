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

/// Runs a resolved recipe to its end in `run`.
Result<int> run_agent(const dsl::LoadedRecipe& loaded, const fs::path& run, int64_t world, const TrainArgs& args) {
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
  // `ckpt fetch` into a folder that was not there, or a copy by hand: not to be begun anew beside.
  if (recipe.init.path.empty() && !fs::exists(run / "world")) {
    ckpt::PosixBackend io;
    RT_TRY_SET(const ckpt::Names here, ckpt::list_names(io, run));
    RT_TRY_SET(const ckpt::Names below, ckpt::list_names(io, run / "checkpoints"));
    if (below.steps.empty() && !here.steps.empty()) {
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("{} holds {}, and a run keeps its checkpoints in {}: move them there to go on from them, "
                      "or choose another run folder",
                      run.string(), ckpt::step_dir_name(here.steps.back()), (run / "checkpoints").string())};
    }
  }
  RT_TRY_SET(RunFolder folder, RunFolder::open(run, loaded.recipe.name));
  if (!folder.doubt().empty()) fmt::print("warning: {}\n", folder.doubt());
  if (!folder.copied_from().empty()) {
    fmt::print("a copy of {}: a run of its own from here on, which goes on from the checkpoints in it\n",
               folder.copied_from());
  }
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

/// The recipe stored with the run, its newest complete checkpoint, any world size.
Result<int> resume(const TrainArgs& args) {
  RT_TRY_SET(dsl::LoadedRecipe loaded, [&]() -> Result<dsl::LoadedRecipe> {
    dsl::LoadedRecipe out;
    RT_TRY_SET(out.canonical_json, recipe_of_run(args.run));
    Result<Recipe> decoded = dsl::decode_recipe(out.canonical_json);
    if (!decoded.ok()) return std::move(decoded).error().with(args.run + "/recipe.resolved.json");
    out.recipe = std::move(decoded).value();
    return out;
  }());
  MeshConfig& mesh = loaded.recipe.mesh;
  const int64_t before = wanted_world(mesh);
  // A mesh without dp takes what remains of the world; the run folder knows how many ranks that last were.
  const Result<std::string> stored = read_text_file(fs::path(args.run) / "world");
  if (!stored.ok()) {  // every training writes `world` before it starts; reshard and average do not
    ckpt::PosixBackend io;
    RT_TRY_SET(const ckpt::Names names, ckpt::list_names(io, fs::path(args.run) / "checkpoints"));
    if (names.steps.empty()) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}: nothing was trained there and it has no checkpoint; a `cairn ckpt reshard` or "
                               "`average` into it was cut off: give that command again",
                               args.run)};
    }
  }
  const int64_t last = mesh.dp == 0 && stored.ok() ? std::atoll(stored.value().c_str()) : before;
  const int64_t world = args.nproc > 0 ? args.nproc : std::max(before, last);
  if (world != before) mesh.dp = 0;
  const std::vector<dsl::Diagnostic> problems = dsl::check_recipe(loaded.recipe, world);
  if (!problems.empty()) {
    std::fputs(dsl::to_text(problems).c_str(), stderr);
    return kRefused;
  }
  loaded.canonical_json = dsl::encode_recipe(loaded.recipe);
  loaded.hash_hex = dsl::recipe_hash(loaded.canonical_json);
  return run_agent(loaded, args.run, world, args);
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
