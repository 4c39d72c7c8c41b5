// cairn check RECIPE: every mistake in a recipe, before anything starts.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "dsl/dsl.h"
#include "runtime/plan/plan.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

struct CheckArgs {
  RecipeArgs recipe;
  int64_t world = 0;
};

Result<int> check(const CheckArgs& args, bool json) {
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(const int refused, load_or_tell(args.recipe, args.world, json, &loaded));
  if (refused != 0) return refused;
  if (args.world > 0) {
    Result<Plan> plan = make_plan(loaded.recipe, args.world);
    if (!plan.ok()) return std::move(plan).error().with(args.recipe.path);
  }
  const int64_t parameters = count_parameters(loaded.recipe.model);
  if (json) {
    print_json(nlohmann::json{{"ok", true},
                              {"diagnostics", nlohmann::json::array()},
                              {"name", loaded.recipe.name},
                              {"parameters", parameters},
                              {"hash", loaded.hash_hex},
                              {"recipe", nlohmann::json::parse(loaded.canonical_json)}});
    return 0;
  }
  fmt::print("{}: fine. {}, {} parameters, recipe hash {}\n", args.recipe.path, loaded.recipe.name,
             format_count(static_cast<double>(parameters)), loaded.hash_hex);
  if (args.world == 0) fmt::print("  say --world N to check it against a number of ranks too\n");
  return 0;
}

}  // namespace

void add_check(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("check", "read a recipe and tell every mistake in it; starts nothing");
  const auto args = std::make_shared<CheckArgs>();
  add_recipe_options(*command, args->recipe, &args->world);
  add_json_flag(*command, session);
  command->callback([args, &session] { session.action = [args, &session] { return check(*args, session.json); }; });
}

}  // namespace cairn::tools
