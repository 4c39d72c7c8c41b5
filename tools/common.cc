// What several subcommands share: the recipe's options, numbers for people, colour.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "dsl/dsl.h"
#include "runtime/data/dataset.h"
#include "runtime/json/json.h"
#include "tools/commands.h"
#include "tools/number_option.h"

namespace cairn::tools {
void add_recipe_options(CLI::App& command, RecipeArgs& args, int64_t* world) {
  command.add_option("RECIPE", args.path, "the recipe, a .lua file")->required();
  command
      .add_option("--set", args.sets,
                  "FIELD=VALUE after the recipe is built; FIELD- goes back to the default; repeatable")
      ->type_name("FIELD=VALUE")
      ->expected(1)
      ->take_all();
  command.add_option("--param", args.params, "NAME=VALUE of a parameter that the recipe declares; repeatable")
      ->type_name("NAME=VALUE")
      ->expected(1)
      ->take_all();
  command.add_option("--with", args.with_files, "a .lua file whose table is merged over the recipe; repeatable")
      ->type_name("FILE")
      ->expected(1)
      ->take_all();
  if (world != nullptr) {
    command.add_option("--world", *world, "number of ranks")
        ->type_name("N")
        ->transform(whole_number(1, int64_t{1} << 24));
  }
}

void add_json_flag(CLI::App& command, Session& session) {
  command.add_flag("--json", session.json, "for programs: one JSON object on stdout");
}

void print_json(const nlohmann::json& value) { fmt::print("{}\n", json_text(value, 2)); }

StdoutToStderr::StdoutToStderr() {
  std::fflush(stdout);
  stdout_ = ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
  if (stdout_ >= 0) ::dup2(STDERR_FILENO, STDOUT_FILENO);
}

StdoutToStderr::~StdoutToStderr() {
  if (stdout_ < 0) return;
  std::fflush(stdout);
  ::dup2(stdout_, STDOUT_FILENO);
  ::close(stdout_);
}

dsl::LoadOptions load_options(const RecipeArgs& args, int64_t world) {
  return {.sets = args.sets,
          .params = args.params,
          .with_files = args.with_files,
          .world = world,
          .epoch_samples = [](const Recipe& recipe) {
            return data::epoch_samples(recipe.data, recipe.model.vocab, recipe.model.context);
          }};
}

Result<int> load_or_tell(const RecipeArgs& args, int64_t world, bool json, dsl::LoadedRecipe* loaded) {
  dsl::LoadResult result = dsl::load_recipe(args.path, load_options(args, world));
  if (result.ok()) {
    *loaded = std::move(result.loaded);
    return 0;
  }
  std::fputs(dsl::to_text(result.diagnostics).c_str(), stderr);
  if (json) {
    nlohmann::json list = nlohmann::json::array();
    for (const dsl::Diagnostic& diagnostic : result.diagnostics) list.push_back(dsl::to_json(diagnostic));
    print_json(nlohmann::json{{"ok", false}, {"diagnostics", std::move(list)}});
  }
  return kRefused;
}

bool is_terminal(int fd) { return isatty(fd) == 1; }

Palette palette_for(int fd) {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  if (!is_terminal(fd) || (no_color != nullptr && *no_color != '\0') || term == nullptr ||
      std::string_view(term) == "dumb") {
    return {};
  }
  return {.bold = "\033[1m", .dim = "\033[2m", .red = "\033[31m", .green = "\033[32m", .reset = "\033[0m"};
}

}  // namespace cairn::tools
