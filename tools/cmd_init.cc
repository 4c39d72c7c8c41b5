// cairn init [DIR]: a recipe to start from and what an editor needs to check and complete it.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <vector>

#include "converters/folder_kinds.h"
#include "converters/hf_folder.h"
#include "converters/import.h"
#include "dsl/dsl.h"
#include "dsl/recipe_lua.h"
#include "runtime/core/new_file.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

struct InitArgs {
  std::string folder = ".";
  bool force = false;
  std::string from;  // a Hugging Face folder
};

constexpr const char* kRecipe =
    R"lua(-- A small GPT on bytes. Look: `cairn plan train.lua`; run: `cairn train train.lua`.
-- Every field with its default: `cairn help`, `cairn help model`, `cairn explain train.lua optimizer`.
local T = require "cairn"

return T.recipe {
  name = "first",
  seed = 1337,
  stop = T.steps(500),

  model = T.gpt { layers = 4, width = 128, heads = 4, context = 128, vocab = 256 },

  -- Made by: cairn data tokenize TEXT... --out data/text
  tokenizer = T.bytes,
  data = T.megatron { prefix = "data/text", split = { 95, 5 } },

  batch = { samples = 16, micro = 4 },
  optimizer = T.adamw {
    peak_lr = 1e-3,
    lr = T.schedule { T.warmup { over = T.steps(50) }, T.cosine { to = T.ref "optimizer.peak_lr" * 0.1 } },
    weight_decay = 0.1,
    clip = 1.0,
  },

  checkpoint = T.checkpoint { save = { T.every { steps = 100 } }, keep = { T.last(2) } },
}
)lua";

constexpr const char* kLuaRc = R"json({
  "runtime": { "version": "Lua 5.4" },
  "workspace": { "library": ["types"], "checkThirdParty": false }
}
)json";

constexpr const char* kLuacheckRc = R"lua(std = "lua54"
max_line_length = 120
exclude_files = { "types/" }
)lua";

struct Template {
  fs::path path;
  std::string text;
};

std::string contents(const fs::path& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

Status write_file(const Template& file) {
  std::error_code failure;
  fs::create_directories(file.path.parent_path(), failure);
  if (failure) return os_error(failure.value(), file.path.parent_path().string());
  return place_file(file.path, file.text);
}

/// How to make the data of a recipe that tunes the model of `from`.
std::string tokenize_command(const fs::path& from, const Recipe& recipe) {
  return fmt::format("cairn data tokenize TEXT... --out {} --tokenizer {} --eod", recipe.data.sources.front().path,
                     recipe.tokenizer.kind == TokenizerConfig::Kind::kNone ? "..." : from.string());
}

/// Tunes the model of a Hugging Face folder: its configuration, its weights, its tokenizer.
Result<Recipe> recipe_from(const fs::path& from) {
  RT_TRY_SET(const std::unique_ptr<convert::HfFolder> folder, convert::HfFolder::open(from));
  for (const std::string& warning : folder->warnings()) fmt::print(stderr, "cairn init: warning: {}\n", warning);
  const std::string name = (from / "").lexically_normal().parent_path().filename().string();
  Recipe out = convert::recipe_for_import(folder->model(), {.tp = 1, .pp = 1, .dp = 0}, name + "-tuned", from);
  out.init = {.path = from.string(), .weights_only = true};
  out.tokenizer = {};
  std::error_code error;
  if (fs::is_regular_file(from / "tokenizer.json", error)) {
    out.tokenizer = {TokenizerConfig::Kind::kHf, (from / "tokenizer.json").string()};
  } else if (fs::is_regular_file(from / "tokenizer.model", error)) {
    out.tokenizer = {TokenizerConfig::Kind::kSentencePiece, (from / "tokenizer.model").string()};
  } else if (const auto kind = convert::foreign_tokenizer(from)) {
    fmt::print(stderr, "cairn init: warning: {}\n", *kind);
  }
  out.stop = {.unit = Span::Unit::kSteps, .value = 500};
  out.data.sources = {{.name = "text", .path = "data/text", .split = {95, 5}}};
  out.batch = {.samples = 16, .micro = 1};
  if (folder->dtype() == DType::kBf16 || folder->dtype() == DType::kF16) out.precision = Precision::kBf16;
  return out;
}

Result<int> init(const InitArgs& args) {
  const fs::path folder = args.folder;
  std::string text = kRecipe, first = "cairn data tokenize TEXT... --out data/text";
  if (!args.from.empty()) {
    RT_TRY_SET(const Recipe recipe, recipe_from(args.from));
    first = tokenize_command(args.from, recipe);
    text = fmt::format(
        "-- Tunes the model of {}: all of its configuration that is no default, and its weights.\n"
        "-- Data: {}\n"
        "-- Every field with its default: `cairn help`, `cairn explain train.lua optimizer`.\n{}",
        args.from, first, dsl::recipe_lua(recipe));
  }
  const std::vector<Template> files = {{folder / "train.lua", text},
                                       {folder / ".luarc.json", kLuaRc},
                                       {folder / ".luacheckrc", kLuacheckRc},
                                       {folder / "types" / "cairn.lua", dsl::editor_types()}};
  // All or nothing: what a person has changed is found before the first file is written. The types are ours.
  std::string changed;
  for (const Template& file : files) {
    const bool ours = file.path.parent_path().filename() == "types";
    std::error_code ignored;
    if (!ours && !args.force && fs::exists(file.path, ignored) && contents(file.path) != file.text) {
      changed += (changed.empty() ? "" : ", ") + file.path.string();
    }
  }
  if (!changed.empty()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: there already, and different; nothing was written. --force replaces it", changed)};
  }
  for (const Template& file : files) {
    RT_TRY(write_file(file));
    fmt::print("wrote {}\n", file.path.lexically_normal().string());
  }
  const std::string recipe = (folder / "train.lua").lexically_normal().string();
  fmt::print("next:  {}\n       cairn check {}\n       cairn plan {}\n", first, recipe, recipe);
  return 0;
}

}  // namespace

void add_init(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("init", "write a first recipe, and the files by which an editor completes and checks recipes");
  const auto args = std::make_shared<InitArgs>();
  command->add_option("DIR", args->folder, "folder to write to (default: the current one)");
  command->add_option("--from", args->from, "a Hugging Face folder: the recipe tunes its model, from its weights")
      ->type_name("HF_DIR");
  command->add_flag("--force", args->force, "replace files that differ");
  command->footer(
      "Exit codes: 0 done, 2 a file that differs is there (--force replaces it) or the model of --from is not known, "
      "74 the "
      "folder cannot be written.\n"
      "Examples:\n"
      "  cairn init\n"
      "  cairn init mine --force\n"
      "  cairn init tune --from models/llama");
  command->callback([args, &session] { session.action = [args] { return init(*args); }; });
}

}  // namespace cairn::tools
