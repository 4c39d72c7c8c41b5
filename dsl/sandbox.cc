// The machine a recipe runs on: an allocator with a limit, a hook that counts and looks at the clock, and the few
// functions of Lua's library that can neither touch the outside, nor give two runs different answers, nor loop on their
// own for long. Whatever loops inside C without allocating is replaced or guarded here:
//   pattern functions (own matcher, lua_patterns.cc), string.rep of nothing, table functions under metamethods, sort.
// Left out on purpose: load, dofile, io, os, debug, package, coroutine, collectgarbage, next, math.random, print.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "dsl/schema.h"
#include "dsl/session.h"

namespace cairn::dsl {
namespace {

constexpr int kHookInterval = 50;            // instructions; small, since one may compare or copy 100 MB
constexpr size_t kClockedAllocation = 4096;  // larger ones look at the clock: a loop of s .. s makes few instructions

void hook(lua_State* L, lua_Debug* event) {
  Session& session = Session::of(L);
  if (event->event == LUA_HOOKCOUNT) session.instructions_used += kHookInterval;
  if (!session.tripped && session.instructions_used > session.limits.instructions) {
    session.trip("limit_instructions",
                 fmt::format("the recipe was stopped after {} million instructions; is there a loop without an end?",
                             session.limits.instructions / 1'000'000));
  }
  check_time(L);
}

/// pcall that cannot catch the end of the budget.
int guarded_pcall(lua_State* L) {
  luaL_checkany(L, 1);
  lua_pushboolean(L, 1);
  lua_insert(L, 1);
  const int status = lua_pcall(L, lua_gettop(L) - 2, LUA_MULTRET, 0);
  Session& session = Session::of(L);
  if (status == LUA_ERRMEM && !session.tripped) session.trip_memory();
  if (session.tripped) raise_tripped(L);
  if (status != LUA_OK) {
    lua_pushboolean(L, 0);
    lua_insert(L, -2);
    return 2;
  }
  return lua_gettop(L);
}

int guarded_setmetatable(lua_State* L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_argexpected(L, lua_isnil(L, 2) || lua_istable(L, 2), 2, "nil or table");
  if (luaL_getmetafield(L, 1, "__metatable") != LUA_TNIL) return luaL_error(L, "cannot change a protected metatable");
  lua_settop(L, 2);
  if (lua_istable(L, 2)) {
    // A finalizer runs with the hook switched off: it could loop for ever.
    lua_pushliteral(L, "__gc");
    if (lua_rawget(L, 2) != LUA_TNIL) return luaL_error(L, "__gc is not available in a recipe");
    lua_pop(L, 1);
  }
  lua_setmetatable(L, 1);
  return 1;
}

/// string.rep: of an empty string it would count to n in C.
int guarded_rep(lua_State* L) {
  size_t length = 0, separator = 0;
  luaL_checklstring(L, 1, &length);
  const lua_Integer count = luaL_checkinteger(L, 2);
  luaL_optlstring(L, 3, "", &separator);
  if (length + separator == 0 || count <= 0) {
    lua_pushliteral(L, "");
    return 1;
  }
  const int64_t limit = Session::of(L).limits.memory_bytes;
  const double total = static_cast<double>(length + separator) * static_cast<double>(count);
  if (total > static_cast<double>(limit)) {
    Session::of(L).trip("limit_memory", fmt::format("string.rep would make a string of {:.3g} bytes; a recipe may use "
                                                    "{} MiB",
                                                    total, limit >> 20));
    raise_tripped(L);
  }
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_insert(L, 1);
  lua_call(L, lua_gettop(L) - 1, 1);
  return 1;
}

/// A table function on a plain table of bounded size, so that its C loop is bounded as well.
int guarded_table(lua_State* L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  if (lua_getmetatable(L, 1) != 0) return luaL_error(L, "table functions take plain tables, without a metatable");
  const auto limit = static_cast<lua_Unsigned>(lua_tointeger(L, lua_upvalueindex(2)));
  if (lua_rawlen(L, 1) > limit)
    return luaL_error(L, "the table is too long for this: %I elements, at most %I",
                      static_cast<lua_Integer>(lua_rawlen(L, 1)), static_cast<lua_Integer>(limit));
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_insert(L, 1);
  lua_call(L, lua_gettop(L) - 1, LUA_MULTRET);
  return lua_gettop(L);
}

int pairs_step(lua_State* L) {
  const lua_Integer at = lua_tointeger(L, lua_upvalueindex(2)) + 1;
  lua_pushinteger(L, at);
  lua_copy(L, -1, lua_upvalueindex(2));
  lua_pop(L, 1);
  if (lua_rawgeti(L, lua_upvalueindex(1), at) == LUA_TNIL) return 1;
  lua_pushvalue(L, -1);
  lua_gettable(L, lua_upvalueindex(3));
  return 2;
}

/// pairs in a fixed order, numbers then strings: Lua's own order differs from run to run.
int sorted_pairs(lua_State* L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_settop(L, 1);
  struct Key {
    bool is_number;
    lua_Number number;
    std::string text;
  };
  std::vector<std::pair<Key, int>> keys;
  lua_newtable(L);  // 2: the keys as found
  lua_pushnil(L);
  int count = 0;
  while (lua_next(L, 1) != 0) {
    lua_pop(L, 1);
    const int type = lua_type(L, -1);
    if (type != LUA_TNUMBER && type != LUA_TSTRING)
      return luaL_error(L, "pairs: a key is a %s; only numbers and strings have an order", luaL_typename(L, -1));
    lua_pushvalue(L, -1);
    lua_rawseti(L, 2, ++count);
    Key key{type == LUA_TNUMBER, 0, ""};
    if (key.is_number) {
      key.number = lua_tonumber(L, -1);
    } else {
      size_t length = 0;
      const char* text = lua_tolstring(L, -1, &length);
      key.text.assign(text, length);
    }
    keys.emplace_back(std::move(key), count);
    if (count % 4096 == 0) check_time(L);
  }
  std::sort(keys.begin(), keys.end(), [](const auto& a, const auto& b) {
    if (a.first.is_number != b.first.is_number) return a.first.is_number;
    if (a.first.is_number) return a.first.number < b.first.number;
    return a.first.text < b.first.text;
  });
  lua_newtable(L);  // 3: sorted
  for (size_t i = 0; i < keys.size(); ++i) {
    lua_rawgeti(L, 2, keys[i].second);
    lua_rawseti(L, 3, static_cast<lua_Integer>(i + 1));
  }
  lua_pushinteger(L, 0);
  lua_pushvalue(L, 1);
  lua_pushcclosure(L, pairs_step, 3);
  return 1;
}

const char* const kAbsent[][2] = {
    {"print", "a recipe prints nothing; `cairn plan` and `cairn explain` show what it says"},
    {"next", "its order differs from run to run; use pairs, which goes in order"},
    {"os", "a recipe has no clock and no environment; use T.params and --param"},
    {"io", "a recipe opens no files; T.read_json reads data"},
    {"load", "a recipe runs no text as code"},
    {"loadstring", "a recipe runs no text as code"},
    {"dofile", "use require"},
    {"loadfile", "use require"},
    {"debug", "not available in a recipe"},
    {"package", "use require"},
    {"coroutine", "not available in a recipe"},
    {"collectgarbage", "not available in a recipe"},
    {"xpcall", "use pcall"},
};

int unknown_global(lua_State* L) {
  const char* name = lua_tostring(L, 2);
  if (name == nullptr) return luaL_error(L, "undefined name");
  for (const auto& [absent, why] : kAbsent)
    if (std::strcmp(absent, name) == 0) return luaL_error(L, "`%s` does not exist here: %s", name, why);
  if (std::strcmp(name, "T") == 0)
    return luaL_error(L, "undefined name `T`; a recipe begins with: local T = require \"cairn\"");
  std::vector<std::string> names;
  lua_pushnil(L);
  while (lua_next(L, 1) != 0) {
    lua_pop(L, 1);
    if (lua_type(L, -1) == LUA_TSTRING) names.emplace_back(lua_tostring(L, -1));
  }
  lua_Debug frame;
  if (lua_getstack(L, 1, &frame) != 0) {
    const char* local = nullptr;
    for (int i = 1; (local = lua_getlocal(L, &frame, i)) != nullptr; ++i) {
      names.emplace_back(local);
      lua_pop(L, 1);
    }
  }
  const std::string near = nearest(name, names);
  if (near.empty()) return luaL_error(L, "undefined name `%s`", name);
  return luaL_error(L, "undefined name `%s`; did you mean `%s`?", name, near.c_str());
}

int no_new_global(lua_State* L) {
  return luaL_error(L, "`%s` would be a global; write `local %s = ...`", luaL_tolstring(L, 2, nullptr),
                    luaL_tolstring(L, 2, nullptr));
}

/// Copies the named fields of the table at `from` into the table on top.
void pick(lua_State* L, int from, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    lua_getfield(L, from, name);
    lua_setfield(L, -2, name);
  }
}

void guard(lua_State* L, int from, const char* name, lua_CFunction with, lua_Integer limit) {
  lua_getfield(L, from, name);
  lua_pushinteger(L, limit);
  lua_pushcclosure(L, with, 2);
  lua_setfield(L, -2, name);
}

}  // namespace

void Session::trip(const char* code, std::string message, Where at) {
  if (tripped) return;
  Diagnostic out;
  out.code = code;
  out.message = std::move(message);
  const Where where = at.file < 0 && lua != nullptr ? caller(lua) : at;
  if (where.file >= 0) {
    const File& file = files[static_cast<size_t>(where.file)];
    out.file = file.name;
    out.line = file.on_disk ? where.line : 0;
  }
  tripped = std::move(out);
}

void Session::trip_memory() {
  trip("limit_memory",
       fmt::format("the recipe needs more than {} MiB of memory and was stopped", limits.memory_bytes >> 20),
       refused);  // by now the error has left the frames where it happened
}

void raise_tripped(lua_State* L) {
  lua_pushliteral(L, "the recipe is over its budget");
  lua_error(L);
  std::abort();  // lua_error does not return
}

void check_time(lua_State* L) {
  Session& session = Session::of(L);
  if (!session.tripped && session.late()) session.trip("limit_time", Session::kTimeMessage);
  if (session.tripped) raise_tripped(L);
}

Where caller(lua_State* L) {
  lua_Debug frame;
  for (int level = 0; lua_getstack(L, level, &frame) != 0; ++level) {
    lua_getinfo(L, "Sl", &frame);  // these two allocate nothing: safe in the allocator
    if (frame.currentline > 0 && std::strncmp(frame.source, "=recipe#", 8) == 0)
      return Where{std::atoi(frame.source + 8), frame.currentline};
  }
  return {};
}

void* limited_alloc(void* owner, void* block, size_t old_size, size_t new_size) {
  auto& session = *static_cast<Session*>(owner);
  const size_t held = block == nullptr ? 0 : old_size;  // for a new block Lua passes its type as old_size
  if (new_size == 0) {
    std::free(block);
    session.memory_used -= static_cast<int64_t>(held);
    return nullptr;
  }
  if (new_size > held) {
    if (session.memory_used + static_cast<int64_t>(new_size - held) > session.limits.memory_bytes) {
      // Lua collects and asks once more; only if that fails too does it become an error.
      if (session.lua != nullptr) session.refused = caller(session.lua);
      return nullptr;
    }
    if (new_size >= kClockedAllocation && session.lua != nullptr && session.late()) {
      session.trip("limit_time", Session::kTimeMessage);
      return nullptr;
    }
  }
  void* out = std::realloc(block, new_size);
  if (out != nullptr) session.memory_used += static_cast<int64_t>(new_size) - static_cast<int64_t>(held);
  return out;
}

void install_sandbox(lua_State* L) {
  luaL_requiref(L, LUA_GNAME, luaopen_base, 0);
  luaL_requiref(L, LUA_STRLIBNAME, luaopen_string, 0);
  luaL_requiref(L, LUA_TABLIBNAME, luaopen_table, 0);
  luaL_requiref(L, LUA_MATHLIBNAME, luaopen_math, 0);
  const int base = 1, string = 2, table = 3, math = 4;

  lua_newtable(L);
  const int env = lua_gettop(L);
  pick(L, base,
       {"assert", "error", "getmetatable", "ipairs", "rawequal", "rawget", "rawlen", "rawset", "select", "tonumber",
        "tostring", "type"});
  lua_pushcfunction(L, guarded_pcall);
  lua_setfield(L, env, "pcall");
  lua_pushcfunction(L, guarded_setmetatable);
  lua_setfield(L, env, "setmetatable");
  lua_pushcfunction(L, sorted_pairs);
  lua_setfield(L, env, "pairs");

  lua_newtable(L);
  pick(L, string, {"byte", "char", "format", "len", "lower", "reverse", "sub", "upper"});
  guard(L, string, "rep", guarded_rep, 0);
  install_string_patterns(L);
  lua_pushliteral(L, "");
  lua_getmetatable(L, -1);
  lua_pushvalue(L, -3);
  lua_setfield(L, -2, "__index");
  lua_pushliteral(L, "string");
  lua_setfield(L, -2, "__metatable");
  lua_pop(L, 2);
  lua_setfield(L, env, "string");

  lua_newtable(L);
  pick(L, table, {"pack", "unpack"});
  guard(L, table, "concat", guarded_table, 1'000'000);
  guard(L, table, "insert", guarded_table, 1'000'000);
  guard(L, table, "remove", guarded_table, 1'000'000);
  guard(L, table, "sort", guarded_table, 100'000);
  lua_setfield(L, env, "table");

  lua_newtable(L);
  pick(L, math, {"abs", "ceil",       "cos",  "exp", "floor", "fmod", "huge", "log",       "max",  "maxinteger",
                 "min", "mininteger", "modf", "pi",  "sin",   "sqrt", "tan",  "tointeger", "type", "ult"});
  lua_setfield(L, env, "math");

  lua_newtable(L);
  lua_pushcfunction(L, unknown_global);
  lua_setfield(L, -2, "__index");
  lua_pushcfunction(L, no_new_global);
  lua_setfield(L, -2, "__newindex");
  lua_pushliteral(L, "environment");
  lua_setfield(L, -2, "__metatable");
  lua_setmetatable(L, env);

  lua_rawseti(L, LUA_REGISTRYINDEX, LUA_RIDX_GLOBALS);  // every chunk loaded from here on sees env alone
  lua_settop(L, 0);
  lua_sethook(L, hook, LUA_MASKCOUNT | LUA_MASKCALL, kHookInterval);
}

}  // namespace cairn::dsl
