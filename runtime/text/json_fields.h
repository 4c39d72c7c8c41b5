#pragma once
// Fields of tokenizer.json, each asked for with what it is expected to be.

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/core/result.h"
#include "runtime/json/json.h"

namespace cairn::text {

inline Error bad_field(std::string_view name, std::string_view expected, const nlohmann::json& found) {
  std::string text = json_text(found);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return {ErrorCode::kInvalidInput, fmt::format("\"{}\" must be {}, found {}", name, expected, text)};
}

/// The type of a step: {"type": "ByteLevel", ...}.
inline Result<std::string> type_of(const nlohmann::json& spec, std::string_view what) {
  if (!spec.is_object() || !spec.contains("type") || !spec["type"].is_string()) {
    return bad_field(what, "an object with a \"type\"", spec);
  }
  return spec["type"].get<std::string>();
}

inline Result<std::string> string_field(const nlohmann::json& spec, std::string_view name) {
  const auto found = spec.find(name);
  if (found == spec.end() || !found->is_string()) {
    return bad_field(name, "a string", found == spec.end() ? nlohmann::json() : *found);
  }
  return found->get<std::string>();
}

/// The id of a token.
inline std::optional<int32_t> token_id(const nlohmann::json& value) {
  const std::optional<int64_t> id = json_integer(value, 0, INT32_MAX);
  return id ? std::optional(static_cast<int32_t>(*id)) : std::nullopt;
}

inline Result<bool> bool_field(const nlohmann::json& spec, std::string_view name, bool absent) {
  const auto found = spec.find(name);
  if (found == spec.end() || found->is_null()) return absent;
  if (!found->is_boolean()) return bad_field(name, "true or false", *found);
  return found->get<bool>();
}

}  // namespace cairn::text
