// Canonical values back into the forms of a recipe. Everything is built as one line and broken where it is too long.
#include "dsl/recipe_lua.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <set>
#include <vector>

#include "dsl/compare.h"
#include "dsl/schema.h"
#include "runtime/json/json.h"

namespace cairn::dsl {
namespace {

constexpr size_t kWidth = 110;

/// What T.unset alone can say: the value that a field has when nothing is written, and that no form writes.
bool unwritten(const Field& field, const Json& value) {
  if (field.form == Form::kEveryStep) return value == 0;
  if (field.form == Form::kLogSteps) return value == 1;
  return field.form == Form::kStages && value.empty();
}

std::string value_text(const Field& field, const Json& value) {
  if (unwritten(field, value)) return "T.unset";
  if (field.type == Type::kItems && value.empty()) return "{}";
  return lua_text(field, value);
}

/// Assignments by their path: {"batch.samples", "512"} and its like become batch = { samples = 512 }.
class Tables {
 public:
  void set(const std::string& path, std::string text) {
    const size_t dot = path.find('.');
    Tables& child = child_of(path.substr(0, dot));
    if (dot == std::string::npos) {
      child.text_ = std::move(text);
    } else {
      child.set(path.substr(dot + 1), std::move(text));
    }
  }
  /// T.llama {...} instead of {...}
  void construct(const std::string& name, const std::string& constructor) {
    child_of(name).constructor_ = "T." + constructor + " ";
  }
  std::string inside() const {
    std::string out;
    for (const auto& [name, child] : children_)
      out += (out.empty() ? "" : ", ") + name + " = " +
             (child.text_.empty() ? child.constructor_ + (child.children_.empty() ? "{}" : "{ " + child.inside() + " }")
                                  : child.text_);
    return out;
  }

 private:
  Tables& child_of(const std::string& name) {
    const auto known =
        std::find_if(children_.begin(), children_.end(), [&](const auto& child) { return child.first == name; });
    if (known != children_.end()) return known->second;
    return children_.emplace_back(name, Tables()).second;
  }
  std::string constructor_, text_;
  std::vector<std::pair<std::string, Tables>> children_;
};

/// Written path of a key path.
std::string written_path(std::string_view key) {
  std::string out;
  const Block* in = &recipe_block();
  while (in != nullptr) {
    const size_t dot = key.find('.');
    const Field* field = in->find_key(key.substr(0, dot));
    out += (out.empty() ? "" : ".") + field->name;
    in = dot == std::string_view::npos ? nullptr : field->block;
    key.remove_prefix(dot == std::string_view::npos ? key.size() : dot + 1);
  }
  return out;
}

/// A key of a table: web, ["the web"].
std::string key_text(const std::string& name) {
  static const std::set<std::string> kWords = {"and",      "break",  "do",   "else", "elseif", "end",  "false", "for",
                                               "function", "goto",   "if",   "in",   "local",  "nil",  "not",   "or",
                                               "repeat",   "return", "then", "true", "until",  "while"};
  const bool plain = !name.empty() && std::isdigit(static_cast<unsigned char>(name[0])) == 0 &&
                     std::all_of(name.begin(), name.end(),
                                 [](unsigned char c) { return c < 128 && (std::isalnum(c) != 0 || c == '_'); });
  return plain && kWords.count(name) == 0 ? name : "[" + lua_text(Json(name)) + "]";
}

/// { web = 30 } when the sources of a blend differ in weights alone; else nothing.
std::optional<std::string> weights_text(const Json& before, const Json& after) {
  if (before.size() != after.size() || before.size() < 2) return std::nullopt;
  std::set<std::string> names;
  std::string out;
  for (size_t i = 0; i < before.size(); ++i) {
    const auto name = after[i].at("name").get<std::string>();
    Json other = before[i];
    other["weight"] = after[i].at("weight");
    if (other != after[i] || !names.insert(name).second || name.empty()) return std::nullopt;
    if (before[i] != after[i])
      out += (out.empty() ? "" : ", ") + key_text(name) + " = " + lua_text(after[i].at("weight"));
  }
  return "{ " + out + " }";
}

/// `text` as one line where it fits behind `indent` columns, else its outermost braces over several.
std::string laid_out(const std::string& text, size_t indent) {
  if (indent + text.size() + 1 <= kWidth) return text;
  std::vector<std::string> parts(1);
  std::string head, tail;
  int64_t depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    std::string piece(1, text[i]);
    if (text[i] == '"') {
      while (text[++i] != '"') {
        piece += text[i];
        if (text[i] == '\\') piece += text[++i];
      }
      piece += '"';
    }
    const bool opens = piece == "{" || piece == "(", closes = piece == "}" || piece == ")";
    if (closes) --depth;
    const bool outermost = depth == 0 && (piece == "{" || piece == "}");
    std::string& to = depth > 0 ? parts.back() : parts.size() == 1 && parts[0].empty() ? head : tail;
    if (depth == 1 && piece == ",") {
      parts.emplace_back();
    } else if (!outermost && !(depth == 1 && piece == " " && to.empty())) {
      to += piece;
    }
    if (opens) ++depth;
  }
  if (!tail.empty() || parts[0].empty()) return text;
  std::string out = head + "{\n";
  for (std::string& part : parts) {
    if (part.back() == ' ') part.pop_back();
    out += std::string(indent + 2, ' ') + laid_out(part, indent + 2) + ",\n";
  }
  return out + std::string(indent, ' ') + "}";
}

/// What a field has when a recipe does not write it; nothing for one that it must.
std::optional<Json> default_of(const StoredValue& value, bool llama, const std::vector<StoredValue>& all) {
  const Field& field = *value.field;
  if (field.required) return std::nullopt;
  if (!field.rule.empty()) {
    const auto found = derived_default(value.path, llama, [&](const std::string& path) -> std::optional<Json> {
      for (const StoredValue& other : all)
        if (other.path == path) return other.value;
      return std::nullopt;
    });
    return found ? *found : Json();
  }
  return llama && field.llama ? *field.llama : field.fallback;
}

/// Fields of the model that T.gpt or T.llama leaves to be written.
int64_t written_count(const std::vector<StoredValue>& values, bool llama) {
  return std::count_if(values.begin(), values.end(), [&](const StoredValue& value) {
    return value.path.rfind("model.", 0) == 0 && default_of(value, llama, values) != value.value;
  });
}

constexpr std::string_view kMaskRepeats = "data.mask_repeats.";

/// Writes what a stage masks, of which `changes` may hold a part; the rest is as `before`.
void set_mask_repeats(const Json& changes, const Json* before, Tables& tables, bool* whole_data) {
  const auto part = [&](const char* name) -> Json {
    const std::string key = std::string(kMaskRepeats) + name;
    return changes.contains(key) ? changes.at(key) : before != nullptr ? before->at(key) : Json(0);
  };
  const std::string text = part("period") == 0 ? "T.unset"
                                               : fmt::format("T.repeats {{ period = {}, count = {} }}",
                                                             lua_text(part("period")), lua_text(part("count")));
  tables.set("data.mask_repeats", text);
  if (before == nullptr || changes.contains("data.sources") || before->at("data.sources").size() != 1 ||
      before->at("data.seed") != 0 || before->at(std::string(kMaskRepeats) + "period") != 0)
    return;
  // Only T.blend has the field, and the data before it are a single source.
  tables.set("data.sources", "{ " + source_text(before->at("data.sources")[0], true) + " }");
  *whole_data = true;
}

/// `before`: the values that the stage meets by key path, where they are known.
std::string stage_text(const Json& stage, const Json* before) {
  Tables tables;
  const Json& changes = stage.at("changes");
  tables.set("at", lua_text(*find_constructor("stage")->find("at"), stage.at("at")));
  bool whole_data = false;
  for (const auto& [key, value] : changes.items()) {
    const bool implied = key == "optimizer.lr_from" && value == "stage" && changes.contains("optimizer.lr") &&
                         !changes.at("optimizer.lr").empty();
    if (implied) continue;
    if (key.starts_with(kMaskRepeats)) {
      set_mask_repeats(changes, before, tables, &whole_data);
      continue;
    }
    if (key != "data.sources") {
      tables.set(written_path(key), value_text(*find_stored(key), value));
      continue;
    }
    const auto weights = before == nullptr ? std::nullopt : weights_text(before->at(key), value);
    std::string sources;
    for (const Json& source : value) sources += (sources.empty() ? "" : ", ") + source_text(source, true);
    whole_data = !weights.has_value();
    tables.set(weights ? "data.weights" : "data.sources", weights ? *weights : "{ " + sources + " }");
  }
  if (whole_data) tables.construct("data", "blend");
  if (changes.contains("optimizer.lr") && !changes.contains("optimizer.lr_from"))
    tables.set("optimizer.lr_from", "T.unset");
  // beta1 follows the kind where a recipe does not write it.
  if (before != nullptr && changes.contains("optimizer.kind") && !changes.contains("optimizer.beta1"))
    tables.set("optimizer.beta1", lua_text(before->at("optimizer.beta1")));
  return "T.stage { " + tables.inside() + " }";
}

}  // namespace

std::string stage_lua(const Json& stage) { return stage_text(stage, nullptr); }

std::string recipe_lua(const Recipe& recipe) {
  const std::vector<StoredValue> values = stored_values(recipe);
  const auto value_at = [&](const char* key) -> const Json& {
    return std::find_if(values.begin(), values.end(), [&](const StoredValue& value) { return value.key == key; })
        ->value;
  };
  const bool llama = written_count(values, true) < written_count(values, false);
  const bool rotary = value_at("model.positions") == "rotary";
  Tables tables;
  std::string turning;  // what T.rotary takes
  for (const StoredValue& value : values) {
    const std::string& path = value.path;
    if (path == "model.layers") tables.construct("model", llama ? "llama" : "gpt");
    if (path == "optimizer.kind") {
      tables.construct("optimizer", value.value.get<std::string>());
    } else if (path == "tokenizer.kind") {
      const Json tokenizer{{"kind", value.value}, {"path", value_at("tokenizer.path")}};
      if (value.value != "none") tables.set("tokenizer", lua_text(*find_field("tokenizer"), tokenizer));
    } else if (path == "data.sources") {
      const Json repeats{{"period", value_at("data.mask_repeats.period")},
                         {"count", value_at("data.mask_repeats.count")}};
      const Json data{{"sources", value.value}, {"seed", value_at("data.seed")}, {"mask_repeats", repeats}};
      tables.set("data", lua_text(*find_field("data"), data));
    } else if (path == "tokenizer.path" || path == "data.seed" || path.starts_with("data.mask_repeats.")) {
      // written with the field before
    } else if (default_of(value, llama, values) == value.value) {
      // nothing to write
    } else if (rotary && (path == "model.rope_theta" || path.rfind("model.rope.", 0) == 0)) {
      const std::string name = path == "model.rope_theta" ? "theta" : path.substr(std::string("model.rope.").size());
      turning += (turning.empty() ? "" : ", ") + name + " = " + value_text(*value.field, value.value);
      tables.set("model.positions", "T.rotary { " + turning + " }");
    } else {
      tables.set(path, value_text(*value.field, value.value));
    }
  }
  std::string stages;
  Json before = Json::object();
  for (const StoredValue& value : values) before[value.key] = value.value;
  for (const RecipeStage& stage : recipe.stages) {
    const Json changes = json_or_nothing(stage.changes);
    stages += (stages.empty() ? "" : ", ") + stage_text({{"at", span_json(stage.at)}, {"changes", changes}}, &before);
    before.update(changes);
  }
  if (!stages.empty()) tables.set("stages", "{ " + stages + " }");
  return "local T = require \"cairn\"\n\nreturn " + laid_out("T.recipe { " + tables.inside() + " }", 0) + "\n";
}

}  // namespace cairn::dsl
