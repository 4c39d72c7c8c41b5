// Single values: what a field takes in words, whether a value fits, quantities with units, nearest names.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>

#include "dsl/node.h"
#include "dsl/recipe_lua.h"
#include "dsl/schema.h"
#include "runtime/json/json.h"

namespace cairn::dsl {
namespace {

std::string number_text(double value) {
  if (std::isnan(value)) return "nan";  // fmt keeps its sign, which says nothing
  if (std::isfinite(value) && value == std::floor(value) && std::abs(value) < 1e15) return fmt::format("{:.0f}", value);
  return fmt::format("{}", value);
}

/// As Lua reads it: JSON's form, but for control characters.
std::string quoted(const Json& text) {
  const std::string json = json_text(text);
  std::string out;
  for (size_t i = 0; i < json.size(); ++i) {
    if (json[i] == '\\' && json[i + 1] == 'u') {  // \u00XX, for control characters alone
      out += "\\x" + json.substr(i + 4, 2);
      i += 5;
    } else {
      out += json[i];
      if (json[i] == '\\') out += json[++i];
    }
  }
  return out;
}

std::string join(std::vector<std::string> parts, std::string_view last_joint = ", ") {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += i + 1 == parts.size() ? last_joint : ", ";
    out += parts[i];
  }
  return out;
}

constexpr double kMostOfSpan = 1e15;  // steps, samples or tokens: far above any run, and exact as a double
constexpr double kUnsaidLimit = 1e9;  // an upper bound from here on is told only to who goes beyond it

std::string range_text(const Field& field) {
  const bool low = std::isfinite(field.lo), high = std::isfinite(field.hi) && field.hi < kUnsaidLimit;
  if (low && high && (field.lo_open || field.hi_open)) {
    return fmt::format(" {} {} and {} {}", field.lo_open ? ">" : ">=", number_text(field.lo),
                       field.hi_open ? "<" : "<=", number_text(field.hi));
  }
  if (low && high) return fmt::format(" from {} to {}", number_text(field.lo), number_text(field.hi));
  if (low) return fmt::format(" {} {}", field.lo_open ? ">" : ">=", number_text(field.lo));
  if (high) return fmt::format(" <= {}", number_text(field.hi));
  return "";
}

std::string unit_hint(Unit unit) {
  switch (unit) {
    case Unit::kSeconds:
      return ", in seconds or such as \"30min\"";
    case Unit::kBytes:
      return ", in bytes or such as \"2GiB\"";
    case Unit::kNone:
    case Unit::kCount:
      return "";
  }
  return "";
}

Complaint must_be(const Field& field, const Json& value, const char* code) {
  return {code, fmt::format("must be {}, got {}", expected(field), lua_text(value)), "", ""};
}

}  // namespace

bool loses_digits(const Json& value) {
  constexpr int64_t kExact = int64_t{1} << 53;
  if (value.is_number_unsigned()) return value.get<uint64_t>() > static_cast<uint64_t>(kExact);
  return value.is_number_integer() && (value.get<int64_t>() > kExact || value.get<int64_t>() < -kExact);
}

namespace {

std::optional<Complaint> check_number(const Field& field, const Json& value) {
  const bool whole = field.type == Type::kInt || field.type == Type::kSeed || field.type == Type::kIntList;
  if (!value.is_number() || (whole && !value.is_number_integer())) return must_be(field, value, "wrong_type");
  if (field.type == Type::kSeed && value.is_number_integer() && !value.is_number_unsigned() && value.get<int64_t>() < 0)
    return must_be(field, value, "out_of_range");
  if (!whole && loses_digits(value)) {
    return Complaint{
        "out_of_range",
        fmt::format("is an integer beyond 2^53, which loses digits as a number; write it as {:.6g}, got {}",
                    value.get<double>(), lua_text(value)),
        "", ""};
  }
  const double number = value.get<double>();
  const bool inside = std::isfinite(number) && (field.lo_open ? number > field.lo : number >= field.lo) &&
                      (field.hi_open ? number < field.hi : number <= field.hi);
  if (std::isfinite(number) && number > field.hi && field.hi >= kUnsaidLimit)
    return Complaint{"out_of_range", fmt::format("must be <= {}, got {}", number_text(field.hi), lua_text(value)), "",
                     ""};
  if (!inside) return must_be(field, value, "out_of_range");
  return std::nullopt;
}

/// kEnumList: the names that its default has; the other choices may be left out.
std::vector<std::string> needed_names(const Field& field) {
  return field.fallback.is_array() ? field.fallback.get<std::vector<std::string>>() : field.choices;
}

std::optional<Complaint> check_choice(const Field& field, const Json& value) {
  if (!value.is_string()) return must_be(field, value, "wrong_type");
  const auto& name = value.get_ref<const std::string&>();
  if (std::find(field.choices.begin(), field.choices.end(), name) != field.choices.end()) return std::nullopt;
  std::vector<std::string> sorted = field.choices;
  std::sort(sorted.begin(), sorted.end());
  return Complaint{"not_one_of", fmt::format(": {} is not one of {}", lua_text(value), join(sorted)),
                   nearest(name, field.choices), join(sorted)};
}

bool is_word(const std::string& text) {
  if (text.empty() || std::isdigit(static_cast<unsigned char>(text[0])) != 0) return false;
  return std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
}

/// { a = 1, b = {...} }: one level, at most four entries.
std::string describe_entries(const Node& node) {
  std::vector<std::string> parts;
  for (const Entry& entry : node.entries) {
    if (parts.size() == 4) {
      parts.push_back("...");
      break;
    }
    const std::string key = is_word(entry.key) ? entry.key : "[" + lua_text(Json(entry.key)) + "]";
    const Node& value = *entry.value;
    const std::string inside = value.is_table() && !value.entries.empty()
                                   ? (value.kind == Node::Kind::kCtor ? "T." + value.text + " {...}" : "{...}")
                                   : describe(value);
    parts.push_back((entry.key.empty() ? "" : key + " = ") + inside);
  }
  return parts.empty() ? "{}" : "{ " + join(parts) + " }";
}

}  // namespace

std::string expected(const Field& field) {
  switch (field.form) {
    case Form::kEveryStep:
    case Form::kLogSteps:
      return "T.every { steps = n }";
    case Form::kEveryList:
      return "a list of T.every {...}";
    case Form::kKeep:
      return "a list of T.last(n), T.every {...}, T.best {...}, T.at {...}, T.within {...} and T.fractions(n)";
    case Form::kPlaces: {
      std::vector<std::string> names;
      for (const Block* block : field.accepts) names.push_back(fmt::format("T.{} {{...}}", block->name));
      return "a list of " + join(names, " and ");
    }
    case Form::kSegments:
      return "a list of T.stage {...}";
    case Form::kStages:
      return "T.schedule { stages }";
    case Form::kTokenizer:
      return "T.bytes, T.sentencepiece \"path\" or T.hf_tokenizer \"path\"";
    case Form::kData:
      return "T.megatron {...}, T.token_files {...}, T.instruct {...} or T.blend {...}";
    case Form::kBetas:
      return "two numbers from 0 to below 1, such as { 0.9, 0.95 }";
    case Form::kPlain:
    case Form::kPositions:
    case Form::kVocab:
      break;
  }
  switch (field.type) {
    case Type::kInt:
      return "an integer" + range_text(field) + unit_hint(field.unit);
    case Type::kSeed:
      return "an integer from 0 to 9223372036854775807";  // Lua's last; stored recipes may hold 64 bits
    case Type::kNumber:
      return "a number" + range_text(field) + unit_hint(field.unit);
    case Type::kBool:
      return "true or false";
    case Type::kString:
      return "a string";
    case Type::kEnum: {
      std::vector<std::string> quoted;
      for (const std::string& choice : field.choices) quoted.push_back('"' + choice + '"');
      return join(quoted, " or ");
    }
    case Type::kSpan:
      return field.choices.empty() ? "T.steps(n), T.samples(n), T.tokens(n), T.epochs(n) or T.fraction(x)"
                                   : "T.steps(n), T.samples(n), T.tokens(n) or T.epochs(n)";
    case Type::kIntList:
      return "a list of integers" + range_text(field);
    case Type::kNumberList:
      return "a list of numbers" + range_text(field);
    case Type::kEnumList:
      if (needed_names(field).empty()) return "a list of " + join(field.choices, " and ") + ", each at most once";
      return "a list that names " + join(needed_names(field), " and ") + " once each";
    case Type::kStringList:
      return "a list of strings";
    case Type::kBlock: {
      std::vector<std::string> names;
      for (const Block* block : field.accepts)
        for (const std::string& name : block->constructors) names.push_back("T." + name + " {...}");
      // One constructor says no more than the field does, so a plain table will do.
      if (names.size() == 1) return "a table, or " + names[0];
      return names.empty() ? "a table" : join(names, " or ");
    }
    case Type::kItems: {
      std::vector<std::string> names;
      for (const Block* block : field.accepts)
        for (const std::string& name : block->constructors) names.push_back("T." + name + " {...}");
      return "a list of " + (names.empty() ? "tables" : join(names, " and "));
    }
    case Type::kObject:
      return field.name == "weights" ? "a table of numbers by name" : "an object";
  }
  return "";
}

Json span_json(const Span& span) {
  static const std::vector<std::string> kUnits = {"steps", "samples", "tokens", "fraction"};
  return {{"unit", kUnits.at(static_cast<size_t>(span.unit))}, {"value", span.value}};
}

std::optional<Complaint> check_value(const Field& field, const Json& value) {
  switch (field.type) {
    case Type::kInt:
    case Type::kSeed:
    case Type::kNumber:
      return check_number(field, value);
    case Type::kBool:
      return value.is_boolean() ? std::nullopt : std::optional(must_be(field, value, "wrong_type"));
    case Type::kString:
      if (!value.is_string()) return must_be(field, value, "wrong_type");
      if (value.get_ref<const std::string&>().find('\0') != std::string::npos)
        return Complaint{"out_of_range", "must not contain a zero byte", "", ""};
      return std::nullopt;
    case Type::kEnum:
      return check_choice(field, value);
    case Type::kSpan: {
      if (!value.is_object() || value.size() != 2 || !value.contains("unit") || !value.contains("value") ||
          !value["unit"].is_string() || !value["value"].is_number())
        return must_be(field, value, "wrong_type");
      Field unit;
      unit.type = Type::kEnum;
      unit.choices = field.choices;
      if (unit.choices.empty()) unit.choices = {"steps", "samples", "tokens", "fraction"};
      if (auto complaint = check_choice(unit, value["unit"])) return complaint;
      const double number = value["value"].get<double>();
      const bool fraction = value["unit"] == "fraction";
      if (!std::isfinite(number) || (field.lo_open ? number <= field.lo : number < field.lo) ||
          (fraction && number > 1) || (!fraction && (number != std::floor(number) || number > kMostOfSpan)))
        return Complaint{
            "out_of_range",
            fmt::format("must be {}, got {}",
                        fraction
                            ? "a fraction > 0 and <= 1"
                            : fmt::format("a whole number of {} {} 0{}", value["unit"].get_ref<const std::string&>(),
                                          field.lo_open ? ">" : ">=", number > kMostOfSpan ? ", at most 1e15" : ""),
                        loses_digits(value["value"]) ? lua_text(value["value"]) : number_text(number)),
            "", ""};
      return std::nullopt;
    }
    case Type::kIntList:
    case Type::kNumberList: {
      if (!value.is_array()) return must_be(field, value, "wrong_type");
      Field element = field;
      element.form = Form::kPlain;
      element.type = field.type == Type::kIntList ? Type::kInt : Type::kNumber;
      for (size_t i = 0; i < value.size(); ++i) {
        if (auto complaint = check_number(element, value[i])) {
          complaint->message = fmt::format("[{}] {}", i + 1, complaint->message);
          return complaint;
        }
      }
      return std::nullopt;
    }
    case Type::kEnumList: {
      if (!value.is_array()) return must_be(field, value, "wrong_type");
      std::set<std::string> seen;
      for (const Json& name : value) {
        if (auto complaint = check_choice(field, name)) return complaint;
        seen.insert(name.get<std::string>());
      }
      const std::vector<std::string> needed = needed_names(field);
      const bool all = std::all_of(needed.begin(), needed.end(), [&](const auto& name) { return seen.contains(name); });
      if (!all || value.size() != seen.size()) return must_be(field, value, "wrong_type");
      return std::nullopt;
    }
    case Type::kStringList:
      if (!value.is_array()) return must_be(field, value, "wrong_type");
      for (const Json& text : value) {
        if (!text.is_string() || text.get_ref<const std::string&>().find('\0') != std::string::npos)
          return must_be(field, value, "wrong_type");
      }
      return std::nullopt;
    case Type::kObject:
    case Type::kBlock:
      return value.is_object() ? std::nullopt : std::optional(must_be(field, value, "wrong_type"));
    case Type::kItems:
      return value.is_array() ? std::nullopt : std::optional(must_be(field, value, "wrong_type"));
  }
  return std::nullopt;
}

std::string lua_text(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
    case Json::value_t::discarded:
    case Json::value_t::binary:
      return "nil";
    case Json::value_t::boolean:
      return value.get<bool>() ? "true" : "false";
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
      return json_text(value);
    case Json::value_t::number_float:
      return number_text(value.get<double>());
    case Json::value_t::string:
      return quoted(value);
    case Json::value_t::array: {
      std::vector<std::string> parts;
      for (const Json& element : value) parts.push_back(lua_text(element));
      return parts.empty() ? "{}" : "{ " + join(parts) + " }";
    }
    case Json::value_t::object: {
      std::vector<std::string> parts;
      for (const auto& [key, element] : value.items()) parts.push_back(key + " = " + lua_text(element));
      return parts.empty() ? "{}" : "{ " + join(parts) + " }";
    }
  }
  return "";
}

std::string default_source_name(const std::string& path) {
  std::string stem = std::filesystem::path(path).stem().string();
  return stem.empty() ? path : stem;
}

std::string source_text(const Json& source, bool with_weight) {
  const auto kind = source.at("kind").get<std::string>();
  std::vector<std::string> parts;
  for (const Field& field : find_constructor(kind)->fields) {
    const Json value =
        source.contains(field.key) ? source.at(field.key) : field.fallback;  // a silent one may be left out
    const bool needed = field.required || field.name == "split" || field.name == "dtype" ||
                        (with_weight && field.name == "weight");  // told although it may be the default
    const Json usual = field.name == "name" ? Json(default_source_name(source.at("path"))) : field.fallback;
    if (needed || value != usual) parts.push_back(field.name + " = " + lua_text(value));
  }
  return "T." + kind + " { " + join(parts) + " }";
}

std::string lua_text(const Field& field, const Json& value) {
  const auto span = [](const Json& of) {
    return fmt::format("T.{}({})", of.at("unit").get<std::string>(), lua_text(of.at("value")));
  };
  const auto every = [](const Json& of) {
    if (of.at("steps") != 0) return "T.every { steps = " + lua_text(of.at("steps")) + " }";
    return "T.every { seconds = " + lua_text(of.at("seconds")) + " }";
  };
  std::vector<std::string> parts;
  if (field.form == Form::kLogSteps && value == 1) return "a line a minute";
  if (field.form == Form::kLogSteps) return every(Json{{"steps", value == 0 ? Json(1) : value}, {"seconds", 0}});
  if (field.form == Form::kEveryStep) return value == 0 ? "never" : every(Json{{"steps", value}, {"seconds", 0}});
  if (field.form == Form::kKeep) {
    for (const Json& rule : value) {
      const auto kind = rule.at("kind").get<std::string>();
      if (kind == "every") {
        parts.push_back(every(rule));
      } else if (kind == "at") {
        parts.push_back("T.at { steps = " + lua_text(rule.at("at")) + " }");
      } else if (kind == "best") {
        parts.push_back(fmt::format("T.best {{ metric = {}, count = {} }}", lua_text(rule.at("metric")),
                                    lua_text(rule.at("count"))));
      } else if (kind == "within") {
        parts.push_back("T.within { seconds = " + lua_text(rule.at("seconds")) + " }");
      } else {
        parts.push_back(fmt::format("T.{}({})", kind, lua_text(rule.at("count"))));
      }
    }
    return parts.empty() ? "all" : "{ " + join(parts) + " }";
  }
  if (field.form == Form::kEveryList) {
    for (const Json& element : value) parts.push_back(every(element));
    return parts.empty() ? "{}" : "{ " + join(parts) + " }";
  }
  if (field.form == Form::kPlaces) {
    for (const Json& element : value) {
      const Block& block =
          field.accepts.size() > 1 ? *find_constructor(element.at("kind").get<std::string>()) : *field.block;
      const Field& first = block.fields.front();
      std::vector<std::string> inner;
      const Json& stands_first = element.at(first.key);
      for (const Json& one : stands_first.is_array() ? stands_first : Json::array({stands_first}))
        inner.push_back(lua_text(first, one));
      if (inner.empty()) inner.push_back(first.name + " = {}");
      for (const Field& part : block.fields) {
        if (part.key == first.key || element.at(part.key) == part.fallback) continue;
        inner.push_back(part.name + " = " + lua_text(part, element.at(part.key)));
      }
      parts.push_back("T." + block.name + " { " + join(inner) + " }");
    }
    return parts.empty() ? "{}" : "{ " + join(parts) + " }";
  }
  if (field.form == Form::kStages) {
    for (const Json& stage : value) {
      std::vector<std::string> inner;
      const auto kind = stage.at("kind").get<std::string>();
      const bool ends = kind == "cosine" || kind == "linear" || kind == "exponential" || kind == "one_minus_sqrt";
      if (ends || stage.at("to") != 0) inner.push_back("to = " + lua_text(stage.at("to")));
      if (stage.at("over").at("value") != 0) inner.push_back("over = " + span(stage.at("over")));
      parts.push_back("T." + kind + (inner.empty() ? " {}" : " { " + join(inner) + " }"));
    }
    return parts.empty() ? "constant" : "T.schedule { " + join(parts) + " }";
  }
  if (field.form == Form::kSegments) {
    for (const Json& stage : value) parts.push_back(stage_lua(stage));
    return parts.empty() ? "none" : "{ " + join(parts) + " }";
  }
  if (field.form == Form::kTokenizer) {
    if (value.at("kind") == "none") return "none";
    if (value.at("kind") == "bytes") return "T.bytes";
    return (value.at("kind") == "hf" ? "T.hf_tokenizer " : "T.sentencepiece ") + lua_text(value.at("path"));
  }
  if (field.form == Form::kData) {
    const Json& repeats = json_field(value, "mask_repeats");
    const bool masks = !repeats.is_null() && repeats.at("period") != 0;
    const bool blend = value.at("sources").size() != 1 || value.at("seed") != 0 || masks;
    for (const Json& source : value.at("sources")) parts.push_back(source_text(source, blend));
    if (!blend) return parts[0];
    const std::string seed = value.at("seed") == 0 ? "" : "seed = " + lua_text(value.at("seed")) + ", ";
    const std::string mask = masks ? fmt::format(", mask_repeats = T.repeats {{ period = {}, count = {} }}",
                                                 lua_text(repeats.at("period")), lua_text(repeats.at("count")))
                                   : "";
    return "T.blend { " + seed + "sources = { " + join(parts) + " }" + mask + " }";
  }
  if (field.type == Type::kSpan && value.is_object()) return span(value);
  return lua_text(value);
}

std::optional<double> parse_quantity(std::string_view text, Unit unit) {
  double sum = 0, last_factor = std::numeric_limits<double>::infinity();
  const auto trim = [&] {
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
    while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  };
  struct Suffix {
    std::string_view text;
    Unit unit;
    double factor;
  };
  static constexpr Suffix kSuffixes[] = {
      {"ms", Unit::kSeconds, 1e-3},   {"s", Unit::kSeconds, 1},          {"min", Unit::kSeconds, 60},
      {"h", Unit::kSeconds, 3600},    {"d", Unit::kSeconds, 86400},      {"K", Unit::kCount, 1e3},
      {"M", Unit::kCount, 1e6},       {"B", Unit::kCount, 1e9},          {"T", Unit::kCount, 1e12},
      {"B", Unit::kBytes, 1},         {"KB", Unit::kBytes, 1e3},         {"MB", Unit::kBytes, 1e6},
      {"GB", Unit::kBytes, 1e9},      {"TB", Unit::kBytes, 1e12},        {"KiB", Unit::kBytes, 1024},
      {"MiB", Unit::kBytes, 1048576}, {"GiB", Unit::kBytes, 1073741824}, {"TiB", Unit::kBytes, 1099511627776},
  };
  for (bool first = true;; first = false) {
    trim();
    double number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end == text.data() || !std::isfinite(number)) return std::nullopt;
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    trim();
    if (text.empty()) return first ? std::optional(number) : std::nullopt;
    // Times alone may have more parts behind: "11h30min".
    const size_t size =
        unit == Unit::kSeconds ? std::min(text.find_first_of("0123456789.+- "), text.size()) : text.size();
    const auto* const suffix = std::ranges::find_if(
        kSuffixes, [&](const Suffix& s) { return s.unit == unit && s.text == text.substr(0, size); });
    if (suffix == std::end(kSuffixes) || suffix->factor >= last_factor) return std::nullopt;
    if (!first && number < 0) return std::nullopt;
    sum += number * (last_factor = suffix->factor);
    text.remove_prefix(size);
    if (text.empty()) return std::isfinite(sum) ? std::optional(sum) : std::nullopt;
  }
}

std::string describe(const Node& node) {
  switch (node.kind) {
    case Node::Kind::kBool:
      return node.boolean ? "true" : "false";
    case Node::Kind::kInt:
      return fmt::format("{}", node.integer);
    case Node::Kind::kNumber:
      return number_text(node.number);
    case Node::Kind::kString:
      return lua_text(Json(node.text.size() <= 64 ? node.text : node.text.substr(0, 61) + "..."));
    case Node::Kind::kTable:
      return describe_entries(node);
    case Node::Kind::kCtor: {
      if (node.entries.empty()) return "T." + node.text;
      const NodePtr& first = node.entries[0].value;
      if (node.entries.size() == 1 && node.entries[0].key.empty() && !first->is_table())
        return fmt::format("T.{}({})", node.text, describe(*first));
      const std::string inside = describe_entries(node);
      return "T." + node.text + " " + (inside.size() <= 60 ? inside : "{...}");
    }
    case Node::Kind::kRef:
      return "T.ref \"" + node.text + "\"";
    case Node::Kind::kOp:
      return "an expression of T.ref";
    case Node::Kind::kUnset:
      return "T.unset";
    case Node::Kind::kReplace:
      return "T.replace {...}";
    case Node::Kind::kRecipe:
      return "a recipe";
    case Node::Kind::kOther:
      return "a " + node.text;
  }
  return "";
}

}  // namespace cairn::dsl
