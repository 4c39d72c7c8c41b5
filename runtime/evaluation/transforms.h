#pragma once
// Items, and what makes other items of them: choices in another order, relabelled, replaced. Pure functions of the item
// and a seed: the same on every machine, in every order.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::evaluation {

struct Item {
  std::string id;                 // of the file, else the number of its line
  nlohmann::ordered_json fields;  // an object
};

struct Transform {
  std::string name;                 // one of transform_names()
  std::string text;                 // others_wrong, none_right
  double share = 0.5;               // none_right: of items in which a wrong choice is replaced instead
  std::vector<std::string> labels;  // rename
};

std::vector<std::string_view> transform_names();

/// "shuffle", or {"rename": ["1", "2"]}, {"none_right": {"text": "None of these", "share": 0.25}}. Errors:
/// kInvalidInput naming what was found and what is known.
Result<Transform> make_transform(const nlohmann::ordered_json& said);

/// Applies one transform to all items. It reads and writes `question`, `choices`, `answer` (a number, a list of
/// numbers, or the right choice's text) and `labels`; `open` removes `choices` and writes `answers`. Errors:
/// kInvalidInput, naming the item, where it lacks these fields.
Status apply_transform(const Transform& transform, uint64_t seed, std::vector<Item>* items);

/// The numbers of an item's right choices. Errors: kInvalidInput where `answer` names no choice.
Result<std::vector<int64_t>> right_choices(const nlohmann::ordered_json& answer,
                                           const std::vector<std::string>& choices);

/// An ordering key for (seed, name, id, k): the lowest are drawn.
uint64_t draw_key(uint64_t seed, std::string_view name, std::string_view id, uint64_t k = 0);

/// XXH3-64.
uint64_t hash_of(std::string_view text);

/// The texts of a list. Errors: kInvalidInput for no list, or an element that is no text or number.
Result<std::vector<std::string>> texts_of(const nlohmann::ordered_json& list, std::string_view what);

}  // namespace cairn::evaluation
