#pragma once
// The `added_tokens` of a tokenizer.json: cut out of a text before everything else sees it. Those that are not
// `normalized` are looked for in the raw text, the others in the normalized one; leftmost first, longest first.
// Source: huggingface/tokenizers, src/tokenizer/added_vocabulary.rs.

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::text {

/// Bytes [begin, end) of a text.
struct ByteRange {
  size_t begin = 0, end = 0;
};

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool single_word = false;  // not next to a word character
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
  bool normalized = false;
  bool special = false;
};

/// A part of a text: a token, or what lies between tokens (id -1).
struct TextPart {
  size_t begin = 0, end = 0;
  int32_t id = -1;
};

class AddedTokens {
 public:
  void add(AddedToken token);
  bool empty() const { return tokens_.empty(); }

  /// Parts that cover well-formed UTF-8. Special tokens are not looked for where they would touch a range of `plain`;
  /// these ascend and are disjoint.
  std::vector<TextPart> split(std::string_view text, std::span<const ByteRange> plain = {}) const;

  /// The first special token of `text`, as it stands there; empty: none.
  std::string_view special_within(std::string_view text) const;

 private:
  /// No special one that reaches beyond `plain_from`.
  const AddedToken* longest_at(std::string_view text, size_t at, size_t plain_from) const;
  std::vector<AddedToken> tokens_;
  std::array<std::vector<size_t>, 256> by_first_;  // of the first byte, longest first
};

}  // namespace cairn::text
