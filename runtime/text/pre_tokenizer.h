#pragma once
// The `pre_tokenizer` of a tokenizer.json: a normalized text -> the pieces that the model sees one at a time.
// Source: huggingface/tokenizers, src/pre_tokenizers and src/tokenizer/normalizer.rs (the five split behaviors).

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::text {

struct Piece {
  std::string text;
  bool at_start = false;  // of the whole text
  bool goes_on = false;   // with text that an earlier part ended in, no step having cut between the two
};

class PreTokenizer {
 public:
  /// `spec`: the JSON object, or null for none. Errors: kUnsupported naming a type that is not read here,
  /// kInvalidInput naming a field.
  static Result<PreTokenizer> make(const nlohmann::json& spec);

  /// Pieces of well-formed UTF-8, none empty. Threads: any.
  Result<std::vector<Piece>> apply(Piece whole) const;

 private:
  using Step = std::function<Status(Piece piece, std::vector<Piece>* out)>;
  Status add(const nlohmann::json& spec);
  Status add_split(const std::string& pattern, const std::string& behavior);
  std::vector<Step> steps_;
};

}  // namespace cairn::text
