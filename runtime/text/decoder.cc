#include "runtime/text/decoder.h"

#include <fmt/format.h>

#include <cctype>

#include "runtime/text/byte_level.h"
#include "runtime/text/json_fields.h"
#include "runtime/text/regex.h"
#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

using nlohmann::json;

std::string joined(const std::vector<std::string>& tokens) {
  std::string out;
  for (const std::string& token : tokens) out += token;
  return out;
}

/// The byte of "<0x0A>", or -1.
int byte_of(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    if (std::isxdigit(static_cast<unsigned char>(c)) == 0) return -1;
    value = value * 16 + (c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
  }
  return value;
}

Result<int64_t> count_field(const json& spec, std::string_view name) {
  const auto found = spec.find(name);
  const auto count = found == spec.end() ? std::nullopt : json_integer(*found, 0, INT64_MAX);
  if (!count) return bad_field(name, "a number", spec);
  return *count;
}

std::string without_ends(std::string_view text, const std::string& content, int64_t start, int64_t stop) {
  for (; start > 0 && text.starts_with(content); --start) text.remove_prefix(content.size());
  for (; stop > 0 && text.ends_with(content); --stop) text.remove_suffix(content.size());
  return std::string(text);
}

}  // namespace

Result<Decoder> Decoder::make(const json& spec) {
  Decoder out;
  if (spec.is_null()) {
    out.spaced_ = true;
  } else {
    RT_TRY(out.add(spec).with("decoder"));
  }
  return out;
}

Status Decoder::add(const json& spec) {
  RT_TRY_SET(const std::string type, type_of(spec, "decoder"));
  if (type == "Sequence") {
    const auto list = spec.find("decoders");
    if (list == spec.end() || !list->is_array()) return bad_field("decoders", "a list", spec);
    for (const json& step : *list) RT_TRY(add(step));
  } else if (type == "ByteLevel") {
    steps_.push_back([](std::vector<std::string>* tokens) -> Status {
      for (std::string& token : *tokens) token = alphabet_to_bytes(token);
      return {};
    });
  } else if (type == "ByteFallback") {
    steps_.push_back([](std::vector<std::string>* tokens) -> Status {
      for (std::string& token : *tokens) {
        if (const int byte = byte_of(token); byte >= 0) token.assign(1, static_cast<char>(byte));
      }
      return {};
    });
  } else if (type == "Fuse") {
    steps_.push_back([](std::vector<std::string>* tokens) -> Status {
      *tokens = {joined(*tokens)};
      return {};
    });
  } else if (type == "Strip") {
    RT_TRY_SET(const std::string content, string_field(spec, "content"));
    if (content.empty() || content.size() != utf8_length(content[0]))
      return bad_field("content", "one character", spec["content"]);
    RT_TRY_SET(const int64_t start, count_field(spec, "start"));
    RT_TRY_SET(const int64_t stop, count_field(spec, "stop"));
    steps_.push_back([=](std::vector<std::string>* tokens) -> Status {
      for (std::string& token : *tokens) token = without_ends(token, content, start, stop);
      return {};
    });
  } else if (type == "Replace") {
    RT_TRY_SET(const Regex pattern, Regex::from_json(spec));
    RT_TRY_SET(const std::string content, string_field(spec, "content"));
    steps_.push_back([pattern, content](std::vector<std::string>* tokens) -> Status {
      for (std::string& token : *tokens) {
        RT_TRY_SET(token, pattern.replaced(token, content));
      }
      return {};
    });
  } else if (type == "Metaspace") {
    RT_TRY_SET(const std::string replacement, string_field(spec, "replacement"));
    RT_TRY_SET(const Regex pattern, Regex::literal(replacement));
    const bool by_scheme = spec.contains("prepend_scheme");
    RT_TRY_SET(const bool prefix, bool_field(spec, "add_prefix_space", true));
    const bool drop_first = by_scheme ? spec["prepend_scheme"] != "never" : prefix;
    steps_.push_back([=](std::vector<std::string>* tokens) -> Status {
      for (size_t k = 0; k < tokens->size(); ++k) {
        RT_TRY_SET((*tokens)[k], pattern.replaced((*tokens)[k], k == 0 && drop_first ? "" : " "));
      }
      return {};
    });
  } else {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("the type {} is not read here; known are ByteFallback, ByteLevel, Fuse, Metaspace, "
                             "Replace, Sequence, Strip",
                             type)};
  }
  return {};
}

Result<std::string> Decoder::apply(std::vector<std::string> tokens) const {
  if (spaced_) return fmt::format("{}", fmt::join(tokens, " "));
  for (const Step& step : steps_) RT_TRY(step(&tokens));
  return joined(tokens);
}

}  // namespace cairn::text
