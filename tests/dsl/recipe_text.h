#pragma once
// Recipes written in the test itself: a folder of files that lives as long as the object, and is the working directory.

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "dsl/dsl.h"
#include "tests/support/temp_dir.h"

namespace cairn::dsl {

class RecipeFolder {
 public:
  RecipeFolder() : before_(std::filesystem::current_path()) { std::filesystem::current_path(folder_.path); }
  ~RecipeFolder() { std::filesystem::current_path(before_); }
  RecipeFolder(const RecipeFolder&) = delete;
  RecipeFolder& operator=(const RecipeFolder&) = delete;

  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = folder_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
  }

 private:
  std::filesystem::path before_;
  testing::TempDir folder_{"recipe"};
};

inline const std::string kBase = R"(local T = require "cairn"
return T.recipe {
  name = "base", seed = 7, stop = T.steps(1000),
  model = T.gpt { layers = 4, width = 64, heads = 4, context = 32, vocab = 257 },
  data = T.megatron { prefix = "data/text_document", split = { 95, 5 } },
  batch = { samples = 16, micro = 2 },
  optimizer = T.adamw {
    peak_lr = 1e-3,
    lr = T.schedule { T.warmup { over = T.steps(10) }, T.cosine { to = T.ref "optimizer.peak_lr" * 0.1 } },
  },
  checkpoint = T.checkpoint { save = { T.every { steps = 5 }, T.every { minutes = 10 } }, keep = { T.last(3) } },
}
)";

/// The recipe of `text` as main.lua, next to base.lua.
inline LoadResult load_text(const std::string& text, const LoadOptions& options = {}) {
  const RecipeFolder folder;
  folder.write("base.lua", kBase);
  folder.write("main.lua", text);
  return load_recipe("main.lua", options);
}

inline Recipe load_good(const std::string& text, const LoadOptions& options = {}) {
  LoadResult result = load_text(text, options);
  INFO(to_text(result.diagnostics));
  REQUIRE(result.ok());
  return std::move(result.loaded.recipe);
}

/// The one line of a recipe with one mistake: "main.lua:3: message".
inline std::string only_mistake(const std::string& text, const LoadOptions& options = {}) {
  const LoadResult result = load_text(text, options);
  INFO(to_text(result.diagnostics));
  REQUIRE(result.diagnostics.size() == 1);
  const std::string all = to_text(result.diagnostics);
  return all.substr(0, all.find('\n'));
}

/// `base` with changes, as Lua text.
inline std::string with(const std::string& changes) {
  return "local T = require \"cairn\"\nreturn require \"base\":with {\n" + changes + "\n}\n";
}

}  // namespace cairn::dsl
