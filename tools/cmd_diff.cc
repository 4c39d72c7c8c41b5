// cairn diff A B: two resolved recipes, only what differs.
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "dsl/dsl.h"
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

/// Leaves by their path; "optimizer.lr[1].to". A Span is one leaf.
void flatten(const nlohmann::json& value, const std::string& path, std::map<std::string, std::string>* out) {
  const bool span = value.is_object() && value.size() == 2 && value.contains("unit") && value.contains("value");
  if (span) {
    (*out)[path] = fmt::format("{} {}", value["value"].get<double>(), value["unit"].get<std::string>());
  } else if (value.is_object()) {
    for (const auto& [key, below] : value.items()) flatten(below, path.empty() ? key : path + "." + key, out);
  } else if (value.is_array() && !value.empty()) {
    for (size_t i = 0; i < value.size(); ++i) flatten(value[i], fmt::format("{}[{}]", path, i + 1), out);
  } else {
    (*out)[path] = value.dump();
  }
}

Result<int> diff(const DiffArgs& args, bool json) {
  std::map<std::string, std::string> sides[2];
  for (const int side : {0, 1}) {
    std::string canonical;
    RT_TRY_SET(const int refused, canonical_of(side == 0 ? args.left : args.right, json, &canonical));
    if (refused != 0) return refused;
    flatten(nlohmann::json::parse(canonical), "", &sides[side]);
  }
  std::map<std::string, std::pair<std::string, std::string>> changes;  // empty text: not there
  for (const auto& [path, value] : sides[0]) {
    const auto other = sides[1].find(path);
    if (other == sides[1].end() || other->second != value) {
      changes[path] = {value, other == sides[1].end() ? "" : other->second};
    }
  }
  for (const auto& [path, value] : sides[1]) {
    if (!sides[0].contains(path)) changes[path] = {"", value};
  }
  if (json) {
    nlohmann::json list = nlohmann::json::array();
    for (const auto& [path, pair] : changes) {
      nlohmann::json change = {{"path", path}};
      if (!pair.first.empty()) change["left"] = pair.first;
      if (!pair.second.empty()) change["right"] = pair.second;
      list.push_back(std::move(change));
    }
    fmt::print("{}\n", nlohmann::json{{"equal", changes.empty()}, {"changes", std::move(list)}}.dump(2));
  } else {
    const Palette color = palette_for(STDOUT_FILENO);
    for (const auto& [path, pair] : changes) {
      fmt::print("{}{}{}: {}{}{} -> {}{}{}\n", color.bold, path, color.reset, color.red,
                 pair.first.empty() ? "(none)" : pair.first, color.reset, color.green,
                 pair.second.empty() ? "(none)" : pair.second, color.reset);
    }
    if (changes.empty()) fmt::print("no difference\n");
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
  command->callback([args, &session] { session.action = [args, &session] { return diff(*args, session.json); }; });
}

}  // namespace cairn::tools
