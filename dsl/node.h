#pragma once
// What a recipe's Lua values become: immutable trees that remember where they were written. No Lua type appears here.
//
// A recipe in the making is a list of layers (T.recipe, then each :with, --with and --set); nothing is merged or
// checked while Lua runs, so every mistake of every layer can be reported together.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace cairn::dsl {

/// A call such as `T.adamw {` at a line of a file. Fields inside are found by path when there is something to report.
struct Call {
  std::string file;
  int line = 0;             // 0: not in a file
  std::string constructor;  // "adamw"; "with" for base:with; "return" for a plain table a file returns
  std::string layer;        // "recipe", "--with", "--set"
};

/// A value's place: inside which call, under which keys ("batch", "samples"; positional ones are "#1").
struct Place {
  std::shared_ptr<const Call> call;
  std::vector<std::string> path;

  Place under(const std::string& key) const {
    Place out = *this;
    out.path.push_back(key);
    return out;
  }
};

struct Node;
using NodePtr = std::shared_ptr<const Node>;

struct Entry {
  std::string key;  // empty: positional
  NodePtr value;
  Place place;
};

struct Layer {
  NodePtr table;  // kTable or kCtor
  Place place;
};

struct Node {
  enum class Kind { kBool, kInt, kNumber, kString, kTable, kCtor, kRef, kOp, kUnset, kReplace, kRecipe, kOther };
  Kind kind = Kind::kOther;
  bool boolean = false;
  int64_t integer = 0;
  double number = 0;
  std::string text;            // kString; kCtor: its name; kRef: the path; kOp: "+", "-", ...; kOther: Lua's type name
  std::vector<Entry> entries;  // kTable, kCtor, kReplace: positional ones first, then by key; kOp: operands
  Place place;                 // kCtor, kRef, kReplace, kUnset: where it was called
  std::vector<Layer> layers;   // kRecipe

  bool is_number() const { return kind == Kind::kInt || kind == Kind::kNumber; }
  bool is_table() const { return kind == Kind::kTable || kind == Kind::kCtor; }
  double as_number() const { return kind == Kind::kInt ? static_cast<double>(integer) : number; }
  const Entry* find(const std::string& key) const {
    for (const Entry& entry : entries)
      if (entry.key == key) return &entry;
    return nullptr;
  }
};

/// As a person would write it, for messages: 62, "fast", true, a table, T.gpt {...}.
std::string describe(const Node& node);

}  // namespace cairn::dsl
