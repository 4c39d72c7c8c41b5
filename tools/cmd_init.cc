// cairn init [DIR] [--demo]: a recipe to start from and what an editor needs to check and complete it.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
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
#include "runtime/core/make_folder.h"
#include "runtime/core/new_file.h"
#include "runtime/text/tokenizer.h"
#include "tools/commands.h"
#include "tools/launch/quote.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

struct InitArgs {
  std::string folder = ".";
  bool force = false, demo = false;
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

  -- Made by: cairn data tokenize data/sample.txt --out data/text (or by text files of your own)
  tokenizer = T.bytes,
  data = T.megatron { prefix = "data/text", split = { 95, 5 } },

  batch = { samples = 16, micro = 4 },
  optimizer = T.adamw {
    peak_lr = 1e-3,
    lr = T.schedule { T.warmup { over = T.fraction(0.1) }, T.cosine { to = T.ref "optimizer.peak_lr" * 0.1 } },
    weight_decay = 0.1,
    clip = 1.0,
  },

  checkpoint = T.checkpoint { save = { T.every { steps = 100 } }, keep = { T.last(2) } },
}
)lua";

constexpr const char* kDemoRecipe =
    R"lua(-- Learns sums in words: half a minute on one core. `cairn init` without --demo writes a larger one.
local T = require "cairn"

return T.recipe {
  name = "demo",
  seed = 1,
  stop = T.steps(1000),

  model = T.gpt { layers = 2, width = 64, heads = 2, context = 64, vocab = 256 },
  tokenizer = T.bytes,
  data = T.megatron { prefix = "data/text", split = { 95, 5 } },

  batch = { samples = 16, micro = 16 },
  optimizer = T.adamw {
    peak_lr = 3e-3,
    lr = T.schedule { T.warmup { over = T.fraction(0.1) }, T.cosine { to = T.ref "optimizer.peak_lr" * 0.1 } },
    clip = 1.0,
  },
  eval = { at = T.every { steps = 250 }, steps = 2 },

  checkpoint = T.checkpoint { save = { T.every { steps = 250 } }, keep = { T.last(2) } },
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
  bool ours = false;  // written anew each time
};

std::string contents(const fs::path& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

Status write_file(const Template& file) {
  RT_TRY(make_folder_of(file.path));
  return place_file(file.path, file.text);
}

/// Whether a file can be placed there, its folders being made.
Status check_place(const fs::path& file) {
  const auto refuse = [](const fs::path& at, std::string_view why) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: {}; nothing was written", at.string(), why)};
  };
  std::error_code failed;
  if (fs::is_directory(file, failed)) return refuse(file, "is a folder, and a file is needed");
  fs::path at = fs::absolute(file).lexically_normal().parent_path();
  while (fs::symlink_status(at, failed).type() == fs::file_type::not_found && at.has_relative_path())
    at = at.parent_path();
  if (!fs::is_directory(at, failed)) return refuse(at, "is no folder, and one is needed");
  if (::faccessat(AT_FDCWD, at.c_str(), W_OK | X_OK, AT_EACCESS) != 0) return refuse(at, std::strerror(errno));
  return {};
}

constexpr const char* kSample = "data/sample.txt";
constexpr int64_t kUsualContext = 4096, kLongContext = 8 * kUsualContext;

/// A text of which each part holds a batch of the recipe. Its length is guessed by the bytes that a token has at most.
std::string sample_text(const Recipe& recipe) {
  constexpr int64_t kBytesOfToken = 6;
  const std::string text = dsl::reference_markdown();
  if (recipe.model.context <= kUsualContext) return text;
  const int64_t batch = recipe.batch.samples * recipe.model.context + 1,
                parts = recipe.model.context > kLongContext ? 2 : 10;
  std::string out = text;
  while (std::ssize(out) < batch * parts * kBytesOfToken) out += text;
  return out;
}

/// All sums of two numbers from zero to ninety-nine in words, in an order that looks like none: a text by rule.
std::string demo_text() {
  constexpr const char* kOnes[] = {"zero",     "one",     "two",     "three",     "four",     "five",    "six",
                                   "seven",    "eight",   "nine",    "ten",       "eleven",   "twelve",  "thirteen",
                                   "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"};
  constexpr const char* kTens[] = {"twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"};
  const auto words = [&](int number) {
    std::string out;
    if (number >= 100) out = "one hundred ";
    number %= 100;
    if (number < 20) return out + kOnes[number];
    out += kTens[number / 10 - 2];
    return number % 10 == 0 ? out : out + "-" + kOnes[number % 10];
  };
  constexpr int kPairs = 10000, kStride = 7919;  // a prime that visits each pair once
  std::string out;
  for (int i = 0, pair = 0; i < kPairs; ++i, pair = (pair + kStride) % kPairs)
    out += fmt::format("{} plus {} is {}.\n", words(pair / 100), words(pair % 100), words(pair / 100 + pair % 100));
  return out;
}

/// The command that makes the data of a recipe, run in the recipe's folder.
std::string tokenize_command(const Recipe& recipe) {
  std::string out = fmt::format("cairn data tokenize {} --out {}", kSample, recipe.data.sources.front().path);
  if (recipe.tokenizer.kind == TokenizerConfig::Kind::kNone) return out + " --tokenizer TOKENIZER";
  out += " --tokenizer " + shell_word(recipe.tokenizer.path);
  return recipe.objective.document_end >= 0 ? out + " --eod" : out;
}

void warn(const std::string& text) { fmt::print(stderr, "cairn init: warning: {}\n", printable(text)); }

/// The tokenizer of a Hugging Face folder, and the token that ends a document of a model that can separate documents.
void take_tokenizer(const fs::path& from, Recipe& recipe) {
  recipe.tokenizer = {};
  std::error_code error;
  for (const auto& [file, kind] : {std::pair("tokenizer.json", TokenizerConfig::Kind::kHf),
                                   std::pair("tokenizer.model", TokenizerConfig::Kind::kSentencePiece)}) {
    if (!fs::is_regular_file(from / file, error)) continue;
    recipe.tokenizer = {kind, (from / file).string()};
    break;
  }
  if (recipe.tokenizer.kind == TokenizerConfig::Kind::kNone) {
    if (const auto kind = convert::foreign_tokenizer(from)) return warn(*kind);
    return warn(
        fmt::format("{} has no tokenizer.json and no tokenizer.model: name the model's tokenizer in the recipe "
                    "and in the command that makes the data",
                    from.string()));
  }
  const auto tokenizer = text::make_tokenizer(recipe.tokenizer);
  if (!tokenizer.ok()) return warn(tokenizer.error().message);
  const int64_t end = tokenizer.value()->eod();
  const bool separable =
      recipe.objective.kind == ObjectiveConfig::Kind::kNextToken && recipe.model.mask == Mask::kCausal;
  if (end >= 0 && end < recipe.model.vocab && separable) recipe.objective.document_end = end;
}

/// Tunes the model of a Hugging Face folder: its configuration, its weights, its tokenizer.
Result<Recipe> recipe_from(const fs::path& from) {
  RT_TRY_SET(const std::unique_ptr<convert::HfFolder> folder, convert::HfFolder::open(from));
  for (const std::string& warning : folder->warnings()) warn(warning);
  const std::string name = (from / "").lexically_normal().parent_path().filename().string();
  Recipe out = convert::recipe_for_import(folder->model(), {.tp = 1, .pp = 1, .dp = 0}, name + "-tuned", from);
  out.init = {.path = from.string(), .weights_only = true};
  take_tokenizer(from, out);
  out.stop = {.unit = Span::Unit::kSteps, .value = 500};
  out.data.sources = {{.name = "text", .path = "data/text", .split = {90, 10}}};
  out.batch = {.samples = 8, .micro = 1};
  if (const int64_t context = out.model.context; context > kUsualContext) {
    // A step has the tokens of eight usual contexts where that many fit, in sequences that need little memory.
    constexpr int64_t kShortest = 64, kLongest = 1024;
    out.batch.samples = std::max<int64_t>(1, out.batch.samples * kUsualContext / context);
    int64_t tokens = kLongest;
    while (context % tokens != 0) --tokens;
    if (tokens >= kShortest) out.batch.tokens = tokens;
    if (context > kLongContext)
      out.data.sources[0].split = {50, 50};  // else the text would have to be ten times as long
  }
  out.optimizer.lr = {{.kind = LrStage::Kind::kWarmup, .over = {.unit = Span::Unit::kFraction, .value = 0.05}},
                      {.kind = LrStage::Kind::kCosine, .to = out.optimizer.peak_lr / 10}};
  out.eval = {.every_steps = 50, .steps = 10};
  out.checkpoint.save = {{.steps = 100}};
  out.checkpoint.keep = {{.kind = Keep::Kind::kLast, .count = 2}};
  if (folder->dtype() == DType::kBf16 || folder->dtype() == DType::kF16) out.precision = Precision::kBf16;
  return out;
}

Result<int> init(const InitArgs& args) {
  const fs::path folder = args.folder;
  std::error_code ignored;
  const bool here = folder.empty() || fs::equivalent(folder, ".", ignored);
  std::string sample = dsl::reference_markdown(), text = kRecipe,
              first = fmt::format("cairn data tokenize {} --out data/text", kSample);
  if (args.demo) {
    sample = demo_text();
    text = kDemoRecipe;
  }
  if (!args.from.empty()) {
    // The recipe is used in its own folder, where a path from here may lead elsewhere.
    RT_TRY_SET(const Recipe recipe,
               recipe_from(here ? fs::path(args.from) : fs::absolute(args.from).lexically_normal()));
    first = tokenize_command(recipe);
    sample = sample_text(recipe);
    text = fmt::format(
        "-- Tunes the model of {}: all of its configuration that is no default, and its weights.\n"
        "-- Data: {}\n"
        "-- Every field with its default: `cairn help`, `cairn explain train.lua optimizer`.\n{}",
        printable(args.from), printable(first), dsl::recipe_lua(recipe));
  }
  std::vector<Template> files = {{folder / "train.lua", text},
                                 {folder / ".luarc.json", kLuaRc},
                                 {folder / ".luacheckrc", kLuacheckRc},
                                 {folder / "types" / "cairn.lua", dsl::editor_types(), true}};
  if (!fs::exists(folder / kSample, ignored)) files.push_back({folder / kSample, sample});
  // All or nothing: what a person has changed is found before the first file is written.
  std::string changed;
  for (const Template& file : files) {
    if (!file.ours && !args.force && fs::exists(file.path, ignored) && contents(file.path) != file.text) {
      changed += (changed.empty() ? "" : ", ") + file.path.string();
    }
  }
  if (!changed.empty()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: there already, and different; nothing was written. --force replaces it", changed)};
  }
  for (const Template& file : files) RT_TRY(check_place(file.path));
  for (const Template& file : files) {
    RT_TRY(write_file(file));
    fmt::print("wrote {}\n", file.path.lexically_normal().string());
  }
  std::vector<std::string> next = {first, "cairn check train.lua", "cairn plan train.lua", "cairn train train.lua"};
  if (args.demo) {
    next = {first, "cairn train train.lua --nproc 1 --threads 1 --run runs/demo",
            "cairn generate runs/demo --prompt 'seven plus two is' --tokens 20", "cairn report runs/demo"};
  }
  if (!here) next.insert(next.begin(), "cd " + shell_word(folder.lexically_normal().string()));
  fmt::print("next:  {}\n{} is a text to try with; name text files of your own instead\n", fmt::join(next, "\n       "),
             kSample);
  return 0;
}

}  // namespace

void add_init(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("init", "write a first recipe, a text to try it with, and files by which an editor checks it");
  const auto args = std::make_shared<InitArgs>();
  command->add_option("DIR", args->folder, "folder to write to (default: the current one)");
  command->add_option("--from", args->from, "a Hugging Face folder: the recipe tunes its model, from its weights")
      ->type_name("HF_DIR");
  command->add_flag("--demo", args->demo, "a tiny model and a text of sums: trained in less than a minute")
      ->excludes("--from");
  command->add_flag("--force", args->force, "replace files that differ");
  command->footer(
      "Exit codes: 0 done, 2 a file that differs is there (--force replaces it) or the model of --from is not known, "
      "74 the "
      "folder cannot be written.\n"
      "Examples:\n"
      "  cairn init\n"
      "  cairn init mine --force\n"
      "  cairn init demo --demo\n"
      "  cairn init tune --from models/llama");
  command->callback([args, &session] { session.action = [args] { return init(*args); }; });
}

}  // namespace cairn::tools
