#include "dsl/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "dsl/schema.h"
#include "dsl/session.h"
#include "runtime/core/text_encoding.h"
#include "runtime/json/json.h"

namespace cairn::dsl {
namespace fs = std::filesystem;
namespace {

/// Reads a whole file; the time it takes is not the recipe's. Returns what is wrong, or "".
std::string read_text(Session& session, const std::string& path, int64_t limit_bytes, std::string& out) {
  if (++session.files_read > session.limits.files)
    return fmt::format("is one file too many: at most {}", session.limits.files);
  const Session::Clock::time_point start = Session::Clock::now();
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) return "no such file";
  if (fs::is_directory(status)) return "is a folder, not a file";
  if (!fs::is_regular_file(status)) return "is not a plain file";
  std::ifstream in(path, std::ios::binary);
  if (!in) return fmt::format("cannot be read: {}", std::strerror(errno));
  if (static_cast<int64_t>(fs::file_size(path, error)) > limit_bytes)
    return fmt::format("is larger than {} MiB", limit_bytes >> 20);
  std::stringstream text;
  text << in.rdbuf();
  out = std::move(text).str();
  session.deadline += Session::Clock::now() - start;
  if (const std::string_view other = skip_byte_order_mark(out); !other.empty())
    return fmt::format("is text in {}; save it as UTF-8", other);
  return "";
}

std::string shown(const fs::path& path) { return path.lexically_normal().string(); }

/// Compiles `text` as a chunk that knows its file. Leaves the function, or an error message, on the stack.
int load_chunk(lua_State* L, Session& session, Session::File file, const std::string& code) {
  const std::string chunk = fmt::format("=recipe#{}", session.files.size());
  session.files.push_back(std::move(file));
  return luaL_loadbufferx(L, code.data(), code.size(), chunk.c_str(), "t");
}

/// "recipe#2:14: text" -> file 2, line 14, "text". Names of other chunks inside the text become file names as well.
Diagnostic from_message(const Session& session, std::string text, const char* code) {
  Diagnostic out;
  out.code = code;
  const auto parse = [&](std::string_view from, size_t& length, Where& where) {
    if (from.substr(0, 7) != "recipe#") return false;
    size_t at = 7;
    int64_t file = 0, line = 0;
    const size_t digits = at;
    while (at < from.size() && std::isdigit(static_cast<unsigned char>(from[at])) != 0 && at < digits + 9)
      file = file * 10 + (from[at++] - '0');
    if (at >= from.size() || from[at] != ':' || file >= static_cast<int64_t>(session.files.size())) return false;
    ++at;
    while (at < from.size() && std::isdigit(static_cast<unsigned char>(from[at])) != 0 && at < digits + 20)
      line = line * 10 + (from[at++] - '0');
    if (at >= from.size() || from[at] != ':') return false;
    length = at + 1;
    where = Where{static_cast<int>(file), static_cast<int>(line)};
    return true;
  };
  size_t length = 0;
  Where where;
  if (parse(text, length, where)) {
    const Session::File& file = session.files[static_cast<size_t>(where.file)];
    out.file = file.name;
    out.line = file.on_disk ? where.line : 0;
    text.erase(0, length);
    if (!text.empty() && text[0] == ' ') text.erase(0, 1);
  }
  for (size_t at = text.find("recipe#"); at != std::string::npos; at = text.find("recipe#", at + 1)) {
    if (!parse(std::string_view(text).substr(at), length, where)) continue;
    text.replace(at, length, fmt::format("{}:{}:", session.files[static_cast<size_t>(where.file)].name, where.line));
  }
  if (text.size() > 1000) text = text.substr(0, 1000) + "...";
  out.message = std::move(text);
  return out;
}

/// Calls the function below `arguments` on the stack, for one result. False after noting what went wrong.
bool call_chunk(lua_State* L, Session& session, const std::string& file_name, int arguments) {
  const int status = lua_pcall(L, arguments, 1, 0);
  if (status == LUA_ERRMEM && !session.tripped) session.trip_memory();
  if (session.tripped) {
    Diagnostic out = *session.tripped;
    if (out.file.empty()) out.file = file_name;
    session.diagnostics.push_back(std::move(out));
    lua_settop(L, 0);
    return false;
  }
  if (status != LUA_OK) {
    size_t length = 0;
    const char* text = lua_tolstring(L, -1, &length);
    std::string message = text != nullptr ? std::string(text, length)
                                          : fmt::format("the recipe raised a {} as an error; error takes a message",
                                                        luaL_typename(L, -1));
    Diagnostic out = from_message(session, std::move(message), "lua_error");
    if (out.file.empty()) out.file = file_name;
    session.diagnostics.push_back(std::move(out));
    lua_settop(L, 0);
    return false;
  }
  return true;
}

struct ToNode {
  Place place;
  NodePtr result;
};

/// Runs under lua_pcall: converting may raise.
int convert_result(lua_State* L) {
  auto* job = static_cast<ToNode*>(lua_touserdata(L, lua_upvalueindex(1)));
  job->result = to_node(L, 1, job->place);
  return 0;
}

NodePtr finish_chunk(lua_State* L, Session& session, const std::string& file_name, const std::string& layer, int line,
                     const std::string& constructor) {
  if (!call_chunk(L, session, file_name, 0)) return nullptr;
  ToNode job{Place{std::make_shared<const Call>(Call{file_name, line, constructor, layer}), {}}, nullptr};
  lua_pushlightuserdata(L, &job);
  lua_pushcclosure(L, convert_result, 1);
  lua_insert(L, 1);
  if (!call_chunk(L, session, file_name, 1)) return nullptr;
  lua_settop(L, 0);
  return job.result;
}

Diagnostic file_problem(const std::string& file, const std::string& message, const char* code) {
  Diagnostic out;
  out.file = file;
  out.code = code;
  out.message = message;
  return out;
}

bool is_bytecode(const std::string& text) { return !text.empty() && text[0] == '\x1b'; }
constexpr const char* kBytecode = "is compiled Lua; a recipe must be text that a person can read";

/// A first line `#!...` is skipped, keeping line numbers.
std::string without_shebang(const std::string& text) { return text.substr(0, 1) == "#" ? "--" + text : text; }

/// require "recipes.base": upvalue 1 the cairn table, 2 the modules already loaded.
int require_recipe(lua_State* L) {
  Session& session = Session::of(L);
  const std::string name = luaL_checkstring(L, 1);
  if (name == "cairn") {
    lua_pushvalue(L, lua_upvalueindex(1));
    return 1;
  }
  lua_settop(L, 1);
  if (lua_getfield(L, lua_upvalueindex(2), name.c_str()) != LUA_TNIL) return 1;
  std::string relative;
  bool word = false;
  for (const char c : name) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-';
    if (!plain && (c != '.' || !word))
      return luaL_error(L, "require \"%s\": a recipe is named by folders and dots, such as \"recipes.base\"",
                        name.c_str());
    word = plain;
    relative += c == '.' ? '/' : c;
  }
  if (!word) return luaL_error(L, "require \"%s\": a recipe is named such as \"recipes.base\"", name.c_str());
  const std::string path = find_below_roots(session, relative + ".lua");
  if (path.empty()) {
    std::string looked;
    for (const std::string& root : session.roots)
      looked += (looked.empty() ? "" : ", ") + shown(fs::path(root) / (relative + ".lua"));
    return luaL_error(L, "require \"%s\": no such recipe; looked for %s", name.c_str(), looked.c_str());
  }
  const auto open = std::find(session.loading.begin(), session.loading.end(), path);
  if (open != session.loading.end()) {
    std::string chain;
    for (auto at = open; at != session.loading.end(); ++at) chain += *at + " -> ";
    return luaL_error(L, "recipes require each other in a circle: %s%s", chain.c_str(), path.c_str());
  }
  std::string text;
  const std::string wrong = read_text(session, path, session.limits.file_bytes, text);
  if (!wrong.empty()) return luaL_error(L, "require \"%s\": %s %s", name.c_str(), path.c_str(), wrong.c_str());
  if (is_bytecode(text)) return luaL_error(L, "require \"%s\": %s %s", name.c_str(), path.c_str(), kBytecode);
  session.sources.emplace_back(path, text);
  if (load_chunk(L, session, {path, text, "recipe", true}, without_shebang(text)) != LUA_OK) return lua_error(L);
  {
    struct Loading {  // an error unwinds through here
      Session& session;
      explicit Loading(Session& owner, const std::string& file) : session(owner) { session.loading.push_back(file); }
      ~Loading() { session.loading.pop_back(); }
    } loading(session, path);
    lua_call(L, 0, 1);
  }
  if (lua_isnil(L, -1)) return luaL_error(L, "require \"%s\": %s returns nothing", name.c_str(), path.c_str());
  lua_pushvalue(L, -1);
  lua_setfield(L, lua_upvalueindex(2), name.c_str());
  return 1;
}

void push_json(lua_State* L, const Json& value, int depth) {
  if (depth > Session::of(L).limits.depth) luaL_error(L, "the JSON is nested too deeply");
  luaL_checkstack(L, 4, "JSON");
  switch (value.type()) {
    case Json::value_t::boolean:
      lua_pushboolean(L, value.get<bool>() ? 1 : 0);
      return;
    case Json::value_t::number_integer:
      lua_pushinteger(L, value.get<int64_t>());
      return;
    case Json::value_t::number_unsigned:
      if (value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
        lua_pushnumber(L, value.get<double>());
      } else {
        lua_pushinteger(L, value.get<int64_t>());
      }
      return;
    case Json::value_t::number_float:
      lua_pushnumber(L, value.get<double>());
      return;
    case Json::value_t::string: {
      const auto& text = value.get_ref<const std::string&>();
      lua_pushlstring(L, text.data(), text.size());
      return;
    }
    case Json::value_t::array: {
      lua_newtable(L);
      lua_Integer at = 0;
      for (const Json& element : value) {
        push_json(L, element, depth + 1);
        lua_rawseti(L, -2, ++at);
      }
      return;
    }
    case Json::value_t::object:
      lua_newtable(L);
      for (const auto& [key, element] : value.items()) {
        lua_pushlstring(L, key.data(), key.size());
        push_json(L, element, depth + 1);
        lua_rawset(L, -3);
      }
      return;
    default:
      lua_pushnil(L);
  }
}

}  // namespace

std::string find_below_roots(const Session& session, const std::string& relative) {
  for (const std::string& root : session.roots) {
    const fs::path path = fs::path(root) / relative;
    std::error_code error;
    if (!fs::exists(path, error)) continue;
    // A link must not lead out of the root.
    const fs::path real = fs::weakly_canonical(path, error), real_root = fs::weakly_canonical(root, error);
    const auto [end, unused] = std::mismatch(real_root.begin(), real_root.end(), real.begin(), real.end());
    if (end == real_root.end()) return shown(path);
  }
  return "";
}

int read_json(lua_State* L) {
  Session& session = Session::of(L);
  const std::string name = luaL_checkstring(L, 1);
  const fs::path relative = name;
  const bool leaves = std::any_of(relative.begin(), relative.end(), [](const fs::path& part) { return part == ".."; });
  if (relative.is_absolute() || leaves || name.empty())
    return luaL_error(L, "T.read_json \"%s\": the path must be relative and stay below the recipe's folder",
                      name.c_str());
  const std::string path = find_below_roots(session, name);
  if (path.empty()) {
    std::string looked;
    for (const std::string& root : session.roots)
      looked += (looked.empty() ? "" : ", ") + shown(fs::path(root) / relative);
    return luaL_error(L, "T.read_json \"%s\": no such file; looked for %s", name.c_str(), looked.c_str());
  }
  std::string text;
  const std::string wrong = read_text(session, path, session.limits.json_bytes, text);
  if (!wrong.empty()) return luaL_error(L, "T.read_json: %s %s", path.c_str(), wrong.c_str());
  std::string complaint;
  Json value;
  {
    Result<Json> parsed = parse_json(text);
    if (parsed.ok()) value = std::move(parsed).value();
    if (!parsed.ok()) complaint = parsed.error().message;
  }
  if (!complaint.empty()) return luaL_error(L, "T.read_json: %s: %s", path.c_str(), complaint.c_str());
  const auto known = [&](const auto& source) { return source.first == path; };
  if (std::none_of(session.sources.begin(), session.sources.end(), known)) session.sources.emplace_back(path, text);
  push_json(L, value, 0);
  return 1;
}

Evaluator::Evaluator(const std::string& main_path, const std::vector<std::string>& params)
    : session_(std::make_unique<Session>()) {
  Session& session = *session_;
  for (const std::string& param : params) {
    const size_t equals = param.find('=');
    if (equals == std::string::npos || equals == 0) {
      session.diagnostics.push_back(file_problem("--param " + param, "must be NAME=VALUE", "bad_param"));
      continue;
    }
    session.given_params[param.substr(0, equals)] = param.substr(equals + 1);
  }
  const fs::path folder = fs::path(main_path).parent_path();
  session.roots.push_back(folder.empty() ? "." : folder.string());
  session.roots.push_back(folder.empty() ? ".." : (folder / "..").lexically_normal().string());
  session.deadline = Session::Clock::now() + session.limits.time;
  lua_State* L = lua_newstate(limited_alloc, &session);
  RT_CHECK(L != nullptr, "no memory for a Lua state");
  *static_cast<Session**>(lua_getextraspace(L)) = &session;
  lua_gc(L, LUA_GCGEN, 0, 0);
  session.lua = L;
  lua_pushcfunction(L, [](lua_State* state) {
    install_sandbox(state);
    lua_pushglobaltable(state);
    push_cairn_table(state);
    lua_newtable(state);
    lua_pushcclosure(state, require_recipe, 2);
    lua_pushliteral(state, "require");
    lua_insert(state, -2);
    lua_rawset(state, -3);
    return 0;
  });
  RT_CHECK(lua_pcall(L, 0, 0, 0) == LUA_OK, "the sandbox: {}", lua_tostring(L, -1));
  session.deadline = Session::Clock::now() + session.limits.time;
}

Evaluator::~Evaluator() {
  lua_State* L = session_->lua;
  session_->lua = nullptr;
  lua_sethook(L, nullptr, 0, 0);
  lua_close(L);
}

std::vector<Diagnostic>& Evaluator::diagnostics() { return session_->diagnostics; }
const std::vector<std::pair<std::string, std::string>>& Evaluator::sources() const { return session_->sources; }
bool Evaluator::out_of_budget() const { return session_->tripped.has_value(); }

NodePtr Evaluator::run_file(const std::string& path, const std::string& layer) {
  Session& session = *session_;
  lua_State* L = session.lua;
  const std::string name = shown(path);
  std::string text;
  std::string wrong = read_text(session, path, session.limits.file_bytes, text);
  if (wrong.empty() && is_bytecode(text)) wrong = kBytecode;
  if (!wrong.empty()) {
    session.diagnostics.push_back(file_problem(name, wrong, "unreadable"));
    return nullptr;
  }
  session.sources.emplace_back(name, text);
  if (load_chunk(L, session, {name, text, layer, true}, without_shebang(text)) != LUA_OK) {
    Diagnostic out = from_message(session, lua_tostring(L, -1), "syntax");
    if (out.file.empty()) out.file = name;
    session.diagnostics.push_back(std::move(out));
    lua_settop(L, 0);
    return nullptr;
  }
  session.loading = {name};
  NodePtr out = finish_chunk(L, session, name, layer, 1, "return");
  session.loading.clear();
  return out;
}

NodePtr Evaluator::run_expression(const std::string& text, const std::string& shown_as, bool fall_back_to_string) {
  Session& session = *session_;
  lua_State* L = session.lua;
  const std::string code = "local T = require \"cairn\" return " + text;
  if (load_chunk(L, session, {shown_as, text, "--set", false}, code) != LUA_OK) {
    std::string message = lua_tostring(L, -1);
    lua_settop(L, 0);
    if (fall_back_to_string) {
      Node out;
      out.kind = Node::Kind::kString;
      out.text = text;
      return std::make_shared<const Node>(std::move(out));
    }
    Diagnostic out = from_message(session, std::move(message), "syntax");
    out.file = shown_as;
    out.message = "the value is not a Lua expression: " + out.message;
    session.diagnostics.push_back(std::move(out));
    return nullptr;
  }
  return finish_chunk(L, session, shown_as, "--set", 0, "");
}

void Evaluator::check_params() {
  for (const auto& [name, value] : session_->given_params) {
    if (session_->declared_params.count(name) != 0) continue;
    std::vector<std::string> names;
    std::string list;
    for (const auto& [declared, unused] : session_->declared_params) {
      names.push_back(declared);
      list += (list.empty() ? "" : ", ") + declared;
    }
    Diagnostic out =
        file_problem("--param " + name + "=" + value, "the recipe declares no parameter " + name, "unknown_param");
    out.path = name;
    out.suggest = nearest(name, names);
    out.accepted = list.empty() ? "none; T.params declares parameters" : list;
    session_->diagnostics.push_back(std::move(out));
  }
}

}  // namespace cairn::dsl
