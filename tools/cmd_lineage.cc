// cairn lineage RUN: the recipes that a run was trained with, and from which step each counts, and a recipe that does
// it all again.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "dsl/recipe_lua.h"
#include "runtime/json/json.h"
#include "tools/commands.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/lineage.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

struct LineageArgs {
  std::string run;
  bool recipe = false;
};

void print_table(const Lineage& lineage) {
  const std::vector<LineageEntry> segments = lineage.segments();
  fmt::print("{:>4}  {:>10}  {:>12}  {:<9}  {:<16}  {}\n", "", "from step", "sample", "why", "recipe", "");
  for (const LineageEntry& entry : lineage.entries()) {
    bool stays = false;
    for (const LineageEntry& segment : segments) stays = stays || segment.n == entry.n;
    fmt::print("{:>4}  {:>10}  {:>12}  {:<9}  {:<16}  {}\n", entry.n, entry.at.step, entry.at.samples, entry.cause,
               entry.recipe.substr(0, 16), stays ? entry.from : "gone back behind");
    for (const json& change : entry.changes) {
      if (json_string(change, "class") == "exact") continue;
      fmt::print("      {} {} -> {}{}\n", printable(json_string(change, "field")),
                 printable(json_string(change, "before")), printable(json_string(change, "after")),
                 json_string(change, "class") == "only with --accept" ? "  (accepted)" : "");
    }
  }
}

Result<int> show(const LineageArgs& args, bool as_json) {
  RT_TRY_SET(const Lineage lineage, Lineage::read(args.run));
  if (lineage.entries().empty() && is_gone(std::filesystem::path(args.run) / "run.json")) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: no run folder", args.run)};
  }
  if (args.recipe) {
    RT_TRY_SET(const Recipe recipe, replay_recipe(args.run, lineage));
    fmt::print("{}", dsl::recipe_lua(recipe));
    return 0;
  }
  const int code = lineage.problem().empty() ? 0 : Error{ErrorCode::kCorrupt, ""}.exit_code();
  if (as_json) {
    json lines = json::array();
    for (const LineageEntry& entry : lineage.entries()) {
      json line = json_or_nothing(line_of(entry));
      line["hash"] = entry.hash;
      lines.push_back(std::move(line));
    }
    print_json({{"lineage", std::move(lines)}, {"problem", lineage.problem()}});
    return code;
  }
  if (!lineage.entries().empty()) {
    print_table(lineage);
  } else if (code == 0) {
    fmt::print("{} has no lineage.jsonl: a run of an older build, or one that has not started yet\n", args.run);
  }
  if (code == 0) return 0;
  std::fflush(stdout);
  fmt::print(stderr, "{}\n", printable(lineage.problem()));
  return code;
}

}  // namespace

void add_lineage(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("lineage", "the recipes that a run was trained with, and from which step each counts");
  const auto args = std::make_shared<LineageArgs>();
  command->add_option("RUN", args->run, "the run folder")->required();
  command->add_flag("--recipe", args->recipe, "print one recipe that repeats the complete run from step 0");
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 done, 2 not a run folder, 65 a damaged lineage.\n"
      "Examples:\n"
      "  cairn lineage runs/mine\n"
      "  cairn lineage runs/mine --recipe > again.lua");
  command->callback([args, &session] { session.action = [args, &session] { return show(*args, session.json); }; });
}

}  // namespace cairn::tools
