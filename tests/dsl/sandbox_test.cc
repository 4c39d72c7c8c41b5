// What a recipe must not be able to do. Each abuse ends with an error at its line, in bounded time and memory.
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <chrono>

#include "tests/dsl/recipe_text.h"

using namespace cairn;
using namespace cairn::dsl;

namespace {

#ifdef CAIRN_SANITIZED
constexpr double kLimitS = 20;  // instrumented code and shadow memory
#else
constexpr double kLimitS = 2;
#endif

/// Process time, so that a busy machine does not fail the test; the wall-clock limit is the sandbox's own business.
double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

struct Abuse {
  const char* what;
  const char* text;
  int line;          // 0: either of two may be running
  const char* code;  // its beginning
};

void check_abuse(const Abuse& abuse) {
  CAPTURE(abuse.what);
  const double start = cpu_seconds();
  const LoadResult result = load_text(abuse.text);
  const double took = cpu_seconds() - start;
  INFO(to_text(result.diagnostics));
  REQUIRE(result.diagnostics.size() == 1);
  CHECK(result.diagnostics[0].code.find(abuse.code) == 0);
  CHECK(result.diagnostics[0].file == "main.lua");
  if (abuse.line != 0) CHECK(result.diagnostics[0].line == abuse.line);
  CHECK(took < kLimitS);
}

}  // namespace

TEST_SUITE("dsl/sandbox") {
  TEST_CASE("loops without end are stopped, wherever they are") {
    const Abuse abuses[] = {
        {"plain", "\nwhile true do end", 2, "limit_"},
        {"in a metamethod", "local m = setmetatable({}, { __add = function()\n  while true do end end })\nreturn m + m",
         2, "limit_"},
        {"__index for ever",
         "local t = setmetatable({}, { __index = function(t, k)\n return t[k + 1] end })\nfor i = 1, 1e9 do "
         "pcall(function() return t[1] end) end",
         0, "limit_"},
        {"under pcall", "while true do\n  pcall(function() while true do end end) end", 2, "limit_"},
        {"in __close under pcall",
         "local function bomb()\n  local x <close> = setmetatable({}, { __close = function() while true do end end })\n"
         "  while true do end\nend\nwhile true do pcall(bomb) end",
         3, "limit_"},
        {"sorting",
         "local t = {} for i = 1, 90000 do t[i] = (i * 7919) % 89989 end\nwhile true do table.sort(t, function(a, b) "
         "return a > b end) end",
         2, "limit_"},
        {"concat",
         "local t = {} for i = 1, 500000 do t[i] = 'xxxxxxxxxxxxxxxxxxxx' end\nwhile true do local s = table.concat(t) "
         "end",
         2, "limit_"},
        {"comparing", "local a, b = ('x'):rep(3e7), ('x'):rep(3e7)\nwhile a == b do end", 2, "limit_"},
        {"copying", "local a = ('x'):rep(3e7)\nwhile true do local b = a .. 'y' end", 2, "limit_"},
    };
    for (const Abuse& abuse : abuses) check_abuse(abuse);
  }

  TEST_CASE("patterns that blow up are stopped inside the matcher") {
    check_abuse({"find", "\nreturn ('a'):rep(30000):find('.-.-.-.-b')", 2, "limit_time"});
    check_abuse({"gsub", "\nreturn ('a'):rep(30000):gsub('.-.-.-.-b', 'x')", 2, "limit_time"});
    check_abuse({"gmatch", "\nfor x in ('a'):rep(30000):gmatch('.-.-.-.-b') do end", 2, "limit_time"});
    check_abuse({"match", "\nreturn ('a'):rep(30000):match('a*a*a*a*b')", 2, "limit_time"});
    check_abuse(
        {"plain find", "local h = ('a'):rep(2e7)\nreturn h:find(('a'):rep(1e7) .. 'b', 1, true)", 2, "limit_time"});
  }

  TEST_CASE("memory is bounded, and pcall does not catch it") {
    check_abuse({"a 10 GB string", "\nreturn ('x'):rep(1e10)", 2, "limit_memory"});
    check_abuse({"a 10 GB string under pcall", "\nwhile true do pcall(string.rep, 'x', 1e10) end", 2, "limit_memory"});
    check_abuse({"doubling", "local s = 'x'\nfor i = 1, 60 do\n  s = s .. s\nend", 3, "limit_memory"});
    check_abuse({"doubling under pcall", "local s = 'x'\nwhile true do pcall(function()\n  s = s .. s\nend) end", 3,
                 "limit_memory"});
    check_abuse({"many tables", "local t = {}\nfor i = 1, 1e9 do\n  t[i] = { i, i }\nend", 3, "limit_memory"});
    check_abuse({"many values",
                 "local T = require 'cairn'\nlocal big = {} for i = 1, 50000 do big[i] = 'abc' end\nwhile true do "
                 "T.blend(big) end",
                 3, "limit_size"});
  }

  TEST_CASE("loops inside the library have nothing to loop over") {
    CHECK(load_text("return (''):rep(1e18)").diagnostics.size() == 1);  // "" at once
    check_abuse(
        {"insert", "\ntable.insert(setmetatable({}, { __len = function() return 1e15 end }), 1, 2)", 2, "lua_error"});
    check_abuse({"finalizer", "\nsetmetatable({}, { __gc = function() while true do end end })", 2, "lua_error"});
    check_abuse({"recursion", "local function f()\n  return 1 + f()\nend\nreturn f()", 2, "lua_error"});
    check_abuse(
        {"a table in itself", "local T = require 'cairn'\nlocal t = {} t.t = t\nreturn T.recipe(t)", 3, "lua_error"});
    check_abuse({"many layers", "local r = require 'base'\nfor i = 1, 1e6 do\n  r = r:with {}\nend", 3, "lua_error"});
  }

  TEST_CASE("the outside does not exist") {
    for (const char* name : {"os", "io", "load", "dofile", "loadfile", "debug", "package", "coroutine",
                             "collectgarbage", "next", "print", "utf8"}) {
      CAPTURE(name);
      check_abuse({name, (std::string("\nreturn ") + name + ".x").c_str(), 2, "lua_error"});
    }
    check_abuse({"string.dump", "\nreturn string.dump(function() end)", 2, "lua_error"});
    check_abuse({"math.random", "\nreturn math.random()", 2, "lua_error"});
    CHECK(only_mistake("\x1bLuaT").find("is compiled Lua") != std::string::npos);
    CHECK(only_mistake("local T = require 'cairn'\nx = 1").find("main.lua:2: `x` would be a global") == 0);
    CHECK(only_mistake("\nreturn getmetatable('').__index") ==
          "main.lua: must return T.recipe {...} or base:with {...}, but returns nothing");
  }

  TEST_CASE("files: require and read_json stay below the recipe's folders") {
    for (const char* name : {"../base", "/etc/passwd", "base.lua/", ".base", "base..x", "", "a b"}) {
      CAPTURE(name);
      const LoadResult result = load_text("\nreturn require \"" + std::string(name) + "\"");
      REQUIRE(result.diagnostics.size() == 1);
      CHECK(result.diagnostics[0].line == 2);
    }
    CHECK(only_mistake("local T = require 'cairn'\nreturn T.read_json '/etc/hostname'").find("must be relative") !=
          std::string::npos);
    CHECK(only_mistake("local T = require 'cairn'\nreturn T.read_json 'a/../../x.json'").find("must be relative") !=
          std::string::npos);
    CHECK(only_mistake("\nreturn require 'nothing'").find("no such recipe; looked for nothing.lua, ../nothing.lua") !=
          std::string::npos);
    const RecipeFolder folder;
    folder.write("r/main.lua", "local T = require 'cairn'\nreturn T.read_json 'link/hostname'");
    std::filesystem::create_symlink("/etc", "r/link");
    const LoadResult linked = load_recipe("r/main.lua");
    REQUIRE(linked.diagnostics.size() == 1);
    CHECK(linked.diagnostics[0].message.find("no such file") != std::string::npos);
    folder.write("r/main.lua", "local T = require 'cairn'\nreturn T.read_json 'bad.json'");
    folder.write("r/bad.json", "{\"a\": }");
    CHECK(load_recipe("r/main.lua").diagnostics[0].message.find("r/bad.json") != std::string::npos);
    folder.write("r/bad.json", std::string(100000, '['));
    CHECK(load_recipe("r/main.lua").diagnostics.size() == 1);
  }

  TEST_CASE("a byte order mark is skipped in every file that a recipe reads, and UTF-16 is called by its name") {
    const RecipeFolder folder;
    const std::string mark = "\xEF\xBB\xBF";
    folder.write("r/base.lua", mark + kBase);
    folder.write("r/sizes.json", mark + "{\"seed\": 7}");
    folder.write(
        "r/main.lua",
        mark + "local T = require 'cairn'\nreturn require 'base':with { seed = T.read_json('sizes.json').seed }");
    const LoadResult read = load_recipe("r/main.lua");
    INFO(to_text(read.diagnostics));
    REQUIRE(read.ok());
    CHECK(read.loaded.recipe.seed == 7);
    folder.write("r/main.lua", mark + "#!/usr/bin/env lua\nreturn {");
    CHECK(load_recipe("r/main.lua").diagnostics.at(0).line == 2);
    const std::string wide = std::string("r\0e\0t\0u\0r\0n\0", 12);
    for (const std::string& text : {"\xFF\xFE" + wide, wide, std::string("\xFE\xFF\0r\0e", 6)}) {
      folder.write("r/main.lua", text);
      CHECK(load_recipe("r/main.lua").diagnostics.at(0).message.find("is text in UTF-16; save it as UTF-8") !=
            std::string::npos);
    }
  }

  TEST_CASE("the Lua functions that a recipe may use work as in Lua, patterns included") {
    const Recipe r = load_good(R"lua(
local T = require "cairn"
local function eq(a, b) if a ~= b then error(tostring(a) .. " is not " .. tostring(b), 2) end end
local function all(...) return table.concat({ ... }, "|") end
eq(all(("key = value"):match("^(%w+)%s*=%s*(%w+)$")), "key|value")
eq(all(("hello world"):find("o w")), "5|7")
eq(all(("hello"):find("l+")), "3|4")
eq(all(("hello"):find("xyz") == nil and "none"), "none")
eq(all(("a.b"):find(".", 1, true)), "2|2")
eq(all(("abc"):find("b", -1) or "none"), "none")
eq(all(("abc"):find("", 4)), "4|3")
eq(all(("hello"):find("()ll()")), "3|4|3|5")
eq(("THE (quick) fox"):match("%((%a+)%)"), "quick")
eq(("f(a(b)c)d"):match("%b()"), "(a(b)c)")
eq(("THE (quick) fox"):gsub("%f[%a]%a+", string.lower), "the (quick) fox")
eq(("abcabc"):match("(a)(b)c%1%2"), "a")
eq(all(("hello world"):gsub("o", "0")), "hell0 w0rld|2")
eq(all(("hello"):gsub("", "-")), "-h-e-l-l-o-|6")
eq(all(("abc"):gsub("%w", "%0%0", 2)), "aabbc|2")
eq(all(("abc def"):gsub("(%w+) (%w+)", "%2 %1")), "def abc|1")
eq(("$name is"):gsub("%$(%w+)", { name = "x" }), "x is")
eq(("abc"):gsub("b", "%%"), "a%c")
eq(("2026-11-21"):gsub("[%d]+", function(d) return #d end), "4-2-2")
eq(("[x]"):match("[%]]"), "]")
eq(("a-b"):match("[a%-b]+"), "a-b")
eq(("x]y"):match("[^]]+"), "x")
eq(("aaa"):match("a-$"), "aaa")
eq(("aXb"):match("%u"), "X")
eq(("  trim  "):match("^%s*(.-)%s*$"), "trim")
eq(("0x1F"):match("%x+", 3), "1F")
local words = {}
for k, v in ("a=1, b=2"):gmatch("(%w+)=(%w+)") do words[#words + 1] = k .. v end
eq(table.concat(words), "a1b2")
local n = 0 for _ in ("abc"):gmatch("") do n = n + 1 end eq(n, 4)
for _, bad in ipairs { "(", "a.)", "[a", "%", "%b", "%f", "%1" } do eq(pcall(string.find, "abc", bad), false) end
eq(pcall(string.gsub, "abc", "b", "%2"), false)
local keys = {}
for k in pairs { b = 1, a = 2, [10] = 3, [2] = 4, c = 5 } do keys[#keys + 1] = k end
eq(table.concat(keys, ","), "2,10,a,b,c")
local ok, message = pcall(error, "caught") eq(ok, false) eq(message, "caught")
local t = { 3, 1, 2 } table.sort(t) table.insert(t, 4) table.remove(t, 1) eq(table.concat(t, ","), "2,3,4")
eq(("x"):rep(3, "-"), "x-x-x")
eq(math.floor(2.7), 2)
return require "base"
)lua");
    CHECK(r.name == "base");
  }

  TEST_CASE("finished values are finished, and say so") {
    CHECK(only_mistake("local r = require 'base'\nr.name = 'x'").find("main.lua:2: a recipe cannot be changed") == 0);
    CHECK(load_text("local r = require 'base'\nreturn r.name").diagnostics[0].message.find("cannot be read") !=
          std::string::npos);
    CHECK(load_text("local T = require 'cairn'\nT.gpt = 1").diagnostics[0].message == "T cannot be changed");
    CHECK(only_mistake("return 3") == "main.lua: must return T.recipe {...} or base:with {...}, but returns 3");
    CHECK(only_mistake("") == "main.lua: must return T.recipe {...} or base:with {...}, but returns nothing");
    CHECK(only_mistake("error({})").find("raised a table as an error") != std::string::npos);
    CHECK(only_mistake("local T = require 'cairn'\nreturn T.recipe { name = 'x', data = T.blend { 1, nil, 2 } }")
              .find("main.lua:2: a list has a hole") == 0);
  }

  TEST_CASE("a recipe cut short or with bytes changed gives errors, never a crash") {
    const RecipeFolder folder;
    uint64_t state = 1;
    int64_t refused = 0;
    for (size_t i = 0; i < 2 * kBase.size(); ++i) {
      std::string text = kBase;
      if (i < kBase.size()) {
        text.resize(i);
      } else {
        for (int k = 0; k < 3; ++k) {
          state = state * 6364136223846793005ull + 1442695040888963407ull;
          text[(state >> 33) % text.size()] = "{}()[]=,.\"'0aT\n-"[(state >> 20) % 16];
        }
      }
      folder.write("main.lua", text);
      const LoadResult result = load_recipe("main.lua");
      if (result.ok()) continue;
      ++refused;
      CHECK(!to_text(result.diagnostics).empty());
      for (const Diagnostic& diagnostic : result.diagnostics) CHECK(!diagnostic.message.empty());
    }
    CHECK(refused > static_cast<int64_t>(kBase.size()));
  }

  TEST_CASE("a recipe that was stopped leaves nothing behind: the next one is read as ever") {
    for (int i = 0; i < 3; ++i) CHECK(!load_text("return ('x'):rep(1e10)").ok());
    load_good(kBase);
  }
}
