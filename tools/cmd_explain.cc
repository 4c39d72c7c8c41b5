// cairn explain RECIPE FIELD: the value of a field, where it came from, and what it is for.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "dsl/dsl.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

struct ExplainArgs {
  RecipeArgs recipe;
  int64_t world = 0;
  std::string field;
};

bool is_within(std::string_view path, std::string_view field) {
  return path.substr(0, field.size()) == field &&
         (path.size() == field.size() || path[field.size()] == '.' || path[field.size()] == '[');
}

Result<int> explain(const ExplainArgs& args, bool json) {
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(const int refused, load_or_tell(args.recipe, args.world, json, &loaded));
  if (refused != 0) return refused;
  RT_TRY_SET(const std::string text, dsl::explain_text(loaded, args.field));
  if (!json) {
    fmt::print("{}{}", text, text.empty() || text.back() != '\n' ? "\n" : "");
    return 0;
  }
  nlohmann::json fields = nlohmann::json::array();
  for (const dsl::Origin& origin : loaded.origins) {
    if (!is_within(origin.path, args.field)) continue;
    nlohmann::json field = {{"path", origin.path}, {"value", origin.value}, {"set_by", origin.set_by}};
    if (!origin.file.empty()) {
      field["file"] = origin.file;
      field["line"] = origin.line;
    }
    fields.push_back(std::move(field));
  }
  print_json(nlohmann::json{{"fields", std::move(fields)}});
  return 0;
}

}  // namespace

void add_explain(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("explain", "value, type, default and origin of one field of a recipe");
  const auto args = std::make_shared<ExplainArgs>();
  add_recipe_options(*command, args->recipe, &args->world);
  command->add_option("FIELD", args->field, "such as optimizer.lr, or a block such as mesh")->required();
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 done, 2 the recipe has a mistake, or there is no such field.\n"
      "Examples:\n"
      "  cairn explain recipes/mine.lua optimizer.lr\n"
      "  cairn explain recipes/mine.lua mesh --set mesh.tp=4 --world 8");
  command->callback([args, &session] { session.action = [args, &session] { return explain(*args, session.json); }; });
}

}  // namespace cairn::tools
