#pragma once
// A SentencePiece model as a tokenizer.json, which readers without the library need.

#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::text {

/// The special tokens of a SentencePiece model. An id of -1: it has none, and the piece is empty.
struct SpecialPiece {
  int32_t id = -1;
  std::string piece;
};
struct SpecialPieces {
  SpecialPiece bos, eos, pad, unk;
};
/// Errors: kInvalidInput for bytes that are no model.
Result<SpecialPieces> special_pieces(std::string_view model);

/// A SentencePiece model as other programs want it.
enum class PieceType { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };
struct SentencePiece {
  std::string text;
  float score = 0;
  PieceType type = PieceType::kNormal;
};
struct SentencePieces {
  std::vector<SentencePiece> pieces;  // by id
  bool bpe = false, other = false;    // else Unigram; `other`: words or characters
  std::string charsmap;               // how characters are normalised; empty: they are not
  bool dummy_prefix = true, remove_spaces = true, escape_spaces = true, suffix_spaces = false;
};
/// No pieces where the bytes are no model.
SentencePieces sentence_pieces(std::string_view model);

/// Which of the model's tokens a reader puts around a text.
struct AroundText {
  bool bos = false, eos = false;
};

/// The tokenizer.json that gives the model's ids. The two are compared on texts made of all pieces.
/// Errors: kInvalidInput for bytes that are no model; kUnsupported with the reason where no tokenizer.json gives
/// these ids.
/// Source: sentencepiece_model.proto; huggingface/tokenizers, src/normalizers and src/models.
Result<std::string> sentencepiece_as_json(std::string_view model, AroundText around = {});

/// The tokenizer.json of the bytes tokenizer: id k is byte k, and 0 ends a document.
std::string bytes_as_json();

}  // namespace cairn::text
