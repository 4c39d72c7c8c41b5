// cairn check RECIPE: every mistake in a recipe, and what a start of it would refuse (start_check.h).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "dsl/dsl.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"
#include "runtime/plan/device_choice.h"
#include "runtime/plan/plan.h"
#include "tools/commands.h"
#include "tools/device_option.h"
#include "tools/init_options.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/start.h"
#include "tools/start_check.h"

namespace cairn::tools {
namespace {

struct CheckArgs {
  RecipeArgs recipe;
  int64_t world = 0;
  std::string run;
  std::vector<std::string> accept;
  bool recipe_only = false;
};

/// RECIPE, or with --run alone the recipe that the run goes on with. As load_or_tell.
Result<int> load(const CheckArgs& args, bool json, dsl::LoadedRecipe* loaded) {
  if (!args.recipe.path.empty()) return load_or_tell(args.recipe, args.world, json, loaded);
  if (args.run.empty()) return Error{ErrorCode::kInvalidInput, "RECIPE is required, or --run DIR for that of a run"};
  RT_TRY_SET(const std::string stored, recipe_of_run(args.run));
  RT_TRY_SET(loaded->recipe, dsl::decode_recipe(stored).with(args.run));
  loaded->canonical_json = dsl::encode_recipe(loaded->recipe);
  loaded->hash_hex = dsl::recipe_hash(loaded->canonical_json);
  return 0;
}

/// What a start would do in the run folder, if one is named that a start could take, and its data can be opened; else
/// check_start says what is in the way.
Result<std::optional<RunStart>> examine_run(const CheckArgs& args, const dsl::LoadedRecipe& loaded, int64_t world) {
  std::optional<RunStart> out;
  if (args.run.empty()) return out;
  RT_TRY(check_accepted_names(args.accept, loaded.recipe));
  const Result<RunFolder> folder = RunFolder::hold(args.run, loaded.recipe.name);
  HubPending pending;
  const Result<InitConfig> init = effective_init(loaded.recipe.init, {}, args.run, nullptr, &pending);
  if (!folder.ok() || !init.ok()) return out;
  Result<RunStart> start = examine_start(
      folder.value(), {.loaded = loaded, .init = init.value(), .world = world, .accept = args.accept, .verify = true});
  if (start.ok()) out = std::move(start).value();
  return out;
}

Result<int> check(const CheckArgs& args, bool json) {
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(const int refused, load(args, json, &loaded));
  if (refused != 0) return refused;
  const std::string name = args.recipe.path.empty() ? args.run : args.recipe.path;
  int64_t world = args.world > 0 ? args.world : wanted_world(loaded.recipe.mesh);
  if (args.world == 0 && args.recipe.path.empty() && loaded.recipe.mesh.dp == 0) {  // as many as there last were
    const Result<std::string> last = read_text_file(std::filesystem::path(args.run) / "world");
    if (last.ok()) world = std::max<int64_t>(world, std::atoll(last.value().c_str()));
  }
  const int64_t parameters = count_parameters(loaded.recipe.model);
  nlohmann::json out{{"ok", true},
                     {"diagnostics", nlohmann::json::array()},
                     {"name", loaded.recipe.name},
                     {"parameters", parameters},
                     {"hash", loaded.hash_hex},
                     {"recipe", json_or_nothing(loaded.canonical_json)}};
  StartReport report;
  std::vector<std::string> lines;  // what a start of the run would do
  Status allowed;
  if (!args.recipe_only || args.world > 0) {
    const DeviceChoice device = likely_device(loaded.recipe.device);
    Recipe recipe = loaded.recipe;
    settle_device(recipe, device);
    Result<Plan> plan = make_plan(recipe, world);
    if (!plan.ok()) return std::move(plan).error().with(name);
    if (!args.recipe_only) {
      std::optional<std::string> goes_on_from;
      std::string sampler;
      RT_TRY_SET(std::vector<dsl::RunSegment> segments, dsl::segments_ahead(loaded.recipe));
      RT_TRY_SET(std::optional<RunStart> start, examine_run(args, loaded, world));
      if (start) {
        segments = start->verdict.segment.course;
        sampler = start->verdict.state.position.sampler;
        lines = start->verdict.lines(world);
        allowed = start->verdict.check(start->request);
        out["start"] = start->verdict.json();
        goes_on_from = start->checkpoint();
        recipe = start->verdict.segment.recipe;
        settle_device(recipe, device);
        RT_TRY_SET(plan, make_plan(recipe, world, start->verdict.segment.past));
      }
      for (dsl::RunSegment& segment : segments) settle_device(segment.recipe, device);
      RT_TRY_SET(const Course course, make_course(std::move(segments), world));
      report = check_start({.loaded = loaded,
                            .plan = plan.value(),
                            .course = course,
                            .sampler = sampler,
                            .init = {},
                            .run = args.run.empty() ? std::filesystem::path("runs") / loaded.recipe.name
                                                    : std::filesystem::path(args.run),
                            .ask_run = !args.run.empty(),
                            .goes_on_from = goes_on_from});
      out.update(start_json(report, loaded));
      out["world"] = world;
    }
  }
  if (!allowed.ok()) {
    out["ok"] = false;
    out["refused"] = allowed.error().message;
  }
  if (json) print_json(out);
  if (!allowed.ok()) {
    for (const std::string& line : lines) fmt::print(stderr, "{}\n", printable(line));
    fmt::print(stderr, "{}\n", printable(allowed.error().message, true));
    if (report.ok()) return kRefused;
  }
  if (!report.ok()) {
    std::fputs(start_text(report, loaded).c_str(), stderr);
    return kRefused;
  }
  if (json) return 0;
  fmt::print("{}: fine. {}, {} parameters, recipe hash {}\n", name, loaded.recipe.name,
             format_count(static_cast<double>(parameters)), loaded.hash_hex);
  for (const std::string& line : lines) fmt::print("  {}\n", printable(line));
  for (const std::string& line : data_lines(report.data)) fmt::print("  {}\n", line);
  for (const std::string& fact : report.facts) fmt::print("  {}\n", fact);
  std::fputs(start_text(report, loaded).c_str(), stdout);
  if (args.world == 0)
    fmt::print("  {}--world N checks it against another number\n",
               args.recipe_only ? "" : fmt::format("checked for {}; ", count_text(world, "rank")));
  return 0;
}

}  // namespace

void add_check(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand(
      "check", "report every mistake in a recipe, and all that a start on this machine would refuse; starts nothing");
  const auto args = std::make_shared<CheckArgs>();
  add_recipe_options(*command, args->recipe, &args->world);
  command->get_option("RECIPE")->required(false);
  command
      ->add_option(
          "--run", args->run,
          "also check that a run can start or resume in this folder; without RECIPE, with the recipe of the run")
      ->type_name("DIR");
  command->add_option("--accept", args->accept, "with --run: as `cairn train` takes it; repeatable")
      ->type_name("FIELD")
      ->expected(1)
      ->take_all();
  command->add_flag("--recipe-only", args->recipe_only,
                    "the recipe's words alone: no data, memory or disk of this machine is looked at");
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 a start would be taken, 2 it would be refused: each reason is reported. Nothing is written.\n"
      "Examples:\n  cairn check recipes/mine.lua --world 8\n  cairn check recipes/mine.lua --run runs/mine\n"
      "  cairn check recipes/mine.lua --recipe-only    # where the data is not");
  command->callback([args, &session] { session.action = [args, &session] { return check(*args, session.json); }; });
}

}  // namespace cairn::tools
