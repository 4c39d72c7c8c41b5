#pragma once
// The `model` of a tokenizer.json: a piece -> ids. Byte-pair encoding and Unigram; others are refused by name.
// Source: huggingface/tokenizers, src/models/bpe and src/models/unigram.

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::text {

/// Ids by text, looked up without making a string.
struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
using Vocabulary = std::unordered_map<std::string, int32_t, TextHash, std::equal_to<>>;

class SubwordModel {
 public:
  virtual ~SubwordModel() = default;

  /// Appends the ids of one piece of well-formed UTF-8. Threads: any.
  virtual void encode(std::string_view piece, std::vector<int32_t>* ids) const = 0;

  const Vocabulary& vocabulary() const { return vocabulary_; }

 protected:
  Vocabulary vocabulary_;
};

/// Errors: kUnsupported for a type or an option that is not computed here (dropout, WordPiece ...), kInvalidInput
/// naming the entry that is wrong.
Result<std::unique_ptr<SubwordModel>> make_subword_model(const nlohmann::json& spec);
Result<std::unique_ptr<SubwordModel>> make_bpe(const nlohmann::json& spec);
Result<std::unique_ptr<SubwordModel>> make_unigram(const nlohmann::json& spec);

/// "<0x0A>", the token of a byte where a model falls back to bytes.
std::string byte_token(unsigned char byte);

}  // namespace cairn::text
