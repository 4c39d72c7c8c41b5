#pragma once
// The words that the schema's tables are written in: a field bound to a member of a struct, and what is said of it.
// Only for the files with tables (schema.cc, cluster_schema.cc).

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dsl/schema.h"
#include "runtime/core/check.h"
#include "runtime/json/json.h"

namespace cairn::dsl {

// --- binding: one overload set from C++ member types to schema types and JSON
// -----------------------------------------

inline const std::vector<std::string> kSpanUnits = {"steps", "samples", "tokens", "fraction"};  // as span_json

template <class M>
inline constexpr bool is_enum_list = false;
template <class E>
inline constexpr bool is_enum_list<std::vector<E>> = std::is_enum_v<E>;

template <class M>
Json to_value(const M& member, const std::vector<std::string>& choices) {
  if constexpr (std::is_same_v<M, std::optional<bool>>) {
    return member ? Json(*member) : Json();
  } else if constexpr (std::is_same_v<M, Span>) {
    return span_json(member);
  } else if constexpr (is_enum_list<M>) {
    Json out = Json::array();
    for (const auto one : member) out.push_back(choices.at(static_cast<size_t>(one)));
    return out;
  } else if constexpr (std::is_enum_v<M>) {
    return choices.at(static_cast<size_t>(member));
  } else {
    return member;
  }
}

inline size_t choice_index(const std::vector<std::string>& choices, const Json& value) {
  for (size_t i = 0; i < choices.size(); ++i)
    if (choices[i] == value.get_ref<const std::string&>()) return i;
  RT_CHECK(false, "an unchecked choice reached the struct: {}", json_text(value));
}

template <class M>
void from_value(M& member, const std::vector<std::string>& choices, const Json& value) {
  if constexpr (std::is_same_v<M, Span>) {
    member = Span{static_cast<Span::Unit>(choice_index(kSpanUnits, value.at("unit"))), value.at("value").get<double>()};
  } else if constexpr (is_enum_list<M>) {
    member.clear();
    for (const Json& name : value) member.push_back(static_cast<typename M::value_type>(choice_index(choices, name)));
  } else if constexpr (std::is_enum_v<M>) {
    member = static_cast<M>(choice_index(choices, value));
  } else if constexpr (std::is_same_v<M, std::optional<bool>>) {
    member = value.get<bool>();
  } else {
    member = value.get<M>();
  }
}

template <class M>
constexpr Type type_of() {
  if constexpr (std::is_same_v<M, int64_t> || std::is_same_v<M, int>) return Type::kInt;
  if constexpr (std::is_same_v<M, uint64_t>) return Type::kSeed;
  if constexpr (std::is_same_v<M, double>) return Type::kNumber;
  if constexpr (std::is_same_v<M, bool> || std::is_same_v<M, std::optional<bool>>) return Type::kBool;
  if constexpr (std::is_same_v<M, std::string>) return Type::kString;
  if constexpr (std::is_enum_v<M>) return Type::kEnum;
  if constexpr (std::is_same_v<M, Span>) return Type::kSpan;
  if constexpr (std::is_same_v<M, std::vector<int64_t>>) return Type::kIntList;
  if constexpr (std::is_same_v<M, std::vector<double>>) return Type::kNumberList;
  if constexpr (std::is_same_v<M, std::vector<std::string>>) return Type::kStringList;
  if constexpr (is_enum_list<M>) return Type::kEnumList;
}

// --- a small vocabulary to write the table in
// -------------------------------------------------------------------------

struct Def : Field {
  Def& range(double low, double high) { return lo = low, hi = high, *this; }
  Def& at_least(double low) { return lo = low, *this; }
  Def& above(double low) { return lo = low, lo_open = true, *this; }
  Def& under(double high) { return hi = high, hi_open = true, *this; }
  Def& below_or_at(double high) { return hi = high, *this; }
  Def& needed() { return required = true, *this; }
  Def& newer() { return later = true, *this; }
  Def& by_constructor() { return from_constructor = true, *this; }
  Def& silently() { return later = silent = true, *this; }
  Def& otherwise(Json value) { return fallback = std::move(value), *this; }
  Def& in_llama(Json value) { return llama = std::move(value), *this; }
  Def& derived(std::string words) { return rule = std::move(words), *this; }
  Def& one_of(std::vector<std::string> names) { return choices = std::move(names), *this; }
  Def& in(Unit value) { return unit = value, *this; }
  Def& written(Form value, std::vector<const Block*> constructors = {}) {
    return form = value, accepts = std::move(constructors), *this;
  }
  Def& says(std::string line, std::string longer = "") {
    return doc = std::move(line), more = std::move(longer), *this;
  }
  Def& like(std::string text) { return example = std::move(text), *this; }
};

/// A field with no member of its own.
inline Def written_only(std::string name, Type type, std::string key = "") {
  Def out;
  out.key = key.empty() ? name : std::move(key);
  out.name = std::move(name);
  out.type = type;
  return out;
}

template <class S, class M>
Def make_field(std::string name, M S::*member, std::string key, std::vector<std::string> choices) {
  Def out = written_only(std::move(name), type_of<M>(), std::move(key));
  out.load = [member, choices](const void* object) {
    return to_value(static_cast<const S*>(object)->*member, choices);
  };
  out.store = [member, choices](void* object, const Json& value) {
    from_value(static_cast<S*>(object)->*member, choices, value);
  };
  out.choices = std::move(choices);
  return out;
}

template <class S, class M>
Def bound(std::string name, M S::*member, std::string key = "") {
  static_assert(!std::is_enum_v<M>, "an enum needs its names: chosen()");
  return make_field(std::move(name), member, std::move(key), {});
}

/// `names` in the order of the enum.
template <class S, class M>
Def chosen(std::string name, M S::*member, std::vector<std::string> names) {
  return make_field(std::move(name), member, "", std::move(names));
}

template <class S, class M>
Def block(std::string name, M S::*member, const Block& of) {
  Def out = written_only(std::move(name), Type::kBlock);
  out.block = &of;
  out.accepts = {&of};
  out.member = [member](void* object) -> void* { return &(static_cast<S*>(object)->*member); };
  return out;
}

template <class S, class M>
Def items(std::string name, std::vector<M> S::*member, const Block& of) {
  Def out = written_only(std::move(name), Type::kItems);
  out.block = &of;
  out.size = [member](const void* object) {
    return static_cast<int64_t>((static_cast<const S*>(object)->*member).size());
  };
  out.element = [member](void* object, int64_t index) -> void* {
    return &(static_cast<S*>(object)->*member)[static_cast<size_t>(index)];
  };
  out.resize = [member](void* object, int64_t size) {
    (static_cast<S*>(object)->*member).assign(static_cast<size_t>(size), M{});
  };
  return out;
}

inline constexpr double kMany = 1e9;  // above any size that fits a machine, far below overflow of products in int64

/// A field of a part of S, beside S's own. For plain values, blocks and lists of blocks alike.
template <class S, class P>
Def inside(P S::*part, Def field) {
  const auto of = [part](const void* object) { return &(static_cast<const S*>(object)->*part); };
  const auto in = [part](void* object) { return &(static_cast<S*>(object)->*part); };
  if (field.load) field.load = [of, load = field.load](const void* object) { return load(of(object)); };
  if (field.store) {
    field.store = [in, store = field.store](void* object, const Json& value) { store(in(object), value); };
  }
  if (field.member) field.member = [in, member = field.member](void* object) { return member(in(object)); };
  if (field.element) {
    field.size = [of, size = field.size](const void* object) { return size(of(object)); };
    field.element = [in, element = field.element](void* object, int64_t k) { return element(in(object), k); };
    field.resize = [in, resize = field.resize](void* object, int64_t size) { resize(in(object), size); };
  }
  return field;
}

}  // namespace cairn::dsl
