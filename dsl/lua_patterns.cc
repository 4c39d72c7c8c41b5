// string.find, match, gmatch and gsub with Lua's pattern language (reference manual, section 6.4.1), in a matcher of
// our own: Lua's runs inside C, where neither hook nor allocator can stop ("a"):rep(30000):find(".-.-.-.-b").
//
// A pattern is compiled to items; only single characters carry a repetition, so the recursion is never deeper than the
// pattern is long. Every kStepsPerCheck steps the clock is looked at.
#include <algorithm>
#include <array>
#include <bitset>
#include <cctype>
#include <cstring>
#include <string_view>

#include "dsl/session.h"

namespace cairn::dsl {
namespace {

constexpr int64_t kStepsPerCheck = 1 << 14;
constexpr size_t kMaxCaptures = 32;      // as Lua's own
constexpr size_t kMaxPattern = 1 << 14;  // bounds the recursion

using CharSet = std::bitset<256>;

struct Item {
  enum class Kind { kChar, kOpen, kPosition, kClose, kBackReference, kBalance, kFrontier, kEnd };
  Kind kind = Kind::kChar;
  CharSet set;               // kChar, kFrontier
  char repeat = 0;           // kChar: 0 once, or one of * + - ?
  int capture = 0;           // kBackReference
  char open = 0, close = 0;  // kBalance
};

struct Pattern {
  std::vector<Item> items;
  bool anchored = false;
};

/// The set of %a, %d, ...; false when the letter names none, so that it stands for itself.
bool class_set(char letter, CharSet& out) {
  int (*test)(int) = nullptr;
  switch (std::tolower(static_cast<unsigned char>(letter))) {
    case 'a':
      test = std::isalpha;
      break;
    case 'c':
      test = std::iscntrl;
      break;
    case 'd':
      test = std::isdigit;
      break;
    case 'g':
      test = std::isgraph;
      break;
    case 'l':
      test = std::islower;
      break;
    case 'p':
      test = std::ispunct;
      break;
    case 's':
      test = std::isspace;
      break;
    case 'u':
      test = std::isupper;
      break;
    case 'w':
      test = std::isalnum;
      break;
    case 'x':
      test = std::isxdigit;
      break;
    default:
      return false;
  }
  CharSet found;
  for (int c = 0; c < 256; ++c) found[static_cast<size_t>(c)] = test(c) != 0;
  out |= std::isupper(static_cast<unsigned char>(letter)) != 0 ? ~found : found;
  return true;
}

size_t at(char c) { return static_cast<unsigned char>(c); }

class Compiler {
 public:
  Compiler(lua_State* L, std::string_view text) : L_(L), text_(text) {}

  Pattern run(bool anchors) {
    if (text_.size() > kMaxPattern) luaL_error(L_, "pattern too long");
    Pattern out;
    if (anchors && !text_.empty() && text_[0] == '^') out.anchored = true, at_ = 1;
    int opened = 0;
    std::vector<int> open;
    while (at_ < text_.size()) {
      Item item;
      const char c = text_[at_++];
      if (c == '(') {
        item.kind = Item::Kind::kOpen;
        if (at_ < text_.size() && text_[at_] == ')') {
          ++at_;
          item.kind = Item::Kind::kPosition;
        } else {
          open.push_back(opened);
        }
        if (static_cast<size_t>(++opened) > kMaxCaptures) luaL_error(L_, "too many captures");
      } else if (c == ')') {
        if (open.empty()) luaL_error(L_, "invalid pattern capture");
        item.kind = Item::Kind::kClose;
        item.capture = open.back();
        open.pop_back();
      } else if (c == '$' && at_ == text_.size()) {
        item.kind = Item::Kind::kEnd;
      } else if (c == '%' && at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])) != 0) {
        item.kind = Item::Kind::kBackReference;
        item.capture = text_[at_++] - '1';
        if (item.capture < 0 || item.capture >= opened || std::count(open.begin(), open.end(), item.capture) != 0)
          luaL_error(L_, "invalid capture index %%%d in a pattern", item.capture + 1);
      } else if (c == '%' && at_ < text_.size() && text_[at_] == 'b') {
        if (at_ + 2 >= text_.size()) luaL_error(L_, "malformed pattern (missing arguments to '%%b')");
        item.kind = Item::Kind::kBalance;
        item.open = text_[at_ + 1];
        item.close = text_[at_ + 2];
        at_ += 3;
      } else if (c == '%' && at_ < text_.size() && text_[at_] == 'f') {
        if (++at_ >= text_.size() || text_[at_] != '[') luaL_error(L_, "missing '[' after '%%f' in pattern");
        ++at_;
        item.kind = Item::Kind::kFrontier;
        item.set = bracket();
      } else {
        item.set = single(c);
        if (at_ < text_.size() && std::strchr("*+-?", text_[at_]) != nullptr) item.repeat = text_[at_++];
      }
      out.items.push_back(item);
    }
    if (!open.empty()) luaL_error(L_, "unfinished capture");
    return out;
  }

 private:
  CharSet single(char c) {
    CharSet out;
    if (c == '.') return out.set();
    if (c == '[') return bracket();
    if (c == '%') {
      if (at_ >= text_.size()) luaL_error(L_, "malformed pattern (ends with '%%')");
      const char letter = text_[at_++];
      if (!class_set(letter, out)) out.set(at(letter));
      return out;
    }
    return out.set(at(c));
  }

  /// After '['.
  CharSet bracket() {
    CharSet out;
    bool negate = false;
    if (at_ < text_.size() && text_[at_] == '^') negate = true, ++at_;
    for (bool first = true;; first = false) {
      if (at_ >= text_.size()) luaL_error(L_, "malformed pattern (missing ']')");
      const char c = text_[at_++];
      if (c == ']' && !first) break;
      if (c == '%') {
        if (at_ >= text_.size()) luaL_error(L_, "malformed pattern (missing ']')");
        const char letter = text_[at_++];
        if (!class_set(letter, out)) out.set(at(letter));
      } else if (at_ + 1 < text_.size() && text_[at_] == '-' && text_[at_ + 1] != ']') {
        for (size_t k = at(c); k <= at(text_[at_ + 1]); ++k) out.set(k);
        at_ += 2;
      } else {
        out.set(at(c));
      }
    }
    return negate ? ~out : out;
  }

  lua_State* L_;
  std::string_view text_;
  size_t at_ = 0;
};

struct Capture {
  size_t begin = 0, length = 0;
  bool position = false, closed = false;
};

constexpr size_t kNoMatch = static_cast<size_t>(-1);

class Matcher {
 public:
  Matcher(lua_State* L, std::string_view subject, const Pattern& pattern)
      : L_(L), subject_(subject), items_(pattern.items) {}

  /// The end of the match that begins at `from`, or kNoMatch.
  size_t match(size_t from) {
    count_ = 0;
    return match(0, from);
  }

  size_t captures() const { return count_; }

  /// Pushes capture k; a pattern without captures has the whole match as its first.
  void push_capture(size_t k, size_t begin, size_t end) {
    if (k >= count_) {
      if (k != 0) luaL_error(L_, "invalid capture index %%%d", static_cast<int>(k + 1));
      lua_pushlstring(L_, subject_.data() + begin, end - begin);
    } else if (captures_[k].position) {
      lua_pushinteger(L_, static_cast<lua_Integer>(captures_[k].begin + 1));
    } else {
      lua_pushlstring(L_, subject_.data() + captures_[k].begin, captures_[k].length);
    }
  }

  int push_all(size_t begin, size_t end, bool whole_if_none) {
    const size_t count = count_ == 0 && whole_if_none ? 1 : count_;
    luaL_checkstack(L_, static_cast<int>(count), "too many captures");
    for (size_t k = 0; k < count; ++k) push_capture(k, begin, end);
    return static_cast<int>(count);
  }

  void step(int64_t steps = 1) {
    steps_ += steps;
    if (steps_ >= kStepsPerCheck) {
      steps_ = 0;
      check_time(L_);
    }
  }

 private:
  bool fits(const Item& item, size_t pos) {
    step();
    return pos < subject_.size() && item.set[at(subject_[pos])];
  }

  size_t match(size_t i, size_t pos) {
    for (; i < items_.size(); ++i) {
      const Item& item = items_[i];
      step();
      switch (item.kind) {
        case Item::Kind::kChar: {
          if (item.repeat == 0) {
            if (!fits(item, pos)) return kNoMatch;
            ++pos;
            continue;
          }
          if (item.repeat == '-') {
            while (true) {
              if (const size_t end = match(i + 1, pos); end != kNoMatch) return end;
              if (!fits(item, pos)) return kNoMatch;
              ++pos;
            }
          }
          const size_t least = item.repeat == '+' ? 1 : 0, most = item.repeat == '?' ? 1 : kNoMatch;
          size_t count = 0;
          while (count < most && fits(item, pos + count)) ++count;
          for (;; --count) {
            if (count < least) return kNoMatch;
            if (const size_t end = match(i + 1, pos + count); end != kNoMatch) return end;
            if (count == 0) return kNoMatch;
          }
        }
        case Item::Kind::kOpen:
        case Item::Kind::kPosition: {
          captures_[count_++] = Capture{pos, 0, item.kind == Item::Kind::kPosition, false};
          const size_t end = match(i + 1, pos);
          if (end == kNoMatch) --count_;
          return end;
        }
        case Item::Kind::kClose: {
          Capture& capture = captures_[static_cast<size_t>(item.capture)];
          const size_t before = capture.length;
          capture.length = pos - capture.begin;
          const size_t end = match(i + 1, pos);
          if (end == kNoMatch) capture.length = before;
          return end;
        }
        case Item::Kind::kBackReference: {
          const Capture& capture = captures_[static_cast<size_t>(item.capture)];
          step(static_cast<int64_t>(capture.length / 16));
          const std::string_view text = subject_.substr(capture.begin, capture.length);
          if (capture.position || subject_.substr(pos, text.size()) != text) return kNoMatch;
          pos += text.size();
          continue;
        }
        case Item::Kind::kBalance: {
          if (pos >= subject_.size() || subject_[pos] != item.open) return kNoMatch;
          int64_t depth = 1;
          size_t end = pos + 1;
          for (; end < subject_.size() && depth > 0; ++end) {
            step();
            if (subject_[end] == item.close) {
              --depth;
            } else if (subject_[end] == item.open) {
              ++depth;
            }
          }
          if (depth > 0) return kNoMatch;
          pos = end;
          continue;
        }
        case Item::Kind::kFrontier: {
          const char before = pos == 0 ? '\0' : subject_[pos - 1];
          const char here = pos < subject_.size() ? subject_[pos] : '\0';
          if (item.set[at(before)] || !item.set[at(here)]) return kNoMatch;
          continue;
        }
        case Item::Kind::kEnd:
          if (pos != subject_.size()) return kNoMatch;
          continue;
      }
    }
    return pos;
  }

  lua_State* L_;
  std::string_view subject_;
  const std::vector<Item>& items_;
  std::array<Capture, kMaxCaptures> captures_;
  size_t count_ = 0;
  int64_t steps_ = 0;
};

std::string_view check_text(lua_State* L, int index) {
  size_t length = 0;
  const char* text = luaL_checklstring(L, index, &length);
  return {text, length};
}

/// Lua's `init` argument as an offset; kNoMatch when it is past the end.
size_t start_offset(lua_State* L, int index, size_t length) {
  const lua_Integer init = luaL_optinteger(L, index, 1);
  const auto size = static_cast<lua_Integer>(length);
  if (init > size + 1) return kNoMatch;
  if (init > 0) return static_cast<size_t>(init - 1);
  return init == 0 || init < -size ? 0 : static_cast<size_t>(size + init);
}

size_t find_plain(lua_State* L, std::string_view subject, std::string_view wanted, size_t from) {
  if (wanted.empty()) return from;
  int64_t compared = 0;
  while (from + wanted.size() <= subject.size()) {
    const void* hit = std::memchr(subject.data() + from, wanted[0], subject.size() - from - wanted.size() + 1);
    if (hit == nullptr) return kNoMatch;
    from = static_cast<size_t>(static_cast<const char*>(hit) - subject.data());
    if (std::memcmp(hit, wanted.data(), wanted.size()) == 0) return from;
    ++from;
    compared += static_cast<int64_t>(wanted.size());
    if (compared > (1 << 20)) {
      compared = 0;
      check_time(L);
    }
  }
  return kNoMatch;
}

int find_or_match(lua_State* L, bool find) {
  const std::string_view subject = check_text(L, 1), text = check_text(L, 2);
  size_t from = start_offset(L, 3, subject.size());
  if (from == kNoMatch) {
    lua_pushnil(L);
    return 1;
  }
  if (find && (lua_toboolean(L, 4) != 0 || text.find_first_of("^$*+?.([%-") == std::string_view::npos)) {
    const size_t found = find_plain(L, subject, text, from);
    if (found == kNoMatch) {
      lua_pushnil(L);
      return 1;
    }
    lua_pushinteger(L, static_cast<lua_Integer>(found + 1));
    lua_pushinteger(L, static_cast<lua_Integer>(found + text.size()));
    return 2;
  }
  const Pattern pattern = Compiler(L, text).run(true);
  Matcher matcher(L, subject, pattern);
  do {
    const size_t end = matcher.match(from);
    if (end == kNoMatch) continue;
    if (!find) return matcher.push_all(from, end, true);
    lua_pushinteger(L, static_cast<lua_Integer>(from + 1));
    lua_pushinteger(L, static_cast<lua_Integer>(end));
    return matcher.push_all(from, end, false) + 2;
  } while (++from <= subject.size() && !pattern.anchored);
  lua_pushnil(L);
  return 1;
}

int string_find(lua_State* L) { return find_or_match(L, true); }
int string_match(lua_State* L) { return find_or_match(L, false); }

/// Upvalues: subject, pattern, next offset, end of the last match (-1: none).
int gmatch_step(lua_State* L) {
  const std::string_view subject = check_text(L, lua_upvalueindex(1));
  const Pattern pattern = Compiler(L, check_text(L, lua_upvalueindex(2))).run(false);
  const lua_Integer last = lua_tointeger(L, lua_upvalueindex(4));
  Matcher matcher(L, subject, pattern);
  for (auto from = static_cast<size_t>(lua_tointeger(L, lua_upvalueindex(3))); from <= subject.size(); ++from) {
    const size_t end = matcher.match(from);
    if (end == kNoMatch || static_cast<lua_Integer>(end) == last) continue;
    lua_pushinteger(L, static_cast<lua_Integer>(end));
    lua_copy(L, -1, lua_upvalueindex(3));
    lua_copy(L, -1, lua_upvalueindex(4));
    lua_pop(L, 1);
    return matcher.push_all(from, end, true);
  }
  return 0;
}

int string_gmatch(lua_State* L) {
  const std::string_view subject = check_text(L, 1);
  check_text(L, 2);
  const size_t from = start_offset(L, 3, subject.size());
  lua_settop(L, 2);
  lua_pushinteger(L, from == kNoMatch ? static_cast<lua_Integer>(subject.size() + 1) : static_cast<lua_Integer>(from));
  lua_pushinteger(L, -1);
  lua_pushcclosure(L, gmatch_step, 4);
  return 1;
}

/// Adds what replaces one match to `buffer`, from the replacement at stack index 3.
void add_replacement(lua_State* L, luaL_Buffer* buffer, Matcher& matcher, std::string_view subject, size_t begin,
                     size_t end) {
  const int type = lua_type(L, 3);
  if (type == LUA_TSTRING || type == LUA_TNUMBER) {
    const std::string_view text = check_text(L, 3);
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '%') {
        luaL_addchar(buffer, text[i]);
        continue;
      }
      const char c = ++i < text.size() ? text[i] : '\0';
      if (c == '%') {
        luaL_addchar(buffer, '%');
      } else if (c == '0') {
        luaL_addlstring(buffer, subject.data() + begin, end - begin);
      } else if (std::isdigit(static_cast<unsigned char>(c)) != 0) {
        matcher.push_capture(static_cast<size_t>(c - '1'), begin, end);
        luaL_tolstring(L, -1, nullptr);
        lua_remove(L, -2);
        luaL_addvalue(buffer);
      } else {
        luaL_error(L, "invalid use of '%%' in replacement string");
      }
    }
    return;
  }
  if (type == LUA_TTABLE) {
    matcher.push_capture(0, begin, end);
    lua_gettable(L, 3);
  } else {
    lua_pushvalue(L, 3);
    const int count = matcher.push_all(begin, end, true);
    lua_call(L, count, 1);
  }
  if (lua_toboolean(L, -1) == 0) {
    lua_pop(L, 1);
    luaL_addlstring(buffer, subject.data() + begin, end - begin);
  } else if (lua_isstring(L, -1) == 0) {
    luaL_error(L, "invalid replacement value (a %s)", luaL_typename(L, -1));
  } else {
    luaL_addvalue(buffer);
  }
}

int string_gsub(lua_State* L) {
  const std::string_view subject = check_text(L, 1), text = check_text(L, 2);
  const int type = lua_type(L, 3);
  luaL_argexpected(L, type == LUA_TNUMBER || type == LUA_TSTRING || type == LUA_TTABLE || type == LUA_TFUNCTION, 3,
                   "string/function/table");
  const lua_Integer most = luaL_optinteger(L, 4, static_cast<lua_Integer>(subject.size() + 1));
  lua_settop(L, 3);
  const Pattern pattern = Compiler(L, text).run(true);
  Matcher matcher(L, subject, pattern);
  luaL_Buffer buffer;
  luaL_buffinit(L, &buffer);
  size_t from = 0, last = kNoMatch;
  lua_Integer count = 0;
  while (count < most) {
    const size_t end = matcher.match(from);
    if (end != kNoMatch && end != last) {
      ++count;
      add_replacement(L, &buffer, matcher, subject, from, end);
      from = last = end;
    } else if (from < subject.size()) {
      luaL_addchar(&buffer, subject[from++]);
    } else {
      break;
    }
    if (pattern.anchored) break;
  }
  if (from < subject.size()) luaL_addlstring(&buffer, subject.data() + from, subject.size() - from);
  luaL_pushresult(&buffer);
  lua_pushinteger(L, count);
  return 2;
}

}  // namespace

void install_string_patterns(lua_State* L) {
  static const luaL_Reg functions[] = {{"find", string_find},
                                       {"match", string_match},
                                       {"gmatch", string_gmatch},
                                       {"gsub", string_gsub},
                                       {nullptr, nullptr}};
  luaL_setfuncs(L, functions, 0);
}

}  // namespace cairn::dsl
