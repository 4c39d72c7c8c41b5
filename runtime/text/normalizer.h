#pragma once
// The `normalizer` of a tokenizer.json: text -> text, before it is cut into pieces. Unicode normal forms come from ICU,
// restricted to the characters that the `tokenizers` package's tables know.
// Source: huggingface/tokenizers, src/normalizers; spm_precompiled for the type Precompiled.

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/text/tokenizer.h"

namespace cairn::text {

class Normalizer {
 public:
  /// `spec`: the JSON object, or null for none. Errors: kUnsupported naming a type that is not read here,
  /// kInvalidInput naming a field.
  static Result<Normalizer> make(const nlohmann::json& spec);

  /// Of well-formed UTF-8. Threads: any.
  Result<std::string> apply(std::string_view text, Part part = {}) const;

  bool empty() const { return steps_.empty(); }

 private:
  using Step = std::function<Result<std::string>(std::string, Part)>;
  Status add(const nlohmann::json& spec);
  std::vector<Step> steps_;
};

}  // namespace cairn::text
