#include "dsl/locate.h"

#include <algorithm>
#include <cctype>

namespace cairn::dsl {
namespace {

struct Token {
  enum class Kind { kName, kString, kNumber, kSymbol, kEnd } kind = Kind::kEnd;
  std::string text;  // a string's contents without escapes resolved
  int line = 0;
};

/// Lua's lexical rules as far as brackets and names need them. Never fails: what it does not know is a symbol.
std::vector<Token> tokenize(std::string_view text) {
  std::vector<Token> out;
  size_t at = 0;
  int line = 1;
  const auto peek = [&](size_t ahead = 0) { return at + ahead < text.size() ? text[at + ahead] : '\0'; };
  const auto long_bracket = [&]() -> int64_t {  // at '[': number of '=' or -1
    size_t k = at + 1;
    while (k < text.size() && text[k] == '=') ++k;
    return k < text.size() && text[k] == '[' ? static_cast<int64_t>(k - at - 1) : -1;
  };
  const auto skip_long = [&](int64_t level) {
    const std::string close = "]" + std::string(static_cast<size_t>(level), '=') + "]";
    const size_t begin = at + static_cast<size_t>(level) + 2;
    size_t end = text.find(close, begin);
    if (end == std::string_view::npos) end = text.size();
    const std::string inside(text.substr(std::min(begin, text.size()), end - std::min(begin, end)));
    for (size_t k = at; k < end; ++k) line += text[k] == '\n' ? 1 : 0;
    at = std::min(text.size(), end + close.size());
    return inside;
  };
  while (at < text.size()) {
    const char c = peek();
    if (c == '\n') {
      ++line;
      ++at;
    } else if (std::isspace(static_cast<unsigned char>(c)) != 0) {
      ++at;
    } else if (c == '-' && peek(1) == '-') {
      at += 2;
      const int64_t level = peek() == '[' ? long_bracket() : -1;
      if (level >= 0) {
        skip_long(level);
      } else {
        while (at < text.size() && text[at] != '\n') ++at;
      }
    } else if (c == '[' && long_bracket() >= 0) {
      const int start = line;
      out.push_back({Token::Kind::kString, skip_long(long_bracket()), start});
    } else if (c == '"' || c == '\'') {
      Token token{Token::Kind::kString, "", line};
      ++at;
      while (at < text.size() && text[at] != c && text[at] != '\n') {
        if (text[at] == '\\' && at + 1 < text.size()) {
          if (text[at + 1] == '\n') ++line;
          token.text += text[at++];
        }
        token.text += text[at++];
      }
      if (peek() == c) ++at;
      out.push_back(std::move(token));
    } else if (std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_') {
      Token token{Token::Kind::kName, "", line};
      while (std::isalnum(static_cast<unsigned char>(peek())) != 0 || peek() == '_') token.text += text[at++];
      out.push_back(std::move(token));
    } else if (std::isdigit(static_cast<unsigned char>(c)) != 0) {
      Token token{Token::Kind::kNumber, "", line};
      while (std::isalnum(static_cast<unsigned char>(peek())) != 0 || peek() == '.' ||
             ((peek() == '+' || peek() == '-') && (token.text.back() == 'e' || token.text.back() == 'E')))
        token.text += text[at++];
      out.push_back(std::move(token));
    } else {
      Token token{Token::Kind::kSymbol, std::string(1, c), line};
      ++at;
      if (c == '=' && peek() == '=') token.text += text[at++];
      if (c == '~' && peek() == '=') token.text += text[at++];
      if (c == '<' && peek() == '=') token.text += text[at++];
      if (c == '>' && peek() == '=') token.text += text[at++];
      out.push_back(std::move(token));
    }
  }
  out.push_back({Token::Kind::kEnd, "", line});
  return out;
}

bool is(const Token& token, const char* symbol) { return token.kind == Token::Kind::kSymbol && token.text == symbol; }

}  // namespace

struct TableMap::Table {
  std::string constructor;
  int first_line = 0;  // of the expression that is called: Lua reports this one
  int brace_line = 0;
  struct Item {
    std::string key;
    int line = 0;
    Table* inner = nullptr;  // the first table in its value
  };
  std::vector<Item> items;

  const Item* find(const std::string& key) const {
    for (const Item& item : items)
      if (item.key == key) return &item;
    return nullptr;
  }
};

TableMap::TableMap(std::string_view text) {
  const std::vector<Token> tokens = tokenize(text);
  struct Open {
    char bracket;
    Table* table;  // for '{'
    int positional = 0;
    bool at_start = true;  // of an item
  };
  std::vector<Open> open;
  const auto before_call = [&](size_t brace) {
    // Walks back over `a.b:c` and one pair of parentheses to the start of the expression that is called.
    size_t at = brace;
    if (at > 0 && is(tokens[at - 1], "(")) --at;
    std::string name;
    size_t first = brace;
    if (at > 0 && tokens[at - 1].kind == Token::Kind::kName) {
      name = tokens[at - 1].text;
      first = --at;
      while (at > 0 && (is(tokens[at - 1], ".") || is(tokens[at - 1], ":"))) {
        --at;
        if (at > 0 && is(tokens[at - 1], ")")) {
          int depth = 0;
          while (at > 0) {
            --at;
            if (is(tokens[at], ")")) ++depth;
            if (is(tokens[at], "(") && --depth == 0) break;
          }
        } else if (at > 0 && tokens[at - 1].kind == Token::Kind::kString) {
          --at;  // require "x":with
        }
        if (at > 0 && tokens[at - 1].kind == Token::Kind::kName) --at;
        first = at;
      }
    }
    return std::pair(name, first);
  };
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Token& token = tokens[i];
    Open* top = open.empty() ? nullptr : &open.back();
    if (top != nullptr && top->bracket == '{' && top->at_start && !is(token, "}") && token.kind != Token::Kind::kEnd) {
      Table::Item item;
      item.line = token.line;
      if (token.kind == Token::Kind::kName && is(tokens[i + 1], "=")) {
        item.key = token.text;
      } else if (is(token, "[") && tokens[i + 1].kind == Token::Kind::kString && is(tokens[i + 2], "]")) {
        item.key = tokens[i + 1].text;
      } else {
        item.key = "#" + std::to_string(++top->positional);
      }
      top->table->items.push_back(std::move(item));
      top->at_start = false;
    }
    if (is(token, "{")) {
      auto table = std::make_unique<Table>();
      const auto [name, first] = before_call(i);
      table->constructor = name;
      table->first_line = tokens[first].line;
      table->brace_line = token.line;
      if (top != nullptr && top->bracket == '{') {
        Table::Item& item = top->table->items.back();
        if (item.inner == nullptr) item.inner = table.get();
      }
      open.push_back({'{', table.get()});
      tables_.push_back(std::move(table));
    } else if (is(token, "(") || is(token, "[")) {
      open.push_back({token.text[0], nullptr});
    } else if (is(token, "}") || is(token, ")") || is(token, "]")) {
      if (!open.empty()) open.pop_back();
    } else if ((is(token, ",") || is(token, ";")) && top != nullptr && top->bracket == '{') {
      top->at_start = true;
    }
  }
}

TableMap::~TableMap() = default;
TableMap::TableMap(TableMap&&) noexcept = default;

int TableMap::line_of(const std::string& constructor, int line, const std::vector<std::string>& path) const {
  int best = line;
  size_t best_depth = 0;
  for (const auto& table : tables_) {
    if (table->constructor != constructor) continue;
    // A table a file returns has no call: any `return {` will do. Otherwise the call's line lies in the expression.
    if (constructor != "return" && (line < table->first_line || line > table->brace_line)) continue;
    const Table* in = table.get();
    size_t depth = 0;
    int found = line;
    while (in != nullptr && depth < path.size()) {
      const Table::Item* item = in->find(path[depth]);
      if (item == nullptr) break;
      found = item->line;
      ++depth;
      in = item->inner;
    }
    if (depth > best_depth) best = found, best_depth = depth;
  }
  return best;
}

std::string line_text(std::string_view text, int line) {
  for (int at = 1; at < line; ++at) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) return "";
    text.remove_prefix(end + 1);
  }
  std::string out(text.substr(0, text.find('\n')));
  while (!out.empty() && std::isspace(static_cast<unsigned char>(out.back())) != 0) out.pop_back();
  return out;
}

}  // namespace cairn::dsl
