#pragma once
// The little XML that S3 answers with. Strict and bounded: no doctype, no entities but the five and character
// references, depth at most 32; anything else is an error with its byte offset. Pure.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::ckpt {

struct XmlNode {
  std::string name;  // without namespace prefix
  std::string text;  // character data directly inside
  std::vector<XmlNode> children;

  const XmlNode* find(std::string_view child) const;
  /// Text of a child, or "".
  std::string get(std::string_view child) const;
};

/// The root element. Errors: kInvalidInput.
Result<XmlNode> parse_xml(std::string_view text);

}  // namespace cairn::ckpt
