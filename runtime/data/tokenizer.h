#pragma once
// Text <-> token ids: raw bytes, or a SentencePiece model. Threads: a Tokenizer is immutable.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/core/result.h"

namespace cairn::data {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int64_t vocab() const = 0;

  /// The id that ends a document, or -1. Bytes: 0, the byte that text does not contain. SentencePiece: the model's eos.
  virtual int32_t eod() const = 0;

  /// Appends the ids of `text`. Errors: kInvalidInput, with the byte within `text`, when it cannot be encoded
  /// (SentencePiece: not UTF-8).
  virtual Status encode(std::string_view text, std::vector<int32_t>* ids) const = 0;

  /// The text of `ids`. Not always UTF-8: a byte token may be half a character. Errors: kInvalidInput for an id
  /// outside the vocabulary.
  virtual Result<std::string> decode(std::span<const int32_t> ids) const = 0;
};

/// Errors: kInvalidInput for Kind::kNone, a model file that is missing, or is no SentencePiece model.
Result<std::unique_ptr<Tokenizer>> make_tokenizer(const TokenizerConfig& config);

/// Offset of the first byte that is not well-formed UTF-8 (RFC 3629), or -1.
int64_t find_invalid_utf8(std::string_view text);

}  // namespace cairn::data
