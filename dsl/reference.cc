// What the schema says to people: `cairn help`, `cairn explain`, docs/recipe.md and the editor's type file.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "dsl/change_rules.h"
#include "dsl/dsl.h"
#include "dsl/schema.h"

namespace cairn::dsl {
namespace {

struct Member {
  const char* name;
  const char* use;  // as written
  const char* doc;
  const char* type;  // LuaLS
};

// What is no block: functions and constants of T.
const Member kFunctions[] = {
    {"steps", "T.steps(2000)", "A length in optimizer steps.", "fun(n: number|string): cairn.Span"},
    {"samples", "T.samples(220e6)", "A length in samples (sequences).", "fun(n: number|string): cairn.Span"},
    {"tokens", "T.tokens \"450B\"", "A length in tokens; K, M, B and T are 10^3 to 10^12.",
     "fun(n: number|string): cairn.Span"},
    {"epochs", "T.epochs(3)",
     "A number of passes over the data, for `stop` and other lengths: becomes samples when the recipe is read. The "
     "data "
     "are those before any stage, and of a single source.",
     "fun(n: number): cairn.Span"},
    {"fraction", "T.fraction(0.01)", "A part of the recipe's `stop`.", "fun(x: number): cairn.Span"},
    {"ref", "T.ref \"optimizer.peak_lr\" * 0.1",
     "The value of another field, resolved after all overrides. Takes + - * / // % ^ with numbers and other refs.",
     "fun(field: string): cairn.Ref"},
    {"params", "local p = T.params { root = T.param { \"data\", doc = \"where the data is\" } }",
     "Declares what `--param root=/lustre` may set before the recipe is built; returns the values.",
     "fun(declared: table<string, cairn.Param>): table<string, any>"},
    {"param", "T.param { 1e-4, min = 0, max = 1, one_of = {...}, doc = \"...\" }",
     "A parameter: its default, and what it may be.", "fun(spec: table): cairn.Param"},
    {"replace", "mesh = T.replace { tp = 2 }", "In :with, puts a block in place of the old one instead of merging.",
     "fun(block: table): any"},
    {"unset", "eval = T.unset", "In :with, back to the default.", "any"},
    {"map", "T.map(list, function(element, index) ... end)", "A new list of what the function returns.",
     "fun(list: any[], f: fun(element: any, index: integer): any): any[]"},
    {"read_json", "T.read_json \"data/ratios.json\"",
     "The contents of a JSON file below the recipe's folder or its parent; kept with the run.",
     "fun(path: string): any"},
};

std::string default_text(const Field& field) {
  if (field.required) return "required";
  if (!field.rule.empty()) return field.rule;
  if (field.form == Form::kTokenizer) return "none";
  if (field.form == Form::kBetas || field.type == Type::kBlock) return "";
  std::string out = lua_text(field, field.fallback);
  if (field.llama) out += "; T.llama: " + lua_text(field, *field.llama);
  return out;
}

std::string constructor_list(const std::vector<const Block*>& blocks) {
  std::string out;
  for (const Block* block : blocks)
    for (const std::string& name : block->constructors) out += (out.empty() ? "T." : ", T.") + name;
  return out;
}

std::string field_help(const std::string& path, const Field& field) {
  std::string out = fmt::format("{}: {}\n", path, field.doc);
  if (!field.more.empty()) out += fmt::format("  {}\n", field.more);
  out += fmt::format("  type     {}\n", expected(field));
  if (const std::string text = default_text(field); !text.empty()) out += fmt::format("  default  {}\n", text);
  if (!field.example.empty()) out += fmt::format("  example  {} = {}\n", field.name, field.example);
  if (const std::string names = constructor_list(field.accepts); !names.empty())
    out += fmt::format("  see      cairn help {}\n", names);
  return out;
}

void list_fields(std::string& out, const std::string& prefix, const Block& block) {
  size_t width = 0;
  for (const Field& field : block.fields) width = std::max(width, prefix.size() + field.name.size());
  for (const Field& field : block.fields) {
    const std::string value = default_text(field);
    out +=
        fmt::format("  {:<{}}  {}{}\n", prefix + field.name, width, field.doc, value.empty() ? "" : " (" + value + ")");
  }
}

std::string block_help(const std::string& title, const std::string& prefix, const Block& block) {
  std::string out = fmt::format("{}: {}\n", title, block.doc);
  list_fields(out, prefix, block);
  return out;
}

Error unknown(std::string_view field) {
  std::vector<std::string> names = field_paths();
  for (const std::string& name : constructor_names()) names.push_back("T." + name);
  for (const Block* root : cluster_blocks()) names.push_back("T." + root->name);
  for (const auto& [name, block] : constructors())
    for (const Field& part : block->fields) names.push_back(name + "." + part.name);
  if (const std::optional<Meaning> meaning = meaning_of(field))
    return Error{ErrorCode::kInvalidInput, fmt::format("no field \"{}\"; here it is {}", field, meaning->text())};
  std::vector<std::string> near;
  if (const std::string best = nearest(field, names); !best.empty()) near.push_back(best);
  const std::string_view last = field.substr(field.rfind('.') == std::string_view::npos ? 0 : field.rfind('.') + 1);
  for (const std::string& path : names) {
    const std::string tail = path.substr(path.rfind('.') == std::string::npos ? 0 : path.rfind('.') + 1);
    if (near.size() < 4 && (tail == last || nearest(last, {tail}) == tail) &&
        std::find(near.begin(), near.end(), path) == near.end())
      near.push_back(path);
  }
  if (near.empty()) {
    if (const std::optional<Meaning> meaning = meaning_near(field))
      return Error{ErrorCode::kInvalidInput, fmt::format("no field \"{}\"; the nearest is {}", field, meaning->text())};
  }
  std::string list;
  for (const std::string& name : near) list += (list.empty() ? "; did you mean " : ", ") + name;
  return Error{ErrorCode::kInvalidInput, fmt::format("no field \"{}\"{}", field, list.empty() ? "" : list + "?")};
}

std::string escaped(std::string text) {
  for (size_t at = text.find('|'); at != std::string::npos; at = text.find('|', at + 2)) text.insert(at, "\\");
  return text;
}

void field_table(std::string& out, const Block& block) {
  if (block.fields.empty()) return;
  out += "| field | value | default | meaning |\n|---|---|---|---|\n";
  for (const Field& field : block.fields) {
    std::string text = field.doc;
    if (!text.empty()) text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
    text += ".";
    if (!field.more.empty()) text += " " + field.more;
    const std::string value = default_text(field);
    out += fmt::format("| `{}` | {} | {} | {} |\n", field.name, escaped(expected(field)),
                       value.empty()                           ? ""
                       : field.rule.empty() && !field.required ? "`" + escaped(value) + "`"
                                                               : escaped(value),
                       escaped(text));
  }
  out += "\n";
}

std::string class_name(const Block& block) {
  std::string out = "cairn.";
  bool upper = true;
  for (const char c : block.name) {
    if (c == '_') {
      upper = true;
      continue;
    }
    out += upper ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    upper = false;
  }
  return out;
}

std::string lua_type(const Field& field) {
  const auto constructed = [&] {
    std::string out;
    for (const Block* block : field.accepts) out += (out.empty() ? "" : "|") + class_name(*block);
    return out;
  };
  switch (field.form) {
    case Form::kEveryStep:
    case Form::kLogSteps:
    case Form::kTokenizer:
    case Form::kData:
      return constructed();
    case Form::kEveryList:
    case Form::kSegments:
      return constructed() + "[]";
    case Form::kPlaces:
    case Form::kKeep:
      if (field.accepts.size() == 1) return constructed() + "[]";
      return "(" + constructed() + ")[]";
    case Form::kStages:
      return constructed();
    case Form::kBetas:
      return "number[]";
    case Form::kVocab:
      return "integer|cairn.Vocab|cairn.Ref";
    case Form::kPlain:
    case Form::kPositions:
      break;
  }
  const std::string with_unit = field.unit == Unit::kNone ? "" : "|string";
  switch (field.type) {
    case Type::kInt:
    case Type::kSeed:
      return "integer" + with_unit + "|cairn.Ref";
    case Type::kNumber:
      return "number" + with_unit + "|cairn.Ref";
    case Type::kBool:
      return "boolean";
    case Type::kString:
      return "string";
    case Type::kEnum: {
      std::string out;
      for (const std::string& choice : field.choices) out += (out.empty() ? "\"" : "|\"") + choice + "\"";
      return field.form == Form::kPositions ? out + "|cairn.Rotary" : out;
    }
    case Type::kSpan:
      return "cairn.Span";
    case Type::kIntList:
      return "integer[]";
    case Type::kNumberList:
      return "number[]";
    case Type::kEnumList:
    case Type::kStringList:
      return "string[]";
    case Type::kBlock:
      return class_name(*field.block);
    case Type::kItems: {
      const std::string out = constructed();
      return out.find('|') == std::string::npos ? out + "[]" : "(" + out + ")[]";
    }
    case Type::kObject:
      return "table<string, number>";
  }
  return "any";
}

/// `root` and the blocks below it in the order a reader meets them, each once.
std::vector<const Block*> written_blocks(const Block& root = recipe_block()) {
  std::vector<const Block*> out;
  const std::function<void(const Block&)> add = [&](const Block& block) {
    if (std::find(out.begin(), out.end(), &block) != out.end()) return;
    out.push_back(&block);
    for (const Field& field : block.fields) {
      if (field.type == Type::kBlock && field.form == Form::kPlain) add(*field.block);
      for (const Block* accepted : field.accepts) add(*accepted);
    }
  };
  add(root);
  return out;
}

/// Of cluster files.
std::vector<const Block*> written_cluster_blocks() {
  std::vector<const Block*> out;
  for (const Block* root : cluster_blocks())
    for (const Block* block : written_blocks(*root))
      if (std::find(out.begin(), out.end(), block) == out.end()) out.push_back(block);
  return out;
}

std::string block_use(const Block& block) {
  std::string out;
  for (const std::string& name : block.constructors) {
    if (!out.empty()) out += ", ";
    out += "`T." + name +
           (block.constant                                                ? ""
            : block.positional && block.fields[0].type == Type::kInt      ? "(n)"
            : block.positional && block.fields[0].type != Type::kEnumList ? " \"...\""
                                                                          : " {...}") +
           "`";
  }
  return out;
}

constexpr const char* kIntroduction = R"(# The recipe

Generated from the schema (`dsl/schema.cc`) by `cairn help --markdown`; do not edit by hand.

A recipe is one Lua 5.4 file that returns one table. It says what to train; nothing runs while it is read.

```lua
local T = require "cairn"

return T.recipe {
  name  = "tiny",
  stop  = T.steps(100),
  model = T.gpt { layers = 2, width = 64, heads = 2, context = 64, vocab = 256 },
  data  = T.megatron { prefix = "data/text_document", split = { 95, 5 } },
  batch = { samples = 8, micro = 4 },
  optimizer = T.adamw { peak_lr = 1e-3 },
}
```

## How it is read

- **Paths** of data and tokenizers are relative to the working directory of the command, not to the recipe.
- **All mistakes at once**, each with file, line, the nearest name and what would be accepted. Exit code 2; nothing starts.
- **Who wins:** default < recipe < `:with` < `--with` < `--set`. Environment variables never change a recipe.
- **Numbers** may carry a unit as a string where the field has one: `"450B"` (K, M, B, T), `"30min"` or `"1h30min"` (ms, s, min, h, d).
- **References** (`T.ref "optimizer.peak_lr" * 0.1`) are resolved after all overrides, so they follow them.
- What ranks, run folders and checkpoints get is the resolved recipe: canonical JSON with every field, and its XXH3-128.

## Deriving one recipe from another

```lua
return require("recipes.base"):with {
  name  = "wider",
  model = { width = 256 },           -- merged into the base's model; other fields stay
  mesh  = T.replace { tp = 2 },      -- the whole block anew
  eval  = T.unset,                   -- back to the default
  checkpoint = { keep = { T.last(1) } },  -- a list is always replaced as a whole
}
```

`require "recipes.base"` looks for `recipes/base.lua` in the folder of the recipe on the command line, then in that
folder's parent. A block written with another constructor (`model = T.llama {...}` over a `T.gpt`) replaces it.

On the command line:

- `--set optimizer.peak_lr=5e-5`: any Lua expression; a bare word is a string; `--set mesh.tp-` goes back to the default.
- `--param peak=2e-4`: before the file is read; only what `T.params` declares.
- `--with small.lua`: merges a file that returns a plain table; repeatable, left to right.

## Other values from a position on

```lua
return T.recipe {
  -- ...
  stages = {
    T.stage { at = T.tokens "800B", batch = { samples = 512 }, data = { weights = { web = 30, code = 70 } } },
    T.stage { at = T.tokens "900B", optimizer = { lr = T.schedule { T.linear { to = 0 } } } },
  },
}
```

A stage is merged as `:with` is, over the recipe and the stages before it, and the whole recipe that results is checked
like any other. It begins at the first step behind `at`. A schedule that a stage sets begins at the rate so far and
counts from the stage; `optimizer.lr_from` says otherwise. Layouts, shapes and seeds cannot change in a stage.

## What a recipe may do

It is a sandboxed program: locals, functions, loops, `string`, `table`, `math` without random, `pairs` (in sorted order),
`pcall`, `require` of other recipes. No files but those and `T.read_json`, no clock, no environment, no `load`, no
coroutines. It may use a second of the processor, 50 million instructions and 128 MiB; reaching a limit is an error with its
line, and `pcall` does not catch it. Global variables are errors, so a misspelt name is found.

)";

constexpr const char* kClusterIntroduction = R"(# The cluster file

Generated from the schema (`dsl/cluster_schema.cc`) by `cairn help --cluster-file`; do not edit by hand.

A cluster file says where a run runs, as a recipe says what it trains. It is one Lua file in the language of
[recipes](recipe.md), as strict and with the same bounds. It returns `T.slurm`, `T.kubernetes` or `T.hosts`. It is no part
of the recipe: a run may resume with another one, and no recipe hash changes. How it is used:
[Running on a cluster](operations/cluster.md).

```lua
local T = require "cairn"

return T.slurm {
  hosts = 4, ranks_per_host = 8, spares = 1, hosts_min = 3,
  partition = "gpu", time = "12h",
  interface = "ib0",
}
```

`cairn help T.slurm` prints the fields of a launcher, `cairn help slurm.time` one of them.

)";

}  // namespace

std::vector<std::string> field_paths() {
  std::vector<std::string> out;
  visit_fields([&](const std::string& path, const Field&) { out.push_back(path); });
  return out;
}

std::vector<std::string> constructor_names() {
  std::set<std::string> out;
  const std::vector<const Block*> elsewhere = written_cluster_blocks();
  for (const auto& [name, block] : constructors())
    if (std::find(elsewhere.begin(), elsewhere.end(), block) == elsewhere.end()) out.insert(name);
  for (const Member& member : kFunctions) out.insert(member.name);
  return {out.begin(), out.end()};
}

Result<std::string> help_text(std::string_view field) {
  if (field.empty()) {
    std::string out = block_help("recipe", "", recipe_block());
    out += "\nAlso: cairn help model, cairn help optimizer.lr, cairn help T.cosine\nConstructors:";
    for (const std::string& name : constructor_names()) out += " T." + name;
    out += "\nOf cluster files:";
    for (const Block* block : written_cluster_blocks())
      for (const std::string& name : block->constructors) out += " T." + name;
    return out + "\n";
  }
  if (const Field* known = find_field(field)) {
    std::string out = field_help(std::string(field), *known);
    if (const ChangeRule* rule = find_change_rule(field); rule != nullptr && known->type != Type::kBlock)
      out += fmt::format("  changed under a run: {}: {}\n", change_class_name(rule->change), rule->says);
    if (known->type == Type::kBlock && known->form == Form::kPlain)
      list_fields(out, std::string(field) + ".", *known->block);
    return out;
  }
  const std::string_view name = field.rfind("T.", 0) == 0 ? field.substr(2) : field;
  for (const Member& member : kFunctions)
    if (member.name == name) return fmt::format("T.{}: {}\n  example  {}\n", name, member.doc, member.use);
  const size_t dot = name.find('.');
  if (const Block* block = find_constructor(name.substr(0, dot))) {
    if (dot == std::string_view::npos) return block_help(fmt::format("T.{}", name), "", *block);
    if (const Field* part = block->find(name.substr(dot + 1))) return field_help(std::string(name), *part);
  }
  return unknown(field);
}

Result<std::string> explain_text(const LoadedRecipe& loaded, std::string_view field) {
  std::string out;
  for (const Origin& origin : loaded.origins) {
    const std::string below = std::string(field);
    const auto is = [&](const std::string& path) {
      return path == field || path.rfind(below + ".", 0) == 0 || path.rfind(below + "[", 0) == 0;
    };
    const size_t in_stage = origin.path.rfind("stages[", 0) == 0 ? origin.path.find("].") : std::string::npos;
    const bool hit = field.empty() || is(origin.path) ||
                     (in_stage != std::string::npos && is(origin.path.substr(in_stage + 2)));  // changed there
    if (!hit) continue;
    std::string from = origin.set_by;
    if (!origin.file.empty()) from = origin.line > 0 ? fmt::format("{}:{}", origin.file, origin.line) : origin.file;
    if (origin.set_by == "--with") from += " (--with)";
    out += fmt::format("{:<60}  {}\n", origin.path + " = " + origin.value, from);
  }
  if (out.empty()) return unknown(field);
  if (const Field* known = find_field(field))
    if (known->type != Type::kBlock || known->form != Form::kPlain) out += field_help(std::string(field), *known);
  return out;
}

std::string reference_markdown() {
  std::string out = kIntroduction;
  out += "## Fields\n\n";
  for (const Block* block : written_blocks()) {
    const bool top = std::any_of(recipe_block().fields.begin(), recipe_block().fields.end(), [&](const Field& field) {
      return field.block == block && field.form == Form::kPlain;
    });
    std::string title = block->name;
    for (const Field& field : recipe_block().fields)
      if (field.block == block) title = field.name;
    if (!top && block != &recipe_block()) title = "T." + block->name;
    out += fmt::format("### {}\n\n", title);
    if (const std::string use = block_use(*block); !use.empty()) out += "Written " + use + ". ";
    out += block->doc + "\n\n";
    field_table(out, *block);
  }
  out += "## Functions and values of T\n\n| written | meaning |\n|---|---|\n";
  for (const Member& member : kFunctions)
    out += fmt::format("| `{}` | {} |\n", escaped(member.use), escaped(member.doc));
  return out;
}

std::string cluster_markdown() {
  std::string out = kClusterIntroduction;
  const auto section = [&](const std::string& title, const Block& block) {
    out += fmt::format("## {}\n\n", title);
    if (const std::string use = block_use(block); !use.empty()) out += "Written " + use + ". ";
    out += block.doc + "\n\n";
    field_table(out, block);
  };
  // Fields that all launchers take stand once.
  const auto everywhere = [](const Field& field) {
    return std::all_of(cluster_blocks().begin(), cluster_blocks().end(),
                       [&](const Block* block) { return block->find(field.name) != nullptr; });
  };
  Block shared{.doc = "`T.slurm`, `T.kubernetes` and `T.hosts` take these fields and those of their own section."};
  for (const Field& field : cluster_blocks().front()->fields)
    if (everywhere(field)) shared.fields.push_back(field);
  section("Fields of every launcher", shared);
  for (const Block* block : written_cluster_blocks()) {
    Block own = *block;
    if (std::find(cluster_blocks().begin(), cluster_blocks().end(), block) != cluster_blocks().end())
      std::erase_if(own.fields, everywhere);
    section(own.constructors.empty() ? own.name : "T." + own.name, own);
  }
  out.pop_back();  // the page ends with one line feed
  return out;
}

std::string editor_types() {
  std::string out =
      "---@meta cairn\n"
      "-- Types of a Cairn recipe and cluster file for the Lua language server. Generated from the schema; do not "
      "edit.\n\n"
      "---@class cairn.Span\n"
      "---@class cairn.Param\n"
      "---@class cairn.Ref\n"
      "---@operator add(number|cairn.Ref): cairn.Ref\n---@operator sub(number|cairn.Ref): cairn.Ref\n"
      "---@operator mul(number|cairn.Ref): cairn.Ref\n---@operator div(number|cairn.Ref): cairn.Ref\n"
      "---@operator pow(number|cairn.Ref): cairn.Ref\n---@operator unm: cairn.Ref\n\n";
  std::vector<const Block*> blocks = written_blocks();
  for (const Block* block : written_cluster_blocks()) blocks.push_back(block);
  for (const Block* block : blocks) {
    out += fmt::format("--- {}\n---@class {}{}\n", block->doc, class_name(*block),
                       block->recipe_fields ? " : " + class_name(recipe_block()) : "");
    // All optional to the editor: the same class stands in :with, where any field may be left out.
    for (const Field& field : block->fields)
      if (!block->positional) out += fmt::format("---@field {}? {} {}\n", field.name, lua_type(field), field.doc);
    if (block == &recipe_block())
      out += "---@field with fun(self: cairn.Recipe, changes: cairn.Recipe): cairn.Recipe\n";
    out += "\n";
  }
  out += "---@class cairn.T\n";
  for (const auto& [name, block] : constructors()) {
    const std::string type = class_name(*block);
    std::string argument = "spec: " + type;
    if (block->positional) argument = "value: " + lua_type(block->fields[0]);
    if (block->list) argument = "list: table";
    out += block->constant ? fmt::format("---@field {} {} {}\n", name, type, block->doc)
                           : fmt::format("---@field {} fun({}): {} {}\n", name, argument, type, block->doc);
  }
  for (const Member& member : kFunctions)
    out += fmt::format("---@field {} {} {}\n", member.name, member.type, member.doc);
  out += "local T = {}\n\nreturn T\n";
  return out;
}

}  // namespace cairn::dsl
