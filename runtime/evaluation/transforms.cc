#include "runtime/evaluation/transforms.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <numeric>

#include "runtime/core/random.h"
#include "runtime/evaluation/template.h"
#include "runtime/json/json.h"

namespace cairn::evaluation {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kNames[] = {"shuffle",    "rename", "others_wrong", "none_right",
                                       "statements", "single", "open"};

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// The parts of an item that transforms work on.
struct Parts {
  std::string question;
  std::vector<std::string> choices;
  std::vector<int64_t> right;
};

Result<Parts> parts_of(const Item& item) {
  Parts out;
  for (const char* const key : {"choices", "answer"}) {
    if (!item.fields.contains(key)) return invalid(fmt::format("transforms need \"{}\", which the item lacks", key));
  }
  if (item.fields.contains("question") && item.fields["question"].is_string()) {
    out.question = item.fields["question"].get<std::string>();
  }
  RT_TRY_SET(out.choices, texts_of(item.fields["choices"], "choices"));
  RT_TRY_SET(out.right, right_choices(item.fields["answer"], out.choices));
  return out;
}

void write(Parts parts, Item* item) {
  item->fields["choices"] = std::move(parts.choices);
  if (parts.right.size() == 1) {
    item->fields["answer"] = parts.right[0];
  } else {
    item->fields["answer"] = std::move(parts.right);
  }
}

void shuffle(uint64_t seed, Item* item, Parts parts) {
  std::vector<size_t> order(parts.choices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::sort(order, {}, [&](size_t k) { return draw_key(seed, "shuffle", item->id, k); });
  Parts out = parts;
  for (size_t to = 0; to < order.size(); ++to) out.choices[to] = parts.choices[order[to]];
  out.right.clear();
  for (size_t to = 0; to < order.size(); ++to) {
    if (std::ranges::find(parts.right, static_cast<int64_t>(order[to])) != parts.right.end()) {
      out.right.push_back(static_cast<int64_t>(to));
    }
  }
  write(std::move(out), item);
}

/// others_wrong and none_right: `text` stands where the right choice stood, or, drawn, where a wrong one did.
Status replace(const Transform& transform, uint64_t seed, Item* item, Parts parts) {
  if (parts.right.size() != 1) return invalid("one right choice is replaced; the item has several: use `single` first");
  auto replaced = static_cast<size_t>(parts.right[0]);
  const double drawn = static_cast<double>(draw_key(seed, transform.name, item->id) >> 11) * 0x1p-53;
  if (transform.name == "none_right" && drawn < transform.share && parts.choices.size() > 1) {
    const auto other = draw_key(seed, transform.name, item->id, 1) % (parts.choices.size() - 1);
    replaced = other < replaced ? other : other + 1;
  }
  parts.choices[replaced] = transform.text;
  write(std::move(parts), item);
  return {};
}

/// An item for each right choice, with that one and all wrong ones.
void split(const Item& item, const Parts& parts, std::vector<Item>* out) {
  for (size_t m = 0; m < parts.right.size(); ++m) {
    Item one = item;
    Parts kept{.question = parts.question};
    for (size_t k = 0; k < parts.choices.size(); ++k) {
      const bool right = std::ranges::find(parts.right, static_cast<int64_t>(k)) != parts.right.end();
      if (right && static_cast<int64_t>(k) != parts.right[m]) continue;
      if (right) kept.right = {std::ssize(kept.choices)};
      kept.choices.push_back(parts.choices[k]);
    }
    if (parts.right.size() > 1) one.id += fmt::format("#{}", m);
    write(std::move(kept), &one);
    out->push_back(std::move(one));
  }
}

Status apply(const Transform& transform, uint64_t seed, Item item, std::vector<Item>* out) {
  RT_TRY_SET(Parts parts, parts_of(item));
  if (transform.name == "single") {
    split(item, parts, out);
    return {};
  }
  if (transform.name == "shuffle") {
    shuffle(seed, &item, std::move(parts));
  } else if (transform.name == "rename") {
    if (transform.labels.size() < parts.choices.size()) {
      return invalid(fmt::format("{} labels for {} choices", transform.labels.size(), parts.choices.size()));
    }
    item.fields["labels"] =
        std::vector<std::string>(transform.labels.begin(), transform.labels.begin() + std::ssize(parts.choices));
  } else if (transform.name == "others_wrong" || transform.name == "none_right") {
    RT_TRY(replace(transform, seed, &item, std::move(parts)));
  } else if (transform.name == "statements") {
    std::string text;
    for (const std::string& choice : parts.choices) text += parts.question + " " + choice + "\n";
    item.fields["question"] = text + "\n" + parts.question;
  } else {  // open
    Json answers = Json::array();
    for (const int64_t right : parts.right) answers.push_back(parts.choices[right]);
    item.fields.erase("choices");
    item.fields.erase("answer");
    item.fields["answers"] = std::move(answers);
  }
  out->push_back(std::move(item));
  return {};
}

}  // namespace

std::vector<std::string_view> transform_names() { return {std::begin(kNames), std::end(kNames)}; }

Result<Transform> make_transform(const Json& said) {
  Transform out;
  Json settings;
  if (said.is_string()) {
    out.name = said.get<std::string>();
  } else if (said.is_object() && said.size() == 1) {
    out.name = said.begin().key();
    settings = said.begin().value();
  } else {
    return invalid("a transform is a name, or one name with its settings");
  }
  if (std::ranges::find(kNames, out.name) == std::end(kNames)) {
    return invalid(fmt::format("the transform \"{}\" is not known; known: {}", out.name, fmt::join(kNames, ", ")));
  }
  if (out.name == "others_wrong") out.text = "All other answers are wrong";
  if (out.name == "none_right") out.text = "None of these answers is right";
  if (out.name == "rename") {
    out.labels = {"1", "2", "3", "4", "5", "6", "7", "8", "9", "10"};
    if (!settings.is_null()) {
      RT_TRY_SET(out.labels, texts_of(settings, "rename"));
    }
    return out;
  }
  if (settings.is_null()) return out;
  if (!settings.is_object()) return invalid(fmt::format("{}: its settings are no table", out.name));
  for (const auto& [key, value] : settings.items()) {
    if (key == "text" && !out.text.empty() && value.is_string()) {
      out.text = value.get<std::string>();
    } else if (key == "share" && out.name == "none_right" && value.is_number() && value.get<double>() >= 0 &&
               value.get<double>() <= 1) {
      out.share = value.get<double>();
    } else {
      return invalid(fmt::format("{}: the setting \"{}\" is not known, or has another type or range", out.name, key));
    }
  }
  return out;
}

Status apply_transform(const Transform& transform, uint64_t seed, std::vector<Item>* items) {
  std::vector<Item> out;
  for (Item& item : *items) {
    const std::string id = item.id;
    RT_TRY(apply(transform, seed, std::move(item), &out).with(fmt::format("item {}: {}", id, transform.name)));
  }
  *items = std::move(out);
  return {};
}

Result<std::vector<int64_t>> right_choices(const Json& answer, const std::vector<std::string>& choices) {
  std::vector<int64_t> out;
  const auto add = [&](const Json& one) -> Status {
    if (const auto number = json_integer(nlohmann::json(one), 0, std::ssize(choices) - 1)) {
      out.push_back(*number);
      return {};
    }
    const auto found = one.is_string() ? std::ranges::find(choices, one.get<std::string>()) : choices.end();
    if (found == choices.end()) {
      return invalid(
          fmt::format("the answer {} is none of the {} choices, which count from 0", python_text(one), choices.size()));
    }
    out.push_back(found - choices.begin());
    return {};
  };
  if (!answer.is_array()) {
    RT_TRY(add(answer));
    return out;
  }
  if (answer.empty()) return invalid("the list of right answers is empty");
  for (const Json& one : answer) RT_TRY(add(one));
  return out;
}

uint64_t draw_key(uint64_t seed, std::string_view name, std::string_view id, uint64_t k) {
  return mix64(mix64(stream_key(seed, name) ^ hash_of(id)) + k);
}

uint64_t hash_of(std::string_view text) { return XXH3_64bits(text.data(), text.size()); }

Result<std::vector<std::string>> texts_of(const Json& list, std::string_view what) {
  if (!list.is_array()) return invalid(fmt::format("\"{}\" is no list", what));
  std::vector<std::string> out;
  for (const Json& one : list) {
    if (!one.is_string() && !one.is_number()) return invalid(fmt::format("\"{}\" holds what is no text", what));
    out.push_back(python_text(one));
  }
  return out;
}

}  // namespace cairn::evaluation
