#include "runtime/evaluation/yaml.h"

#include <fmt/format.h>
#include <yaml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

namespace cairn::evaluation {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxDepth = 32;
constexpr int64_t kMostValues = 100'000;

Error at_line(size_t line, std::string message, ErrorCode code = ErrorCode::kInvalidInput) {
  return Error{code, fmt::format("line {}: {}", line + 1, message)};
}

bool one_of(std::string_view text, std::initializer_list<std::string_view> words) {
  return std::ranges::find(words, text) != words.end();
}

/// A plain scalar, by the implicit types of YAML 1.1.
Json plain_value(std::string_view text) {
  if (one_of(text, {"", "~", "null", "Null", "NULL"})) return nullptr;
  if (one_of(text, {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})) return true;
  if (one_of(text, {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})) return false;
  std::string_view digits = text;
  if (digits.starts_with('+')) digits.remove_prefix(1);
  int64_t whole = 0;
  const char* const end = digits.data() + digits.size();
  if (const auto [at, error] = std::from_chars(digits.data(), end, whole); error == std::errc() && at == end)
    return whole;
  // A decimal needs its point: 1e5 is a text, as PyYAML has it.
  double number = 0;
  if (digits.find('.') != digits.npos && digits.find_first_not_of("0123456789.eE+-") == digits.npos) {
    if (const auto [at, error] = std::from_chars(digits.data(), end, number); error == std::errc() && at == end) {
      return number;
    }
  }
  return std::string(text);
}

class Reader {
 public:
  explicit Reader(yaml_document_t* document) : document_(document) {}

  Result<Json> read(int node_id, int depth) {
    const yaml_node_t& node = *yaml_document_get_node(document_, node_id);
    const size_t line = node.start_mark.line;
    if (depth > kMaxDepth) return at_line(line, fmt::format("more than {} levels", kMaxDepth));
    if (++values_ > kMostValues) return at_line(line, fmt::format("more than {} values", kMostValues));
    const std::string_view tag = reinterpret_cast<const char*>(node.tag);
    switch (node.type) {
      case YAML_SCALAR_NODE: {
        std::string text(reinterpret_cast<const char*>(node.data.scalar.value), node.data.scalar.length);
        if (tag != YAML_STR_TAG) return code(line, tag, text);
        if (node.data.scalar.style == YAML_PLAIN_SCALAR_STYLE) return plain_value(text);
        return Json(std::move(text));
      }
      case YAML_SEQUENCE_NODE: {
        if (tag != YAML_SEQ_TAG) return code(line, tag, {});
        Json out = Json::array();
        for (auto* item = node.data.sequence.items.start; item < node.data.sequence.items.top; ++item) {
          RT_TRY_SET(Json one, read(*item, depth + 1));
          out.push_back(std::move(one));
        }
        return out;
      }
      case YAML_MAPPING_NODE:
        if (tag != YAML_MAP_TAG) return code(line, tag, {});
        return mapping(node, depth);
      default:
        return at_line(line, "an empty node");
    }
  }

 private:
  static Error code(size_t line, std::string_view tag, std::string_view text) {
    return at_line(
        line, fmt::format("{}{}{}: only plain values are read; no code is run", tag, text.empty() ? "" : " ", text),
        ErrorCode::kUnsupported);
  }

  Result<Json> mapping(const yaml_node_t& node, int depth) {
    Json out = Json::object();
    for (auto* pair = node.data.mapping.pairs.start; pair < node.data.mapping.pairs.top; ++pair) {
      const size_t line = yaml_document_get_node(document_, pair->key)->start_mark.line;
      const yaml_node_t& key = *yaml_document_get_node(document_, pair->key);
      if (key.type != YAML_SCALAR_NODE) return at_line(line, "a key that is no text");
      std::string name(reinterpret_cast<const char*>(key.data.scalar.value), key.data.scalar.length);
      if (name == "<<") return at_line(line, "the merge key << is not read", ErrorCode::kUnsupported);
      if (out.contains(name)) return at_line(line, fmt::format("the key \"{}\" appears twice", name));
      RT_TRY_SET(Json one, read(pair->value, depth + 1));
      out[std::move(name)] = std::move(one);
    }
    return out;
  }

  yaml_document_t* document_;
  int64_t values_ = 0;
};

struct FreeParser {
  void operator()(yaml_parser_t* parser) const { yaml_parser_delete(parser); }
};
struct FreeDocument {
  void operator()(yaml_document_t* document) const { yaml_document_delete(document); }
};

}  // namespace

Result<Json> parse_yaml(std::string_view text) {
  yaml_parser_t memory;
  if (yaml_parser_initialize(&memory) == 0) return Error{ErrorCode::kNoSpace, "no memory for a reader of YAML"};
  const std::unique_ptr<yaml_parser_t, FreeParser> parser(&memory);
  yaml_parser_set_input_string(parser.get(), reinterpret_cast<const unsigned char*>(text.data()), text.size());
  const auto wrong = [&]() {
    return at_line(parser->problem_mark.line,
                   fmt::format("not YAML: {}", parser->problem == nullptr ? "it cannot be read" : parser->problem));
  };
  yaml_document_t first, second;
  if (yaml_parser_load(parser.get(), &first) == 0) return wrong();
  const std::unique_ptr<yaml_document_t, FreeDocument> document(&first);
  if (yaml_document_get_root_node(document.get()) == nullptr) return at_line(0, "the file is empty");
  RT_TRY_SET(Json out, Reader(document.get()).read(1, 0));
  if (yaml_parser_load(parser.get(), &second) == 0) return wrong();
  const std::unique_ptr<yaml_document_t, FreeDocument> rest(&second);
  if (const yaml_node_t* root = yaml_document_get_root_node(rest.get()); root != nullptr) {
    return at_line(root->start_mark.line, "a second document: one is read from a file");
  }
  return out;
}

}  // namespace cairn::evaluation
