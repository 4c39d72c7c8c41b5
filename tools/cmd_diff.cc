// cairn diff A B: two resolved recipes, only what differs.
#include <fmt/format.h>
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "dsl/change_rules.h"
#include "dsl/compare.h"
#include "dsl/dsl.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

constexpr const char* kResolvedName = "recipe.resolved.json";

struct DiffArgs {
  std::string left, right;
  bool exit_code = false;
};

/// Canonical JSON of a .lua file, of a resolved .json file, or of the run folder that holds one.
Result<int> canonical_of(const std::string& path, bool json, std::string* canonical) {
  struct stat info {};
  std::string file = path;
  if (stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) file += std::string("/") + kResolvedName;
  if (file.size() > 5 && file.compare(file.size() - 5, 5, ".json") == 0) {
    std::ifstream in(file, std::ios::binary);
    std::ostringstream text;
    if (!in || !(text << in.rdbuf())) return os_error(errno == 0 ? EIO : errno, file);
    Result<Recipe> recipe = dsl::decode_recipe(text.str());
    if (!recipe.ok()) return std::move(recipe).error().with(file);
    *canonical = dsl::encode_recipe(recipe.value());
    return 0;
  }
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(const int refused, load_or_tell({.path = file}, 0, json, &loaded));
  *canonical = std::move(loaded.canonical_json);
  return refused;
}

/// Where the left side is a run, and the right one what it may go on with: what each difference means for it.
Result<std::vector<dsl::FieldChange>> field_changes(const DiffArgs& args, const std::string (&sides)[2]) {
  std::error_code unknown;
  if (!std::filesystem::is_directory(args.left, unknown)) return std::vector<dsl::FieldChange>();
  RT_TRY_SET(const Recipe left, dsl::decode_recipe(sides[0]));
  RT_TRY_SET(const Recipe right, dsl::decode_recipe(sides[1]));
  return dsl::compare_recipes(left, right);
}

Result<int> diff(const DiffArgs& args, bool json) {
  std::string sides[2];
  for (const int side : {0, 1}) {
    RT_TRY_SET(const int refused, canonical_of(side == 0 ? args.left : args.right, json, &sides[side]));
    if (refused != 0) return refused;
  }
  const Changes changes = json_changes(sides[0], sides[1]);
  RT_TRY_SET(const std::vector<dsl::FieldChange> fields, field_changes(args, sides));
  if (json) {
    nlohmann::json rules = nlohmann::json::array();
    for (const dsl::FieldChange& one : fields) {
      const dsl::ChangeRule& rule = dsl::change_rule(one.path);
      rules.push_back({{"field", one.path},
                       {"before", one.before},
                       {"after", one.after},
                       {"class", dsl::change_class_name(rule.change)},
                       {"rule", rule.says}});
    }
    nlohmann::json out{{"equal", changes.empty()}, {"changes", changes_json(changes)}};
    if (!fields.empty()) out["under_way"] = std::move(rules);
    print_json(out);
  } else {
    print_changes(changes);
    if (changes.empty()) fmt::print("no difference\n");
    if (!fields.empty())
      fmt::print("\nfor the run under way (`cairn check --run` says what its position makes of them):\n");
    for (const dsl::FieldChange& one : fields) {
      const dsl::ChangeRule& rule = dsl::change_rule(one.path);
      fmt::print("  {}: {}: {}\n", one.path, dsl::change_class_name(rule.change), rule.says);
    }
  }
  return args.exit_code && !changes.empty() ? 1 : 0;
}

}  // namespace

void add_diff(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("diff", "what differs between two recipes or runs");
  const auto args = std::make_shared<DiffArgs>();
  command->add_option("LEFT", args->left, "a recipe, a run folder, or its recipe.resolved.json")->required();
  command->add_option("RIGHT", args->right, "the other one")->required();
  command->add_flag("--exit-code", args->exit_code, "exit with 1 when they differ");
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 done, 1 they differ (with --exit-code), 2 refused.\n"
      "Examples:\n"
      "  cairn diff recipes/mine.lua recipes/other.lua\n"
      "  cairn diff runs/mine recipes/mine.lua --exit-code");
  command->callback([args, &session] { session.action = [args, &session] { return diff(*args, session.json); }; });
}

}  // namespace cairn::tools
