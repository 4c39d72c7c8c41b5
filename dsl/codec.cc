// Recipe <-> canonical JSON, by the schema. Keys are sorted (std::map), numbers are printed shortest, integers stay
// integers and doubles keep a point, so that equal recipes give equal bytes on every machine.
#include <fmt/format.h>
#include <xxhash.h>

#include "dsl/dsl.h"
#include "dsl/schema.h"
#include "dsl/stages.h"
#include "runtime/json/json.h"

namespace cairn::dsl {
namespace {

Json encode_block(const Block& block, void* object) {
  Json out = Json::object();
  for (const Field& field : block.fields) {
    if (field.member) {
      Json block_json = encode_block(*field.block, field.member(object));
      if (!field.silent || !block_json.empty()) out[field.key] = std::move(block_json);
    } else if (field.element) {
      Json list = Json::array();
      for (int64_t i = 0; i < field.size(object); ++i)
        list.push_back(encode_block(*field.block, field.element(object, i)));
      if (!field.silent || !list.empty()) out[field.key] = std::move(list);
    } else if (field.load) {
      Json value = field.load(object);
      if (!field.silent || value != field.fallback) out[field.key] = std::move(value);
    }
  }
  return out;
}

Error bad(const std::string& path, const std::string& message) {
  return Error{ErrorCode::kInvalidInput, fmt::format("recipe JSON: {}{}", path.empty() ? "the recipe" : path, message)};
}

/// Integers where the struct holds doubles become doubles: 1 and 1.0 are the same rate.
Json widened(const Field& field, Json value) {
  if (field.type == Type::kNumber && value.is_number_integer()) return value.get<double>();
  if (field.type == Type::kSpan && value.is_object() && value.contains("value") && value["value"].is_number_integer())
    value["value"] = value["value"].get<double>();
  if (field.type == Type::kNumberList && value.is_array())
    for (Json& element : value)
      if (element.is_number_integer()) element = element.get<double>();
  return value;
}

Status decode_block(const Block& block, void* object, const Json& json, const std::string& prefix) {
  const auto path_of = [&](const std::string& key) { return prefix.empty() ? key : prefix + "." + key; };
  if (!json.is_object()) return bad(prefix, " must be an object, got " + lua_text(json));
  for (const auto& [key, value] : json.items()) {
    if (block.find_key(key) != nullptr) continue;
    std::vector<std::string> keys;
    for (const Field& field : block.fields)
      if (field.stored()) keys.push_back(field.key);
    const std::string near = nearest(key, keys);
    return bad(path_of(key), fmt::format(": no such field{}", near.empty() ? "" : "; did you mean " + near + "?"));
  }
  for (const Field& field : block.fields) {
    if (!field.stored()) continue;
    const std::string path = path_of(field.key);
    const auto found = json.find(field.key);
    if (found == json.end() && field.later) continue;
    if (found == json.end()) return bad(path, " is missing");
    if (field.member) {
      RT_TRY(decode_block(*field.block, field.member(object), *found, path));
    } else if (field.element) {
      if (!found->is_array()) return bad(path, " must be a list, got " + lua_text(*found));
      field.resize(object, static_cast<int64_t>(found->size()));
      for (size_t i = 0; i < found->size(); ++i)
        RT_TRY(decode_block(*field.block, field.element(object, static_cast<int64_t>(i)), (*found)[i],
                            fmt::format("{}[{}]", path, i + 1)));
    } else {
      const Json value = widened(field, *found);
      Field plain = field;
      plain.form = Form::kPlain;  // messages speak of the JSON value, not of how a recipe writes it
      if (const auto wrong = check_value(plain, value)) {
        const bool joined = wrong->message[0] == ':' || wrong->message[0] == '[';
        return bad(path, (joined ? "" : " ") + wrong->message);
      }
      field.store(object, value);
    }
  }
  return {};
}

}  // namespace

std::string encode_recipe(const Recipe& recipe) {
  Recipe copy = recipe;  // the accessors are for writing as well
  return json_text(encode_block(recipe_block(), &copy));
}

Result<Recipe> decode_recipe(std::string_view json) {
  Result<Json> text = parse_json(json);
  if (!text.ok()) return Error{ErrorCode::kInvalidInput, "recipe JSON: " + text.error().message};
  Json parsed = std::move(text).value();
  if (const auto block = parsed.is_object() ? parsed.find("checkpoint") : parsed.end();
      block != parsed.end() && block->is_object() && block->contains("keep_last") && !block->contains("keep")) {
    // Recipes stored before there were rules: a number of newest ones, 0 for all.
    const Json count = (*block)["keep_last"];
    block->erase("keep_last");
    Json& keep = (*block)["keep"] = Json::array();
    if (count != 0) {
      keep.push_back({{"kind", "last"}, {"metric", "loss"}, {"count", count}, {"steps", 0}, {"seconds", 0.0}});
      keep[0]["at"] = Json::array();
    }
  }
  Recipe out;
  RT_TRY(decode_block(recipe_block(), &out, parsed, ""));
  if (out.stages.empty()) return out;
  // Stored changes become canonical: what differs, in the types of the fields.
  RT_TRY_SET(const std::vector<Recipe> segments, recipe_segments(out));
  for (size_t i = 0; i < out.stages.size(); ++i)
    out.stages[i].changes = stage_changes(segments[i], segments[i + 1], schedule_set(out.stages[i]));
  return out;
}

std::string recipe_hash(std::string_view json) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(json.data(), json.size()));
  std::string out;
  for (const unsigned char byte : canonical.digest) out += fmt::format("{:02x}", byte);
  return out;
}

}  // namespace cairn::dsl
