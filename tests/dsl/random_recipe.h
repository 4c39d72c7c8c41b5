#pragma once
// Random values of every field of the schema that a recipe file can say, and recipes with some of them changed.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "dsl/compare.h"
#include "dsl/dsl.h"
#include "dsl/schema.h"

namespace cairn::dsl {

class RandomValues {
 public:
  explicit RandomValues(uint64_t seed) : random_(seed) {}

  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool chance(double p) { return static_cast<double>(below(1000)) < 1000 * p; }
  template <class T>
  const T& one_of(const std::vector<T>& from) {
    return from[static_cast<size_t>(below(static_cast<int64_t>(from.size())))];
  }

  std::string text() {
    static const std::vector<std::string> kTexts = {"a",           "b/c.bin",  "",    "x\"y\\u0041",
                                                    "tab\t\x01\n", "\xc3\xa9", "end", "s3://b/p"};
    return one_of(kTexts);
  }

  double number(const Field& field) {
    const double lo = std::isfinite(field.lo) ? field.lo : 0, hi = std::min(field.hi, lo + 100);
    static const std::vector<double> kParts = {0.5, 0.25, 0.1, 1.0 / 3, 1e-5, 0.9};
    if (!field.lo_open && chance(0.2)) return lo;
    if (chance(0.3)) return std::floor((lo + hi) / 2) > lo ? std::floor((lo + hi) / 2) : lo + (hi - lo) * 0.5;
    return lo + (hi - lo) * one_of(kParts);
  }

  Json span(const std::vector<std::string>& units) {
    const std::string unit =
        one_of(units.empty() ? std::vector<std::string>{"steps", "samples", "tokens", "fraction"} : units);
    if (unit == "fraction") return {{"unit", unit}, {"value", 0.05 * static_cast<double>(1 + below(10))}};
    return {{"unit", unit}, {"value", static_cast<double>(1 + below(90))}};
  }

  /// A value that a recipe file can say; null when this field has none but its default.
  Json value(const std::string& key, const Field& field) {
    if (key == "data.sources") return sources();
    if (key == "log.trackers") return list([&] { return tracker(*field.block); });
    if (field.form == Form::kKeep) return list([&] { return keep(); });
    if (field.form == Form::kEveryList) {
      return list([&] {
        return chance(0.5) ? Json{{"steps", 1 + below(50)}, {"seconds", 0.0}}
                           : Json{{"steps", 0}, {"seconds", 0.5 + static_cast<double>(below(99))}};
      });
    }
    if (field.form == Form::kStages) return schedule();
    if (field.type == Type::kItems) {
      return list([&] {
        Json item = Json::object();
        for (const Field& part : field.block->fields) item[part.key] = value(key + "." + part.key, part);
        return item;
      });
    }
    switch (field.type) {
      case Type::kInt: {
        const int64_t lo = std::isfinite(field.lo) ? static_cast<int64_t>(field.lo) : 0;
        const int64_t least = field.form == Form::kEveryStep ? std::max<int64_t>(lo, 1) : lo;
        static const std::vector<int64_t> kSizes = {0, 1, 2, 3, 4, 8, 16, 32, 64, 100, 1000};
        const int64_t got = least + one_of(kSizes);
        return static_cast<double>(got) <= field.hi ? got : least;
      }
      case Type::kSeed:
        return static_cast<uint64_t>(chance(0.5) ? below(100) : below(int64_t{1} << 62));
      case Type::kNumber:
        return number(field);
      case Type::kBool:
        return chance(0.5);
      case Type::kString:
        return text();
      case Type::kEnum:
        return one_of(field.choices);
      case Type::kSpan:
        return span(field.choices);
      case Type::kIntList:
        return list([&] { return Json(std::max<int64_t>(static_cast<int64_t>(field.lo), 1) + below(4)); });
      case Type::kNumberList:
        return list([&] { return Json(number(field)); });
      case Type::kEnumList: {
        std::vector<std::string> names = field.choices;
        const auto needed = field.fallback.get<std::vector<std::string>>();
        std::erase_if(names, [&](const std::string& name) {
          return std::ranges::find(needed, name) == needed.end() && random_() % 2 == 0;
        });
        std::shuffle(names.begin(), names.end(), random_);
        return names;
      }
      case Type::kStringList:
        return list([&] { return Json(text()); });
      case Type::kBlock:
      case Type::kItems:
      case Type::kObject:
        break;
    }
    return Json();
  }

 private:
  template <class F>
  Json list(F make) {
    Json out = Json::array();
    for (int64_t n = below(4); n > 0; --n) out.push_back(make());
    return out;
  }

  /// A tracker with the fields that its constructor takes.
  Json tracker(const Block& stored) {
    const std::string kind = one_of(stored.find_key("kind")->choices);
    Json out = Json::object();
    for (const Field& part : stored.fields) out[part.key] = part.fallback;
    for (const Field& part : find_constructor(kind)->fields) out[part.key] = value("", part);
    out["kind"] = kind;
    return out;
  }

  Json keep() {
    Json rule{{"kind", "last"}, {"metric", "loss"}, {"count", 0},
              {"steps", 0},     {"seconds", 0.0},   {"at", Json::array()}};
    const std::string kind = one_of<std::string>({"last", "every", "at", "best", "within", "fractions"});
    rule["kind"] = kind;
    if (kind == "last" || kind == "fractions" || kind == "best") rule["count"] = 1 + below(9);
    if (kind == "best") rule["metric"] = one_of<std::string>({"loss", "valid_loss"});
    if (kind == "at") rule["at"] = {1 + below(9), 20};
    if (kind == "within") rule["seconds"] = 90.5;
    if (kind == "every") rule[chance(0.5) ? "steps" : "seconds"] = 1 + below(99);
    return rule;
  }

  Json schedule() {
    Json out = Json::array();
    if (chance(0.5)) out.push_back({{"kind", "warmup"}, {"over", span({})}, {"to", 0.0}});
    for (int64_t n = below(3); n > 0; --n) {
      const std::string kind =
          one_of<std::string>({"cosine", "linear", "hold", "inverse_sqrt", "exponential", "one_minus_sqrt"});
      const double to = kind == "hold" ? 0 : kind == "exponential" ? 1e-5 : 1e-6 * static_cast<double>(below(3));
      Json over = span({});
      if (n == 1 && chance(0.5)) over = {{"unit", "steps"}, {"value", 0.0}};
      out.push_back({{"kind", kind}, {"over", over}, {"to", to}});
    }
    return out;
  }

  Json sources() {
    Json out = Json::array();
    static const std::vector<std::string> kNames = {"web", "code", "the books", "end"};
    for (int64_t n = 0; n == 0 || (n < 4 && chance(0.6)); ++n) {
      const bool files = chance(0.4), instruct = !files && chance(0.3), megatron = !files;
      Json source{{"kind", files      ? "token_files"
                           : instruct ? "instruct"
                                      : "megatron"},
                  {"path", "data/" + std::to_string(n) + ".x"}};
      if (instruct) source["overlong"] = one_of<std::string>({"refuse", "drop", "truncate"});
      source["name"] = chance(0.3) ? std::to_string(n) : kNames[static_cast<size_t>(n)];
      source["valid_path"] = megatron || chance(0.5) ? "" : "valid";
      source["dtype"] = megatron ? "" : one_of<std::string>({"uint16", "uint32"});
      source["weight"] = chance(0.3) ? 1.0 : 0.5 + static_cast<double>(below(10));
      source["split"] = Json::array();
      if (megatron) source["split"] = chance(0.5) ? Json{1.0} : Json{95.0, 4.5, 0.5};
      out.push_back(std::move(source));
    }
    return out;
  }

  std::mt19937_64 random_;
};

inline Json::json_pointer json_pointer_of(std::string key) {
  std::replace(key.begin(), key.end(), '.', '/');
  return Json::json_pointer("/" + key);
}

/// `recipe` with the value at a key path replaced; nothing when decode refuses it.
inline std::optional<Recipe> changed(const Recipe& recipe, const std::string& key, const Json& value) {
  Json json = Json::parse(encode_recipe(recipe));
  json[json_pointer_of(key)] = value;
  Result<Recipe> out = decode_recipe(json.dump(-1, ' ', false, Json::error_handler_t::replace));
  return out.ok() ? std::optional(std::move(out).value()) : std::nullopt;
}

/// The recipes that are shipped, published ones too.
inline std::vector<std::pair<std::string, Recipe>> shipped_recipes() {
  std::vector<std::pair<std::string, Recipe>> out;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(CAIRN_SOURCE_DIR);
  for (const auto& entry : std::filesystem::recursive_directory_iterator("recipes")) {
    if (entry.path().extension() != ".lua") continue;
    LoadResult loaded = load_recipe(entry.path().string());
    INFO(to_text(loaded.diagnostics));
    REQUIRE(loaded.ok());
    out.emplace_back(entry.path().string(), std::move(loaded.loaded.recipe));
  }
  std::filesystem::current_path(before);
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return out;
}

}  // namespace cairn::dsl
