// cairn init [DIR]: a recipe to start from and what an editor needs to check and complete it.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <vector>

#include "dsl/dsl.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

struct InitArgs {
  std::string folder = ".";
  bool force = false;
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

struct NewFile {
  fs::path path;
  std::string text;
};

std::string contents(const fs::path& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

Status write_file(const NewFile& file) {
  std::error_code failure;
  fs::create_directories(file.path.parent_path(), failure);
  if (failure) return os_error(failure.value(), file.path.parent_path().string());
  std::ofstream out(file.path, std::ios::binary | std::ios::trunc);
  out << file.text;
  out.close();
  if (!out) return os_error(errno == 0 ? EIO : errno, file.path.string());
  return {};
}

Result<int> init(const InitArgs& args) {
  const fs::path folder = args.folder;
  const std::vector<NewFile> files = {{folder / "train.lua", kRecipe},
                                      {folder / ".luarc.json", kLuaRc},
                                      {folder / ".luacheckrc", kLuacheckRc},
                                      {folder / "types" / "cairn.lua", dsl::editor_types()}};
  // All or nothing: what a person has changed is found before the first file is written. The types are ours.
  std::string changed;
  for (const NewFile& file : files) {
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
  for (const NewFile& file : files) {
    RT_TRY(write_file(file));
    fmt::print("wrote {}\n", file.path.lexically_normal().string());
  }
  const std::string recipe = (folder / "train.lua").lexically_normal().string();
  fmt::print("next:  cairn data tokenize TEXT... --out data/text\n       cairn check {}\n       cairn plan {}\n",
             recipe, recipe);
  return 0;
}

}  // namespace

void add_init(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("init", "write a first recipe, and the files by which an editor completes and checks recipes");
  const auto args = std::make_shared<InitArgs>();
  command->add_option("DIR", args->folder, "folder to write to (default: the current one)");
  command->add_flag("--force", args->force, "replace files that differ");
  command->footer(
      "Exit codes: 0 done, 2 a file that differs is there (--force replaces it), 74 the folder cannot be written.\n"
      "Examples:\n"
      "  cairn init\n"
      "  cairn init mine --force");
  command->callback([args, &session] { session.action = [args] { return init(*args); }; });
}

}  // namespace cairn::tools
