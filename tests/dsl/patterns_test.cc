// The pattern matcher against Lua's own, on random patterns and subjects.
#include <doctest/doctest.h>

#include <string>

#include "dsl/lua.h"
#include "dsl/session.h"

using namespace cairn::dsl;

namespace {

struct Random {
  uint64_t state = 88172645463325252ull;
  uint64_t below(uint64_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % n;
  }
  const char* pick(const std::vector<const char*>& from) { return from[below(from.size())]; }
};

/// Calls library.function(...) with the strings, and shows the outcome as text.
std::string outcome(lua_State* L, const char* library, const char* function,
                    const std::vector<std::string>& arguments) {
  lua_settop(L, 0);
  lua_getglobal(L, library);
  lua_getfield(L, 1, function);
  for (const std::string& argument : arguments) lua_pushlstring(L, argument.data(), argument.size());
  if (lua_pcall(L, static_cast<int>(arguments.size()), LUA_MULTRET, 0) != LUA_OK) return "error";
  std::string out;
  for (int i = 2; i <= lua_gettop(L); ++i) out += std::string(luaL_tolstring(L, i, nullptr)) + "|", lua_pop(L, 1);
  return out;
}

/// Everything gmatch yields.
std::string all_matches(lua_State* L, const char* library, const std::string& subject, const std::string& pattern) {
  lua_settop(L, 0);
  lua_getglobal(L, library);
  lua_getfield(L, 1, "gmatch");
  lua_pushlstring(L, subject.data(), subject.size());
  lua_pushlstring(L, pattern.data(), pattern.size());
  if (lua_pcall(L, 2, 1, 0) != LUA_OK) return "error";
  std::string out;
  for (int i = 0; i < 50; ++i) {
    lua_settop(L, 2);
    lua_pushvalue(L, 2);
    if (lua_pcall(L, 0, LUA_MULTRET, 0) != LUA_OK) return "error";
    if (lua_gettop(L) == 2 || lua_isnil(L, 3)) break;
    for (int k = 3; k <= lua_gettop(L); ++k) out += std::string(luaL_tolstring(L, k, nullptr)) + "|", lua_pop(L, 1);
    out += "/";
  }
  return out;
}

}  // namespace

TEST_SUITE("dsl/patterns") {
  TEST_CASE("find, match, gsub and gmatch give what Lua's own give") {
    Session session;
    session.deadline = Session::Clock::now() + std::chrono::hours(1);
    lua_State* L = luaL_newstate();
    *static_cast<Session**>(lua_getextraspace(L)) = &session;
    luaL_openlibs(L);
    lua_newtable(L);
    install_string_patterns(L);
    lua_setglobal(L, "own");
    Random random;
    const std::vector<const char*> atoms = {
        "a",      "b",  ".",  "%a", "%d", "%s", "[ab]", "[^a]",   "[a-c]", "[%d_]", "(a)", "(%a*", ")", "()", "%b()",
        "%f[%a]", "%1", "%2", "^",  "$",  "%.", "[]]",  "[^]-b]", "(.-)",  "%W",    "[",   "%",    "-", "(",  "x"};
    const std::vector<const char*> repeats = {"", "", "", "*", "+", "-", "?"};
    const std::vector<const char*> pieces = {"a", "b", "c", "(", ")", " ", "1", ".", "]", "_", "ab", "-"};
    const std::vector<const char*> replacements = {"<%0>", "%1", "%%", "x", "%2", "%", "%a"};
    int64_t errors = 0, matches = 0;
    for (int i = 0; i < 30000; ++i) {
      std::string pattern, subject;
      if (random.below(6) == 0) pattern += "^";
      for (uint64_t k = random.below(5) + 1; k > 0; --k)
        pattern += std::string(random.pick(atoms)) + random.pick(repeats);
      if (random.below(6) == 0) pattern += "$";
      for (uint64_t k = random.below(10); k > 0; --k) subject += random.pick(pieces);
      CAPTURE(pattern);
      CAPTURE(subject);
      const std::string start = std::to_string(static_cast<int64_t>(random.below(6)) - 2);
      const std::string found = outcome(L, "string", "find", {subject, pattern, start});
      // Lua finds a mistake in a pattern only where the match gets to; ours finds it always.
      const std::string own = outcome(L, "own", "find", {subject, pattern, start});
      if (own == "error" || outcome(L, "own", "match", {subject, pattern}) == "error") {
        ++errors;
        continue;
      }
      matches += found == "nil|" ? 0 : 1;
      REQUIRE(own == found);
      REQUIRE(outcome(L, "own", "match", {subject, pattern}) == outcome(L, "string", "match", {subject, pattern}));
      REQUIRE(all_matches(L, "own", subject, pattern) == all_matches(L, "string", subject, pattern));
      const std::string with = random.pick(replacements);
      CAPTURE(with);
      REQUIRE(outcome(L, "own", "gsub", {subject, pattern, with}) ==
              outcome(L, "string", "gsub", {subject, pattern, with}));
    }
    CHECK(errors < 20000);
    CHECK(matches > 3000);
    lua_close(L);
  }
}
