#include "dsl/dsl.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "dsl/evaluate.h"
#include "dsl/resolve.h"
#include "dsl/schema.h"
#include "runtime/core/count_text.h"

namespace cairn::dsl {
namespace {

/// A layer for `--set path=value`: tables around the value, as if someone had written them.
Layer set_layer(const std::string& shown, std::string_view path, NodePtr value) {
  std::vector<std::string> keys;
  while (true) {
    const size_t dot = path.find('.');
    keys.emplace_back(path.substr(0, dot));
    if (dot == std::string_view::npos) break;
    path.remove_prefix(dot + 1);
  }
  const Place place{std::make_shared<const Call>(Call{shown, 0, "", "--set"}), {}};
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
    Node table;
    table.kind = Node::Kind::kTable;
    table.place = place;
    table.entries.push_back(Entry{*key, std::move(value), place});
    value = std::make_shared<const Node>(std::move(table));
  }
  return Layer{std::move(value), place};
}

Diagnostic simple(const std::string& file, const char* code, const std::string& message) {
  Diagnostic out;
  out.file = file;
  out.code = code;
  out.message = message;
  return out;
}

std::string trimmed(std::string text) {
  const auto space = [](unsigned char c) { return std::isspace(c) != 0; };
  while (!text.empty() && space(static_cast<unsigned char>(text.back()))) text.pop_back();
  text.erase(text.begin(), std::find_if_not(text.begin(), text.end(), space));
  return text;
}

/// The value part of --set: typed by the field, so that precision=bf16 and schedule=1f1b need no quotes.
NodePtr set_value(Evaluator& evaluator, const std::string& shown, const std::string& path, const std::string& text) {
  const Field* field = find_field(path);
  const bool textual = field != nullptr && (field->type == Type::kString || field->type == Type::kEnum);
  const bool quoted = !text.empty() && (text[0] == '"' || text[0] == '\'' || text[0] == '[');
  const bool expression = quoted || text.rfind("T.", 0) == 0;
  const bool word = !text.empty() && (std::isalpha(static_cast<unsigned char>(text[0])) != 0 || text[0] == '_') &&
                    std::all_of(text.begin(), text.end(), [](unsigned char c) {
                      return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.' || c == '/';
                    });
  const bool keyword = text == "true" || text == "false" || text == "nil";
  if (!expression && (textual || (word && !keyword))) {
    Node out;
    out.kind = Node::Kind::kString;
    out.text = text;
    return std::make_shared<const Node>(std::move(out));
  }
  // "30min" is no Lua expression, and a field with a unit takes it as a string.
  const bool simple_text = text.find_first_of("{}()\"' =") == std::string::npos;
  return evaluator.run_expression(text, shown, simple_text);
}

void apply_set(Evaluator& evaluator, Resolver& resolver, std::vector<Diagnostic>& diagnostics, const std::string& set) {
  const std::string shown = "--set " + set;
  const size_t equals = set.find('=');
  std::string path = trimmed(set.substr(0, equals));
  NodePtr value;
  if (equals == std::string::npos && !path.empty() && path.back() == '-') {
    path.pop_back();
    Node unset;
    unset.kind = Node::Kind::kUnset;
    value = std::make_shared<const Node>(std::move(unset));
  } else if (equals == std::string::npos || path.empty()) {
    diagnostics.push_back(simple(shown, "bad_set", "must be FIELD=VALUE, or FIELD- to go back to the default"));
    return;
  }
  const bool plain = std::all_of(path.begin(), path.end(),
                                 [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '.'; });
  if (!plain || path.empty() || path.front() == '.' || path.back() == '.' || path.find("..") != std::string::npos) {
    diagnostics.push_back(
        simple(shown, "bad_set", fmt::format("\"{}\" is not a field's path, such as optimizer.peak_lr", path)));
    return;
  }
  if (value == nullptr) value = set_value(evaluator, shown, path, trimmed(set.substr(equals + 1)));
  if (value != nullptr) resolver.apply(set_layer(shown, path, std::move(value)));
}

void append(std::vector<Diagnostic>& to, const std::vector<Diagnostic>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

/// Adds those of the evaluator, and puts all in the order of their lines, each with its line's text.
void complete(Evaluator& evaluator, std::vector<Diagnostic>& out) {
  append(out, evaluator.diagnostics());
  for (Diagnostic& diagnostic : out) {
    if (!diagnostic.source.empty() || diagnostic.line == 0) continue;
    for (const auto& [name, text] : evaluator.sources())
      if (name == diagnostic.file) diagnostic.source = line_text(text, diagnostic.line);
  }
  std::stable_sort(out.begin(), out.end(), [](const Diagnostic& a, const Diagnostic& b) {
    return std::tie(a.file, a.line) < std::tie(b.file, b.line);
  });
}

std::string returned(const Node& node) {
  return node.kind == Node::Kind::kOther && node.text == "nil" ? "nothing" : describe(node);
}

}  // namespace

LoadResult load_recipe(const std::string& path, const LoadOptions& options) {
  LoadResult out;
  Evaluator evaluator(path, options.params);
  const NodePtr recipe = evaluator.run_file(path, "recipe");
  Resolver resolver(evaluator.sources());
  bool evaluated = recipe != nullptr;
  if (recipe != nullptr && recipe->kind != Node::Kind::kRecipe) {
    out.diagnostics.push_back(
        simple(evaluator.sources().front().first, "not_a_recipe",
               fmt::format("must return T.recipe {{...}} or base:with {{...}}, but returns {}", returned(*recipe))));
    evaluated = false;
  }
  if (evaluated) {
    for (const Layer& layer : recipe->layers) resolver.apply(layer);
    for (const std::string& file : options.with_files) {
      if (evaluator.out_of_budget()) break;
      const NodePtr table = evaluator.run_file(file, "--with");
      if (table == nullptr) continue;
      if (table->kind != Node::Kind::kTable) {
        out.diagnostics.push_back(simple(evaluator.sources().back().first, "not_a_table",
                                         "a --with file must return a plain table, but returns " + describe(*table)));
        continue;
      }
      const std::string& name = evaluator.sources().back().first;
      resolver.apply(Layer{table, Place{std::make_shared<const Call>(Call{name, 1, "return", "--with"}), {}}});
    }
    for (const std::string& set : options.sets) {
      if (evaluator.out_of_budget()) break;
      apply_set(evaluator, resolver, out.diagnostics, set);
    }
    evaluator.check_params();
    if (!evaluator.out_of_budget()) out.loaded.recipe = resolver.resolve(options.world, options.epoch_samples);
  }
  append(out.diagnostics, resolver.diagnostics());
  complete(evaluator, out.diagnostics);
  if (!out.diagnostics.empty()) {
    out.loaded = LoadedRecipe{};
    out.loaded.sources = evaluator.sources();
    return out;
  }
  out.loaded.canonical_json = encode_recipe(out.loaded.recipe);
  out.loaded.hash_hex = recipe_hash(out.loaded.canonical_json);
  out.loaded.sources = evaluator.sources();
  out.loaded.origins = resolver.origins();
  return out;
}

ClusterResult load_cluster(const std::string& path) {
  ClusterResult out;
  Evaluator evaluator(path, {});
  const NodePtr root = evaluator.run_file(path, "cluster");
  if (root != nullptr) {
    const std::vector<const Block*>& blocks = cluster_blocks();
    const auto block = std::find_if(blocks.begin(), blocks.end(), [&](const Block* one) {
      return root->kind == Node::Kind::kCtor && root->text == one->name;
    });
    if (block == blocks.end()) {
      out.diagnostics.push_back(
          simple(evaluator.sources().front().first, "not_a_cluster",
                 fmt::format("must return T.slurm {{...}}, T.kubernetes {{...}} or T.hosts {{...}}, but returns {}",
                             returned(*root))));
    } else {
      Resolver resolver(evaluator.sources(), **block);
      resolver.apply(Layer{root, root->place});
      out.cluster = resolver.resolve_cluster(static_cast<Launcher>(block - blocks.begin()));
      append(out.diagnostics, resolver.diagnostics());
    }
  }
  complete(evaluator, out.diagnostics);
  if (!out.ok()) out.cluster = ClusterConfig{};
  out.sources = evaluator.sources();
  return out;
}

nlohmann::json to_json(const Diagnostic& diagnostic) {
  Json out = Json::object();
  const auto put = [&](const char* key, const std::string& value) {
    if (!value.empty()) out[key] = value;
  };
  put("file", diagnostic.file);
  if (diagnostic.line > 0) out["line"] = diagnostic.line;
  put("path", diagnostic.path);
  put("code", diagnostic.code);
  put("message", diagnostic.message);
  put("detail", diagnostic.detail);
  put("suggest", diagnostic.suggest);
  put("accepted", diagnostic.accepted);
  return out;
}

std::string to_text(const std::vector<Diagnostic>& diagnostics) {
  std::string out;
  for (const Diagnostic& d : diagnostics) {
    if (!d.file.empty()) out += d.file + (d.line > 0 ? fmt::format(":{}: ", d.line) : ": ");
    out += d.message;
    if (!d.suggest.empty())
      out += d.code == "not_one_of" ? fmt::format("; did you mean \"{}\"?", d.suggest)
                                    : fmt::format("; did you mean `{}`?", d.suggest);
    out += '\n';
    if (!d.source.empty()) {
      const std::string text = trimmed(d.source);
      out += fmt::format("      > {}\n", text.size() <= 110 ? text : text.substr(0, 107) + "...");
    }
    if (!d.detail.empty()) out += "      " + d.detail + '\n';
    if (!d.accepted.empty() && d.code != "not_one_of") out += "      accepted: " + d.accepted + '\n';
  }
  if (!diagnostics.empty())
    out += fmt::format("{}. Nothing was started.\n", count_text(std::ssize(diagnostics), "error"));
  return out;
}

}  // namespace cairn::dsl
