// One value of a recipe, from how it is written to how the canonical JSON holds it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "dsl/resolve.h"
#include "dsl/stages.h"

namespace cairn::dsl {
namespace {

bool is_ref(const Node& node) { return node.kind == Node::Kind::kRef || node.kind == Node::Kind::kOp; }

bool is_list(const Node& node) {
  return node.kind == Node::Kind::kTable &&
         std::all_of(node.entries.begin(), node.entries.end(), [](const Entry& e) { return e.key.empty(); });
}

bool is_ctor(const Node& node, const char* name) { return node.kind == Node::Kind::kCtor && node.text == name; }

/// Numbers and strings as JSON; others as null.
Json plain_json(const Node& node) {
  switch (node.kind) {
    case Node::Kind::kBool:
      return node.boolean;
    case Node::Kind::kInt:
      return node.integer;
    case Node::Kind::kNumber:
      return node.number;
    case Node::Kind::kString:
      return node.text;
    default:
      return Json();
  }
}

/// 220e6 is an integer to a person; 1 is a number to a double field.
Json adapt(const Field& field, Json value) {
  const bool whole = field.type == Type::kInt || field.type == Type::kSeed || field.type == Type::kIntList;
  if (whole && value.is_number_float()) {
    const double number = value.get<double>();
    if (number == std::floor(number) && std::abs(number) < 9007199254740992.0) return static_cast<int64_t>(number);
  }
  // Beyond 2^53 digits would be lost: it stays an integer, which no such field takes.
  if (!whole && value.is_number_integer() && !loses_digits(value)) return value.get<double>();
  return value;
}

/// T.on { "saved", "copied", run = {...} }: what stands without a name is the list that comes first.
Node with_list_first(const Node& given, const Field& first) {
  Node list, out = given;
  list.kind = Node::Kind::kTable;
  const auto unnamed = [](const Entry& entry) { return entry.key.empty(); };
  std::ranges::copy_if(given.entries, std::back_inserter(list.entries), unnamed);
  if (list.entries.empty() || given.find(first.name) != nullptr) return given;
  std::erase_if(out.entries, unnamed);
  const Place place = list.entries.front().place;
  out.entries.insert(out.entries.begin(), Entry{first.name, std::make_shared<const Node>(std::move(list)), place});
  return out;
}

/// The block of a list's element, by its constructor; null: it is none of them.
const Block* constructed_block(const Field& field, const Node& node) {
  for (const Block* block : field.accepts)
    if (is_ctor(node, block->constructors.front().c_str())) return block;
  return nullptr;
}

/// An element of a list of several constructors, as it is stored: its kind, and the others' fields at their defaults.
Json stored_element(const Field& field, const Block& block, Json fields) {
  if (&block == field.block) return fields;
  fields["kind"] = block.name;
  for (const Field& part : field.block->fields)
    if (!fields.contains(part.key)) fields[part.key] = part.fallback;
  return fields;
}

}  // namespace

std::optional<Json> Resolver::convert(const std::string& path, const Field& field, const Node& value,
                                      const Place& place, Pass pass) {
  switch (field.form) {
    case Form::kEveryStep:
    case Form::kLogSteps: {
      if (!is_ctor(value, "every")) return complain_type(path, place, field, value), std::nullopt;
      const auto every = convert_every(path, value, place);
      if (!every) return std::nullopt;
      if (every->at("steps") == 0) return complain_type(path, place, field, value), std::nullopt;
      if (field.form == Form::kLogSteps && every->at("steps") == 1) return Json(0);
      return every->at("steps");
    }
    case Form::kEveryList: {
      if (!is_ctor(value, "every") && !is_list(value)) return complain_type(path, place, field, value), std::nullopt;
      Json out = Json::array();
      bool good = true;
      const auto add = [&](const Node& node, const Place& at) {
        if (!is_ctor(node, "every")) return complain_type(path, at, field, node), void(good = false);
        const auto every = convert_every(path, node, at);
        if (every) out.push_back(*every);
        good = good && every.has_value();
      };
      if (is_list(value)) {
        for (const Entry& entry : value.entries) add(*entry.value, entry.place);
      } else {
        add(value, place);
      }
      return good ? std::optional(out) : std::nullopt;
    }
    case Form::kKeep: {
      Json out = Json::array();
      bool good = true;
      const auto add = [&](const Node& node, const Place& at) {
        const bool known =
            node.kind == Node::Kind::kCtor && std::any_of(field.accepts.begin(), field.accepts.end(),
                                                          [&](const Block* block) { return block->name == node.text; });
        if (!known) return complain_type(path, at, field, node), void(good = false);
        Json rule{{"kind", node.text}, {"metric", "loss"}, {"count", 0}, {"steps", 0}, {"seconds", 0.0}};
        rule["at"] = Json::array();
        const bool timed = node.text == "every" || node.text == "within";
        const auto fields =
            timed ? convert_every(path, node, at) : convert_fields(path, *find_constructor(node.text), node, pass);
        if (!fields) return void(good = false);
        for (const auto& [key, part] : fields->items()) rule[node.text == "at" && key == "steps" ? "at" : key] = part;
        out.push_back(std::move(rule));
      };
      if (is_list(value)) {
        for (const Entry& entry : value.entries) add(*entry.value, entry.place);
      } else {
        add(value, place);
      }
      return good ? std::optional(out) : std::nullopt;
    }
    case Form::kPlaces: {
      Json out = Json::array();
      bool good = true;
      const auto add = [&](const Node& given, const Place& at) {
        const std::string here = fmt::format("{}[{}]", path, out.size() + 1);
        const Block* const constructed = constructed_block(field, given);
        if (constructed == nullptr) return complain_type(here, at, field, given), void(good = false);
        const Block& block = *constructed;
        const Field& first = block.fields.front();
        const Node node = first.type == Type::kEnumList ? with_list_first(given, first) : given;
        if (node.find(first.name) == nullptr && (node.entries.empty() || !node.entries.front().key.empty())) {
          complain(here, node.place,
                   {"missing", fmt::format(": T.{} must begin with {}, got {}", block.name, first.doc, describe(node)),
                    "", ""});
          return void(good = false);
        }
        const auto fields = convert_fields(here, block, node, pass);
        good = good && fields.has_value();
        out.push_back(fields ? stored_element(field, block, *fields) : Json());
      };
      if (is_list(value)) {
        for (const Entry& entry : value.entries) add(*entry.value, entry.place);
      } else {
        add(value, place);
      }
      return good ? std::optional(out) : std::nullopt;
    }
    case Form::kSegments:
      return convert_segments(path, field, value, place, pass);
    case Form::kStages:
      return convert_stages(path, field, value, place, pass);
    case Form::kTokenizer:
      if (is_ctor(value, "bytes") && value.entries.empty()) return Json{{"kind", "bytes"}, {"path", ""}};
      if (is_ctor(value, "sentencepiece")) {
        const auto file = convert_fields(path, *find_constructor("sentencepiece"), value, pass);
        if (!file) return std::nullopt;
        return Json{{"kind", "sentencepiece"}, {"path", file->at("path")}};
      }
      if (is_ctor(value, "hf_tokenizer")) {
        const auto file = convert_fields(path, *find_constructor("hf_tokenizer"), value, pass);
        if (!file) return std::nullopt;
        return Json{{"kind", "hf"}, {"path", file->at("path")}};
      }
      return complain_type(path, place, field, value), std::nullopt;
    case Form::kData:
      return convert_data(path, field, value, place, pass);
    case Form::kPlain:
    case Form::kPositions:
    case Form::kVocab:
    case Form::kBetas:
      break;
  }
  if (field.type == Type::kSpan) return convert_span(path, field, value, place, pass);
  return convert_plain(path, field, value, place, pass);
}

std::optional<Json> Resolver::convert_plain(const std::string& path, const Field& field, const Node& value,
                                            const Place& place, Pass pass) {
  if (is_ref(value)) return convert_ref(path, field, value, place, pass);
  Json json;
  switch (field.type) {
    case Type::kIntList:
    case Type::kNumberList:
    case Type::kEnumList:
    case Type::kStringList:
      if (!is_list(value)) return complain_type(path, place, field, value), std::nullopt;
      json = Json::array();
      for (const Entry& entry : value.entries) {
        if (is_ref(*entry.value)) {
          const auto number = evaluate(path, *entry.value, pass);
          if (!number) return std::nullopt;
          if (number->is_null()) return Json();
          json.push_back(adapt(field, *number));
          continue;
        }
        json.push_back(plain_json(*entry.value));
        if (json.back().is_null()) return complain_type(path, entry.place, field, *entry.value), std::nullopt;
        if (field.type != Type::kEnumList && field.type != Type::kStringList) json.back() = adapt(field, json.back());
      }
      break;
    case Type::kInt:
    case Type::kSeed:
    case Type::kNumber:
      json = plain_json(value);
      if (json.is_string() && field.unit != Unit::kNone) {
        const std::optional<double> quantity = parse_quantity(value.text, field.unit);
        if (!quantity) return complain_type(path, place, field, value), std::nullopt;
        json = *quantity;
      }
      if (json.is_number()) json = adapt(field, json);
      break;
    default:
      json = plain_json(value);
  }
  if (json.is_null()) return complain_type(path, place, field, value), std::nullopt;
  if (const auto wrong = check_value(field, json)) return complain(path, place, *wrong), std::nullopt;
  return json;
}

std::optional<Json> Resolver::convert_ref(const std::string& path, const Field& field, const Node& value,
                                          const Place& place, Pass pass) {
  std::optional<Json> found = evaluate(path, value, pass);
  if (!found || found->is_null()) return found;
  if (found->is_number()) found = adapt(field, *found);
  if (auto wrong = check_value(field, *found)) {
    wrong->message += value.kind == Node::Kind::kRef ? fmt::format(" from T.ref \"{}\"", value.text)
                                                     : std::string(" from an expression of T.ref");
    return complain(path, place, *wrong), std::nullopt;
  }
  return found;
}

std::optional<Json> Resolver::evaluate(const std::string& path, const Node& value, Pass pass) {
  if (value.is_number()) return plain_json(value);
  if (value.kind == Node::Kind::kRef) {
    const Field* field = find_field(value.text, root_);
    const bool leaf = field != nullptr && field->form != Form::kBetas &&
                      !(field->type == Type::kBlock && field->form == Form::kPlain);
    if (!leaf) {
      std::vector<std::string> names;
      visit_fields([&](const std::string& name, const Field&) { names.push_back(name); }, root_);
      complain(
          path, value.place,
          {"unknown_ref", fmt::format(": T.ref \"{}\" names no field", value.text), nearest(value.text, names), ""});
      return std::nullopt;
    }
    if (pass == Pass::kApply) return Json();
    return get(value.text);
  }
  std::vector<double> numbers;
  bool pending = false;
  for (const Entry& operand : value.entries) {
    const auto number = evaluate(path, *operand.value, pass);
    if (!number) return std::nullopt;
    if (number->is_null()) {
      pending = true;
    } else if (!number->is_number()) {
      complain(path, value.place,
               {"wrong_type",
                fmt::format(": {} is {}, and only numbers can be calculated with", describe(*operand.value),
                            lua_text(*number)),
                "", ""});
      return std::nullopt;
    } else {
      numbers.push_back(number->get<double>());
    }
  }
  if (pending) return Json();
  const std::string& op = value.text;
  const double a = numbers[0], b = numbers.size() > 1 ? numbers[1] : 0;
  if (op == "add") return a + b;
  if (op == "sub") return a - b;
  if (op == "mul") return a * b;
  if (op == "div") return a / b;
  if (op == "idiv") return std::floor(a / b);
  if (op == "mod") return a - std::floor(a / b) * b;
  if (op == "pow") return std::pow(a, b);
  return -a;
}

/// T.epochs as the samples that it takes.
std::optional<Json> Resolver::count_epochs(const std::string& path, const Node& value, double epochs) {
  const auto wrong = [&](const std::string& why) -> std::optional<Json> {
    complain(path, value.place, {"epochs", fmt::format(": T.epochs({}): {}", epochs, why), "", ""});
    return std::nullopt;
  };
  if (!epoch_samples_) return wrong("samples of an epoch are not known here");
  const Result<int64_t> samples = epoch_samples_();
  if (!samples.ok()) return wrong(samples.error().message);
  return Json{{"unit", "samples"}, {"value", std::ceil(epochs * static_cast<double>(samples.value()))}};
}

std::optional<Json> Resolver::convert_span(const std::string& path, const Field& field, const Node& value,
                                           const Place& place, Pass pass) {
  std::vector<std::string> units = field.choices;
  if (units.empty()) units = {"steps", "samples", "tokens", "fraction"};
  if (std::find(units.begin(), units.end(), "samples") != units.end()) units.push_back("epochs");
  if (value.kind != Node::Kind::kCtor || std::find(units.begin(), units.end(), value.text) == units.end() ||
      value.entries.size() != 1)
    return complain_type(path, place, field, value), std::nullopt;
  const Node& amount = *value.entries[0].value;
  std::optional<double> number;
  if (amount.is_number()) number = amount.as_number();
  const bool share = value.text == "fraction", epochs = value.text == "epochs";
  if (amount.kind == Node::Kind::kString && !share && !epochs) number = parse_quantity(amount.text, Unit::kCount);
  if (!number) {
    complain(path, value.place,
             {"wrong_type",
              fmt::format(": T.{} takes a number{}, got {}", value.text,
                          share || epochs ? "" : " or a string such as \"450B\"", describe(amount)),
              "", ""});
    return std::nullopt;
  }
  if (epochs && !(*number > 0 && std::isfinite(*number))) {
    complain(path, value.place,
             {"out_of_range", fmt::format("must be a number of epochs > 0, got {}", *number), "", ""});
    return std::nullopt;
  }
  const Json integer = plain_json(amount);
  if (epochs && pass == Pass::kApply) return Json();
  if (epochs) {
    const std::optional<Json> counted = count_epochs(path, value, *number);
    if (!counted) return std::nullopt;
    if (const auto wrong = check_value(field, *counted)) return complain(path, value.place, *wrong), std::nullopt;
    return counted;
  }
  const Json out{{"unit", value.text}, {"value", loses_digits(integer) ? integer : Json(*number)}};
  if (const auto wrong = check_value(field, out)) return complain(path, value.place, *wrong), std::nullopt;
  return out;
}

std::optional<Json> Resolver::convert_fields(const std::string& path, const Block& block, const Node& value,
                                             Pass pass) {
  Json out = Json::object();
  bool good = true, pending = false;
  for (const Entry& entry : value.entries) {
    const bool first = block.positional && entry.key.empty() && &entry == &value.entries.front();
    const Field* field = first ? &block.fields[0] : entry.key.empty() ? nullptr : block.find(entry.key);
    if (field == nullptr) {
      unknown_field(block, path, entry);
      good = false;
      continue;
    }
    if (entry.value->kind == Node::Kind::kUnset) continue;
    const std::string at = first ? path : path + "." + field->name;
    const auto converted = convert(at, *field, *entry.value, entry.place, pass);
    good = good && converted.has_value();
    if (!converted) continue;
    pending = pending || converted->is_null();
    out[field->key] = *converted;
  }
  for (const Field& field : block.fields) {
    if (out.contains(field.key)) continue;
    if (!field.required) {
      if (field.rule.empty()) out[field.key] = field.fallback;
      continue;
    }
    const bool stands_first = block.positional && &field == &block.fields[0] && !value.entries.empty() &&
                              value.entries.front().key.empty();  // there, and wrong: that was told
    if (value.find(field.name) == nullptr && !stands_first && reported_.count(path + "." + field.name) == 0) {
      complain(path + "." + field.name, value.place,
               {"missing", fmt::format("is missing; it must be {}", expected(field)), "", ""});
    }
    good = false;
  }
  if (!good) return std::nullopt;
  return out;
}

std::optional<Json> Resolver::convert_every(const std::string& path, const Node& value, const Place& place) {
  const Block& block = *find_constructor(value.text);  // every, or within, which has no steps
  const auto fields = convert_fields(path, block, value, Pass::kFinal);
  if (!fields) return std::nullopt;
  if (fields->size() != 1) {
    complain(path, value.place.call ? value.place : place,
             {"wrong_type",
              fmt::format(": T.{} takes exactly one of {}seconds, minutes and hours", block.name,
                          block.find("steps") != nullptr ? "steps, " : ""),
              "", ""});
    return std::nullopt;
  }
  Json out{{"steps", 0}, {"seconds", 0.0}};
  for (const auto& [key, amount] : fields->items()) {
    if (key == "steps") {
      out["steps"] = amount;
    } else {
      out["seconds"] = amount.get<double>() * (key == "minutes" ? 60 : key == "hours" ? 3600 : 1);
    }
  }
  return out;
}

std::optional<Json> Resolver::convert_stages(const std::string& path, const Field& field, const Node& value,
                                             const Place& place, Pass pass) {
  Json out = Json::array();
  bool good = true;
  const auto add = [&](const Node& node, const Place& at) {
    const std::string here = fmt::format("{}[{}]", path, out.size() + 1);
    const Block* block = nullptr;
    for (const Block* accepted : field.accepts)
      if (node.kind == Node::Kind::kCtor && accepted->name == node.text && !accepted->list) block = accepted;
    if (block == nullptr) {
      complain(here, at,
               {"wrong_type",
                fmt::format("must be T.warmup, T.hold, T.cosine, T.linear, T.inverse_sqrt, T.exponential or "
                            "T.one_minus_sqrt, got {}",
                            describe(node)),
                "", ""});
      good = false;
      out.push_back(Json());
      return;
    }
    auto stage = convert_fields(here, *block, node, pass);
    good = good && stage.has_value();
    if (!stage) stage = Json::object();
    (*stage)["kind"] = node.text;
    if (!stage->contains("over")) (*stage)["over"] = Json{{"unit", "steps"}, {"value", 0.0}};
    if (!stage->contains("to")) (*stage)["to"] = 0.0;
    out.push_back(std::move(*stage));
  };
  if (is_ctor(value, "schedule")) {
    if (value.entries.empty()) return complain_type(path, place, field, value), std::nullopt;
    for (const Entry& entry : value.entries) {
      if (entry.key.empty()) {
        add(*entry.value, entry.place);
      } else {
        unknown_field(*find_constructor("schedule"), path, entry);
        good = false;
      }
    }
  } else if (value.kind == Node::Kind::kCtor && std::any_of(field.accepts.begin(), field.accepts.end(),
                                                            [&](const Block* b) { return b->name == value.text; })) {
    add(value, place);
  } else {
    return complain_type(path, place, field, value), std::nullopt;
  }
  return good ? std::optional(out) : std::nullopt;
}

std::optional<Json> Resolver::convert_segments(const std::string& path, const Field& field, const Node& value,
                                               const Place& place, Pass pass) {
  // What a stage changes is known when it is resolved (resolve_stages): here its form and its beginning alone.
  if (!is_ctor(value, "stage") && !is_list(value)) return complain_type(path, place, field, value), std::nullopt;
  if (is_list(value) && value.entries.size() > kMaxStages) {
    complain(path, place,
             {"out_of_range", fmt::format("has {} entries, more than {}", value.entries.size(), kMaxStages), "", ""});
    return std::nullopt;
  }
  const Field& at = *find_constructor("stage")->find("at");
  Json out = Json::array();
  bool good = true;
  const auto add = [&](const Node& node, const Place& here) {
    if (!is_ctor(node, "stage")) return complain_type(path, here, field, node), void(good = false);
    const std::string beginning = fmt::format("{}[{}].at", path, out.size() + 1);
    const Entry* entry = node.find("at");
    std::optional<Json> span;
    if (entry != nullptr) {
      span = convert_span(beginning, at, *entry->value, entry->place, pass);
    } else {
      complain(beginning, node.place, {"missing", fmt::format("is missing; it must be {}", expected(at)), "", ""});
    }
    out.push_back({{"at", span ? *span : Json()}, {"changes", Json::object()}});
  };
  if (is_list(value)) {
    for (const Entry& entry : value.entries) add(*entry.value, entry.place);
  } else {
    add(value, place);
  }
  return good ? std::optional(out) : std::nullopt;
}

std::optional<Json> Resolver::convert_source(const std::string& path, const Node& value, Pass pass) {
  const Block& block = *find_constructor(value.text);
  auto fields = convert_fields(path, block, value, pass);
  if (!fields) return std::nullopt;
  if (!fields->contains("name")) (*fields)["name"] = default_source_name(fields->at("path"));
  (*fields)["kind"] = value.text;
  if (!fields->contains("valid_path")) (*fields)["valid_path"] = "";
  if (!fields->contains("dtype")) (*fields)["dtype"] = "";
  if (!fields->contains("split")) (*fields)["split"] = Json::array();
  if (!fields->contains("tokens")) (*fields)["tokens"] = 0;
  if (!fields->contains("overlong")) (*fields)["overlong"] = "refuse";
  if (!fields->contains("weigh")) (*fields)["weigh"] = "token";
  if (value.text != "token_files") {
    const Json& split = fields->at("split");
    if (split.is_null()) return fields;
    const auto place_of_split = [&] {
      const Entry* entry = value.find("split");
      return entry == nullptr ? value.place : entry->place;
    };
    if (split.empty() || split.size() > 3 || split[0].get<double>() <= 0) {
      complain(path + ".split", place_of_split(),
               {"out_of_range",
                fmt::format("must be one to three parts for training, validation and test, the first > 0, got {}",
                            lua_text(split)),
                "", ""});
      return std::nullopt;
    }
  }
  return fields;
}

bool Resolver::convert_weights(const std::string& path, const Entry& weights, Json& sources, Pass pass) {
  const Field& table = *find_constructor("blend")->find("weights");
  const Field& weight = *find_constructor("megatron")->find("weight");
  if (!weights.value->is_table()) return complain_type(path, weights.place, table, *weights.value), false;
  std::vector<std::string> names;
  for (const Json& source : sources) names.push_back(source.at("name"));
  bool good = true;
  for (const Entry& entry : weights.value->entries) {
    const auto named = std::find(names.begin(), names.end(), entry.key);
    if (entry.key.empty()) {
      complain_type(path, entry.place, table, *weights.value);
      good = false;
    } else if (named == names.end()) {
      complain(path + "." + entry.key, entry.place,
               {"unknown_field", ": no source has this name", nearest(entry.key, names),
                fmt::format("{}", fmt::join(names, ", "))});
      good = false;
    } else if (entry.value->kind != Node::Kind::kUnset) {
      const auto value = convert_plain(path + "." + entry.key, weight, *entry.value, entry.place, pass);
      good = good && value.has_value();
      if (value && !value->is_null()) sources[static_cast<size_t>(named - names.begin())]["weight"] = *value;
    }
  }
  return good;
}

std::optional<Json> Resolver::convert_data(const std::string& path, const Field& field, const Node& value,
                                           const Place& place, Pass pass) {
  const auto is_source = [](const Node& node) {
    return is_ctor(node, "megatron") || is_ctor(node, "token_files") || is_ctor(node, "instruct");
  };
  Json out{{"seed", 0}, {"sources", Json::array()}, {"mask_repeats", {{"period", 0}, {"count", 0}}}};
  if (is_source(value)) {
    const auto source = convert_source(path, value, pass);
    if (!source) return std::nullopt;
    out["sources"].push_back(*source);
    return out;
  }
  if (!is_ctor(value, "blend")) return complain_type(path, place, field, value), std::nullopt;
  const Block& blend = *find_constructor("blend");
  bool good = true;
  const Entry* weights = nullptr;
  for (const Entry& entry : value.entries) {
    const Field* part = entry.key.empty() ? nullptr : blend.find(entry.key);
    if (part == nullptr) {
      unknown_field(blend, path, entry);
      good = false;
    } else if (part->name == "weights") {
      weights = &entry;
    } else if (part->name == "seed") {
      const auto seed = convert(path + ".seed", *part, *entry.value, entry.place, pass);
      good = good && seed.has_value();
      if (seed) out["seed"] = *seed;
    } else if (part->name == "mask_repeats") {
      if (entry.value->kind == Node::Kind::kUnset) continue;
      if (!is_ctor(*entry.value, "repeats") && entry.value->kind != Node::Kind::kTable) {
        complain_type(path + ".mask_repeats", entry.place, *part, *entry.value);
        good = false;
        continue;
      }
      const auto repeats = convert_fields(path + ".mask_repeats", *find_constructor("repeats"), *entry.value, pass);
      good = good && repeats.has_value();
      if (repeats) out["mask_repeats"] = *repeats;
    } else if (!is_list(*entry.value) || entry.value->entries.empty()) {
      complain_type(path + ".sources", entry.place, *part, *entry.value);
      good = false;
    } else {
      for (size_t i = 0; i < entry.value->entries.size(); ++i) {
        const Entry& element = entry.value->entries[i];
        const std::string at = fmt::format("{}.sources[{}]", path, i + 1);
        if (!is_source(*element.value)) {
          complain(
              at, element.place,
              {"wrong_type",
               "must be T.megatron {...}, T.token_files {...} or T.instruct {...}, got " + describe(*element.value), "",
               ""});
          good = false;
          continue;
        }
        const auto source = convert_source(at, *element.value, pass);
        good = good && source.has_value();
        if (source) out["sources"].push_back(*source);
      }
    }
  }
  if (good && value.find("sources") == nullptr) {
    complain(path + ".sources", value.place,
             {"missing", "is missing; it must be " + expected(*blend.find("sources")), "", ""});
    good = false;
  }
  if (good && weights != nullptr) good = convert_weights(path + ".weights", *weights, out["sources"], pass);
  return good ? std::optional(out) : std::nullopt;
}

}  // namespace cairn::dsl
