#pragma once
// The `decoder` of a tokenizer.json: tokens as the vocabulary spells them -> text.
// Source: huggingface/tokenizers, src/decoders and the decoders among src/pre_tokenizers.

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::text {

class Decoder {
 public:
  /// `spec`: the JSON object, or null: tokens with spaces between. Errors: kUnsupported naming a type that is not read
  /// here, kInvalidInput naming a field.
  static Result<Decoder> make(const nlohmann::json& spec);

  /// Not always UTF-8: bytes that make no character stay as they are. Threads: any.
  Result<std::string> apply(std::vector<std::string> tokens) const;

 private:
  using Step = std::function<Status(std::vector<std::string>* tokens)>;
  Status add(const nlohmann::json& spec);
  std::vector<Step> steps_;
  bool spaced_ = false;
};

}  // namespace cairn::text
