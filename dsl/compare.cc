#include "dsl/compare.h"

#include <fmt/format.h>

#include <algorithm>

#include "dsl/dsl.h"
#include "runtime/json/json.h"

namespace cairn::dsl {
namespace {

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

Json items_json(const Field& field, void* object) {
  Json out = Json::array();
  for (int64_t i = 0; i < field.size(object); ++i) {
    Json item = Json::object();
    for (const Field& part : field.block->fields) item[part.key] = part.load(field.element(object, i));
    out.push_back(std::move(item));
  }
  return out;
}

void collect(const Block& block, void* object, const std::string& path, const std::string& key,
             std::vector<StoredValue>& out) {
  for (const Field& field : block.fields) {
    if (!field.stored()) continue;
    StoredValue value{joined(path, field.name), joined(key, field.key), &field, Json()};
    if (field.member) {
      collect(*field.block, field.member(object), value.path, value.key, out);
      continue;
    }
    value.value = field.element ? items_json(field, object) : field.load(object);
    out.push_back(std::move(value));
  }
}

/// Sources by name; of several with one name the second is NAME#2, so that each has a partner of its own.
std::vector<std::pair<std::string, const Json*>> named(const Json& sources) {
  std::vector<std::pair<std::string, const Json*>> out;
  for (const Json& source : sources) {
    const auto name = source.at("name").get<std::string>();
    std::string unique = name;
    const auto taken = [&](const std::string& wanted) {
      return std::any_of(out.begin(), out.end(), [&](const auto& known) { return known.first == wanted; });
    };
    for (int64_t n = 2; taken(unique); ++n) unique = name + "#" + std::to_string(n);
    out.emplace_back(std::move(unique), &source);
  }
  return out;
}

const Json* find_named(const std::vector<std::pair<std::string, const Json*>>& sources, const std::string& name) {
  for (const auto& [known, source] : sources)
    if (known == name) return source;
  return nullptr;
}

void compare_sources(const Json& before, const Json& after, std::vector<FieldChange>& out) {
  const auto old_sources = named(before), new_sources = named(after);
  Json old_order = Json::array(), new_order = Json::array();
  for (const auto& [name, source] : old_sources) {
    const Json* now = find_named(new_sources, name);
    const std::string path = "data." + name;
    if (now == nullptr) {
      out.push_back({path, source_text(*source, true), "", *source, Json()});
      continue;
    }
    old_order.push_back(name);
    if (*now == *source) continue;
    if (now->at("kind") != source->at("kind")) {
      out.push_back({path, source_text(*source, true), source_text(*now, true), *source, *now});
      continue;
    }
    Json all = *source;
    all.update(*now);
    for (const auto& [key, any] : all.items()) {
      const Field* field = find_source_field(source->at("kind"), key);
      const auto in = [&](const Json& one) {  // a silent field of the default may be left out
        return one.contains(key) || field == nullptr ? one.at(key) : field->fallback;
      };
      const Json value = in(*source), other = in(*now);
      if (value == other) continue;
      out.push_back(
          {joined(path, field == nullptr ? key : field->name), lua_text(value), lua_text(other), value, other});
    }
  }
  for (const auto& [name, source] : new_sources) {
    if (find_named(old_sources, name) != nullptr) {
      new_order.push_back(name);
    } else {
      out.push_back({"data." + name, "", source_text(*source, true), Json(), *source});
    }
  }
  if (old_order != new_order)
    out.push_back({"data.sources", lua_text(old_order), lua_text(new_order), old_order, new_order});
}

FieldChange change_of(const std::string& path, const Field& field, const Json& before, const Json& after) {
  return {path, lua_text(field, before), lua_text(field, after), before, after};
}

}  // namespace

std::vector<StoredValue> stored_values(const Recipe& recipe) {
  Recipe copy = recipe;  // the accessors are for writing as well
  copy.stages.clear();
  std::vector<StoredValue> out;
  collect(recipe_block(), &copy, "", "", out);
  std::erase_if(out, [](const StoredValue& value) { return value.field->form == Form::kSegments; });
  return out;
}

const Field* find_stored(std::string_view key) {
  const Block* in = &recipe_block();
  while (true) {
    const size_t dot = key.find('.');
    const Field* field = in->find_key(key.substr(0, dot));
    if (field == nullptr || field->form == Form::kSegments) return nullptr;
    if (dot == std::string_view::npos) return field->member ? nullptr : field;
    if (!field->member) return nullptr;
    in = field->block;
    key.remove_prefix(dot + 1);
  }
}

std::vector<FieldChange> compare_recipes(const Recipe& before, const Recipe& after) {
  std::vector<FieldChange> out;
  const std::vector<StoredValue> left = stored_values(before), right = stored_values(after);
  const auto find = [](const std::vector<StoredValue>& in, const char* key) -> const Json& {
    return std::find_if(in.begin(), in.end(), [&](const StoredValue& value) { return value.key == key; })->value;
  };
  for (size_t i = 0; i < left.size(); ++i) {
    const StoredValue& was = left[i];
    const StoredValue& is = right[i];
    if (was.value == is.value && was.key != "tokenizer.kind") continue;
    if (was.key == "data.sources") {
      compare_sources(was.value, is.value, out);
    } else if (was.key == "tokenizer.path") {
      // told with its kind
    } else if (was.key == "tokenizer.kind") {
      const auto both = [&](const std::vector<StoredValue>& of) {
        return Json{{"kind", find(of, "tokenizer.kind")}, {"path", find(of, "tokenizer.path")}};
      };
      if (both(left) != both(right))
        out.push_back(change_of("tokenizer", *find_field("tokenizer"), both(left), both(right)));
    } else {
      out.push_back(change_of(was.path, *was.field, was.value, is.value));
    }
  }
  const Field& stages = *find_field("stages");
  Recipe old_copy = before, new_copy = after;
  const Json old_stages = items_json(stages, &old_copy), new_stages = items_json(stages, &new_copy);
  if (old_stages != new_stages) out.push_back(change_of("stages", stages, old_stages, new_stages));
  return out;
}

Status set_field(Recipe& recipe, const FieldChange& change) {
  for (const StoredValue& value : stored_values(recipe)) {
    if (value.path != change.path) continue;
    Json json = json_or_nothing(encode_recipe(recipe));
    std::string pointer = "/" + value.key;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    json[Json::json_pointer(pointer)] = change.after_json;
    RT_TRY_SET(recipe, decode_recipe(json_text(json)).with(change.path));
    return {};
  }
  return Error{ErrorCode::kInvalidInput, fmt::format("{} is no field that can be set by itself", change.path)};
}

}  // namespace cairn::dsl
