// `local T = require "cairn"`: the constructors, and the values they make.
//
// Constructors are C functions on purpose: `return T.recipe {` is a tail call, and a constructor written in Lua would
// have lost its caller's line by then. A constructor only notes what it was given and where; checks come later, when
// all layers are known, so that all mistakes can be told at once.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "dsl/schema.h"
#include "dsl/session.h"

namespace cairn::dsl {
namespace {

constexpr const char* kNodeType = "cairn.value";
const char* const kSpanNames[] = {"steps", "samples", "tokens", "epochs", "fraction"};

NodePtr finish(Node node) { return std::make_shared<const Node>(std::move(node)); }

Place place_of_call(lua_State* L, const char* constructor) {
  return Place{std::make_shared<const Call>(make_call(L, constructor)), {}};
}

void count_node(lua_State* L, size_t text_bytes) {
  Session& session = Session::of(L);
  session.nodes_used += 1 + static_cast<int64_t>(text_bytes / 256);
  if (session.nodes_used > session.limits.nodes) {
    session.trip("limit_size", fmt::format("the recipe holds more than {} values", session.limits.nodes));
    raise_tripped(L);
  }
}

/// T.gpt {...}, T.last(3), T.sentencepiece "path": upvalue 1 is the name, 2 whether one plain value is meant.
int construct(lua_State* L) {
  const char* name = lua_tostring(L, lua_upvalueindex(1));
  const bool positional = lua_toboolean(L, lua_upvalueindex(2)) != 0;
  if (lua_gettop(L) != 1 || (!positional && lua_type(L, 1) != LUA_TTABLE)) {
    return luaL_error(L, positional ? "T.%s takes one value, got %s" : "T.%s takes a table: T.%s {...}, got %s", name,
                      positional ? (lua_gettop(L) == 0 ? "nothing" : luaL_typename(L, 1)) : name,
                      lua_gettop(L) == 0 ? "nothing" : luaL_typename(L, 1));
  }
  Node node;
  node.kind = Node::Kind::kCtor;
  node.text = name;
  node.place = place_of_call(L, name);
  if (lua_type(L, 1) == LUA_TTABLE) {
    node.entries = to_node(L, 1, node.place)->entries;
  } else {
    node.entries.push_back(Entry{"", to_node(L, 1, node.place.under("#1")), node.place.under("#1")});
  }
  push_node(L, finish(std::move(node)));
  return 1;
}

int construct_recipe(lua_State* L) {
  if (lua_gettop(L) != 1 || lua_type(L, 1) != LUA_TTABLE)
    return luaL_error(L, "T.recipe takes a table: T.recipe {...}");
  Node node;
  node.kind = Node::Kind::kRecipe;
  node.place = place_of_call(L, "recipe");
  node.layers.push_back(Layer{to_node(L, 1, node.place), node.place});
  push_node(L, finish(std::move(node)));
  return 1;
}

/// base:with {...}
int recipe_with(lua_State* L) {
  const NodePtr* base = node_at(L, 1);
  if (base == nullptr || (*base)->kind != Node::Kind::kRecipe)
    return luaL_error(L, "`with` belongs to a recipe: base:with {...}");
  if (lua_gettop(L) != 2 || lua_type(L, 2) != LUA_TTABLE) return luaL_error(L, "with takes a table: base:with {...}");
  if (static_cast<int64_t>((*base)->layers.size()) >= Session::of(L).limits.layers)
    return luaL_error(L, "more than %d :with on top of each other", static_cast<int>(Session::of(L).limits.layers));
  Node node = **base;
  node.place = place_of_call(L, "with");
  node.layers.push_back(Layer{to_node(L, 2, node.place), node.place});
  push_node(L, finish(std::move(node)));
  return 1;
}

int construct_replace(lua_State* L) {
  if (lua_gettop(L) != 1 || lua_type(L, 1) != LUA_TTABLE)
    return luaL_error(L, "T.replace takes a table: T.replace {...}");
  Node node;
  node.kind = Node::Kind::kReplace;
  node.place = place_of_call(L, "replace");
  node.entries = to_node(L, 1, node.place)->entries;
  push_node(L, finish(std::move(node)));
  return 1;
}

int construct_ref(lua_State* L) {
  Node node;
  node.kind = Node::Kind::kRef;
  node.text = luaL_checkstring(L, 1);
  node.place = place_of_call(L, "ref");
  count_node(L, node.text.size());
  push_node(L, finish(std::move(node)));
  return 1;
}

/// T.map(list, function(element, index) ... end) -> list
int map_list(lua_State* L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_checktype(L, 2, LUA_TFUNCTION);
  lua_settop(L, 2);
  const auto count = static_cast<lua_Integer>(lua_rawlen(L, 1));
  lua_newtable(L);
  for (lua_Integer i = 1; i <= count; ++i) {
    lua_pushvalue(L, 2);
    lua_rawgeti(L, 1, i);
    lua_pushinteger(L, i);
    lua_call(L, 2, 1);
    lua_rawseti(L, 3, i);
  }
  return 1;
}

// --- T.params
// ---------------------------------------------------------------------------------------------------------

void push_plain(lua_State* L, const Node& node) {
  switch (node.kind) {
    case Node::Kind::kBool:
      lua_pushboolean(L, node.boolean ? 1 : 0);
      return;
    case Node::Kind::kInt:
      lua_pushinteger(L, node.integer);
      return;
    case Node::Kind::kNumber:
      lua_pushnumber(L, node.number);
      return;
    default:
      lua_pushlstring(L, node.text.data(), node.text.size());
  }
}

bool same(const Node& a, const Node& b) {
  if (a.is_number() && b.is_number()) return a.as_number() == b.as_number();
  return a.kind == b.kind && a.text == b.text && a.boolean == b.boolean;
}

/// The value of --param NAME=TEXT, of the default's kind. Fills `wrong` instead when it does not fit.
Node parse_param(const std::string& text, const Node& fallback, std::string& wrong) {
  Node out;
  out.kind = fallback.kind;
  if (fallback.kind == Node::Kind::kString) {
    out.text = text;
  } else if (fallback.kind == Node::Kind::kBool) {
    out.boolean = text == "true";
    if (text != "true" && text != "false") wrong = "must be true or false";
  } else {
    const std::optional<double> number = parse_quantity(text, Unit::kCount);
    if (!number || !std::isfinite(*number)) {
      wrong = "must be a number";
    } else if (*number == std::floor(*number) && std::abs(*number) < 9e15) {
      out.kind = Node::Kind::kInt;
      out.integer = static_cast<int64_t>(*number);
    } else {
      out.kind = Node::Kind::kNumber;
      out.number = *number;
    }
  }
  return out;
}

std::string param_complaint(const Node& value, const Node& spec) {
  const Entry* min = spec.find("min");
  const Entry* max = spec.find("max");
  const Entry* one_of = spec.find("one_of");
  if (min != nullptr && min->value->is_number() && value.is_number() && value.as_number() < min->value->as_number())
    return "must be >= " + describe(*min->value);
  if (max != nullptr && max->value->is_number() && value.is_number() && value.as_number() > max->value->as_number())
    return "must be <= " + describe(*max->value);
  if (one_of != nullptr && one_of->value->is_table()) {
    std::string names;
    for (const Entry& choice : one_of->value->entries) {
      if (same(*choice.value, value)) return "";
      names += (names.empty() ? "" : ", ") + describe(*choice.value);
    }
    return "must be one of " + names;
  }
  return "";
}

int no_such_param(lua_State* L) {
  return luaL_error(L, "no parameter `%s` is declared in this T.params", luaL_tolstring(L, 2, nullptr));
}

int declare_params(lua_State* L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  Session& session = Session::of(L);
  const Place place = place_of_call(L, "params");
  const NodePtr table = to_node(L, 1, place);
  lua_newtable(L);
  for (const Entry& entry : table->entries) {
    const Node& spec = *entry.value;
    if (entry.key.empty() || spec.kind != Node::Kind::kCtor || spec.text != "param" || spec.entries.empty() ||
        !spec.entries[0].key.empty())
      return luaL_error(L, "T.params: %s must be T.param { default, doc = \"...\" }",
                        entry.key.empty() ? "each entry" : entry.key.c_str());
    for (const Entry& part : spec.entries) {
      const std::vector<std::string> known = {"doc", "max", "min", "one_of"};
      if (part.key.empty() || std::find(known.begin(), known.end(), part.key) != known.end()) continue;
      const std::string near = nearest(part.key, known);
      return luaL_error(
          L, "T.param has no field `%s`%s", part.key.c_str(),
          near.empty() ? "; it has doc, max, min and one_of" : ("; did you mean `" + near + "`?").c_str());
    }
    const Node& fallback = *spec.entries[0].value;
    if (!fallback.is_number() && fallback.kind != Node::Kind::kString && fallback.kind != Node::Kind::kBool)
      return luaL_error(L, "T.params: the default of %s must be a number, a string or true or false",
                        entry.key.c_str());
    Node value = fallback;
    session.declared_params[entry.key] = true;
    if (const auto given = session.given_params.find(entry.key); given != session.given_params.end()) {
      std::string wrong;
      Node parsed = parse_param(given->second, fallback, wrong);
      if (wrong.empty()) wrong = param_complaint(parsed, spec);
      if (wrong.empty()) {
        value = std::move(parsed);
      } else {
        Diagnostic out;
        out.file = "--param " + entry.key + "=" + given->second;
        out.path = entry.key;
        out.code = "bad_param";
        out.message = fmt::format("{} {}, got {}", entry.key, wrong,
                                  describe(fallback.kind == parsed.kind || parsed.is_number() ? parsed : fallback));
        if (wrong == "must be a number" || wrong == "must be true or false")
          out.message = fmt::format("{} {}, got \"{}\"", entry.key, wrong, given->second);
        const auto is_same = [&](const Diagnostic& d) { return d.file == out.file && d.message == out.message; };
        if (std::none_of(session.diagnostics.begin(), session.diagnostics.end(), is_same))
          session.diagnostics.push_back(std::move(out));
      }
    }
    push_plain(L, value);
    lua_setfield(L, -2, entry.key.c_str());
  }
  lua_newtable(L);
  lua_pushcfunction(L, no_such_param);
  lua_setfield(L, -2, "__index");
  lua_setmetatable(L, -2);
  return 1;
}

// --- values
// -----------------------------------------------------------------------------------------------------------

int arithmetic(lua_State* L) {
  const char* op = lua_tostring(L, lua_upvalueindex(1));
  Node node;
  node.kind = Node::Kind::kOp;
  node.text = op;
  node.place = place_of_call(L, "ref");
  count_node(L, 0);
  const int operands = std::strcmp(op, "neg") == 0 ? 1 : 2;
  for (int i = 1; i <= operands; ++i) {
    NodePtr operand = to_node(L, i, node.place);
    if (!operand->is_number() && operand->kind != Node::Kind::kRef && operand->kind != Node::Kind::kOp)
      return luaL_error(L, "only numbers and T.ref can be calculated with, not %s", describe(*operand).c_str());
    node.integer = std::max(node.integer, operand->kind == Node::Kind::kOp ? operand->integer + 1 : 1);
    node.entries.push_back(Entry{"", std::move(operand), node.place});
  }
  if (node.integer > Session::of(L).limits.depth) return luaL_error(L, "the expression of T.ref is too deep");
  push_node(L, finish(std::move(node)));
  return 1;
}

int node_index(lua_State* L) {
  const NodePtr* node = node_at(L, 1);
  const char* key = lua_tostring(L, 2);
  if (node != nullptr && key != nullptr && std::strcmp(key, "with") == 0) {
    if ((*node)->kind == Node::Kind::kRecipe) {
      lua_pushcfunction(L, recipe_with);
      return 1;
    }
    return luaL_error(L, "only a recipe has :with; inside it, write a plain table and it is merged");
  }
  return luaL_error(L, "%s cannot be read, only built; use a local, or T.ref \"field\" for the value of a field",
                    node == nullptr ? "this" : describe(**node).c_str());
}

int node_newindex(lua_State* L) {
  return luaL_error(L, "%s cannot be changed; derive a new recipe with base:with {...}",
                    node_at(L, 1) == nullptr ? "value" : describe(**node_at(L, 1)).c_str());
}

int node_call(lua_State* L) {
  const NodePtr* node = node_at(L, 1);
  if (node != nullptr && (*node)->kind == Node::Kind::kCtor && (*node)->entries.empty()) {
    const Block* block = find_constructor((*node)->text);
    if (block != nullptr && block->constant) {
      lua_settop(L, 1);  // T.bytes {} is T.bytes
      return 1;
    }
  }
  return luaL_error(L, "%s cannot be called", node == nullptr ? "this" : describe(**node).c_str());
}

int node_tostring(lua_State* L) {
  const NodePtr* node = node_at(L, 1);
  lua_pushstring(L, node == nullptr ? "value" : describe(**node).c_str());
  return 1;
}

int node_gc(lua_State* L) {
  static_cast<NodePtr*>(luaL_checkudata(L, 1, kNodeType))->~NodePtr();
  return 0;
}

int unknown_constructor(lua_State* L) {
  const char* name = lua_tostring(L, 2);
  std::vector<std::string> names;
  lua_pushnil(L);
  while (lua_next(L, lua_upvalueindex(1)) != 0) {
    lua_pop(L, 1);
    names.emplace_back(lua_tostring(L, -1));
  }
  const std::string near = name == nullptr ? "" : nearest(name, names);
  return luaL_error(L, near.empty() ? "T.%s does not exist" : "T.%s does not exist; did you mean T.%s?",
                    name == nullptr ? "?" : name, near.c_str());
}

/// __index of T: upvalue 1 holds what there is.
int cairn_index(lua_State* L) {
  lua_pushvalue(L, 2);
  if (lua_rawget(L, lua_upvalueindex(1)) != LUA_TNIL) return 1;
  return unknown_constructor(L);
}

int cairn_newindex(lua_State* L) { return luaL_error(L, "T cannot be changed"); }

void push_constructor(lua_State* L, const char* name, bool positional) {
  lua_pushstring(L, name);
  lua_pushboolean(L, positional ? 1 : 0);
  lua_pushcclosure(L, construct, 2);
}

void make_node_type(lua_State* L) {
  luaL_newmetatable(L, kNodeType);
  for (const char* op : {"add", "sub", "mul", "div", "mod", "pow", "idiv", "unm"}) {
    lua_pushstring(L, std::strcmp(op, "unm") == 0 ? "neg" : op);
    lua_pushcclosure(L, arithmetic, 1);
    lua_setfield(L, -2, fmt::format("__{}", op).c_str());
  }
  static const luaL_Reg functions[] = {{"__index", node_index}, {"__newindex", node_newindex},
                                       {"__call", node_call},   {"__tostring", node_tostring},
                                       {"__gc", node_gc},       {nullptr, nullptr}};
  luaL_setfuncs(L, functions, 0);
  lua_pushliteral(L, "value");
  lua_setfield(L, -2, "__metatable");
  lua_pop(L, 1);
}

}  // namespace

Call make_call(lua_State* L, const char* constructor) {
  Call out;
  out.constructor = constructor;
  const Where where = caller(L);
  if (where.file >= 0) {
    const Session::File& file = Session::of(L).files[static_cast<size_t>(where.file)];
    out.file = file.name;
    out.layer = file.layer;
    out.line = file.on_disk ? where.line : 0;
  }
  return out;
}

void push_node(lua_State* L, NodePtr node) {
  void* memory = lua_newuserdatauv(L, sizeof(NodePtr), 0);
  new (memory) NodePtr(std::move(node));
  luaL_setmetatable(L, kNodeType);
}

const NodePtr* node_at(lua_State* L, int index) {
  return static_cast<const NodePtr*>(luaL_testudata(L, index, kNodeType));
}

NodePtr to_node(lua_State* L, int index, const Place& place, int depth) {
  if (const NodePtr* known = node_at(L, index)) return *known;
  index = lua_absindex(L, index);
  Node out;
  switch (lua_type(L, index)) {
    case LUA_TBOOLEAN:
      out.kind = Node::Kind::kBool;
      out.boolean = lua_toboolean(L, index) != 0;
      break;
    case LUA_TNUMBER:
      if (lua_isinteger(L, index) != 0) {
        out.kind = Node::Kind::kInt;
        out.integer = lua_tointeger(L, index);
      } else {
        out.kind = Node::Kind::kNumber;
        out.number = lua_tonumber(L, index);
      }
      break;
    case LUA_TSTRING: {
      size_t length = 0;
      const char* text = lua_tolstring(L, index, &length);
      out.kind = Node::Kind::kString;
      count_node(L, length);
      out.text.assign(text, length);
      break;
    }
    case LUA_TTABLE: {
      out.kind = Node::Kind::kTable;
      if (depth >= Session::of(L).limits.depth)
        luaL_error(L, "tables are nested deeper than %d levels; does one hold itself?", Session::of(L).limits.depth);
      luaL_checkstack(L, 4, "a table in a table");
      const lua_Unsigned length = lua_rawlen(L, index);
      std::vector<Entry> positional, named;
      for (lua_Unsigned i = 1; i <= length; ++i) {
        lua_rawgeti(L, index, static_cast<lua_Integer>(i));
        if (lua_isnil(L, -1)) luaL_error(L, "a list has a hole: its element %I is nil", static_cast<lua_Integer>(i));
        const Place inner = place.under(fmt::format("#{}", i));
        positional.push_back(Entry{"", to_node(L, -1, inner, depth + 1), inner});
        lua_pop(L, 1);
      }
      lua_pushnil(L);
      while (lua_next(L, index) != 0) {
        if (lua_isinteger(L, -2) != 0) {
          const lua_Integer key = lua_tointeger(L, -2);
          if (key < 1 || static_cast<lua_Unsigned>(key) > length)
            luaL_error(L, "a list has a hole: it has an element %I but not all before it", key);
        } else if (lua_type(L, -2) == LUA_TSTRING) {
          size_t key_length = 0;
          const char* text = lua_tolstring(L, -2, &key_length);
          const std::string key(text, key_length);
          if (key.empty()) luaL_error(L, "a field's name is empty");
          count_node(L, key_length);
          const Place inner = place.under(key);
          named.push_back(Entry{key, to_node(L, -1, inner, depth + 1), inner});
        } else {
          luaL_error(L, "a table's key is a %s; fields have names", luaL_typename(L, -2));
        }
        lua_pop(L, 1);
      }
      std::sort(named.begin(), named.end(), [](const Entry& a, const Entry& b) { return a.key < b.key; });
      out.entries = std::move(positional);
      out.entries.insert(out.entries.end(), std::make_move_iterator(named.begin()),
                         std::make_move_iterator(named.end()));
      break;
    }
    default:
      out.kind = Node::Kind::kOther;
      out.text = luaL_typename(L, index);
  }
  count_node(L, 0);
  return finish(std::move(out));
}

void push_cairn_table(lua_State* L) {
  make_node_type(L);
  lua_newtable(L);  // T itself: empty, so that every read and write goes through its metatable
  lua_newtable(L);  // its metatable
  lua_newtable(L);  // what there is
  for (const auto& [name, block] : constructors()) {
    if (name == "recipe") continue;
    if (block->constant) {
      Node node;
      node.kind = Node::Kind::kCtor;
      node.text = name;
      push_node(L, finish(std::move(node)));
    } else {
      push_constructor(L, name.c_str(), block->positional);
    }
    lua_setfield(L, -2, name.c_str());
  }
  for (const char* name : kSpanNames) {
    push_constructor(L, name, true);
    lua_setfield(L, -2, name);
  }
  push_constructor(L, "param", false);
  lua_setfield(L, -2, "param");
  static const luaL_Reg functions[] = {
      {"recipe", construct_recipe}, {"replace", construct_replace}, {"ref", construct_ref}, {"map", map_list},
      {"params", declare_params},   {"read_json", read_json},       {nullptr, nullptr}};
  luaL_setfuncs(L, functions, 0);
  Node unset;
  unset.kind = Node::Kind::kUnset;
  push_node(L, finish(std::move(unset)));
  lua_setfield(L, -2, "unset");
  lua_pushcclosure(L, cairn_index, 1);
  lua_setfield(L, -2, "__index");
  lua_pushcfunction(L, cairn_newindex);
  lua_setfield(L, -2, "__newindex");
  lua_pushliteral(L, "T");
  lua_setfield(L, -2, "__metatable");
  lua_setmetatable(L, -2);
}

}  // namespace cairn::dsl
